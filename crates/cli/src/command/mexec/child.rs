//! A command that runs here while somebody wants to know when it ends: it is a child then, and this process only stands for it, as a shell does.

use super::signals::{Came, Signals, stop};
use crate::Failure;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::SigSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use std::ffi::OsStr;
use std::io;
use std::time::Duration;

use crate::command::mosrun::become_program::{become_program, fork};

/// What somebody who waits for a child may want to do something at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum Moment {
    /// So much time has passed.
    Tick,
    /// Both are about to be stopped by their terminal.
    Stops,
    /// And go on.
    GoesOn,
    /// The terminal has another size.
    Size,
}

/// Runs a program as a child: its status as wait(2) has it, and the microseconds of CPU time that it took. The child itself returns here only
/// if there is no such program.
///
/// # Errors
/// In the child, why it is not run; else if there is no child.
pub(super) fn run(program: &OsStr, arguments: &[&OsStr], ignored: u64) -> Result<(i32, u64), Failure> {
    let before = SigSet::thread_get_mask().map_err(io::Error::from)?;
    let signals = Signals::new(ignored).map_err(io::Error::from)?;
    let Some(child) = fork()? else {
        let _as_it_was = before.thread_set_mask();
        // Who kills us means it.
        let _alone = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        return Err(become_program(program, arguments));
    };
    let status = attend(child, &signals, None, &mut |_| {})?;
    let used = getrusage(UsageWho::RUSAGE_CHILDREN).map_err(io::Error::from)?;
    let micros = |time: nix::sys::time::TimeVal| (time.tv_sec() * 1_000_000 + time.tv_usec()).cast_unsigned();
    Ok((status, micros(used.user_time()) + micros(used.system_time())))
}

/// Waits for a child, passes on to it what it does not get itself, and stops and goes on with it; its status as wait(2) has it.
///
/// # Errors
/// If it is no child.
pub(in crate::command) fn attend(
    child: Pid,
    signals: &Signals,
    tick: Option<Duration>,
    at: &mut dyn FnMut(Moment),
) -> io::Result<i32> {
    let process = pidfd_open(child, PidfdFlags::empty())?;
    let tick = tick.and_then(|tick| Timespec::try_from(tick).ok());
    loop {
        let mut fds =
            [PollFd::new(&process, PollFlags::IN), PollFd::new(signals.descriptor(), PollFlags::IN)];
        let _interrupted = poll(&mut fds, tick.as_ref());
        let over = !fds[0].revents().is_empty();
        while let Some(came) = signals.next() {
            match came {
                // What comes from a terminal comes to both.
                Came::Signal(signal) if !signal.group => {
                    if let Some(number) = Signal::from_named_raw(signal.number) {
                        let _over = kill_process(child, number);
                    }
                }
                Came::Signal(_) => {}
                Came::Stop => {
                    at(Moment::Stops);
                    stop();
                    at(Moment::GoesOn);
                }
                Came::Size => at(Moment::Size),
            }
        }
        if over {
            break;
        }
        at(Moment::Tick);
    }
    let ended = waitpid(Some(child), WaitOptions::empty())?;
    ended.map(|(_, status)| status.as_raw()).ok_or_else(|| io::ErrorKind::NotFound.into())
}
