//! Runs a command on this node as a child process, for a caller that records its end. This process
//! forwards signals to the child, and stops when its terminal stops it, as a shell does.

use super::signals::{SignalEvent, SignalQueue, stop};
use crate::Failure;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::SigSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use std::ffi::OsStr;
use std::io;
use std::time::Duration;

use crate::command::run::mosrun::replace_process::{fork, replace_process};

/// An event at which the caller of [`supervise`] may act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum WaitEvent {
    /// The interval has passed, or signals have been handled.
    Tick,
    /// This process has received SIGTSTP and is about to stop.
    Stopping,
    /// This process has been continued.
    Continued,
    /// The terminal's size has changed.
    Resized,
}

/// Runs a program as a child. Returns its status as of wait(2) and its CPU time in microseconds. In
/// the child, returns only if the program could not be executed. `ignored` is the mask of signals
/// that this process ignores.
///
/// # Errors
/// In the child, why the program was not executed; in the parent, if the child cannot be created or
/// waited for.
pub(super) fn run(program: &OsStr, arguments: &[&OsStr], ignored: u64) -> Result<(i32, u64), Failure> {
    let old_mask = SigSet::thread_get_mask().map_err(io::Error::from)?;
    let signals = SignalQueue::new(ignored).map_err(io::Error::from)?;
    let Some(child) = fork()? else {
        let _restored = old_mask.thread_set_mask();
        // If this process is killed by SIGKILL, the child is killed too.
        let _orphaned = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        return Err(replace_process(program, arguments));
    };
    let status = supervise(child, &signals, None, &mut |_| {})?;
    let used = getrusage(UsageWho::RUSAGE_CHILDREN).map_err(io::Error::from)?;
    let micros = |time: nix::sys::time::TimeVal| (time.tv_sec() * 1_000_000 + time.tv_usec()).cast_unsigned();
    Ok((status, micros(used.user_time()) + micros(used.system_time())))
}

/// Waits for a child, forwards signals that were sent to this process only, and stops this process
/// when it receives SIGTSTP. Returns the child's status as of wait(2).
///
/// # Errors
/// If `child` is not a child of this process.
pub(in crate::command) fn supervise(
    child: Pid,
    signals: &SignalQueue,
    tick: Option<Duration>,
    on_event: &mut dyn FnMut(WaitEvent),
) -> io::Result<i32> {
    let process = pidfd_open(child, PidfdFlags::empty())?;
    let tick = tick.and_then(|tick| Timespec::try_from(tick).ok());
    loop {
        let mut fds =
            [PollFd::new(&process, PollFlags::IN), PollFd::new(signals.descriptor(), PollFlags::IN)];
        let _interrupted = poll(&mut fds, tick.as_ref());
        let has_ended = !fds[0].revents().is_empty();
        while let Some(event) = signals.next() {
            match event {
                // A signal from the terminal reaches both processes.
                SignalEvent::Signal(signal) if !signal.group => {
                    if let Some(number) = Signal::from_named_raw(signal.number) {
                        let _ended = kill_process(child, number);
                    }
                }
                SignalEvent::Signal(_) => {}
                SignalEvent::Stop => {
                    on_event(WaitEvent::Stopping);
                    stop();
                    on_event(WaitEvent::Continued);
                }
                SignalEvent::Resized => on_event(WaitEvent::Resized),
            }
        }
        if has_ended {
            break;
        }
        on_event(WaitEvent::Tick);
    }
    let ended = waitpid(Some(child), WaitOptions::empty())?;
    ended.map(|(_, status)| status.as_raw()).ok_or_else(|| io::ErrorKind::NotFound.into())
}
