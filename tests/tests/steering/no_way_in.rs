//! No way in: neither for strangers on the port, nor for a guest into the node that it runs on.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::stranger;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tern_tests::breaking::{Patient, kill_shims, nothing_left, pids, set_patience, until};
use tern_tests::cluster::Cluster;
use tern_tests::hostile::{Hostile, inspect};
use tern_tests::programs::built;
use tern_tests::verdict::Verdict;

/// How long the shims and daemons may take to clear up.
const SLACK: Duration = Duration::from_secs(12);

/// Of the namespaces that are counted, a family's sandbox makes so many.
const SANDBOX: usize = 3;

type Case<'a> = Box<dyn Fn() -> Result<()> + Send + 'a>;

/// Nodes 1 and 2, with a neighbour: another family's guest on node 2, which nothing here may disturb.
struct Place {
    cluster: Cluster,
}

impl Place {
    fn up(prefix: &str) -> Self {
        built().unwrap();
        let cluster = Cluster::with_nodes(prefix, 2).unwrap();
        set_patience(&cluster, 3, 8).unwrap();
        Self { cluster }
    }

    /// Runs cases one after the other beside the neighbour, and looks after each that all is well.
    fn judge(&self, cases: Vec<(String, Case<'_>)>) {
        let cluster = &self.cluster;
        let daemons = || [1, 2].map(|node| pids(cluster, node, "ternd").unwrap_or_default());
        let present = Mutex::new((neighbour(cluster).unwrap(), daemons()));
        let wanted = |name: &str| std::env::var("TERN_CASES").map_or(true, |w| name.contains(&w));
        let mut verdict = Verdict::default();
        verdict.each(cases.into_iter().filter(|(name, _)| wanted(name)), 1, |case: Case<'_>| {
            let mut present = present.lock().unwrap_or_else(PoisonError::into_inner);
            let why = match case().and_then(|()| self.well(&present.1, present.0.pid())) {
                Ok(()) => return Ok(vec![]),
                Err(why) => format!("{why:#}\n{}", cluster.scene(0)),
            };
            // What this case has left would be held against the next ones.
            let _ = (kill_shims(cluster, 1), kill_shims(cluster, 2));
            let _ = [1, 2].map(|node| cluster.lab().restart_daemon(node));
            match nothing_left(cluster, &[1, 2], SLACK).and_then(|()| neighbour(cluster)) {
                Ok(new) => *present = (new, daemons()),
                Err(error) => return Err(format!("{why}\nand there can be no new neighbour: {error:#}")),
            }
            Err(why)
        });
        verdict.each([("the neighbour".to_owned(), ())], 1, |()| {
            let mut present = present.lock().unwrap_or_else(PoisonError::into_inner);
            let end = present.0.finish().and_then(|end| match end.status {
                0 => nothing_left(cluster, &[1, 2], SLACK),
                status => bail!("status {status}: {}", text(&end.err)),
            });
            end.map(|()| vec![]).map_err(|why| format!("{why:#}\n{}", cluster.scene(0)))
        });
        verdict.pronounce();
    }

    /// The daemons are the same as before, answer, and another process can be moved to node 2.
    fn well(&self, daemons: &[Vec<i32>; 2], neighbour: i32) -> Result<()> {
        for (node, before) in [1, 2].into_iter().zip(daemons) {
            let now = pids(&self.cluster, node, "ternd")?;
            if now != *before {
                bail!("ternd of node {node} is {now:?}, was {before:?}");
            }
            if !self.cluster.tool(node, "status").output()?.status.success() {
                bail!("ternd of node {node} does not answer");
            }
        }
        match self.cluster.whereabouts(neighbour)? {
            Some((2, _)) => {}
            other => bail!("the neighbour should be on node 2, but mps says {other:?}"),
        }
        let mut another = Patient::start(&self.cluster, "registers")?;
        another.go("2").context("nobody can be moved any more")?;
        another.finishes_rightly(SLACK)
    }
}

/// A well-behaved guest on node 2.
fn neighbour(cluster: &Cluster) -> Result<Hostile<'_>> {
    let mut neighbour = Hostile::start(cluster, "neighbour", "")?;
    neighbour.go("2")?;
    match neighbour.strike()? {
        true => Ok(neighbour),
        false => bail!("the neighbour has ended: {:?}", neighbour.finish()?),
    }
}

