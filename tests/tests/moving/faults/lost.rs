//! A node, a shim or a guest is lost while a program is away. With proof of the loss the other half
//! ends at once, without proof after its timeout; and nothing is left.

use super::{
    Case, GIVE_UP_AFTER, GUEST_END_DELAY, LONG_GIVE_UP_AFTER, SLACK, SUSPEND_AFTER, damaged_move, run_cases,
    start_away, two_nodes,
};
use anyhow::{Result, bail};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{Fault, await_nothing_left, await_up, kill_shims};

/// Checks that the loss of a process is logged at home.
fn check_loss_logged(cluster: &Cluster, pid: i32) -> Result<()> {
    let text = cluster.run(1, &["sh", "-c", "cat /run/tern/shims/*.log"])?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let line = text.lines().find(|line| line.contains("ERROR") && line.contains(&format!("pid={pid}")));
    match line {
        Some(line) if line.contains("lost") => Ok(()),
        other => bail!("no error about the loss of {pid} in the logs of home: {other:?}"),
    }
}

/// The node never comes back: home gives it up after the configured time, not before.
fn node_never_returns(cluster: &Cluster) -> Result<()> {
    let mut process = start_away(cluster, "pipe")?;
    let pid = process.pid();
    cluster.lab().kill(2)?;
    let took = process.await_loss(Duration::from_secs((SUSPEND_AFTER + GIVE_UP_AFTER).into()) + SLACK)?;
    if took < Duration::from_secs(GIVE_UP_AFTER.into()) {
        bail!("home gave it up after only {took:?} without proof");
    }
    check_loss_logged(cluster, pid)?;
    cluster.lab().restart(2)?;
    await_up(cluster, 2)?;
    await_nothing_left(cluster, &[1, 2], SLACK)
}

/// The home node dies: its guests end by themselves.
fn home_dies(cluster: &Cluster) -> Result<()> {
    let process = start_away(cluster, "pipe")?;
    cluster.lab().kill(1)?;
    let within = Duration::from_secs(GIVE_UP_AFTER.into()) + GUEST_END_DELAY + SLACK;
    let left = await_nothing_left(cluster, &[2], within);
    drop(process);
    cluster.lab().restart(1)?;
    await_up(cluster, 2)?;
    left
}

#[test]
fn loss_without_proof_ends_after_the_timeout() {
    let cluster = two_nodes("faults-lost", SUSPEND_AFTER, GIVE_UP_AFTER);
    let cluster = &cluster;
    let cases: Vec<(String, Case<'_>)> = vec![
        ("node".into(), Box::new(|| node_never_returns(cluster))),
        ("home".into(), Box::new(|| home_dies(cluster))),
    ];
    run_cases(cluster, cases);
}

/// The shim is killed: its node reports that, which is proof.
fn shim_killed(cluster: &Cluster) -> Result<()> {
    let mut process = start_away(cluster, "pipe")?;
    let pid = process.pid();
    kill_shims(cluster, 2)?;
    let took = process.await_loss(SLACK)?;
    check_loss_logged(cluster, pid)?;
    eprintln!("  lost {} ms after its shim", took.as_millis());
    await_nothing_left(cluster, &[1, 2], SLACK)
}

/// The node dies and restarts at once: its new daemon has no such shim, which is proof.
fn node_rebooted(cluster: &Cluster) -> Result<()> {
    let mut process = start_away(cluster, "pipe")?;
    let pid = process.pid();
    cluster.lab().restart(2)?;
    process.await_loss(Duration::from_secs(SUSPEND_AFTER.into()) + SLACK)?;
    check_loss_logged(cluster, pid)?;
    await_up(cluster, 2)?;
    await_nothing_left(cluster, &[1, 2], SLACK)
}

