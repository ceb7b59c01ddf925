//! Processes that share memory move together: all of them, or none.
//!
//! A write by one of them could not be read by the others from another node. So when one is to
//! leave, all processes that map the same memory are found, and all that share other memory with
//! those. The group consists of the processes with the same migration id
//! ([`crate::process::state::MigrationTask`]):
//!
//! ```text
//!  each sends its own memory while it runs ─▶ all are ready ─▶ all are stopped
//!    ─▶ shared memory is sent once ─▶ images
//!  all have arrived ─▶ GoGroup, one message ─▶ if one runs, all do
//! ```
//! Until `GoGroup` is sent, a failure of one process aborts the move of all. For processes that are
//! away, the group follows from the objects that they map ([`tern_image::object`]), which children
//! inherit. On the way home each image waits until the last one has arrived.
//!
//! Home keeps each object as it was when the group left, so nothing may access it. If a process
//! outside the group maps the object or has it open, the group does not move. If a process of the
//! group reads or writes the object through a descriptor, that brings the group home.

use crate::links::peers::PeerId;
use crate::process::Process;
use crate::process::state::{MigrationTask, State};
use crate::process::waits::WhenStopped;
use crate::shim::Shim;
use crate::shm::openers::is_shim;
use crate::shm::shared_memory::MapQuestion;
use crate::shm::sharers::{SharedMaps, Sharers, Unopened, find_unmovable, shared_by, shared_refusal};
use std::collections::{BTreeSet, HashSet};
use tern_control::shim::RightsLimit;
use tern_control::{Refusal, RefusalKind};
use tern_ids::{HomePid, MigrationId};
use tern_image::Unmovable;
use tern_image::object::ObjectId;
use tern_migrate::message::Message;
use tern_migrate::source::ProcessSender;
use tern_tracee::procfs;

/// The progress of the other processes in the group that a process leaves with.
#[derive(Debug)]
pub(crate) struct GroupProgress {
    /// There are no others.
    pub(crate) is_alone: bool,
    /// All others are ready to be frozen.
    pub(crate) others_ready: bool,
    /// All others are stopped.
    pub(crate) others_stopped: bool,
    /// The group is known to be complete.
    pub(crate) is_complete: bool,
    /// The shared memory that others have sent, or are sending.
    pub(crate) carried_by_others: HashSet<ObjectId>,
}

/// Why processes that share memory cannot leave together.
#[derive(Debug)]
pub(crate) struct GroupRefusal {
    pub(crate) refusal: Refusal,
    /// It is transient.
    pub(crate) is_transient: bool,
    /// The pid of another shim that holds a process of the group, and the pid of that process.
    pub(crate) held_by: Option<(i32, HomePid)>,
}

impl From<(Refusal, bool)> for GroupRefusal {
    fn from((refusal, is_transient): (Refusal, bool)) -> Self {
        Self { refusal, is_transient, held_by: None }
    }
}

/// The refusal for a process that was not found, and whether that is transient: the thread through
/// which it was examined may have exited, as happens when another thread executes a program.
pub(crate) fn not_found(pid: HomePid) -> (Refusal, bool) {
    (Refusal::new(RefusalKind::NotFound, format!("there is no process {pid}")), procfs::is_alive(pid.0))
}

/// Whether a process runs at home and is neither moved nor frozen.
fn is_idle(process: &Process) -> bool {
    process.is_at_home() && process.task.is_none() && process.frozen.is_none() && !process.waits.is_for_stop()
}

impl Shim {
    /// Seizes a process at home that is to leave and those that share memory with it, and opens the
    /// shared memory.
    ///
    /// # Errors
    /// Why they cannot leave. Processes that were not seized before are then detached again.
    pub(crate) fn seize_group(
        &mut self,
        pid: HomePid,
        limit: RightsLimit,
    ) -> Result<Vec<HomePid>, GroupRefusal> {
        let objects = shared_by(pid.0, &|pid| self.program_maps(pid)).map_err(|_gone| not_found(pid))?;
        let maps = if objects.is_empty() {
            SharedMaps::new()
        } else {
            self.shared_memory.shared_maps(MapQuestion::Group(pid)).map_err(Unopened::into_refusal)?
        };
        let sharers = Sharers::among(&maps, pid.0, objects, &|pid| self.program_maps(pid));
        let all: Vec<HomePid> = sharers.pids.iter().map(|pid| HomePid(*pid)).collect();
        // If two shims each hold some of the group, one of them must detach. So a shim holds none
        // of the group while it waits.
        let own = std::process::id() as i32;
        for other in &all {
            // The other shim may trace just one thread: the one with a call that has not ended.
            let tracers = procfs::tracers(other.0);
            if let Some(by) = tracers.into_iter().find(|by| *by != own && is_shim(*by)) {
                let why = format!("process {other}, with which it shares memory, is on its way or away");
                let (refusal, is_transient) = shared_refusal(why, true);
                return Err(GroupRefusal { refusal, is_transient, held_by: Some((by, *other)) });
            }
        }
        let gathered = self.seize_sharers(pid, &sharers, limit);
        if gathered.is_err() {
            self.detach_idle(&all);
        }
        gathered.map(|()| all).map_err(GroupRefusal::from)
    }

