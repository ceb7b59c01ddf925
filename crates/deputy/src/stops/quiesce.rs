//! Quiescing: stopping all threads of a process or of a deputy.
//!
//! A thread in an uninterruptible sleep (state D), such as an fsync that a server does not answer,
//! stops only when that sleep ends. The shim serves the whole family, so it must not wait for such
//! a thread:
//!
//! - Work that needs one particular thread, such as a larger mailbox, is done between two calls of
//!   that thread. Its deputy then waits in the blob and stops at once ([`Shim::with_deputy`]).
//! - Work that any thread can do is done by one that makes no call ([`Shim::with_any_thread`]).
//! - If all threads must stop, or no thread is free, the threads are asked to stop and the caller
//!   returns to the main loop ([`Quiesced::Blocked`]). The request stays pending. When the thread
//!   wakes, its stop is a wait status like any other, and the caller tries again.
//!
//! Waiting for a deputy in an fsync of 25 s delayed each call of its family by up to 23 s.
//!
//! A thread that waits for a FUSE server to answer a request is interruptible until it is first
//! interrupted, and then not. So the state of a thread does not show beforehand whether it can be
//! stopped.

use crate::migrate::requests::seize_threads;
use crate::process::Process;
use crate::process::state::State;
use crate::process::thread::Thread;
use crate::shim::Shim;
use std::time::Duration;
use tern_ids::HomePid;
use tern_tracee::stop::{self, Stopped};
use tern_tracee::{Result, procfs};

/// How long to sleep between polls where the kernel would not wake the shim.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Number of polls before the shim sleeps between them: most stops arrive soon.
const MAX_YIELDS: u32 = 20;

/// Number of polls between two looks at a thread's state.
const POLLS_PER_LOOK: u32 = 16;

/// How often to look for threads that are not known. One that is exiting cannot be seized, but is soon
/// gone.
const MAX_SEARCHES: u32 = 100;

/// The result of an attempt to stop all threads of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quiesced {
    /// All threads are stopped.
    Stopped,
    /// A thread is in an uninterruptible sleep. It stops when it wakes.
    Blocked,
    /// The process is gone, or is not to be stopped any more.
    Gone,
}

impl Shim {
    /// Handles the next wait status, or waits a moment for one, while a process at home is
    /// quiesced. If its first thread exits before others the kernel reports nothing, so the shim
    /// polls for that exit. Returns false if a thread is in an uninterruptible sleep.
    fn poll_for_stop_of(&mut self, pid: HomePid, polls: &mut u32) -> Result<bool> {
        let Some(process) = self.processes.get_mut(&pid) else { return Ok(true) };
        let Some(awaited) = process.live_threads().find(|thread| thread.stopped.is_none()) else {
            return Ok(true);
        };
        let tid = awaited.tid;
        if tid == pid && process.live_threads().count() > 1 && procfs::has_exited(pid.0) {
            process.thread(pid)?.is_exiting = true;
            process.stop_reading_through(pid);
            return Ok(true);
        }
        self.poll_for_stop(tid, polls)
    }

    /// Waits for the next wait status of any thread.
    fn wait_for_change(&mut self) -> Result<()> {
        if let Some((host, change)) = stop::wait(-1, true)? {
            self.handle_change(HomePid(host), change);
        }
        Ok(())
    }