/// `name: value` lines of an output.
fn facts(output: &str) -> BTreeMap<String, String> {
    let fact = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned()));
    output.lines().filter_map(fact).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}

/// Calls that a guest makes away have home's results, and no effect where it runs.
fn raw_calls(cluster: &Cluster) -> Result<()> {
    cluster.run(1, &["sh", "-c", "echo yes > /tmp/only-at-home"])?;
    let mut hostile = Hostile::start(cluster, "raw", "")?;
    hostile.go("2")?;
    if !hostile.strike()? {
        bail!("it ended: {:?}", hostile.finish()?);
    }
    inspect(cluster, 2, 2)?;
    let listening = |node: u16| cluster.run(node, &["ss", "-Hltn"]).map(|out| text(&out).contains(":4711"));
    if !listening(1)? || listening(2)? {
        bail!("its socket listens at home: {}, on node 2: {}", listening(1)?, listening(2)?);
    }
    let mounted =
        |node: u16| cluster.run(node, &["cat", "/proc/mounts"]).map(|m| text(&m).contains("hostile-mount"));
    if !mounted(1)? || mounted(2)? {
        bail!("it has mounted at home: {}, on node 2: {}", mounted(1)?, mounted(2)?);
    }
    let name = text(&cluster.run(1, &["hostname"])?);
    let net = text(&cluster.run(1, &["readlink", "/proc/self/ns/net"])?);
    let user = text(&cluster.run(1, &["readlink", "/proc/self/ns/user"])?);
    let away = cluster.whereabouts(hostile.pid())?;
    let end = hostile.finish()?;
    let said = facts(&text(&end.out));
    for (fact, wanted) in
        [("uname", &*name), ("hostname", &*name), ("net", &*net), ("user", &*user), ("only at home", "yes")]
    {
        if said.get(fact).map(String::as_str) != Some(wanted) {
            bail!("{fact} is {:?}, not {wanted:?}", said.get(fact));
        }
    }
    if end.status != 0 {
        bail!("status {}: {}", end.status, text(&end.err));
    }
    match away {
        Some((2, _)) => Ok(()),
        other => bail!("it should have done all this on node 2, but mps says {other:?}"),
    }
}

/// A call that only home can make: it has the result that it has for a program that never moved.
fn homeward(cluster: &Cluster, what: &str) -> Result<()> {
    let mut resident = Hostile::start(cluster, "homeward", what)?;
    resident.strike()?;
    let wanted = resident.finish()?;
    if wanted.status != 0 {
        bail!("it fails already without moving: {}", text(&wanted.err));
    }
    let before = namespaces(cluster)?;
    let mut hostile = Hostile::start(cluster, "homeward", what)?;
    hostile.go("2")?;
    hostile.strike()?;
    let after = namespaces(cluster)?;
    let end = hostile.finish()?;
    if let Some(difference) = end.difference(&wanted) {
        bail!("{difference}");
    }
    if after > before + SANDBOX {
        bail!("there are {after} namespaces on node 2, where there were {before}");
    }
    only_the_neighbour_is_left(cluster)
}

/// How many user, network and pid namespaces there are among the processes of node 2.
fn namespaces(cluster: &Cluster) -> Result<usize> {
    let mut all = std::collections::BTreeSet::new();
    for pid in cluster.lab().node(2).processes()? {
        for space in ["user", "net", "pid"] {
            all.extend(std::fs::read_link(format!("/proc/{pid}/ns/{space}")).ok());
        }
    }
    Ok(all.len())
}

/// A jump to our own `syscall` instruction is trapped as any call.
fn stub_call(cluster: &Cluster, what: &str) -> Result<()> {
    let before = namespaces(cluster)?;
    let mut hostile = Hostile::start(cluster, "stubcall", what)?;
    hostile.go("2")?;
    let came_through = hostile.strike()?;
    let sockets = text(&cluster.run(2, &["ss", "-Hltunp"])?);
    inspect(cluster, 2, 1)?;
    let after = namespaces(cluster)?;
    if after > before + SANDBOX {
        bail!("there are {after} namespaces on node 2, where there were {before}");
    }
    if sockets.contains("tern:") {
        bail!("a guest owns a socket on node 2: {sockets}");
    }
    let end = hostile.finish()?;
    match (came_through, end.status) {
        (true, 0) => only_the_neighbour_is_left(cluster),
        // Coming home with its program counter in our range, it may well end by a fault.
        (_, 132 | 135 | 139) if what == "unshare" || what == "clone" => only_the_neighbour_is_left(cluster),
        (_, status) => bail!("status {status}: {} {}", text(&end.out), text(&end.err)),
    }
}