    fn seize_sharers(
        &mut self,
        pid: HomePid,
        sharers: &Sharers,
        limit: RightsLimit,
    ) -> Result<(), (Refusal, bool)> {
        if !sharers.objects.is_empty() {
            // Checked first: this reason says more, and such memory must not be opened.
            if let Some(why) = find_unmovable(&self.program_maps(pid.0).unwrap_or_default()) {
                return Err((Refusal::new(RefusalKind::CannotMove, why.to_string()), false));
            }
        }
        self.seize_movable(pid, limit)?;
        for other in sharers.pids.iter().map(|other| HomePid(*other)).filter(|other| *other != pid) {
            match self.join_group(other, pid, limit) {
                // It has ended since.
                Err((refusal, false)) if refusal.kind == RefusalKind::NotFound => {}
                joined => joined?,
            }
        }
        self.open_objects(sharers).map_err(Unopened::into_refusal)
    }

    /// Detaches from processes at home that were seized in vain.
    fn detach_idle(&mut self, all: &[HomePid]) {
        for pid in all {
            if self.processes.get(pid).is_some_and(is_idle) {
                self.release(*pid);
            }
        }
    }

    /// Seizes a process at home so that it leaves with another one whose memory it shares.
    fn join_group(
        &mut self,
        pid: HomePid,
        other: HomePid,
        limit: RightsLimit,
    ) -> Result<(), (Refusal, bool)> {
        let busy = self.processes.get(&pid).is_some_and(|process| !is_idle(process));
        let status = |pid: HomePid| procfs::status(pid.0).map_err(|_gone| not_found(pid));
        let (own, others) = (status(pid)?, status(other)?);
        if busy || own.uid != others.uid || own.gid != others.gid {
            let what = if busy { "is on its way, away or frozen" } else { "is another user's" };
            return Err(shared_refusal(format!("process {pid}, with which it shares memory, {what}"), busy));
        }
        // Checked before it is seized: it may be a display server.
        if let Some(why) = find_unmovable(&self.program_maps(pid.0).unwrap_or_default()) {
            let why = format!("process {pid}, with which it shares memory, does not move: {why}");
            return Err(shared_refusal(why, false));
        }
        // A process that is exiting has already released its memory.
        let ends = || procfs::status(pid.0).map_or(true, |now| now.resident_kib == 0 && now.threads <= 1);
        self.seize_movable(pid, limit).map_err(|(why, is_transient)| match why.kind {
            RefusalKind::NotFound => (why, is_transient),
            _ if ends() => not_found(pid),
            _ => shared_refusal(
                format!("process {pid}, with which it shares memory, does not move: {}", why.message),
                is_transient,
            ),
        })
    }

    /// The group that a process moves with, including itself: those with the same migration.
    pub(crate) fn group_of(&self, pid: HomePid) -> Vec<HomePid> {
        match self.processes.get(&pid).and_then(|process| process.task.as_ref()) {
            Some(task) => self.processes_in_migration(task.migration),
            None => vec![pid],
        }
    }

    /// The processes of a migration.
    pub(crate) fn processes_in_migration(&self, migration: MigrationId) -> Vec<HomePid> {
        let concerned = |process: &&Process| process.task.as_ref().is_some_and(|t| t.migration == migration);
        let mut all: Vec<HomePid> = self.processes.values().filter(concerned).map(|one| one.pid).collect();
        all.sort_unstable();
        all
    }

    /// The progress of the group that this process leaves with, as seen from it.
    pub(crate) fn group_progress(&self, pid: HomePid) -> GroupProgress {
        let migration =
            self.processes.get(&pid).and_then(|process| process.task.as_ref()).map(|task| task.migration);
        let is_complete = migration.is_some() && self.complete_group == migration;
        let others = self.group_of(pid);
        let (is_alone, carried_by_others) = (others.len() == 1, HashSet::new());
        let mut group = GroupProgress {
            is_alone,
            others_ready: true,
            others_stopped: true,
            is_complete,
            carried_by_others,
        };
        for other in others.iter().filter(|other| **other != pid) {
            let Some(process) = self.processes.get(other) else { continue };
            let (ready, stopped) = match &process.state {
                State::Outgoing(other) => {
                    group.carried_by_others.extend(&other.carried_objects);
                    let frozen = other.sending.as_ref().is_some_and(ProcessSender::is_frozen_and_described);
                    (other.ready, frozen && process.is_stopped())
                }
                _ => (false, false),
            };
            group.others_ready &= ready;
            group.others_stopped &= stopped;
        }
        group
    }

