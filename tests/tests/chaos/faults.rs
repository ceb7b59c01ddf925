//! The faults, one after the other.

use crate::{Chaos, NODES, lock, runners, scarcity};
use anyhow::{Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tern_control::ProcessRow;
use tern_lab::Cable;
use tern_tests::cluster::fault_injection::{GREEDY_STRANGER, kill, pids, start_daemon};
use tern_tests::cluster::limits::{MemoryLimit, PidsLimit, shims};
use tern_tests::programs::generated_input::Sequence;
use tern_tests::programs::wanted;

/// Seconds for which a cable is cut, or a process stopped. The family of a program is given up
/// after 60 s.
const MAX_FAULT_SECONDS: u64 = 30;

/// Pause between two faults.
const MAX_PAUSE_SECONDS: u64 = 6;

/// Number of the stranger's processes that compute all the time.
const SPINNERS: &str = "4";

const KINDS: [&str; 13] = [
    "cut",
    "kill-ternd",
    "stop-ternd",
    "stop-shim",
    "kill-guest-shim",
    "kill-home-shim",
    "kill-mfs",
    "stop-mfs",
    "kill-exec",
    "flood",
    "stall-files",
    "pids-limit",
    "memory-limit",
];

/// Injects faults until the run is over.
pub(crate) fn inject(chaos: &Chaos) {
    let mut random = Sequence(chaos.seed ^ 0x6661_756c);
    let kinds: Vec<&str> =
        KINDS.into_iter().filter(|kind| wanted("TERN_FAULTS", kind)).filter(is_supported).collect();
    while !chaos.is_over() && !kinds.is_empty() {
        chaos.sleep(Duration::from_millis(random.below(MAX_PAUSE_SECONDS * 1000)));
        let kind = kinds[random.below(kinds.len() as u64) as usize];
        let node = 1 + u16::try_from(random.below(NODES.into())).unwrap_or_default();
        let time = Duration::from_secs(1 + random.below(MAX_FAULT_SECONDS));
        match fault(chaos, kind, node, time, random.advance()) {
            Ok(()) => chaos.count(&format!("faults: {kind}")),
            Err(error) => chaos.fail(format!("{kind} on node {node}: {error:#}")),
        }
    }
}

fn is_supported(kind: &&str) -> bool {
    let is_supported = match *kind {
        "pids-limit" => PidsLimit::is_supported(),
        "memory-limit" => MemoryLimit::is_supported(),
        _ => true,
    };
    if !is_supported {
        eprintln!("not tested: {kind} needs control groups of version 1 and the kernel's log");
    }
    is_supported
}

fn fault(chaos: &Chaos, kind: &str, node: u16, time: Duration, chance: u64) -> Result<()> {
    let cluster = &chaos.cluster;
    match kind {
        "cut" => {
            cluster.lab().cut(Cable::Node(node))?;
            chaos.sleep(time);
            Ok(cluster.lab().heal(Cable::Node(node))?)
        }
        "kill-ternd" => {
            let is_home = u64::from(node == 1);
            chaos.restarts.fetch_add(is_home, Ordering::SeqCst);
            kill(cluster, node, &pids(cluster, node, "ternd")?)?;
            start_daemon(cluster, node, &[])?;
            chaos.restarts.fetch_add(is_home, Ordering::SeqCst);
            Ok(())
        }
        "stop-ternd" => stop(chaos, node, &pids(cluster, node, "ternd")?, time),
        "stop-shim" => {
            let shims = pids(cluster, node, "tern-shim")?;
            stop(chaos, node, &one_of(&shims, chance), time)
        }
        "kill-guest-shim" => {
            let node = if node == 1 { 2 } else { node };
            kill_shim(chaos, node, chance)
        }
        "kill-home-shim" => kill_shim(chaos, 1, chance),
        "kill-mfs" => kill(cluster, node, &pids(cluster, node, "tern-mfs")?),
        "stop-mfs" => stop(chaos, node, &pids(cluster, node, "tern-mfs")?, time),
        "kill-exec" => kill(cluster, node, &pids(cluster, node, "tern-exec")?),
        "flood" => {
            let mut stranger = cluster.command(node, "python3");
            let stranger = stranger
                .args(["-c", GREEDY_STRANGER, SPINNERS])
                .stdout(Stdio::null())
                .process_group(0)
                .spawn()?;
            chaos.sleep(time);
            end_group(stranger)
        }
        "stall-files" => stall_files(chaos, time, chance),
        "pids-limit" => scarcity::limit_pids(chaos, &one_of(&shims(cluster, node)?, chance), time),
        "memory-limit" => scarcity::limit_memory(chaos, node.max(2), time, chance),
        _ => bail!("there is no such fault"),
    }
}

fn one_of(pids: &[i32], chance: u64) -> Vec<i32> {
    pids.get(usize::try_from(chance).unwrap_or_default() % pids.len().max(1)).copied().into_iter().collect()
}

/// Stops processes of a node for this time.
fn stop(chaos: &Chaos, node: u16, stopped: &[i32], time: Duration) -> Result<()> {
    let signal = |name: &str| {
        for pid in stopped {
            // It may have ended.
            let _gone = chaos.cluster.run(node, &["kill", name, &pid.to_string()]);
        }
    };
    signal("-STOP");
    chaos.sleep(time);
    signal("-CONT");
    Ok(())
}

/// Kills a shim, and notes the programs that may have needed it.
fn kill_shim(chaos: &Chaos, node: u16, chance: u64) -> Result<()> {
    let shims = one_of(&pids(&chaos.cluster, node, "tern-shim")?, chance);
    endanger(chaos, node)?;
    let killed = kill(&chaos.cluster, node, &shims);
    // Others may have arrived there meanwhile.
    endanger(chaos, node)?;
    killed
}

/// Lets the file system stall for this time, and until a program that does not use it has run from
/// its start to its end.
fn stall_files(chaos: &Chaos, time: Duration, chance: u64) -> Result<()> {
    let begun = Instant::now();
    let waited = chaos.files.waited(&chaos.cluster)?;
    chaos.files.stall(&chaos.cluster)?;
    runners::run_another(chaos, chance, "beside a file system that stalls");
    chaos.sleep(time.saturating_sub(begun.elapsed()));
    chaos.files.release(&chaos.cluster)?;
    let waited = chaos.files.waited(&chaos.cluster)? - waited;
    chaos.count_all("requests that waited for a file system that stalls", waited);
    Ok(())
}

/// Records that each program that has a process on this node may be lost; for node 1, all programs.
fn endanger(chaos: &Chaos, node: u16) -> Result<()> {
    let there = if node == 1 { lock(&chaos.running).clone() } else { programs_on(chaos, node)? };
    lock(&chaos.endangered).extend(&there);
    lock(&chaos.ever_endangered).extend(there);
    Ok(())
}

/// The programs that have a process on this node, and those that are being moved.
pub(crate) fn programs_on(chaos: &Chaos, node: u16) -> Result<BTreeSet<i32>> {
    let running = lock(&chaos.running).clone();
    let rows = chaos.cluster.processes(1)?;
    let is_there = |row: &&ProcessRow| row.from.is_none() && row.r#where.is_none_or(|at| at.0 == node);
    let there = rows.iter().filter(is_there).map(|row| row.pid.0);
    let table = chaos.cluster.run(1, &["ps", "-e", "-o", "pid=,ppid="])?;
    let table = String::from_utf8_lossy(&table).into_owned();
    let row = |line: &str| {
        let (pid, parent) = line.trim().split_once(' ')?;
        Some((pid.parse().ok()?, parent.trim().parse().ok()?))
    };
    let parents: BTreeMap<i32, i32> = table.lines().filter_map(row).collect();
    let program_of = |pid: i32| {
        std::iter::successors(Some(pid), |pid| parents.get(pid).copied()).find(|pid| running.contains(pid))
    };
    let moving = lock(&chaos.moving).clone();
    Ok(there.chain(moving).filter_map(program_of).collect())
}

/// Kills a stranger and all its children.
fn end_group(mut stranger: Child) -> Result<()> {
    let group = format!("-{}", stranger.id());
    let killed = Command::new("kill").args(["-KILL", "--", &group]).status()?;
    stranger.wait()?;
    ensure!(killed.success(), "the stranger's processes cannot be killed");
    Ok(())
}