/// Something else in place of our range: the program may end of it or get errors, nobody else may be harmed, and
/// it can be killed.
fn stub_replaced(cluster: &Cluster, what: &str) -> Result<()> {
    let mut hostile = Hostile::start(cluster, "stubmap", what)?;
    hostile.go("2")?;
    let lives = hostile.strike()?;
    inspect(cluster, 2, 1)?;
    if lives {
        // It may be refused; it must be decided.
        if let Err(error) = hostile.go("home") {
            eprintln!("  {what}: {error:#}");
        }
    }
    let end = hostile.finish()?;
    eprintln!("  {what}: lives {lives}, status {}", end.status);
    only_the_neighbour_is_left(cluster)
}

/// Besides the neighbour, all families have ended.
fn only_the_neighbour_is_left(cluster: &Cluster) -> Result<()> {
    for node in [1, 2] {
        let shims = || {
            let table =
                cluster.run(node, &["sh", "-c", "ls /run/tern/shims/*.sock | wc -l"]).unwrap_or_default();
            text(&table)
        };
        // A guest without home ends itself 5 s after home has given up.
        let ended = until("only the neighbour's shim is left", Duration::from_secs(20), || shims() == "1");
        ended.with_context(|| format!("node {node} has {} shims", shims()))?;
    }
    Ok(())
}

/// Writing over the part of our range that it may write to harms nobody, itself included.
fn scribbling(cluster: &Cluster) -> Result<()> {
    let mut hostile = Hostile::start(cluster, "scribble", "")?;
    hostile.go("2")?;
    if !hostile.strike()? {
        bail!("it ended: {:?}", hostile.finish()?);
    }
    for stop in ["home", "2", "home", "2"] {
        std::thread::sleep(Duration::from_millis(300));
        hostile.go(stop)?;
    }
    inspect(cluster, 2, 2)?;
    let end = hostile.finish()?;
    if end.status != 0 || !end.out.ends_with(b"PASS\n") {
        bail!("status {}: {}", end.status, text(&end.err));
    }
    only_the_neighbour_is_left(cluster)
}

/// A deputy overwritten by its own program: that program's end, and nobody else's.
fn own_deputy(cluster: &Cluster, what: &str) -> Result<()> {
    let mut hostile = Hostile::start(cluster, "selfmem", what)?;
    hostile.go("2")?;
    let lives = hostile.strike()?;
    if lives && let Err(error) = hostile.go("home") {
        eprintln!("  {what}: {error:#}");
    }
    let end = hostile.finish()?;
    eprintln!("  {what}: lives {lives}, status {}", end.status);
    only_the_neighbour_is_left(cluster)
}

fn thirty_two_bit_call(cluster: &Cluster) -> Result<()> {
    let mut hostile = Hostile::start(cluster, "compat", "")?;
    hostile.go("2")?;
    let lives = hostile.strike()?;
    let end = hostile.finish()?;
    // Ended by the filter, by whichever signal: it must not have been made there.
    if lives || end.status < 128 {
        bail!("it was made: status {}, {}", end.status, text(&end.out));
    }
    only_the_neighbour_is_left(cluster)
}