/// Kills a guest process on node 2, as the kernel does when memory runs out.
fn kill_guest(cluster: &Cluster, pid: i32) -> Result<()> {
    let mark = format!("tern:1/{pid}");
    let table = cluster.run(2, &["ps", "-e", "-o", "pid=,args="])?;
    let table = String::from_utf8_lossy(&table).into_owned();
    let guest = table.lines().find(|line| line.contains(&mark)).and_then(|l| l.split_whitespace().next());
    let Some(guest) = guest else { bail!("no {mark} in ps on node 2: {table}") };
    cluster.run(2, &["kill", "-KILL", guest])?;
    Ok(())
}

fn guest_killed(cluster: &Cluster) -> Result<()> {
    let mut process = start_away(cluster, "pipe")?;
    kill_guest(cluster, process.pid())?;
    process.await_loss(SLACK)?;
    await_nothing_left(cluster, &[1, 2], SLACK)
}

/// The guest process is killed while its shim prepares it for the way home, or sends it.
fn departing_guest_killed(cluster: &Cluster, point: &str) -> Result<()> {
    let fault = Fault::arm(cluster, 2, point)?;
    // Its memory is so large that a thread is stopped to prepare it.
    let mut process = start_away(cluster, "heap")?;
    let pid = process.pid();
    if let Ok(()) = damaged_move(&process, cluster, &fault, "home", || kill_guest(cluster, pid))? {
        bail!("it has moved");
    }
    process.await_loss(SLACK)?;
    await_nothing_left(cluster, &[1, 2], SLACK)
}

/// The program is killed at home by its pid, while its node is unreachable: its guest ends once the
/// link is healed.
fn killed_while_cut(cluster: &Cluster) -> Result<()> {
    let mut process = start_away(cluster, "pipe")?;
    cluster.lab().cut(Cable::Node(2))?;
    std::thread::sleep(Duration::from_millis(200));
    cluster.run(1, &["kill", "-KILL", &process.pid().to_string()])?;
    process.await_loss(SLACK)?;
    cluster.lab().heal_all()?;
    await_up(cluster, 2)?;
    await_nothing_left(cluster, &[1, 2], SLACK)
}

/// The home's shim is killed: no calls can be performed without it, so the program ends, and no
/// guest keeps running.
fn home_shim_killed(cluster: &Cluster) -> Result<()> {
    let mut process = start_away(cluster, "pipe")?;
    kill_shims(cluster, 1)?;
    process.await_loss(SLACK)?;
    await_nothing_left(cluster, &[1, 2], SLACK)
}

/// The home node dies and restarts at once: its new daemon has no such shim, which is proof for the
/// guest.
fn home_rebooted(cluster: &Cluster) -> Result<()> {
    let process = start_away(cluster, "pipe")?;
    cluster.lab().restart(1)?;
    await_up(cluster, 2)?;
    let left = await_nothing_left(cluster, &[1, 2], Duration::from_secs(SUSPEND_AFTER.into()) + SLACK);
    drop(process);
    left
}

#[test]
fn loss_with_proof_ends_at_once() {
    let cluster = two_nodes("faults-proof", SUSPEND_AFTER, LONG_GIVE_UP_AFTER);
    let cluster = &cluster;
    let cases: Vec<(String, Case<'_>)> = vec![
        ("shim".into(), Box::new(|| shim_killed(cluster))),
        ("guest".into(), Box::new(|| guest_killed(cluster))),
        ("guest, prepared".into(), Box::new(|| departing_guest_killed(cluster, "source:prepare"))),
        ("guest, sent".into(), Box::new(|| departing_guest_killed(cluster, "source:freeze"))),
        ("node rebooted".into(), Box::new(|| node_rebooted(cluster))),
        ("killed while cut".into(), Box::new(|| killed_while_cut(cluster))),
        ("home's shim".into(), Box::new(|| home_shim_killed(cluster))),
        ("home rebooted".into(), Box::new(|| home_rebooted(cluster))),
    ];
    run_cases(cluster, cases);
}
