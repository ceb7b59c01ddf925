//! Fault injection: armed daemons, killed shims, and the check that a family leaves nothing behind.

use crate::cluster::Cluster;
use crate::moves::journey::{Journey, native};
use crate::programs::catalogue::ENTRIES;
use crate::programs::{Flavour, executable};
use crate::runs::outcome::Outcome;
use crate::runs::running::{ANNOUNCE, Running};
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Exit status, in the shell's sense, of a lost process: its deputy is killed by SIGKILL.
pub const LOST_STATUS: i32 = 128 + 9;

/// A Python program that forks processes of another user. Each process opens as many descriptors as
/// its limit allows, together a million. The program's argument is the number of these processes
/// that compute all the time. Prints a line when all descriptors are open.
pub const GREEDY_STRANGER: &str = "
import os, resource, signal, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
each = min(hard, 50000) - 10
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
os.setgid(65534)
os.setuid(65534)
null = os.open('/dev/null', os.O_RDWR)
for _ in range(each - 10):
    os.dup(null)
for number in range(1000000 // each):
    if os.fork() == 0:
        while number < int(sys.argv[1]):
            pass
        signal.pause()
print('ready', flush=True)
signal.pause()
";

/// Polls until the condition is true; returns the time taken.
///
/// # Errors
/// If it is not true within this time; `what` names the condition in the error.
pub fn wait_until(what: &str, within: Duration, mut holds: impl FnMut() -> bool) -> Result<Duration> {
    let begun = Instant::now();
    while !holds() {
        if begun.elapsed() > within {
            bail!("timed out after {} s waiting until {what}", within.as_secs());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(begun.elapsed())
}

/// Waits until a thread of this name, on this node, has existed for a second: what it does does not end.
///
/// # Errors
/// If there is no such thread within 30 s.
pub fn await_stuck_thread(cluster: &Cluster, node: u16, name: &str) -> Result<()> {
    let find = format!(
        "ps -eLo etimes=,comm= | awk '$2 == \"{name}\" && $1 >= 1 {{ found = 1 }} END {{ exit !found }}'"
    );
    let is_stuck = || cluster.run(node, &["sh", "-c", &find]).is_ok();
    let what = format!("thread {name} of node {node} has waited for a second");
    wait_until(&what, Duration::from_secs(30), is_stuck).map(drop)
}

fn next_number() -> u32 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    COUNT.fetch_add(1, Ordering::Relaxed)
}

/// Pids, in the node's numbering, of the processes of a node with this name.
///
/// # Errors
/// If ps fails there.
pub fn pids(cluster: &Cluster, node: u16, name: &str) -> Result<Vec<i32>> {
    let table = cluster.run(node, &["ps", "-e", "-o", "pid=,stat=,comm="])?;
    let table = String::from_utf8_lossy(&table).into_owned();
    let one = |line: &str| {
        let mut words = line.split_whitespace();
        let (pid, state, comm) = (words.next()?, words.next()?, words.next()?);
        (comm == name && !state.starts_with('Z')).then(|| pid.parse().ok()).flatten()
    };
    Ok(table.lines().filter_map(one).collect())
}

/// Sends SIGKILL to processes of a node, and waits until they are gone.
///
/// # Errors
/// If they are not gone within 10 s.
pub fn kill(cluster: &Cluster, node: u16, doomed: &[i32]) -> Result<()> {
    for pid in doomed {
        // It may have exited by itself, or together with another process of the list.
        let _ = cluster.run(node, &["kill", "-KILL", &pid.to_string()]);
    }
    // A thread-group leader that has exited shows as a zombie while other threads still hold the
    // process's files, among them the daemon's lock.
    let is_gone = |pid: &i32| {
        let state = cluster.run(node, &["ps", "-o", "stat=,nlwp=", "-p", &pid.to_string()]);
        let Ok(state) = state else { return true };
        let state = String::from_utf8_lossy(&state).into_owned();
        let mut words = state.split_whitespace();
        let zombie = words.next().is_none_or(|word| word.starts_with('Z'));
        zombie && words.next().is_none_or(|threads| threads == "1")
    };
    wait_until("the killed processes are gone", Duration::from_secs(10), || doomed.iter().all(is_gone))
        .map(drop)
}

/// Kills ternd of a node.
///
/// # Errors
/// If there is none.
pub fn kill_daemon(cluster: &Cluster, node: u16) -> Result<()> {
    let daemons = pids(cluster, node, "ternd")?;
    if daemons.is_empty() {
        bail!("no ternd runs on node {node}");
    }
    kill(cluster, node, &daemons)
}

/// Kills the shims of a node.
///
/// # Errors
/// If there is none.
pub fn kill_shims(cluster: &Cluster, node: u16) -> Result<()> {
    let table = cluster.run(node, &["ps", "-e", "-o", "pid=,ppid=,comm="])?;
    let table = String::from_utf8_lossy(&table).into_owned();
    let rows: Vec<(i32, i32)> = table
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let row = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            (words.next()? == "tern-shim").then_some(row)
        })
        .collect();
    // The sandbox helper is a child of its shim with the same name; it must end by itself.
    let is_shim = |(_, parent): &&(i32, i32)| !rows.iter().any(|(pid, _)| pid == parent);
    let shims: Vec<i32> = rows.iter().filter(is_shim).map(|(pid, _)| *pid).collect();
    if shims.is_empty() {
        bail!("no shim runs on node {node}");
    }
    kill(cluster, node, &shims)
}

