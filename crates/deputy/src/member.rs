//! One process of the family, at home.

use crate::back::{Inbound, Lingering};
use crate::frozen::Frozen;
use crate::mailbox::Mailbox;
use crate::out::Outbound;
use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};
use tern_control::door::Caller;
use tern_ids::{Epoch, HomePid, MigrationId, NodeId};
use tern_image::Reserve;
use tern_image::content::HomeFiles;
use tern_image::process::{Action, SIGNALS};
use tern_migrate::message::{CallRequest, CallResult, Machine};
use tern_migrate::{CpuTime, Demand, Partial};
use tern_syscall::Layout;
use tern_tracee::stop::Siginfo;
use tern_tracee::{Memory, procfs};

/// A process whose home this is.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) pid: HomePid,
    /// Its pid as it sees it.
    pub(crate) own_pid: i32,
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
    pub(crate) memory: Memory,
    pub(crate) files: HomeFiles,
    pub(crate) machine: Option<Machine>,
    pub(crate) mailbox: Option<Mailbox>,
    /// The call that the deputy is making.
    pub(crate) current: Option<Current>,
    /// The last call that it has made, in case its result did not arrive.
    pub(crate) last: Option<CallResult>,
    /// How many signals have been sent to the guest, and those that it may not have taken over.
    pub(crate) signals: u64,
    pub(crate) unheard: VecDeque<(u64, Siginfo)>,
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
    /// What else the present life asks of its node.
    pub(crate) demand: Demand,
    /// Calls that we have made for it, and the bytes that these have carried.
    pub(crate) calls: [u64; 2],
    /// A transfer that our first interruption cut short.
    pub(crate) partial: Option<Partial>,
    /// Addresses given to mappings that only hold a file for the way home.
    pub(crate) holders: u64,
    /// When to ask a guest again to go, which was busy.
    pub(crate) ask_again: Option<Instant>,
    /// A call that waits for one of ours to end.
    pub(crate) next_call: Option<CallRequest>,
    /// A signal mask that the deputy is to follow as soon as it is idle.
    pub(crate) mask_due: Option<u64>,
    /// Stopped by job control.
    pub(crate) job_stopped: bool,
    /// It was to come home to die of a fault there.
    pub(crate) faulted: bool,
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
    /// Home, but for its last call, which the deputy is still making.
    Lingering(Box<Lingering>),
}

/// A call that the deputy is making.
#[derive(Debug)]
pub(crate) struct Current {
    pub(crate) request: CallRequest,
    pub(crate) layout: Layout,
    pub(crate) since: Instant,
    /// The part that is done, if we have interrupted a transfer.
    pub(crate) partial: Option<Partial>,
    /// The child of a fork.
    pub(crate) child: Option<HomePid>,
}

/// A move under way.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) migration: MigrationId,
    /// Who waits; nobody for moves that we decided on ourselves.
    pub(crate) caller: Option<Caller>,
    pub(crate) from: NodeId,
    pub(crate) begun: Instant,
    pub(crate) frozen: Option<Instant>,
    pub(crate) bytes: u64,
}

impl Task {
    pub(crate) fn new(caller: Option<Caller>, from: NodeId) -> Self {
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
    /// A process that runs at home, as it is now.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn at_home(pid: HomePid, cache_dir: &Path) -> tern_tracee::Result<Self> {
        let status = procfs::status(pid.0)?;
        Ok(Self {
            pid,
            own_pid: status.own_pid,
            command: procfs::command_line(pid.0),
            uid: status.uid[1],
            state: State::Resident,
            epoch: Epoch(0),
            offered: Epoch(0),
            revived: false,
            peer: 0,
            reserve: None,
            memory: Memory::open(pid.0)?,
            files: HomeFiles::new(pid.0, cache_dir),
            machine: None,
            mailbox: None,
            current: None,
            last: None,
            signals: 0,
            unheard: VecDeque::new(),
            actions: vec![[0; 4]; SIGNALS],
            task: None,
            migrations: 0,
            reason: String::new(),
            homecomings: VecDeque::new(),
            used: CpuTime::default(),
            demand: Demand::default(),
            calls: [0; 2],
            partial: None,
            holders: 0,
            ask_again: None,
            next_call: None,
            mask_due: None,
            job_stopped: false,
            faulted: false,
            frozen: None,
        })
    }

    /// Whether its program runs elsewhere.
    pub(crate) fn is_away(&self) -> bool {
        !matches!(self.state, State::Resident | State::AtExec | State::Outbound(_) | State::Lingering(_))
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

    /// What `mps` says of it.
    pub(crate) fn state_name(&self) -> &'static str {
        match self.state {
            State::Resident | State::Lingering(_) if self.frozen.is_some() => "frozen",
            State::Resident | State::AtExec | State::Lingering(_) => "home",
            State::Outbound(_)
            | State::Going(_)
            | State::Onward(_)
            | State::Crossing(_)
            | State::Inbound(_) => "migrating",
            State::Away => "running",
        }
    }
}
