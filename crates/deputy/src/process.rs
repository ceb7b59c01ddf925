//! One process of this home shim.

pub(crate) mod blob;
pub(crate) mod mailbox;
pub(crate) mod space;
pub(crate) mod thread;

use crate::files::delegation::Delegations;
use crate::files::names::DelegatedNames;
use crate::links::peers::PeerId;
use crate::migrate::frozen::Frozen;
use crate::migrate::hollow::Outgoing;
use crate::migrate::left_behind::LeftBehind;
use crate::migrate::restore::Returning;
use crate::process::mailbox::{Mailbox, MailboxArea};
use crate::process::thread::Thread;
use crate::stops::resident::WhenStopped;
use crate::time::fire::DueSignal;
use crate::time::rusage::EndedChild;
use crate::time::timers::Timers;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};
use tern_control::Destination;
use tern_control::control_socket::PendingRequest;
use tern_ids::{Epoch, HomePid, MigrationId, NodeId};
use tern_image::content::HomeFiles;
use tern_image::process::{Action, SIGNALS};
use tern_image::{ProcessImage, Reserve};
use tern_migrate::message::{Machine, ProcessSync};
use tern_migrate::{CpuTime, GuestDemand};
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
    pub(crate) state: State,
    /// The current epoch. The deputy performs calls of this epoch only.
    pub(crate) epoch: Epoch,
    /// The epoch that was last offered to a node; above `epoch` until it is handed over.
    pub(crate) offered_epoch: Epoch,
    /// The previous guest continues under this epoch, since a move was cancelled, and may not have
    /// received the new number yet.
    pub(crate) is_renumbered: bool,
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
    /// Number of mailbox areas made for threads other than the first, and those that are free
    /// again.
    pub(crate) area_count: u64,
    pub(crate) free_areas: Vec<MailboxArea>,
    /// Large mailboxes of threads that have exited, still mapped.
    pub(crate) orphaned_mappings: Vec<(u64, u64)>,
    /// Number of programs that it has executed while traced.
    pub(crate) exec_count: u64,
    /// The program's signal actions, by signal number minus one.
    pub(crate) actions: Vec<Action>,
    /// A move in progress.
    pub(crate) task: Option<MigrationTask>,
    pub(crate) migrations: u32,
    /// Why it came home, or stays there.
    pub(crate) reason: String,
    /// The times at which it was recently fetched home.
    pub(crate) forced_returns: VecDeque<Instant>,
    /// CPU time that it has used away, as last reported by its guests.
    pub(crate) usage_away: CpuTime,
    /// The part of `usage_away` that is known by thread.
    pub(crate) thread_usage: BTreeMap<HomePid, CpuTime>,
    /// CPU time used away by descendants that have been waited for.
    pub(crate) children_usage: CpuTime,
    /// Children that have exited and may not have been waited for, by their pid in its namespace.
    pub(crate) ended_children: HashMap<i32, EndedChild>,
    /// Its timers that count CPU time, while it is away.
    pub(crate) timers: Timers,
    /// The CPU-time thresholds that its guest was asked to report, of the process and of threads.
    pub(crate) cpu_thresholds: BTreeMap<Option<HomePid>, u64>,
    /// Its soft and hard limit on CPU time, and when they were read.
    pub(crate) cpu_limits: Option<([Option<u64>; 2], Instant)>,
    /// When its timers were last checked.
    pub(crate) timers_checked: Instant,
    /// Expired timers and limits that are to be fired as soon as a thread can be stopped.
    pub(crate) unfired: Vec<DueSignal>,
    /// POSIX timers whose signals may have been lost when they were taken from the kernel.
    pub(crate) to_refire: Vec<i32>,
    /// The demand of the current guest on its node.
    pub(crate) demand: GuestDemand,
    /// Number of calls performed for it, and the bytes that they carried.
    pub(crate) call_count: u64,
    pub(crate) call_bytes: u64,
    /// Mappings (start, end) that only keep a file for the return, including those inherited from
    /// its parent.
    pub(crate) placeholders: Vec<(u64, u64)>,
    /// Its delegated files.
    pub(crate) delegations: Delegations,
    /// The names cached at its guest.
    pub(crate) names: DelegatedNames,
    /// The work that begins when all its threads, which run at home, have stopped, and since when it
    /// has waited.
    pub(crate) when_stopped: Option<(WhenStopped, Instant)>,
    /// Since when its move waits for a thread that cannot be stopped.
    pub(crate) blocked_since: Option<Instant>,
    /// When to ask a busy guest again to depart.
    pub(crate) retry_at: Option<Instant>,
    /// Stopped by job control.
    pub(crate) job_stopped: bool,
    /// It was already fetched home once to dump core for a fault.
    pub(crate) fetched_for_core: bool,
    /// It has been sent the signal that killed its program.
    pub(crate) is_dying: bool,
    /// It is frozen at home, or will be.
    pub(crate) frozen: Option<Frozen>,
    /// Its group comes home, or is home, without it.
    pub(crate) left_behind: Option<LeftBehind>,
}

/// Where a process is.
#[derive(Debug)]
pub(crate) enum State {
    /// At home; about to leave if it has a `task`.
    Resident,
    /// At home, held until it has executed its program.
    AtExec,
    /// Leaving; it runs at home until it is frozen.
    Outgoing(Box<Outgoing>),
    /// Its guest was sent `Go`. Holds what is needed to revoke the hand-over until the guest is
    /// known to run.
    HandedOver(Box<Outgoing>),
    /// Away. The local process is its deputy.
    Away,
    /// Away, and moving to the node of this peer.
    Remigrating(PeerId),
    /// Away; its new guest (at the process's peer) was sent `Go`. The guest of the
    /// previous peer is kept frozen until the new one is known to run.
    Switching(PeerId),
    /// Its hand-over was revoked, for this reason: it becomes the process of this image again as soon
    /// as its deputy threads have stopped.
    Revoked(Box<(ProcessImage, ProcessSync)>, String),
    /// Away, coming home.
    Returning(Box<Returning>),
    /// At home, except that the deputies of some threads are still making their last calls. The
    /// other threads have been detached.
    Draining,
}