#[test]
fn a_guest_has_no_effect_where_it_runs() {
    let place = Place::up("no-way-calls");
    let cluster = &place.cluster;
    let mut cases: Vec<(String, Case<'_>)> = vec![("raw calls".into(), Box::new(|| raw_calls(cluster)))];
    for what in ["unshare", "setns", "clone", "ptrace", "writev", "bpf", "perf"] {
        cases.push((format!("homeward {what}"), Box::new(move || homeward(cluster, what))));
    }
    cases.push(("a 32-bit call".into(), Box::new(|| thirty_two_bit_call(cluster))));
    place.judge(cases);
}

#[test]
fn our_range_in_a_guest_is_no_way_out() {
    let place = Place::up("no-way-range");
    let cluster = &place.cluster;
    let mut cases: Vec<(String, Case<'_>)> = vec![("scribbling".into(), Box::new(|| scribbling(cluster)))];
    for what in ["getppid", "socket", "fork", "unshare", "clone"] {
        cases.push((format!("through the stub: {what}"), Box::new(move || stub_call(cluster, what))));
    }
    for what in ["nothing", "trap", "another call", "none", "gone", "loop", "repeat"] {
        cases.push((format!("in its place: {what}"), Box::new(move || stub_replaced(cluster, what))));
    }
    for what in ["ones", "random", "code"] {
        cases.push((format!("its deputy: {what}"), Box::new(move || own_deputy(cluster, what))));
    }
    place.judge(cases);
}

/// The name of the function below that this test program runs inside a node.
const INSIDE: &str = "no_way_in::what_strangers_try";

/// Runs [`what_strangers_try`] on node 1, against node 2 and the neighbour's shim there; as another user if asked.
fn strangers(cluster: &Cluster, mode: &str) -> Result<()> {
    let node = if mode == "port" { 2 } else { 1 };
    let sockets = cluster.run(node, &["sh", "-c", "basename -s .sock /run/tern/shims/*.sock"])?;
    let shim = text(&sockets).lines().next().unwrap_or_default().to_owned();
    let own = std::env::current_exe()?;
    let own = own.to_str().context("an odd path")?;
    let mut words = vec![own, "--exact", INSIDE, "--ignored", "--nocapture"];
    if mode != "port" {
        words.splice(0..0, ["--reuid=65534", "--regid=65534", "--clear-groups"]);
    }
    let mut command = cluster.command(1, if mode == "port" { words.remove(0) } else { "setpriv" });
    let address = format!("{}:7101", cluster.lab().node(2).address());
    command.args(words).env(stranger::ADDRESS, address).env(stranger::SHIM, shim).env("TERN_TEST_MODE", mode);
    let daemon = pids(cluster, 2, "ternd")?;
    let end = command.output()?;
    if !end.status.success() || !text(&end.stdout).contains("1 passed") {
        bail!("{}\n{}", text(&end.stderr), text(&end.stdout));
    }
    for pid in daemon {
        let status = text(&cluster.run(2, &["cat", &format!("/proc/{pid}/status")])?);
        let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default();
        let most: u64 = line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(u64::MAX);
        if most > 128 << 10 {
            bail!("ternd has needed {most} KiB");
        }
    }
    Ok(())
}

#[test]
#[ignore = "is started by strangers_are_refused, inside a node"]
fn what_strangers_try() -> Result<()> {
    match std::env::var("TERN_TEST_MODE").as_deref() {
        Ok("port") => stranger::at_the_port(),
        Ok("sockets") => stranger::at_the_sockets(),
        // By somebody who runs all that is ignored.
        _ => Ok(()),
    }
}

/// Another user's process is not his to move, also when it is away.
fn another_users_process(cluster: &Cluster) -> Result<()> {
    let mut patient = Patient::start(cluster, "registers")?;
    patient.go("2")?;
    for to in ["home", "2"] {
        let mut command = cluster.command(1, "setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "tern", "migrate"]);
        let end = command.args([&*patient.pid().to_string(), to]).output()?;
        if end.status.code() != Some(3) {
            bail!("migrate {to} by another user ended with {}: {}", end.status, text(&end.stderr));
        }
    }
    match cluster.whereabouts(patient.pid())? {
        Some((2, _)) => {}
        other => bail!("it is at {other:?}"),
    }
    patient.finishes_rightly(SLACK)?;
    only_the_neighbour_is_left(cluster)
}

#[test]
fn strangers_are_refused() {
    let place = Place::up("no-way-strangers");
    let cluster = &place.cluster;
    place.judge(vec![
        ("the port".into(), Box::new(|| strangers(cluster, "port"))),
        ("the sockets".into(), Box::new(|| strangers(cluster, "sockets"))),
        ("another user's process".into(), Box::new(|| another_users_process(cluster))),
    ]);
}
