//! A process in a time namespace sees the same clocks wherever it runs.

use anyhow::{Context, Result, anyhow, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::runs::running::{ANNOUNCE, Running};

/// Prints both clocks in millions of seconds when they have changed, and each name in its input.
const CLOCKS: &str = "
import sys, threading, time

def show():
    last = None
    while True:
        shown = [int(time.clock_gettime(clock) // 1e6) for clock in (time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME)]
        if shown != last:
            print('clocks', shown, flush=True)
        last = shown
        time.sleep(0.01)

threading.Thread(target=show, daemon=True).start()
for line in sys.stdin:
    time.sleep(0.1)
    print('is', line, flush=True)
";

/// Prints `ready` when its children get a time namespace of their own, and waits for the end of its input.
const UNSHARED: &str = "
import ctypes, sys
assert ctypes.CDLL(None).unshare(0x80) == 0
print('ready', flush=True)
sys.stdin.read()
";

#[test]
fn clocks_of_a_time_namespace_move_along() -> Result<()> {
    let cluster = Cluster::with_nodes("timens", 3)?;
    let mut command = cluster.command(1, "unshare");
    command.args(["-T", "--monotonic", "5000000", "--boottime", "7000000", "--fork"]);
    command.args(["sh", "-c", ANNOUNCE, "sh", "mosrun", "-L", "/usr/bin/python3", "-c", CLOCKS]);
    let mut running = Running::start(&mut command, false)?;
    running.await_output("clocks")?;
    for to in ["2", "3", "home", "2", "home"] {
        cluster.migrate(running.pid, to).map_err(|refused| anyhow!("{to}: {refused}"))?;
        running.send_input(&format!("on-{to}\n"))?;
        running.await_output(&format!("is on-{to}")).with_context(|| cluster.diagnostics(running.pid))?;
    }
    running.close_input();
    let outcome = running.finish(Duration::from_secs(20))?;
    let text = String::from_utf8_lossy(&outcome.out).into_owned();
    let clocks: Vec<&str> = text.lines().filter(|line| line.starts_with("clocks")).collect();
    ensure!(clocks == ["clocks [5, 7]"], "{text}");
    Ok(())
}

#[test]
fn process_whose_children_have_other_clocks_stays_at_home() -> Result<()> {
    let cluster = Cluster::with_nodes("timens-children", 2)?;
    let mut running = Running::python(&cluster, &["-L"], UNSHARED, "ready")?;
    let refused = cluster.migrate(running.pid, "2").expect_err("it has moved").to_string();
    ensure!(refused.contains("time namespace:"), "{refused}");
    running.close_input();
    ensure!(running.finish(Duration::from_secs(20))?.status == 0, "it has failed");
    Ok(())
}
