//! `tern lab run`: a lab for the duration of one command.

use super::split_command;
use crate::error::{LabError, WithContext};
use crate::lab::Lab;
use crate::lab::options::LabOptions;
use crate::process::signals::{self, Received};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal};
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// Time that a command has to exit after a terminating signal.
const TERMINATION_TIMEOUT: Duration = Duration::from_secs(5);

/// Creates a lab, runs the command in it, takes the lab down, and returns the command's exit code.
pub(crate) fn run_in(options: &LabOptions, command: &[OsString]) -> Result<u8, LabError> {
    signals::reset_sigchld();
    signals::record_interrupts();
    // As a subreaper, this process adopts the nodes' inits. They become zombies of this process,
    // not of the machine's init, and vanish when this process ends.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let (program, arguments) = split_command(command)?;
    let lab = Lab::up(options)?;
    if let Some(signal) = signals::recorded() {
        return Err(LabError::Interrupted(signal.signal));
    }
    let child = lab.node(1).command(program).args(arguments).spawn();
    let mut child = child.with_context(|| "start the command".to_owned())?;
    let end = supervise(&mut child);
    lab.down()?;
    let status = match end {
        CommandEnd::Exited(status) => status,
        CommandEnd::TimedOut(signal) => {
            // Taking the lab down has killed the command.
            let _ = child.wait();
            reap_children();
            return Err(LabError::Interrupted(signal));
        }
    };
    reap_children();
    match (status.code(), status.signal()) {
        (Some(code), _) => Ok(code as u8),
        (None, Some(signal)) => signals::die_by_signal(signal),
        (None, None) => Ok(126),
    }
}

/// Reaps the inits that were reparented to this process. They are dead or about to die.
fn reap_children() {
    let end = Instant::now() + Duration::from_secs(1);
    while let Ok(ended) = rustix::process::wait(WaitOptions::NOHANG) {
        if ended.is_none() {
            if Instant::now() > end {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// How the wait for the command ended.
enum CommandEnd {
    Exited(ExitStatus),
    /// The command was sent this signal and did not exit in time.
    TimedOut(i32),
}

/// Waits for the command and forwards terminating signals to it.
fn supervise(child: &mut Child) -> CommandEnd {
    let pidfd = Pid::from_raw(child.id() as i32).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let mut last: Option<(Instant, i32)> = None;
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return CommandEnd::Exited(status);
        }
        if let Some(Received { signal, from_process }) = signals::take_recorded() {
            // The terminal has already sent this signal to the command.
            if from_process
                && let Some(pidfd) = &pidfd
                && let Some(signal) = Signal::from_named_raw(signal)
            {
                let _ = pidfd_send_signal(pidfd, signal);
            }
            // A keyboard interrupt is left to the command, as a shell leaves it to its job.
            if from_process || signal != libc::SIGINT {
                last = Some((Instant::now() + TERMINATION_TIMEOUT, signal));
            }
        }
        if let Some((until, signal)) = last
            && Instant::now() > until
        {
            return CommandEnd::TimedOut(signal);
        }
        // A signal that arrives between the check above and this wait is noticed when the wait
        // times out.
        let interval = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let mut fds: Vec<_> = pidfd.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let _ = poll(&mut fds, Some(&interval));
    }
}
