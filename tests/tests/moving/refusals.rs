//! Refused migrations: each has its exit code and reason, and the process continues unharmed.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tern_tests::cluster::fault_injection::{Fault, wait_until};
use tern_tests::cluster::{Cluster, Refused};
use tern_tests::programs::catalogue::{ENTRIES, Entry, Kind};
use tern_tests::programs::{Flavour, built, executable};
use tern_tests::runs::running::{ANNOUNCE, Running};
use tern_tests::runs::verdict::Verdict;

/// Exit codes of `migrate`: tern-control's `RefusalKind`.
const NOT_FOUND: i32 = 1;
const BAD_REQUEST: i32 = 2;
const NOT_ALLOWED: i32 = 3;
const CANNOT_MOVE: i32 = 4;
const UNAVAILABLE: i32 = 5;

type Checked = Result<(), String>;
type Check = fn(&Cluster) -> Checked;

/// Checks that a migration was refused with one of these codes, in one sentence that contains this
/// word.
fn expect_refusal(end: Result<impl std::fmt::Debug, Refused>, codes: &[i32], word: &str) -> Checked {
    let refused = match end {
        Ok(report) => return Err(format!("it was moved: {report:?}")),
        Err(refused) => refused,
    };
    let sentence = refused.message.lines().next().unwrap_or_default();
    if !codes.contains(&refused.code) {
        return Err(format!("exit code {} instead of {codes:?}: {}", refused.code, refused.message));
    }
    if sentence.len() < 15 || sentence.ends_with('.') || refused.message.contains("panicked") {
        return Err(format!("not a sentence: {:?}", refused.message));
    }
    if !refused.message.to_lowercase().contains(word) {
        return Err(format!("{word:?} is missing in {:?}", refused.message));
    }
    Ok(())
}

/// A program on node 1 that runs until its stop file exists, and then ends with PASS.
struct Subject<'a> {
    cluster: &'a Cluster,
    running: Running,
    until: String,
}

impl<'a> Subject<'a> {
    fn start(cluster: &'a Cluster, name: &str, before: &[&str]) -> Result<Self, String> {
        let entry = ENTRIES.iter().find(|e| e.name == name).ok_or("no such program")?;
        Self::start_with(cluster, entry, before, &[])
    }

    fn start_with(
        cluster: &'a Cluster,
        entry: &Entry,
        before: &[&str],
        args: &[&str],
    ) -> Result<Self, String> {
        let program =
            executable(entry, Flavour::Dynamic).map_err(|e| format!("{e:#}"))?.ok_or("not built")?;
        Self::start_file(cluster, entry.name, &program, (before, args))
    }

    fn start_file(
        cluster: &'a Cluster,
        name: &str,
        program: &Path,
        (before, args): (&[&str], &[&str]),
    ) -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let until = format!("/tmp/until-{name}-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let mut command = cluster.command(1, "sh");
        command.args(["-c", ANNOUNCE, "sh"]).args(before).arg(program).args(args);
        command.env("TERN_SECONDS", "0.5").env("TERN_UNTIL", &until).env("TERN_HEAP_MIB", "1");
        let mut running = Running::start(&mut command, false).map_err(|e| format!("{e:#}"))?;
        running.close_input();
        Ok(Self { cluster, running, until })
    }

    /// Waits until the program has the resource for which its move is refused.
    fn settle(&self) -> Checked {
        self.running.await_output("held\n").map_err(|e| format!("{e:#}"))
    }

    /// Its tracer's pid, and whether it has a seccomp filter.
    fn held(&self) -> Result<String, String> {
        let status = format!("/proc/{}/status", self.running.pid);
        let held = self.cluster.run(1, &["grep", "-E", "^(TracerPid|Seccomp):", &status]);
        held.map(|held| String::from_utf8_lossy(&held).into_owned()).map_err(|e| format!("{e:#}"))
    }

    fn unharmed(self) -> Checked {
        self.unharmed_as("TracerPid:\t0\nSeccomp:\t0\n")
    }

