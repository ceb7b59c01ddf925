//! The daemons die and restart while a program is away: the program does not notice.

use super::{Case, LONG_GIVE_UP_AFTER, SLACK, SUSPEND_AFTER, run_cases, start_away, two_nodes};
use anyhow::{Result, bail};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{await_nothing_left, await_up, kill_daemon, start_daemon};

/// The daemons of one or both sides die and restart while the program is away, and it comes home at
/// the end.
fn daemons_restart(cluster: &Cluster, nodes: &[u16], name: &str) -> Result<()> {
    let mut process = start_away(cluster, name)?;
    for &node in nodes {
        kill_daemon(cluster, node)?;
        // The program must continue while there is no daemon.
        std::thread::sleep(Duration::from_millis(700));
    }
    if process.has_ended() {
        bail!("it has ended: {}", process.output_so_far());
    }
    for &node in nodes {
        start_daemon(cluster, node, &[])?;
    }
    await_up(cluster, 2)?;
    match cluster.location(process.pid())? {
        Some((2, _)) => {}
        other => bail!("mps of the new daemon reports {other:?} for a process on node 2"),
    }
    process.migrate("home")?;
    process.migrate("2")?;
    process.finish_correctly(SLACK)?;
    await_nothing_left(cluster, &[1, 2], SLACK)
}

#[test]
fn daemon_restart_is_not_noticed() {
    let cluster = two_nodes("faults-daemons", SUSPEND_AFTER, LONG_GIVE_UP_AFTER);
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for (side, nodes) in [("home", &[1][..]), ("away", &[2]), ("both", &[1, 2])] {
        for name in ["pipe", "registers"] {
            let case = move || daemons_restart(cluster, nodes, name);
            cases.push((format!("{side}, {name}"), Box::new(case)));
        }
    }
    run_cases(cluster, cases);
}
