//! One guest: a process and its threads.

mod quiesce;
pub(crate) mod space;
pub(crate) mod thread;

use crate::arrive::build::Arriving;
use crate::depart::send::Departing;
use crate::fastpath::Fastpath;
use crate::files::cache::FileCache;
use crate::files::local::Opening;
use crate::files::names::NameCache;
use crate::process::space::MappedFiles;
use crate::process::thread::Thread;
use crate::time::cpu::{CpuMeter, HomeCpuTime};
use crate::time::cpu_threshold::CpuThresholds;
use crate::vdso::foreign::ForeignVdso;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tern_ids::{Epoch, HomePid};
use tern_image::object::ObjectId;
use tern_image::process::Action;
use tern_image::{ProcessImage, Reserve};
use tern_migrate::{CpuTime, GuestDemand};
use tern_tracee::listener::{Listener, Notification};
use tern_tracee::{Memory, Result, cpu, procfs};

/// How long threads wait before they fork, after a fork has cancelled a departure. Home repeats its
/// request after 10 ms; on a busy machine it takes longer to arrive.
const FORK_WAIT: Duration = Duration::from_millis(500);

/// A guest of this family on this node.
#[derive(Debug)]
pub(crate) struct Guest {
    /// The state that its threads share.
    pub(crate) process: Process,
    /// Its threads, by their ids at home; empty until it has arrived. The first thread, which has
    /// the process's pid, may end before others.
    pub(crate) threads: BTreeMap<HomePid, Thread>,
}

/// The state that the threads of a guest share.
#[derive(Debug)]
pub(crate) struct Process {
    /// Its pid at home.
    pub(crate) pid: HomePid,
    /// Its pid in its own pid namespace.
    pub(crate) own_pid: i32,
    /// Its pid on this node.
    pub(crate) host_pid: i32,
    /// The epoch in which the process runs here.
    pub(crate) epoch: Epoch,
    /// The reserved range in its address space. While one thread makes an injected call, the others
    /// run and may write to the range, as to all of their memory. So calls that the filter lets
    /// through depend on registers only.
    pub(crate) reserve: Reserve,
    /// Its memory, opened through one of its live threads.
    pub(crate) memory: Memory,
    /// The notification fd of its seccomp filter, once the filter is installed.
    pub(crate) listener: Option<Rc<Listener>>,
    /// Its file mappings, as this node shows them.
    pub(crate) mapped_files: MappedFiles,
    /// The replacement for its home's vDSO, if that differs from this node's.
    pub(crate) foreign_vdso: Option<ForeignVdso>,
    /// The parts of its image that do not change here (bounds, auxiliary vector, name), and its
    /// signal actions, which are kept up to date. It has no threads.
    pub(crate) image: Option<Box<ProcessImage>>,
    /// Its phase of life.
    pub(crate) state: State,
    /// The shared memory whose content was sent with it, once it is frozen.
    pub(crate) carried_objects: HashSet<ObjectId>,
    /// Its threads are being stopped, or are stopped.
    pub(crate) is_quiescing: bool,
    /// It must stay stopped, by job control or because its home is unreachable.
    pub(crate) is_suspended: bool,
    /// The signal that ends it. It stays stopped until home has ended it.
    pub(crate) fatal_signal: Option<FatalSignal>,
    /// A thread that cannot continue here and must be fetched home, and whether home was notified.
    pub(crate) needs_home: Option<(HomePid, bool)>,
    /// Traps that wait for another thread's change of a signal action, for an internal call, or for
    /// the opening of a local file.
    pub(crate) queued_traps: VecDeque<Notification>,
    /// The opening of a local file that one of these traps waits for, and the number of openings so
    /// far.
    pub(crate) opening: Option<Opening>,
    pub(crate) openings: u64,
    /// A fork has cancelled a departure, and home requests the departure again. Until this time,
    /// and during that departure, threads stop before they fork.
    pub(crate) forks_wait_until: Option<Instant>,
    /// The CPU time that home has reported.
    pub(crate) home_cpu_time: HomeCpuTime,
    /// The cache of its delegated files.
    pub(crate) files: FileCache,
    /// The cache of directory entries.
    pub(crate) names: NameCache,
    /// Its patched call sites.
    pub(crate) fastpath: Fastpath,
    /// It runs in its parent's memory, after a vfork.
    pub(crate) shares_parent_memory: bool,
    /// When it began to run here.
    pub(crate) started: Instant,
    /// CPU time of all its threads, including those that have ended.
    pub(crate) cpu_meter: CpuMeter,
    /// CPU usage, of it or its threads, at which home wants a report.
    pub(crate) cpu_thresholds: CpuThresholds,
    /// How long, in nanoseconds, its ended threads had waited for a CPU.
    pub(crate) waited_ns: u64,
    /// Its demand on this node, when last measured.
    pub(crate) demand: GuestDemand,
}

/// The phases in the life of a guest.
#[derive(Debug)]
pub(crate) enum State {
    /// It is being built.
    Arriving(Box<Arriving>),
    /// It runs, unless it must stay stopped.
    Running,
    /// It runs while its memory is sent, and is stopped towards the end.
    Departing(Box<Departing>),
    /// It is stopped and its image is sent: home decides what follows.
    Frozen,
}

