//! One process of the family, at home.

use crate::back::Inbound;
use crate::direct::Direct;
use crate::frozen::Frozen;
use crate::mailbox::Room;
use crate::names::Known;
use crate::out::Outbound;
use crate::relatives::Ended;
use crate::thread::Thread;
use crate::timers::Timers;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};
use tern_control::Destination;
use tern_control::door::Caller;
use tern_ids::{Epoch, HomePid, MigrationId, NodeId};
use tern_image::Reserve;
use tern_image::content::HomeFiles;
use tern_image::process::{Action, SIGNALS};
use tern_migrate::message::Machine;
use tern_migrate::{CpuTime, Demand};
use tern_tracee::stop::Stopped;
use tern_tracee::{Error, Memory, Result, procfs};

/// A process whose home this is.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) pid: HomePid,
    /// Its pid as it sees it.
    pub(crate) own_pid: i32,
    /// When it began: with the pid it names the process for ever.
    pub(crate) started: u64,
    pub(crate) parent: HomePid,
    pub(crate) command: String,
    pub(crate) uid: u32,
    pub(crate) state: State,
    /// Its life. The deputy performs this life's calls and no other's.
    pub(crate) epoch: Epoch,
    /// The life that was offered to a node last; above `epoch` until it is handed over.
    pub(crate) offered: Epoch,
    /// The present life is an earlier one that goes on under this number, and may not have heard so yet.
    pub(crate) revived: bool,
    /// The guest shim that holds this life: an index into the family's peers.
    pub(crate) peer: usize,
    pub(crate) reserve: Option<Reserve>,
    /// Its memory, seen through one of its threads that lives.
    pub(crate) memory: Memory,
    pub(crate) files: HomeFiles,
    pub(crate) machine: Option<Machine>,
    /// Away it runs in its parent's memory, until it executes a program. It shares that with nobody else here.
    pub(crate) lent: bool,
    /// Its threads, by their numbers. The first one, whose number is the process', may have ended before others.
    pub(crate) threads: BTreeMap<HomePid, Thread>,
    /// How many rooms there are for mailboxes of threads besides the first, and those of threads that have ended.
    pub(crate) rooms: u64,
    pub(crate) free_rooms: Vec<Room>,
    /// What was mapped for large calls of threads that have ended.
    pub(crate) leftover: Vec<(u64, u64)>,
    /// How many programs it has executed since it is ours.
    pub(crate) execs: u64,
    /// What each signal does in the program.
    pub(crate) actions: Vec<Action>,
    /// A move that somebody waits for.
    pub(crate) task: Option<Task>,
    pub(crate) migrations: u32,
    /// Why it came home, or stays.
    pub(crate) reason: String,
    /// When it had to come home lately.
    pub(crate) homecomings: VecDeque<Instant>,
    /// CPU time that it has used away, as far as its guests have told.
    pub(crate) used: CpuTime,
    /// Of that, what its threads have used, as far as it is known.
    pub(crate) shares: BTreeMap<HomePid, CpuTime>,
    /// What those of its descendants have used away that were waited for.
    pub(crate) inherited: CpuTime,
    /// Its children that have ended and may not have been waited for, by their pids as it sees them.
    pub(crate) ended: HashMap<i32, Ended>,
    /// Its timers that count CPU time, while it is away.
    pub(crate) timers: Timers,
    /// What its guest has been told to watch for: of the process, and of threads.
    pub(crate) watched: BTreeMap<Option<HomePid>, u64>,
    /// Its limits on CPU time, and when they were read.
    pub(crate) limits: Option<([Option<u64>; 2], Instant)>,
    /// When they were looked at last.
    pub(crate) looked: Instant,
    /// Timers whose signals may have been lost on the way into the table.
    pub(crate) refire: Vec<i32>,
    /// What else the present life asks of its node.
    pub(crate) demand: Demand,
    /// Calls that we have made for it, and the bytes that these have carried.
    pub(crate) calls: [u64; 2],
    /// Mappings that only hold a file for the way home, its parent's too with which it was born: from, to.
    pub(crate) holders: Vec<(u64, u64)>,
    /// Its files in hand.
    pub(crate) direct: Direct,
    /// What it knows of names.
    pub(crate) names: Known,
    /// When to ask a guest again to go, which was busy.
    pub(crate) ask_again: Option<Instant>,
    /// Stopped by job control.
    pub(crate) job_stopped: bool,
    /// It was to come home to die of a fault there.
    pub(crate) faulted: bool,
    /// It has been made to end by the signal that ended its program.
    pub(crate) dies: bool,
    /// It stands still at home, or will.
    pub(crate) frozen: Option<Frozen>,
}