    /// When the whole group is stopped, checks once more which processes belong to it and which
    /// memory they share: one may have forked or mapped more meanwhile. Processes found now join
    /// the group.
    pub(crate) fn check_group_complete(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get(&pid) else { return };
        let (State::Outgoing(outgoing), Some(task)) = (&process.state, &process.task) else { return };
        let (migration, peer) = (task.migration, outgoing.peer);
        let frozen = outgoing.sending.as_ref().is_some_and(ProcessSender::is_frozen_and_described);
        if !frozen
            || self.complete_group == Some(migration)
            || !process.is_stopped()
            || !self.group_progress(pid).others_stopped
        {
            return;
        }
        let group = self.processes_in_migration(migration);
        // While a scan is pending, this is done again on each turn.
        if let Err(Unopened::Refused((refusal, is_transient))) =
            self.add_missing_sharers(&group, migration, peer)
        {
            let why = refusal.message;
            if is_transient {
                self.requeue_group(migration);
            }
            self.send_to_peer(peer, pid, &Message::Drop);
            self.cancel_outgoing(pid, &why);
        }
    }

    fn add_missing_sharers(
        &mut self,
        group: &[HomePid],
        migration: MigrationId,
        peer: PeerId,
    ) -> Result<(), Unopened> {
        let live_objects = |pid: &HomePid| match self.processes.get(pid).map(|process| &process.state) {
            Some(State::Outgoing(outgoing)) => outgoing.live_objects.clone(),
            _ => HashSet::new(),
        };
        let objects: HashSet<ObjectId> = group.iter().flat_map(live_objects).collect();
        let limit = self.processes.get(&group[0]).map_or(RightsLimit::User, |process| process.rights);
        let pids: BTreeSet<i32> = group.iter().map(|pid| pid.0).collect();
        let maps = if objects.is_empty() {
            SharedMaps::new()
        } else {
            self.shared_memory.shared_maps(MapQuestion::Stopped(migration))?
        };
        let rest = maps.iter().filter(|(pid, maps)| !pids.contains(pid) && !maps.is_disjoint(&objects));
        let rest: Vec<HomePid> = rest.map(|(pid, _)| HomePid(*pid)).collect();
        for pid in &rest {
            match self.join_group(*pid, group[0], limit) {
                Err((refusal, _)) if refusal.kind == RefusalKind::NotFound => continue,
                joined => joined?,
            }
            let here = self.start.node;
            if let Some(process) = self.processes.get_mut(pid) {
                process.task = Some(MigrationTask { migration, ..MigrationTask::new(None, here) });
                process.rights = process.rights.max(limit);
            }
            self.when_stopped(*pid, WhenStopped::Leave(peer, true));
        }
        if rest.is_empty() {
            let sharers = Sharers { pids, objects };
            // Processes may have opened objects since the first scan; some may have been in open(2)
            // during the scan.
            self.shared_memory.uncheck_opened();
            self.open_objects(&sharers)?;
            // The processes are stopped, so their mappings exist.
            if sharers.objects.iter().any(|id| !self.shared_memory.contains(*id)) {
                return Err(shared_refusal("the memory that it shares is not found".into(), false).into());
            }
            self.complete_group = Some(migration);
        }
        Ok(())
    }

    /// Requeues the moves of a group that are about to be aborted, if callers wait for them and
    /// they are young enough.
    pub(crate) fn requeue_group(&mut self, migration: MigrationId) {
        for pid in self.processes_in_migration(migration) {
            let process = self.processes.get(&pid);
            if process
                .is_some_and(|process| matches!(process.state, State::Outgoing(_) | State::Returning(_)))
            {
                self.requeue_task(pid);
            }
        }
    }

    /// Aborts the move of a group because one of its processes stays.
    pub(crate) fn abort_group(&mut self, migration: MigrationId, of: HomePid, why: &str) {
        let known = why.starts_with("shared memory:");
        let stays = Unmovable::SharedWith(format!("process {of}, with which it shares memory, stays: {why}"));
        let why = if known { why.to_owned() } else { stays.to_string() };
        for pid in self.processes_in_migration(migration) {
            self.abort_group_member(pid, &why);
        }
    }

