//! Helper programs of ternd: the file server and the command server, to which ternd passes
//! connections of other nodes; the gatekeeper, which listens itself; and the file trees for guests.
//! Each is a process of its own and outlives ternd. The gatekeeper is started with ternd if it is
//! configured, the others when they are first needed.

pub(crate) mod admin_tree;
pub(crate) mod connection_mover;
pub(crate) mod file_server;
pub(crate) mod gatekeeper;

use crate::config::Config;
use crate::os::spawn::{read_first_line, spawn_detached};
use crate::shim::{pass_connection_to, request_at};
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

/// How long after a failed start a program is not started again.
const RESTART_DELAY: Duration = Duration::from_secs(2);

/// Timeout of a request to a program.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the children of a program that has ended may take to end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// One helper program.
#[derive(Debug)]
pub(crate) struct HelperProgram<'a> {
    config: &'a Config,
    program: &'a Path,
    subcommand: &'static str,
    /// The node that it serves, for programs of which there is one per node.
    for_node: Option<NodeId>,
    socket_path: PathBuf,
    log: &'static str,
}

impl<'a> HelperProgram<'a> {
    /// The server of this node's files (MFS).
    pub(crate) fn file_server(config: &'a Config) -> Self {
        Self {
            config,
            program: &config.mfs,
            subcommand: "serve",
            for_node: None,
            socket_path: config.mfs_socket(),
            log: "mfs.log",
        }
    }

    /// The tree from which guests on this node map files of their home, `home`.
    pub(crate) fn home_tree(config: &'a Config, home: NodeId) -> Self {
        let socket_path = tern_control::shim::remote_map_socket(&config.run_dir, home);
        Self {
            config,
            program: &config.mfs,
            subcommand: "homes",
            for_node: Some(home),
            socket_path,
            log: "homes.log",
        }
    }

    /// The command server (mexec): runs other nodes' commands, and places those of this node.
    pub(crate) fn command_server(config: &'a Config) -> Self {
        Self {
            config,
            program: &config.exec,
            subcommand: "serve",
            for_node: None,
            socket_path: config.exec_socket(),
            log: "exec.log",
        }
    }

    /// The gatekeeper, which accepts commands of machines outside the cluster.
    pub(crate) fn gatekeeper(config: &'a Config) -> Self {
        let socket_path = tern_control::gatekeeper::socket_path(&config.run_dir);
        Self {
            config,
            program: &config.exec,
            subcommand: "outside",
            for_node: None,
            socket_path,
            log: "outside.log",
        }
    }

    /// The program that moves connections.
    pub(crate) fn connection_mover(config: &'a Config) -> Self {
        Self {
            config,
            program: &config.net,
            subcommand: "serve",
            for_node: None,
            socket_path: tern_control::shim::net_socket(&config.run_dir),
            log: "net.log",
        }
    }

    /// Passes a connection on to the program; starts it if it does not run.
    ///
    /// # Errors
    /// If it does not start, or does not accept the connection.
    pub(crate) fn pass_connection(&self, connection: &TcpStream) -> Result<()> {
        self.with_running(|| pass_connection_to(&self.socket_path, connection))
    }

    /// Passes a connection on to it, if it runs.
    ///
    /// # Errors
    /// If it does not run, or does not accept the connection.
    pub(crate) fn pass_if_running(&self, connection: &TcpStream) -> Result<()> {
        Ok(pass_connection_to(&self.socket_path, connection)?)
    }

    /// Starts it if it does not run.
    ///
    /// # Errors
    /// If it does not start.
    pub(crate) fn ensure_running(&self) -> Result<()> {
        self.with_running(|| tern_control::control_socket::connect(&self.socket_path).map(drop))
    }

    /// The commands that were placed from this node and on it; empty if the program does not run.
    pub(crate) fn placed(&self) -> Vec<PlacedRow> {
        match request_at(&self.socket_path, &ShimRequest::Placed, Some(REPLY_TIMEOUT)) {
            Ok(ShimReply::Placed(rows)) => rows,
            _ => Vec::new(),
        }
    }

    /// Runs `act`, which connects to the program; if nothing listens, starts it and tries again.
    fn with_running(&self, act: impl Fn() -> io::Result<()>) -> Result<()> {
        // The sockets of programs that failed to start, and when. The lock also serialises starts.
        static FAILED_STARTS: Mutex<Vec<(PathBuf, Instant)>> = Mutex::new(Vec::new());
        if act().is_ok() {
            return Ok(());
        }
        let mut failed = FAILED_STARTS.lock().unwrap_or_else(PoisonError::into_inner);
        match act() {
            // No process listens, so a new one may bind the path.
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                failed.retain(|(_, at)| at.elapsed() < RESTART_DELAY);
                // Clients, including other nodes, repeat their requests. Not every request may
                // cause a start.
                anyhow::ensure!(
                    failed.iter().all(|(socket_path, _)| *socket_path != self.socket_path),
                    "{} {} did not start a moment ago; see {} in ternd's run directory",
                    self.program.display(),
                    self.subcommand,
                    self.log
                );
                self.start().inspect_err(|_why| failed.push((self.socket_path.clone(), Instant::now())))?;
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
            .arg(self.subcommand)
            .args(self.for_node.map(|node| node.to_string()))
            .env("TERN_RUN_DIR", &self.config.run_dir);
        let name = format!("{} {}", self.program.display(), self.subcommand);
        let mut child = spawn_detached(&mut command, log).with_context(|| format!("cannot start {name}"))?;
        let first_line = child.stdout.take().map_or_else(|| Ok(String::new()), read_first_line);
        if !first_line.as_ref().is_ok_and(|line| line == "ready") {
            let _ended = child.kill();
            let _status = child.wait();
            anyhow::bail!("{name} did not start: {}", first_line.unwrap_or_else(|e| e.to_string()));
        }
        tracing::info!(pid = child.id(), name, "a helper program has started");
        let wait = move || {
            let status = child.wait();
            tracing::warn!(?status, name, "a helper program has ended");
            // If it was the command server, the commands of other nodes end with it, and their
            // control group can be removed.
            tern_cgroup::guests::remove_within(EXIT_TIMEOUT);
        };
        std::thread::Builder::new().name("reap".into()).stack_size(64 << 10).spawn(wait)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::scratch::Scratch;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn failed_program_is_not_restarted_at_each_request() {
        let Scratch(place) = &Scratch::new("beside");
        let mut config = Config::load(place).unwrap();
        (config.run_dir, config.mfs) = (place.clone(), place.join("mfs"));
        fs::write(&config.mfs, format!("#!/bin/sh\necho x >> {}/starts\n", place.display())).unwrap();
        fs::set_permissions(&config.mfs, fs::Permissions::from_mode(0o755)).unwrap();
        // If the machine is paused for `RESTART_DELAY` between two calls, both start the program.
        let mut starts = 0;
        let mut until = |wanted: &str| {
            let end = Instant::now() + 30 * RESTART_DELAY;
            loop {
                let message = HelperProgram::file_server(&config).ensure_running().unwrap_err().to_string();
                starts += usize::from(message.contains("did not start: "));
                assert_eq!(
                    fs::read_to_string(place.join("starts")).unwrap(),
                    "x\n".repeat(starts),
                    "{message}"
                );
                if message.contains(wanted) {
                    return;
                }
                assert!(Instant::now() < end, "{message}");
                std::thread::sleep(RESTART_DELAY / 100);
            }
        };
        until("did not start: ");
        until("a moment ago; see mfs.log");
        until("did not start: ");
    }
}
