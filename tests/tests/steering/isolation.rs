//! Isolation: neither strangers on the port nor a guest may get into a node.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::stranger;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{
    TestProcess, await_nothing_left, kill_shims, pids, set_timeouts, wait_until,
};
use tern_tests::drivers::hostile_guest::{Hostile, inspect};
use tern_tests::programs::built;
use tern_tests::runs::verdict::Verdict;

/// How long shims and daemons may take to clean up.
const SLACK: Duration = Duration::from_secs(12);

/// Number of namespaces that the sandbox of a family adds to the count.
const SANDBOX_NAMESPACES: usize = 3;

type Case<'a> = Box<dyn Fn() -> Result<()> + Send + 'a>;

/// Nodes 1 and 2, with a neighbour: a guest of another family on node 2, which no case may disturb.
struct TestCluster {
    cluster: Cluster,
}

impl TestCluster {
    fn up(prefix: &str) -> Self {
        built().unwrap();
        let cluster = Cluster::with_nodes(prefix, 2).unwrap();
        set_timeouts(&cluster, 3, 8).unwrap();
        Self { cluster }
    }

    /// Runs cases one after the other beside the neighbour, and checks the cluster after each.
    fn run_cases(&self, cases: Vec<(String, Case<'_>)>) {
        let cluster = &self.cluster;
        let daemons = || [1, 2].map(|node| pids(cluster, node, "ternd").unwrap_or_default());
        let present = Mutex::new((neighbour(cluster).unwrap(), daemons()));
        let wanted = |name: &str| std::env::var("TERN_CASES").map_or(true, |w| name.contains(&w));
        let mut verdict = Verdict::default();
        verdict.each(cases.into_iter().filter(|(name, _)| wanted(name)), 1, |case: Case<'_>| {
            let mut present = present.lock().unwrap_or_else(PoisonError::into_inner);
            let why = match case().and_then(|()| self.check_health(&present.1, present.0.pid())) {
                Ok(()) => return Ok(vec![]),
                Err(why) => format!("{why:#}\n{}", cluster.diagnostics(0)),
            };
            // Leftovers of this case would fail the next ones.
            let _ = (kill_shims(cluster, 1), kill_shims(cluster, 2));
            let _ = [1, 2].map(|node| cluster.lab().restart_daemon(node));
            match await_nothing_left(cluster, &[1, 2], SLACK).and_then(|()| neighbour(cluster)) {
                Ok(new) => *present = (new, daemons()),
                Err(error) => return Err(format!("{why}\nand no new neighbour can be started: {error:#}")),
            }
            Err(why)
        });
        verdict.each([("the neighbour".to_owned(), ())], 1, |()| {
            let mut present = present.lock().unwrap_or_else(PoisonError::into_inner);
            let end = present.0.finish().and_then(|end| match end.status {
                0 => await_nothing_left(cluster, &[1, 2], SLACK),
                status => bail!("status {status}: {}", text(&end.err)),
            });
            end.map(|()| vec![]).map_err(|why| format!("{why:#}\n{}", cluster.diagnostics(0)))
        });
        verdict.conclude();
    }

    /// Checks that the daemons are the same as before and reply, and that another process can be
    /// moved to node 2.
    fn check_health(&self, daemons: &[Vec<i32>; 2], neighbour: i32) -> Result<()> {
        for (node, before) in [1, 2].into_iter().zip(daemons) {
            let now = pids(&self.cluster, node, "ternd")?;
            if now != *before {
                bail!("ternd of node {node} is {now:?}, was {before:?}");
            }
            if !self.cluster.tool(node, "status").output()?.status.success() {
                bail!("ternd of node {node} does not answer");
            }
        }
        match self.cluster.location(neighbour)? {
            Some((2, _)) => {}
            other => bail!("the neighbour should be on node 2, but mps reports {other:?}"),
        }
        let mut probe = TestProcess::start(&self.cluster, "registers")?;
        probe.migrate("2").context("no process can be moved any more")?;
        probe.finish_correctly(SLACK)
    }
}

