//! Faults at every phase. Before the hand-over the program continues at home. After it, a lost
//! destination ends the program, and nothing is left behind. A cut that heals in time, and restarts
//! of daemons, have no effect.
//!
//! A shim blocks at a phase named by `TERN_FAULT` in the environment of its daemon. Pre-copy has no
//! point of its own: `source:freeze` is its end, when the process still runs. Clean-up begins with
//! `guest:resume`.
//!
//! * [`hand_over`]: something dies or is cut on the way out
//! * [`lost`]: a node, a shim or a guest is lost while a program is away
//! * [`cut`]: links are cut and healed, on every journey
//! * [`daemons`]: ternd stops and restarts
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cut;
mod daemons;
mod hand_over;
mod lost;

use anyhow::{Result, bail};
use std::time::Duration;
use tern_tests::cluster::fault_injection::{
    Fault, TestProcess, await_up, kill_daemon, kill_shims, leftovers, pids, set_timeouts, start_daemon,
};
use tern_tests::cluster::{Cluster, Refused};
use tern_tests::programs::built;
use tern_tests::runs::verdict::Verdict;

/// In seconds; heartbeats are sent once a second.
pub(crate) const SUSPEND_AFTER: u32 = 2;
pub(crate) const GIVE_UP_AFTER: u32 = 6;
/// `give_up_after` for cuts that are healed earlier.
pub(crate) const GIVE_UP_AFTER_HEAL: u32 = 18;
/// `give_up_after` for cases in which home must not give up.
pub(crate) const LONG_GIVE_UP_AFTER: u32 = 45;
/// How much longer than necessary anything may take on a busy machine.
pub(crate) const SLACK: Duration = Duration::from_secs(12);
/// A guest without home ends itself 5 s after home has given up.
pub(crate) const GUEST_END_DELAY: Duration = Duration::from_secs(5);

/// The points before the hand-over of a migration out: the node whose shim blocks there, and the
/// point.
pub(crate) const POINTS_BEFORE_HAND_OVER: [(u16, &str); 5] = [
    (2, "guest:offer"),
    (2, "guest:prepare"),
    (1, "source:freeze"),
    (2, "guest:freeze"),
    (1, "home:hand-over"),
];
/// The points after the hand-over.
pub(crate) const POINTS_AFTER_HAND_OVER: [(u16, &str); 3] =
    [(2, "guest:hand-over"), (1, "home:resume"), (2, "guest:resume")];

/// Restores the cluster after a failed case.
fn restore(cluster: &Cluster) -> Result<()> {
    cluster.lab().heal_all()?;
    for node in cluster.lab().nodes() {
        let number = node.number();
        if node.init_pid().is_err() {
            cluster.lab().restart(number)?;
        } else {
            // A restart also removes a fault from its environment.
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

/// Runs cases one after the other; a failure includes diagnostics.
pub(crate) fn run_cases<'a>(cluster: &'a Cluster, cases: Vec<(String, Case<'a>)>) {
    let wanted = |name: &str| std::env::var("TERN_CASES").map_or(true, |w| name.contains(&w));
    let cases = cases.into_iter().filter(|(name, _)| wanted(name));
    let mut verdict = Verdict::default();
    verdict.each(cases, 1, |case: Case<'a>| match case() {
        Ok(()) => Ok(vec![]),
        Err(why) => {
            let text = format!("{why:#}\n{}", cluster.diagnostics(0));
            match restore(cluster) {
                Ok(()) => Err(text),
                Err(error) => Err(format!("{text}\nand the cluster could not be restored: {error:#}")),
            }
        }
    });
    verdict.conclude();
}

/// Starts a migration, causes damage while it is blocked at a point, releases it, and returns the
/// result of migrate.
pub(crate) fn damaged_move(
    process: &TestProcess<'_>,
    cluster: &Cluster,
    fault: &Fault<'_>,
    to: &str,
    damage: impl FnOnce() -> Result<()>,
) -> Result<Result<(), Refused>> {
    let pid = process.pid();
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
    let cluster = Cluster::without_quotas(prefix, 2).unwrap();
    set_timeouts(&cluster, suspend_after, give_up_after).unwrap();
    cluster
}

/// Starts a program and migrates it to node 2.
pub(crate) fn start_away<'a>(cluster: &'a Cluster, name: &str) -> Result<TestProcess<'a>> {
    let process = TestProcess::start(cluster, name)?;
    process.migrate("2")?;
    std::thread::sleep(Duration::from_millis(100));
    Ok(process)
}
