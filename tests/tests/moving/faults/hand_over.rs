//! The destination, its link or home's daemon breaks while a process is on its way out.

use super::{AFTER, BEFORE, Case, GIVE_UP_AFTER, SLACK, SUSPEND_AFTER, broken_move, judge, two_nodes};
use anyhow::{Result, bail};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::breaking::{
    Fault, Patient, await_up, kill_daemon, kill_shims, nothing_left, start_daemon, until,
};
use tern_tests::cluster::Cluster;

/// What is broken while a shim stands at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    /// The destination, as by a power cut.
    Node,
    /// The destination's shim.
    Shim,
    /// The destination's link, for longer than it takes to notice.
    Link,
    /// Home's daemon.
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

/// Something breaks before home has decided: the program is at home, runs on, and ends rightly.
fn before(cluster: &Cluster, program: &str, node: u16, point: &str, damage: Damage) -> Result<()> {
    let fault = Fault::arm(cluster, node, point)?;
    let mut patient = Patient::start(cluster, program)?;
    let said = broken_move(&patient, cluster, &fault, "2", || damage.inflict(cluster))?;
    if said.is_ok() && damage != Damage::Daemon {
        bail!("migrate claims to have moved it");
    }
    if damage != Damage::Daemon {
        // Nobody holds it any more, as before the attempt.
        let status = format!("/proc/{}/status", patient.pid());
        let untouched = || {
            let text = cluster.run(1, &["cat", &status]).unwrap_or_default();
            String::from_utf8_lossy(&text).contains("TracerPid:\t0")
        };
        until("it is let go at home", SLACK, untouched)?;
    }
    patient.finishes_rightly(SLACK)?;
    damage.repair(cluster)?;
    nothing_left(cluster, &[1, 2], SLACK)
}

fn all_before(prefix: &str, program: &'static str, damages: &[Damage]) {
    let cluster = two_nodes(prefix, SUSPEND_AFTER, GIVE_UP_AFTER);
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for damage in damages.iter().copied() {
        for (node, point) in BEFORE {
            let case: Case<'_> = Box::new(move || before(cluster, program, node, point, damage));
            cases.push((case_name(point, damage), case));
        }
    }
    judge(cluster, cases);
}

#[test]
fn a_destination_that_dies_before_it_leaves_the_program_at_home() {
    all_before("faults-dies", "pipe", &[Damage::Node, Damage::Shim]);
}

#[test]
fn a_cut_link_or_a_dead_daemon_before_it_leaves_the_program_at_home() {
    all_before("faults-before", "pipe", &[Damage::Link, Damage::Daemon]);
}

/// Of those that share memory all stay, and go on together.
#[test]
fn a_destination_that_dies_before_they_leave_leaves_those_who_share_memory_at_home() {
    all_before("faults-shared", "shared", &[Damage::Shim]);
}

/// The destination dies while the guest is about to run there. Home has not heard of its running, and may take it
/// back, or it has, and the program is lost: but it is one of the two, and nothing is left.
fn dies_at(cluster: &Cluster, program: &str, node: u16, point: &str, damage: Damage) -> Result<()> {
    let fault = Fault::arm(cluster, node, point)?;
    let mut patient = Patient::start(cluster, program)?;
    let said = broken_move(&patient, cluster, &fault, "2", || damage.inflict(cluster))?;
    let given_up = Duration::from_secs((SUSPEND_AFTER + GIVE_UP_AFTER).into()) + SLACK;
    let must_be_lost = said.is_ok() || point == "guest:resume";
    let lost = patient.is_lost(if must_be_lost { given_up } else { Duration::from_millis(500) });
    match (must_be_lost, lost) {
        (_, Ok(_)) => {}
        (true, Err(error)) => bail!("migrate said {said:?}, but {error:#}"),
        (false, Err(_)) => patient.finishes_rightly(SLACK)?,
    }
    damage.repair(cluster)?;
    nothing_left(cluster, &[1, 2], SLACK)
}

fn all_after(prefix: &str, program: &'static str, damages: &[Damage]) {
    let cluster = two_nodes(prefix, SUSPEND_AFTER, GIVE_UP_AFTER);
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for damage in damages.iter().copied() {
        for (node, point) in AFTER {
            let case: Case<'_> = Box::new(move || dies_at(cluster, program, node, point, damage));
            cases.push((case_name(point, damage), case));
        }
    }
    judge(cluster, cases);
}

#[test]
fn a_destination_that_dies_after_it_leaves_nothing() {
    all_after("faults-after", "pipe", &[Damage::Node, Damage::Shim]);
}

/// Of those that share memory all are taken back, or all are lost.
#[test]
fn a_destination_that_dies_after_they_left_leaves_nothing_of_those_who_share_memory() {
    all_after("faults-shared-after", "shared", &[Damage::Shim]);
}
