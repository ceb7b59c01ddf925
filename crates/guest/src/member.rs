//! One guest: a process and its threads.

use crate::arrive::Arriving;
use crate::cpu::{AtHome, Meter};
use crate::depart::Departing;
use crate::foreign::Foreign;
use crate::hot::Hot;
use crate::inhand::Files;
use crate::names::Names;
use crate::space::Shown;
use crate::thread::Thread;
use crate::watch::Watch;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::time::Instant;
use tern_ids::{Epoch, HomePid};
use tern_image::object::ObjectId;
use tern_image::process::Action;
use tern_image::{ProcessImage, Reserve};
use tern_migrate::{CpuTime, Demand};
use tern_tracee::listener::{Listener, Notification};
use tern_tracee::{Memory, Result, cpu, procfs};

/// A guest of this family on this node.
#[derive(Debug)]
pub struct Member {
    /// What its threads share.
    pub process: Process,
    /// Its threads, by their numbers at home: none before it has arrived. The first one, which has its pid, may have
    /// ended before others.
    pub threads: BTreeMap<HomePid, Thread>,
}

/// What the threads of a guest share.
#[derive(Debug)]
pub struct Process {
    /// Its pid at home.
    pub pid: HomePid,
    /// Its pid as it sees it.
    pub own_pid: i32,
    /// Its pid as we see it.
    pub host: i32,
    /// Its life.
    pub epoch: Epoch,
    /// Our range in it. While one thread makes a call for us the others run on, and may write there, as they may
    /// everywhere in their memory: what a call that the filter lets through depends on is in registers.
    pub reserve: Reserve,
    /// Its memory, seen through one of its threads that lives.
    pub memory: Memory,
    /// The listening end of its filter, once it has one.
    pub listener: Option<Rc<Listener>>,
    /// How this node shows the files that it maps.
    pub shown: Shown,
    /// What it has instead of its home's vDSO, if that is another than this node's.
    pub foreign: Option<Foreign>,
    /// What of its image does not change while it runs here: bounds, auxiliary vector, name; and its actions,
    /// which are kept up to date. Without threads.
    pub image: Option<Box<ProcessImage>>,
    /// What it is doing.
    pub state: State,
    /// The shared memory whose content has gone with it, if it has been sent off.
    pub carried: HashSet<ObjectId>,
    /// Its threads are being brought to a stand, or stand.
    pub halting: bool,
    /// It is to stand still, by job control or because its home is out of reach.
    pub held: bool,
    /// It is to stand still until home has ended it.
    pub dying: Option<Dying>,
    /// This thread of it stands where only home has what it needs next, and whether home has been told.
    pub homesick: Option<(HomePid, bool)>,
    /// Traps that wait: of threads that are to change a signal's action while another one does, and of who waits for an errand.
    pub queued: VecDeque<Notification>,
    /// What home has said of its CPU time.
    pub at_home: AtHome,
    /// Its files in hand.
    pub files: Files,
    /// What is known of names.
    pub names: Names,
    /// What of its calls on them is made without a stop.
    pub hot: Hot,
    /// It runs in its parent's memory, after a vfork.
    pub borrowed: bool,
    /// When it began here.
    pub since: Instant,
    /// CPU time of all its threads, those that have ended among them.
    pub meter: Meter,
    /// What home wants to be told as soon as so much has been used: by it, or by threads of it.
    pub watch: Watch,
    /// How long threads that have ended had waited for a CPU.
    pub waited: u64,
    /// What else it asked of this node when that was looked at last.
    pub demand: Demand,
}

/// What a guest is doing.
#[derive(Debug)]
pub enum State {
    /// Being built.
    Arriving(Box<Arriving>),
    /// Running, unless it is to stand.
    Running,
    /// Running, while its memory is sent; coming to a stand towards the end.
    Departing(Box<Departing>),
    /// Standing still, its image sent: home decides.
    Frozen,
}

/// A guest is to die of a fault of its own. The thread stands at the instruction that raised it.
#[derive(Debug, Clone, Copy)]
pub struct Dying {
    /// The fault's signal.
    pub signal: i32,
    /// The thread that raised it.
    pub by: HomePid,
    /// Whether home has been told.
    pub told: bool,
}

impl Process {
    /// Whether it has a reason to stand besides a departure.
    #[must_use]
    pub fn is_to_stand(&self) -> bool {
        self.held || self.dying.is_some()
    }

