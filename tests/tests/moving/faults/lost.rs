//! A node, a shim or a guest is lost while a program is away. On proof its other half ends at once, without proof when
//! its patience is over; and nothing is left.

use super::{Case, GIVE_UP_AFTER, GUEST_ENDS, PATIENT, SLACK, SUSPEND_AFTER, away, judge, two_nodes};
use anyhow::{Result, bail};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::breaking::{await_up, kill_shims, nothing_left};
use tern_tests::cluster::Cluster;

/// A message about the loss is in a log of home, and the program has ended as documented.
fn told(cluster: &Cluster, pid: i32) -> Result<()> {
    let text = cluster.run(1, &["sh", "-c", "cat /run/tern/shims/*.log"])?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let line = text.lines().find(|line| line.contains("ERROR") && line.contains(&format!("pid={pid}")));
    match line {
        Some(line) if line.contains("lost") => Ok(()),
        other => bail!("no error about the loss of {pid} in home's logs: {other:?}"),
    }
}

/// Nobody hears of the node again: home gives up after the time that is configured, not before.
fn never_heard_again(cluster: &Cluster) -> Result<()> {
    let mut patient = away(cluster, "pipe")?;
    let pid = patient.pid();
    cluster.lab().kill(2)?;
    let took = patient.is_lost(Duration::from_secs((SUSPEND_AFTER + GIVE_UP_AFTER).into()) + SLACK)?;
    if took < Duration::from_secs(GIVE_UP_AFTER.into()) {
        bail!("home gave up after {took:?} already, without proof");
    }
    told(cluster, pid)?;
    cluster.lab().restart(2)?;
    await_up(cluster, 2)?;
    nothing_left(cluster, &[1, 2], SLACK)
}

/// Home dies: its guests end by themselves.
fn home_dies(cluster: &Cluster) -> Result<()> {
    let patient = away(cluster, "pipe")?;
    cluster.lab().kill(1)?;
    let within = Duration::from_secs(GIVE_UP_AFTER.into()) + GUEST_ENDS + SLACK;
    let left = nothing_left(cluster, &[2], within);
    drop(patient);
    cluster.lab().restart(1)?;
    await_up(cluster, 2)?;
    left
}

#[test]
fn without_proof_of_death_patience_ends_it() {
    let cluster = two_nodes("faults-lost", SUSPEND_AFTER, GIVE_UP_AFTER);
    let cluster = &cluster;
    let cases: Vec<(String, Case<'_>)> = vec![
        ("node".into(), Box::new(|| never_heard_again(cluster))),
        ("home".into(), Box::new(|| home_dies(cluster))),
    ];
    judge(cluster, cases);
}

/// The shim is killed: its node says so, and that is proof.
fn shim_killed(cluster: &Cluster) -> Result<()> {
    let mut patient = away(cluster, "pipe")?;
    let pid = patient.pid();
    kill_shims(cluster, 2)?;
    let took = patient.is_lost(SLACK)?;
    told(cluster, pid)?;
    eprintln!("  lost {} ms after its shim", took.as_millis());
    nothing_left(cluster, &[1, 2], SLACK)
}

/// The node dies and is back at once: its new daemon knows nothing of the shim, and that is proof.
fn node_rebooted(cluster: &Cluster) -> Result<()> {
    let mut patient = away(cluster, "pipe")?;
    let pid = patient.pid();
    cluster.lab().restart(2)?;
    patient.is_lost(Duration::from_secs(SUSPEND_AFTER.into()) + SLACK)?;
    told(cluster, pid)?;
    await_up(cluster, 2)?;
    nothing_left(cluster, &[1, 2], SLACK)
}

/// The guest's own process is killed by somebody on its node, as the kernel does when memory runs out.
fn guest_killed(cluster: &Cluster) -> Result<()> {
    let mut patient = away(cluster, "pipe")?;
    let mark = format!("tern:1/{}", patient.pid());
    let table = cluster.run(2, &["ps", "-e", "-o", "pid=,args="])?;
    let table = String::from_utf8_lossy(&table).into_owned();
    let guest = table.lines().find(|line| line.contains(&mark)).and_then(|l| l.split_whitespace().next());
    let Some(guest) = guest else { bail!("no {mark} in ps on node 2: {table}") };
    cluster.run(2, &["kill", "-KILL", guest])?;
    patient.is_lost(SLACK)?;
    nothing_left(cluster, &[1, 2], SLACK)
}

/// The program is killed at home, by its pid, while its node is out of reach: its guest hears so when that is over.
fn killed_while_cut(cluster: &Cluster) -> Result<()> {
    let mut patient = away(cluster, "pipe")?;
    cluster.lab().cut(Cable::Node(2))?;
    std::thread::sleep(Duration::from_millis(200));
    cluster.run(1, &["kill", "-KILL", &patient.pid().to_string()])?;
    patient.is_lost(SLACK)?;
    cluster.lab().heal_all()?;
    await_up(cluster, 2)?;
    nothing_left(cluster, &[1, 2], SLACK)
}

/// Home's shim is killed: without it nobody performs calls, so the program ends, and nothing runs on by itself.
fn home_shim_killed(cluster: &Cluster) -> Result<()> {
    let mut patient = away(cluster, "pipe")?;
    kill_shims(cluster, 1)?;
    patient.is_lost(SLACK)?;
    nothing_left(cluster, &[1, 2], SLACK)
}

/// Home dies and is back at once: its new daemon knows nothing of the shim, and that is proof for the guest.
fn home_rebooted(cluster: &Cluster) -> Result<()> {
    let patient = away(cluster, "pipe")?;
    cluster.lab().restart(1)?;
    await_up(cluster, 2)?;
    let left = nothing_left(cluster, &[1, 2], Duration::from_secs(SUSPEND_AFTER.into()) + SLACK);
    drop(patient);
    left
}

#[test]
fn proof_of_death_ends_it_at_once() {
    let cluster = two_nodes("faults-proof", SUSPEND_AFTER, PATIENT);
    let cluster = &cluster;
    let cases: Vec<(String, Case<'_>)> = vec![
        ("shim".into(), Box::new(|| shim_killed(cluster))),
        ("guest".into(), Box::new(|| guest_killed(cluster))),
        ("node rebooted".into(), Box::new(|| node_rebooted(cluster))),
        ("killed while cut".into(), Box::new(|| killed_while_cut(cluster))),
        ("home's shim".into(), Box::new(|| home_shim_killed(cluster))),
        ("home rebooted".into(), Box::new(|| home_rebooted(cluster))),
    ];
    judge(cluster, cases);
}
