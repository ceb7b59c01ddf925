//! Processes that their group leaves behind when it comes home.
//!
//! Processes that share memory come home together. Suppose that process A must come home for a
//! call, and that the deputy of process B is in an uninterruptible call that ends only when A
//! continues: A serves the file system of B's call. Each then waits for the other for ever. So a
//! process does not come along if each of its threads waits for a call at home:
//!
//! ```text
//!  the group departs without it     its guest runs nothing, since each thread of it waits for the
//!                                   result of a call, and home sends it no result any more
//!  the group is home                the shared memory is home too; what its guest sends of it later
//!                                   is old, and is dropped
//!  its call ends                    it comes home alone, where its call has its result
//! ```
//! If the group does not come home, home sends the results that it has kept back.

use crate::migrate::arrival::MAX_BLOCKED;
use crate::process::Process;
use crate::process::state::{LeftBehind, State};
use crate::shim::Shim;
use crate::stops::quiesce::is_uninterruptible;
use std::collections::HashSet;
use tern_ids::{HomePid, MigrationId};
use tern_image::object::ObjectId;
use tern_migrate::message::Message;

impl Process {
    /// Whether its guest runs nothing before it has the result of a call from home, and one of the
    /// calls cannot be interrupted.
    fn can_be_left_behind(&self) -> bool {
        let waits = self.live_threads().all(|thread| {
            let current = thread.current.as_ref().filter(|_| !thread.has_finished_call());
            current.is_some_and(|current| current.guest_number().is_some())
        });
        waits && self.live_threads().any(|thread| is_uninterruptible(thread.tid))
    }

    /// Keeps back a result for the guest of a process that its group leaves behind. Returns false
    /// if the message is to be sent.
    pub(crate) fn keep_result_back(&mut self, tid: HomePid, message: &Message) -> bool {
        let Some(left_behind) = self.left_behind.as_mut().filter(|_| matches!(message, Message::Result(_)))
        else {
            return false;
        };
        left_behind.keep_result(tid, message.clone());
        true
    }

    /// Whether the shared memory of its guest is old, since its group is home.
    pub(crate) fn is_left_behind(&self) -> bool {
        self.left_behind.as_ref().is_some_and(LeftBehind::is_group_home)
    }
}

impl Shim {
    /// Leaves behind the processes of this group whose calls keep it from coming home. The journey
    /// is for the process `pid`. Returns false, and leaves none behind, if one of them must come
    /// along.
    pub(crate) fn leave_behind(&mut self, pid: HomePid, group: &[HomePid], journey: MigrationId) -> bool {
        let processes = || group.iter().filter_map(|pid| self.processes.get(pid));
        let blocked: Vec<HomePid> =
            processes().filter(|one| one.is_blocked_for(MAX_BLOCKED)).map(|one| one.pid).collect();
        let stays = |one: &HomePid| {
            *one != pid
                && self.processes.get(one).is_some_and(|process| {
                    matches!(process.state, State::Away)
                        && process.task.is_none()
                        && process.can_be_left_behind()
                })
        };
        if !blocked.iter().all(stays) {
            return false;
        }
        for one in blocked {
            tracing::info!(pid = %one, "its group comes home without it, since its call does not end");
            if let Some(process) = self.processes.get_mut(&one) {
                process.left_behind = Some(LeftBehind::on(journey));
            }
        }
        true
    }

    /// The processes that were left behind on this journey.
    fn left_behind_on(&self, journey: MigrationId) -> Vec<HomePid> {
        let is_one = |process: &&Process| {
            process.left_behind.as_ref().is_some_and(|left_behind| left_behind.is_on(journey))
        };
        self.processes.values().filter(is_one).map(|process| process.pid).collect()
    }

    /// All processes of the group have arrived, and so has the memory that they share.
    pub(crate) fn group_has_arrived(&mut self, group: &[HomePid]) {
        let members = || group.iter().filter_map(|pid| self.processes.get(pid));
        let shared: HashSet<ObjectId> = members().flat_map(|one| one.files.objects.iter().copied()).collect();
        let Some(journey) = members().find_map(|one| Some(one.task.as_ref()?.migration)) else { return };
        for one in self.left_behind_on(journey) {
            let Some(process) = self.processes.get_mut(&one) else { continue };
            process.files.objects.retain(|id| !shared.contains(id));
            if let Some(left_behind) = &mut process.left_behind {
                left_behind.group_is_home();
            }
            self.return_left_behind(one);
        }
    }

    /// The group stays away: the processes that it was to leave behind on this journey continue
    /// there.
    pub(crate) fn rejoin_left_behind(&mut self, journey: MigrationId) {
        for pid in self.left_behind_on(journey) {
            let left_behind = self.processes.get_mut(&pid).and_then(|process| process.left_behind.take());
            for (tid, result) in left_behind.into_iter().flat_map(LeftBehind::into_results) {
                self.send(tid, &result);
            }
        }
    }

    /// Begins the journey home of a process that its group has left behind. The journey waits until
    /// the process's call has ended.
    pub(crate) fn return_left_behind(&mut self, pid: HomePid) {
        let follows = |process: &Process| {
            process.is_left_behind() && matches!(process.state, State::Away) && process.task.is_none()
        };
        if self.processes.get(&pid).is_some_and(follows) {
            self.return_unasked(pid);
        }
    }
}
