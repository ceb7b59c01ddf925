//! Supervises the server of the administration tree, `tern-admin`, a process of its own that runs
//! as long as this node is in the cluster.
//!
//! The server outlives a restart of ternd; while ternd is down, requests to the tree fail at once.
//! A server that was killed is started again, and one of another build is replaced. When the node
//! stops, the server unmounts the tree and ends.

use crate::config::Config;
use crate::node::Node;
use crate::os::spawn::{read_first_line, spawn_detached, wait_exit};
use crate::process::procfs::{file_id, program_id};
use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long the server may take to unmount the tree and end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(3);

/// Delay before the server is started again; it doubles each time that the server ends early, up to
/// the maximum.
const MIN_RESTART_DELAY: Duration = Duration::from_secs(1);
const MAX_RESTART_DELAY: Duration = Duration::from_secs(60);

/// Set when this node stops; the server is not started again after that.
static IS_STOPPING: AtomicBool = AtomicBool::new(false);

/// Keeps the tree mounted for as long as ternd runs.
pub(crate) fn supervise(node: &Arc<Node>) -> Result<()> {
    let config = &node.config;
    if config.admin_tree.is_none() {
        // Ends a server that was started with an earlier configuration.
        terminate(config);
        return Ok(());
    }
    if !Path::new("/dev/fuse").exists() || !config.admin.exists() {
        let why = if config.admin.exists() { "there is no /dev/fuse" } else { "tern-admin is not installed" };
        tracing::info!(why, "the administration tree is not available");
        return Ok(());
    }
    let node = node.clone();
    thread::Builder::new()
        .name("admin".into())
        .spawn(move || watch(&node.config))
        .context("cannot start a thread")?;
    Ok(())
}

fn watch(config: &Config) {
    let (mut pause, mut last_error) = (MIN_RESTART_DELAY, String::new());
    while !IS_STOPPING.load(Ordering::Acquire) {
        let begun = Instant::now();
        match find_running(config) {
            Some(running) if is_current(config, &running) => {
                wait_exit(&running.process, None);
            }
            Some(_) => {
                terminate(config);
                continue;
            }
            None => {
                if let Err(error) = start(config) {
                    let error = format!("{error:#}");
                    if error != last_error {
                        tracing::warn!(error, "the administration tree is not available");
                        last_error = error;
                    }
                    thread::sleep(pause);
                    pause = (pause * 2).min(MAX_RESTART_DELAY);
                }
                continue;
            }
        }
        if IS_STOPPING.load(Ordering::Acquire) {
            return;
        }
        pause = if begun.elapsed() > MAX_RESTART_DELAY { MIN_RESTART_DELAY } else { pause };
        // A server that ends again and again must not use much CPU time.
        thread::sleep(pause);
        pause = (pause * 2).min(MAX_RESTART_DELAY);
    }
}

/// The running server of the tree.
struct Running {
    pid: i32,
    process: OwnedFd,
    /// Where the tree is mounted.
    at: PathBuf,
}

/// Finds the running server. The lock proves that there is one; the lock file contains its pid and
/// mount point.
fn find_running(config: &Config) -> Option<Running> {
    let file = File::open(config.admin_lock()).ok()?;
    if flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
        return None;
    }
    let text = fs::read_to_string(config.admin_lock()).ok()?;
    let (pid, at) = text.split_once('\n')?;
    let pid: i32 = pid.parse().ok()?;
    let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    Some(Running { pid, process, at: at.trim_end_matches('\n').into() })
}

/// Whether the server is of the installed build and serves the configured path.
fn is_current(config: &Config, running: &Running) -> bool {
    let program = file_id(&config.admin);
    program.is_some()
        && program == program_id(running.pid).ok()
        && config.admin_tree.as_ref() == Some(&running.at)
}

/// Makes the server unmount the tree and end; kills it if it does not.
fn terminate(config: &Config) {
    let Some(Running { pid, process, .. }) = find_running(config) else { return };
    let _gone = pidfd_send_signal(&process, Signal::TERM);
    if !wait_exit(&process, Some(EXIT_TIMEOUT)) {
        tracing::warn!(pid, "the server of the administration tree does not end; killing it");
        let _gone = pidfd_send_signal(&process, Signal::KILL);
        wait_exit(&process, Some(EXIT_TIMEOUT));
    }
}

/// Ends the server when the node stops.
pub(crate) fn stop(config: &Config) {
    IS_STOPPING.store(true, Ordering::Release);
    terminate(config);
}

fn start(config: &Config) -> Result<()> {
    let log = config.run_dir.join("admin.log");
    let log = OpenOptions::new().append(true).create(true).mode(0o600).open(&log)?;
    let mut command = Command::new(&config.admin);
    command.arg("--config").arg(&config.config_dir).env("TERN_RUN_DIR", &config.run_dir);
    let mut child = spawn_detached(&mut command, log)
        .with_context(|| format!("cannot start {}", config.admin.display()))?;
    let line = child.stdout.take().map_or_else(|| Ok(String::new()), read_first_line);
    if !line.as_ref().is_ok_and(|line| line == "ready") {
        let _ended = child.kill();
        let _status = child.wait();
        anyhow::bail!("it did not start: {}", line.unwrap_or_else(|e| e.to_string()));
    }
    tracing::info!(pid = child.id(), at = ?config.admin_tree, "the administration tree is mounted");
    let wait = move || {
        let status = child.wait();
        tracing::info!(?status, "the server of the administration tree has ended");
    };
    thread::Builder::new().name("reap".into()).stack_size(64 << 10).spawn(wait)?;
    Ok(())
}
