//! Guests that attack their node: building, running and migrating them, and inspecting their
//! sandbox.

use crate::cluster::Cluster;
use crate::cluster::fault_injection::wait_until;
use crate::programs::build_directory;
use crate::runs::outcome::Outcome;
use crate::runs::running::{ANNOUNCE, Running};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Where the programs look for the shim's address range.
const STUB_AREA: &str = "0x310000000000";

/// Builds a program of `programs/hostile`, statically, if it is not up to date.
///
/// # Errors
/// If it does not compile.
fn build(name: &str) -> Result<PathBuf> {
    let folder = build_directory()?.join("hostile");
    fs::create_dir_all(&folder)?;
    let lock = fs::File::create(folder.join(".lock"))?;
    lock.lock()?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/hostile");
    let (program, code) = (folder.join(name), source.join(format!("{name}.c")));
    let sources = [code.clone(), source.join("hostile.h"), source.join("../program.h")];
    let built = fs::metadata(&program).and_then(|m| m.modified()).ok();
    let newest = sources.iter().filter_map(|s| fs::metadata(s).and_then(|m| m.modified()).ok()).max();
    if built.is_some() && built > newest {
        return Ok(program);
    }
    let flags =
        ["-std=gnu17", "-O1", "-g", "-mno-red-zone", "-static", "-Wall", "-Wextra", "-Wno-unused-result"];
    let end = Command::new("cc").args(flags).arg(&code).arg("-o").arg(&program).output();
    let end = end.context("cannot run cc; install gcc")?;
    if !end.status.success() {
        bail!("{} does not build:\n{}", code.display(), String::from_utf8_lossy(&end.stderr));
    }
    Ok(program)
}

/// A hostile program, started on node 1.
#[derive(Debug)]
pub struct Hostile<'a> {
    cluster: &'a Cluster,
    running: Running,
}

impl<'a> Hostile<'a> {
    /// Starts it; it waits at home for a command.
    ///
    /// # Errors
    /// If it is not built, or does not start.
    pub fn start(cluster: &'a Cluster, name: &str, what: &str) -> Result<Self> {
        let program = build(name)?;
        let mut command = cluster.command(1, "sh");
        command.args(["-c", ANNOUNCE, "sh"]).arg(program).arg(STUB_AREA);
        if !what.is_empty() {
            command.arg(what);
        }
        let running = Running::start(&mut command, false)?;
        let hostile = Self { cluster, running };
        hostile.running.await_output("ready")?;
        Ok(hostile)
    }

    /// Its pid on node 1.
    pub fn pid(&self) -> i32 {
        self.running.pid
    }

    /// Migrates it.
    ///
    /// # Errors
    /// If it was not moved.
    pub fn migrate(&self, to: &str) -> Result<()> {
        match self.cluster.migrate(self.pid(), to) {
            Ok(_) => Ok(()),
            Err(refused) => bail!("migrate {} {to} (exit {}): {}", self.pid(), refused.code, refused.message),
        }
    }

    /// Lets the program attack. Returns true if the program has finished its attack, false if it
    /// was killed.
    ///
    /// # Errors
    /// If neither happens within 25 s.
    pub fn attack(&mut self) -> Result<bool> {
        self.running.send_input("go\n")?;
        match self.running.await_output("done") {
            Ok(()) => Ok(true),
            Err(error) => {
                let ended = wait_until("it has ended", Duration::from_secs(5), || false);
                if ended.is_err() && !self.running.has_ended() {
                    return Err(error.context("it neither ended nor finished its attack"));
                }
                Ok(false)
            }
        }
    }

    /// Lets it run to its end, if it has not ended, and returns its outcome.
    ///
    /// # Errors
    /// If it does not end within 20 s.
    pub fn finish(&mut self) -> Result<Outcome> {
        // It may have ended already.
        let _ = self.running.send_input("end\n");
        self.running.finish(Duration::from_secs(20))
    }

    /// Its output so far.
    pub fn output_so_far(&self) -> String {
        self.running.output_so_far()
    }
}

