//! A lab leaves nothing behind, however it ends. Needs root.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod trial;

use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::time::Duration;
use tern_lab::{Lab, LabError, Name};
use trial::{assert_gone, lab, options, program, says, traces, wait_until};

/// Takes the lab down when dropped, also if the test fails.
struct Broom(Name);

impl Drop for Broom {
    fn drop(&mut self) {
        let _ = tern_lab::down(&self.0);
    }
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Starts `tern-lab run` of a long command. Returns when the command is running.
fn running(name: &Name) -> Child {
    let words = ["run", "--bare", "--link", "switch:1ms", "--", "sh", "-c", "setsid sleep 1000 & sleep 1000"];
    let child = program(&words, name).stdin(Stdio::null()).spawn().unwrap();
    wait_until("the command runs", || {
        Lab::open(name).is_ok_and(|lab| lab.node(1).processes().is_ok_and(|p| p.len() >= 4))
    });
    child
}

#[test]
fn a_dropped_lab_leaves_nothing() {
    let lab = lab("switch:10mbit,1ms", 3);
    let name = lab.name().clone();
    lab.node(2).daemon("sleep", &["1000"], "sleep").unwrap();
    // Stopped, and in a group of its own: not the easiest to end.
    says(
        &lab.node(3),
        "exec >/dev/null 2>&1; sleep 1000 & kill -STOP $!; \
        own=$(sed -n 's/^[0-9]*:cpu:\\(.*\\)\\/main$/\\/sys\\/fs\\/cgroup\\/cpu\\1/p' /proc/self/cgroup); \
        if [ -n \"$own\" ]; then mkdir $own/guests && echo $! > $own/guests/cgroup.procs; fi",
    );
    assert!(!traces(&name).is_empty());
    drop(lab);
    assert_gone(&name);
    // It is idempotent.
    tern_lab::down(&name).unwrap();
}

#[test]
fn a_failed_start_leaves_nothing() {
    let bad = tern_lab::Options { helper: Some("/bin/false".into()), ..options("switch", 2) };
    assert!(Lab::up(&bad).is_err());
    assert_gone(&bad.name);
}

#[test]
fn one_name_is_one_lab() {
    let options = options("switch", 1);
    let lab = trial::up(&options);
    assert!(matches!(Lab::up(&options), Err(LabError::AlreadyUp(_))));
    // The attempt has not disturbed it.
    assert_eq!(says(&lab.node(1), "hostname"), "node1");
    lab.down().unwrap();
    drop(trial::up(&options));
    assert_gone(&options.name);
}

#[test]
fn labs_live_side_by_side() {
    let (a, b) = (lab("switch", 2), lab("switch", 2));
    drop(b);
    assert!(trial::reaches(&a.node(1), &a.node(2)));
}

#[test]
fn run_ends_as_its_command_ends() {
    let name = Name::unique("test").unwrap();
    let _broom = Broom(name.clone());
    let run = |script| program(&["run", "--bare", "--", "sh", "-c", script], &name).output().unwrap();
    let output = run("hostname; exit 5");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "node1\n");
    assert_eq!(output.status.code(), Some(5));
    assert!(traces(&name).is_empty(), "{:?}", traces(&name));
    assert_eq!(run("kill -USR1 $$").status.signal(), Some(10));
    assert!(traces(&name).is_empty(), "{:?}", traces(&name));
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    for (number, end) in [(2, Signal::INT), (15, Signal::TERM), (1, Signal::HUP)] {
        let name = Name::unique("test").unwrap();
        let _broom = Broom(name.clone());
        let mut child = running(&name);
        signal(&child, end);
        assert_eq!(child.wait().unwrap().signal(), Some(number));
        assert!(traces(&name).is_empty(), "{:?}", traces(&name));
    }
}

#[test]
fn a_stubborn_command_does_not_keep_an_interrupted_run_up() {
    let name = Name::unique("test").unwrap();
    let _broom = Broom(name.clone());
    let script = "trap '' TERM; echo deaf; while :; do sleep 1; done";
    let mut command = program(&["run", "--bare", "--", "sh", "-c", script], &name);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line)
        .unwrap();
    assert_eq!(line, "deaf\n");
    signal(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().signal(), Some(15));
    assert!(traces(&name).is_empty(), "{:?}", traces(&name));
}

#[test]
fn a_killed_owner_is_survived_by_its_keeper() {
    let name = Name::unique("test").unwrap();
    let _broom = Broom(name.clone());
    let mut child = running(&name);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_gone(&name);
}

#[test]
fn down_finds_what_a_killed_owner_and_keeper_have_left() {
    let name = Name::unique("test").unwrap();
    let _broom = Broom(name.clone());
    let mut child = running(&name);
    // The keeper is killed first, so that it cannot react to the owner's end.
    let found = traces(&name);
    let keeper = found.iter().find(|t| t.contains(" keeper ")).unwrap();
    let keeper = Pid::from_raw(keeper.split(' ').next().unwrap().parse().unwrap()).unwrap();
    kill_process(keeper, Signal::KILL).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!traces(&name).is_empty());
    for _ in 0..2 {
        assert!(program(&["down"], &name).status().unwrap().success());
    }
    assert_gone(&name);
    // The same, but the next command is `up` instead of `down`.
    let mut child = running(&name);
    let found = traces(&name);
    let keeper = found.iter().find(|t| t.contains(" keeper ")).unwrap();
    let keeper = Pid::from_raw(keeper.split(' ').next().unwrap().parse().unwrap()).unwrap();
    kill_process(keeper, Signal::KILL).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let status = program(&["up", "--bare"], &name).stderr(Stdio::null()).status().unwrap();
    assert!(!status.success(), "its processes still run: it is up");
}

#[test]
fn a_lab_stays_up_until_it_is_taken_down() {
    let name = Name::unique("test").unwrap();
    let _broom = Broom(name.clone());
    let ok = |words: &[&str]| {
        let output = program(words, &name).output().unwrap();
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
    assert_eq!(program(&["exec", "2", "--", "true"], &name).output().unwrap().status.code(), Some(125));
    ok(&["restart", "2"]);
    assert_eq!(ok(&["exec", "2", "--", "hostname"]), "node2\n");
    ok(&["down"]);
    assert_gone(&name);
    assert!(!program(&["cut", "2"], &name).output().unwrap().status.success());
}

#[test]
fn an_interrupted_start_leaves_all_or_nothing() {
    for millis in [1, 3, 6, 10, 15, 20, 30, 45] {
        let name = Name::unique("test").unwrap();
        let _broom = Broom(name.clone());
        let mut child =
            program(&["up", "--bare", "--nodes", "3"], &name).stdout(Stdio::null()).spawn().unwrap();
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
