//! A process stopped by job control can be migrated, stays stopped wherever it is, and continues at
//! SIGCONT.

use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::wait_until;
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::Running;

/// Starts the given command as a child, prints its pid, and waits for it: a stop of the direct
/// child would stop the lab's command too.
const RUN_AS_CHILD: &str = r#""$@" & echo $! >&2; wait $!"#;

/// The states of all threads of a process of node 1; `t` is a job-control stop under a tracer.
fn states(cluster: &Cluster, pid: i32) -> Result<String> {
    let script = format!(
        "for t in /proc/{pid}/task/*/stat; do sed 's/.*) //' $t | cut -c1; done | sort -u | tr -d '\\n'"
    );
    let said = cluster.run(1, &["sh", "-c", &script])?;
    Ok(String::from_utf8_lossy(&said).trim().to_owned())
}

/// Number of consecutive checks that must find it stopped, since a call made by the shim also stops
/// a thread briefly.
const REQUIRED_CHECKS: u32 = 5;

fn await_stop(cluster: &Cluster, pid: i32, wanted: bool) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(20);
    let mut found = 0;
    while found < if wanted { REQUIRED_CHECKS } else { 1 } {
        let states = states(cluster, pid)?;
        let stopped = !states.is_empty() && states.chars().all(|state| "tT".contains(state));
        found = if stopped == wanted { found + 1 } else { 0 };
        ensure!(
            Instant::now() < until,
            "threads of {pid} are {states}; stopped: {wanted}\n{}",
            cluster.diagnostics(pid)
        );
    }
    Ok(())
}

/// Waits until a node uses almost no CPU time.
fn await_idle(cluster: &Cluster, node: u16, pid: i32) -> Result<()> {
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
            cluster.diagnostics(pid)
        );
    }
}

/// Waits until no thread is still in a call that began away (a sleep of 10 ms), so that the process
/// is not stopped in such a call. These calls have their arguments in Tern's address range.
fn await_last_call(cluster: &Cluster, pid: i32) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(20);
    let script = format!("cat /proc/{pid}/task/*/syscall");
    let mut found = 0;
    while found < REQUIRED_CHECKS {
        let calls = cluster.run(1, &["sh", "-c", &script])?;
        found = if String::from_utf8_lossy(&calls).contains(" 0x31000") { 0 } else { found + 1 };
        ensure!(Instant::now() < until, "its last call does not end\n{}", cluster.diagnostics(pid));
    }
    Ok(())
}

fn check_moves(name: &str) -> Result<()> {
    let program = named(name, Flavour::Dynamic)?;
    let cluster = Cluster::up("stopped")?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", RUN_AS_CHILD, "sh"]).arg(&program);
    command.env("TERN_SECONDS", "0.5").env("TERN_UNTIL", "/tmp/until-stopped");
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let pid = running.pid;
    let signal = |name: &str| cluster.run(1, &["kill", name, &pid.to_string()]).map(drop);
    let go = |to: &str| {
        let moved = cluster.migrate(pid, to).map(drop);
        moved.map_err(|refused| anyhow::anyhow!("to {to}: {}\n{}", refused.message, cluster.diagnostics(pid)))
    };
    go("2")?;
    signal("-STOP")?;
    await_stop(&cluster, pid, true)?;
    await_idle(&cluster, 2, pid)?;
    go("3")?;
    await_idle(&cluster, 3, pid)?;
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
    // It leaves home while it is stopped.
    go("2")?;
    await_idle(&cluster, 2, pid)?;
    signal("-CONT")?;
    cluster.touch("/tmp/until-stopped")?;
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.diagnostics(pid))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}\n{}", cluster.diagnostics(pid));
    Ok(())
}

#[test]
fn stopped_process_moves_and_stays_stopped() -> Result<()> {
    check_moves("arith")
}

#[test]
fn stopped_process_with_threads_moves_and_stays_stopped() -> Result<()> {
    check_moves("threads")
}

/// Opens a source and a destination away, copies in pieces, and computes without calls in between.
const COPY_PROGRAM: &str = r#"
import os, sys
source, sink = os.open("/tmp/stopped-in", os.O_RDONLY), os.open("/tmp/stopped-out", os.O_WRONLY | os.O_CREAT)
print("copies", flush=True)
while piece := os.read(source, 100):
    os.write(sink, piece)
    sum(range(300_000))
"#;