    /// Checks that it is in the same state as before, is not stopped, and ends as it should.
    fn unharmed_as(mut self, before: &str) -> Checked {
        let held = self.held()?;
        let status = format!("/proc/{}/status", self.running.pid);
        let state = self.cluster.run(1, &["grep", "State", &status]).map_err(|e| format!("{e:#}"))?;
        if held != before || state.starts_with(b"State:\tT") || state.starts_with(b"State:\tt") {
            return Err(format!(
                "it is left traced or stopped: {held:?} {:?}",
                String::from_utf8_lossy(&state)
            ));
        }
        self.cluster.touch(&self.until).map_err(|e| format!("{e:#}"))?;
        let end = self.running.finish(Duration::from_secs(30)).map_err(|e| format!("{e:#}"))?;
        if end.status != 0 || !end.out.ends_with(b"PASS\n") {
            return Err(format!("status {}, {}", end.status, String::from_utf8_lossy(&end.err)));
        }
        Ok(())
    }
}

/// Runs `migrate` as another user than root.
fn migrate_as_nobody(cluster: &Cluster, pid: i32) -> Result<String, Refused> {
    let ids = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let end = cluster
        .command(1, "setpriv")
        .args(ids)
        .args(["tern", "migrate", &pid.to_string(), "2", "--json"])
        .output()
        .map_err(|e| Refused { code: -1, message: e.to_string() })?;
    if end.status.success() {
        return Ok(String::from_utf8_lossy(&end.stdout).into_owned());
    }
    let message = String::from_utf8_lossy(&end.stderr).trim().to_owned();
    Err(Refused { code: end.status.code().unwrap_or(-1), message })
}

