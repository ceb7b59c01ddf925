//! Signal handling in the lab's own processes: waiting for signals, recording them, and dying by
//! one.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

/// A signal mask.
#[derive(Clone, Copy)]
pub(crate) struct SignalMask(libc::sigset_t);

impl SignalMask {
    /// All signals.
    pub(crate) fn all() -> Self {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigfillset initialises the set that it is given.
        unsafe {
            libc::sigfillset(set.as_mut_ptr());
            Self(set.assume_init())
        }
    }

    /// Only this signal.
    pub(crate) fn only(signal: i32) -> Self {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set; sigaddset refuses a number that is no signal.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            let mut set = set.assume_init();
            libc::sigaddset(&raw mut set, signal);
            Self(set)
        }
    }

    /// Sets the calling thread's signal mask to this set and returns the previous mask.
    /// Async-signal-safe.
    pub(crate) fn set(&self) -> Self {
        let mut old = *self;
        // SAFETY: both sets are initialised and live for the call.
        unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const self.0, &raw mut old.0) };
        old
    }

    /// Waits for one of these signals. They must be blocked.
    pub(crate) fn wait(&self) -> Received {
        loop {
            let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
            // SAFETY: the set is initialised, and `info` has room for the siginfo that the kernel
            // writes.
            let signal = unsafe { libc::sigwaitinfo(&raw const self.0, info.as_mut_ptr()) };
            if signal > 0 {
                // SAFETY: sigwaitinfo has filled it in.
                let code = unsafe { info.assume_init() }.si_code;
                return Received { signal, from_process: code <= 0 };
            }
        }
    }
}

/// A received signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Received {
    pub(crate) signal: i32,
    /// Whether a process sent it (kill). The kernel sends a terminal's signals to the whole
    /// foreground group.
    pub(crate) from_process: bool,
}

const FROM_PROCESS: i32 = 0x100;
static LAST_SIGNAL: AtomicI32 = AtomicI32::new(0);

/// From this call on, SIGINT, SIGTERM and SIGHUP are recorded and no longer end this process.
/// Programs that it starts are not affected.
pub(crate) fn record_interrupts() {
    extern "C" fn record(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
        // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo.
        let from_process = unsafe { (*info).si_code } <= 0;
        LAST_SIGNAL.store(signal | if from_process { FROM_PROCESS } else { 0 }, Ordering::SeqCst);
    }
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = record;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: an all-zero sigaction is valid; the handler touches one atomic only, so it is
        // async-signal-safe. A signal that was ignored (nohup) stays ignored.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, ptr::null(), &raw mut action);
            if action.sa_sigaction != libc::SIG_IGN {
                action.sa_sigaction = handler as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
                libc::sigemptyset(&raw mut action.sa_mask);
                libc::sigaction(signal, &raw const action, ptr::null_mut());
            }
        }
    }
}

fn decode(recorded: i32) -> Option<Received> {
    (recorded != 0)
        .then_some(Received { signal: recorded & 0xff, from_process: recorded & FROM_PROCESS != 0 })
}

/// The last recorded signal, if any. It stays recorded.
pub(crate) fn recorded() -> Option<Received> {
    decode(LAST_SIGNAL.load(Ordering::SeqCst))
}

/// Returns the last recorded signal and clears it.
pub(crate) fn take_recorded() -> Option<Received> {
    decode(LAST_SIGNAL.swap(0, Ordering::SeqCst))
}

/// Resets SIGCHLD to its default, so that children can be waited for even if the parent had ignored
/// it.
pub(crate) fn reset_sigchld() {
    // SAFETY: sets a default disposition.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Ends this process by the signal that ended its child, so that its parent sees the same wait
/// status. Leaves no core file: the child has left one.
pub(crate) fn die_by_signal(signal: i32) -> ! {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: plain calls with valid arguments.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
    let open = SignalMask::only(signal);
    // SAFETY: the set is initialised.
    unsafe { libc::sigprocmask(libc::SIG_UNBLOCK, &raw const open.0, ptr::null_mut()) };
    // Reached only if the signal does not kill. The exit code is then the one that a shell would
    // return.
    std::process::exit(128 + signal)
}
