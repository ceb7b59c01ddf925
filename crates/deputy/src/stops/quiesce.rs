//! Quiescing: stopping all threads of a process or of a deputy.

use crate::process::thread::Thread;
use crate::process::{Process, State};
use crate::shim::Shim;
use tern_ids::HomePid;
use tern_tracee::stop::{self, Stopped};
use tern_tracee::{Result, procfs};

/// How long to sleep between polls where the kernel would not wake the shim.
pub(crate) const POLL_INTERVAL: std::time::Duration = std::time::Duration::from_micros(100);

impl Shim {
    /// Waits for the next wait status while a process at home is quiesced. If its first thread
    /// exits before others the kernel reports nothing, so that is polled.
    fn wait_for_change_of(&mut self, pid: HomePid) -> Result<()> {
        let Some(process) = self.processes.get_mut(&pid) else { return Ok(()) };
        let awaited = process.live_threads().any(|thread| thread.tid == pid && thread.stopped.is_none());
        if !awaited || process.live_threads().count() == 1 {
            return self.wait_for_change();
        }
        if procfs::has_exited(pid.0) {
            process.thread(pid)?.is_exiting = true;
            process.stop_reading_through(pid);
            return Ok(());
        }
        match stop::wait(-1, false)? {
            Some((host, change)) => self.handle_change(HomePid(host), change),
            None => std::thread::sleep(POLL_INTERVAL),
        }
        Ok(())
    }

    /// Waits for the next wait status of any thread.
    fn wait_for_change(&mut self) -> Result<()> {
        if let Some((host, change)) = stop::wait(-1, true)? {
            self.handle_change(HomePid(host), change);
        }
        Ok(())
    }

    /// Stops all threads of a process that runs at home. Signals are delivered meanwhile as if it
    /// were not traced. Returns false if the process is gone, not traced any more, or already doing
    /// what comes next: a departing process that executes a program begins its move again by
    /// itself.
    ///
    /// # Errors
    /// If a thread cannot be waited for.
    pub(crate) fn quiesce_resident(&mut self, pid: HomePid) -> Result<bool> {
        let exec_count = self.processes.get(&pid).map(|process| process.exec_count);
        loop {
            if self.is_frozen(pid) {
                return Ok(false);
            }
            let Some(process) = self.processes.get_mut(&pid) else { return Ok(false) };
            let anew = matches!(process.state, State::Outgoing(_)) && Some(process.exec_count) != exec_count;
            if process.is_away() || anew || process.threads.is_empty() {
                return Ok(false);
            }
            // A thread that executes a program has taken over the pid: all others are gone, and its
            // exec stop is to come.
            if process.threads.get(&pid).is_some_and(|first| first.is_exiting) && !procfs::has_exited(pid.0) {
                process.threads.insert(pid, Thread::new_resident(pid)?);
            }
            if process.is_stopped() {
                return Ok(true);
            }
            let mut gone = Vec::new();
            for thread in process.threads.values_mut().filter(|t| t.stopped.is_none() && !t.is_exiting) {
                if !std::mem::replace(&mut thread.stop_wanted, true) && !interrupt_thread(thread.tid)? {
                    gone.push(thread.tid);
                }
            }
            // No more is reported of threads whose exit was reaped already.
            gone.retain(|tid| procfs::status(tid.0).map_or(true, |s| s.has_exited() && s.tracer == 0));
            for tid in &gone {
                if *tid == pid {
                    self.process_exited(pid);
                } else if let Some(process) = self.processes.get_mut(&pid) {
                    process.thread_exited(*tid);
                }
            }
            if gone.is_empty() {
                self.wait_for_change_of(pid)?;
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

    /// Stops a deputy thread and runs `work` on it.
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

    /// Stops any deputy thread of a process that is away and runs `work` on it.
    pub(crate) fn with_process<T: Default>(
        &mut self,
        pid: HomePid,
        work: impl FnOnce(&mut Process, Stopped) -> Result<T>,
    ) -> Result<T> {
        match self.processes.get(&pid).map(Process::any_thread) {
            Some(any) => self.with_deputy(any?, work),
            None => Ok(T::default()),
        }
    }
}

/// Interrupts a thread. Returns false if it is gone; its exit is reported by a wait status, unless
/// that was reaped already.
pub(super) fn interrupt_thread(tid: HomePid) -> Result<bool> {
    match stop::interrupt(tid.0) {
        Err(error) if error.is_gone() => Ok(false),
        done => done.map(|()| true),
    }
}
