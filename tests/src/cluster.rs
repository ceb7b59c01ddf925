//! A lab cluster of three nodes with ternd on each, and Tern's tools as a user runs them.

pub mod fault_injection;
pub mod jobs;
pub mod limits;
pub mod resources;
pub mod stalling_files;

use crate::cluster::fault_injection::wait_until;
use crate::programs;
use anyhow::{Context, Result, anyhow, bail};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tern_control::turn_watch::REPORTS;
use tern_control::{MigrationReport, ProcessRow};
use tern_lab::{Lab, LabOptions};

/// Seconds within which a tool must finish.
const TOOL_TIMEOUT_SECS: &str = "60";

/// How long a step of a main loop may be blocked in a test. If all CPUs are busy, a thread waits
/// for the kernel itself (locks of control groups and memory, pages that are read from the disk);
/// the longest such wait was 0.95 s. A wait for a file system, a daemon or another node is longer,
/// because the timeouts of these waits are whole seconds.
const MAX_BLOCKED: Duration = Duration::from_millis(1500);

/// The cluster of one test.
#[derive(Debug)]
pub struct Cluster {
    lab: Lab,
    binaries: PathBuf,
    /// Whether the test stops shims or daemons, so that their loops seem to wait.
    stops_loops: AtomicBool,
    /// The lock of a lab slot, held for the lifetime of the lab.
    _slot: File,
}

/// The failure of a tool.
#[derive(Debug, Clone)]
pub struct Refused {
    /// Its exit status.
    pub code: i32,
    /// Its message on standard error.
    pub message: String,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refused {}

impl Cluster {
    /// Three nodes, each with its daemon running. Waits for a free lab slot first.
    ///
    /// # Errors
    /// If the programs of Tern are not built, or the lab does not come up.
    pub fn up(prefix: &str) -> Result<Self> {
        Self::with_nodes(prefix, 3)
    }

    /// As `up`, with this many nodes.
    ///
    /// # Errors
    /// As `up`.
    pub fn with_nodes(prefix: &str, nodes: u16) -> Result<Self> {
        Self::make(binaries()?, LabOptions { nodes, daemon: true, ..LabOptions::unique(prefix)? })
    }

    /// As `with_nodes`, for a test that does not depend on the speed or the load of a node: the
    /// nodes have no CPU quotas, so that the test ends sooner.
    ///
    /// # Errors
    /// As `up`.
    pub fn without_quotas(prefix: &str, nodes: u16) -> Result<Self> {
        let options = LabOptions { nodes, daemon: true, cpu_quotas: false, ..LabOptions::unique(prefix)? };
        Self::make(binaries()?, options)
    }

    /// As `with_nodes`, with this many bytes of memory in each node.
    ///
    /// # Errors
    /// As `up`.
    pub fn with_memory(prefix: &str, nodes: u16, memory: u64) -> Result<Self> {
        let options = LabOptions { nodes, daemon: true, memory: Some(memory), ..LabOptions::unique(prefix)? };
        Self::make(binaries()?, options)
    }

    /// As `with_nodes`, with this directory of the machine in each node, as on a shared file
    /// system.
    ///
    /// # Errors
    /// As `up`.
    pub fn with_shared(prefix: &str, nodes: u16, directory: &Path) -> Result<Self> {
        let shared = vec![directory.to_owned()];
        Self::make(binaries()?, LabOptions { nodes, daemon: true, shared, ..LabOptions::unique(prefix)? })
    }

    /// As `with_nodes`, connected by this kind of link.
    ///
    /// # Errors
    /// As `up`; also if `link` does not parse.
    pub fn with_link(prefix: &str, nodes: u16, link: &str) -> Result<Self> {
        let options = LabOptions { nodes, daemon: true, link: link.parse()?, ..LabOptions::unique(prefix)? };
        Self::make(binaries()?, options)
    }

    /// The test stops shims or daemons, so that their loops seem to wait: this is no failure.
    pub fn expect_blocked_loops(&self) {
        self.stops_loops.store(true, Ordering::Relaxed);
    }

