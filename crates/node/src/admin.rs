//! The administration's tree: a process of its own (`tern-admin`), which runs as long as this node is in the cluster.
//!
//! It outlives a ternd that is started anew, and without ternd it says so at once. One that was killed is started again; one of
//! another build than ours is replaced; at the end of the node it unmounts its tree and ends.

use crate::config::Config;
use crate::shims::{read_line, spawn_apart};
use crate::state::Node;
use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long one may take to unmount and end.
const END: Duration = Duration::from_secs(3);

/// How long until it is started again, at first; twice as long each time that it has ended soon.
const AGAIN: Duration = Duration::from_secs(1);
const MOST_AGAIN: Duration = Duration::from_secs(60);

/// This node is about to end: nothing is started any more.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Sees to it that the tree is there, for as long as this process lives.
pub(crate) fn keep(node: &Arc<Node>) -> Result<()> {
    let config = &node.config;
    if config.admin_tree.is_none() {
        // It may have been there until the configuration was changed.
        end(config);
        return Ok(());
    }
    if !Path::new("/dev/fuse").exists() || !config.admin.exists() {
        let why = if config.admin.exists() { "there is no /dev/fuse" } else { "tern-admin is not installed" };
        tracing::info!(why, "there is no tree of administration");
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
    let (mut pause, mut told) = (AGAIN, String::new());
    while !ENDING.load(Ordering::Acquire) {
        let begun = Instant::now();
        match running(config) {
            Some(running) if is_ours(config, &running) => {
                wait(&running.process, None);
            }
            Some(_) => {
                end(config);
                continue;
            }
            None => {
                if let Err(error) = start(config) {
                    let error = format!("{error:#}");
                    if error != told {
                        tracing::warn!(error, "there is no tree of administration");
                        told = error;
                    }
                    thread::sleep(pause);
                    pause = (pause * 2).min(MOST_AGAIN);
                }
                continue;
            }
        }
        if ENDING.load(Ordering::Acquire) {
            return;
        }
        pause = if begun.elapsed() > MOST_AGAIN { AGAIN } else { pause };
        // One that ends again and again must not keep us busy.
        thread::sleep(pause);
        pause = (pause * 2).min(MOST_AGAIN);
    }
}

/// Who serves the tree.
struct Running {
    pid: i32,
    process: OwnedFd,
    /// Where.
    at: PathBuf,
}

/// Who serves the tree now. Whether somebody does, the kernel says by the lock; who it is and where stands in it.
fn running(config: &Config) -> Option<Running> {
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

/// Whether it is of the same build as what would be started now, and at the same place.
fn is_ours(config: &Config, running: &Running) -> bool {
    let file = |path: &Path| path.metadata().map(|file| (file.dev(), file.ino())).ok();
    let program = file(&config.admin);
    program.is_some()
        && program == file(Path::new(&format!("/proc/{}/exe", running.pid)))
        && config.admin_tree.as_ref() == Some(&running.at)
}

/// Waits for its end; whether that has come.
fn wait(process: &OwnedFd, most: Option<Duration>) -> bool {
    let time = most.map(|most| Timespec::try_from(most).unwrap_or_default());
    loop {
        match poll(&mut [PollFd::new(process, PollFlags::IN)], time.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => return outcome.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Has it unmount its tree and end.
fn end(config: &Config) {
    let Some(Running { pid, process, .. }) = running(config) else { return };
    let _gone = pidfd_send_signal(&process, Signal::TERM);
    if !wait(&process, Some(END)) {
        tracing::warn!(pid, "the tree of administration does not end, and is ended");
        let _gone = pidfd_send_signal(&process, Signal::KILL);
        wait(&process, Some(END));
    }
}

/// The node ends, and its tree with it.
pub(crate) fn stop(config: &Config) {
    ENDING.store(true, Ordering::Release);
    end(config);
}

fn start(config: &Config) -> Result<()> {
    let log = config.run_dir.join("admin.log");
    let log = OpenOptions::new().append(true).create(true).mode(0o600).open(&log)?;
    let mut command = Command::new(&config.admin);
    command.arg("--config").arg(&config.config_dir).env("TERN_RUN_DIR", &config.run_dir);
    let mut child =
        spawn_apart(&mut command, log).with_context(|| format!("cannot start {}", config.admin.display()))?;
    let said = child.stdout.take().map_or_else(|| Ok(String::new()), read_line);
    if !said.as_ref().is_ok_and(|line| line == "ready") {
        let _ended = child.kill();
        let _status = child.wait();
        anyhow::bail!("it did not start: {}", said.unwrap_or_else(|e| e.to_string()));
    }
    tracing::info!(pid = child.id(), at = ?config.admin_tree, "the tree of administration is there");
    let wait = move || {
        let status = child.wait();
        tracing::info!(?status, "the tree of administration has ended");
    };
    thread::Builder::new().name("reap".into()).stack_size(64 << 10).spawn(wait)?;
    Ok(())
}
