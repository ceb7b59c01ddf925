//! A process arrives at home: the parts that its guest sends, up to the point of no return.
//!
//! ```text
//!  Space, DiscardPages   one deputy thread must stop
//!  Pages, Object, Hole   none
//!  Image                 all deputy threads must stop; then the guest's epoch ends
//! ```
//! If a thread is in an uninterruptible sleep (`stops/quiesce.rs`), the part and all later parts
//! wait, while the shim serves the rest of the family. The guest may be frozen meanwhile. So if the
//! sleep lasts, the journey is postponed before its point of no return: the guest is resumed where
//! it is, and departs again when the deputy's call has finished.

use crate::process::Process;
use crate::process::state::State;
use crate::shim::{RETRY_TIMEOUT, Shim};
use crate::stops::quiesce::{Quiesced, is_uninterruptible};
use std::time::{Duration, Instant};
use tern_ids::{Epoch, HomePid};
use tern_image::FileRef;
use tern_image::object::SharedObjects;
use tern_migrate::departure_failure::Busy;
use tern_migrate::message::{Message, ReceivedMessage};
use tern_migrate::{Phase, fault};
use tern_tracee::{Error, Result};

/// How long the parts of a process may wait for a deputy thread to stop. A process that makes one
/// uninterruptible call after the other still comes home if each call is shorter than this: the
/// deputy stops at the end of a call.
pub(crate) const MAX_BLOCKED: Duration = Duration::from_secs(1);

/// Upper bound on the parts of one process that wait.
const MAX_WAITING_PARTS: usize = 64;

/// How often to look whether a deputy's long call has finished.
const BLOCKED_INTERVAL: Duration = Duration::from_millis(20);

impl Shim {
    /// Handles a part of a process that comes home.
    pub(crate) fn handle_returning(&mut self, pid: HomePid, arrived: ReceivedMessage) {
        match self.processes.get_mut(&pid).map(|process| &mut process.state) {
            // Parts of an aborted departure are dropped: its guest continued to run.
            Some(State::Returning(returning)) if returning.has_departed => {
                returning.bytes += arrived.bytes().len() as u64;
                returning.waiting.push_back(arrived);
            }
            _ => return,
        }
        self.take_parts(pid);
    }

    /// Takes the parts of a process that have arrived, until one must wait.
    fn take_parts(&mut self, pid: HomePid) {
        loop {
            let Some(process) = self.processes.get_mut(&pid) else { return };
            let State::Returning(returning) = &mut process.state else { return };
            let Some(part) = returning.waiting.pop_front() else { return };
            if let Message::Image(image, sync) = part.message {
                returning.arrived = Some(Box::new((*image, sync)));
                return self.restore_group(pid);
            }
            let done = self.take_part(pid, &part);
            let is_blocked = matches!(done, Ok(None));
            let Some(process) = self.processes.get_mut(&pid) else { return };
            process.waits.set_blocked(is_blocked);
            if is_blocked && let State::Returning(returning) = &mut process.state {
                return returning.waiting.push_front(part);
            }
            match done {
                Ok(_) if matches!(part.message, Message::Space(_)) => {
                    self.send(pid, &Message::RequestFiles(Epoch(0), Vec::new()));
                }
                Ok(_) => {}
                Err(error) if error.is_gone() => self.handle_error(pid, &error),
                Err(error) => {
                    // It cannot be restored here. Its guest is unchanged and continues.
                    tracing::warn!(%pid, %error, "it could not come home");
                    self.departure_failed(pid, error.to_string());
                    self.send(pid, &Message::Thaw);
                }
            }
        }
    }

