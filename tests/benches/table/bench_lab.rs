//! A lab for a measurement, and programs that run in it and print their results.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tern_control::MigrationReport;
use tern_lab::{Lab, LabOptions};

/// How long a program may take for a line of output.
const LINE_TIMEOUT: Duration = Duration::from_secs(60);

/// A lab with a cluster. Dropping it takes the lab down.
#[derive(Debug)]
pub(crate) struct BenchLab {
    lab: Lab,
    binaries: PathBuf,
    programs: PathBuf,
}

/// A program on a node. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    lines: Receiver<String>,
    /// The program's pid on its node; 0 until the program has printed it.
    pub(crate) pid: i32,
}

impl BenchLab {
    /// Nodes with equal shares of the machine's CPUs, connected by `link` (as in `tern lab`).
    ///
    /// # Errors
    /// If something is not built, or the lab does not come up.
    pub(crate) fn make(nodes: u16, link: &str) -> Result<Self> {
        let own = std::env::current_exe()?;
        let binaries = own.ancestors().nth(2).context("this program is not in a target folder")?.to_owned();
        let helper = binaries.join("tern");
        if !helper.exists() {
            bail!("no {}: run scripts/bench, which builds it", helper.display());
        }
        let programs = build(&binaries)?;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        // A little less than all CPUs, so that the lab need not scale the shares.
        let share = (cpus as f64 * 0.75 / f64::from(nodes) * 1000.0).floor() / 1000.0;
        let options = LabOptions {
            nodes,
            link: link.parse()?,
            speeds: vec![share],
            daemon: true,
            helper: Some(helper),
            ..LabOptions::unique("bench")?
        };
        Ok(Self { lab: Lab::up(&options)?, binaries, programs })
    }

    /// The address of a node.
    pub(crate) fn address(&self, node: u16) -> String {
        self.lab.node(node).address().to_string()
    }

    /// A command on a node.
    pub(crate) fn command(&self, node: u16, words: &[&str]) -> Command {
        let mut command = self.lab.node(node).command(words[0]);
        let path = std::env::var("PATH").unwrap_or_else(|_e| "/usr/bin:/bin".to_owned());
        let path = format!("{}:{}:{path}", self.binaries.display(), self.programs.display());
        command.args(&words[1..]).env("PATH", path).current_dir("/");
        command
    }

    /// Starts a program on a node.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(crate) fn start(&self, node: u16, words: &[&str]) -> Result<Running> {
        let mut command = self.command(node, words);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let said = child.stdout.take().context("no output")?;
        let (to, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(said).lines().map_while(Result::ok) {
                if to.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Running { child, lines, pid: 0 })
    }

    /// Starts one of the programs in tests/programs/bench, and waits until it has printed its pid.
    ///
    /// # Errors
    /// If it does not.
    pub(crate) fn program(&self, node: u16, words: &[&str]) -> Result<Running> {
        let mut running = self.start(node, words)?;
        let line = running.line()?;
        let pid = line.strip_prefix("pid ").with_context(|| format!("{words:?} printed {line:?}"))?;
        running.pid = pid.parse()?;
        Ok(running)
    }

    /// Runs a command on a node and waits for it.
    ///
    /// # Errors
    /// If it fails, with its error output.
    pub(crate) fn run(&self, node: u16, words: &[&str]) -> Result<Vec<u8>> {
        let end = self.command(node, words).output()?;
        if !end.status.success() {
            bail!("{words:?} on node {node}: {}", String::from_utf8_lossy(&end.stderr).trim());
        }
        Ok(end.stdout)
    }

    /// Migrates a process of node 1 to a node or `home`.
    ///
    /// # Errors
    /// The message of `migrate`.
    pub(crate) fn migrate(&self, pid: i32, to: &str) -> Result<MigrationReport> {
        let out = self.run(1, &["tern", "migrate", &pid.to_string(), to, "--json"])?;
        Ok(serde_json::from_slice(&out)?)
    }

    /// The path of this program, as nodes see it.
    ///
    /// # Errors
    /// If it cannot be determined.
    pub(crate) fn own(&self) -> Result<String> {
        Ok(std::env::current_exe()?.display().to_string())
    }
}

impl Running {
    /// The next line of its output.
    ///
    /// # Errors
    /// If none arrives in time, or it has ended.
    pub(crate) fn line(&mut self) -> Result<String> {
        self.lines.recv_timeout(LINE_TIMEOUT).context("a program printed nothing")
    }

    /// Sends it a line.
    ///
    /// # Errors
    /// If it has ended.
    pub(crate) fn send(&mut self, line: &str) -> Result<()> {
        let input = self.child.stdin.as_mut().context("no input")?;
        writeln!(input, "{line}")?;
        Ok(input.flush()?)
    }

    /// Discards the output received so far.
    pub(crate) fn discard_output(&mut self) {
        while self.lines.try_recv().is_ok() {}
    }

    /// The numbers that it prints within this many seconds, without the first, whose measurement
    /// may have begun earlier.
    ///
    /// # Errors
    /// If it prints anything else.
    pub(crate) fn numbers(&mut self, seconds: f64) -> Result<Vec<f64>> {
        self.discard_output();
        let until = Instant::now() + Duration::from_secs_f64(seconds);
        let mut all = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            all.push(line.parse().with_context(|| format!("{line:?} is no number"))?);
        }
        Ok(all.split_off(1.min(all.len())))
    }

    /// All numbers that it prints until it ends.
    ///
    /// # Errors
    /// If it prints anything else, or fails.
    pub(crate) fn all_numbers(mut self) -> Result<Vec<f64>> {
        let mut all = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(LINE_TIMEOUT) {
            all.push(line.parse().with_context(|| format!("{line:?} is no number"))?);
        }
        let status = self.child.wait()?;
        if !status.success() {
            bail!("a program ended with {status}");
        }
        Ok(all)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// Builds the programs of tests/programs/bench, and returns their folder.
fn build(binaries: &Path) -> Result<PathBuf> {
    let folder = binaries.join("bench-programs");
    std::fs::create_dir_all(&folder)?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/bench");
    for name in ["getppid", "pingpong", "dirty", "calls", "threads", "rates", "blocked"] {
        let status = Command::new("cc")
            .args(["-std=gnu17", "-O2", "-Wall", "-static", "-o"])
            .args([folder.join(name), source.join(name).with_extension("c")])
            .status()
            .context("cannot run cc; install gcc")?;
        if !status.success() {
            bail!("{name}.c does not compile");
        }
    }
    Ok(folder)
}
