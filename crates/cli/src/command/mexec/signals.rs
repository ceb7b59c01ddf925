//! Signals for a command that runs elsewhere, and an end as it had.

use crate::Failure;
use nix::sys::signal::{SigSet, Signal as Number, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::process::{Resource, Rlimit, setrlimit};
use tern_mexec::words::Signal;

/// Those that are passed on. Who ignores one has the command ignore it as well.
const PASSED: [Number; 10] = [
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

/// What has come.
pub(in crate::command) enum Came {
    /// To be passed on.
    Signal(Signal),
    /// The terminal has stopped us: the command is to stop, and then we.
    Stop,
    /// The terminal has another size.
    Size,
}

/// Signals that wait to be read. To be made while the process has one thread.
pub(in crate::command) struct Signals(SignalFd);

impl Signals {
    /// From now on they are read here.
    ///
    /// # Errors
    /// If the kernel gives no descriptor for it.
    pub(in crate::command) fn new(ignored: u64) -> nix::Result<Self> {
        let mut set = SigSet::empty();
        let heeded = |signal: &&Number| ignored >> (**signal as i32 - 1) & 1 == 0;
        PASSED.iter().filter(heeded).for_each(|signal| set.add(*signal));
        // Who takes no output any more is told so by the write.
        let mut blocked = set;
        blocked.add(Number::SIGPIPE);
        blocked.thread_block()?;
        Ok(Self(SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?))
    }

    /// Readable when one has come.
    pub(in crate::command) fn descriptor(&self) -> &SignalFd {
        &self.0
    }

    /// The next that has come.
    pub(in crate::command) fn next(&self) -> Option<Came> {
        let info = self.0.read_signal().ok().flatten()?;
        let number = info.ssi_signo.cast_signed();
        // From a terminal they come to everybody in its foreground; what somebody sends is for one process.
        let group = info.ssi_code > 0;
        Some(match Number::try_from(number) {
            Ok(Number::SIGTSTP) => Came::Stop,
            Ok(Number::SIGWINCH) => Came::Size,
            _ => Came::Signal(Signal { number, group }),
        })
    }
}

/// Stops this process, as its terminal wants; returns when it goes on.
pub(in crate::command) fn stop() {
    let _goes_on = raise(Number::SIGSTOP);
}

/// Ends as a command has that ended with this status: with its code, or by its signal.
///
/// # Errors
/// The code, if it is not 0.
pub(in crate::command) fn end_as(status: i32) -> Result<(), Failure> {
    if libc::WIFEXITED(status) {
        return match libc::WEXITSTATUS(status) as u8 {
            0 => Ok(()),
            code => Err(Failure::silent(code)),
        };
    }
    let signal = libc::WTERMSIG(status);
    // Its core, if it has one, is where it ran.
    let _as_it_was = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    if let Ok(number) = Number::try_from(signal) {
        let mut set = SigSet::empty();
        set.add(number);
        let _raised = raise(number).and_then(|()| set.thread_unblock());
    }
    // It cannot be died of: it is ignored here.
    Err(Failure::silent(128u8.saturating_add(signal as u8)))
}
