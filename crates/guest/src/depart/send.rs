//! Sending a guest home or onward.
//!
//! The guest runs while its memory is sent, and is then stopped until home has decided: `Drop` ends
//! it here, `Thaw` resumes it. A pending call is not cancelled: it stays pending at home, and the
//! next epoch asks for its result under the same number.

use crate::depart::group::GroupProgress;
use crate::process::Guest;
use crate::process::shared::{Process, State};
use crate::process::space::{GuestSpace, MappedFiles};
use crate::process::thread::{PendingCall, Thread};
use crate::vdso::foreign::ForeignVdso;
use crate::workers::Workers;
use std::collections::HashSet;
use std::fs::File;
use tern_image::content::{ContentCache, ContentReader, OpenContent};
use tern_image::layout::FileIdentifier;
use tern_image::object::{self, ObjectId};
use tern_image::pages::PageFinder;
use tern_image::process::MAX_THREADS;
use tern_image::{FileRef, Layout, ProcessImage, Unmovable};
use tern_migrate::message::ProcessSync;
use tern_migrate::source::{MemorySender, MigrationSource, SendError, SharedObject};
use tern_migrate::{Phase, fault};
use tern_syscall::{Route, SplitCall, route};
use tern_tracee::inject::{Injection, Site};
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::write_tracker::WriteTracker;
use tern_tracee::{Memory, Result};

/// Processes smaller than this (KiB) are stopped and copied at once: tracking their writes would
/// cost more.
const MIN_TRACKED_KIB: u64 = 8 << 10;

/// Maximum number of times that the maps of a running process are read until they are consistent.
const MAX_MAP_READS: u32 = 20;

/// The files of a guest's mappings, as they were announced when they were mapped.
struct GuestMappings<'a>(&'a MappedFiles);

impl FileIdentifier for GuestMappings<'_> {
    fn identify(&mut self, m: &Mapping) -> std::result::Result<Option<FileRef>, Unmovable> {
        let file = self.0.get(&(m.device, m.inode)).cloned();
        file.map(Some).ok_or_else(|| Unmovable::UnreadableFile(String::from_utf8_lossy(&m.name).into_owned()))
    }

    fn moves_with_sharers(&self, m: &Mapping) -> bool {
        self.0.get(&object::id(m)).is_some_and(|file| file.is_object)
    }
}

/// Adds to a layout's files the shared memory that was unmapped on this node: its content must be
/// sent too.
fn add_unmapped(layout: &mut Layout, mapped_files: &MappedFiles) {
    let mut known: HashSet<ObjectId> = layout.files.iter().map(|file| (file.device, file.inode)).collect();
    let live = mapped_files.values().filter(|file| file.is_object);
    layout.files.extend(live.filter(|file| known.insert((file.device, file.inode))).cloned());
}

/// A departing guest, for the sending half of a migration.
pub(crate) struct GuestSource<'a> {
    /// The guest.
    pub(crate) guest: &'a mut Guest,
    /// File content.
    pub(crate) cache: &'a ContentCache,
    /// Starts the thread that reads file content.
    pub(crate) workers: &'a Workers,
    /// The progress of its group.
    pub(crate) group: GroupProgress,
    /// Whether it is ready to stop.
    pub(crate) is_ready: bool,
    /// The shared memory whose content is sent with it.
    pub(crate) carried_objects: HashSet<ObjectId>,
}

impl std::fmt::Debug for GuestSource<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GuestSource({})", self.guest.process.pid)
    }
}