/// Starts ternd on a node where none runs, with these variables in its environment, which its shims
/// inherit. Returns once `tern status` succeeds.
///
/// # Errors
/// If it does not start, or does not reply within 20 s.
pub fn start_daemon(cluster: &Cluster, node: u16, environment: &[String]) -> Result<()> {
    let daemon = cluster.run(node, &["sh", "-c", "command -v ternd"])?;
    let daemon = String::from_utf8_lossy(&daemon).trim().to_owned();
    let mut words: Vec<&str> = environment.iter().map(String::as_str).collect();
    words.push(&daemon);
    cluster.lab().node(node).start_daemon("env", &words, "ternd")?;
    let answers = || cluster.tool(node, "status").output().is_ok_and(|end| end.status.success());
    wait_until("ternd answers", Duration::from_secs(20), answers).map(drop)
}

/// Waits until node 1 reports this node as up.
///
/// # Errors
/// If it does not within 20 s.
pub fn await_up(cluster: &Cluster, node: u16) -> Result<()> {
    let up = || -> Option<bool> {
        let end = cluster.tool(1, "status").arg("--json").output().ok()?;
        let status: serde_json::Value = serde_json::from_slice(&end.stdout).ok()?;
        let row = status["nodes"].as_array()?.iter().find(|row| row["node"] == node)?.clone();
        row["up"].as_bool()
    };
    wait_until("the node is up", Duration::from_secs(20), || up() == Some(true)).map(drop)
}

/// Sets `suspend_after` and `give_up_after`, in seconds, on all nodes.
///
/// # Errors
/// If a node cannot be configured or its daemon not restarted.
pub fn set_timeouts(cluster: &Cluster, suspend_after: u32, give_up_after: u32) -> Result<()> {
    let nodes: Vec<u16> = cluster.lab().nodes().map(|node| node.number()).collect();
    let lines = format!("suspend_after = {suspend_after}\ngive_up_after = {give_up_after}\n");
    nodes.iter().try_for_each(|&node| configure(cluster, node, &lines))
}

