//! Nodes have private files, namespaces, processes and CPU shares. Needs root.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use support::{lab, output_of, sh, start_lab, wait_until};

#[test]
fn a_file_made_on_one_node_is_not_on_another() {
    let lab = lab("switch", 2);
    let (one, two) = (lab.node(1), lab.node(2));
    for at in [
        "/etc/tern-lab-test",
        "/tmp/tern-lab-test",
        "/root/tern-lab-test",
        "/dev/shm/tern-lab-test",
        "/run/x",
    ] {
        output_of(&one, &format!("echo mine > {at}"));
        assert_eq!(output_of(&one, &format!("cat {at}")), "mine");
        assert!(!sh(&two, &format!("test -e {at}")).status.success(), "{at} is on node 2");
        assert!(!Path::new(at).exists(), "{at} is on the machine");
    }
    assert_eq!(std::fs::read_to_string(one.path("/etc/tern-lab-test").unwrap()).unwrap(), "mine\n");
    // The machine's files are visible in nodes, and survive their removal in a node.
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    output_of(&one, &format!("rm {own}"));
    output_of(&two, &format!("cat {own}"));
    assert!(Path::new(own).exists());
}

#[test]
fn each_node_has_its_own_namespaces_and_identity() {
    let lab = lab("switch", 2);
    for kind in ["pid", "mnt", "net", "uts", "ipc"] {
        let mut spaces: BTreeSet<_> =
            lab.nodes().map(|n| output_of(&n, &format!("readlink /proc/self/ns/{kind}"))).collect();
        spaces.insert(std::fs::read_link(format!("/proc/self/ns/{kind}")).unwrap().display().to_string());
        assert_eq!(spaces.len(), 3, "{kind}: {spaces:?}");
    }
    for node in lab.nodes() {
        let name = format!("node{}", node.number());
        assert_eq!(output_of(&node, "cat /proc/sys/kernel/hostname"), name);
        assert_eq!(output_of(&node, "cat /etc/hostname"), name);
        assert_eq!(output_of(&node, "cat /proc/1/comm"), "tern-lab-init");
        assert!(output_of(&node, "cat /etc/hosts").contains(&format!("{} {name}", node.address())));
        assert_eq!(output_of(&node, "ls /sys/class/net | tr '\\n' ' '"), "eth0 lo");
        // The process is in the node's pid namespace: /proc lists it under its pid there.
        assert_eq!(
            output_of(&node, "sed -n 's/^Pid:[[:space:]]*//p' /proc/$$/status; echo $$")
                .lines()
                .collect::<BTreeSet<_>>()
                .len(),
            1
        );
    }
    let boot = |n| output_of(&lab.node(n), "cat /proc/sys/kernel/random/boot_id");
    assert_eq!(boot(1).len(), 36);
    assert_ne!(boot(1), boot(2));
    assert_eq!(boot(1), boot(1));
}

#[test]
fn exit_status_of_a_command_is_passed_on() {
    let lab = lab("switch", 1);
    let node = lab.node(1);
    assert_eq!(sh(&node, "exit 0").status.code(), Some(0));
    assert_eq!(sh(&node, "exit 7").status.code(), Some(7));
    for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGSEGV] {
        let status = sh(&node, &format!("kill -{signal} $$")).status;
        assert_eq!((status.code(), status.signal()), (None, Some(signal)));
    }
    assert_eq!(node.command("no-such-program").output().unwrap().status.code(), Some(127));
    assert_eq!(node.command("/etc/passwd").output().unwrap().status.code(), Some(126));
    assert_eq!(lab.node(9).command("true").output().unwrap().status.code(), Some(125));
}

#[test]
fn command_receives_arguments_environment_directory_and_input() {
    let lab = lab("switch", 1);
    let mut command = lab.node(1).command("sh");
    command.args(["-c", "pwd; echo $COLOUR \"$1\"; cat", "sh", "two words"]);
    command.env("COLOUR", "blue").current_dir("/usr/bin").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let text = "x".repeat(300_000);
    let mut input = child.stdin.take().unwrap();
    let sent = text.clone();
    let writer = std::thread::spawn(move || input.write_all(sent.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("/usr/bin\nblue two words\n{text}"));
    // The node does not have the caller's working directory.
    let here = std::env::temp_dir().join(lab.name().as_str());
    let output = {
        std::fs::create_dir(&here).unwrap();
        output_of(&lab.node(1), &format!("rmdir {}", here.display()));
        let output = lab.node(1).command("pwd").current_dir(&here).output();
        std::fs::remove_dir(&here).unwrap();
        output.unwrap()
    };
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "/\n");
}

#[test]
fn signals_are_forwarded_and_death_of_the_proxy_kills_the_command() {
    let lab = lab("switch", 1);
    let node = lab.node(1);
    let alone = || node.processes().unwrap().len() == 1;
    let mut child = node.command("sleep").arg("1000").spawn().unwrap();
    wait_until("sleep runs", || !alone());
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::USR1)
        .unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(10));
    wait_until("sleep has ended", alone);
    let mut child = node.command("sleep").arg("1000").spawn().unwrap();
    wait_until("sleep runs", || !alone());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("sleep was killed", alone);
}

#[test]
fn daemons_are_children_of_init_and_are_reaped() {
    let lab = lab("switch", 1);
    let node = lab.node(1);
    node.start_daemon("sh", &["-c", "echo started; exec sleep 1000"], "sleeper").unwrap();
    let log = node.directory().join("sleeper.log");
    wait_until("it has written", || std::fs::read_to_string(&log).is_ok_and(|t| t == "started\n"));
    let pid = output_of(&node, "pidof sleep || pgrep sleep");
    let status = output_of(&node, &format!("cat /proc/{pid}/status"));
    assert!(status.contains("PPid:\t1\n"), "{status}");
    output_of(&node, &format!("kill {pid}"));
    wait_until("no zombie is left", || !sh(&node, &format!("test -e /proc/{pid}")).status.success());
    let error = node.start_daemon("no-such-program", &[], "none").unwrap_err().to_string();
    assert!(error.contains("no-such-program"), "{error}");
}

#[test]
fn a_slow_node_gets_less_cpu() {
    let options = tern_lab::LabOptions { speeds: vec![0.5, 0.25], ..support::options("switch", 2) };
    let lab = start_lab(&options);
    let busy = || lab.nodes().map(|n| n.command("sh").args(["-c", "while :; do :; done"]).spawn().unwrap());
    let mut children: Vec<_> = busy().collect();
    let used = |n| lab.node(n).cpu_time().unwrap();
    wait_until("both work", || used(1) > Duration::from_millis(50) && used(2) > Duration::from_millis(50));
    let (start, before) = (Instant::now(), [used(1), used(2)]);
    // At least two seconds, which are many CFS periods.
    wait_until("they have worked for a while", || start.elapsed() > Duration::from_secs(2));
    let shares: Vec<_> = [1, 2]
        .map(|n| (used(n) - before[usize::from(n) - 1]).as_secs_f64() / start.elapsed().as_secs_f64())
        .to_vec();
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(shares[0] < 0.6 && shares[1] < 0.3, "more than the quota: {shares:?}");
    assert!(shares[0] > 0.1 && shares[1] > 0.05, "next to nothing: {shares:?}");
}
