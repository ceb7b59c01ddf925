//! A lab leaves nothing behind, however it ends. Needs root.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::time::Duration;
use support::{assert_gone, lab, lab_command, options, output_of, remains, wait_until};
use tern_lab::{Lab, LabError, LabName};

/// Takes the lab down when dropped, also if the test fails.
struct TakeDownOnDrop(LabName);

impl Drop for TakeDownOnDrop {
    fn drop(&mut self) {
        let _ = tern_lab::down(&self.0);
    }
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Starts `tern-lab run` of a long command. Returns when the command is running.
fn running(name: &LabName) -> Child {
    let words = ["run", "--bare", "--link", "switch:1ms", "--", "sh", "-c", "setsid sleep 1000 & sleep 1000"];
    let child = lab_command(&words, name).stdin(Stdio::null()).spawn().unwrap();
    wait_until("the command runs", || {
        Lab::open(name).is_ok_and(|lab| lab.node(1).processes().is_ok_and(|p| p.len() >= 4))
    });
    child
}

#[test]
fn a_dropped_lab_leaves_nothing() {
    let lab = lab("switch:10mbit,1ms", 3);
    let name = lab.name().clone();
    lab.node(2).start_daemon("sleep", &["1000"], "sleep").unwrap();
    // A process that is stopped, and in a group of its own, is not ended as easily as others.
    output_of(
        &lab.node(3),
        "exec >/dev/null 2>&1; sleep 1000 & kill -STOP $!; \
        own=$(sed -n 's/^[0-9]*:cpu:\\(.*\\)\\/main$/\\/sys\\/fs\\/cgroup\\/cpu\\1/p' /proc/self/cgroup); \
        if [ -n \"$own\" ]; then mkdir $own/guests && echo $! > $own/guests/cgroup.procs; fi",
    );
    assert!(!remains(&name).is_empty());
    drop(lab);
    assert_gone(&name);
    // Taking it down again succeeds.
    tern_lab::down(&name).unwrap();
}

#[test]
fn a_failed_start_leaves_nothing() {
    let bad = tern_lab::LabOptions { helper: Some("/bin/false".into()), ..options("switch", 2) };
    assert!(Lab::up(&bad).is_err());
    assert_gone(&bad.name);
}

#[test]
fn name_is_used_by_one_lab_at_a_time() {
    let options = options("switch", 1);
    let lab = support::start_lab(&options);
    assert!(matches!(Lab::up(&options), Err(LabError::AlreadyUp(_))));
    // The failed start has not disturbed the running lab.
    assert_eq!(output_of(&lab.node(1), "hostname"), "node1");
    lab.down().unwrap();
    drop(support::start_lab(&options));
    assert_gone(&options.name);
}

#[test]
fn labs_are_independent() {
    let (a, b) = (lab("switch", 2), lab("switch", 2));
    drop(b);
    assert!(support::reaches(&a.node(1), &a.node(2)));
}

#[test]
fn run_exits_with_the_status_of_its_command() {
    let name = LabName::unique("test").unwrap();
    let _guard = TakeDownOnDrop(name.clone());
    let run = |script| lab_command(&["run", "--bare", "--", "sh", "-c", script], &name).output().unwrap();
    let output = run("hostname; exit 5");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "node1\n");
    assert_eq!(output.status.code(), Some(5));
    assert!(remains(&name).is_empty(), "{:?}", remains(&name));
    assert_eq!(run("kill -USR1 $$").status.signal(), Some(10));
    assert!(remains(&name).is_empty(), "{:?}", remains(&name));
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    for (number, end) in [(2, Signal::INT), (15, Signal::TERM), (1, Signal::HUP)] {
        let name = LabName::unique("test").unwrap();
        let _guard = TakeDownOnDrop(name.clone());
        let mut child = running(&name);
        signal(&child, end);
        assert_eq!(child.wait().unwrap().signal(), Some(number));
        assert!(remains(&name).is_empty(), "{:?}", remains(&name));
    }
}

