//! Receives signals for a command that runs elsewhere, and ends this process as the command ended.

use crate::Failure;
use nix::sys::signal::{SigSet, Signal as Number, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::process::{Resource, Rlimit, setrlimit};
use tern_mexec::messages::Signal;

/// The signals that are forwarded, except those that this process ignores: the command ignores them
/// as well.
const FORWARDED: [Number; 10] = [
    Number::SIGINT,
    Number::SIGTERM,
    Number::SIGHUP,
    Number::SIGQUIT,
    Number::SIGUSR1,
    Number::SIGUSR2,
    Number::SIGALRM,
    Number::SIGTSTP,
    Number::SIGCONT,
    Number::SIGWINCH,
];

/// A received signal.
pub(in crate::command) enum SignalEvent {
    /// A signal to forward.
    Signal(Signal),
    /// SIGTSTP: first the command must be stopped, then this process.
    Stop,
    /// The terminal's size has changed.
    Resized,
}

/// Receives signals through a signalfd. Must be created while the process has one thread.
pub(in crate::command) struct SignalQueue(SignalFd);

impl SignalQueue {
    /// Blocks the signals of `FORWARDED` that are not in the mask `ignored`; from now on they are
    /// received through the signalfd.
    ///
    /// # Errors
    /// If the kernel cannot create the signalfd.
    pub(in crate::command) fn new(ignored: u64) -> nix::Result<Self> {
        let mut set = SigSet::empty();
        let is_not_ignored = |signal: &&Number| ignored >> (**signal as i32 - 1) & 1 == 0;
        FORWARDED.iter().filter(is_not_ignored).for_each(|signal| set.add(*signal));
        // A closed output is reported by the write's EPIPE instead of SIGPIPE.
        let mut blocked = set;
        blocked.add(Number::SIGPIPE);
        blocked.thread_block()?;
        Ok(Self(SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?))
    }

    /// Readable when a signal is pending.
    pub(in crate::command) fn descriptor(&self) -> &SignalFd {
        &self.0
    }

    /// The next pending signal.
    pub(in crate::command) fn next(&self) -> Option<SignalEvent> {
        let info = self.0.read_signal().ok().flatten()?;
        let number = info.ssi_signo.cast_signed();
        // A signal from the terminal goes to its whole foreground group (si_code > 0); kill(2)
        // reaches one process.
        let group = info.ssi_code > 0;
        Some(match Number::try_from(number) {
            Ok(Number::SIGTSTP) => SignalEvent::Stop,
            Ok(Number::SIGWINCH) => SignalEvent::Resized,
            _ => SignalEvent::Signal(Signal { number, group }),
        })
    }
}

/// Stops this process, as its terminal requests; returns when it is continued.
pub(in crate::command) fn stop() {
    let _continued = raise(Number::SIGSTOP);
}

/// Ends this process as a command with this status ended: with its exit code or by its signal.
///
/// # Errors
/// The exit code, if it is not 0.
pub(in crate::command) fn end_as(status: i32) -> Result<(), Failure> {
    if libc::WIFEXITED(status) {
        return match libc::WEXITSTATUS(status) as u8 {
            0 => Ok(()),
            code => Err(Failure::silent(code)),
        };
    }
    let signal = libc::WTERMSIG(status);
    // This process must not dump core: a core dump of the command is on the node where it ran.
    let _no_core = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    if let Ok(number) = Number::try_from(signal) {
        let mut set = SigSet::empty();
        set.add(number);
        let _raised = raise(number).and_then(|()| set.thread_unblock());
    }
    // The signal did not end this process, because it is ignored here.
    Err(Failure::silent(128u8.saturating_add(signal as u8)))
}