    /// A thread has raised a signal that ends the program. The first such one counts.
    pub fn die(&mut self, signal: i32, by: HomePid) {
        self.dying.get_or_insert(Dying { signal, by, told: false });
    }

    /// Takes the trap of a thread, by its number as we see it, out of those that wait for another.
    pub fn take_queued(&mut self, host: i32) -> Option<Notification> {
        let at = self.queued.iter().position(|trap| trap.pid == host)?;
        self.queued.remove(at)
    }

    /// What a signal does.
    pub fn action(&mut self, signal: i32) -> Option<&mut Action> {
        let at = usize::try_from(signal).ok()?.checked_sub(1)?;
        self.image.as_mut().and_then(|image| image.actions.get_mut(at))
    }
}

impl Member {
    /// A process of this node that begins a life under these names, without threads.
    ///
    /// # Errors
    /// If it is gone.
    pub fn new(
        pid: HomePid,
        own_pid: i32,
        host: i32,
        epoch: Epoch,
        reserve: Reserve,
        state: State,
    ) -> Result<Self> {
        let process = Process {
            pid,
            own_pid,
            host,
            epoch,
            reserve,
            memory: Memory::open(host)?,
            listener: None,
            shown: HashMap::new(),
            foreign: None,
            image: None,
            state,
            carried: HashSet::new(),
            halting: false,
            held: false,
            dying: None,
            homesick: None,
            queued: VecDeque::new(),
            at_home: AtHome::default(),
            files: Files::default(),
            names: Names::default(),
            hot: Hot::default(),
            borrowed: false,
            since: Instant::now(),
            meter: Meter::begin(host, CpuTime::default())?,
            watch: Watch::default(),
            waited: 0,
            demand: Demand::default(),
        };
        Ok(Self { process, threads: BTreeMap::new() })
    }

    /// Whether it lives here, and home has not been asked to let it live elsewhere.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self.process.state, State::Running | State::Departing(_))
    }

    /// Why a part of it is to go home, if it is.
    #[must_use]
    pub fn homeward(&self) -> Option<&str> {
        self.threads.values().find_map(|t| t.open.as_ref()?.homeward.as_deref())
    }

    /// What else the guest asks of this node; nothing if it is gone.
    pub fn demand(&mut self) -> Demand {
        let memory = procfs::stat(self.process.memory.pid()).map_or(0, |stat| stat.resident());
        let live = self.threads.values().map(|t| cpu::waited(t.host).unwrap_or_default());
        // Of all that it reads and writes, only what is on files that it has open itself is done by its own calls.
        let near = procfs::transferred(self.process.memory.pid()).unwrap_or_default();
        let waited = live.fold(self.process.waited, u64::saturating_add);
        self.process.demand = Demand { waited, memory, near };
        self.process.demand
    }

    /// Its command, for lists.
    #[must_use]
    pub fn command(&self) -> String {
        match &self.process.state {
            State::Arriving(arriving) => arriving.offer.command.clone(),
            _ => {
                // What `ps` shows here, without the words that say whose it is.
                let title = procfs::command_line(self.process.memory.pid());
                title.split_once(' ').map_or(title.clone(), |(_, command)| command.to_owned())
            }
        }
    }

    /// The title that `ps` on this node shows.
    #[must_use]
    pub fn title(home: tern_ids::NodeId, pid: HomePid, command: &str) -> String {
        format!("tern:{home}/{pid} {command}")
    }
}

/// A guest's memory as the marshaller sees it.
#[derive(Debug)]
pub struct GuestMemory<'a>(pub &'a Memory);

impl tern_syscall::Memory for GuestMemory<'_> {
    fn read(&mut self, addr: u64, buf: &mut [u8]) -> std::result::Result<(), tern_syscall::Fault> {
        match self.0.read_some(addr, buf) {
            Ok(n) if n == buf.len() => Ok(()),
            _ => Err(tern_syscall::Fault),
        }
    }

    fn write(&mut self, addr: u64, data: &[u8]) -> std::result::Result<(), tern_syscall::Fault> {
        self.0.write(addr, data).map_err(|_e| tern_syscall::Fault)
    }

    fn writable(&mut self, addr: u64, len: u64) -> bool {
        // Writing a page's first byte back would be seen by its other users; reading shows that it is mapped,
        // and what is mapped but read-only is found when the result is written.
        let mut byte = [0];
        let pages = (addr & !4095..addr.saturating_add(len)).step_by(4096);
        pages.into_iter().all(|page| self.0.read_some(page.max(addr), &mut byte).is_ok_and(|n| n == 1))
    }
}
