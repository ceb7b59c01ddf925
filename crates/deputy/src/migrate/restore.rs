//! A deputy becomes the process again.
//!
//! The skeleton of its address space is still there, so only differences are mapped, and only pages
//! with content are transferred. Then each thread's last call is resolved
//! ([`crate::migrate::syscall_restart`]). Threads whose call the deputy must finish are draining.

use crate::migrate::home_wait::can_measure_sleeps;
use crate::migrate::syscall_restart::CallResolution;
use crate::process::Process;
use crate::process::blob;
use crate::process::space::HomeSpace;
use crate::process::state::State;
use crate::process::thread::Draining;
use crate::shim::Shim;
use crate::signals::order::raise_natively;
use std::collections::HashMap;
use tern_ids::HomePid;
use tern_image::futex_wait::continue_wait;
use tern_image::layout::Layout;
use tern_image::{ProcessImage, Reserve, ThreadImage, apply, guards};
use tern_migrate::message::{CallRequest, ProcessSync};
use tern_migrate::target;
use tern_tracee::inject::{Injection, Site};
use tern_tracee::pagemap::Run;
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::registers::Registers;
use tern_tracee::siginfo::Siginfo;
use tern_tracee::stop::{FOLLOW_THREADS, Stopped};
use tern_tracee::{Error, Memory, PAGE, Result};

/// A thread that is home, under injection, and the state that it continues with.
pub(super) struct RestoredThread<'a> {
    pub(super) injection: Injection,
    pub(super) image: &'a ThreadImage,
    pub(super) registers: Registers,
    pub(super) pending_signals: Vec<Siginfo>,
}

impl Process {
    pub(crate) fn injection(&self, stopped: Stopped) -> Result<(Injection, Reserve)> {
        let inconsistent = || Error::Inconsistent { what: "not a deputy".into(), pid: self.pid.0 };
        let reserve = self.reserve.ok_or_else(inconsistent)?;
        Ok((Injection::begin(stopped, Site(reserve.start + blob::call_site()))?, reserve))
    }

    /// Gives a stopped deputy this address space, and resumes it; it continues its call.
    ///
    /// # Errors
    /// If it is gone or a step fails.
    pub(crate) fn apply_layout(&mut self, stopped: Stopped, layout: &Layout) -> Result<()> {
        let reserve = match self.check_layout(layout) {
            Ok(reserve) => reserve,
            Err(error) => return self.resume_unnoticed(stopped).and(Err(error)),
        };
        let (mut injection, _) = self.injection(stopped)?;
        let now = procfs::smaps(self.memory.pid())?;
        let files: HashMap<(u64, u64), u32> =
            layout.files.iter().enumerate().map(|(at, f)| ((f.device, f.inode), at as u32)).collect();
        let identify = |m: &Mapping| files.get(&(m.device, m.inode)).copied();
        let mut steps = apply::plan(&now, layout, Some(reserve), &identify);
        // A later layout may need the mappings that keep files. They are unmapped with the reserved
        // range.
        let own_ranges = apply::joined(self.own_ranges(reserve).collect());
        let is_ours = |start: u64, end: u64| apply::overlaps(&own_ranges, start, end);
        steps.retain(|s| !matches!(s, apply::MapStep::Unmap { start, end } if is_ours(*start, *end)));
        let mut space = HomeSpace::new(&mut injection, &self.memory, reserve, &layout.files);
        space.open_files(&steps, &now, &self.files);
        // Those that the process has now arrive with its image. Nothing could be written to others.
        let done = guards::remove_all(self.memory.pid(), &mut space)
            .and_then(|()| apply::execute_plan(&steps, &mut space));
        let stopped = injection.finish()?;
        self.resume_unnoticed(stopped)?;
        done
    }

    fn check_layout(&self, layout: &Layout) -> Result<Reserve> {
        let inconsistent = |what: &str| Error::Inconsistent { what: what.into(), pid: self.pid.0 };
        layout.check().map_err(inconsistent)?;
        let reserve = self.reserve.ok_or_else(|| inconsistent("not a deputy"))?;
        let overlaps = |r: &tern_image::Region| {
            reserve.overlaps(r.start, r.end)
                || self.mailbox_ranges_outside(reserve).any(|(a, b)| r.start < b && a < r.end)
        };
        if layout.regions.iter().any(overlaps) {
            return Err(inconsistent("its node sent a layout that covers the reserved range"));
        }
        Ok(reserve)
    }

    /// The address ranges outside of the reserved range that are not part of the program:
    /// mailboxes, mappings for large calls, and mappings that keep files for the return home.
    pub(crate) fn own_ranges(&self, reserve: Reserve) -> impl Iterator<Item = (u64, u64)> {
        let others = self.own_mappings.ranges().chain(self.pending_placeholders());
        self.mailbox_ranges_outside(reserve).chain(others)
    }

    /// The address ranges of its mailboxes that are not in the reserved range.
    fn mailbox_ranges_outside(&self, reserve: Reserve) -> impl Iterator<Item = (u64, u64)> {
        self.threads.values().filter_map(|t| t.mailbox.as_ref()).flat_map(move |m| m.ranges_outside(reserve))
    }