    /// One node without a daemon.
    ///
    /// # Errors
    /// If the lab does not come up.
    pub fn bare(prefix: &str) -> Result<Self> {
        Self::make(folder()?, LabOptions { nodes: 1, ..LabOptions::unique(prefix)? })
    }

    fn make(binaries: PathBuf, options: LabOptions) -> Result<Self> {
        let lab_slot = lab_slot()?;
        let helper =
            ["tern", "tern-lab"].map(|name| binaries.join(name)).into_iter().find(|path| path.exists());
        let options = LabOptions { helper, ..options };
        let lab = Lab::up(&options).context("the lab does not come up")?;
        Ok(Self { lab, binaries, stops_loops: AtomicBool::new(false), _slot: lab_slot })
    }

    /// The lab itself, to cut links and kill nodes.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// A command on a node, as root, in `/`.
    pub fn command(&self, node: u16, program: &str) -> Command {
        let mut command = self.lab.node(node).command(program);
        let path = std::env::var("PATH").unwrap_or_else(|_e| "/usr/bin:/bin".to_owned());
        command.env("PATH", format!("{}:{path}", self.binaries.display())).current_dir("/");
        command
    }

    /// A program of Tern on this machine, outside all nodes.
    pub fn on_machine(&self, program: &str) -> Command {
        Command::new(self.binaries.join(program))
    }

    /// A tool of Tern on a node.
    pub fn tool(&self, node: u16, tool: &str) -> Command {
        let mut command = self.command(node, "tern");
        command.arg(tool);
        command
    }

    /// As `tool`, killed when it takes too long, so that a tool that hangs fails one run and not
    /// the whole test.
    fn tool_with_timeout(&self, node: u16, tool: &str) -> Command {
        let mut command = self.command(node, "timeout");
        command.args(["--kill-after=2", TOOL_TIMEOUT_SECS, "tern", tool]);
        command
    }

    /// Mounts /mfs on a node, and waits until the files of node 2 are visible: starting its server
    /// can take longer on a busy machine than the timeout of a request.
    ///
    /// # Errors
    /// If it cannot be mounted, or the files are not visible within 30 s.
    pub fn mount(&self, node: u16, options: &str) -> Result<()> {
        self.run(node, &["mkdir", "-p", "/mfs"])?;
        self.run(node, &["mount.mfs", "mymfs", "/mfs", "-o", options])?;
        let are_visible = || self.run(node, &["ls", "-d", "/mfs/2/."]).is_ok();
        wait_until("the files of node 2 are visible", Duration::from_secs(30), are_visible).map(|_passed| ())
    }

    /// Migrates a process of node 1 to a node or `home`.
    ///
    /// # Errors
    /// If `migrate` fails, or reports another pid or node than requested.
    pub fn migrate(&self, pid: i32, to: &str) -> Result<MigrationReport, Refused> {
        let wanted: u16 = if to == "home" { 1 } else { to.parse().unwrap_or(0) };
        let broken = |message: String| Refused { code: -1, message };
        let end = self
            .tool_with_timeout(1, "migrate")
            .args([&*pid.to_string(), to, "--json"])
            .output()
            .map_err(|e| broken(format!("cannot run migrate: {e}")))?;
        if !end.status.success() {
            return Err(failure(&end));
        }
        let report: MigrationReport = serde_json::from_slice(&end.stdout)
            .map_err(|e| broken(format!("{e} in {:?}", String::from_utf8_lossy(&end.stdout))))?;
        if report.to.0 != wanted || report.pid.0 != pid {
            return Err(broken(format!("requested {pid} to {to}, but migrate reports {report:?}")));
        }
        Ok(report)
    }

    /// The rows of `mps --all --json` on a node.
    ///
    /// # Errors
    /// If it fails or its output cannot be parsed.
    pub fn processes(&self, node: u16) -> Result<Vec<ProcessRow>> {
        let end = self.tool_with_timeout(node, "mps").args(["--all", "--json"]).output()?;
        if !end.status.success() {
            bail!("mps: {}", failure(&end).message);
        }
        serde_json::from_slice(&end.stdout).context("the output of mps cannot be parsed")
    }

