//! Why the threads of a process are stopped, or must stop.

use std::time::{Duration, Instant};
use tern_ids::HomePid;

/// How long threads wait before they fork, after a fork has cancelled a departure. Home repeats its
/// request after 10 ms; on a busy machine it takes longer to arrive.
const FORK_WAIT: Duration = Duration::from_millis(500);

/// Why the threads of a process are stopped, or must stop.
#[derive(Debug, Default)]
pub(crate) struct StopReasons {
    /// They are being stopped, or are stopped.
    is_quiescing: bool,
    /// Job control.
    is_job_stopped: bool,
    /// Its home is unreachable.
    is_cut_off: bool,
    /// The signal that ends the process, which stays stopped until home has ended it.
    fatal_signal: Option<FatalSignal>,
    /// A thread that cannot continue here and must be fetched home, and whether home was notified.
    needs_home: Option<(HomePid, bool)>,
    /// A fork has cancelled a departure, and home requests the departure again. Until this time,
    /// and during that departure, threads stop before they fork.
    forks_wait_until: Option<Instant>,
}

/// A signal that ends a guest. The thread is stopped at the instruction that raised it.
#[derive(Debug, Clone, Copy)]
struct FatalSignal {
    signal: i32,
    /// The thread that raised it.
    thread: HomePid,
    /// Whether home was notified.
    is_reported: bool,
}

impl StopReasons {
    /// Whether the threads are being stopped, or are stopped.
    pub(crate) fn is_quiescing(&self) -> bool {
        self.is_quiescing
    }

    /// Records that the threads are being stopped (`true`), or that they are resumed.
    pub(crate) fn set_quiescing(&mut self, is_quiescing: bool) {
        self.is_quiescing = is_quiescing;
    }

    /// Whether the process has a reason to stay stopped other than a departure.
    #[must_use]
    pub(crate) fn must_stay_stopped(&self) -> bool {
        self.is_suspended() || self.fatal_signal.is_some()
    }

    /// Whether job control, or the link to home, keeps the process stopped.
    pub(crate) fn is_suspended(&self) -> bool {
        self.is_job_stopped || self.is_cut_off
    }

    /// Has the process stay stopped, or run again, as far as job control is concerned.
    pub(crate) fn set_job_stopped(&mut self, is_stopped: bool) {
        self.is_job_stopped = is_stopped;
    }

    /// Has the process stay stopped, or run again, as far as the link to home is concerned.
    pub(crate) fn set_cut_off(&mut self, is_cut_off: bool) {
        self.is_cut_off = is_cut_off;
    }

    /// Records that a thread has raised a signal that ends the program. Only the first one counts.
    pub(crate) fn set_fatal_signal(&mut self, signal: i32, thread: HomePid) {
        self.fatal_signal.get_or_insert(FatalSignal { signal, thread, is_reported: false });
    }

    /// Whether home is to be notified of a signal that ends the program.
    pub(crate) fn has_unreported_signal(&self) -> bool {
        self.fatal_signal.is_some_and(|fatal_signal| !fatal_signal.is_reported)
    }

    /// The thread and the signal that ends the program, which the caller reports to home.
    pub(crate) fn report_signal(&mut self) -> Option<(HomePid, i32)> {
        let fatal_signal = self.fatal_signal.as_mut()?;
        fatal_signal.is_reported = true;
        Some((fatal_signal.thread, fatal_signal.signal))
    }

    /// Has home notified of the fatal signal once more. Home then ends the guest.
    pub(crate) fn report_signal_again(&mut self) {
        if let Some(fatal_signal) = &mut self.fatal_signal {
            fatal_signal.is_reported = false;
        }
    }

    /// Records that a thread cannot continue here.
    pub(crate) fn set_needs_home(&mut self, thread: HomePid) {
        self.needs_home = Some((thread, false));
    }

    /// The thread that cannot continue here, if home has not been notified of it. The caller
    /// notifies home.
    pub(crate) fn report_need(&mut self) -> Option<HomePid> {
        let (thread, was_reported) = self.needs_home.as_mut()?;
        (!std::mem::replace(was_reported, true)).then_some(*thread)
    }

    /// Has home notified once more of the fatal signal, and of the thread that cannot continue
    /// here.
    pub(crate) fn report_again(&mut self) {
        self.report_signal_again();
        if let Some((_, is_reported)) = &mut self.needs_home {
            *is_reported = false;
        }
    }

    /// Has threads stop before they fork, until home has repeated its request to depart.
    pub(crate) fn hold_forks(&mut self) {
        self.forks_wait_until = Some(Instant::now() + FORK_WAIT);
    }

    /// Until when threads stop before they fork. During a departure they do so until its end.
    pub(crate) fn forks_held_until(&self) -> Option<Instant> {
        self.forks_wait_until
    }

    /// Lets threads fork again if the wait for a departure has timed out, and returns whether it
    /// has.
    pub(crate) fn release_forks(&mut self) -> bool {
        self.forks_wait_until.take_if(|until| *until <= Instant::now()).is_some()
    }
}