    /// Takes one part. Returns none if no thread of the deputy can be stopped for it now.
    fn take_part(&mut self, pid: HomePid, part: &ReceivedMessage) -> Result<Option<()>> {
        let bytes = part.bytes();
        match &part.message {
            Message::Space(layout) => self.with_any_thread(pid, None, |process, stopped| {
                if let State::Returning(returning) = &mut process.state {
                    returning.layout = (**layout).clone();
                }
                process.apply_layout(stopped, layout)
            }),
            Message::DiscardPages(runs) => {
                self.with_any_thread(pid, None, |process, stopped| process.drop_pages(stopped, runs))
            }
            Message::Pages(runs) => {
                let process = self.processes.get_mut(&pid);
                process.map_or(Ok(()), |process| process.write_pages(runs, bytes)).map(Some)
            }
            Message::Object { file, offset } => {
                self.take_object(pid, *file, |objects, file| objects.write(file, *offset, bytes)).map(Some)
            }
            Message::Hole { file, offset, length } => self
                .take_object(pid, *file, |objects, file| objects.punch_hole(file, *offset, *length))
                .map(Some),
            _ => Ok(Some(())),
        }
    }

    /// Writes a part of the shared memory of a process that comes home.
    fn take_object(
        &self,
        pid: HomePid,
        file: u32,
        take: impl FnOnce(&SharedObjects, &FileRef) -> std::io::Result<()>,
    ) -> Result<()> {
        let Some(process) = self.processes.get(&pid) else { return Ok(()) };
        let State::Returning(returning) = &process.state else { return Ok(()) };
        if process.is_left_behind() {
            return Ok(());
        }
        let file = returning.layout.files.get(file as usize);
        // Only an object that the process shares is written: its node could name any object of
        // another process.
        let own = file.filter(|file| process.files.objects.contains(&(file.device, file.inode)));
        let taken = own.map(|file| take(self.shared_memory.objects(), file));
        let inconsistent = |what: String| Error::Inconsistent { what, pid: pid.0 };
        match taken {
            Some(taken) => taken.map_err(|error| inconsistent(format!("shared memory: {error}"))),
            None => Err(inconsistent("its node sent data for memory that it does not share".into())),
        }
    }

    /// Restores the group of a process at home if its last process has arrived and all deputy
    /// threads can stop.
    pub(crate) fn restore_group(&mut self, pid: HomePid) {
        let group = self.group_of(pid);
        let has_arrived = |process: &Process| matches!(&process.state, State::Returning(returning) if returning.arrived.is_some());
        if !group.iter().filter_map(|pid| self.processes.get(pid)).all(has_arrived) {
            return;
        }
        for pid in &group {
            let quiesced = self.quiesce_deputy(*pid);
            if let Some(process) = self.processes.get_mut(pid) {
                process.waits.set_blocked(matches!(quiesced, Ok(Quiesced::Blocked)));
            }
            match quiesced {
                Ok(Quiesced::Stopped | Quiesced::Gone) => {}
                Ok(Quiesced::Blocked) => return,
                Err(error) => return self.handle_error(*pid, &error),
            }
        }
        self.group_has_arrived(&group);
        group.into_iter().for_each(|pid| self.finish_return(pid));
    }

    /// Continues the journeys home for which a deputy thread has to stop.
    pub(crate) fn continue_returns(&mut self) {
        let is_blocked = |process: &&Process| process.waits.blocked_for().is_some();
        let blocked: Vec<HomePid> = self.processes.values().filter(is_blocked).map(|p| p.pid).collect();
        for pid in blocked {
            let Some(process) = self.processes.get(&pid) else { continue };
            let State::Returning(returning) = &process.state else { continue };
            let too_long = process.waits.blocked_for().is_some_and(|time| time > MAX_BLOCKED);
            if too_long || returning.waiting.len() > MAX_WAITING_PARTS {
                self.postpone_return(pid);
            } else if returning.arrived.is_some() {
                self.restore_group(pid);
            } else {
                self.take_parts(pid);
            }
        }
    }

    /// Resumes the guests of a group that was on its way home. They depart again later.
    fn postpone_return(&mut self, pid: HomePid) {
        tracing::info!(%pid, "its journey home waits for a call of its deputy");
        let group = self.group_of(pid);
        for pid in group.iter().copied() {
            let Some(process) = self.processes.get_mut(&pid) else { continue };
            let State::Returning(returning) = &mut process.state else { continue };
            let has_departed = std::mem::take(&mut returning.has_departed);
            let is_job_stopped = process.job_stopped;
            self.drop_parts(pid);
            if has_departed || !is_job_stopped {
                self.send(pid, &Message::Thaw);
            }
        }
        let next = self.leader_of_return(pid, &group);
        self.await_long_calls(next);
    }