    /// Where a process of node 1 runs, and the reason for being there if there is one. `None` if
    /// mps does not list it.
    ///
    /// # Errors
    /// As `processes`.
    pub fn location(&self, pid: i32) -> Result<Option<(u16, String)>> {
        let rows = self.processes(1)?;
        let own = rows.into_iter().find(|row| row.pid.0 == pid && row.from.is_none());
        Ok(own.and_then(|row| Some((row.r#where?.0, row.reason))))
    }

    /// CPU seconds used by the processes of a node.
    ///
    /// # Errors
    /// If the node's control group cannot be read.
    pub fn cpu_seconds(&self, node: u16) -> Result<f64> {
        Ok(self.lab.node(node).cpu_time()?.as_secs_f64())
    }

    /// Waits until a node has used this much more CPU time than before.
    ///
    /// # Errors
    /// If it has not after 15 s.
    pub fn await_cpu(&self, node: u16, before: f64, more: f64) -> Result<()> {
        let until = Instant::now() + Duration::from_secs(15);
        loop {
            let used = self.cpu_seconds(node)? - before;
            if used >= more {
                return Ok(());
            }
            if Instant::now() > until {
                bail!("node {node} used {used:.3} s of CPU time instead of {more}: nothing computes there");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Runs a command on a node and waits for it.
    ///
    /// # Errors
    /// If it fails, with its error output.
    pub fn run(&self, node: u16, words: &[&str]) -> Result<Vec<u8>> {
        let (program, args) = words.split_first().context("no command")?;
        let end = self.command(node, program).args(args).output()?;
        if !end.status.success() {
            bail!("{words:?} on node {node}: {}", failure(&end).message);
        }
        Ok(end.stdout)
    }

    /// Number of processes of a node whose command line has this word.
    ///
    /// # Panics
    /// If pgrep fails.
    pub fn count(&self, node: u16, word: &str) -> usize {
        let said = self.command(node, "pgrep").args(["-fc", word]).output().map(|end| end.stdout);
        let said = said.ok().and_then(|said| String::from_utf8_lossy(&said).trim().parse().ok());
        said.expect("pgrep fails")
    }

    /// Creates an empty file on node 1.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn touch(&self, path: &str) -> Result<()> {
        let seen_from_here = self.lab.node(1).path(path)?;
        File::create(&seen_from_here).with_context(|| format!("cannot make {}", seen_from_here.display()))?;
        Ok(())
    }

    /// Diagnostics after a failure: the processes of all nodes, and the ends of their logs.
    pub fn diagnostics(&self, pid: i32) -> String {
        let show = format!(
            "mps --all; ps -eo pid,ppid,stat,wchan:20,args | grep -v ' \\[' | tail -25; \
             grep -sE 'State|Sig|Tracer' /proc/{pid}/status | tr '\\n\\t' '  '; cat /proc/{pid}/syscall 2>/dev/null"
        );
        let mut text = String::new();
        for node in self.lab.nodes() {
            let number = node.number();
            text += &format!("── node {number}\n");
            if let Ok(end) = self.command(number, "sh").args(["-c", &show]).output() {
                text += &String::from_utf8_lossy(&end.stdout);
            }
            let mut logs = logs(&node.directory());
            if let Ok(shims) = node.path("/run/tern/shims") {
                logs.extend(self::logs(&shims).into_iter().rev().take(4));
            }
            for log in logs {
                let whole = std::fs::read(&log).unwrap_or_default();
                let whole = String::from_utf8_lossy(&whole);
                let lines: Vec<&str> = whole.lines().collect();
                let tail = lines[lines.len().saturating_sub(15)..].join("\n");
                text += &format!("-- {}\n{tail}\n", log.display());
            }
        }
        text
    }

    /// The logs of all shims that mention a process.
    pub fn shim_logs(&self, pid: i32) -> String {
        /// Number of lines of each, from its end.
        const LINES: usize = 60;
        let is_mentioned = |line: &str| line.split([' ', '}']).any(|word| word == format!("pid={pid}"));
        let mut text = String::new();
        for node in self.lab.nodes() {
            let Ok(shims) = node.path("/run/tern/shims") else { continue };
            for log in logs(&shims) {
                let whole = std::fs::read(&log).unwrap_or_default();
                let whole = String::from_utf8_lossy(&whole);
                let lines: Vec<&str> = whole.lines().collect();
                if lines.iter().any(|line| is_mentioned(line)) {
                    let end = lines[lines.len().saturating_sub(LINES)..].join("\n");
                    text += &format!("-- node {}: {}\n{end}\n", node.number(), log.display());
                }
            }
        }
        text
    }
}

impl Drop for Cluster {
    /// Adds the steps of shims' main loops that took too long to `TARGET/tern-tests/slow-turns`,
    /// with the name of the lab. Fails the test if a step was blocked for longer than
    /// `MAX_BLOCKED`.
    fn drop(&mut self) {
        let mut waits = String::new();
        let Ok(collection) = programs::build_directory().map(|folder| folder.join(REPORTS)) else { return };
        let mut lines = String::new();
        for node in self.lab.nodes() {
            let path = node.path(format!("/run/tern/{REPORTS}"));
            let reports = path.ok().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
            for line in reports.lines() {
                lines += &format!("{} node {}: {line}\n", self.lab.name(), node.number());
                if time_blocked(line).is_none_or(|blocked| blocked > MAX_BLOCKED) {
                    waits += &format!("\n{line}");
                }
            }
        }
        if let Ok(mut file) = File::options().append(true).create(true).open(&collection) {
            // A report is lost if the disk is full; the test is not about that.
            let _unreported = file.write_all(lines.as_bytes());
        }
        let is_expected = self.stops_loops.load(Ordering::Relaxed) || std::thread::panicking();
        assert!(waits.is_empty() || is_expected, "main loops have waited:{waits}");
    }
}

/// How long a loop was blocked, from a line of [`REPORTS`].
fn time_blocked(line: &str) -> Option<Duration> {
    let (ms, _place) = line.rsplit_once(", blocked ")?.1.split_once(" ms")?;
    ms.parse().ok().map(Duration::from_millis)
}

/// Takes a lab slot, waiting until one is free. `TERN_LABS` bounds the labs of all test programs
/// that run at the same time; the default is one, so that no test is disturbed by another.
fn lab_slot() -> Result<File> {
    let labs = std::env::var("TERN_LABS").map_or(Ok(1), |labs| labs.parse::<u32>()).context("TERN_LABS")?;
    let open_slot = |number| Ok(File::create(programs::build_directory()?.join(format!("turn-{number}")))?);
    let slots = (1..=labs.max(1)).map(open_slot).collect::<Result<Vec<_>>>()?;
    loop {
        if let Some(free) = slots.iter().position(|slot| slot.try_lock().is_ok()) {
            return slots.into_iter().nth(free).context("no place");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The log files in a folder, most recently written last.
fn logs(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut logs: Vec<PathBuf> =
        files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|e| e == "log")).collect();
    logs.sort_by_key(|path| std::fs::metadata(path).and_then(|m| m.modified()).ok());
    logs
}

fn failure(end: &Output) -> Refused {
    let code = end.status.code().unwrap_or(-1);
    let mut message = String::from_utf8_lossy(&end.stderr).trim().to_owned();
    if code == 124 {
        message += &format!("no answer within {TOOL_TIMEOUT_SECS} s");
    }
    Refused { code, message }
}

/// `TERN_BIN`, or the folder that this test was built into.
fn folder() -> Result<PathBuf> {
    Ok(match std::env::var_os("TERN_BIN") {
        Some(folder) => PathBuf::from(folder),
        None => std::env::current_exe()?.ancestors().nth(2).context("not in a target folder")?.to_owned(),
    })
}

/// The folder with Tern's binaries; checks that all exist.
fn binaries() -> Result<PathBuf> {
    let folder = folder()?;
    for name in ["tern", "ternd", "tern-shim", "tern-mfs", "tern-exec", "tern-admin"] {
        if !folder.join(name).exists() {
            return Err(anyhow!("no {name} in {}: run cargo build --workspace first", folder.display()));
        }
    }
    Ok(folder)
}
