//! One process of this home shim.

pub(crate) mod blob;
pub(crate) mod home_record;
pub(crate) mod mailbox;
pub(crate) mod own_mappings;
pub(crate) mod space;
pub(crate) mod state;
pub(crate) mod thread;
pub(crate) mod waits;

use crate::files::delegation::Delegations;
use crate::files::names::DelegatedNames;
use crate::links::peers::PeerId;
use crate::migrate::home_wait::DetachedWait;
use crate::process::home_record::HomeRecord;
use crate::process::own_mappings::OwnMappings;
use crate::process::state::{Frozen, LeftBehind, MigrationTask, State};
use crate::process::thread::Thread;
use crate::process::waits::Waits;
use crate::time::cpu_timers::CpuTimers;
use crate::time::usage::AwayUsage;
use std::collections::BTreeMap;
use std::path::Path;
use tern_control::shim::RightsLimit;
use tern_ids::{Epoch, HomePid};
use tern_image::Reserve;
use tern_image::content::HomeFiles;
use tern_image::process::{Action, SIGNALS};
use tern_migrate::GuestDemand;
use tern_migrate::message::Machine;
use tern_tracee::stop::Stopped;
use tern_tracee::{Error, Memory, Result, procfs};

/// A process whose home is this node.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: HomePid,
    /// Its pid in its own pid namespace.
    pub(crate) own_pid: i32,
    /// Start time: with the pid it identifies the process uniquely.
    pub(crate) started: u64,
    pub(crate) parent: HomePid,
    pub(crate) command: String,
    pub(crate) uid: u32,
    /// The rights with which it may leave home: those of the widest request to move it.
    pub(crate) rights: RightsLimit,
    pub(crate) state: State,
    /// The current epoch. The deputy performs calls of this epoch only.
    pub(crate) epoch: Epoch,
    /// The epoch that was last offered to a node; above `epoch` until it is handed over.
    pub(crate) offered_epoch: Epoch,
    /// The previous guest continues under this epoch, since a move was cancelled, and may not have
    /// received the new number yet.
    pub(crate) old_guest_has_new_epoch: bool,
    /// The guest shim that holds the current epoch, or held it last.
    pub(crate) peer: PeerId,
    pub(crate) reserve: Option<Reserve>,
    /// Its memory, opened through one of its live threads.
    pub(crate) memory: Memory,
    pub(crate) files: HomeFiles,
    pub(crate) machine: Option<Machine>,
    /// Its guest runs in the memory of its parent until it executes a program (vfork, `CLONE_VM`).
    /// Its deputy has memory of its own.
    pub(crate) in_parent_memory: bool,
    /// Its threads by tid. The first thread has the pid as its tid, and may have exited before
    /// others.
    pub(crate) threads: BTreeMap<HomePid, Thread>,
    /// Mappings in the deputy, outside of the reserved range, that are not the program's.
    pub(crate) own_mappings: OwnMappings,
    /// Number of programs that it has executed while traced.
    pub(crate) exec_count: u64,
    /// The program's signal actions, by signal number minus one.
    pub(crate) actions: Vec<Action>,
    /// A move in progress.
    pub(crate) task: Option<MigrationTask>,
    pub(crate) migrations: u32,
    /// Why it came home, or stays there.
    pub(crate) home_record: HomeRecord,
    /// The waits on futexes of threads that were detached. For `migrate::home_wait` only.
    pub(crate) detached_waits: Vec<DetachedWait>,
    /// The CPU time that it, its threads and its children have used away.
    pub(crate) usage: AwayUsage,
    /// Its timers and limits that count CPU time, while it is away.
    pub(crate) timers: CpuTimers,
    /// The demand of the current guest on its node.
    pub(crate) demand: GuestDemand,
    /// Number of calls performed for it, and the bytes that they carried.
    pub(crate) call_count: u64,
    pub(crate) call_bytes: u64,
    /// Its delegated files.
    pub(crate) delegations: Delegations,
    /// The names cached at its guest.
    pub(crate) names: DelegatedNames,
    /// Its waits: for threads that are to stop, and until its guest is asked again.
    pub(crate) waits: Waits,
    /// Stopped by job control.
    pub(crate) job_stopped: bool,
    /// It has been sent the signal that killed its program.
    pub(crate) is_dying: bool,
    /// It is frozen at home, or will be.
    pub(crate) frozen: Option<Frozen>,
    /// Its group comes home, or is home, without it.
    pub(crate) left_behind: Option<LeftBehind>,
}

