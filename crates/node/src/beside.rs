//! Programs beside ternd: the server of this node's files and what runs commands, which other nodes' connections are for, and the gatekeeper,
//! which has connections of its own; and the tree of files for guests. Each is a process of its own, started when it is needed first, and outlives ternd.

use crate::config::Config;
use crate::shims::{ask_at, hand_to, read_line, spawn_apart};
use anyhow::{Context, Result};
use std::fs::OpenOptions;
use std::io;
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tern_control::{PlacedRow, ShimReply, ShimRequest};
use tern_ids::NodeId;

/// How long one that did not start is not started again.
const REST: Duration = Duration::from_secs(2);

/// How long it may take to answer.
const ANSWERS: Duration = Duration::from_secs(2);

/// How long the processes of one that has ended may take to end as well.
const ENDS: Duration = Duration::from_secs(5);

/// One of them.
#[derive(Debug)]
pub(crate) struct Beside<'a> {
    config: &'a Config,
    program: &'a Path,
    what: &'static str,
    /// Of which node it is, if there is one for each.
    of: Option<NodeId>,
    door: PathBuf,
    log: &'static str,
}

impl<'a> Beside<'a> {
    /// The server of this node's files.
    pub(crate) fn files(config: &'a Config) -> Self {
        Self {
            config,
            program: &config.mfs,
            what: "serve",
            of: None,
            door: config.mfs_door(),
            log: "mfs.log",
        }
    }

    /// The tree from which guests map files of this home.
    pub(crate) fn homes(config: &'a Config, home: NodeId) -> Self {
        let door = tern_control::shim::homes_door(&config.run_dir, home);
        Self { config, program: &config.mfs, what: "homes", of: Some(home), door, log: "homes.log" }
    }

    /// What runs other nodes' commands, and finds nodes for ours.
    pub(crate) fn exec(config: &'a Config) -> Self {
        Self {
            config,
            program: &config.exec,
            what: "serve",
            of: None,
            door: config.exec_door(),
            log: "exec.log",
        }
    }

    /// What takes commands of machines outside of the cluster.
    pub(crate) fn gatekeeper(config: &'a Config) -> Self {
        let door = tern_control::outside::socket(&config.run_dir);
        Self { config, program: &config.exec, what: "outside", of: None, door, log: "outside.log" }
    }

    /// Passes a connection on to it; starts it if it does not run.
    ///
    /// # Errors
    /// If it does not start, or does not take it.
    pub(crate) fn hand_over(&self, connection: &TcpStream) -> Result<()> {
        self.when_there(|| hand_to(&self.door, connection))
    }

    /// Starts it if it does not run.
    ///
    /// # Errors
    /// If it does not start.
    pub(crate) fn ensure(&self) -> Result<()> {
        self.when_there(|| tern_control::door::connect(&self.door).map(drop))
    }

    /// What is placed from this node and on it, if it is the one that knows; nothing if it does not run.
    pub(crate) fn placed(&self) -> Vec<PlacedRow> {
        match ask_at(&self.door, &ShimRequest::Placed, Some(ANSWERS)) {
            Ok(ShimReply::Placed(rows)) => rows,
            _ => Vec::new(),
        }
    }

    fn when_there(&self, act: impl Fn() -> io::Result<()>) -> Result<()> {
        // One at a time; those that did not start, and when.
        static STARTING: Mutex<Vec<(PathBuf, Instant)>> = Mutex::new(Vec::new());
        if act().is_ok() {
            return Ok(());
        }
        let mut failed = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        match act() {
            // Nobody listens, and a new one may take the name.
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                failed.retain(|(_, at)| at.elapsed() < REST);
                // Whoever wants it tries again and again, and other nodes do.
                anyhow::ensure!(
                    failed.iter().all(|(door, _)| *door != self.door),
                    "{} {} did not start a moment ago; {} in ternd's run directory says why",
                    self.program.display(),
                    self.what,
                    self.log
                );
                self.start().inspect_err(|_why| failed.push((self.door.clone(), Instant::now())))?;
            }
            done => return Ok(done?),
        }
        Ok(act()?)
    }

    fn start(&self) -> Result<()> {
        let log = self.config.run_dir.join(self.log);
        let log = OpenOptions::new().append(true).create(true).mode(0o600).open(&log)?;
        let mut command = Command::new(self.program);
        command
            .arg("--config")
            .arg(&self.config.config_dir)
            .arg(self.what)
            .args(self.of.map(|node| node.to_string()))
            .env("TERN_RUN_DIR", &self.config.run_dir);
        let name = format!("{} {}", self.program.display(), self.what);
        let mut child = spawn_apart(&mut command, log).with_context(|| format!("cannot start {name}"))?;
        let said = child.stdout.take().map_or_else(|| Ok(String::new()), read_line);
        if !said.as_ref().is_ok_and(|line| line == "ready") {
            let _ended = child.kill();
            let _status = child.wait();
            anyhow::bail!("{name} did not start: {}", said.unwrap_or_else(|e| e.to_string()));
        }
        tracing::info!(pid = child.id(), name, "has started");
        let wait = move || {
            let status = child.wait();
            tracing::warn!(?status, name, "has ended");
            // What it had of other nodes' ends with it, and nobody else is there to remove its group.
            tern_cgroup::guests::tidy_within(ENDS);
        };
        std::thread::Builder::new().name("reap".into()).stack_size(64 << 10).spawn(wait)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_does_not_start_is_not_started_at_each_ask() {
        let Scratch(place) = &Scratch::new("beside");
        let mut config = Config::load(place).unwrap();
        (config.run_dir, config.mfs) = (place.clone(), place.join("mfs"));
        fs::write(&config.mfs, format!("#!/bin/sh\necho x >> {}/starts\n", place.display())).unwrap();
        fs::set_permissions(&config.mfs, fs::Permissions::from_mode(0o755)).unwrap();
        // On a machine that stands still between two asks it is tried at each.
        let mut starts = 0;
        let mut until = |wanted: &str| {
            let end = Instant::now() + 30 * REST;
            loop {
                let said = Beside::files(&config).ensure().unwrap_err().to_string();
                starts += usize::from(said.contains("did not start: "));
                assert_eq!(fs::read_to_string(place.join("starts")).unwrap(), "x\n".repeat(starts), "{said}");
                if said.contains(wanted) {
                    return;
                }
                assert!(Instant::now() < end, "{said}");
                std::thread::sleep(REST / 100);
            }
        };
        until("did not start: ");
        until("a moment ago; mfs.log");
        until("did not start: ");
    }
}
