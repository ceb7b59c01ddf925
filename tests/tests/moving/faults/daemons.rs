//! The nodes' daemons die and come back while a program is away: it does not notice.

use super::{Case, PATIENT, SLACK, SUSPEND_AFTER, away, judge, two_nodes};
use anyhow::{Result, bail};
use std::time::Duration;
use tern_tests::breaking::{await_up, kill_daemon, nothing_left, start_daemon};
use tern_tests::cluster::Cluster;

/// The daemons of both sides, or one, die and come back while the program is away, and it comes home at the end.
fn daemons_restart(cluster: &Cluster, nodes: &[u16], name: &str) -> Result<()> {
    let mut patient = away(cluster, name)?;
    for &node in nodes {
        kill_daemon(cluster, node)?;
        // A while without, in which it must go on.
        std::thread::sleep(Duration::from_millis(700));
    }
    if patient.ended() {
        bail!("it has ended: {}", patient.so_far());
    }
    for &node in nodes {
        start_daemon(cluster, node, &[])?;
    }
    await_up(cluster, 2)?;
    match cluster.whereabouts(patient.pid())? {
        Some((2, _)) => {}
        other => bail!("mps of the new daemon says {other:?} of a process on node 2"),
    }
    patient.go("home")?;
    patient.go("2")?;
    patient.finishes_rightly(SLACK)?;
    nothing_left(cluster, &[1, 2], SLACK)
}

#[test]
fn come_and_go_unnoticed() {
    let cluster = two_nodes("faults-daemons", SUSPEND_AFTER, PATIENT);
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for (side, nodes) in [("home", &[1][..]), ("away", &[2]), ("both", &[1, 2])] {
        for name in ["pipe", "registers"] {
            let case = move || daemons_restart(cluster, nodes, name);
            cases.push((format!("{side}, {name}"), Box::new(case)));
        }
    }
    judge(cluster, cases);
}
