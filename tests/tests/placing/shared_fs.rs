//! Placed commands directly use a file system that their node shares with their home. Here this is
//! a directory of the machine that all nodes have.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{configure, wait_until};
use tern_tests::runs::outcome::result_of;

/// An unprivileged user.
const NOBODY: &str = "65534";

struct Shared(PathBuf);

impl Shared {
    fn new(name: &str) -> Self {
        let at = std::env::temp_dir().join(format!("tern-{name}-{}", std::process::id()));
        std::fs::create_dir(&at).unwrap();
        std::fs::set_permissions(&at, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        Self(at)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

fn up(name: &str, directory: &Path, declare: &[(u16, &Path)]) -> Cluster {
    let cluster = Cluster::with_shared(name, 2, directory).unwrap();
    for (node, path) in declare {
        configure(&cluster, *node, &format!("shared = [{path:?}]")).unwrap();
    }
    let all_up = || cluster.run(1, &["mexec", "-n", "2", "true"]).is_ok();
    wait_until("node 2 runs commands", Duration::from_secs(20), all_up).unwrap();
    cluster
}

/// Places a shell command of node 1 on node 2, in this directory, as an unprivileged user.
fn placed(cluster: &Cluster, directory: &Path, line: &str) -> (Option<i32>, String, String) {
    let mut command = cluster.command(1, "env");
    command.arg("-C").arg(directory).args([
        "setpriv",
        "--reuid",
        NOBODY,
        "--regid",
        NOBODY,
        "--clear-groups",
        "mexec",
        "-n",
        "2",
        "sh",
        "-c",
    ]);
    result_of(&command.arg(line).stdin(Stdio::null()).output().unwrap())
}

/// Prints the type of the file system of its directory; `fuse` if it is accessed through home.
const KIND: &str = "stat -f -c %T . | cut -c1-4";

#[test]
fn shared_file_system_is_used_directly() {
    let shared = Shared::new("placedshared");
    let at = &shared.0;
    let cluster = up("placedshared", at, &[(1, at), (2, at)]);
    let of = |directory: &Path| placed(&cluster, directory, KIND).1;
    assert_eq!(of("/tmp".as_ref()), "fuse\n");
    assert_ne!(of(at), "fuse\n", "{}", placed(&cluster, at, "cat /proc/self/mountinfo").1);
    // Each node sees at once what the other creates and removes, and the rights are the same.
    for n in 0..20 {
        std::fs::write(at.join("a"), n.to_string()).unwrap();
        let line = "cat a && echo $((1 + $(cat a))) > b && ! test -e c && touch c";
        assert_eq!(placed(&cluster, at, line), (Some(0), n.to_string(), String::new()));
        assert_eq!(std::fs::read_to_string(at.join("b")).unwrap(), format!("{}\n", n + 1));
        std::fs::remove_file(at.join("c")).unwrap();
    }
    std::fs::set_permissions(at.join("a"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    assert_eq!(placed(&cluster, at, "cat a; echo $PWD").1, format!("{}\n", at.display()));
    let refused = placed(&cluster, at, "cat a");
    assert!(refused.0 == Some(1) && refused.2.contains("Permission denied"), "{refused:?}");
}

#[test]
fn undeclared_or_different_directory_is_used_through_home() {
    let shared = Shared::new("placedunshared");
    let at = &shared.0;
    let below = at.join("below");
    std::fs::create_dir(&below).unwrap();
    for declare in [&[(1, &**at)][..], &[(2, at)], &[(1, at), (2, &below)]] {
        let cluster = up("placedunshared", at, declare);
        assert_eq!(placed(&cluster, at, KIND).1, "fuse\n", "{declare:?}");
        assert_eq!(placed(&cluster, &below, KIND).1, "fuse\n", "{declare:?}");
        std::fs::write(at.join("a"), "a").unwrap();
        assert_eq!(placed(&cluster, at, "cat a").1, "a", "{declare:?}");
    }
    // The same name for different directories.
    let cluster = Cluster::with_nodes("placedother", 2).unwrap();
    for node in [1, 2] {
        cluster.run(node, &["sh", "-c", &format!("mkdir /srv/own && echo {node} > /srv/own/a")]).unwrap();
        configure(&cluster, node, "shared = [\"/srv/own\"]").unwrap();
    }
    wait_until("node 2 runs commands", Duration::from_secs(20), || {
        cluster.run(1, &["mexec", "-n", "2", "true"]).is_ok()
    })
    .unwrap();
    assert_eq!(placed(&cluster, "/srv/own".as_ref(), "cat a").1, "1\n");
}