/// A signal that ends a guest. The thread is stopped at the instruction that raised it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FatalSignal {
    /// The signal.
    pub(crate) signal: i32,
    /// The thread that raised it.
    pub(crate) thread: HomePid,
    /// Whether home was notified.
    pub(crate) is_reported: bool,
}

impl Process {
    /// Whether it has a reason to stay stopped other than a departure.
    #[must_use]
    pub(crate) fn must_stay_stopped(&self) -> bool {
        self.is_suspended || self.fatal_signal.is_some()
    }

    /// Records that a thread has raised a signal that ends the program. Only the first one counts.
    pub(crate) fn set_fatal_signal(&mut self, signal: i32, thread: HomePid) {
        self.fatal_signal.get_or_insert(FatalSignal { signal, thread, is_reported: false });
    }

    /// Whether its threads must stop before they fork.
    #[must_use]
    pub(crate) fn holds_forks(&self) -> bool {
        match self.state {
            State::Departing(_) => self.forks_wait_until.is_some(),
            _ => self.forks_wait_until.is_some_and(|until| Instant::now() < until),
        }
    }

    /// Has its threads stop before they fork, until home has repeated its request to depart.
    pub(crate) fn hold_forks(&mut self) {
        self.forks_wait_until = Some(Instant::now() + FORK_WAIT);
    }

    /// Removes the queued trap of a thread, given by its tid on this node.
    pub(crate) fn take_queued_trap(&mut self, host: i32) -> Option<Notification> {
        let at = self.queued_traps.iter().position(|trap| trap.pid == host)?;
        // The call traps again, and then its file is opened anew if that is still needed.
        self.opening = None;
        self.queued_traps.remove(at)
    }

    /// The action of a signal.
    pub(crate) fn action(&mut self, signal: i32) -> Option<&mut Action> {
        let at = usize::try_from(signal).ok()?.checked_sub(1)?;
        self.image.as_mut().and_then(|image| image.actions.get_mut(at))
    }
}

impl Guest {
    /// A guest for the process `host` of this node, without threads.
    ///
    /// # Errors
    /// If the process is gone.
    pub(crate) fn new(
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
            host_pid: host,
            epoch,
            reserve,
            memory: Memory::open(host)?,
            listener: None,
            mapped_files: HashMap::new(),
            foreign_vdso: None,
            image: None,
            state,
            carried_objects: HashSet::new(),
            is_quiescing: false,
            is_suspended: false,
            fatal_signal: None,
            needs_home: None,
            queued_traps: VecDeque::new(),
            opening: None,
            openings: 0,
            forks_wait_until: None,
            home_cpu_time: HomeCpuTime::default(),
            files: FileCache::default(),
            names: NameCache::default(),
            fastpath: Fastpath::default(),
            shares_parent_memory: false,
            started: Instant::now(),
            cpu_meter: CpuMeter::for_process(host, CpuTime::default())?,
            cpu_thresholds: CpuThresholds::default(),
            waited_ns: 0,
            demand: GuestDemand::default(),
        };
        Ok(Self { process, threads: BTreeMap::new() })
    }

    /// Whether its program runs here, possibly while it is being sent; not once it is frozen.
    #[must_use]
    pub(crate) fn is_active(&self) -> bool {
        matches!(self.process.state, State::Running | State::Departing(_))
    }

    /// Why one of its threads must go home, if any must.
    #[must_use]
    pub(crate) fn homeward_reason(&self) -> Option<&str> {
        self.threads.values().find_map(|t| t.pending.as_ref()?.homeward_reason.as_deref())
    }

    /// Measures its demand on this node; zero if it is gone.
    pub(crate) fn measure_demand(&mut self) -> GuestDemand {
        let memory = procfs::stat(self.process.memory.pid()).map_or(0, |stat| stat.resident());
        let live = self.threads.values().map(|t| cpu::run_queue_wait(t.host_tid).unwrap_or_default());
        // Its own calls read and write only files that it has open on this node.
        let local_io = procfs::io_bytes(self.process.memory.pid()).unwrap_or_default();
        let waited = live.fold(self.process.waited_ns, u64::saturating_add);
        self.process.demand = GuestDemand { cpu_wait_ns: waited, memory, local_io };
        self.process.demand
    }

    /// Its command, for lists of processes.
    #[must_use]
    pub(crate) fn command(&self) -> String {
        match &self.process.state {
            State::Arriving(arriving) => arriving.offer.command.clone(),
            _ => {
                // The title that `ps` shows here, without the prefix that names its home.
                let title = procfs::command_line(self.process.memory.pid());
                title.split_once(' ').map_or(title.clone(), |(_, command)| command.to_owned())
            }
        }
    }

    /// The title that `ps` on this node shows.
    #[must_use]
    pub(crate) fn title(home: tern_ids::NodeId, pid: HomePid, command: &str) -> String {
        format!("tern:{home}/{pid} {command}")
    }
}

/// A guest's memory, for the syscall marshaller.
#[derive(Debug)]
pub(crate) struct GuestMemory<'a>(pub(crate) &'a Memory);

impl tern_syscall::UserMemory for GuestMemory<'_> {
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
        // Writing the first byte of a page back would race with the page's other users. Reading it
        // shows that it is mapped; a read-only page fails when the result is written.
        let mut byte = [0];
        let pages = (addr & !4095..addr.saturating_add(len)).step_by(4096);
        pages.into_iter().all(|page| self.0.read_some(page.max(addr), &mut byte).is_ok_and(|n| n == 1))
    }
}