/// A well-behaved guest on node 2.
fn neighbour(cluster: &Cluster) -> Result<Hostile<'_>> {
    let mut neighbour = Hostile::start(cluster, "neighbour", "")?;
    neighbour.migrate("2")?;
    match neighbour.attack()? {
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

/// Raw calls of a guest have home's results, and no effect where it runs.
fn raw_calls(cluster: &Cluster) -> Result<()> {
    cluster.run(1, &["sh", "-c", "echo yes > /tmp/only-at-home"])?;
    let mut hostile = Hostile::start(cluster, "raw", "")?;
    hostile.migrate("2")?;
    if !hostile.attack()? {
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
    let away = cluster.location(hostile.pid())?;
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
        other => bail!("it should have run on node 2, but mps reports {other:?}"),
    }
}

/// A call that only home can make has the same result as for a program that never moved.
fn homeward(cluster: &Cluster, what: &str) -> Result<()> {
    let mut resident = Hostile::start(cluster, "homeward", what)?;
    resident.attack()?;
    let wanted = resident.finish()?;
    if wanted.status != 0 {
        bail!("it fails without migration: {}", text(&wanted.err));
    }
    let before = namespaces(cluster)?;
    let mut hostile = Hostile::start(cluster, "homeward", what)?;
    hostile.migrate("2")?;
    hostile.attack()?;
    let after = namespaces(cluster)?;
    let end = hostile.finish()?;
    if let Some(difference) = end.difference(&wanted) {
        bail!("{difference}");
    }
    if after > before + SANDBOX_NAMESPACES {
        bail!("there are {after} namespaces on node 2, where there were {before}");
    }
    only_the_neighbour_is_left(cluster)
}

/// Number of user, network and pid namespaces of the processes of node 2.
fn namespaces(cluster: &Cluster) -> Result<usize> {
    let mut all = std::collections::BTreeSet::new();
    for pid in cluster.lab().node(2).processes()? {
        for space in ["user", "net", "pid"] {
            all.extend(std::fs::read_link(format!("/proc/{pid}/ns/{space}")).ok());
        }
    }
    Ok(all.len())
}

/// A jump to the stub's `syscall` instruction is trapped like any call.
fn stub_call(cluster: &Cluster, what: &str) -> Result<()> {
    let before = namespaces(cluster)?;
    let mut hostile = Hostile::start(cluster, "stubcall", what)?;
    hostile.migrate("2")?;
    let came_through = hostile.attack()?;
    let sockets = text(&cluster.run(2, &["ss", "-Hltunp"])?);
    inspect(cluster, 2, 1)?;
    let after = namespaces(cluster)?;
    if after > before + SANDBOX_NAMESPACES {
        bail!("there are {after} namespaces on node 2, where there were {before}");
    }
    if sockets.contains("tern:") {
        bail!("a guest owns a socket on node 2: {sockets}");
    }
    let end = hostile.finish()?;
    match (came_through, end.status) {
        (true, 0) => only_the_neighbour_is_left(cluster),
        // When it comes home with its program counter in the stub's range, it may end by a fault.
        (_, 132 | 135 | 139) if what == "unshare" || what == "clone" => only_the_neighbour_is_left(cluster),
        (_, status) => bail!("status {status}: {} {}", text(&end.out), text(&end.err)),
    }
}

/// The guest replaces the stub's mapping: the program may end or get errors, no other program may
/// be harmed, and it can be killed.
fn stub_replaced(cluster: &Cluster, what: &str) -> Result<()> {
    let mut hostile = Hostile::start(cluster, "stubmap", what)?;
    hostile.migrate("2")?;
    let survives = hostile.attack()?;
    inspect(cluster, 2, 1)?;
    if survives {
        // The move may be refused, but must not hang.
        if let Err(error) = hostile.migrate("home") {
            eprintln!("  {what}: {error:#}");
        }
    }
    let end = hostile.finish()?;
    eprintln!("  {what}: lives {survives}, status {}", end.status);
    only_the_neighbour_is_left(cluster)
}

/// Waits until all families but the neighbour's have ended.
fn only_the_neighbour_is_left(cluster: &Cluster) -> Result<()> {
    for node in [1, 2] {
        let shims = || {
            let table =
                cluster.run(node, &["sh", "-c", "ls /run/tern/shims/*.sock | wc -l"]).unwrap_or_default();
            text(&table)
        };
        // A guest without home ends itself 5 s after home's timeout.
        let ended =
            wait_until("only the neighbour's shim is left", Duration::from_secs(20), || shims() == "1");
        ended.with_context(|| format!("node {node} has {} shims", shims()))?;
    }
    Ok(())
}

/// Writing over the writable part of the stub's range harms no program, not even the one that
/// writes.
fn scribbling(cluster: &Cluster) -> Result<()> {
    let mut hostile = Hostile::start(cluster, "scribble", "")?;
    hostile.migrate("2")?;
    if !hostile.attack()? {
        bail!("it ended: {:?}", hostile.finish()?);
    }
    for stop in ["home", "2", "home", "2"] {
        std::thread::sleep(Duration::from_millis(300));
        hostile.migrate(stop)?;
    }
    inspect(cluster, 2, 2)?;
    let end = hostile.finish()?;
    if end.status != 0 || !end.out.ends_with(b"PASS\n") {
        bail!("status {}: {}", end.status, text(&end.err));
    }
    only_the_neighbour_is_left(cluster)
}

/// A program that overwrites its own deputy ends only itself.
fn own_deputy(cluster: &Cluster, what: &str) -> Result<()> {
    let mut hostile = Hostile::start(cluster, "selfmem", what)?;
    hostile.migrate("2")?;
    let survives = hostile.attack()?;
    if survives && let Err(error) = hostile.migrate("home") {
        eprintln!("  {what}: {error:#}");
    }
    let end = hostile.finish()?;
    eprintln!("  {what}: lives {survives}, status {}", end.status);
    only_the_neighbour_is_left(cluster)
}

fn thirty_two_bit_call(cluster: &Cluster) -> Result<()> {
    let mut hostile = Hostile::start(cluster, "compat", "")?;
    hostile.migrate("2")?;
    let survives = hostile.attack()?;
    let end = hostile.finish()?;
    // The filter must have killed the program, by whichever signal, so that the call was not made.
    if survives || end.status < 128 {
        bail!("the call was made: status {}, {}", end.status, text(&end.out));
    }
    only_the_neighbour_is_left(cluster)
}

#[test]
fn guest_has_no_effect_on_its_node() {
    let place = TestCluster::up("no-way-calls");
    let cluster = &place.cluster;
    let mut cases: Vec<(String, Case<'_>)> = vec![("raw calls".into(), Box::new(|| raw_calls(cluster)))];
    for what in ["unshare", "setns", "clone", "ptrace", "writev", "bpf", "perf"] {
        cases.push((format!("homeward {what}"), Box::new(move || homeward(cluster, what))));
    }
    cases.push(("a 32-bit call".into(), Box::new(|| thirty_two_bit_call(cluster))));
    place.run_cases(cases);
}

#[test]
fn stub_range_in_a_guest_is_no_way_out() {
    let place = TestCluster::up("no-way-range");
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
    place.run_cases(cases);
}

/// The name of the test function below that this test program runs inside a node.
const INSIDE: &str = "isolation::attacks_of_strangers";

/// Runs [`attacks_of_strangers`] on node 1: against the port of node 2, or, as another user,
/// against the sockets of node 1.
fn attack_as_stranger(cluster: &Cluster, mode: &str) -> Result<()> {
    let node = if mode == "port" { 2 } else { 1 };
    let sockets = cluster.run(node, &["sh", "-c", "basename -s .sock /run/tern/shims/*.sock"])?;
    let shim = text(&sockets).lines().next().unwrap_or_default().to_owned();
    let own = std::env::current_exe()?;
    let own = own.to_str().context("the path is not UTF-8")?;
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
            bail!("ternd has used {most} KiB");
        }
    }
    Ok(())
}