/// A move in progress.
#[derive(Debug)]
pub(crate) struct MigrationTask {
    pub(crate) migration: MigrationId,
    /// The caller that waits for it, and the destination it asked for; none for moves that the shim
    /// began by itself.
    pub(crate) caller: Option<(PendingRequest, Destination)>,
    pub(crate) from: NodeId,
    pub(crate) started_at: Instant,
    pub(crate) frozen_at: Option<Instant>,
    pub(crate) bytes: u64,
}

impl MigrationTask {
    pub(crate) fn new(caller: Option<(PendingRequest, Destination)>, from: NodeId) -> Self {
        let mut id = [0; 16];
        let flags = rustix::rand::GetRandomFlags::empty();
        let _always_enough = rustix::rand::getrandom(&mut id, flags);
        Self {
            migration: MigrationId(id),
            caller,
            from,
            started_at: Instant::now(),
            frozen_at: None,
            bytes: 0,
        }
    }
}

/// A process that was fetched home this often within [`FORCED_RETURN_WINDOW`] stays at home.
const MAX_FORCED_RETURNS: usize = 3;
const FORCED_RETURN_WINDOW: Duration = Duration::from_secs(60);

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
            state: State::Resident,
            epoch: Epoch(0),
            offered_epoch: Epoch(0),
            is_renumbered: false,
            peer: PeerId::NONE,
            reserve: None,
            memory: Memory::open(living)?,
            files: HomeFiles::new(living, cache_dir),
            machine: None,
            threads: BTreeMap::new(),
            in_parent_memory: false,
            area_count: 0,
            free_areas: Vec::new(),
            orphaned_mappings: Vec::new(),
            exec_count: 0,
            actions: vec![[0; 4]; SIGNALS],
            task: None,
            migrations: 0,
            reason: String::new(),
            forced_returns: VecDeque::new(),
            usage_away: CpuTime::default(),
            thread_usage: BTreeMap::new(),
            children_usage: CpuTime::default(),
            ended_children: HashMap::new(),
            timers: Timers::default(),
            cpu_thresholds: BTreeMap::new(),
            cpu_limits: None,
            timers_checked: Instant::now(),
            unfired: Vec::new(),
            to_refire: Vec::new(),
            demand: GuestDemand::default(),
            call_count: 0,
            call_bytes: 0,
            placeholders: Vec::new(),
            delegations: Delegations::default(),
            names: DelegatedNames::default(),
            when_stopped: None,
            blocked_since: None,
            retry_at: None,
            job_stopped: false,
            fetched_for_core: false,
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
        // A move that begins when its threads have stopped.
        let next = match &self.when_stopped {
            Some((WhenStopped::Leave(peer, _), _)) => Some(*peer),
            _ => None,
        };
        [Some(self.peer), other.filter(|other| *other != self.peer), next].into_iter().flatten()
    }

    /// A thread of it.
    ///
    /// # Errors
    /// If it has no such thread.
    pub(crate) fn thread(&mut self, tid: HomePid) -> Result<&mut Thread> {
        self.threads.get_mut(&tid).ok_or(Error::Gone { pid: tid.0 })
    }

    /// Removes a thread that has exited. Its mailbox can be used by another one.
    pub(crate) fn thread_exited(&mut self, tid: HomePid) {
        self.thread_usage.remove(&tid);
        self.timers.thread_exited(tid);
        self.stop_reading_through(tid);
        if let Some(mailbox) = self.threads.remove(&tid).and_then(|thread| thread.mailbox) {
            self.drop_mailbox(&mailbox);
        }
    }

    /// Records that a mailbox is not used any more. It stays mapped until another thread uses its
    /// area, or the reserved range is released.
    pub(crate) fn drop_mailbox(&mut self, mailbox: &Mailbox) {
        self.orphaned_mappings.extend(mailbox.large_range());
        self.free_areas.extend(Some(mailbox.area()).filter(|area| area.is_secondary()));
    }

    /// Stops reading the process's memory through this thread, which is exiting: a thread without
    /// memory shows none.
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

    /// Records whether its move waits for a thread that cannot be stopped. Returns for how long it
    /// has waited.
    pub(crate) fn note_blocked(&mut self, is_blocked: bool) -> Duration {
        self.blocked_since = is_blocked.then(|| self.blocked_since.unwrap_or_else(Instant::now));
        self.blocked_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Whether all its live threads are stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.live_threads().all(|thread| thread.stopped.is_some())
    }

    /// Records that it was fetched home. Returns true if it has been fetched so often that it
    /// stays.
    pub(crate) fn record_forced_return(&mut self) -> bool {
        let now = Instant::now();
        self.forced_returns.push_back(now);
        self.forced_returns.retain(|when| now.duration_since(*when) < FORCED_RETURN_WINDOW);
        self.forced_returns.len() >= MAX_FORCED_RETURNS
    }

    /// Whether a guest of this epoch is the current one or may still become it. If not, it must
    /// end. Its shim asks when it has lost its link to home.
    pub(crate) fn awaits(&self, epoch: Epoch) -> bool {
        let earlier = self.is_renumbered || matches!(self.state, State::Switching(_));
        self.is_away() && (epoch == self.epoch || earlier && epoch < self.epoch)
    }

    /// Whether it is ready to be frozen and waits for processes that share its memory.
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