/// Where a process stands.
#[derive(Debug)]
pub(crate) enum State {
    /// Running at home; on its way out if there is something in it.
    Resident,
    /// At home, held until it has executed its program.
    AtExec,
    /// Going out; it runs at home until it is frozen.
    Outbound(Box<Outbound>),
    /// Its guest has been told to go; what is needed to take that back until it is known to run.
    Going(Box<Outbound>),
    /// Away; this is its deputy.
    Away,
    /// Away, going on to another node (an index into the peers).
    Onward(usize),
    /// Away; its next life (with the member's peer) has been told to go, its last one (an index into the peers)
    /// is kept, frozen, until that life is known to run.
    Crossing(usize),
    /// Away, coming home.
    Inbound(Box<Inbound>),
    /// Home, but for the last calls of some of its threads, which their deputies are still making; the others have
    /// been let go.
    Lingering,
}

/// A move under way.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) migration: MigrationId,
    /// Who waits, and for what; nobody for moves that we decided on ourselves.
    pub(crate) caller: Option<(Caller, Destination)>,
    pub(crate) from: NodeId,
    pub(crate) begun: Instant,
    pub(crate) frozen: Option<Instant>,
    pub(crate) bytes: u64,
}

impl Task {
    pub(crate) fn new(caller: Option<(Caller, Destination)>, from: NodeId) -> Self {
        let mut id = [0; 16];
        let flags = rustix::rand::GetRandomFlags::empty();
        let _always_enough = rustix::rand::getrandom(&mut id, flags);
        Self { migration: MigrationId(id), caller, from, begun: Instant::now(), frozen: None, bytes: 0 }
    }
}

/// It had to come home this often within [`WITHIN`]: it stays.
const TOO_OFTEN: usize = 3;
const WITHIN: Duration = Duration::from_secs(60);

