//! POSIX semantics as applications expect them: programs must have the same result on /mfs as on
//! the disk.
//!
//! TERN_KNOWN=try compares the known differences as well.

use anyhow::{Context, Result};
use std::path::Path;
use std::process::Stdio;
use tern_tests::cluster::Cluster;

/// The folder of the tasks.
const TASKS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tasks");

/// Seconds for one task.
const TASK_TIMEOUT_SECS: &str = "150";

/// Lines containing one of these texts are known to differ, each with the reason.
const KNOWN_DIFFERENCES: [(&str, &str); 3] = [
    (
        "without a name",
        "O_TMPFILE: fuser has no TMPFILE, so it is ENOTSUP, and programs make a file with a name",
    ),
    (
        "list, granted, open",
        "what an ACL grants by name: the client's kernel knows modes only (FUSE_POSIX_ACL)",
    ),
    ("list, masked, open", "the same"),
];

/// Bookings of each process.
const BOOKINGS: u32 = 60;

fn mounted(prefix: &str, nodes: u16, on: &[u16]) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(prefix, nodes)?;
    for node in on {
        cluster.run(*node, &["mkdir", "-p", "/mfs"])?;
        cluster.run(*node, &["mount.mfs", "mymfs", "/mfs"])?;
    }
    Ok(cluster)
}

fn task(cluster: &Cluster, node: u16, program: &str, name: &str, directory: &str) -> Result<String> {
    let mut command = cluster.command(node, "timeout");
    let end = command
        .args([TASK_TIMEOUT_SECS, program])
        .arg(Path::new(TASKS).join(name))
        .arg(directory)
        .output()?;
    let (out, err) = (String::from_utf8_lossy(&end.stdout), String::from_utf8_lossy(&end.stderr));
    Ok(format!("{out}{err}{}", end.status))
}

/// The output lines without those that are known to differ.
fn without_known_differences(said: &str) -> Vec<&str> {
    let all = std::env::var_os("TERN_KNOWN").is_some();
    said.lines()
        .filter(|line| all || !KNOWN_DIFFERENCES.iter().any(|(known, _)| line.contains(known)))
        .collect()
}

/// Runs one task in a directory on node 2 locally, and in another one from node 1, and compares the
/// outputs.
fn same_as_on_the_disk(cluster: &Cluster, program: &str, name: &str) -> Result<()> {
    cluster.run(2, &["sh", "-c", "rm -rf /tmp/there /tmp/here; mkdir -m 777 /tmp/there /tmp/here"])?;
    let there = task(cluster, 2, program, name, "/tmp/there")?;
    let here = task(cluster, 1, program, name, "/mfs/2/tmp/here")?;
    let (there, here) = (without_known_differences(&there), without_known_differences(&here));
    let differ: Vec<String> = there
        .iter()
        .zip(&here)
        .filter(|(there, here)| there != here)
        .map(|(there, here)| format!("disk: {there}\n/mfs: {here}"))
        .take(20)
        .collect();
    assert!(differ.is_empty(), "{}", differ.join("\n"));
    assert_eq!(here.len(), there.len(), "{:?}", here.last());
    assert!(there.len() > 200 && there.last() == Some(&"exit status: 0"), "{:?}", there.last());
    Ok(())
}

#[test]
fn calls_follow_posix() {
    let cluster = mounted("mfsposix", 2, &[1]).unwrap();
    same_as_on_the_disk(&cluster, "/usr/bin/python3", "posix.py").unwrap();
}

#[test]
fn programs_have_the_same_results_as_on_the_disk() {
    let cluster = mounted("mfsprograms", 2, &[1]).unwrap();
    same_as_on_the_disk(&cluster, "bash", "programs.sh").unwrap();
}

/// Two programs on other nodes and a local one of the server update one database at once.
fn run_bookings(cluster: &Cluster, mode: &str, bookers: &[(u16, &str, &str)]) -> Result<()> {
    let start = |(node, place, name): &(u16, &str, &str)| {
        let mut command = cluster.command(*node, "timeout");
        command.args([TASK_TIMEOUT_SECS, "/usr/bin/python3"]).arg(Path::new(TASKS).join("ledger.py"));
        let command = command.arg(format!("{place}/{mode}.db")).args([name, &*BOOKINGS.to_string(), mode]);
        command.stdout(Stdio::piped()).spawn()
    };
    let children = bookers.iter().map(start).collect::<Result<Vec<_>, _>>()?;
    for child in children {
        let end = child.wait_with_output()?;
        assert_eq!(String::from_utf8_lossy(&end.stdout), "booked\n", "{mode}");
    }
    // Each saw all bookings that were made before its own.
    let look = "pragma integrity_check; select count(*), count(distinct before), max(before) from booked";
    let booked = bookers.len() * BOOKINGS as usize * 4 / 5;
    for (node, place, _) in bookers {
        let said = cluster.run(*node, &["sqlite3", &format!("{place}/{mode}.db"), look])?;
        assert_eq!(
            String::from_utf8_lossy(&said),
            format!("ok\n{booked}|{booked}|{}\n", booked - 1),
            "{mode}"
        );
    }
    Ok(())
}

#[test]
fn database_is_coherent_across_nodes() {
    let cluster = mounted("mfsledger", 3, &[1, 3]).unwrap();
    cluster.run(2, &["mkdir", "-p", "/tmp/ledger"]).context("no place").unwrap();
    let all = [(1, "/mfs/2/tmp/ledger", "one"), (3, "/mfs/2/tmp/ledger", "three"), (2, "/tmp/ledger", "two")];
    run_bookings(&cluster, "delete", &all).unwrap();
    run_bookings(&cluster, "persist", &all).unwrap();
}
