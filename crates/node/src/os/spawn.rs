//! Starting programs and threads, and waiting for the end of a program.

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{self, Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long a program may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts a program that outlives ternd: in a session of its own, with pipes as its standard input
/// and output.
#[allow(unsafe_code, reason = "between fork and exec only setsid is called")]
pub(crate) fn spawn_detached(command: &mut Command, log: fs::File) -> io::Result<Child> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).current_dir("/");
    // SAFETY: the closure runs between fork and exec and makes one system call, which is
    // async-signal-safe; it touches no memory of this process.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(|_session| ()).map_err(io::Error::from));
    }
    command.spawn()
}

/// Reads the first line that a program prints; times out after [`START_TIMEOUT`].
pub(crate) fn read_first_line(mut from: ChildStdout) -> io::Result<String> {
    let end = Instant::now() + START_TIMEOUT;
    let mut line = Vec::new();
    while !line.contains(&b'\n') && line.len() < 4096 {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or_default();
        let ready = poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&timeout));
        match ready {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::TimedOut, "it took too long")),
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
            Ok(_) => {}
        }
        let mut piece = [0; 512];
        match from.read(&mut piece)? {
            0 => break,
            count => line.extend_from_slice(&piece[..count]),
        }
    }
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(String::from_utf8_lossy(line).into_owned())
}

/// Starts a thread that must not end: if it does, the daemon exits.
pub(crate) fn spawn_critical(name: &'static str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let body = move || {
        let _ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        tracing::error!(name, "a critical thread has ended");
        process::exit(70);
    };
    thread::Builder::new().name(name.into()).spawn(body).context("cannot start a thread")?;
    Ok(())
}

/// Waits for the end of the process, at most for `limit`; returns whether it has ended.
pub(crate) fn wait_exit(process: &OwnedFd, limit: Option<Duration>) -> bool {
    let time = limit.map(|limit| Timespec::try_from(limit).unwrap_or_default());
    loop {
        match poll(&mut [PollFd::new(process, PollFlags::IN)], time.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => return outcome.is_ok_and(|ready| ready > 0),
        }
    }
}