impl Process {
    /// The record of a process that runs at home. None of its threads is traced yet.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn new_resident(pid: HomePid, cache_dir: &Path) -> Result<Self> {
        let status = procfs::status(pid.0)?;
        let living = procfs::live_thread(pid.0);
        Ok(Self {
            pid,
            own_pid: status.own_pid,
            started: procfs::stat(pid.0)?.start_time(),
            parent: HomePid(status.parent),
            command: procfs::command_line(living),
            uid: status.uid[1],
            rights: RightsLimit::User,
            state: State::Resident,
            epoch: Epoch(0),
            offered_epoch: Epoch(0),
            old_guest_has_new_epoch: false,
            peer: PeerId::NONE,
            reserve: None,
            memory: Memory::open(living)?,
            files: HomeFiles::new(living, cache_dir),
            machine: None,
            threads: BTreeMap::new(),
            in_parent_memory: false,
            own_mappings: OwnMappings::default(),
            exec_count: 0,
            actions: vec![[0; 4]; SIGNALS],
            task: None,
            migrations: 0,
            home_record: HomeRecord::default(),
            detached_waits: Vec::new(),
            usage: AwayUsage::default(),
            timers: CpuTimers::new(),
            demand: GuestDemand::default(),
            call_count: 0,
            call_bytes: 0,
            delegations: Delegations::default(),
            names: DelegatedNames::default(),
            waits: Waits::default(),
            job_stopped: false,
            is_dying: false,
            frozen: None,
            left_behind: None,
        })
    }

    /// Whether it runs at home and does not leave yet.
    pub(crate) fn is_at_home(&self) -> bool {
        matches!(self.state, State::Resident | State::Draining)
    }

    /// Whether its program runs on another node.
    pub(crate) fn is_away(&self) -> bool {
        !matches!(self.state, State::Resident | State::AtExec | State::Outgoing(_) | State::Draining)
    }

    /// The guest shims to which it refers: the one that holds its guest or held it last, and the
    /// other one of a move in progress.
    pub(crate) fn peers(&self) -> impl Iterator<Item = PeerId> + use<> {
        let other = match &self.state {
            State::Outgoing(outgoing) | State::HandedOver(outgoing) => Some(outgoing.peer),
            State::Remigrating(other) | State::Switching(other) => Some(*other),
            _ => None,
        };
        [Some(self.peer), other.filter(|other| *other != self.peer), self.waits.next_peer()]
            .into_iter()
            .flatten()
    }

    /// A thread of it.
    ///
    /// # Errors
    /// If it has no such thread.
    pub(crate) fn thread(&mut self, tid: HomePid) -> Result<&mut Thread> {
        self.threads.get_mut(&tid).ok_or(Error::Gone { pid: tid.0 })
    }

    /// Whether this thread of it was created while it was away, or is the first one of a process that
    /// was, and has made no call since.
    pub(crate) fn is_newborn(&self, tid: HomePid) -> bool {
        let has_called = || self.threads.get(&tid).is_none_or(|thread| thread.last_result.is_some());
        !has_called() && (tid != self.pid || self.migrations == 0 && self.call_count == 0)
    }

    /// Removes a thread that has exited. Its mailbox can be used by another one.
    pub(crate) fn thread_exited(&mut self, tid: HomePid) {
        self.usage.thread_exited(tid);
        self.timers.thread_exited(tid);
        self.stop_reading_through(tid);
        if let Some(mailbox) = self.threads.remove(&tid).and_then(|thread| thread.mailbox) {
            self.own_mappings.mailbox_dropped(&mailbox);
        }
    }

    /// Stops reading the process's memory through this thread, which is exiting: /proc shows no
    /// memory of a thread that has released it.
    pub(crate) fn stop_reading_through(&mut self, tid: HomePid) {
        if self.memory.pid() != tid.0 {
            return;
        }
        let other = self.live_threads().map(|thread| thread.tid.0).find(|other| *other != tid.0);
        if let Some((other, memory)) = other.and_then(|other| Some((other, Memory::open(other).ok()?))) {
            self.memory = memory;
            self.files.set_proc_thread(other);
        }
    }

    /// Its threads that are not exiting.
    pub(crate) fn live_threads(&self) -> impl Iterator<Item = &Thread> {
        self.threads.values().filter(|thread| !thread.is_exiting)
    }

    /// A thread for an operation that any thread can do: the first one while it lives.
    ///
    /// # Errors
    /// If it has none.
    pub(crate) fn any_thread(&self) -> Result<HomePid> {
        self.live_threads().map(|thread| thread.tid).next().ok_or(Error::Gone { pid: self.pid.0 })
    }

    /// Records that one of its threads is stopped.
    ///
    /// # Errors
    /// If it has no such thread.
    pub(crate) fn set_stopped(&mut self, stopped: Stopped) -> Result<()> {
        let thread = self.thread(HomePid(stopped.pid()))?;
        thread.stopped = Some(stopped);
        Ok(())
    }

    /// Whether all its live threads are stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.live_threads().all(|thread| thread.stopped.is_some())
    }

    /// Whether a guest of this epoch is the current guest or may still become it. If not, the guest
    /// must end. A guest's shim asks this when it has lost its link to home.
    pub(crate) fn awaits(&self, epoch: Epoch) -> bool {
        let earlier = self.old_guest_has_new_epoch || matches!(self.state, State::Switching(_));
        self.is_away() && (epoch == self.epoch || earlier && epoch < self.epoch)
    }

    /// Whether it is ready to be frozen and waits for processes that share its memory, or until the waits of
    /// its threads are measured.
    pub(crate) fn waits_for_group(&self) -> bool {
        matches!(&self.state, State::Outgoing(outgoing) if outgoing.ready && !outgoing.arrived && outgoing.image.is_none())
    }

    /// Whether a part of the shared memory is lost if this process ends now, so that its group must
    /// start over. On the journey home the shim does not know which process carries an object, so
    /// any process that shares one may.
    pub(crate) fn may_carry_objects(&self) -> bool {
        match &self.state {
            State::Outgoing(outgoing) => !outgoing.arrived && !outgoing.carried_objects.is_empty(),
            State::Returning(returning) => returning.arrived.is_none() && !self.files.objects.is_empty(),
            _ => false,
        }
    }

    /// Its state as `mps` shows it.
    pub(crate) fn state_name(&self) -> &'static str {
        match self.state {
            State::Resident | State::Draining if self.frozen.is_some() => "frozen",
            State::Resident | State::AtExec | State::Draining => "home",
            State::Outgoing(_)
            | State::HandedOver(_)
            | State::Remigrating(_)
            | State::Switching(_)
            | State::Revoked(..)
            | State::Returning(_) => "migrating",
            State::Away => "running",
        }
    }
}