/// Writes these lines into a node's `ternd.toml`, replacing lines with the same key, and restarts
/// its daemon and tern-exec. tern-exec outlives the daemon and reads the file only when it starts.
///
/// # Errors
/// If the node cannot be configured or its daemon not restarted.
pub fn configure(cluster: &Cluster, node: u16, lines: &str) -> Result<()> {
    let file = cluster.lab().node(node).path("/etc/tern/ternd.toml")?;
    let text = std::fs::read_to_string(&file).with_context(|| format!("{}", file.display()))?;
    let key = |line: &str| line.split_once(" = ").map(|(key, _)| key.to_owned());
    let keys: Vec<_> = lines.lines().filter_map(key).collect();
    let kept = text.lines().filter(|line| key(line).is_none_or(|key| !keys.contains(&key)));
    let text: String = kept.chain(lines.lines()).flat_map(|line| [line, "\n"]).collect();
    std::fs::write(&file, text)?;
    cluster.lab().restart_daemon(node)?;
    cluster.run(node, &["sh", "-c", "pkill -KILL -f '[t]ern-exec.* serve'; true"])?;
    await_up(cluster, node)
}

/// A point of a migration at which a shim blocks until it is released.
#[derive(Debug)]
pub struct Fault<'a> {
    cluster: &'a Cluster,
    node: u16,
    folder: String,
}

impl<'a> Fault<'a> {
    /// Restarts a node's daemon such that the shims it starts from now on block at `SIDE:PHASE`
    /// once the fault is set.
    ///
    /// # Errors
    /// If the daemon does not start.
    pub fn arm(cluster: &'a Cluster, node: u16, point: &str) -> Result<Self> {
        let folder = format!("/tmp/fault-{}", next_number());
        kill_daemon(cluster, node)?;
        let environment = [format!("TERN_FAULT={point}:wait"), format!("TERN_FAULT_FILE={folder}/reached")];
        start_daemon(cluster, node, &environment)?;
        await_up(cluster, node)?;
        Ok(Self { cluster, node, folder })
    }

    /// Activates the fault: a shim blocks at the point once it can create its file in this folder.
    ///
    /// # Errors
    /// If the node is down.
    pub fn set(&self) -> Result<()> {
        Ok(std::fs::create_dir(self.cluster.lab().node(self.node).path(&self.folder)?)?)
    }

    /// Waits until a shim has reached the point.
    ///
    /// # Errors
    /// If none does within 15 s.
    pub fn await_reached(&self) -> Result<()> {
        let file = self.cluster.lab().node(self.node).path(format!("{}/reached", self.folder))?;
        wait_until("the fault is reached", Duration::from_secs(15), || file.exists()).map(drop)
    }

    /// Releases the shim if its node still runs. Shims that reach the point later do not block, as
    /// there is no folder to create the file in.
    pub fn release(&self) {
        if let Ok(folder) = self.cluster.lab().node(self.node).path(&self.folder) {
            let _ = std::fs::rename(&folder, folder.with_extension("over"));
        }
    }
}

impl Drop for Fault<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

/// A program of the catalogue that runs on node 1 until its stop file is created.
#[derive(Debug)]
pub struct TestProcess<'a> {
    cluster: &'a Cluster,
    running: Running,
    until: String,
    wanted: Outcome,
}

impl<'a> TestProcess<'a> {
    /// Starts it at home.
    ///
    /// # Errors
    /// If there is no such program, or it does not start.
    pub fn start(cluster: &'a Cluster, name: &str) -> Result<Self> {
        let entry = ENTRIES.iter().find(|e| e.name == name).context("no such program")?;
        let wanted = native(entry, Flavour::Dynamic, Journey::PingPong)?;
        let program = executable(entry, Flavour::Dynamic)?.context("not built")?;
        let until = format!("/tmp/test-process-{}", next_number());
        let mut command = cluster.command(1, "sh");
        command.args(["-c", ANNOUNCE, "sh"]).arg(program);
        command.env("TERN_SECONDS", "0").env("TERN_UNTIL", &until).env("TERN_HEAP_MIB", "16");
        command.env("LC_ALL", "C");
        let mut running = Running::start(&mut command, false)?;
        running.close_input();
        // Wait until it has passed its dynamic loader.
        let (pid, path) = (running.pid.to_string(), entry.name);
        let begun = || {
            cluster.run(1, &["ps", "-o", "comm=", "-p", &pid]).is_ok_and(|c| c.starts_with(path.as_bytes()))
        };
        await_loaded(begun)?;
        Ok(Self { cluster, running, until, wanted })
    }