#[test]
#[ignore = "started by strangers_are_refused inside a node"]
fn attacks_of_strangers() -> Result<()> {
    match std::env::var("TERN_TEST_MODE").as_deref() {
        Ok("port") => stranger::at_the_port(),
        Ok("sockets") => stranger::at_the_sockets(),
        // Run by hand with all ignored tests.
        _ => Ok(()),
    }
}

/// A user may not move another user's process, also when it is away.
fn another_users_process(cluster: &Cluster) -> Result<()> {
    let mut process = TestProcess::start(cluster, "registers")?;
    process.migrate("2")?;
    for to in ["home", "2"] {
        let mut command = cluster.command(1, "setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "tern", "migrate"]);
        let end = command.args([&*process.pid().to_string(), to]).output()?;
        if end.status.code() != Some(3) {
            bail!("migrate {to} by another user ended with {}: {}", end.status, text(&end.stderr));
        }
    }
    match cluster.location(process.pid())? {
        Some((2, _)) => {}
        other => bail!("it is at {other:?}"),
    }
    process.finish_correctly(SLACK)?;
    only_the_neighbour_is_left(cluster)
}

#[test]
fn strangers_are_refused() {
    let place = TestCluster::up("no-way-strangers");
    let cluster = &place.cluster;
    place.run_cases(vec![
        ("the port".into(), Box::new(|| attack_as_stranger(cluster, "port"))),
        ("the sockets".into(), Box::new(|| attack_as_stranger(cluster, "sockets"))),
        ("another user's process".into(), Box::new(|| another_users_process(cluster))),
    ]);
}
