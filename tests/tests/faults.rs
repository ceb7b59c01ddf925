//! Faults at every phase. Before the hand-over the program goes on at home, after it a lost destination is the
//! program's end and nothing is left; a cut that heals in time, and daemons that come and go, are not noticed.
//!
//! A phase is stopped at by `TERN_FAULT` in the environment of the daemon whose shim shall stand still there. There
//! is no point of its own in pre-copy: `source:freeze` is its end, when the process still runs. All of clean-up
//! is `guest:resume` and what follows.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use anyhow::{Result, bail};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::breaking::{
    Fault, Patient, await_up, kill_daemon, kill_shims, leftovers, nothing_left, pids, set_patience,
    start_daemon, until,
};
use tern_tests::cluster::{Cluster, Refused};
use tern_tests::programs::built;
use tern_tests::verdict::Verdict;

/// Seconds: beats are one a second.
const SUSPEND_AFTER: u32 = 2;
const GIVE_UP_AFTER: u32 = 6;
/// For cuts that are healed before.
const HEALS_WITHIN: u32 = 12;
/// For what must not depend on the patience of home.
const PATIENT: u32 = 45;
/// How long anything may take on this machine beyond what it must take.
const SLACK: Duration = Duration::from_secs(12);
/// A guest without home ends itself 5 s after home has given up.
const GUEST_ENDS: Duration = Duration::from_secs(5);

/// The points before the hand-over of a journey out: the node whose shim stands there, and where.
const BEFORE: [(u16, &str); 5] = [
    (2, "guest:offer"),
    (2, "guest:prepare"),
    (1, "source:freeze"),
    (2, "guest:freeze"),
    (1, "home:hand-over"),
];
/// Those after it.
const AFTER: [(u16, &str); 3] = [(2, "guest:hand-over"), (1, "home:resume"), (2, "guest:resume")];

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
    const ALL: [Self; 4] = [Self::Node, Self::Shim, Self::Link, Self::Daemon];

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

type Case<'a> = Box<dyn Fn() -> Result<()> + Send + 'a>;

/// Runs cases one after the other, each with the scene if it fails.
fn judge<'a>(cluster: &'a Cluster, cases: Vec<(String, Case<'a>)>) {
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
fn broken_move(
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

fn case_name(point: &str, damage: Damage) -> String {
    format!("{point} × {damage:?}").to_lowercase()
}

/// Something breaks before home has decided: the program is at home, runs on, and ends rightly.
fn before(cluster: &Cluster, node: u16, point: &str, damage: Damage) -> Result<()> {
    let fault = Fault::arm(cluster, node, point)?;
    let mut patient = Patient::start(cluster, "pipe")?;
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
    nothing_left(cluster, &[1, 2], SLACK + GUEST_ENDS + Duration::from_secs(GIVE_UP_AFTER.into()))
}

fn two_nodes(prefix: &str, suspend_after: u32, give_up_after: u32) -> Cluster {
    built().unwrap();
    let cluster = Cluster::with_nodes(prefix, 2).unwrap();
    set_patience(&cluster, suspend_after, give_up_after).unwrap();
    cluster
}

#[test]
fn before_the_hand_over_the_program_stays_home() {
    let cluster = two_nodes("faults-before", SUSPEND_AFTER, GIVE_UP_AFTER);
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for damage in Damage::ALL {
        for (node, point) in BEFORE {
            cases.push((case_name(point, damage), Box::new(move || before(cluster, node, point, damage))));
        }
    }
    judge(cluster, cases);
}

/// The destination dies while the guest is about to run there. Home has not heard of its running, and may take it
/// back, or it has, and the program is lost: but it is one of the two, and nothing is left.
fn dies_at(cluster: &Cluster, node: u16, point: &str, damage: Damage) -> Result<()> {
    let fault = Fault::arm(cluster, node, point)?;
    let mut patient = Patient::start(cluster, "pipe")?;
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
    nothing_left(cluster, &[1, 2], SLACK + GUEST_ENDS + Duration::from_secs(GIVE_UP_AFTER.into()))
}

/// A program away for a moment already.
fn away<'a>(cluster: &'a Cluster, name: &str) -> Result<Patient<'a>> {
    let patient = Patient::start(cluster, name)?;
    patient.go("2")?;
    std::thread::sleep(Duration::from_millis(100));
    Ok(patient)
}

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

