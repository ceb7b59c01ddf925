//! The state that the threads of a guest share.

use crate::arrive::build::Arriving;
use crate::depart::departing::{Departing, Frozen};
use crate::fastpath::Fastpath;
use crate::files::cache::FileCache;
use crate::files::connections::Connections;
use crate::files::names::NameCache;
use crate::process::queued_traps::QueuedTraps;
use crate::process::space::MappedFiles;
use crate::process::stop_reasons::StopReasons;
use crate::process::usage::Usage;
use crate::vdso::foreign::ForeignVdso;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;
use tern_ids::{Epoch, HomePid};
use tern_image::limits::{self, Limit};
use tern_image::process::Action;
use tern_image::{ProcessImage, Reserve};
use tern_tracee::listener::Listener;
use tern_tracee::{Memory, Result};

/// The state that the threads of a guest share. The ids and the reserved range never change.
#[derive(Debug)]
pub(crate) struct Process {
    /// Its pid at home.
    pub(crate) pid: HomePid,
    /// Its pid in its own pid namespace.
    pub(crate) own_pid: i32,
    /// Its pid on this node.
    pub(crate) host_pid: i32,
    /// The epoch in which the process runs here. Only the shim changes it.
    pub(crate) epoch: Epoch,
    /// The reserved range in its address space. While one thread makes an injected call, the others
    /// run and may write to the range, as to all of their memory. So calls that the filter lets
    /// through depend on registers only.
    pub(crate) reserve: Reserve,
    /// Its memory, opened through one of its live threads. Opened again when that thread exits
    /// (`calls::thread_lifecycle`).
    pub(crate) memory: Memory,
    /// The notification fd of its seccomp filter, once the filter is installed. Set by its arrival or
    /// its fork, as the next two fields are.
    pub(crate) listener: Option<Rc<Listener>>,
    /// Its file mappings, as this node shows them. Extended by mmap (`calls::split`), and reduced by
    /// the shim when shared memory is unmapped everywhere.
    pub(crate) mapped_files: MappedFiles,
    /// The replacement for its home's vDSO, if that differs from this node's.
    pub(crate) foreign_vdso: Option<ForeignVdso>,
    /// The parts of its image that do not change here (bounds, auxiliary vector, name), and its
    /// signal actions and limits, which `calls::split` and `signals` keep up to date. The image
    /// contains no threads. `depart::send` takes it for a moment to capture the process.
    pub(crate) image: Option<Box<ProcessImage>>,
    /// Its phase of life. Only the shim and [`Guest::continue_here`](super::Guest::continue_here)
    /// change it.
    pub(crate) state: State,
    /// Why its threads are stopped, or must stop.
    pub(crate) stop_reasons: StopReasons,
    /// Traps that wait.
    pub(crate) queued_traps: QueuedTraps,
    /// The CPU time that it uses, and its demand on this node.
    pub(crate) usage: Usage,
    /// The cache of its delegated files. Calls are answered from it in `files::io`; requests take the
    /// pending writes from it (`calls::request`).
    pub(crate) files: FileCache,
    /// The connections that home has offered. Calls on them are let through in
    /// `files::connections`.
    pub(crate) connections: Connections,
    /// The cache of directory entries. Home's notices change it, as the shim receives them.
    pub(crate) names: NameCache,
    /// Its patched call sites. Used through `process::publication`, mostly.
    pub(crate) fastpath: Fastpath,
    /// It runs in its parent's memory, after a vfork. Never changes.
    pub(crate) shares_parent_memory: bool,
    /// Number of children that were created here. Only `calls::fork` changes it.
    pub(crate) children_created: u64,
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
    /// It is stopped, and its image has been sent. Home decides what follows.
    Frozen(Frozen),
}

impl Process {
    /// For the process `host` of this node.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn new(
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
            stop_reasons: StopReasons::default(),
            queued_traps: QueuedTraps::default(),
            usage: Usage::new(host)?,
            files: FileCache::default(),
            connections: Connections::default(),
            names: NameCache::default(),
            fastpath: Fastpath::default(),
            shares_parent_memory: false,
            children_created: 0,
        })
    }

    /// Whether its threads must stop before they fork.
    #[must_use]
    pub(crate) fn holds_forks(&self) -> bool {
        let is_departing = matches!(self.state, State::Departing(_));
        self.stop_reasons.forks_held_until().is_some_and(|until| is_departing || Instant::now() < until)
    }

    /// Applies home's limits on memory, and records them for later moves.
    pub(crate) fn set_limits(&mut self, home: Vec<Limit>) {
        if let Some(image) = self.image.as_mut().filter(|_| limits::are_valid(&home)) {
            limits::set_all(self.host_pid, &home);
            image.limits = home;
        }
    }

    /// The action of a signal.
    pub(crate) fn action(&mut self, signal: i32) -> Option<&mut Action> {
        let at = usize::try_from(signal).ok()?.checked_sub(1)?;
        self.image.as_mut().and_then(|image| image.actions.get_mut(at))
    }
}