impl MigrationSource for GuestSource<'_> {
    fn describe(&mut self) -> std::result::Result<Option<Layout>, SendError> {
        // The maps of a running process are read in pieces, which may be inconsistent.
        let mut why = SendError::AddressSpaceBusy;
        for _ in 0..MAX_MAP_READS {
            let process = &self.guest.process;
            let foreign_vdso = process.foreign_vdso.as_ref();
            let maps = ForeignVdso::exclude_from(foreign_vdso, procfs::smaps(process.memory.pid())?);
            let mut layout =
                Layout::describe(&maps, Some(process.reserve), &mut GuestMappings(&process.mapped_files));
            if let (Some(foreign_vdso), Ok(layout)) = (foreign_vdso, &mut layout) {
                foreign_vdso.describe(layout);
            }
            if let Ok(layout) = &mut layout {
                add_unmapped(layout, &process.mapped_files);
            }
            if self.guest.are_all_stopped() {
                return Ok(Some(layout?));
            }
            match layout {
                Ok(layout) if layout.check().is_ok() => return Ok(Some(layout)),
                Ok(_) => {}
                Err(unmovable) => why = unmovable.into(),
            }
        }
        Err(why)
    }

    fn thread_ids(&self) -> Vec<i32> {
        let Guest { process, threads } = &*self.guest;
        let others = threads.values().filter(|thread| thread.tid != process.pid && !thread.is_exiting);
        others.map(|thread| thread.own_tid).collect()
    }

    fn start_reader(&self) -> std::io::Result<ContentReader> {
        self.workers.start_reader()
    }

    /// The content of a mapped file is already open here, and there are no other means to open it.
    fn open_content(&self, file: &FileRef, _by_any_means: bool) -> std::io::Result<OpenContent> {
        let fd = self.cache.get(file).ok_or(std::io::ErrorKind::NotFound)?;
        let file = File::from(fd.try_clone_to_owned()?);
        Ok(Box::new(|| Ok(file)))
    }

    fn freeze(&mut self) -> Result<bool> {
        self.is_ready = true;
        Ok(self.group.others_ready && self.guest.quiesce()?)
    }

    fn take_objects(&mut self, files: &[FileRef]) -> std::io::Result<Option<Vec<SharedObject>>> {
        if !self.group.others_stopped || !self.guest.are_all_stopped() {
            return Ok(None);
        }
        SharedObject::claim(
            files,
            &self.cache.objects,
            &self.group.carried_by_others,
            &mut self.carried_objects,
        )
        .map(Some)
    }

    fn capture(&mut self, layout: Layout) -> Result<(ProcessImage, ProcessSync)> {
        let Guest { process, threads } = &mut *self.guest;
        let inconsistent = || tern_tracee::Error::Inconsistent {
            what: "captured while it was running".into(),
            pid: process.host_pid,
        };
        let mut image = process.image.take().ok_or_else(inconsistent)?;
        // The first thread comes first, unless it has ended.
        let pid = process.pid;
        let mut order: Vec<&mut Thread> = threads.values_mut().collect();
        order.sort_by_key(|thread| thread.tid != pid);
        let numbers: Vec<_> = order.iter().map(|thread| (thread.tid, thread.own_tid)).collect();
        let mut injections = Vec::with_capacity(order.len());
        for thread in &mut order {
            let stopped = thread.stopped.take();
            let stopped = stopped.ok_or(tern_tracee::Error::Gone { pid: thread.host_tid })?;
            injections.push(Injection::begin(stopped, Site(process.reserve.start))?);
        }
        let area = process.reserve.large_batch_area();
        let mut captured = tern_image::thread::capture(&mut injections, &numbers, &process.memory, area);
        if let Ok(threads) = &mut captured {
            let scratch = process.reserve.scratch();
            let waits = order.iter().zip(&mut injections).zip(threads);
            let recorded = waits.into_iter().try_for_each(|((thread, injection), image)| {
                image.record_futex_wait(injection, &process.memory, scratch, thread.futex_wait_end)
            });
            captured = recorded.and(captured);
        }
        if let (Ok(threads), Some(injection)) = (&mut captured, injections.first_mut()) {
            let mut space = GuestSpace::for_single_calls(injection, &order[0].listener, self.cache);
            captured = image
                .update_guest(&mut space, &process.memory, layout, std::mem::take(threads))
                .map(|()| Vec::new());
        }
        // This is done after a failure too, because the guest then continues here.
        for (thread, injection) in order.iter_mut().zip(injections) {
            thread.stopped = Some(injection.finish()?);
        }
        let syncs = order.iter_mut().map(|thread| thread.final_sync()).collect();
        let copy = (*image).clone();
        image.threads.clear();
        process.image = Some(image);
        captured?;
        let used = process.usage.cpu_time();
        Ok((copy, ProcessSync { threads: syncs, used, ..ProcessSync::default() }))
    }
}