    /// Stops all threads of a process that runs at home. Signals are delivered meanwhile as if it
    /// were not traced. The process counts as gone if it is frozen, away or not traced any more, or
    /// if it was departing and has executed a program, which begins its move again. If a thread is
    /// in an uninterruptible sleep, the others stay stopped.
    ///
    /// # Errors
    /// If a thread cannot be waited for.
    pub(crate) fn quiesce_resident(&mut self, pid: HomePid) -> Result<Quiesced> {
        let (mut polls, mut searches) = (0, 0);
        let exec_count = self.processes.get(&pid).map(|process| process.exec_count);
        loop {
            if self.is_frozen(pid) {
                return Ok(Quiesced::Gone);
            }
            let Some(process) = self.processes.get_mut(&pid) else { return Ok(Quiesced::Gone) };
            let anew = matches!(process.state, State::Outgoing(_)) && Some(process.exec_count) != exec_count;
            if process.is_away() || anew || process.threads.is_empty() {
                return Ok(Quiesced::Gone);
            }
            // A thread that executes a program has taken over the pid: all others are gone, and its
            // exec stop is to come.
            if process.threads.get(&pid).is_some_and(|first| first.is_exiting)
                && !procfs::has_exited(pid.0)
                // /proc may show neither thread while the pid changes hands.
                && let Ok(first) = Thread::new_resident(pid)
            {
                process.threads.insert(pid, first);
            }
            if process.is_stopped() {
                if searches == MAX_SEARCHES || process.has_no_missed_thread()? {
                    return Ok(Quiesced::Stopped);
                }
                searches += 1;
                process.seize_missed_threads()?;
                stop::pause(POLL_INTERVAL);
                // One of them may have executed a program.
                let _any = self.handle_all_stops();
                continue;
            }
            if polls % POLLS_PER_LOOK == 0 {
                process.seize_missed_program()?;
            }
            let mut gone = Vec::new();
            for thread in process.threads.values_mut().filter(|t| t.stopped.is_none() && !t.is_exiting) {
                if !std::mem::replace(&mut thread.stop_wanted, true) && !interrupt_thread(thread.tid)? {
                    gone.push(thread.tid);
                }
            }
            // The kernel reports nothing more about a thread whose exit was reaped already. The
            // first thread also looks gone while another thread, which executes a program, takes
            // over the pid.
            gone.retain(|tid| procfs::status(tid.0).map_or(true, |s| s.has_exited() && s.tracer == 0));
            gone.retain(|tid| *tid != pid || !procfs::is_alive(pid.0));
            for tid in &gone {
                if *tid == pid {
                    self.process_exited(pid);
                } else if let Some(process) = self.processes.get_mut(&pid) {
                    process.thread_exited(*tid);
                }
            }
            if gone.is_empty() && !self.poll_for_stop_of(pid, &mut polls)? {
                return Ok(Quiesced::Blocked);
            }
        }
    }

