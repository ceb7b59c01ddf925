//! A process that job control has stopped can be moved, stays stopped wherever it is, and goes on at SIGCONT.

use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;
use tern_tests::programs::{Flavour, named};
use tern_tests::running::Running;

/// Says the pid of what it was given, and waits for it: what calls us stops with its own child.
const BESIDE: &str = r#""$@" & echo $! >&2; wait $!"#;

/// The states of all threads of a process of node 1: `t` is a stop of job control in the hand of a tracer.
fn states(cluster: &Cluster, pid: i32) -> Result<String> {
    let script = format!(
        "for t in /proc/{pid}/task/*/stat; do sed 's/.*) //' $t | cut -c1; done | sort -u | tr -d '\\n'"
    );
    let said = cluster.run(1, &["sh", "-c", &script])?;
    Ok(String::from_utf8_lossy(&said).trim().to_owned())
}

/// Looks one after the other that must all find it stopped: a call that is made for it stops a thread for a moment too.
const LOOKS: u32 = 5;

fn await_stop(cluster: &Cluster, pid: i32, wanted: bool) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(20);
    let mut found = 0;
    while found < if wanted { LOOKS } else { 1 } {
        let states = states(cluster, pid)?;
        let stopped = !states.is_empty() && states.chars().all(|state| "tT".contains(state));
        found = if stopped == wanted { found + 1 } else { 0 };
        ensure!(
            Instant::now() < until,
            "threads of {pid} are {states}; stopped: {wanted}\n{}",
            cluster.scene(pid)
        );
    }
    Ok(())
}

/// Waits until a node uses next to no CPU time, as when there is nothing to run.
fn rests(cluster: &Cluster, node: u16, pid: i32) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let before = cluster.cpu_seconds(node)?;
        std::thread::sleep(Duration::from_millis(500));
        let used = cluster.cpu_seconds(node)? - before;
        if used < 0.15 {
            return Ok(());
        }
        ensure!(
            Instant::now() < until,
            "node {node} used {used:.2} s of CPU time while its guest is stopped\n{}",
            cluster.scene(pid)
        );
    }
}

/// Waits until nothing is under way at home that began away (a sleep of 10 ms): who is stopped in the middle of that is busy
/// until it goes on (docs/limits.md). Its threads' calls have their arguments in our range of addresses.
fn await_last_call(cluster: &Cluster, pid: i32) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(20);
    let script = format!("cat /proc/{pid}/task/*/syscall");
    let mut found = 0;
    while found < LOOKS {
        let calls = cluster.run(1, &["sh", "-c", &script])?;
        found = if String::from_utf8_lossy(&calls).contains(" 0x31000") { 0 } else { found + 1 };
        ensure!(Instant::now() < until, "its last call does not end\n{}", cluster.scene(pid));
    }
    Ok(())
}

fn is_moved(name: &str) -> Result<()> {
    let program = named(name, Flavour::Dynamic)?;
    let cluster = Cluster::up("stopped")?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", BESIDE, "sh"]).arg(&program);
    command.env("TERN_SECONDS", "0.5").env("TERN_UNTIL", "/tmp/until-stopped");
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let pid = running.pid;
    let signal = |name: &str| cluster.run(1, &["kill", name, &pid.to_string()]).map(drop);
    let go = |to: &str| {
        let moved = cluster.migrate(pid, to).map(drop);
        moved.map_err(|refused| anyhow::anyhow!("to {to}: {}\n{}", refused.message, cluster.scene(pid)))
    };
    go("2")?;
    signal("-STOP")?;
    await_stop(&cluster, pid, true)?;
    rests(&cluster, 2, pid)?;
    go("3")?;
    rests(&cluster, 3, pid)?;
    go("home")?;
    await_stop(&cluster, pid, true)?;
    signal("-CONT")?;
    await_stop(&cluster, pid, false)?;
    go("2")?;
    signal("-STOP")?;
    await_stop(&cluster, pid, true)?;
    signal("-CONT")?;
    await_stop(&cluster, pid, false)?;
    go("home")?;
    await_last_call(&cluster, pid)?;
    signal("-STOP")?;
    await_stop(&cluster, pid, true)?;
    // From home it leaves stopped.
    go("2")?;
    rests(&cluster, 2, pid)?;
    signal("-CONT")?;
    cluster.touch("/tmp/until-stopped")?;
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.scene(pid))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}\n{}", cluster.scene(pid));
    Ok(())
}

