//! Makes a Tern cluster of a lab's nodes, with the commands that a user would run. Only this module
//! of the lab depends on Tern.

use crate::error::{LabError, Result, WithContext};
use crate::lab::Lab;
use crate::lab::state::LabState;
use crate::node::Node;
use crate::process::command_name;
use crate::process::signals;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Time for ternd to answer, and for the nodes to discover each other.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// ternd's cache directory: state that ternd can rebuild.
const CACHE_DIRECTORY: &str = "/var/cache/tern";
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Configures and starts ternd on all nodes. Returns when node 1 reports that all nodes are up.
pub(crate) fn start(lab: &Lab) -> Result<()> {
    let programs = LabState::load(lab.name())?.program_directory();
    check_programs(&programs)?;
    distribute_cpu_speed(lab, &programs)?;
    let first = lab.node(1);
    let address = first.address().to_string();
    run_tern(&first, &["init", "--node", "1", "--name", "node1", "--address", &address])?;
    start_daemon(&first)?;
    for node in lab.nodes().skip(1) {
        let token = run_tern(&first, &["token"])?;
        let (number, own) = (node.number().to_string(), node.address().to_string());
        run_tern(&node, &["join", &address, token.trim(), "--node", &number, "--address", &own])?;
        start_daemon(&node)?;
    }
    wait_for_status(&first, "not all nodes are up", |status| {
        let nodes = status["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
        nodes.len() == lab.nodes().count() && nodes.iter().all(|n| n["up"] == true)
    })
}

/// Measures the machine's CPU speed once and copies the result to every node's cache. All nodes run
/// on one machine; measuring on each of them would load it while the lab is in use.
fn distribute_cpu_speed(lab: &Lab, programs: &Path) -> Result<()> {
    let ternd = programs.join("ternd");
    // The same mode as ternd uses: the cache holds contents of guests' files.
    let create = |cache: &Path| DirBuilder::new().recursive(true).mode(0o700).create(cache);
    create(Path::new(CACHE_DIRECTORY)).with_context(|| format!("make {CACHE_DIRECTORY}"))?;
    let file = Path::new(CACHE_DIRECTORY).join("speed.json");
    Command::new(&ternd)
        .arg("--measure-speed")
        .arg(&file)
        .env("TERN_LOG", "error")
        .status()
        .with_context(|| format!("run {}", ternd.display()))?;
    for node in lab.nodes() {
        let cache = node.path(CACHE_DIRECTORY)?;
        create(&cache)
            .and_then(|()| fs::copy(&file, cache.join("speed.json")).map(|_bytes| ()))
            .with_context(|| format!("write into {}", cache.display()))?;
    }
    Ok(())
}

/// Starts ternd on a node that is configured. Returns when ternd answers.
pub(crate) fn start_daemon(node: &Node) -> Result<()> {
    node.start_daemon("ternd", &[], "ternd")?;
    wait_for_status(node, "ternd does not answer", |_| true)
}

/// Kills only ternd and starts it again.
pub(crate) fn restart_daemon(node: &Node) -> Result<()> {
    let daemons = || -> Result<Vec<i32>> {
        Ok(node.processes()?.into_iter().filter(|&pid| command_name(pid) == "ternd").collect())
    };
    let found = daemons()?;
    if found.is_empty() {
        let message = "it is not running".to_owned();
        return Err(LabError::Failed { what: format!("ternd on node {}", node.number()), message });
    }
    for pid in found.iter().filter_map(|&p| Pid::from_raw(p)) {
        // It may have ended already.
        let _ = kill_process(pid, Signal::KILL);
    }
    let end = Instant::now() + START_TIMEOUT;
    while daemons()?.iter().any(|pid| found.contains(pid)) {
        if Instant::now() > end {
            return Err(LabError::Unkillable { lab: node.lab.clone(), pids: found });
        }
        thread::sleep(Duration::from_millis(2));
    }
    start_daemon(node)
}

fn check_programs(programs: &Path) -> Result<()> {
    let missing = ["tern", "ternd"].into_iter().find(|p| !programs.join(p).is_file());
    missing.map_or(Ok(()), |program| {
        Err(LabError::Unsupported(format!(
            "no {program} in {}, so no cluster can be made of the nodes; build it with cargo build, or give --bare",
            programs.display()
        )))
    })
}

/// Runs `tern` in the node; returns what it prints.
fn run_tern(node: &Node, arguments: &[&str]) -> Result<String> {
    let mut command = node.command("tern");
    command.args(arguments).stdin(Stdio::null());
    let output = command.output().with_context(|| "run tern".to_owned())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    // Only the first argument is shown: the others may hold the token, which is secret.
    let what = format!("tern {} on node {}", arguments.first().copied().unwrap_or_default(), node.number());
    let output = String::from_utf8_lossy(&output.stderr);
    Err(LabError::Failed { what, message: output.trim().replace('\n', ", ") })
}

/// Waits until the node's `tern status` satisfies `accept`.
fn wait_for_status(node: &Node, on_timeout: &str, accept: impl Fn(&serde_json::Value) -> bool) -> Result<()> {
    let end = Instant::now() + START_TIMEOUT;
    loop {
        let status = run_tern(node, &["status", "--json"]);
        if let Ok(status) = status.as_ref().map(|s| serde_json::from_str(s).unwrap_or_default())
            && accept(&status)
        {
            return Ok(());
        }
        if let Some(signal) = signals::recorded() {
            return Err(LabError::Interrupted(signal.signal));
        }
        if Instant::now() > end {
            let log = node.directory().join("ternd.log");
            let text = fs::read_to_string(&log).unwrap_or_default();
            let last = text.lines().last().unwrap_or("nothing");
            let output = status.map_or_else(|e| e.to_string(), |s| s.trim().replace('\n', " "));
            return Err(LabError::Failed {
                what: format!("the cluster of lab {}", node.lab),
                message: format!(
                    "{on_timeout} after 30 s; tern status: {output}; last line of ternd's log: {last}"
                ),
            });
        }
        thread::sleep(POLL_INTERVAL);
    }
}