    /// Stops a process at home that has just executed a program, before its first instruction: it
    /// is in no sleep that lasts. Returns false if it is gone.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub(crate) fn quiesce_new_program(&mut self, pid: HomePid) -> Result<bool> {
        loop {
            match self.quiesce_resident(pid)? {
                Quiesced::Blocked => stop::pause(POLL_INTERVAL),
                quiesced => return Ok(quiesced == Quiesced::Stopped),
            }
        }
    }

    /// Stops a deputy thread. Events that come first are handled: a signal is delivered or
    /// forwarded, a fork's child is set up. Returns none if an exec or exit has ended the deputy.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn quiesce_thread(&mut self, tid: HomePid) -> Result<Option<Stopped>> {
        loop {
            let Some(process) = self.process_of_thread(tid) else { return Ok(None) };
            let away = process.is_away();
            let thread = process.thread(tid)?;
            if thread.is_exiting || !away && thread.draining.is_none() {
                return Ok(None);
            }
            if let Some(stopped) = thread.stopped.take() {
                thread.stop_wanted = false;
                return Ok(Some(stopped));
            }
            if !std::mem::replace(&mut thread.stop_wanted, true) {
                stop::interrupt(tid.0)?;
            }
            self.wait_for_change()?;
        }
    }

    /// Interrupts all threads of a deputy that is about to be quiesced, so that their stops need
    /// not be waited for one after the other.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn interrupt_all(&mut self, pid: HomePid) -> Result<()> {
        let Some(process) = self.processes.get_mut(&pid).filter(|process| process.is_away()) else {
            return Ok(());
        };
        let awaited =
            process.threads.values_mut().filter(|t| !t.is_exiting && t.stopped.is_none() && !t.stop_wanted);
        for thread in awaited {
            thread.stop_wanted = true;
            stop::interrupt(thread.tid.0)?;
        }
        Ok(())
    }

    /// Stops all threads of a deputy. If one is in an uninterruptible sleep it is not waited for;
    /// the others stay stopped, and the caller either tries again or withdraws the request
    /// ([`Process::withdraw_stops`]).
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn quiesce_deputy(&mut self, pid: HomePid) -> Result<Quiesced> {
        self.interrupt_all(pid)?;
        let mut polls = 0;
        loop {
            let Some(process) = self.processes.get(&pid).filter(|process| process.is_away()) else {
                return Ok(Quiesced::Gone);
            };
            let Some(awaited) = process.live_threads().find(|thread| thread.stopped.is_none()) else {
                return Ok(Quiesced::Stopped);
            };
            let (tid, is_asked) = (awaited.tid, awaited.stop_wanted);
            if !is_asked {
                // It is new, or other work of the shim has resumed it meanwhile.
                self.interrupt_all(pid)?;
            }
            if !self.poll_for_stop(tid, &mut polls)? {
                return Ok(Quiesced::Blocked);
            }
        }
    }

    /// Handles the next wait status of any thread, or waits a moment for one. Returns false if the
    /// thread, which was asked to stop, is in an uninterruptible sleep.
    fn poll_for_stop(&mut self, tid: HomePid, polls: &mut u32) -> Result<bool> {
        if let Some((host, change)) = stop::wait(-1, false)? {
            self.handle_change(HomePid(host), change);
            return Ok(true);
        }
        *polls += 1;
        if *polls % POLLS_PER_LOOK == 1 && is_uninterruptible(tid) {
            return Ok(false);
        }
        if *polls < MAX_YIELDS {
            std::thread::yield_now();
        } else {
            stop::pause(POLL_INTERVAL);
        }
        Ok(true)
    }

    /// Stops a deputy thread that makes no call and runs `work` on it.
    pub(crate) fn with_deputy<T: Default>(
        &mut self,
        tid: HomePid,
        work: impl FnOnce(&mut Process, Stopped) -> Result<T>,
    ) -> Result<T> {
        match (self.quiesce_thread(tid)?, self.process_of_thread(tid)) {
            (Some(stopped), Some(process)) => work(process, stopped),
            _ => Ok(T::default()),
        }
    }

    /// Stops a deputy thread of a process that is away, `preferred` if possible and else any, and
    /// runs `work` on it. Returns none if no thread can be stopped now. One thread is then asked to
    /// stop when it wakes.
    pub(crate) fn with_any_thread<T: Default>(
        &mut self,
        pid: HomePid,
        preferred: Option<HomePid>,
        work: impl FnOnce(&mut Process, Stopped) -> Result<T>,
    ) -> Result<Option<T>> {
        let mut polls = 0;
        let stopped = loop {
            let Some(process) = self.processes.get_mut(&pid).filter(|process| process.is_away()) else {
                return Ok(Some(T::default()));
            };
            if let Some(stopped) = process.live_threads().find(|thread| thread.stopped.is_some()) {
                break stopped.tid;
            }
            let candidate = process.interruptible_thread(preferred);
            let tid = candidate.map_or_else(|| process.any_thread(), Ok)?;
            let thread = process.thread(tid)?;
            if !std::mem::replace(&mut thread.stop_wanted, true) {
                stop::interrupt(tid.0)?;
            }
            // A thread that waits for a FUSE server enters an uninterruptible sleep only when it is
            // interrupted. Then another thread is tried.
            if !self.poll_for_stop(tid, &mut polls)? && candidate.is_none() {
                return Ok(None);
            }
        };
        let done = self.with_deputy(stopped, work)?;
        // Others may have been asked to stop before.
        self.processes.get_mut(&pid).map_or(Ok(()), Process::withdraw_stops)?;
        Ok(Some(done))
    }
}