    /// Writes pages to its memory. No thread need be stopped, since the deputy does not use them.
    ///
    /// # Errors
    /// If they lie outside its memory.
    pub(crate) fn write_pages(&mut self, runs: &[Run], bytes: &[u8]) -> Result<()> {
        if let Some(reserve) = self.reserve
            && runs.iter().any(|&(start, len)| {
                let end = start.saturating_add(len);
                reserve.overlaps(start, end)
                    || self.mailbox_ranges_outside(reserve).any(|(a, b)| start < b && a < end)
            })
        {
            return Err(Error::Inconsistent {
                what: "its node sent pages in the reserved range".into(),
                pid: self.pid.0,
            });
        }
        target::write_pages(&self.memory, runs, bytes)?;
        if let State::Returning(returning) = &mut self.state {
            returning
                .dropped_pages
                .retain(|page| !runs.iter().any(|(start, len)| (*start..start + len).contains(page)));
        }
        Ok(())
    }

    /// Drops pages of a stopped deputy, and resumes the deputy, which continues its call.
    ///
    /// # Errors
    /// If the process is gone.
    pub(crate) fn drop_pages(&mut self, stopped: Stopped, runs: &[Run]) -> Result<()> {
        let title = procfs::stat(stopped.pid())?.argument_pages();
        let (mut injection, reserve) = self.injection(stopped)?;
        let own_ranges: Vec<(u64, u64)> =
            self.mailbox_ranges_outside(reserve).chain([(reserve.start, reserve.end())]).collect();
        let is_safe = |&(s, l): &Run| !own_ranges.iter().any(|(a, b)| s < *b && *a < s.saturating_add(l));
        let mut safe: Vec<Run> = Vec::new();
        for &(start, len) in runs.iter().filter(|run| is_safe(run)) {
            let end = start.saturating_add(len);
            safe.extend(apply::subtract(start, end, [title].into_iter()).map(|(s, e)| (s, e - s)));
            if let State::Returning(returning) = &mut self.state {
                let pages = (start.max(title.0)..end.min(title.1)).step_by(PAGE as usize);
                returning.dropped_pages.extend(pages);
            }
        }
        let mut space = HomeSpace::new(&mut injection, &self.memory, reserve, &[]);
        let done = target::discard_pages(&mut space, self.pid.0, &safe);
        let stopped = injection.finish()?;
        self.resume_unnoticed(stopped)?;
        done
    }

    /// Restores everything of a process that is home except the state of its threads. `injections`
    /// are those of its threads that are under injection.
    fn restore(&mut self, injections: &mut [Injection], image: &ProcessImage) -> Result<()> {
        let pid = self.pid.0;
        let reserve = self.reserve.ok_or_else(|| Error::Inconsistent { what: "not a deputy".into(), pid })?;
        let first = injections.first_mut().ok_or(Error::Gone { pid })?;
        let mut space = HomeSpace::new(first, &self.memory, reserve, &[]);
        if let State::Returning(returning) = &mut self.state {
            let dropped_pages: Vec<Run> = returning.dropped_pages.iter().map(|page| (*page, PAGE)).collect();
            target::discard_pages(&mut space, pid, &dropped_pages)?;
        }
        image.restore(&mut space, &self.memory, reserve, None)?;
        // Opened through the thread under injection, since the first thread may have exited.
        let memory = Memory::open(first.pid())?;
        self.restore_timers(first, &memory, reserve)?;
        self.actions.clone_from(&image.actions);
        if !self.has_draining_threads() {
            return Ok(());
        }
        // A child that it forks at home from now on is not traced and must not inherit the range.
        reserve.set_inherited(first, false)
    }

    /// Restores the state of threads, which stay stopped. If they are the `last` threads of the
    /// process, the reserved range is unmapped.
    pub(super) fn finish_threads(&mut self, home: Vec<RestoredThread<'_>>, last: bool) -> Result<()> {
        let pid = self.pid.0;
        let reserve = self.reserve.ok_or_else(|| Error::Inconsistent { what: "not a deputy".into(), pid })?;
        // Opened through one of these threads: others may be home already, and gone.
        let readable = home.first().map_or(self.memory.pid(), |home| home.injection.pid());
        let memory = Memory::open(readable)?;
        let images: Vec<&ThreadImage> = home.iter().map(|home| home.image).collect();
        let (mut injections, rest): (Vec<Injection>, Vec<_>) =
            home.into_iter().map(|home| (home.injection, (home.registers, home.pending_signals))).unzip();
        let batch_area = if last { reserve.large_batch_area() } else { reserve.small_batch_area() };
        tern_image::thread::restore(&mut injections, &images, &memory, batch_area)?;
        let vdso = Site::in_vdso(&memory)?;
        let count = injections.len();
        for (at, ((mut injection, image), (registers, pending_signals))) in
            injections.into_iter().zip(images).zip(rest).enumerate()
        {
            // Its mappings stay until the reserved range is released, which draining threads still
            // need.
            if let Some(mailbox) = self.thread(image.tid)?.mailbox.take() {
                self.own_mappings.mailbox_dropped(&mailbox);
            }
            let own = (self.own_pid, image.own_tid);
            raise_natively(&mut injection, &memory, reserve, own, &pending_signals)?;
            let scratch = reserve.scratch();
            // Otherwise nothing could tell in which call the thread is, once its kernel has continued it.
            let until = image.futex_wait_until.filter(|_| can_measure_sleeps(injection.pid()));
            let (registers, wait_until) = continue_wait(until, registers, &mut injection, &memory, scratch)?;
            if last && at + 1 == count {
                injection.set_site(vdso);
                self.release_reserve(&mut injection, reserve)?;
            }
            injection.stopped()?.set_options(FOLLOW_THREADS)?;
            let stopped = injection.finish_with(&registers, image.sigmask)?;
            let thread = self.thread(image.tid)?;
            thread.clear_deputy_state();
            thread.set_futex_wait(wait_until, &registers);
            thread.stopped = Some(stopped);
        }
        Ok(())
    }
}

