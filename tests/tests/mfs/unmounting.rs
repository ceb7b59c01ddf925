//! File systems that other nodes have looked at are unmounted.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::wait_until;

/// How long a file system may be busy after its last use by another node.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Two nodes; on node 2 are two file systems, at /tmp/d and below it, which node 1 has looked at.
fn looked_at(name: &str) -> Cluster {
    let cluster = Cluster::with_nodes(name, 2).unwrap();
    cluster.run(1, &["sh", "-ec", "mkdir -p /mfs; mount.mfs mymfs /mfs"]).unwrap();
    let make = "mkdir /tmp/d; mount -t tmpfs none /tmp/d; mkdir /tmp/d/below; mount -t tmpfs none /tmp/d/below; \
        cd /tmp/d; mkdir -p a/b; echo content > a/b/file; ln -s file a/b/link; echo other > a/b/other; \
        mkdir below/c; echo below > below/c/file";
    cluster.run(2, &["sh", "-ec", make]).unwrap();
    let look = "ls -lR /mfs/2/tmp/d; cat /mfs/2/tmp/d/a/b/link; cat /mfs/2/tmp/d/below/c/file; stat /mfs/2/tmp/d/a/*";
    cluster.run(1, &["sh", "-ec", look]).unwrap();
    cluster
}

/// Whether node 2 could unmount this.
fn unmounts(cluster: &Cluster, at: &str) -> bool {
    cluster.run(2, &["umount", at]).is_ok()
}

#[test]
fn file_system_is_unmounted_after_other_nodes_have_looked_at_it() {
    let cluster = looked_at("mfsumount");
    wait_until("the lower file system is unmounted", TIMEOUT, || unmounts(&cluster, "/tmp/d/below")).unwrap();
    // A process that keeps a file open on another node keeps the file system busy.
    let line =
        "exec 3< /mfs/2/tmp/d/a/b/file; echo open; read more; cat <&3; exec 3<&-; echo closed; read end";
    let mut command = cluster.command(1, "sh");
    command.args(["-c", line]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut reader = command.spawn().unwrap();
    let (mut ask, said) = (reader.stdin.take().unwrap(), reader.stdout.take().unwrap());
    let mut said = BufReader::new(said).lines();
    assert_eq!(said.next().unwrap().unwrap(), "open");
    assert!(!unmounts(&cluster, "/tmp/d"), "a file is open");
    writeln!(ask).unwrap();
    assert_eq!(said.next().unwrap().unwrap(), "content");
    assert_eq!(said.next().unwrap().unwrap(), "closed");
    wait_until("the file system is unmounted", TIMEOUT, || unmounts(&cluster, "/tmp/d")).unwrap();
    // Other nodes see the directory that was below the mount.
    cluster.run(2, &["sh", "-ec", "mkdir -p /tmp/d/a; echo now > /tmp/d/a/now"]).unwrap();
    assert_eq!(cluster.run(1, &["cat", "/mfs/2/tmp/d/a/now"]).unwrap(), b"now\n");
    assert!(cluster.run(1, &["ls", "/mfs/2/tmp/d/a/b"]).is_err());
    writeln!(ask).unwrap();
    assert!(reader.wait().unwrap().success());
}

/// A process on another node keeps its working directory after a local program has renamed the
/// directory, although the server keeps no descriptor of it.
#[test]
fn idle_directory_is_found_again_by_its_handle() {
    let cluster = looked_at("mfsidle");
    let line = "cd /mfs/2/tmp/d/a/b; exec 2>&1; cat file; while read line; do eval \"$line\"; echo end; done";
    let mut command = cluster.command(1, "sh");
    command.args(["-c", line]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut reader = command.spawn().unwrap();
    let (mut ask, said) = (reader.stdin.take().unwrap(), reader.stdout.take().unwrap());
    let mut said = BufReader::new(said).lines();
    assert_eq!(said.next().unwrap().unwrap(), "content");
    let mut run = |line: &str| {
        writeln!(ask, "{line}").unwrap();
        let lines = std::iter::from_fn(|| said.next()).map(Result::unwrap).take_while(|line| line != "end");
        lines.collect::<Vec<String>>().join(" ")
    };
    let held = || {
        let count = "find /proc/[0-9]*/fd -lname '/tmp/d*' 2> /dev/null | wc -l";
        String::from_utf8(cluster.run(2, &["sh", "-c", count]).unwrap()).unwrap().trim() != "0"
    };
    wait_until("the server has closed idle objects", TIMEOUT, || !held()).unwrap();
    cluster.run(2, &["sh", "-ec", "cd /tmp/d; mv a/b moved; rm moved/other"]).unwrap();
    assert_eq!(run("cat file; echo new > new; ls"), "content file link new");
    wait_until("the server has closed them again", TIMEOUT, || !held()).unwrap();
    // Another file has the name, and perhaps the inode number.
    cluster.run(2, &["sh", "-ec", "cd /tmp/d/moved; rm file; echo again > file"]).unwrap();
    assert_eq!(run("cat file; ls"), "again file link new");
    drop(ask);
    assert!(reader.wait().unwrap().success());
}
