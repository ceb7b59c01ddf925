//! The server of this node's files: a process of its own, started when the first node asks for it.

use crate::config::Config;
use crate::shims::{ANSWER, ask_at, hand_to, read_line, spawn_apart};
use anyhow::{Context, Result};
use std::fs::OpenOptions;
use std::io;
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use tern_control::{Refusal, RefusalKind, ShimRequest};

static STARTING: Mutex<()> = Mutex::new(());

/// Passes a connection on to the server; starts one if there is none.
///
/// # Errors
/// If it does not start, or does not take it.
pub(crate) fn hand_over(config: &Config, connection: &TcpStream) -> Result<()> {
    if hand_to(&config.mfs_door(), connection).is_ok() {
        return Ok(());
    }
    let _one_at_a_time = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    match hand_to(&config.mfs_door(), connection) {
        // Nobody listens, and a new one may take the name.
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            start(config)?;
        }
        handed => return Ok(handed?),
    }
    Ok(hand_to(&config.mfs_door(), connection)?)
}

/// Starts the server if there is none: guests ask it for files that nodes share, whether or not anybody has mounted the tree.
///
/// # Errors
/// If it does not start.
pub(crate) fn be_there(config: &Config) -> Result<()> {
    let is_there = || ask_at(&config.mfs_door(), &ShimRequest::Processes, Some(ANSWER)).is_ok();
    if is_there() {
        return Ok(());
    }
    let _one_at_a_time = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    if is_there() { Ok(()) } else { start(config) }
}

/// Tells the server whether others may reach this node's files. One that does not run reads it when it begins.
///
/// # Errors
/// If it does not answer; it goes by what it was told before then.
pub(crate) fn let_in(config: &Config, open: bool) -> Result<(), Refusal> {
    match ask_at(&config.mfs_door(), &ShimRequest::Files { open }, Some(ANSWER)) {
        Ok(_done) => Ok(()),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Ok(()),
        Err(e) => {
            let said = format!("the server of this node's files does not answer: {e}");
            Err(Refusal::new(RefusalKind::Internal, said).hint("kill it: what is open is opened again"))
        }
    }
}

fn start(config: &Config) -> Result<()> {
    let log = config.run_dir.join("mfs.log");
    let log = OpenOptions::new().append(true).create(true).mode(0o600).open(&log)?;
    let mut command = Command::new(&config.mfs);
    command.arg("--config").arg(&config.config_dir).arg("serve").env("TERN_RUN_DIR", &config.run_dir);
    let mut child =
        spawn_apart(&mut command, log).with_context(|| format!("cannot start {}", config.mfs.display()))?;
    let said = child.stdout.take().map_or_else(|| Ok(String::new()), read_line);
    if !said.as_ref().is_ok_and(|line| line == "ready") {
        let _ended = child.kill();
        let _status = child.wait();
        anyhow::bail!("the server of files did not start: {}", said.unwrap_or_else(|e| e.to_string()));
    }
    tracing::info!(pid = child.id(), "the server of this node's files has started");
    let wait = move || {
        let status = child.wait();
        tracing::warn!(?status, "the server of this node's files has ended");
    };
    std::thread::Builder::new().name("reap".into()).stack_size(64 << 10).spawn(wait)?;
    Ok(())
}
