//! Manual control: freezing processes, moving and signalling a job, sending a process away, and the
//! commands with old names.
#![allow(clippy::unwrap_used, reason = "tests and their helpers fail by panicking")]

use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::{ANNOUNCE, Running};

const EVENT_TIMEOUT: Duration = Duration::from_secs(60);

/// A program that computes and checks itself until this file exists.
fn computing(cluster: &Cluster, until: &str) -> Running {
    let program = named("registers", Flavour::Static).unwrap();
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh"]).arg(&program).env("TERN_SECONDS", "0.1").env("TERN_UNTIL", until);
    let mut running = Running::start(&mut command, false).unwrap();
    running.close_input();
    running
}

/// Its state as its node's /proc reports it: `R (running)`, `t (tracing stop)` and the like.
fn state(cluster: &Cluster, pid: i32) -> String {
    let said = cluster.run(1, &["sed", "-n", "s/^State:.//p", &format!("/proc/{pid}/status")]);
    String::from_utf8_lossy(&said.unwrap_or_default()).trim().to_owned()
}

/// Its state and node as mps reports them.
fn shown(cluster: &Cluster, pid: i32) -> Option<(String, u16)> {
    let row = cluster.processes(1).unwrap().into_iter().find(|row| row.pid.0 == pid && row.from.is_none())?;
    Some((row.state, row.r#where?.0))
}

fn wait_until(cluster: &Cluster, what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + EVENT_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < end, "timed out: {what}\n{}", cluster.diagnostics(0));
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn migrate(cluster: &Cluster, pid: i32, word: &str) -> (i32, String) {
    // A migrate that hangs must fail its test.
    let words = ["60", "tern", "migrate", &*pid.to_string(), word];
    let end = cluster.command(1, "timeout").args(words).output().unwrap();
    (end.status.code().unwrap_or(-1), String::from_utf8_lossy(&end.stderr).into_owned())
}

fn freeze(cluster: &Cluster, pid: i32) {
    assert_eq!(migrate(cluster, pid, "freeze"), (0, String::new()));
    assert_eq!(state(cluster, pid), "t (tracing stop)");
    assert_eq!(shown(cluster, pid), Some(("frozen".into(), 1)));
}

#[test]
fn frozen_process_stops_at_home_until_continued() {
    let cluster = Cluster::with_nodes("frozen", 2).unwrap();
    for away in [false, true] {
        let file = format!("/tmp/frozen-{away}");
        let mut running = computing(&cluster, &file);
        let pid = running.pid;
        if away {
            cluster.migrate(pid, "2").unwrap();
        }
        for _ in 0..2 {
            freeze(&cluster, pid);
            let (code, said) = migrate(&cluster, pid, "2");
            assert!(code == 4 && said.contains("is frozen"), "{code}: {said}");
            let (code, said) = migrate(&cluster, pid, "freeze");
            assert!(code == 2 && said.contains("frozen already"), "{code}: {said}");
            assert_eq!(migrate(&cluster, pid, "continue"), (0, String::new()));
            let (code, said) = migrate(&cluster, pid, "continue");
            assert!(code == 2 && said.contains("is not frozen"), "{code}: {said}");
            wait_until(&cluster, "it runs", || state(&cluster, pid).starts_with('R'));
        }
        // It can move again, and be frozen while away.
        cluster.migrate(pid, "2").unwrap();
        freeze(&cluster, pid);
        wait_until(&cluster, "its guest is gone", || {
            cluster.processes(2).unwrap().iter().all(|row| row.from.is_none())
        });
        // Its stop file exists now, but it does not run.
        cluster.touch(&file).unwrap();
        assert_eq!(state(&cluster, pid), "t (tracing stop)");
        assert_eq!(migrate(&cluster, pid, "continue").0, 0);
        let end = running.finish(EVENT_TIMEOUT).unwrap();
        assert!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}");
    }
}

#[test]
fn process_in_an_exec_loop_can_be_frozen() {
    let cluster = Cluster::with_nodes("frozen-exec", 1).unwrap();
    cluster.run(1, &["sh", "-c", "echo 'exec sh /tmp/again' > /tmp/again"]).unwrap();
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh", "sh", "/tmp/again"]);
    let mut running = Running::start(&mut command, false).unwrap();
    // Some of these coincide with an exec.
    for _ in 0..40 {
        freeze(&cluster, running.pid);
        assert_eq!(migrate(&cluster, running.pid, "continue"), (0, String::new()));
    }
    cluster.run(1, &["kill", &running.pid.to_string()]).unwrap();
    assert_eq!(running.finish(EVENT_TIMEOUT).unwrap().status, 128 + 15);
}

#[test]
fn signals_of_frozen_process_are_pending_except_sigkill() {
    let cluster = Cluster::with_nodes("frozen-signals", 2).unwrap();
    for (signal, away) in [("TERM", false), ("TERM", true), ("KILL", false), ("KILL", true)] {
        let mut running = computing(&cluster, "/tmp/never");
        let pid = running.pid;
        if away {
            cluster.migrate(pid, "2").unwrap();
        }
        freeze(&cluster, pid);
        // Its parent sees no stop, not even with WUNTRACED.
        cluster.run(1, &["kill", "-s", signal, &pid.to_string()]).unwrap();
        if signal == "TERM" {
            assert_eq!(state(&cluster, pid), "t (tracing stop)");
            assert_eq!(migrate(&cluster, pid, "continue").0, 0);
        }
        let end = running.finish(EVENT_TIMEOUT).unwrap();
        assert_eq!(end.status, if signal == "TERM" { 128 + 15 } else { 128 + 9 }, "{signal} {away}");
        wait_until(&cluster, "it is no longer listed", || shown(&cluster, pid).is_none());
    }
}

#[test]
fn process_is_frozen_after_its_pending_sleep() {
    let cluster = Cluster::with_nodes("frozen-sleep", 2).unwrap();
    let mut command = cluster.command(1, "sh");
    // The shell is migrated; its sleep is pending in the kernel at home.
    command.args(["-c", ANNOUNCE, "sh", "sleep", "12"]);
    let mut running = Running::start(&mut command, false).unwrap();
    let pid = running.pid;
    cluster.migrate(pid, "2").unwrap();
    assert_eq!(migrate(&cluster, pid, "freeze"), (0, String::new()));
    assert_eq!(shown(&cluster, pid), Some(("frozen".into(), 1)));
    wait_until(&cluster, "it has stopped", || state(&cluster, pid).starts_with('t'));
    assert!(!running.has_ended());
    assert_eq!(migrate(&cluster, pid, "continue").0, 0);
    assert_eq!(running.finish(EVENT_TIMEOUT).unwrap().status, 0);
}

#[test]
fn job_is_moved_and_signalled_as_a_whole() {
    let cluster = Cluster::with_nodes("frozen-job", 2).unwrap();
    // A shell of the job with two children.
    let script = "sleep 1000 & sleep 1000 & echo $$ >&2; wait";
    let mut command = cluster.command(1, "mosrun");
    command.args(["-L", "-J7", "sh", "-c", script]);
    let mut running = Running::start(&mut command, false).unwrap();
    let mut other = computing(&cluster, "/tmp/other");
    let job =
        |tool: &str, words: &[&str]| cluster.tool(1, tool).args(words).args(["-J", "7"]).output().unwrap();
    let rows = || -> Vec<tern_control::ProcessRow> {
        serde_json::from_slice(&job("mps", &["--json"]).stdout).unwrap()
    };
    let at = |place: u16| rows().iter().filter(|row| row.r#where.is_some_and(|at| at.0 == place)).count();
    wait_until(&cluster, "all three are there", || rows().len() == 3);
    let moved = job("migrate", &["2"]);
    assert!(moved.status.success(), "{moved:?}");
    assert_eq!((at(1), at(2)), (0, 3), "{}", cluster.diagnostics(0));
    let home = job("migrate", &["home"]);
    assert!(home.status.success(), "{home:?}");
    assert_eq!((at(1), at(2)), (3, 0));
    let killed = job("moskillall", &["-KILL", "--json"]);
    assert!(killed.status.success(), "{killed:?}");
    let pids: Vec<i32> = serde_json::from_slice(&killed.stdout).unwrap();
    assert!(pids.len() == 3 && pids.contains(&running.pid), "{pids:?}");
    assert_eq!(running.finish(EVENT_TIMEOUT).unwrap().status, 128 + 9);
    assert!(!other.has_ended(), "it is not part of the job");
    assert_eq!(job("moskillall", &[]).status.code(), Some(1), "nothing is left");
    cluster.touch("/tmp/other").unwrap();
    assert_eq!(other.finish(EVENT_TIMEOUT).unwrap().status, 0);
}

#[test]
fn migrate_out_moves_to_another_node() {
    let cluster = Cluster::with_nodes("out", 2).unwrap();
    let guest = computing(&cluster, "/tmp/never");
    cluster.migrate(guest.pid, "2").unwrap();
    let out_of_2 = || cluster.tool(2, "migrate").args([&*guest.pid.to_string(), "out"]).output().unwrap();
    let out = out_of_2();
    assert!(out.status.success(), "{out:?}\n{}", cluster.diagnostics(guest.pid));
    assert!(cluster.processes(2).unwrap().iter().all(|row| row.from.is_none()), "it is still there");
    wait_until(&cluster, "it has come home", || {
        shown(&cluster, guest.pid).is_none_or(|(_, place)| place == 1)
    });
    assert!(!out_of_2().status.success(), "it is not there any more");
    // A process at home goes to the best other node, even if it gains nothing. For a process that
    // mosrun has not started no load is measured, so there is no best node.
    let (code, said) = migrate(&cluster, guest.pid, "out");
    assert!(code == 1 && said.contains("not balanced"), "{code}: {said}");
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh", "mosrun", "-L", "sleep", "1000"]);
    let own = Running::start(&mut command, false).unwrap();
    wait_until(&cluster, "it has started, and node 1 has looked at it", || {
        cluster.tool(1, "migrate").args([&*own.pid.to_string(), "--why"]).output().unwrap().status.success()
    });
    wait_until(&cluster, "node 2 is known", || {
        best_node(&cluster, &["--only", "2"]) == (Some(0), "2".into())
    });
    assert_eq!(migrate(&cluster, own.pid, "out"), (0, String::new()), "{}", cluster.diagnostics(own.pid));
    assert_eq!(shown(&cluster, own.pid), Some(("running".into(), 2)));
    let (code, said) = migrate(&cluster, own.pid, "out");
    assert!(code == 2 && said.contains("out already"), "{code}: {said}");
}

/// The output and exit code of bestnode.
fn best_node(cluster: &Cluster, words: &[&str]) -> (Option<i32>, String) {
    let end = cluster.tool(1, "bestnode").args(words).output().unwrap();
    (end.status.code(), String::from_utf8_lossy(&end.stdout).trim().to_owned())
}

#[test]
fn commands_with_old_names_start_programs() {
    let cluster = Cluster::with_nodes("names", 2).unwrap();
    let waited = cluster.tool(1, "bestnode").args(["-w", "--only", "2", "--json"]).output().unwrap();
    let said: serde_json::Value = serde_json::from_slice(&waited.stdout).unwrap();
    assert_eq!(said["node"], 2, "{said}");
    assert_eq!(best_node(&cluster, &["--only", "1"]), (Some(0), "1".into()));
    assert_eq!(best_node(&cluster, &["--only", "9"]).0, Some(5));
    assert_eq!(best_node(&cluster, &["-m", "4000000000"]).0, Some(5), "no node has that much memory");
    for (at, name) in ["cpujob", "iojob", "nodecay", "slowdecay", "fastdecay"].into_iter().enumerate() {
        let job = (at + 1).to_string();
        let mut command = cluster.command(1, "sh");
        command.args(["-c", ANNOUNCE, "sh", name, "-2", "-J", &job, "sleep", "1000"]);
        let running = Running::start(&mut command, false).unwrap();
        wait_until(&cluster, "it is away", || shown(&cluster, running.pid) == Some(("running".into(), 2)));
        let listed = cluster.tool(1, "mosps").args(["--away", "--json", "-J", &job]).output().unwrap();
        let rows: Vec<tern_control::ProcessRow> = serde_json::from_slice(&listed.stdout).unwrap();
        assert_eq!(rows.iter().map(|row| row.pid.0).collect::<Vec<_>>(), [running.pid], "{name}");
    }
}

#[test]
fn tune_measures_costs_of_calls_and_links() {
    let cluster = Cluster::with_nodes("tune", 2).unwrap();
    wait_until(&cluster, "node 2 is known", || best_node(&cluster, &["--only", "2"]).0 == Some(0));
    let tuned = cluster.tool(1, "tune").arg("--json").output().unwrap();
    assert!(tuned.status.success(), "{tuned:?}\n{}", cluster.diagnostics(0));
    let costs: Vec<tern_control::Costs> = serde_json::from_slice(&tuned.stdout).unwrap();
    let [costs] = costs[..] else { panic!("{costs:?}") };
    assert!(costs.rtt_us > 0 && costs.bytes_per_s > 0 && costs.back_bytes_per_s > 0, "{costs:?}");
    // A forwarded call crosses the link there and back; a local one would take about a hundred
    // nanoseconds.
    assert!(costs.call_ns.is_some_and(|nanoseconds| nanoseconds > 5_000), "{costs:?}");
    let shown = cluster.tool(1, "mosctl").args(["gettune", "--json"]).output().unwrap();
    let rows: Vec<tern_control::LinkRow> = serde_json::from_slice(&shown.stdout).unwrap();
    assert!(rows.len() == 1 && rows[0].tuned == Some(costs), "{rows:?}");
    // The probe process is gone. It is killed as soon as it has moved, while its deputy is being
    // emptied, and a new tune starts at that very moment.
    for _ in 0..10 {
        wait_until(&cluster, "nothing is left", || cluster.processes(2).unwrap().is_empty());
        assert!(cluster.tool(1, "tune").output().unwrap().status.success());
    }
    wait_until(&cluster, "nothing is left", || cluster.processes(2).unwrap().is_empty());
}

/// Becomes another user when it reads a line.
const CHANGING_USER: &str = "
import os, sys
print('ready', flush=True)
sys.stdin.readline()
os.setuid(65534)
print('changed', flush=True)
sys.stdin.read()
";

#[test]
fn user_that_a_program_becomes_is_shown() {
    let cluster = Cluster::with_nodes("changing-user", 2).unwrap();
    let mut running = Running::python(&cluster, &["-L"], CHANGING_USER, "ready").unwrap();
    cluster.migrate(running.pid, "2").unwrap();
    let shown = |pid: i32| {
        let row =
            cluster.processes(1).unwrap().into_iter().find(|row| row.pid.0 == pid && row.from.is_none());
        row.map(|row| (row.uid, row.r#where.map(|node| node.0)))
    };
    assert_eq!(shown(running.pid), Some((0, Some(2))));
    running.send_input("go\n").unwrap();
    running.await_output("changed").unwrap();
    assert_eq!(shown(running.pid), Some((65534, Some(2))));
    running.close_input();
    assert_eq!(running.finish(EVENT_TIMEOUT).unwrap().status, 0);
}
