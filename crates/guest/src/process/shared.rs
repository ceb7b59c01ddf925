//! The state that the threads of a guest share.

use crate::arrive::build::Arriving;
use crate::depart::departing::Departing;
use crate::fastpath::Fastpath;
use crate::files::cache::FileCache;
use crate::files::local::Opening;
use crate::files::names::NameCache;
use crate::process::space::MappedFiles;
use crate::time::cpu::{CpuMeter, HomeCpuTime};
use crate::time::cpu_threshold::CpuThresholds;
use crate::vdso::foreign::ForeignVdso;
use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tern_ids::{Epoch, HomePid};
use tern_image::object::ObjectId;
use tern_image::process::Action;
use tern_image::{ProcessImage, Reserve};
use tern_migrate::{CpuTime, GuestDemand};
use tern_tracee::listener::{Listener, Notification};
use tern_tracee::{Memory, Result};

/// How long threads wait before they fork, after a fork has cancelled a departure. Home repeats its
/// request after 10 ms; on a busy machine it takes longer to arrive.
const FORK_WAIT: Duration = Duration::from_millis(500);

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
    /// It is stopped and its image is sent, with the content of this shared memory: home decides what
    /// follows.
    Frozen(HashSet<ObjectId>),
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
    /// For the process `host` of this node.
    ///
    /// # Errors
    /// If it is gone.
    pub(super) fn new(
        pid: HomePid,
        own_pid: i32,
        host: i32,
        epoch: Epoch,
        reserve: Reserve,
        state: State,
    ) -> Result<Self> {
        Ok(Self {
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
            cpu_meter: CpuMeter::for_process(host, CpuTime::default())?,
            cpu_thresholds: CpuThresholds::default(),
            waited_ns: 0,
            demand: GuestDemand::default(),
        })
    }

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

    /// Whether a trap waits for the opening of a local file.
    pub(crate) fn is_opening_file(&self) -> bool {
        self.opening.as_ref().is_some_and(Opening::is_waiting)
    }

    /// The action of a signal.
    pub(crate) fn action(&mut self, signal: i32) -> Option<&mut Action> {
        let at = usize::try_from(signal).ok()?.checked_sub(1)?;
        self.image.as_mut().and_then(|image| image.actions.get_mut(at))
    }
}