fn cannot_move(cluster: &Cluster, entry: &'static Entry, word: &'static str) -> Checked {
    // Started by mosrun, so that the balancer reports why it stays.
    let subject = Subject::start_with(cluster, entry, &["mosrun"], entry.args)?;
    subject.settle()?;
    let before = subject.held()?;
    // The reason is recorded only for a process that the node has scanned; it scans once a second.
    let (pid, until) = (subject.running.pid, std::time::Instant::now() + Duration::from_secs(10));
    loop {
        expect_refusal(cluster.migrate(pid, "2"), &[CANNOT_MOVE], word)?;
        let why = cluster.tool(1, "migrate").args(["--why", &pid.to_string()]).output();
        let why = why.map_err(|e| e.to_string())?;
        let listed = cluster.location(pid).map_err(|e| format!("{e:#}"))?;
        let said = String::from_utf8_lossy(&why.stdout).contains(word);
        let shown = listed.as_ref().is_some_and(|(at, why)| *at == 1 && why.contains(word));
        if said && shown {
            break;
        }
        if std::time::Instant::now() > until {
            let why =
                String::from_utf8_lossy(&why.stdout).into_owned() + &String::from_utf8_lossy(&why.stderr);
            return Err(format!("mps reports {listed:?}, migrate --why {why:?}"));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    subject.unharmed_as(&before)
}

/// A process that has ended and was not waited for by its parent.
fn zombie(cluster: &Cluster) -> Checked {
    let entry = ENTRIES.iter().find(|e| e.name == "staying").ok_or("no such program")?;
    let subject = Subject::start_with(cluster, entry, &[], &["zombie"])?;
    subject.settle()?;
    let found = cluster.run(1, &["pgrep", "-P", &subject.running.pid.to_string()]);
    let found = String::from_utf8_lossy(&found.map_err(|e| format!("{e:#}"))?).trim().parse();
    let pid = found.map_err(|e| format!("no child: {e}"))?;
    expect_refusal(cluster.migrate(pid, "2"), &[CANNOT_MOVE], "no memory:")?;
    subject.unharmed()
}

fn no_such_process(cluster: &Cluster) -> Checked {
    expect_refusal(cluster.migrate(99_999, "2"), &[NOT_FOUND], "99999")?;
    for pid in ["0", "-1", "x", "99999999999"] {
        let end = cluster.tool(1, "migrate").args(["--", pid, "2"]).output().map_err(|e| e.to_string())?;
        let message = String::from_utf8_lossy(&end.stderr).trim().to_owned();
        let refused = Refused { code: end.status.code().unwrap_or(-1), message };
        let end = if end.status.success() { Ok(pid) } else { Err(refused) };
        expect_refusal(end, &[NOT_FOUND, BAD_REQUEST, CANNOT_MOVE], "")?;
    }
    Ok(())
}

/// A 32-bit program is recognised by its executable file.
fn thirty_two_bit(cluster: &Cluster) -> Checked {
    let program = built().map_err(|e| format!("{e:#}"))?.join("foreign/narrow");
    let subject = Subject::start_file(cluster, "narrow", &program, (&[], &[]))?;
    subject.settle()?;
    for _ in 0..3 {
        expect_refusal(cluster.migrate(subject.running.pid, "2"), &[CANNOT_MOVE], "32-bit")?;
    }
    subject.unharmed()
}

/// The first process of a pid namespace, and the process whose children are created in it.
fn another_pid_namespace(cluster: &Cluster) -> Checked {
    let subject = Subject::start(cluster, "registers", &["unshare", "--pid", "--fork"])?;
    let parent = subject.running.pid;
    let until = std::time::Instant::now() + Duration::from_secs(10);
    let first = loop {
        let found = cluster.run(1, &["pgrep", "-x", "-P", &parent.to_string(), "registers"]);
        let found = found.ok().and_then(|pid| String::from_utf8(pid).ok()?.trim().parse().ok());
        match found {
            Some(pid) => break pid,
            None if std::time::Instant::now() > until => return Err("the program did not start".into()),
            None => {}
        }
    };
    expect_refusal(cluster.migrate(first, "2"), &[CANNOT_MOVE], "init:")?;
    expect_refusal(cluster.migrate(parent, "2"), &[CANNOT_MOVE], "pid:")?;
    subject.unharmed()
}

/// Nobody may move the node's init and daemon.
fn own_daemon(cluster: &Cluster) -> Checked {
    let table = cluster.run(1, &["pgrep", "-x", "ternd"]).map_err(|e| format!("{e:#}"))?;
    let pid: i32 = String::from_utf8_lossy(&table).lines().next().unwrap_or_default().parse().unwrap_or(1);
    expect_refusal(cluster.migrate(pid, "2"), &[CANNOT_MOVE, NOT_ALLOWED], "")?;
    expect_refusal(cluster.migrate(1, "2"), &[CANNOT_MOVE, NOT_ALLOWED], "")
}

fn another_users_process(cluster: &Cluster) -> Checked {
    let subject = Subject::start(cluster, "registers", &[])?;
    expect_refusal(migrate_as_nobody(cluster, subject.running.pid), &[NOT_ALLOWED], "")?;
    subject.unharmed()
}

/// A set-user-id program started by a user runs with another user's rights, so the user may not
/// move it.
fn setuid_program(cluster: &Cluster) -> Checked {
    let run = |words: &[&str]| cluster.run(1, words).map(drop).map_err(|e| format!("{e:#}"));
    run(&["cp", "/bin/sleep", "/tmp/setuid-sleep"])?;
    run(&["chmod", "4755", "/tmp/setuid-sleep"])?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
    let running =
        Running::start(command.args(["/tmp/setuid-sleep", "1000"]), false).map_err(|e| format!("{e:#}"))?;
    // Wait until setpriv has executed the program, whose effective user is root again.
    let status = format!("/proc/{}/comm", running.pid);
    let until = std::time::Instant::now() + Duration::from_secs(10);
    while !cluster.run(1, &["cat", &status]).is_ok_and(|comm| comm.starts_with(b"setuid-sleep")) {
        if std::time::Instant::now() > until {
            return Err("the setuid program did not start".into());
        }
    }
    let end = expect_refusal(migrate_as_nobody(cluster, running.pid), &[NOT_ALLOWED], "");
    run(&["kill", "-KILL", &running.pid.to_string()])?;
    end
}

fn unknown_node(cluster: &Cluster) -> Checked {
    let subject = Subject::start(cluster, "registers", &[])?;
    expect_refusal(cluster.migrate(subject.running.pid, "9"), &[NOT_FOUND, UNAVAILABLE], "9")?;
    expect_refusal(cluster.migrate(subject.running.pid, "nowhere"), &[NOT_FOUND, BAD_REQUEST], "nowhere")?;
    subject.unharmed()
}

/// mosrun to a node that does not exist starts nothing; with -F it starts the program at home.
fn mosrun_to_an_unknown_node(cluster: &Cluster) -> Checked {
    let mut command = cluster.tool(1, "mosrun");
    let end = command.args(["-9", "echo", "started"]).output().map_err(|e| e.to_string())?;
    if end.status.success() || !end.stdout.is_empty() {
        return Err(format!("it was started: {end:?}"));
    }
    let mut command = cluster.tool(1, "mosrun");
    let end = command.args(["-9", "-F", "echo", "started"]).output().map_err(|e| e.to_string())?;
    if end.status.code() != Some(0) || end.stdout != b"started\n" {
        return Err(format!("-F did not start it at home: {end:?}"));
    }
    Ok(())
}

fn dead_node(cluster: &Cluster) -> Checked {
    let subject = Subject::start(cluster, "registers", &[])?;
    cluster.lab().kill(3).map_err(|e| e.to_string())?;
    expect_refusal(cluster.migrate(subject.running.pid, "3"), &[UNAVAILABLE], "3")?;
    // The other nodes are not affected: it goes to node 2 and comes back.
    for stop in ["2", "home"] {
        cluster
            .migrate(subject.running.pid, stop)
            .map_err(|refused| format!("to {stop}: {}", refused.message))?;
    }
    subject.unharmed()
}

#[test]
fn refusals_have_reasons_and_do_no_harm() {
    built().unwrap();
    let has_setpriv = Command::new("setpriv").arg("--version").stdout(Stdio::null()).status().is_ok();
    assert!(has_setpriv, "setpriv is missing; install util-linux");
    let cluster = Cluster::up("refused").unwrap();
    type Case<'a> = Box<dyn Fn() -> Checked + Send + 'a>;
    let cluster = &cluster;
    let mut cases: Vec<(String, Case<'_>)> = Vec::new();
    for entry in ENTRIES {
        if let Kind::Refused(word) = entry.kind {
            let name = format!("{} {}", entry.name, entry.args.join(" "));
            cases.push((name, Box::new(move || cannot_move(cluster, entry, word))));
        }
    }
    let others: [(&str, Check); 11] = [
        ("zombie", zombie),
        ("32-bit program", thirty_two_bit),
        ("another pid namespace", another_pid_namespace),
        ("no such process", no_such_process),
        ("own daemon", own_daemon),
        ("another user's process", another_users_process),
        ("setuid program", setuid_program),
        ("unknown node", unknown_node),
        ("mosrun to an unknown node", mosrun_to_an_unknown_node),
        // Last, as node 3 is gone afterwards.
        ("dead node", dead_node),
        ("no daemon", no_daemon),
    ];
    cases.extend(others.map(|(name, case)| (name.to_owned(), Box::new(move || case(cluster)) as Case<'_>)));
    let mut verdict = Verdict::default();
    verdict.each(cases, 1, |case| match case() {
        Ok(()) => Ok(vec![]),
        Err(why) => Err(format!("{why}\n{}", cluster.diagnostics(0))),
    });
    verdict.conclude();
}

/// A filter that a thread installs while its process is sent is found when all threads have stopped, and
/// the process continues under it.
#[test]
fn filter_that_a_thread_installs_while_its_process_is_sent_is_found() {
    let cluster = Cluster::with_nodes("filtered", 2).unwrap();
    let fault = Fault::arm(&cluster, 1, "source:freeze").unwrap();
    let entry = ENTRIES.iter().find(|entry| entry.name == "staying").unwrap();
    let subject = Subject::start_with(&cluster, entry, &[], &["thread filter later"]).unwrap();
    subject.settle().unwrap();
    fault.set().unwrap();
    let moved = std::thread::scope(|scope| {
        let moving = scope.spawn(|| cluster.migrate(subject.running.pid, "2"));
        fault.await_reached().unwrap();
        cluster.touch(&format!("{}.filter", subject.until)).unwrap();
        let filtered = wait_until("the thread has a filter", Duration::from_secs(10), || {
            subject.running.output_so_far().contains("filtered")
        });
        fault.release();
        filtered.unwrap();
        moving.join().unwrap()
    });
    expect_refusal(moved, &[CANNOT_MOVE], "seccomp:").unwrap();
    subject.unharmed().unwrap();
}

/// If the daemon does not run, a tool reports this and suggests what to do.
fn no_daemon(cluster: &Cluster) -> Checked {
    let pids = cluster.run(2, &["pgrep", "-x", "ternd"]).map_err(|e| format!("{e:#}"))?;
    for pid in String::from_utf8_lossy(&pids).split_whitespace() {
        cluster.run(2, &["kill", "-KILL", pid]).map_err(|e| format!("{e:#}"))?;
    }
    // Until it has ended, it may still accept connections.
    while cluster.run(2, &["pgrep", "-x", "ternd"]).is_ok() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let end = cluster.tool(2, "status").output().map_err(|e| e.to_string())?;
    let message = String::from_utf8_lossy(&end.stderr).trim().to_owned();
    let refused = Refused { code: end.status.code().unwrap_or(-1), message };
    let end = if end.status.success() { Ok("status succeeded") } else { Err(refused) };
    expect_refusal(end, &[UNAVAILABLE], "ternd")
}
