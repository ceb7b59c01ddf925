//! The destination, its link or the home's daemon fails while a process is on its way out.

use super::{
    Case, GIVE_UP_AFTER, POINTS_AFTER_HAND_OVER, POINTS_BEFORE_HAND_OVER, SLACK, SUSPEND_AFTER, damaged_move,
    run_cases, two_nodes,
};
use anyhow::{Result, bail};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{
    Fault, TestProcess, await_nothing_left, await_up, kill_daemon, kill_shims, start_daemon, wait_until,
};

/// The fault caused while a shim is blocked at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    /// The destination, as by a power cut.
    Node,
    /// The destination's shim.
    Shim,
    /// The destination's link, for longer than detection takes.
    Link,
    /// The home's daemon.
    Daemon,
}

impl Damage {
    fn inflict(self, cluster: &Cluster) -> Result<()> {
        match self {
            Self::Node => Ok(cluster.lab().kill(2)?),
            Self::Shim => kill_shims(cluster, 2),
            Self::Link => Ok(cluster.lab().cut(Cable::Node(2))?),
            Self::Daemon => kill_daemon(cluster, 1),
        }
    }

    fn repair(self, cluster: &Cluster) -> Result<()> {
        match self {
            Self::Node => cluster.lab().restart(2)?,
            Self::Shim => {}
            Self::Link => cluster.lab().heal_all()?,
            Self::Daemon => start_daemon(cluster, 1, &[])?,
        }
        await_up(cluster, 2)
    }
}

fn case_name(point: &str, damage: Damage) -> String {
    format!("{point} × {damage:?}").to_lowercase()
}

/// The fault occurs before home has committed: the program is at home, continues, and ends
/// correctly.
fn before(cluster: &Cluster, program: &str, node: u16, point: &str, damage: Damage) -> Result<()> {
    let fault = Fault::arm(cluster, node, point)?;
    let mut process = TestProcess::start(cluster, program)?;
    let said = damaged_move(&process, cluster, &fault, "2", || damage.inflict(cluster))?;
    if said.is_ok() && damage != Damage::Daemon {
        bail!("migrate reports success");
    }
    if damage != Damage::Daemon {
        // No tracer is attached any more, as before the attempt.
        let status = format!("/proc/{}/status", process.pid());
        let untouched = || {
            let text = cluster.run(1, &["cat", &status]).unwrap_or_default();
            String::from_utf8_lossy(&text).contains("TracerPid:\t0")
        };
        wait_until("its tracer has detached at home", SLACK, untouched)?;
    }
    process.finish_correctly(SLACK)?;
    damage.repair(cluster)?;
    await_nothing_left(cluster, &[1, 2], SLACK)
}

fn all_before(prefix: &str, program: &'static str, damages: &[Damage]) {
    let cluster = two_nodes(prefix, SUSPEND_AFTER, GIVE_UP_AFTER);
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for damage in damages.iter().copied() {
        for (node, point) in POINTS_BEFORE_HAND_OVER {
            let case: Case<'_> = Box::new(move || before(cluster, program, node, point, damage));
            cases.push((case_name(point, damage), case));
        }
    }
    run_cases(cluster, cases);
}

#[test]
fn destination_death_before_hand_over_leaves_program_at_home() {
    all_before("faults-dies", "pipe", &[Damage::Node, Damage::Shim]);
}

#[test]
fn cut_link_or_dead_daemon_before_hand_over_leaves_program_at_home() {
    all_before("faults-before", "pipe", &[Damage::Link, Damage::Daemon]);
}

/// All processes that share memory stay, and continue together.
#[test]
fn destination_death_before_hand_over_leaves_memory_sharers_at_home() {
    all_before("faults-shared", "shared", &[Damage::Shim]);
}

/// The destination dies while the guest is about to run there. Either home has no confirmation that
/// the guest runs, and may resume the process itself; or home has the confirmation, and the program
/// is lost. In both cases nothing is left on the nodes.
fn dies_at(cluster: &Cluster, program: &str, node: u16, point: &str, damage: Damage) -> Result<()> {
    let fault = Fault::arm(cluster, node, point)?;
    let mut process = TestProcess::start(cluster, program)?;
    let said = damaged_move(&process, cluster, &fault, "2", || damage.inflict(cluster))?;
    let given_up = Duration::from_secs((SUSPEND_AFTER + GIVE_UP_AFTER).into()) + SLACK;
    let must_be_lost = said.is_ok() || point == "guest:resume";
    let lost = process.await_loss(if must_be_lost { given_up } else { Duration::from_millis(500) });
    match (must_be_lost, lost) {
        (_, Ok(_)) => {}
        (true, Err(error)) => bail!("migrate said {said:?}, but {error:#}"),
        (false, Err(_)) => process.finish_correctly(SLACK)?,
    }
    damage.repair(cluster)?;
    await_nothing_left(cluster, &[1, 2], SLACK)
}

fn all_after(prefix: &str, program: &'static str, damages: &[Damage]) {
    let cluster = two_nodes(prefix, SUSPEND_AFTER, GIVE_UP_AFTER);
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for damage in damages.iter().copied() {
        for (node, point) in POINTS_AFTER_HAND_OVER {
            let case: Case<'_> = Box::new(move || dies_at(cluster, program, node, point, damage));
            cases.push((case_name(point, damage), case));
        }
    }
    run_cases(cluster, cases);
}

#[test]
fn destination_death_after_hand_over_leaves_nothing() {
    all_after("faults-after", "pipe", &[Damage::Node, Damage::Shim]);
}

/// Either all processes that share memory are restored at home, or all are lost.
#[test]
fn destination_death_after_hand_over_leaves_nothing_of_memory_sharers() {
    all_after("faults-shared-after", "shared", &[Damage::Shim]);
}