impl Process {
    /// A thread that stops soon when it is asked to: the preferred one if possible, else one whose
    /// deputy makes no call, else one that is not in an uninterruptible sleep.
    fn interruptible_thread(&self, preferred: Option<HomePid>) -> Option<HomePid> {
        let stops_soon = |thread: &&Thread| thread.is_idle() || !is_uninterruptible(thread.tid);
        let preferred = self.live_threads().filter(|thread| Some(thread.tid) == preferred).find(stops_soon);
        let idle = || self.live_threads().find(|thread| thread.is_idle());
        let other = || self.live_threads().find(stops_soon);
        preferred.or_else(idle).or_else(other).map(|thread| thread.tid)
    }

    /// Whether a thread has been in an uninterruptible sleep, in one call, for longer than this.
    pub(crate) fn is_blocked_for(&self, time: Duration) -> bool {
        let lasts = |thread: &&Thread| {
            let current = thread.current.as_ref().filter(|_| !thread.has_finished_call());
            current.is_some_and(|current| current.posted_at.elapsed() > time)
        };
        self.live_threads().filter(lasts).any(|thread| is_uninterruptible(thread.tid))
    }

    /// Withdraws the stop requests to the threads of a deputy. Threads that are stopped already
    /// continue their calls.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn withdraw_stops(&mut self) -> Result<()> {
        let mut stops = Vec::new();
        for thread in self.threads.values_mut().filter(|thread| thread.stop_wanted) {
            thread.stop_wanted = false;
            stops.extend(thread.stopped.take());
        }
        stops.into_iter().try_for_each(|stopped| self.resume_unnoticed(stopped))
    }
}

/// Whether a thread is in an uninterruptible sleep (state D).
pub(crate) fn is_uninterruptible(tid: HomePid) -> bool {
    procfs::status(tid.0).is_ok_and(|status| status.state == b'D')
}

/// Interrupts a thread. Returns false if it is gone; its exit is reported by a wait status, unless
/// that was reaped already.
pub(crate) fn interrupt_thread(tid: HomePid) -> Result<bool> {
    match stop::interrupt(tid.0) {
        Err(error) if error.is_gone() => Ok(false),
        done => done.map(|()| true),
    }
}

impl Process {
    /// Whether all threads of a process at home are known. A thread that was created by a clone(2)
    /// which began before its creator was seized is not traced. If all known threads are stopped,
    /// no such call is under way.
    fn has_no_missed_thread(&self) -> Result<bool> {
        let is_known = |tid: &i32| self.threads.contains_key(&HomePid(*tid));
        Ok(procfs::threads(self.pid.0)?.iter().all(is_known))
    }

    /// Seizes the threads that are not known.
    fn seize_missed_threads(&mut self) -> Result<()> {
        self.seize_all()?;
        // If one of them was executing a program, it was seized when it had taken over the pid.
        let first = procfs::status(self.pid.0)?;
        if !first.has_exited() && first.state != b't' { self.forget_program() } else { Ok(()) }
    }

    /// If a thread that was not seized has executed a program, it has taken over the pid, and all
    /// seized threads are gone without a report: it is seized now.
    fn seize_missed_program(&mut self) -> Result<()> {
        let pid = self.pid;
        let awaited = self.threads.get(&pid).filter(|first| first.stopped.is_none() && !first.is_exiting);
        let is_missed = |status: procfs::Status| !status.has_exited() && status.tracer == 0;
        if awaited.is_none() || !procfs::status(pid.0).is_ok_and(is_missed) {
            return Ok(());
        }
        self.forget_program()?;
        self.threads.clear();
        self.seize_all()
    }

    fn seize_all(&mut self) -> Result<()> {
        let pid = self.pid.0;
        tern_tracee::reap::with_reaper(pid, || seize_threads(self, true)).map(drop)
    }
}
