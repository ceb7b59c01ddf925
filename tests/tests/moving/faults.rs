//! Faults at every phase. Before the hand-over the program goes on at home, after it a lost destination is the
//! program's end and nothing is left; a cut that heals in time, and daemons that come and go, are not noticed.
//!
//! A phase is stopped at by `TERN_FAULT` in the environment of the daemon whose shim shall stand still there. There
//! is no point of its own in pre-copy: `source:freeze` is its end, when the process still runs. All of clean-up
//! is `guest:resume` and what follows.
//!
//! * [`hand_over`]: something dies or is cut on the way out
//! * [`lost`]: a node, a shim or a guest is lost while a program is away
//! * [`cut`]: links are cut and healed, on every journey
//! * [`daemons`]: ternd comes and goes
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cut;
mod daemons;
mod hand_over;
mod lost;

use anyhow::{Result, bail};
use std::time::Duration;
use tern_tests::breaking::{
    Fault, Patient, await_up, kill_daemon, kill_shims, leftovers, pids, set_patience, start_daemon,
};
use tern_tests::cluster::{Cluster, Refused};
use tern_tests::programs::built;
use tern_tests::verdict::Verdict;

/// Seconds: beats are one a second.
pub(crate) const SUSPEND_AFTER: u32 = 2;
pub(crate) const GIVE_UP_AFTER: u32 = 6;
/// For cuts that are healed before.
pub(crate) const HEALS_WITHIN: u32 = 18;
/// For what must not depend on the patience of home.
pub(crate) const PATIENT: u32 = 45;
/// How long anything may take on this machine beyond what it must take.
pub(crate) const SLACK: Duration = Duration::from_secs(12);
/// A guest without home ends itself 5 s after home has given up.
pub(crate) const GUEST_ENDS: Duration = Duration::from_secs(5);

/// The points before the hand-over of a journey out: the node whose shim stands there, and where.
pub(crate) const BEFORE: [(u16, &str); 5] = [
    (2, "guest:offer"),
    (2, "guest:prepare"),
    (1, "source:freeze"),
    (2, "guest:freeze"),
    (1, "home:hand-over"),
];
/// Those after it.
pub(crate) const AFTER: [(u16, &str); 3] = [(2, "guest:hand-over"), (1, "home:resume"), (2, "guest:resume")];

/// Brings a cluster back into order after a case, whatever became of it.
fn restore(cluster: &Cluster) -> Result<()> {
    cluster.lab().heal_all()?;
    for node in cluster.lab().nodes() {
        let number = node.number();
        if node.init_pid().is_err() {
            cluster.lab().restart(number)?;
        } else {
            // Also to be rid of a fault in its environment.
            if !pids(cluster, number, "ternd")?.is_empty() {
                kill_daemon(cluster, number)?;
            }
            start_daemon(cluster, number, &[])?;
        }
        if !leftovers(cluster, number)?.is_empty() {
            let _ = kill_shims(cluster, number);
        }
    }
    cluster.lab().nodes().try_for_each(|node| await_up(cluster, node.number()))
}

pub(crate) type Case<'a> = Box<dyn Fn() -> Result<()> + Send + 'a>;

/// Runs cases one after the other, each with the scene if it fails.
pub(crate) fn judge<'a>(cluster: &'a Cluster, cases: Vec<(String, Case<'a>)>) {
    let wanted = |name: &str| std::env::var("TERN_CASES").map_or(true, |w| name.contains(&w));
    let cases = cases.into_iter().filter(|(name, _)| wanted(name));
    let mut verdict = Verdict::default();
    verdict.each(cases, 1, |case: Case<'a>| match case() {
        Ok(()) => Ok(vec![]),
        Err(why) => {
            let text = format!("{why:#}\n{}", cluster.scene(0));
            match restore(cluster) {
                Ok(()) => Err(text),
                Err(error) => Err(format!("{text}\nand the cluster could not be restored: {error:#}")),
            }
        }
    });
    verdict.pronounce();
}

/// Starts a migration, breaks something while it stands at a point, lets it go on, and gives what migrate said.
pub(crate) fn broken_move(
    patient: &Patient<'_>,
    cluster: &Cluster,
    fault: &Fault<'_>,
    to: &str,
    damage: impl FnOnce() -> Result<()>,
) -> Result<Result<(), Refused>> {
    let pid = patient.pid();
    fault.set()?;
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| cluster.migrate(pid, to).map(drop));
        let broken = fault.await_reached().and_then(|()| damage());
        fault.release();
        let said = match moving.join() {
            Ok(said) => said,
            Err(_) => bail!("the thread that migrates has panicked"),
        };
        if let Err(error) = broken {
            bail!("{error:#}; migrate said {said:?}");
        }
        Ok(said)
    })
}

pub(crate) fn two_nodes(prefix: &str, suspend_after: u32, give_up_after: u32) -> Cluster {
    built().unwrap();
    let cluster = Cluster::with_nodes(prefix, 2).unwrap();
    set_patience(&cluster, suspend_after, give_up_after).unwrap();
    cluster
}

/// A program away for a moment already.
pub(crate) fn away<'a>(cluster: &'a Cluster, name: &str) -> Result<Patient<'a>> {
    let patient = Patient::start(cluster, name)?;
    patient.go("2")?;
    std::thread::sleep(Duration::from_millis(100));
    Ok(patient)
}