impl Shim {
    /// Everything of a process has arrived: the deputy becomes the process again. Threads whose
    /// last call is pending are draining, and the others are stopped. Returns the calls that
    /// draining threads are to make now; none if the deputy has ended.
    ///
    /// # Errors
    /// If it is gone, or the image is invalid.
    pub(crate) fn restore_process(
        &mut self,
        pid: HomePid,
        image: &ProcessImage,
        sync: &ProcessSync,
    ) -> Result<Option<Vec<(HomePid, CallRequest)>>> {
        let inconsistent = |what: &str| Error::Inconsistent { what: what.into(), pid: pid.0 };
        image.check().map_err(inconsistent)?;
        let Some(process) = self.processes.get(&pid) else { return Ok(None) };
        let known = process.live_threads().all(|thread| image.threads.iter().any(|t| t.tid == thread.tid));
        if !known
            || image.threads.len() != process.live_threads().count()
            || image.threads.len() != sync.threads.len()
        {
            return Err(inconsistent("its node sent a different set of threads"));
        }
        self.interrupt_all(pid)?;
        let mut resolutions = Vec::with_capacity(image.threads.len());
        for (thread, sync) in image.threads.iter().zip(&sync.threads) {
            resolutions.push(loop {
                let Some(stopped) = self.quiesce_thread(thread.tid)? else { return Ok(None) };
                self.take_result(pid, thread.tid);
                let Some(process) = self.processes.get_mut(&pid) else { return Ok(None) };
                match process.resolve_call(stopped, thread, sync)? {
                    CallResolution::Retry => std::thread::yield_now(),
                    resolution => break resolution,
                }
            });
        }
        let Some(process) = self.processes.get_mut(&pid) else { return Ok(None) };
        let (mut home, mut draining_stops, mut remainders) = (Vec::new(), Vec::new(), Vec::new());
        for ((thread, sync), resolution) in image.threads.iter().zip(&sync.threads).zip(resolutions) {
            // Signals that the guest has received but not delivered, then those it has not
            // received.
            let unacked = process.thread(thread.tid)?.unacked.drain(..);
            let unacked = unacked.filter(|(count, _)| *count > sync.signals).map(|(_, info)| info);
            let mut pending_signals: Vec<Siginfo> =
                sync.pending_signals.iter().filter_map(|i| i.as_slice().try_into().ok()).collect();
            pending_signals.extend(unacked);
            let (stopped, registers, rest, partial) = match resolution {
                CallResolution::Registers(stopped, registers) => {
                    let injection = process.injection(stopped)?.0;
                    home.push(RestoredThread { injection, image: thread, registers, pending_signals });
                    continue;
                }
                CallResolution::Drain(stopped, registers) => (stopped, registers, false, sync.partial),
                CallResolution::Remainder(stopped, registers, partial) => {
                    (stopped, registers, true, Some(partial))
                }
                CallResolution::Retry => continue,
            };
            if rest {
                remainders
                    .push((thread.tid, process.remainder_request(&registers, sync.call, sync.signals)?));
            }
            let image = ThreadImage { registers, ..thread.clone() };
            process.thread(thread.tid)?.release_for_draining(&stopped)?;
            process.thread(thread.tid)?.draining =
                Some(Box::new(Draining { image, pending_signals, partial }));
            draining_stops.push(stopped);
        }
        // If no thread is home, a draining one is used for the injections.
        let mut borrowed: Vec<Injection> = Vec::new();
        if home.is_empty()
            && let Some(stopped) = draining_stops.pop()
        {
            borrowed.push(process.injection(stopped)?.0);
        }
        match home.first_mut() {
            Some(home) => process.restore(std::slice::from_mut(&mut home.injection), image)?,
            None => process.restore(&mut borrowed, image)?,
        }
        for injection in borrowed {
            draining_stops.push(injection.finish()?);
        }
        let drains = !draining_stops.is_empty();
        process.finish_threads(home, !drains)?;
        for stopped in draining_stops {
            process.resume_unnoticed(stopped)?;
        }
        process.state = if drains { State::Draining } else { State::Resident };
        Ok(Some(remainders))
    }
}