impl Member {
    /// A process that runs at home, as it is now; none of its threads is ours yet.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn at_home(pid: HomePid, cache_dir: &Path) -> Result<Self> {
        let status = procfs::status(pid.0)?;
        let living = procfs::living(pid.0);
        Ok(Self {
            pid,
            own_pid: status.own_pid,
            started: procfs::stat(pid.0)?.start_time(),
            parent: HomePid(status.parent),
            command: procfs::command_line(living),
            uid: status.uid[1],
            state: State::Resident,
            epoch: Epoch(0),
            offered: Epoch(0),
            revived: false,
            peer: 0,
            reserve: None,
            memory: Memory::open(living)?,
            files: HomeFiles::new(living, cache_dir),
            machine: None,
            threads: BTreeMap::new(),
            lent: false,
            rooms: 0,
            free_rooms: Vec::new(),
            leftover: Vec::new(),
            execs: 0,
            actions: vec![[0; 4]; SIGNALS],
            task: None,
            migrations: 0,
            reason: String::new(),
            homecomings: VecDeque::new(),
            used: CpuTime::default(),
            shares: BTreeMap::new(),
            inherited: CpuTime::default(),
            ended: HashMap::new(),
            timers: Timers::default(),
            watched: BTreeMap::new(),
            limits: None,
            looked: Instant::now(),
            refire: Vec::new(),
            demand: Demand::default(),
            calls: [0; 2],
            holders: Vec::new(),
            direct: Direct::default(),
            names: Known::default(),
            ask_again: None,
            job_stopped: false,
            faulted: false,
            dies: false,
            frozen: None,
        })
    }

    /// Whether its program runs elsewhere.
    pub(crate) fn is_away(&self) -> bool {
        !matches!(self.state, State::Resident | State::AtExec | State::Outbound(_) | State::Lingering)
    }

    /// A thread of it.
    ///
    /// # Errors
    /// If it has no such thread (any more).
    pub(crate) fn thread(&mut self, tid: HomePid) -> Result<&mut Thread> {
        self.threads.get_mut(&tid).ok_or(Error::Gone { pid: tid.0 })
    }

    /// A thread of it has ended: what it needed is there for the next.
    pub(crate) fn thread_over(&mut self, tid: HomePid) {
        self.shares.remove(&tid);
        self.timers.thread_over(tid);
        self.look_past(tid);
        if let Some(mailbox) = self.threads.remove(&tid).and_then(|thread| thread.mailbox) {
            self.leftover.extend(mailbox.large());
            self.free_rooms.extend(Some(mailbox.room()).filter(|room| room.is_other()));
        }
    }

    /// A thread of it is ending: without its own memory it shows none, and another one takes its part if it was the one
    /// through which the process' is seen.
    pub(crate) fn look_past(&mut self, tid: HomePid) {
        if self.memory.pid() != tid.0 {
            return;
        }
        let other = self.living().map(|thread| thread.tid.0).find(|other| *other != tid.0);
        if let Some((other, memory)) = other.and_then(|other| Some((other, Memory::open(other).ok()?))) {
            self.memory = memory;
            self.files.look_through(other);
        }
    }

    /// Those of its threads that are not about to end.
    pub(crate) fn living(&self) -> impl Iterator<Item = &Thread> {
        self.threads.values().filter(|thread| !thread.ending)
    }

    /// A thread of it that will do for what any of them can do: the first one while it lives.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn any(&self) -> Result<HomePid> {
        self.living().map(|thread| thread.tid).next().ok_or(Error::Gone { pid: self.pid.0 })
    }

    /// Notes that a thread of it stands there.
    ///
    /// # Errors
    /// If it has no such thread (any more).
    pub(crate) fn stands_at(&mut self, stopped: Stopped) -> Result<()> {
        let thread = self.thread(HomePid(stopped.pid()))?;
        thread.standing = Some(stopped);
        Ok(())
    }

    /// Whether all of it stands still.
    pub(crate) fn stands(&self) -> bool {
        self.living().all(|thread| thread.standing.is_some())
    }

    /// Notes that it had to come home; true if that was once too often.
    pub(crate) fn had_to_come_home(&mut self) -> bool {
        let now = Instant::now();
        self.homecomings.push_back(now);
        self.homecomings.retain(|when| now.duration_since(*when) < WITHIN);
        self.homecomings.len() >= TOO_OFTEN
    }

    /// Whether this life of it, which a guest shim holds that cannot reach us, is the current one or may still become
    /// it. If not, it is over.
    pub(crate) fn awaits(&self, life: Epoch) -> bool {
        let earlier = self.revived || matches!(self.state, State::Crossing(_));
        self.is_away() && (life == self.epoch || earlier && life < self.epoch)
    }

    /// Whether it is ready to stand, and waits for others that share its memory.
    pub(crate) fn waits_for_others(&self) -> bool {
        matches!(&self.state, State::Outbound(outbound) if outbound.ready && !outbound.arrived && outbound.image.is_none())
    }

    /// Whether a part of the memory that it shares is lost with it: then those who move with it begin anew. Who of them
    /// carries what is known of journeys out only.
    pub(crate) fn may_carry(&self) -> bool {
        match &self.state {
            State::Outbound(outbound) => !outbound.arrived && !outbound.carries.is_empty(),
            State::Inbound(inbound) => inbound.arrived.is_none() && !self.files.objects.is_empty(),
            _ => false,
        }
    }

    /// What `mps` says of it.
    pub(crate) fn state_name(&self) -> &'static str {
        match self.state {
            State::Resident | State::Lingering if self.frozen.is_some() => "frozen",
            State::Resident | State::AtExec | State::Lingering => "home",
            State::Outbound(_)
            | State::Going(_)
            | State::Onward(_)
            | State::Crossing(_)
            | State::Inbound(_) => "migrating",
            State::Away => "running",
        }
    }
}