impl Drop for Hostile<'_> {
    fn drop(&mut self) {
        if !self.running.has_ended() {
            let _ = self.cluster.run(1, &["kill", "-KILL", &self.running.pid.to_string()]);
        }
    }
}

/// Checks the sandbox of every guest on a node; `count` is how many guests there must be at least.
///
/// # Errors
/// If a guest has more than its sandbox allows, or there are too few guests.
pub fn inspect(cluster: &Cluster, node: u16, count: usize) -> Result<()> {
    let all = cluster.lab().node(node).processes()?;
    let title = |pid: &i32| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let guests: Vec<i32> = all.iter().copied().filter(|pid| title(pid).starts_with(b"tern:")).collect();
    let node_net = fs::read_link(format!("/proc/{}/ns/net", cluster.lab().node(node).init_pid()?))?;
    let mut inspected = 0;
    for guest in guests {
        match inspect_one(guest, &node_net) {
            Ok(()) => inspected += 1,
            // A guest that has just left may still be exiting: there is nothing to inspect.
            Err(_) if !title(&guest).starts_with(b"tern:") => {}
            Err(error) => return Err(error.context(format!("guest {guest} of node {node}"))),
        }
    }
    if inspected < count {
        bail!("{inspected} guests on node {node} where {count} should be");
    }
    Ok(())
}

fn inspect_one(guest: i32, node_net: &Path) -> Result<()> {
    let status = fs::read_to_string(format!("/proc/{guest}/status"))?;
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with(':'));
        line.map(|line| line[name.len() + 1..].trim().to_owned()).unwrap_or_default()
    };
    for name in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
        if u64::from_str_radix(&field(name), 16) != Ok(0) {
            bail!("{name} is {:?}", field(name));
        }
    }
    for (name, wanted) in [("Seccomp", "2"), ("NoNewPrivs", "1")] {
        if field(name) != wanted {
            bail!("{name} is {:?}, not {wanted}", field(name));
        }
    }
    if field("Uid").split_whitespace().any(|uid| uid == "0") {
        bail!("it is root there: Uid {}", field("Uid"));
    }
    for folder in ["fd", "root"] {
        let has: Vec<_> =
            fs::read_dir(format!("/proc/{guest}/{folder}"))?.flatten().map(|e| e.path()).collect();
        if !has.is_empty() {
            bail!("its {folder} is not empty: {has:?}");
        }
    }
    let mounts = fs::read_to_string(format!("/proc/{guest}/mountinfo"))?;
    if mounts.lines().count() != 1 {
        bail!("it has mounts: {mounts}");
    }
    // Its namespaces must be those of its helper, and the network namespace not the node's.
    let helper = first_of_its_namespace(guest, &status)?;
    for space in ["user", "pid", "mnt", "net", "ipc", "uts", "cgroup"] {
        let of = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/{space}"));
        if of(guest)? != of(helper)? {
            bail!("its {space} namespace is not that of its helper");
        }
    }
    if fs::read_link(format!("/proc/{guest}/ns/net"))? == node_net {
        bail!("it is in the node's network");
    }
    let sockets = fs::read_to_string(format!("/proc/{guest}/net/sockstat")).unwrap_or_default();
    if let Some(tcp) = sockets.lines().find(|line| line.starts_with("TCP: ") && !line.contains("inuse 0")) {
        bail!("there are sockets in its network: {tcp}");
    }
    Ok(())
}

/// The process with pid 1 in the pid namespace of `guest`.
fn first_of_its_namespace(guest: i32, status: &str) -> Result<i32> {
    let numbers = |text: &str| -> Vec<i32> {
        let line = text.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
        line.split_whitespace().filter_map(|word| word.parse().ok()).collect()
    };
    let depth = numbers(status).len();
    let space = fs::read_link(format!("/proc/{guest}/ns/pid"))?;
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(text) = fs::read_to_string(entry.path().join("status")) else { continue };
        let own = numbers(&text);
        if own.len() == depth
            && own.last() == Some(&1)
            && fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|other| other == space)
        {
            return Ok(pid);
        }
    }
    bail!("its pid namespace has no first process")
}