/// Pending writes of a stopped process reach the file, and it can leave: its delegations are
/// returned first.
#[test]
fn stopped_process_has_its_writes_flushed_and_can_move() -> Result<()> {
    let cluster = Cluster::with_nodes("stopped-files", 2)?;
    cluster.run(1, &["sh", "-c", "head -c 40000 /dev/urandom > /tmp/stopped-in"])?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", RUN_AS_CHILD, "sh", "runon", "2", "python3", "-c", COPY_PROGRAM]);
    let mut running = Running::start(&mut command, false)?;
    let pid = running.pid;
    let failed = |what: &str| format!("{what}\n{}", cluster.diagnostics(pid));
    running.await_output("copies")?;
    let same = |command: &str| cluster.run(1, &["sh", "-c", command]).is_ok();
    let begun = "cmp -n $(stat -c %s /tmp/stopped-out) /tmp/stopped-in /tmp/stopped-out";
    let until = Instant::now() + Duration::from_secs(30);
    while !same("test -s /tmp/stopped-out") {
        ensure!(Instant::now() < until, failed("the output file stays empty"));
    }
    for to in ["home", "2"] {
        cluster.run(1, &["kill", "-STOP", &pid.to_string()])?;
        await_stop(&cluster, pid, true)?;
        ensure!(same(begun), failed("the output differs from the input"));
        cluster.migrate(pid, to).map_err(|refused| anyhow::anyhow!(failed(&refused.message)))?;
        await_stop(&cluster, pid, true)?;
        cluster.run(1, &["kill", "-CONT", &pid.to_string()])?;
        await_stop(&cluster, pid, false)?;
    }
    let end = running.finish(Duration::from_secs(120)).with_context(|| cluster.diagnostics(pid))?;
    ensure!(end.status == 0 && same("cmp /tmp/stopped-in /tmp/stopped-out"), "{end:?}");
    Ok(())
}

/// A delegated file whose offset only the guest has, and a call that blocks until input arrives.
const WAIT_PROGRAM: &str = r#"
import os
source = os.open("/etc/passwd", os.O_RDONLY)
begun = os.read(source, 10)
print("waits", flush=True)
os.read(0, 1)
print((begun + os.read(source, 1 << 20)) == open("/etc/passwd", "rb").read())
"#;

#[test]
fn process_blocked_with_a_delegation_can_move() -> Result<()> {
    let cluster = Cluster::with_nodes("waiting-files", 2)?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", r#"exec 3<&0; "$@" <&3 & echo $! >&2; wait $!"#, "sh"]);
    command.args(["runon", "2", "python3", "-c", WAIT_PROGRAM]);
    let mut running = Running::start(&mut command, false)?;
    let pid = running.pid;
    running.await_output("waits")?;
    for to in ["home", "2"] {
        let moved = cluster.migrate(pid, to).map(drop);
        moved.map_err(|refused| {
            anyhow::anyhow!("to {to}: {}\n{}", refused.message, cluster.diagnostics(pid))
        })?;
    }
    running.close_input();
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.diagnostics(pid))?;
    ensure!(end.status == 0 && end.out.ends_with(b"True\n"), "{end:?}");
    Ok(())
}

/// One thread polls with a time limit, and gets its event when the other has read to the end of its
/// input.
const POLL_PROGRAM: &str = r#"
import os, select, threading, time
source, sink = os.pipe()
poll = select.poll()
poll.register(source, select.POLLIN)
def wait():
    begun = time.monotonic()
    print(poll.poll(60_000) == [(source, select.POLLIN)], time.monotonic() - begun < 50)
waiter = threading.Thread(target=wait)
waiter.start()
print("waits", flush=True)
os.read(0, 1)
os.write(sink, b"x")
waiter.join()
"#;

/// After a stop and SIGCONT the kernel continues a poll by restart_syscall, of which only this kernel
/// knows the rest. A process that leaves home in such a poll, or stopped in a poll, gets its events.
#[test]
fn process_that_was_stopped_in_a_poll_gets_its_events() -> Result<()> {
    let cluster = Cluster::with_nodes("stopped-poll", 2)?;
    for continues_first in [true, false] {
        let mut command = cluster.command(1, "sh");
        command.args(["-c", r#"exec 3<&0; "$@" <&3 & echo $! >&2; wait $!"#, "sh"]);
        command.args(["mosrun", "-L", "python3", "-c", POLL_PROGRAM]);
        let mut running = Running::start(&mut command, false)?;
        let pid = running.pid;
        running.await_output("waits")?;
        let script = format!("cat /proc/{pid}/task/*/syscall");
        let await_call = |nr: i64| {
            let is_made = || {
                let calls = cluster.run(1, &["sh", "-c", &script]).unwrap_or_default();
                String::from_utf8_lossy(&calls).lines().any(|line| line.starts_with(&format!("{nr} ")))
            };
            wait_until(&format!("a thread is in call {nr}"), Duration::from_secs(20), is_made)
        };
        let signal = |name: &str| cluster.run(1, &["kill", name, &pid.to_string()]).map(drop);
        await_call(libc::SYS_poll)?;
        signal("-STOP")?;
        await_stop(&cluster, pid, true)?;
        if continues_first {
            signal("-CONT")?;
            await_call(libc::SYS_restart_syscall)?;
        }
        let moved = cluster.migrate(pid, "2").map(drop);
        signal("-CONT")?;
        running.close_input();
        let end = running.finish(Duration::from_secs(30)).with_context(|| cluster.diagnostics(pid))?;
        moved.map_err(|refused| anyhow::anyhow!("{}", refused.message))?;
        ensure!(end.status == 0 && end.out.ends_with(b"True True\n"), "{end:?}");
    }
    Ok(())
}