    /// Its pid on node 1.
    pub fn pid(&self) -> i32 {
        self.running.pid
    }

    /// Migrates it.
    ///
    /// # Errors
    /// If it was not moved, with the message of migrate.
    pub fn migrate(&self, to: &str) -> Result<()> {
        match self.cluster.migrate(self.pid(), to) {
            Ok(_) => Ok(()),
            Err(refused) => bail!("migrate {} {to} (exit {}): {}", self.pid(), refused.code, refused.message),
        }
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.running.has_ended()
    }

    /// Makes it end, and compares its outcome with that of an undisturbed run.
    ///
    /// # Errors
    /// If it does not end within this time, or its outcome differs.
    pub fn finish_correctly(&mut self, within: Duration) -> Result<()> {
        self.cluster.touch(&self.until)?;
        let end = self.running.finish(within)?;
        match end.difference(&self.wanted) {
            Some(difference) => bail!("{difference}"),
            None => Ok(()),
        }
    }

    /// Waits until it has ended with the status of a lost process. It is not asked to end.
    ///
    /// # Errors
    /// If it does not end within this time, or in another way.
    pub fn await_loss(&mut self, within: Duration) -> Result<Duration> {
        let begun = Instant::now();
        let end = self.running.finish(within)?;
        if end.status != LOST_STATUS {
            bail!(
                "exit status {} instead of {LOST_STATUS}: {:?}",
                end.status,
                String::from_utf8_lossy(&end.err)
            );
        }
        Ok(begun.elapsed())
    }

    /// Its output so far.
    pub fn output_so_far(&self) -> String {
        self.running.output_so_far()
    }
}

impl Drop for TestProcess<'_> {
    fn drop(&mut self) {
        if !self.running.has_ended() {
            let _ = self.cluster.run(1, &["kill", "-KILL", &self.running.pid.to_string()]);
        }
    }
}

fn await_loaded(begun: impl Fn() -> bool) -> Result<()> {
    wait_until("the program has started", Duration::from_secs(10), begun)?;
    std::thread::sleep(Duration::from_millis(50));
    Ok(())
}

/// The shims, guests and shim sockets that are present on a node.
///
/// # Errors
/// If the node cannot be examined.
pub fn leftovers(cluster: &Cluster, node: u16) -> Result<Vec<String>> {
    let table = cluster.run(node, &["ps", "-e", "-o", "pid=,stat=,comm=,args="])?;
    let table = String::from_utf8_lossy(&table).into_owned();
    let is_ours = |line: &&str| {
        let mut words = line.split_whitespace().skip(1);
        let alive = words.next().is_some_and(|state| !state.starts_with('Z'));
        alive && (line.contains("tern-shim") || line.contains(" tern:"))
    };
    let mut left: Vec<String> = table.lines().filter(is_ours).map(|line| line.trim().to_owned()).collect();
    let folder: PathBuf = cluster.lab().node(node).path("/run/tern/shims")?;
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path());
    let sockets = files.filter(|path| path.extension().is_some_and(|e| e == "sock"));
    left.extend(sockets.map(|path| path.display().to_string()));
    Ok(left)
}

/// Waits until nothing of any family is left on these nodes.
///
/// # Errors
/// If something is left after this time; lists it.
pub fn await_nothing_left(cluster: &Cluster, nodes: &[u16], within: Duration) -> Result<()> {
    let all = || -> Result<Vec<String>> {
        let mut all = Vec::new();
        for &node in nodes {
            all.extend(leftovers(cluster, node)?.into_iter().map(|what| format!("node {node}: {what}")));
        }
        Ok(all)
    };
    match wait_until("nothing is left", within, || all().is_ok_and(|left| left.is_empty())) {
        Ok(_) => Ok(()),
        Err(error) => bail!("{error}; there still is {:?}", all()?),
    }
}
