//! The migration source for a process at home: what the sending half of a migration asks of it.

use crate::calls::current::CurrentCall;
use crate::migrate::group::GroupProgress;
use crate::migrate::movable::check_movable;
use crate::process::Process;
use crate::process::space::HomeSpace;
use crate::waker::Waker;
use std::collections::HashSet;
use std::time::Instant;
use tern_ids::HomePid;
use tern_image::apply;
use tern_image::content::{ContentReader, OpenContent, Progress};
use tern_image::layout::Layout;
use tern_image::object::{ObjectId, SharedObjects};
use tern_image::{FileRef, ProcessImage, Reserve, ThreadImage};
use tern_migrate::message::{ProcessSync, ThreadSync};
use tern_migrate::source::{MigrationSource, SendError, SharedObject};
use tern_syscall::waits_here;
use tern_tracee::inject::Injection;
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::{Error, Memory, Result, threads};

/// Upper bound on how often the maps of a running process are read again while they are
/// inconsistent.
const MAX_MAP_READS: u32 = 5;

/// The stack of a thread that identifies files, in bytes.
const WORKER_STACK_SIZE: usize = 256 << 10;

/// A process at home as the source of a migration.
pub(crate) struct OutgoingSource<'a> {
    pub(crate) process: &'a mut Process,
    pub(crate) image: Option<Box<(ProcessImage, ProcessSync)>>,
    /// The group that it leaves with.
    pub(crate) group: GroupProgress,
    /// Wakes the main loop when its files have been identified.
    pub(crate) waker: &'a Waker,
    /// The memory that the group shares.
    pub(crate) objects: &'a SharedObjects,
    /// It is ready to be frozen.
    pub(crate) ready: bool,
    /// The shared memory whose content is sent with it.
    pub(crate) carried_objects: HashSet<ObjectId>,
    /// The memory that it shares, as described when it was stopped.
    pub(crate) live_objects: HashSet<ObjectId>,
    /// It must be stopped before sending can continue.
    pub(crate) must_stop: bool,
    /// See [`Outgoing::measured_at`](crate::process::state::Outgoing::measured_at).
    pub(crate) measured_at: Option<Instant>,
    /// The waits of its threads must be measured before it is stopped.
    pub(crate) must_measure: bool,
}

impl MigrationSource for OutgoingSource<'_> {
    fn describe(&mut self) -> std::result::Result<Option<Layout>, SendError> {
        let pid = self.process.memory.pid();
        let is_stopped = self.process.is_stopped();
        let progress = self.process.files.collect_identified();
        if progress == Progress::Running {
            return Ok(None);
        }
        if is_stopped {
            // While the process ran it may have begun something that keeps it at home: a filter, a
            // ring, a vfork child, a setting of the processor.
            if progress != (Progress::Done { while_stopped: true }) {
                self.process.files.forget_objects();
                self.process.files.forget_changed();
            }
            check_movable(pid, std::process::id() as i32, self.process.rights)??;
            self.process.check_registers()?;
            self.process.check_modes()??;
        }
        // The maps of a running process are read in pieces, which need not be consistent. And in
        // the middle of an exec an address space is incomplete: the kernel's own mappings come
        // last.
        let expected = self.process.machine.as_ref().map_or(0, |m| m.vdso.lengths.len());
        for _ in 0..MAX_MAP_READS {
            let maps = self.process.without_own_ranges(procfs::smaps(pid)?);
            let layout = Layout::describe(&maps, self.process.reserve, &mut self.process.files);
            if self.process.has_unidentified_files(self.waker) && layout.is_ok() {
                return Ok(None);
            }
            if is_stopped {
                let layout = layout?;
                let live_objects = layout.files.iter().filter(|file| file.is_object);
                self.live_objects = live_objects.map(|file| (file.device, file.inode)).collect();
                return Ok(Some(layout));
            }
            // A reason to refuse the process counts only if it holds when the process is stopped. If
            // a file could not be read, each further description would request it again.
            let Ok(layout) = layout else { break };
            if layout.check().is_ok() && layout.kernel_regions().count() == expected {
                return Ok(Some(layout));
            }
        }
        self.must_stop = true;
        Err(SendError::AddressSpaceBusy)
    }

    fn thread_ids(&self) -> Vec<i32> {
        let others = self.process.live_threads().filter(|thread| thread.tid != self.process.pid);
        others.map(|thread| thread.own_tid).collect()
    }

    fn start_reader(&self) -> std::io::Result<ContentReader> {
        let waker = self.waker.clone();
        ContentReader::start(move || waker.wake())
    }

    fn open_content(&self, file: &FileRef, any_copy: bool) -> std::io::Result<OpenContent> {
        let files = &self.process.files;
        Ok(if any_copy { files.open_any(file) } else { files.open_content(file) })
    }

    fn freeze(&mut self) -> Result<bool> {
        self.ready = true;
        if !self.group.others_ready {
            return Ok(false);
        }
        // A process in the middle of a transfer that the shim has cut short was never resumed.
        if self.process.is_stopped() {
            return Ok(true);
        }
        self.must_measure = self.measured_at.is_none();
        self.must_stop = self.measured_at.is_some_and(|at| at <= Instant::now());
        Ok(false)
    }

    fn take_objects(&mut self, files: &[FileRef]) -> std::io::Result<Option<Vec<SharedObject>>> {
        if self.group.is_alone && self.live_objects.is_empty() {
            return Ok(Some(Vec::new()));
        }
        if !self.group.others_stopped || !self.group.is_complete {
            return Ok(None);
        }
        SharedObject::claim(files, self.objects, &self.group.carried_by_others, &mut self.carried_objects)
            .map(Some)
    }

    fn capture(&mut self, layout: Layout) -> Result<(ProcessImage, ProcessSync)> {
        let process = &mut *self.process;
        let inconsistent =
            || Error::Inconsistent { what: "captured while it ran".into(), pid: process.pid.0 };
        let (reserve, memory) =
            (process.reserve.ok_or_else(inconsistent)?, Memory::open(process.memory.pid())?);
        let mut injections = process.injections()?;
        let captured = process.capture(&mut injections, &memory, reserve, layout);
        // Report the injected call that failed, rather than the failure to end that injection.
        let finished = process.finish_injections(injections);
        let image = captured?;
        finished?;
        let sync = |thread: &ThreadImage| {
            let known = process.threads.get(&thread.tid);
            let signals = known.map_or(0, |known| known.signals_sent);
            let used = process.usage.of(Some(thread.tid));
            if let Some(known) = known
                && let Some(draining) = &known.draining
            {
                let current = known.current.as_ref().and_then(CurrentCall::guest_number);
                return ThreadSync { signals, used, ..draining.sync(current) };
            }
            let registers = &thread.registers;
            let code = registers
                .restart_code()
                .filter(|_| !waits_here(registers.orig_rax as u32, &registers.arguments()));
            ThreadSync {
                signals,
                restart_code: code,
                partial: known.and_then(|known| known.partial),
                used,
                ..ThreadSync::default()
            }
        };
        let threads = image.threads.iter().map(sync).collect();
        let sync = ProcessSync { threads, used: process.usage.of(None), ..ProcessSync::default() };
        self.image = Some(Box::new((image.clone(), sync.clone())));
        Ok((image, sync))
    }
}