#[test]
fn command_that_ignores_sigterm_does_not_delay_an_interrupted_run() {
    let name = LabName::unique("test").unwrap();
    let _guard = TakeDownOnDrop(name.clone());
    let script = "trap '' TERM; echo deaf; while :; do sleep 1; done";
    let mut command = lab_command(&["run", "--bare", "--", "sh", "-c", script], &name);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line)
        .unwrap();
    assert_eq!(line, "deaf\n");
    signal(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().signal(), Some(15));
    assert!(remains(&name).is_empty(), "{:?}", remains(&name));
}

#[test]
fn watchdog_takes_down_the_lab_of_a_killed_owner() {
    let name = LabName::unique("test").unwrap();
    let _guard = TakeDownOnDrop(name.clone());
    let mut child = running(&name);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_gone(&name);
}

#[test]
fn down_removes_a_lab_whose_owner_and_watchdog_were_killed() {
    let name = LabName::unique("test").unwrap();
    let _guard = TakeDownOnDrop(name.clone());
    let mut child = running(&name);
    // The watchdog is killed first, so that it cannot react to the owner's end.
    let found = remains(&name);
    let watchdog = found.iter().find(|t| t.contains(" watchdog ")).unwrap();
    let watchdog = Pid::from_raw(watchdog.split(' ').next().unwrap().parse().unwrap()).unwrap();
    kill_process(watchdog, Signal::KILL).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!remains(&name).is_empty());
    for _ in 0..2 {
        assert!(lab_command(&["down"], &name).status().unwrap().success());
    }
    assert_gone(&name);
    // Owner and watchdog are killed again, but the next command is `up` instead of `down`.
    let mut child = running(&name);
    let found = remains(&name);
    let watchdog = found.iter().find(|t| t.contains(" watchdog ")).unwrap();
    let watchdog = Pid::from_raw(watchdog.split(' ').next().unwrap().parse().unwrap()).unwrap();
    kill_process(watchdog, Signal::KILL).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let status = lab_command(&["up", "--bare"], &name).stderr(Stdio::null()).status().unwrap();
    assert!(!status.success(), "its processes still run: it is up");
}

#[test]
fn a_lab_stays_up_until_it_is_taken_down() {
    let name = LabName::unique("test").unwrap();
    let _guard = TakeDownOnDrop(name.clone());
    let ok = |words: &[&str]| {
        let output = lab_command(words, &name).output().unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(ok(&["up", "--bare", "--nodes", "2"]).contains("node2 10."));
    assert_eq!(ok(&["exec", "2", "--", "hostname"]), "node2\n");
    ok(&["cut", "2"]);
    ok(&["heal", "2"]);
    ok(&["cut", "1", "2"]);
    ok(&["heal"]);
    ok(&["kill", "2"]);
    assert_eq!(lab_command(&["exec", "2", "--", "true"], &name).output().unwrap().status.code(), Some(125));
    ok(&["restart", "2"]);
    assert_eq!(ok(&["exec", "2", "--", "hostname"]), "node2\n");
    ok(&["down"]);
    assert_gone(&name);
    assert!(!lab_command(&["cut", "2"], &name).output().unwrap().status.success());
}

#[test]
fn interrupted_start_creates_the_lab_or_removes_it() {
    for millis in [1, 3, 6, 10, 15, 20, 30, 45] {
        let name = LabName::unique("test").unwrap();
        let _guard = TakeDownOnDrop(name.clone());
        let mut child =
            lab_command(&["up", "--bare", "--nodes", "3"], &name).stdout(Stdio::null()).spawn().unwrap();
        // The signal may arrive at any step of the start.
        std::thread::sleep(Duration::from_millis(millis));
        let _ =
            kill_process(Pid::from_child(&child), if millis % 2 == 0 { Signal::KILL } else { Signal::TERM });
        if child.wait().unwrap().success() {
            tern_lab::down(&name).unwrap();
        }
        assert_gone(&name);
    }
}
