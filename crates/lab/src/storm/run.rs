//! One run of the command, natively or in the storm: starts it, watches it, and stores its output
//! in files.

use super::descendants::{self, Reaped};
use super::mover::{MoveStats, Movers, StormParams};
use super::ternd;
use crate::error::{LabError, Result, WithContext};
use crate::process::namespaces;
use crate::process::signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, WaitStatus, pidfd_open};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Interval at which new processes are looked for; also the longest delay until a signal to this
/// process is noticed.
const SCAN_INTERVAL: Duration = Duration::from_millis(20);
/// Time for processes that the command leaves running to end by themselves.
const LEFTOVER_EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for killed processes to die.
const EXIT_TIMEOUT: Duration = Duration::from_secs(30);

/// How a run ended.
#[derive(Debug)]
pub(super) struct RunResult {
    /// `exit 0` or `signal 15`; for a run that hung, also the state of its processes.
    pub(super) status: String,
    /// Duration until the command itself ended.
    pub(super) duration: Duration,
    /// Number of processes that the command left running, and that were killed.
    pub(super) leftover: usize,
    /// Whether the command was killed because it did not end within the limit.
    pub(super) hung: bool,
    /// The moves made during the run.
    pub(super) moves: MoveStats,
}

/// Runs the command in `folder`, with its output in `stdout` and `stderr` in `output_directory`.
/// With a storm, mosrun starts the command locked, so that only the storm moves it.
///
/// # Errors
/// The command cannot be started; a signal interrupts this process; or a process that the command
/// started does not die.
pub(super) fn run(
    words: &[OsString],
    folder: &Path,
    output_directory: &Path,
    limit: Duration,
    storm: Option<StormParams>,
) -> Result<RunResult> {
    let mosrun = ["mosrun", "-L", "--"].map(OsString::from);
    let prefix = if storm.is_some() { mosrun.as_slice() } else { &[] };
    let mut words = prefix.iter().chain(words);
    let program = words.next().ok_or_else(|| LabError::BadOption("there is no command to run".to_owned()))?;
    let mut command = Command::new(program);
    command
        .args(words)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    namespaces::set_new_session(&mut command);
    let started = Instant::now();
    let mut child = command.spawn().with_context(|| format!("run {}", program.to_string_lossy()))?;
    let streams = [
        child.stdout.take().map(|from| capture(from, &output_directory.join("stdout"))),
        child.stderr.take().map(|from| capture(from, &output_directory.join("stderr"))),
    ];
    let pid = Pid::from_child(&child);
    // The child has not been reaped yet, so its pid cannot have been reused.
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).with_context(|| "watch the command".to_owned())?;
    // From here on every return path must kill the run's processes.
    let mut movers = storm.map(Movers::new);
    let watched = watch(pid, &pidfd, started, limit, movers.as_mut());
    let killed = if matches!(watched, Ok(WatchResult { none_left: true, .. })) { Ok(()) } else { kill_all() };
    // After the kill: a pending move is answered at the latest when its process has ended.
    let moves = movers.map(Movers::end).unwrap_or_default();
    killed?;
    for stream in streams.into_iter().flatten() {
        let kept =
            stream?.join().unwrap_or_else(|_panic| Err(io::Error::other("the reader thread panicked")));
        kept.with_context(|| "keep the output of the command".to_owned())?;
    }
    let WatchResult { status, duration, leftover, hung, .. } = watched?;
    Ok(RunResult { status, duration, leftover, hung, moves })
}

fn capture(mut from: impl Read + Send + 'static, to: &Path) -> Result<JoinHandle<io::Result<u64>>> {
    let mut to = File::create(to).with_context(|| format!("make {}", to.display()))?;
    Ok(thread::spawn(move || io::copy(&mut from, &mut to)))
}

struct WatchResult {
    status: String,
    duration: Duration,
    leftover: usize,
    hung: bool,
    /// Whether no process of the command is left.
    none_left: bool,
}

/// Waits for the end of the command and of the processes that it started.
fn watch(
    pid: Pid,
    pidfd: &OwnedFd,
    started: Instant,
    limit: Duration,
    mut movers: Option<&mut Movers>,
) -> Result<WatchResult> {
    let mut main: Option<(String, Duration)> = None;
    loop {
        let none_left = loop {
            match descendants::reap() {
                Reaped::Child(one, status) if one == pid => {
                    main = Some((describe_status(status), started.elapsed()));
                }
                Reaped::Child(..) => {}
                Reaped::NoneEnded => break false,
                Reaped::NoChildren => break true,
            }
        };
        if let Some(received) = signals::recorded() {
            return Err(LabError::Interrupted(received.signal));
        }
        let passed = started.elapsed();
        match &main {
            Some((status, duration)) if none_left || passed > *duration + LEFTOVER_EXIT_TIMEOUT => {
                let leftover = if none_left { 0 } else { descendants::list().len() };
                return Ok(WatchResult {
                    status: status.clone(),
                    duration: *duration,
                    leftover,
                    hung: false,
                    none_left,
                });
            }
            None if none_left || passed > limit => {
                let status = format!("not ended within {} s\n{}", limit.as_secs(), describe_processes());
                return Ok(WatchResult { status, duration: passed, leftover: 0, hung: true, none_left });
            }
            _ => {}
        }
        if let Some(movers) = &mut movers {
            movers.add_new(&descendants::list());
        }
        // The pidfd of an ended command is always ready, so it is no longer polled; only the
        // timeout counts then.
        let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
        let fds = if main.is_none() { fds.as_mut_slice() } else { &mut [] };
        let time = Timespec { tv_sec: 0, tv_nsec: i64::from(SCAN_INTERVAL.subsec_nanos()) };
        let _ = poll(fds, Some(&time));
    }
}

fn describe_status(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown exit status".to_owned(),
    }
}

/// Kills all descendants of this process.
fn kill_all() -> Result<()> {
    let until = Instant::now() + EXIT_TIMEOUT;
    loop {
        descendants::kill_all();
        loop {
            match descendants::reap() {
                Reaped::Child(..) => {}
                Reaped::NoneEnded => break,
                Reaped::NoChildren => return Ok(()),
            }
        }
        if Instant::now() > until {
            let pids: Vec<i32> = descendants::list().into_iter().map(|process| process.pid).collect();
            let message = format!("processes {pids:?} of the command cannot be killed");
            return Err(LabError::Failed { what: "the storm".to_owned(), message });
        }
        let _ =
            poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: i64::from(SCAN_INTERVAL.subsec_nanos()) }));
    }
}

/// The state of every process of a hung run, one line each.
fn describe_processes() -> String {
    let rows = ternd::processes().unwrap_or_default();
    let mut text = String::new();
    for process in descendants::list() {
        let pid = process.pid;
        let read =
            |file: &str| tern_control::procfs::read_text(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let words = read("cmdline").replace('\0', " ");
        text += &format!("  {pid} {}: {} in {}", words.trim(), read("syscall").trim(), read("wchan"));
        if let Some(row) = rows.iter().find(|row| row.pid.0 == pid && row.from.is_none()) {
            let at = row.r#where.map_or(0, |node| node.0);
            text += &format!("; {} on node {at}, {} moves {}", row.state, row.migrations, row.reason);
        }
        text.push('\n');
    }
    text
}