impl Thread {
    /// Changes the address space by means of this thread, which is stopped before and after.
    fn with_space<T>(
        &mut self,
        process: &Process,
        cache: &ContentCache,
        act: impl FnOnce(&mut GuestSpace<'_>) -> Result<T>,
    ) -> Result<T> {
        let stopped = self.stopped.take();
        let stopped = stopped.ok_or(tern_tracee::Error::Gone { pid: self.host_tid })?;
        let mut injection = Injection::begin(stopped, Site(process.reserve.start))?;
        let mut space = GuestSpace::for_single_calls(&mut injection, &self.listener, cache);
        let result = act(&mut space);
        // This is done after a failure too, because the guest then continues here.
        self.stopped = Some(injection.finish()?);
        result
    }
}

impl Guest {
    /// Prepares a guest for its departure: starts tracking its writes if that is worthwhile. It
    /// keeps running, unless it is stopped already. `to_new_process` says that the receiver is a new
    /// process, and not the deputy.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn prepare_departure(
        &mut self,
        cache: &ContentCache,
        to_new_process: bool,
    ) -> Result<MemorySender> {
        let Self { process, threads } = self;
        let mut tracker = None;
        // A child in its parent's memory needs no tracker of its own: the parent's covers it.
        let worth = !process.stop_reasons.must_stay_stopped()
            && !process.shares_parent_memory
            && procfs::status(process.memory.pid())?.resident_kib >= MIN_TRACKED_KIB;
        fault::point("source", Phase::Prepare);
        // Tracking is started by any one thread for all; only that one is stopped.
        for thread in threads.values_mut() {
            if !worth || !thread.can_stop(process) {
                continue;
            }
            thread.stop(process)?;
            if thread.stopped.is_none() && !process.stop_reasons.must_stay_stopped() {
                // It is in an uninterruptible sleep; another thread may not be.
                continue;
            }
            // A signal that ends the program may have come first.
            if !process.stop_reasons.must_stay_stopped() {
                let host = process.memory.pid();
                tracker = thread.with_space(process, cache, |space| track(host, space)).ok();
                if let Some(stopped) = thread.stopped.take() {
                    thread.resume_or_hold(stopped, process)?;
                }
            }
            break;
        }
        let finder = PageFinder::new(process.memory.pid(), tracker, to_new_process)?;
        Ok(MemorySender::new(process.pid, Memory::open(process.memory.pid())?, finder))
    }

    /// Whether one of its threads is in a fork that home has been sent, waits in a vfork, or waits
    /// until home has removed a child or thread that could not be created here.
    #[must_use]
    pub(crate) fn is_forking(&self) -> bool {
        let forks = |pending: &PendingCall| {
            pending.request.is_some()
                && route(pending.trap.nr, &pending.trap.args) == Route::Both(SplitCall::Fork)
        };
        let waits = |thread: &Thread| thread.vfork_wait.is_some() || thread.uncreated.is_some();
        self.threads.values().any(|t| waits(t) || t.pending.as_ref().is_some_and(forks))
    }

    /// Lets threads fork that have waited long enough for a departure.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn release_forks(&mut self) -> Result<()> {
        if !matches!(self.process.state, State::Running) {
            return Ok(());
        }
        if self.process.stop_reasons.release_forks() { self.resume() } else { Ok(()) }
    }

    /// Whether the guest may leave now, for home or for another node.
    ///
    /// A child that runs in its parent's memory may leave only after it has executed a program,
    /// with one exception: it may go home for a call of its own that must be made there. It then
    /// goes alone, with a copy of that memory, as if its vfork had been a fork, which POSIX
    /// permits. Its parent leaves the vfork when the child is dropped here.
    #[must_use]
    pub(crate) fn can_depart(&self, home: bool) -> bool {
        let in_vfork = self.threads.values().any(|thread| thread.vfork_wait.is_some());
        let bound = self.process.shares_parent_memory && !(home && self.homeward_reason().is_some());
        matches!(self.process.state, State::Running) && !bound && !in_vfork
    }

    /// Whether an image of it can be made.
    ///
    /// # Errors
    /// With the reason, if it cannot.
    pub(crate) fn check_movable(&self) -> std::result::Result<(), Unmovable> {
        match self.threads.len() {
            count if count > MAX_THREADS => Err(Unmovable::Threads(count as u32)),
            _ => Ok(()),
        }
    }
}

fn track(process: i32, space: &mut GuestSpace<'_>) -> Result<WriteTracker> {
    WriteTracker::begin(process, &mut |nr, args| space.call_through(nr, args))
}
