//! Links are cut while a process moves or is away, and healed in time.

use super::{AFTER, BEFORE, Case, HEALS_WITHIN, SLACK, SUSPEND_AFTER, away, broken_move, judge};
use anyhow::{Result, bail};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::breaking::{Fault, Patient, await_up, nothing_left, set_patience, until};
use tern_tests::cluster::Cluster;
use tern_tests::programs::built;

fn three_nodes(prefix: &str) -> Cluster {
    built().unwrap();
    let cluster = Cluster::up(prefix).unwrap();
    set_patience(&cluster, SUSPEND_AFTER, HEALS_WITHIN).unwrap();
    cluster
}

/// A link is cut while a migration stands at a point, long enough to be noticed, and healed in time: wherever the
/// program is then, it goes on, and no call was lost or done twice.
fn healed(cluster: &Cluster, first: &str, then: &str, node: u16, point: &str, cable: Cable) -> Result<()> {
    let fault = Fault::arm(cluster, node, point)?;
    let mut patient = Patient::start(cluster, "pipe")?;
    if !first.is_empty() {
        patient.go(first)?;
    }
    let cut = || -> Result<()> {
        cluster.lab().cut(cable)?;
        Ok(())
    };
    let pid = patient.pid();
    fault.set()?;
    std::thread::scope(|scope| -> Result<()> {
        let moving = scope.spawn(|| cluster.migrate(pid, then).map(drop));
        let broken = fault.await_reached().and_then(|()| cut());
        fault.release();
        std::thread::sleep(Duration::from_secs(u64::from(SUSPEND_AFTER) + 2));
        cluster.lab().heal_all()?;
        let said = moving.join();
        if let Err(error) = broken {
            bail!("{error:#}; migrate said {said:?}");
        }
        Ok(())
    })?;
    if patient.ended() {
        bail!("it has ended: {}", patient.so_far());
    }
    patient.finishes_rightly(SLACK)?;
    // A guest that home has taken back while it was out of reach hears so at once, not by its own patience.
    nothing_left(cluster, &[1, 2, 3], SLACK)
}

/// On its way onward the link to the next node is cut, and is not healed: it goes on where it was, without it.
fn stays_cut(cluster: &Cluster) -> Result<()> {
    let fault = Fault::arm(cluster, 2, "source:freeze")?;
    let mut patient = Patient::start(cluster, "pipe")?;
    patient.go("2")?;
    let cut = || Ok(cluster.lab().cut(Cable::between(2, 3))?);
    match broken_move(&patient, cluster, &fault, "3", cut)? {
        Err(refused) if refused.message.contains("takes nothing") => {}
        other => bail!("migrate said {other:?}"),
    }
    match cluster.whereabouts(patient.pid())? {
        Some((2, _)) => {}
        other => bail!("it is at {other:?}"),
    }
    patient.finishes_rightly(SLACK)?;
    cluster.lab().heal_all()?;
    nothing_left(cluster, &[1, 2, 3], SLACK)
}

/// The link is cut while the program works away, again and again.
fn cut_while_away(cluster: &Cluster, name: &str) -> Result<()> {
    let mut patient = away(cluster, name)?;
    for seconds in [0, 1, u64::from(SUSPEND_AFTER) + 2, 0] {
        cluster.lab().cut(Cable::Node(2))?;
        std::thread::sleep(Duration::from_secs(seconds) + Duration::from_millis(300));
        cluster.lab().heal_all()?;
        std::thread::sleep(Duration::from_millis(1200));
    }
    if patient.ended() {
        bail!("it has ended: {}", patient.so_far());
    }
    // It still is there, and can still come home.
    await_up(cluster, 2)?;
    let home = until("it can come home", SLACK, || patient.go("home").is_ok());
    if let Err(error) = home {
        bail!("{error:#}: {:?}", patient.go("home"));
    }
    patient.finishes_rightly(SLACK)?;
    nothing_left(cluster, &[1, 2, 3], SLACK)
}

#[test]
fn on_the_way_out() {
    let cluster = three_nodes("faults-cut-out");
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for (node, point) in BEFORE.into_iter().chain(AFTER) {
        let case = move || healed(cluster, "", "2", node, point, Cable::Node(2));
        cases.push((point.into(), Box::new(case)));
    }
    judge(cluster, cases);
}

#[test]
fn on_the_way_home() {
    let cluster = three_nodes("faults-cut-home");
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for (node, point) in [(2, "source:freeze"), (1, "home:hand-over")] {
        let case = move || healed(cluster, "2", "home", node, point, Cable::Node(2));
        cases.push((point.into(), Box::new(case)));
    }
    judge(cluster, cases);
}

#[test]
fn on_the_way_onward() {
    let cluster = three_nodes("faults-cut-onward");
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for (node, point, cable) in [
        (3, "guest:offer", Cable::Node(3)),
        (2, "source:freeze", Cable::between(2, 3)),
        (2, "source:freeze", Cable::Node(2)),
        (3, "guest:freeze", Cable::Node(3)),
        (3, "guest:freeze", Cable::Node(2)),
        (3, "guest:hand-over", Cable::Node(3)),
        (3, "guest:hand-over", Cable::Node(1)),
        (3, "guest:resume", Cable::Node(3)),
        (3, "guest:resume", Cable::Node(1)),
    ] {
        let case = move || healed(cluster, "2", "3", node, point, cable);
        cases.push((format!("{point}, {cable:?}"), Box::new(case)));
    }
    cases.push(("and it stays cut".into(), Box::new(|| stays_cut(cluster))));
    judge(cluster, cases);
}

#[test]
fn while_it_is_away() {
    let cluster = three_nodes("faults-cut-away");
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for name in ["pipe", "append", "file"] {
        cases.push((name.into(), Box::new(move || cut_while_away(cluster, name))));
    }
    judge(cluster, cases);
}