#[test]
fn a_stopped_process_is_moved_and_stays_stopped() -> Result<()> {
    is_moved("arith")
}

#[test]
fn a_stopped_process_with_threads_is_moved_and_stays_stopped() -> Result<()> {
    is_moved("threads")
}

/// Away it opens what it reads and what it writes, copies a piece at a time, and counts without making calls in between.
const COPIES: &str = r#"
import os, sys
source, sink = os.open("/tmp/stopped-in", os.O_RDONLY), os.open("/tmp/stopped-out", os.O_WRONLY | os.O_CREAT)
print("copies", flush=True)
while piece := os.read(source, 100):
    os.write(sink, piece)
    sum(range(300_000))
"#;

/// What it has written behind is in the file though it is stopped, and it leaves: its files are put down first.
#[test]
fn what_a_stopped_process_has_written_is_there_and_it_can_leave() -> Result<()> {
    let cluster = Cluster::with_nodes("stopped-files", 2)?;
    cluster.run(1, &["sh", "-c", "head -c 40000 /dev/urandom > /tmp/stopped-in"])?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", BESIDE, "sh", "runon", "2", "python3", "-c", COPIES]);
    let mut running = Running::start(&mut command, false)?;
    let pid = running.pid;
    let failed = |what: &str| format!("{what}\n{}", cluster.scene(pid));
    running.hear("copies")?;
    let same = |command: &str| cluster.run(1, &["sh", "-c", command]).is_ok();
    let begun = "cmp -n $(stat -c %s /tmp/stopped-out) /tmp/stopped-in /tmp/stopped-out";
    let until = Instant::now() + Duration::from_secs(30);
    while !same("test -s /tmp/stopped-out") {
        ensure!(Instant::now() < until, failed("nothing is written"));
    }
    for to in ["home", "2"] {
        cluster.run(1, &["kill", "-STOP", &pid.to_string()])?;
        await_stop(&cluster, pid, true)?;
        ensure!(same(begun), failed("it has written something else"));
        cluster.migrate(pid, to).map_err(|refused| anyhow::anyhow!(failed(&refused.message)))?;
        await_stop(&cluster, pid, true)?;
        cluster.run(1, &["kill", "-CONT", &pid.to_string()])?;
        await_stop(&cluster, pid, false)?;
    }
    let end = running.finish(Duration::from_secs(120)).with_context(|| cluster.scene(pid))?;
    ensure!(end.status == 0 && same("cmp /tmp/stopped-in /tmp/stopped-out"), "{end:?}");
    Ok(())
}

/// A file in hand whose offset only the guest knows, and a call that waits for ever.
const WAITS: &str = r#"
import os
source = os.open("/etc/passwd", os.O_RDONLY)
begun = os.read(source, 10)
print("waits", flush=True)
os.read(0, 1)
print((begun + os.read(source, 1 << 20)) == open("/etc/passwd", "rb").read())
"#;

#[test]
fn who_waits_with_a_file_in_hand_can_leave() -> Result<()> {
    let cluster = Cluster::with_nodes("waiting-files", 2)?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", r#"exec 3<&0; "$@" <&3 & echo $! >&2; wait $!"#, "sh"]);
    command.args(["runon", "2", "python3", "-c", WAITS]);
    let mut running = Running::start(&mut command, false)?;
    let pid = running.pid;
    running.hear("waits")?;
    for to in ["home", "2"] {
        let moved = cluster.migrate(pid, to).map(drop);
        moved.map_err(|refused| anyhow::anyhow!("to {to}: {}\n{}", refused.message, cluster.scene(pid)))?;
    }
    running.close_input();
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.scene(pid))?;
    ensure!(end.status == 0 && end.out.ends_with(b"True\n"), "{end:?}");
    Ok(())
}