impl Process {
    /// These mappings without Tern's own outside of the reserved range ([`Self::own_ranges`]).
    pub(crate) fn without_own_ranges(&self, mut maps: Vec<Mapping>) -> Vec<Mapping> {
        if let Some(reserve) = self.reserve {
            let own_ranges = apply::joined(self.own_ranges(reserve).collect());
            maps.retain(|m| !apply::overlaps(&own_ranges, m.start, m.end));
        }
        maps
    }

    fn capture(
        &self,
        injections: &mut [Injection],
        memory: &Memory,
        reserve: Reserve,
        layout: Layout,
    ) -> Result<ProcessImage> {
        let home = self.count_not_draining(injections);
        let numbers = injections[..home].iter().map(|injection| {
            let tid = HomePid(injection.pid());
            (tid, self.threads.get(&tid).map_or(0, |thread| thread.own_tid))
        });
        let numbers: Vec<(HomePid, i32)> = numbers.collect();
        let area = self.batch_area(reserve);
        let mut threads = tern_image::thread::capture(&mut injections[..home], &numbers, memory, area)?;
        for (injection, image) in injections.iter_mut().zip(&mut threads) {
            let thread = self.threads.get(&image.tid);
            let until = thread.and_then(|thread| thread.end_of_futex_wait(&image.registers));
            image.record_futex_wait(injection, memory, reserve.scratch(), until)?;
        }
        threads
            .extend(self.live_threads().filter_map(|thread| Some(thread.draining.as_ref()?.image.clone())));
        // The first thread comes first, unless it has exited.
        threads.sort_by_key(|thread| thread.tid != self.pid);
        let gone = || Error::Gone { pid: self.pid.0 };
        let mut space = HomeSpace::new(injections.first_mut().ok_or_else(gone)?, memory, reserve, &[]);
        ProcessImage::capture(&mut space, memory, reserve, layout, threads)
    }

    /// Whether requested files are still unidentified. If so, a thread identifies them, and wakes
    /// the main loop. If no thread can be started, the files are requested again.
    pub(crate) fn has_unidentified_files(&mut self, waker: &Waker) -> bool {
        let Some(files) = self.files.take_unidentified(self.is_stopped()) else { return false };
        let waker = waker.clone();
        let identify = move || {
            files.identify();
            waker.wake();
        };
        if let Err(error) = threads::spawn("files", WORKER_STACK_SIZE, identify) {
            tracing::warn!(pid = %self.pid, %error, "no thread can be started that identifies its mapped files");
        }
        true
    }
}