    /// A process of the group has ended or shares nothing any more: the others need not wait for
    /// it.
    pub(crate) fn member_left_group(&mut self, migration: MigrationId) {
        match self.processes_in_migration(migration).first() {
            Some(pid) => {
                self.hand_over_group(*pid);
                self.restore_group(*pid);
            }
            None => self.rejoin_left_behind(migration),
        }
    }

    fn abort_group_member(&mut self, pid: HomePid, why: &str) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        match &process.state {
            State::Outgoing(outgoing) => {
                let peer = outgoing.peer;
                self.send_to_peer(peer, pid, &Message::Drop);
                self.cancel_outgoing(pid, why);
            }
            State::HandedOver(outgoing) => {
                let peer = outgoing.peer;
                self.revoke(pid, why);
                self.send_to_peer(peer, pid, &Message::Drop);
            }
            State::Returning(_) => {
                self.drop_parts(pid);
                if let Some(process) = self.processes.get_mut(&pid) {
                    process.state = State::Away;
                }
                self.abort_task(pid, why);
                self.send(pid, &Message::Thaw);
            }
            State::Resident | State::Draining => {
                self.abort_task(pid, why);
                self.release(pid);
            }
            _ => self.abort_task(pid, why),
        }
    }

    /// This process, which is away, and all other processes away that share memory with it.
    ///
    /// A child in its parent's memory does not count. Its parent cannot move before the child has
    /// executed a program or ended. If home must act for the child before that, the child comes
    /// home alone: otherwise each would wait for the other for ever.
    pub(crate) fn sharers_away(&self, pid: HomePid) -> Vec<HomePid> {
        let Some(process) = self.processes.get(&pid) else { return Vec::new() };
        let mut all = vec![pid];
        if process.in_parent_memory {
            return all;
        }
        let mut objects = process.files.objects.clone();
        loop {
            let shares = |process: &&Process| {
                let other = process.is_away()
                    && !process.in_parent_memory
                    && process.left_behind.is_none()
                    && !all.contains(&process.pid);
                other && !process.files.objects.is_disjoint(&objects)
            };
            let Some(other) = self.processes.values().find(shares) else { break };
            all.push(other.pid);
            objects.extend(&other.files.objects);
        }
        all.sort_unstable();
        all
    }

    /// Brings home all processes that share memory with a process that comes home. Returns the
    /// whole group. The caller sends the list to each process of the group, even to one that has
    /// received it before: a process that has forked since brings its child along.
    pub(crate) fn return_with_sharers(&mut self, pid: HomePid, migration: MigrationId) -> Vec<HomePid> {
        let all = self.sharers_away(pid);
        for other in all.iter().filter(|other| **other != pid) {
            let Some(process) = self.processes.get_mut(other) else { continue };
            if matches!(process.state, State::Returning(_)) {
                continue;
            }
            // A move that a caller waits for continues from home.
            self.requeue_task(*other);
            self.abort_task(
                *other,
                "shared memory: it comes home with a process with which it shares memory",
            );
            let Some(process) = self.processes.get_mut(other) else { continue };
            let from = self.peers.node(process.peer).unwrap_or(self.start.node);
            process.task = Some(MigrationTask { migration, ..MigrationTask::new(None, from) });
            process.state = State::Returning(Box::default());
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    /// How many programs the child of the test has still to execute.
    const EXECS_LEFT: &str = "TERN_TEST_LEFT";

    /// Tests run in threads other than the first, so an exec takes over the first thread's tid.
    #[test]
    fn process_that_executes_programs_is_never_taken_for_gone() {
        let left = std::env::var(EXECS_LEFT).map_or(150, |left| left.parse().unwrap());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "migrate::group::tests::process_that_executes_programs_is_never_taken_for_gone",
            "--exact",
        ]);
        command.env(EXECS_LEFT, (left - 1).to_string());
        command.args(["--test-threads", "2"]).stdout(std::process::Stdio::null());
        if left == 0 {
            return;
        }
        if std::env::var_os(EXECS_LEFT).is_some() {
            panic!("{}", command.exec());
        }
        let mut child = command.spawn().unwrap();
        let pid = HomePid(child.id() as i32);
        let mut attempts = 0;
        let ended = loop {
            let maps = |pid: i32| procfs::smaps(procfs::live_thread(pid));
            if shared_by(pid.0, &maps).is_err() && !not_found(pid).1 {
                break child.try_wait().unwrap();
            }
            // A process that has exited and is not waited for shares nothing.
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            attempts += 1;
        };
        assert!(ended.is_some_and(|status| status.success()), "gone after {attempts} attempts: {ended:?}");
    }
}
