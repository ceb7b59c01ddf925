//! Children and threads that the kernel of the guest's node refuses to create.

use anyhow::{Context, Result, bail, ensure};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{pids, set_timeouts, wait_until};
use tern_tests::cluster::jobs::EVENT_TIMEOUT;
use tern_tests::cluster::limits::{PidsLimit, guests};
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::{ANNOUNCE, Running};

/// Maximum number of attempts to cut the link during a creation.
const MAX_CUTS: u32 = 30;

fn start(cluster: &Cluster, what: &str, seconds: &str) -> Result<Running> {
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh", "runon", "2"]).arg(named("uncreated", Flavour::Dynamic)?).arg(what);
    Running::start(command.env("TERN_SECONDS", seconds), false)
}

fn finish(cluster: &Cluster, mut running: Running) -> Result<()> {
    running.close_input();
    let pid = running.pid;
    let outcome = running.finish(EVENT_TIMEOUT).with_context(|| cluster.diagnostics(pid))?;
    ensure!(outcome.out.ends_with(b"PASS\n"), "{outcome:?}\n{}", cluster.diagnostics(pid));
    Ok(())
}

/// Starts the program on node 2, where its kernel refuses it further tasks from then on.
fn start_limited(cluster: &Cluster, seconds: &str) -> Result<(Running, PidsLimit)> {
    let mut running = start(cluster, "tasks", seconds)?;
    running.await_output("ready")?;
    let limit = PidsLimit::set(cluster, &guests(cluster, 2)?, None)?.context("it is not on node 2")?;
    running.send_input("go\n")?;
    Ok((running, limit))
}

#[test]
fn child_of_the_grandparent_leaves_no_trace() -> Result<()> {
    let cluster = Cluster::with_nodes("no-sibling", 2)?;
    finish(&cluster, start(&cluster, "parent", "0.2")?)
}

#[test]
fn end_of_another_child_is_not_lost() -> Result<()> {
    let cluster = Cluster::with_nodes("no-child", 2)?;
    finish(&cluster, start(&cluster, "others", "0.5")?)
}

/// Nearly always a fork of another thread is undecided: its child may still be refused.
#[test]
fn forks_of_other_threads_do_not_delay_a_wait() -> Result<()> {
    let cluster = Cluster::with_nodes("no-delay", 2)?;
    finish(&cluster, start(&cluster, "spawners", "0.2")?)
}

#[test]
fn tasks_beyond_the_limit_of_the_node_leave_no_trace() -> Result<()> {
    if !PidsLimit::is_supported() {
        return Ok(());
    }
    let cluster = Cluster::with_nodes("no-tasks", 2)?;
    let (running, limit) = start_limited(&cluster, "0.2")?;
    finish(&cluster, running)?;
    ensure!(limit.refused()? > 0, "nothing was refused");
    Ok(())
}

/// The guest's shim is stopped while home performs a call, and refuses the child after the link was
/// cut. Its report is repeated on the next link.
#[test]
fn report_is_repeated_after_a_cut() -> Result<()> {
    if !PidsLimit::is_supported() {
        return Ok(());
    }
    let cluster = Cluster::with_nodes("no-tasks-cut", 2)?;
    cluster.expect_blocked_loops();
    set_timeouts(&cluster, 1, 300)?;
    let (running, limit) = start_limited(&cluster, "0")?;
    let shims: Vec<String> = pids(&cluster, 2, "tern-shim")?.iter().map(i32::to_string).collect();
    let signal = |name: &str| {
        let words: Vec<&str> = ["kill", name].into_iter().chain(shims.iter().map(String::as_str)).collect();
        cluster.run(2, &words).map(drop)
    };
    let is_suspended =
        || cluster.processes(1).is_ok_and(|rows| rows.iter().any(|row| row.state == "suspended"));
    // The call that crosses the stop may be one that creates nothing.
    for _ in 0..MAX_CUTS {
        signal("-STOP")?;
        // Home performs what it has been sent.
        std::thread::sleep(Duration::from_millis(50));
        let cut = cluster.lab().cut(Cable::between(1, 2));
        let before = limit.refused();
        signal("-CONT")?;
        cut?;
        wait_until("it is suspended", EVENT_TIMEOUT, is_suspended)?;
        let after = limit.refused()?;
        cluster.lab().heal(Cable::between(1, 2))?;
        wait_until("it continues", EVENT_TIMEOUT, || !is_suspended())?;
        if after > before? {
            return finish(&cluster, running);
        }
    }
    bail!("nothing was refused while the link was cut")
}