/// The program is killed at home, by its pid, while its node is out of reach.
fn killed_while_cut(cluster: &Cluster) -> Result<()> {
    let mut patient = away(cluster, "pipe")?;
    cluster.lab().cut(Cable::Node(2))?;
    std::thread::sleep(Duration::from_millis(200));
    cluster.run(1, &["kill", "-KILL", &patient.pid().to_string()])?;
    patient.is_lost(SLACK)?;
    cluster.lab().heal_all()?;
    await_up(cluster, 2)?;
    let guests_own = Duration::from_secs(GIVE_UP_AFTER.into()) + GUEST_ENDS;
    nothing_left(cluster, &[1, 2], guests_own + SLACK)
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

/// Home's shim is killed: without it nobody performs calls, so the program ends, and nothing runs on by itself.
fn home_shim_killed(cluster: &Cluster) -> Result<()> {
    let mut patient = away(cluster, "pipe")?;
    kill_shims(cluster, 1)?;
    patient.is_lost(SLACK)?;
    nothing_left(cluster, &[1, 2], Duration::from_secs(GIVE_UP_AFTER.into()) + GUEST_ENDS + SLACK)
}

#[test]
fn a_destination_lost_after_the_hand_over_leaves_nothing() {
    let cluster = two_nodes("faults-after", SUSPEND_AFTER, GIVE_UP_AFTER);
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for damage in [Damage::Node, Damage::Shim] {
        for (node, point) in AFTER {
            cases.push((case_name(point, damage), Box::new(move || dies_at(cluster, node, point, damage))));
        }
    }
    cases.push(("away × node".into(), Box::new(|| never_heard_again(cluster))));
    cases.push(("away × killed while cut".into(), Box::new(|| killed_while_cut(cluster))));
    cases.push(("away × home's shim".into(), Box::new(|| home_shim_killed(cluster))));
    cases.push(("away × home".into(), Box::new(|| home_dies(cluster))));
    judge(cluster, cases);
}

#[test]
fn proof_of_death_ends_the_wait_at_once() {
    let cluster = two_nodes("faults-proof", SUSPEND_AFTER, PATIENT);
    let cluster = &cluster;
    let cases: Vec<(String, Case<'_>)> = vec![
        ("away × shim".into(), Box::new(|| shim_killed(cluster))),
        ("away × guest".into(), Box::new(|| guest_killed(cluster))),
        ("away × node rebooted".into(), Box::new(|| node_rebooted(cluster))),
    ];
    judge(cluster, cases);
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
    // A guest that home has taken back while it was out of reach hears of it only by its own patience.
    let guests_own = Duration::from_secs(HEALS_WITHIN.into()) + GUEST_ENDS;
    nothing_left(cluster, &[1, 2, 3], guests_own + SLACK)
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
fn a_cut_that_heals_in_time_is_not_noticed() {
    built().unwrap();
    let cluster = Cluster::up("faults-healed").unwrap();
    set_patience(&cluster, SUSPEND_AFTER, HEALS_WITHIN).unwrap();
    let cluster = &cluster;
    let two = Cable::Node(2);
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for (node, point) in BEFORE.into_iter().chain(AFTER) {
        cases.push((format!("out, {point}"), Box::new(move || healed(cluster, "", "2", node, point, two))));
    }
    let inbound = [(2, "source:freeze"), (1, "home:hand-over")];
    for (node, point) in inbound {
        let case = move || healed(cluster, "2", "home", node, point, two);
        cases.push((format!("home, {point}"), Box::new(case)));
    }
    let onward = [
        (3, "guest:offer", Cable::Node(3)),
        (2, "source:freeze", Cable::between(2, 3)),
        (2, "source:freeze", two),
        (3, "guest:freeze", Cable::Node(3)),
        (3, "guest:freeze", two),
        (3, "guest:hand-over", Cable::Node(3)),
        (3, "guest:resume", Cable::Node(3)),
    ];
    for (node, point, cable) in onward {
        let case = move || healed(cluster, "2", "3", node, point, cable);
        cases.push((format!("onward, {point}, {cable:?}"), Box::new(case)));
    }
    for name in ["pipe", "append", "file"] {
        cases.push((format!("away, {name}"), Box::new(move || cut_while_away(cluster, name))));
    }
    judge(cluster, cases);
}

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
fn daemons_come_and_go_unnoticed() {
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
