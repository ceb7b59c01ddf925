//! Tests of `tern lab storm` itself: it finds differences, notices a storm without moves, and
//! leaves nothing behind.

use super::task_run::{report, tool};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;

/// Prints whether it was traced: always `0` in the native run, and also `somebody` in the storm.
const TELLTALE: &str = "for i in $(seq 150); do grep -h TracerPid /proc/$$/status; done | sed 's/[1-9].*/somebody/' \
                        | sort -u; kill -TERM $$";

#[test]
fn differences_and_missing_moves_are_reported() {
    let cluster = Cluster::up("storm-tool").unwrap();
    let seen = tool(&cluster, &["--json", "--seed", "3", "--every", "5..30ms", "--", "bash", "-c", TELLTALE]);
    let end = { seen }.output().unwrap();
    let found = report(&end).unwrap();
    assert_eq!(end.status.code(), Some(1), "{}", found.text());
    assert!(found.moves.moves > 0 && !found.nondeterministic, "{}", found.text());
    assert_eq!(found.status, "signal 15");
    assert_eq!(found.differences.len(), 1, "{}", found.text());
    assert_eq!(found.differences[0].what, "stdout");
    assert!(found.differences[0].how.contains("+TracerPid:\tsomebody"), "{}", found.text());

    // A command that is that quick cannot be moved.
    let end = tool(&cluster, &["--json", "--every", "2s", "--", "true"]).output().unwrap();
    assert_eq!(end.status.code(), Some(2), "{}", String::from_utf8_lossy(&end.stderr));
    let end = tool(&cluster, &["--json", "--every", "2000ms", "--", "true"]).output().unwrap();
    let found = report(&end).unwrap();
    assert_eq!((end.status.code(), found.moves.moves, found.runs), (Some(3), 0, 5), "{}", found.text());

    // Random output is not blamed on Tern.
    let chance = "cat /proc/sys/kernel/random/uuid >file; for i in $(seq 100); do cat file; done | uniq";
    let end = tool(&cluster, &["--json", "--", "sh", "-c", chance]).output().unwrap();
    let found = report(&end).unwrap();
    assert!(found.nondeterministic && found.differences.len() == 2, "{}", found.text());

    // Processes left behind are ended and reported; the native run leaves one as well.
    let behind = "sleep 1000 & setsid sh -c 'sleep 1000 & echo $0' & wait $!";
    let end = tool(&cluster, &["--json", "--moves", "0", "--", "bash", "-c", behind]).output().unwrap();
    assert_eq!(end.status.code(), Some(0), "{}", report(&end).unwrap().text());
    let left = cluster
        .run(1, &["sh", "-c", "ls -d /tmp/tern-storm-* 2>&1; ps -eo args | grep '^sleep'; true"])
        .unwrap();
    let left = String::from_utf8_lossy(&left);
    assert!(left.contains("No such file") && !left.contains("sleep"), "{left}");
}

#[test]
fn own_lab_is_removed_at_the_end() {
    // Holds the lab slot, so that no other lab slows this one.
    let cluster = Cluster::bare("storm-turn").unwrap();
    let name = format!("own-storm-{}", std::process::id());
    let place = Path::new("/run/tern-lab").join(&name);
    let storm = |script: &str| {
        let mut command = cluster.on_machine("tern");
        command.args([
            "lab", "storm", "--lab", &name, "--seed", "1", "--every", "10..50ms", "--", "bash", "-c", script,
        ]);
        command
    };
    let loop_ = "for ((i = 0; i < 400000; i++)); do :; done; echo $i";
    let end = storm(loop_).output().unwrap();
    let said = String::from_utf8_lossy(&end.stdout);
    assert_eq!(end.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&end.stderr));
    assert!(said.contains("differences  0"), "{said}");
    assert!(!place.exists());

    // Interrupted in the middle, it ends by that signal, and removes everything.
    let mut running = storm("touch /run/begun; sleep 1000").stdout(Stdio::null()).spawn().unwrap();
    let lab = || tern_lab::Lab::open(&name.parse().unwrap());
    let until = Instant::now() + Duration::from_secs(60);
    while !lab().is_ok_and(|lab| lab.node(1).path("/run/begun").is_ok_and(|file| file.exists())) {
        assert!(Instant::now() < until && running.try_wait().unwrap().is_none(), "the command never ran");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(Command::new("kill").arg(running.id().to_string()).status().unwrap().success());
    let status = running.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(15));
    assert!(!place.exists());
}
