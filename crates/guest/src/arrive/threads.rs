//! Restoring the threads of an arriving process, except the first. Each is created with its tid by
//! a clone call that is injected into the first thread, and gets its state before it runs.
//!
//! Creating threads takes far longer than any other part of their restore. So the source announces
//! their tids with the address space, while the process still runs there. Threads that begin or end
//! after that are created or ended here when the image arrives.

use crate::error::{GuestError, GuestResult};
use crate::sandbox::Sandbox;
use crate::sandbox::clone::{CloneOutcome, Cloner, THREAD_FLAGS, await_clone_return};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tern_image::futex_wait::continue_wait;
use tern_image::process::MAX_THREADS;
use tern_image::{Reserve, ThreadImage, Unmovable};
use tern_tracee::allowance::Allowance;
use tern_tracee::inject::{Injection, Site};
use tern_tracee::listener::Listener;
use tern_tracee::stop::Stopped;
use tern_tracee::{Error, Memory, Result, procfs};

/// The time that a first thread has to exit ([`Allowance`]).
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// A process in which threads are created.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CloneTarget<'a> {
    /// Its reserved range.
    pub(crate) reserve: Reserve,
    /// Its memory.
    pub(crate) memory: &'a Memory,
    /// The notification fd of its filter.
    pub(crate) listener: &'a Listener,
    /// Where tids are chosen.
    pub(crate) sandbox: &'a Sandbox,
}

/// A thread that is stopped where it is to resume, and when its wait on a futex ends.
pub(crate) type RestoredThread = (Stopped, Option<Instant>);

/// The threads of a process except the first, until their state is restored.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    /// The announced threads, by their tids in the process's own namespace.
    wanted: BTreeSet<i32>,
    /// The created threads, stopped before their first instruction.
    created: BTreeMap<i32, Injection>,
}

impl Threads {
    /// Sets the tids that are to exist, as received from another node. Returns whether they are
    /// valid.
    pub(crate) fn set_wanted(&mut self, tids: impl IntoIterator<Item = i32>, first: i32) -> bool {
        self.wanted = tids.into_iter().take(MAX_THREADS).collect();
        self.wanted.iter().all(|tid| *tid > 1 && *tid != first)
    }

    /// Creates missing threads by means of the first thread, which is returned unchanged, and ends
    /// those that are no longer wanted.
    ///
    /// # Errors
    /// If a tid is in use, or the kernel refuses. The created threads then end with the process.
    pub(crate) fn create_missing(
        &mut self,
        target: CloneTarget<'_>,
        first: Injection,
    ) -> GuestResult<Injection> {
        let surplus: Vec<i32> = self.created.keys().copied().filter(|n| !self.wanted.contains(n)).collect();
        for tid in surplus {
            if let Some(thread) = self.created.remove(&tid) {
                target.end_thread(thread)?;
            }
        }
        let missing: Vec<i32> =
            self.wanted.iter().copied().filter(|tid| !self.created.contains_key(tid)).collect();
        if missing.is_empty() {
            return Ok(first);
        }
        let args = [THREAD_FLAGS as u64, 0, 0, 0, 0, 0];
        let cloner = Cloner { reserve: target.reserve, listener: target.listener };
        let (before, mask) = (*first.saved_registers(), first.saved_mask());
        let mut creator = first.finish()?;
        let host = creator.pid();
        // The kernel counts up from the last pid by itself.
        let mut next = None;
        for tid in missing {
            if next != Some(tid) {
                target.sandbox.set_next_pid(tid).map_err(|error| pid_error(error, tid))?;
            }
            next = tid.checked_add(1);
            let CloneOutcome::Created(child) = cloner.inject(creator, &before, &args)? else {
                let what = "no further thread can be created".into();
                return Err(Error::Inconsistent { what, pid: host }.into());
            };
            let given_tid;
            (creator, given_tid) = await_clone_return(host)?;
            if given_tid != tid {
                return Err(Unmovable::Pid(tid).into());
            }
            self.created.insert(tid, Injection::begin(child, Site(target.reserve.start))?);
        }
        creator.set_registers(&before)?;
        creator.set_sigmask(mask)?;
        Ok(Injection::begin(creator, Site(target.reserve.start))?)
    }

    /// Restores the state of the threads, all of which exist. Each is then stopped where it is to
    /// resume. They are returned in the order of the images, with the ends of their waits on futexes.
    ///
    /// # Errors
    /// If one does not exist, or is gone.
    pub(crate) fn restore(
        mut self,
        target: CloneTarget<'_>,
        images: &[ThreadImage],
    ) -> Result<Vec<RestoredThread>> {
        let gone = || Error::Gone { pid: target.memory.pid() };
        let mut threads = Vec::with_capacity(images.len());
        for image in images {
            threads.push(self.created.remove(&image.own_tid).ok_or_else(gone)?);
        }
        let image_refs: Vec<&ThreadImage> = images.iter().collect();
        tern_image::thread::restore(
            &mut threads,
            &image_refs,
            target.memory,
            target.reserve.large_batch_area(),
        )?;
        let restored = threads.into_iter().zip(images);
        restored.map(|(thread, image)| target.finish_thread(thread, image)).collect()
    }
}

impl CloneTarget<'_> {
    /// Ends the restore of a thread.
    pub(crate) fn finish_thread(self, mut thread: Injection, image: &ThreadImage) -> Result<RestoredThread> {
        let scratch = self.reserve.scratch();
        let (registers, wait_until) =
            continue_wait(image.futex_wait_until, image.registers, &mut thread, self.memory, scratch)?;
        Ok((thread.finish_with(&registers, image.sigmask)?, wait_until))
    }

    /// Ends a thread that has not run yet.
    fn end_thread(self, mut thread: Injection) -> Result<()> {
        let pid = thread.pid();
        match self.listener.call_through(&mut thread, libc::SYS_exit, [0; 6], None) {
            Err(Error::Gone { .. }) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(Error::Inconsistent { what: "its surplus thread does not exit".into(), pid }),
        }
    }

    /// Ends the first thread before the others run. The kernel reports its exit only when the
    /// others have ended too.
    pub(crate) fn end_first(self, mut first: Injection) -> Result<()> {
        let pid = first.pid();
        let mut allowance = Allowance::new(pid, EXIT_TIMEOUT);
        first.begin_call(libc::SYS_exit, [0; 6])?;
        while !procfs::has_exited(pid) {
            if allowance.is_exceeded() || first.try_end_call()?.is_some() {
                return Err(Error::Inconsistent { what: "its first thread does not exit".into(), pid });
            }
            match self.listener.receive_new()? {
                Some(call) if call.pid == pid && i64::from(call.nr) == libc::SYS_exit => {
                    self.listener.let_continue(call.id)?;
                }
                Some(call) => self.listener.defer_call(call),
                None => std::thread::yield_now(),
            }
        }
        Ok(())
    }
}

fn pid_error(error: std::io::Error, tid: i32) -> GuestError {
    match error.raw_os_error() {
        // The kernel's reply to a pid above pid_max.
        Some(libc::EINVAL) => Unmovable::Pid(tid).into(),
        _ => Error::Refused { operation: "choose a tid", pid: tid, source: error }.into(),
    }
}
