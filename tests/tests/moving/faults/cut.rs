//! Links are cut while a process moves or is away, and healed in time.

use super::{
    Case, GIVE_UP_AFTER_HEAL, POINTS_AFTER_HAND_OVER, POINTS_BEFORE_HAND_OVER, SLACK, SUSPEND_AFTER,
    damaged_move, run_cases, start_away,
};
use anyhow::{Result, bail};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{
    Fault, TestProcess, await_nothing_left, await_up, set_timeouts, wait_until,
};
use tern_tests::programs::built;

fn three_nodes(prefix: &str) -> Cluster {
    built().unwrap();
    let cluster = Cluster::up(prefix).unwrap();
    set_timeouts(&cluster, SUSPEND_AFTER, GIVE_UP_AFTER_HEAL).unwrap();
    cluster
}

/// A link is cut while a migration is blocked at a point, long enough to be noticed, and healed in
/// time. Wherever the program is then, it continues, and no call was lost or done twice.
fn cut_and_healed(
    cluster: &Cluster,
    first: &str,
    then: &str,
    node: u16,
    point: &str,
    cable: Cable,
) -> Result<()> {
    let fault = Fault::arm(cluster, node, point)?;
    let mut process = TestProcess::start(cluster, "pipe")?;
    if !first.is_empty() {
        process.migrate(first)?;
    }
    let cut = || -> Result<()> {
        cluster.lab().cut(cable)?;
        Ok(())
    };
    let pid = process.pid();
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
    if process.has_ended() {
        bail!("it has ended: {}", process.output_so_far());
    }
    process.finish_correctly(SLACK)?;
    // A guest that home has replaced while it was unreachable ends at once, not by its own timeout.
    await_nothing_left(cluster, &[1, 2, 3], SLACK)
}

/// On the way onward the link to the next node is cut and stays cut: the program continues where it
/// was.
fn cut_and_not_healed(cluster: &Cluster) -> Result<()> {
    let fault = Fault::arm(cluster, 2, "source:freeze")?;
    let mut process = TestProcess::start(cluster, "pipe")?;
    process.migrate("2")?;
    let cut = || Ok(cluster.lab().cut(Cable::between(2, 3))?);
    match damaged_move(&process, cluster, &fault, "3", cut)? {
        Err(refused) if refused.message.contains("does not receive") => {}
        other => bail!("migrate said {other:?}"),
    }
    match cluster.location(process.pid())? {
        Some((2, _)) => {}
        other => bail!("it is at {other:?}"),
    }
    process.finish_correctly(SLACK)?;
    cluster.lab().heal_all()?;
    await_nothing_left(cluster, &[1, 2, 3], SLACK)
}

/// The link is cut several times while the program works away.
fn cut_while_away(cluster: &Cluster, name: &str) -> Result<()> {
    let mut process = start_away(cluster, name)?;
    for seconds in [0, 1, u64::from(SUSPEND_AFTER) + 2, 0] {
        cluster.lab().cut(Cable::Node(2))?;
        std::thread::sleep(Duration::from_secs(seconds) + Duration::from_millis(300));
        cluster.lab().heal_all()?;
        std::thread::sleep(Duration::from_millis(1200));
    }
    if process.has_ended() {
        bail!("it has ended: {}", process.output_so_far());
    }
    // It is still there, and can come home.
    await_up(cluster, 2)?;
    let home = wait_until("it can come home", SLACK, || process.migrate("home").is_ok());
    if let Err(error) = home {
        bail!("{error:#}: {:?}", process.migrate("home"));
    }
    process.finish_correctly(SLACK)?;
    await_nothing_left(cluster, &[1, 2, 3], SLACK)
}

#[test]
fn link_cut_on_the_way_out_loses_nothing() {
    let cluster = three_nodes("faults-cut-out");
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for (node, point) in POINTS_BEFORE_HAND_OVER.into_iter().chain(POINTS_AFTER_HAND_OVER) {
        let case = move || cut_and_healed(cluster, "", "2", node, point, Cable::Node(2));
        cases.push((point.into(), Box::new(case)));
    }
    run_cases(cluster, cases);
}

#[test]
fn link_cut_on_the_way_home_loses_nothing() {
    let cluster = three_nodes("faults-cut-home");
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for (node, point) in [(2, "source:freeze"), (1, "home:hand-over")] {
        let case = move || cut_and_healed(cluster, "2", "home", node, point, Cable::Node(2));
        cases.push((point.into(), Box::new(case)));
    }
    run_cases(cluster, cases);
}

#[test]
fn link_cut_on_the_way_onward_loses_nothing() {
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
        let case = move || cut_and_healed(cluster, "2", "3", node, point, cable);
        cases.push((format!("{point}, {cable:?}"), Box::new(case)));
    }
    cases.push(("and it stays cut".into(), Box::new(|| cut_and_not_healed(cluster))));
    run_cases(cluster, cases);
}

#[test]
fn link_cut_while_away_loses_nothing() {
    let cluster = three_nodes("faults-cut-away");
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for name in ["pipe", "append", "file"] {
        cases.push((name.into(), Box::new(move || cut_while_away(cluster, name))));
    }
    run_cases(cluster, cases);
}