    /// The process for which a group tries again to come home: the process whose move a caller
    /// waits for. If no caller waits, it is a process that is not blocked. The blocked processes
    /// are then removed from the group, so that the others may leave them behind.
    fn leader_of_return(&mut self, pid: HomePid, group: &[HomePid]) -> HomePid {
        let members = || group.iter().filter_map(|pid| self.processes.get(pid));
        if let Some(asked) = members().find(|one| one.task.as_ref().is_some_and(|task| task.caller.is_some()))
        {
            return asked.pid;
        }
        // Each process is looked at once, since a sleep may begin or end between two looks.
        let (blocked, ready): (Vec<_>, Vec<_>) = members()
            .map(|process| (process.pid, process.live_threads().any(|thread| is_uninterruptible(thread.tid))))
            .partition(|(_, is_blocked)| *is_blocked);
        let Some((leader, _)) = ready.first() else { return pid };
        for (one, _) in blocked {
            if let Some(process) = self.processes.get_mut(&one) {
                process.state = State::Away;
                process.task = None;
            }
        }
        *leader
    }

    /// Drops the parts of a process that wait. Its deputy threads continue their calls.
    pub(crate) fn drop_parts(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let State::Returning(returning) = &mut process.state else { return };
        returning.waiting.clear();
        returning.arrived = None;
        process.waits.unblocked();
        if let Err(error) = process.withdraw_stops() {
            self.handle_error(pid, &error);
        }
    }

    /// Tries to begin a journey home again a little later. If a caller waits for the journey, the
    /// journey fails after [`RETRY_TIMEOUT`]. A process that is fetched home waits as long as the
    /// call lasts, as its threads would at home.
    pub(crate) fn await_long_calls(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let task = process.task.as_ref();
        if task.is_some_and(|task| task.caller.is_some() && task.started_at.elapsed() > RETRY_TIMEOUT) {
            return self.departure_failed(pid, Busy::UninterruptibleCall);
        }
        process.waits.retry_after(BLOCKED_INTERVAL);
    }

    fn finish_return(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let State::Returning(returning) = &mut process.state else { return };
        let Some(arrived) = returning.arrived.take() else { return };
        let (image, sync) = (&arrived.0, &arrived.1);
        if let Some(task) = &mut process.task {
            task.bytes = returning.bytes;
            task.frozen_at = Instant::now().checked_sub(Duration::from_micros(sync.frozen_us));
        }
        fault::point("home", Phase::HandOver);
        // If the clock was set back here while the process was away, the process sees it go back,
        // like all others on this node.
        if let Err(behind) = tern_migrate::wall::wait_until(sync.wall) {
            tracing::warn!(%pid, %behind);
        }
        // The point of no return of a journey home: the guest's epoch ends here. None of its calls
        // is performed any more, whether or not the `Drop` below arrives.
        process.epoch = process.epoch.next();
        process.in_parent_memory = false;
        process.left_behind = None;
        // Memory that it has unmapped is complete at home, and may be used there from now on. It counts
        // as shared only when the process maps it again.
        let mapped = returning.layout.mapped_objects();
        process.files.objects.retain(|id| mapped.contains(id));
        let threads = image.threads.iter().zip(&sync.threads).map(|(thread, sync)| (thread.tid, sync.used));
        process.usage.all_reported(sync.used, threads.collect());
        let peer = process.peer;
        let home = self.restore_process(pid, image, sync);
        self.send_to_peer(peer, pid, &Message::Drop);
        match home {
            Ok(Some(remainders)) => {
                self.complete_task(pid);
                self.detach_with_remainders(pid, remainders);
            }
            Ok(None) => {}
            Err(error) => self.handle_error(pid, &error),
        }
        self.close_unused_objects();
    }
}
