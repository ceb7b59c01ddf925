//! Patching the program's call sites, and restoring its code.

use super::sites::{self, CodeCave, CodePattern, PatchedSite};
use super::slots::Slot;
use super::{Fastpath, NativeCalls, code, places};
use std::ops::Range;
use tern_image::Reserve;
use tern_tracee::{Memory, Result, procfs};

/// A site is patched after this many calls.
const PATCH_THRESHOLD: u32 = 64;
/// After a failure to stop all threads, twice as many calls are needed, this many times at most.
const MAX_FAILED_STOPS: u32 = 16;
/// Limit for the calls that are counted.
const MAX_COUNTED_CALLS: usize = 64;

impl Fastpath {
    /// Counts a call on a delegated file or connection, and patches its call site if that is used often
    /// enough. The thread is in the call's trap. If there are `others`, the site is patched when all
    /// threads are stopped.
    pub(crate) fn count_call(
        &mut self,
        call: (u64, u32),
        others: bool,
        memory: &Memory,
        reserve: Reserve,
    ) -> Result<()> {
        let (return_addr, nr) = call;
        if !self.is_allowed || places::entry(nr).is_none() {
            return Ok(());
        }
        if self.counts.len() >= MAX_COUNTED_CALLS && !self.counts.contains_key(&call) {
            self.counts.clear();
        }
        let count = self.counts.entry(call).or_default();
        *count = count.saturating_add(1);
        let can_patch = *count == PATCH_THRESHOLD << self.failed_stops
            && self.records < code::MAX_RECORDS
            && match self.site_of(return_addr) {
                Some(site) => site.pattern.nr.is_none() && !site.has(nr),
                None => CodePattern::of(memory, return_addr, nr)?.is_some(),
            };
        if !can_patch {
            return Ok(());
        }
        if !others {
            return self.patch(call, memory, reserve);
        }
        // Calls that will soon be made often enough are patched in the same stop.
        for (call, count) in &mut self.counts {
            // Only programs with one thread read the CPU time here.
            if (PATCH_THRESHOLD / 4..=PATCH_THRESHOLD).contains(count) && !sites::is_clock(call.1) {
                *count = PATCH_THRESHOLD + 1;
                self.waiting_calls.push(*call);
            }
        }
        Ok(())
    }

    /// Patches a call site for calls of this number, if possible. All threads are stopped, or the only
    /// one is in a trap.
    fn patch(&mut self, (return_addr, nr): (u64, u32), memory: &Memory, reserve: Reserve) -> Result<()> {
        let record = (self.records, nr);
        if !self.is_allowed || record.0 >= code::MAX_RECORDS {
            return Ok(());
        }
        let (code, table) = (reserve.start + code::CODE, reserve.start + code::TABLE);
        if let Some(site) = self.site_of(return_addr) {
            if site.pattern.nr.is_none() && !site.has(nr) {
                site.add_record(record, (code, table), memory)?;
                self.records += 1;
            }
            return Ok(());
        }
        let Some(pattern) = CodePattern::of(memory, return_addr, nr)? else { return Ok(()) };
        if !self.caves.iter().any(|cave| cave.contains(pattern.start)) {
            let maps = procfs::maps(memory.pid())?;
            self.caves.extend(CodeCave::find(pattern.start, &maps, memory));
        }
        let cave = self.caves.iter_mut().find(|cave| cave.contains(pattern.start) && cave.accepts(nr));
        let Some(trampoline) = cave.and_then(CodeCave::allocate) else { return Ok(()) };
        if self.sites.is_empty() {
            self.is_allowed = memory.write_forced(code, places::bytes()).is_ok();
            memory.write(table, &[0; code::RECORDS])?;
            self.slots = <[Slot; 2]>::default();
        }
        let Some(site) = PatchedSite::new(pattern, trampoline, record, table) else { return Ok(()) };
        site.write_record(record, (code, table), memory)?;
        if self.is_allowed && site.patch(memory) {
            tracing::debug!(pid = memory.pid(), site = return_addr, nr, "a call site was patched");
            self.records += 1;
            self.sites.push(site);
        }
        Ok(())
    }

    /// The patched site whose calls return to this address.
    fn site_of(&mut self, return_addr: u64) -> Option<&mut PatchedSite> {
        self.sites.iter_mut().find(|site| site.pattern.call() + 2 == return_addr)
    }

    /// Whether the program's code is to be changed when all threads are stopped.
    pub(crate) fn awaits_stop(&self) -> bool {
        self.must_unpatch || !self.waiting_calls.is_empty()
    }

    /// Has the program's code restored when all threads are stopped, if it is patched. Returns whether it
    /// is.
    pub(crate) fn request_unpatch(&mut self) -> bool {
        self.give_up_patching();
        self.must_unpatch |= self.is_patched();
        self.must_unpatch
    }

    /// Whether the program's code is to be restored when all threads are stopped.
    pub(crate) fn must_unpatch(&self) -> bool {
        self.must_unpatch
    }

    /// Has the sites that wait for all threads to be stopped wait for longer: the threads cannot be
    /// stopped now.
    pub(crate) fn postpone_patching(&mut self) {
        self.give_up_patching();
        self.failed_stops = MAX_FAILED_STOPS.min(self.failed_stops + 1);
    }

    /// Does not patch the sites that wait for all threads to be stopped, before they have been used as
    /// often again.
    fn give_up_patching(&mut self) {
        for call in self.waiting_calls.drain(..) {
            self.counts.remove(&call);
        }
    }

    /// Changes the program's code as requested. All threads are stopped, outside the fast path.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn change_code(&mut self, memory: &Memory, reserve: Reserve) -> Result<()> {
        let waiting = std::mem::take(&mut self.waiting_calls);
        if std::mem::take(&mut self.must_unpatch) {
            self.unpatch(memory);
            return Ok(());
        }
        waiting.into_iter().try_for_each(|call| self.patch(call, memory, reserve))
    }

    /// Restores the program's code. The thread is not inside the fast path.
    pub(crate) fn unpatch(&mut self, memory: &Memory) {
        for site in self.sites.drain(..) {
            site.restore(memory);
        }
        self.waiting_calls.clear();
        self.records = 0;
        self.caves.clear();
        self.slots = <[Slot; 2]>::default();
        self.native = NativeCalls { unpublished: self.native.unpublished + 1, ..NativeCalls::default() };
        self.clock = None;
        // A site that was used often is patched again after half as many calls.
        self.counts.values_mut().for_each(|count| *count = (*count).min(PATCH_THRESHOLD / 2));
    }

    /// Runs `work` with the original code of the vDSO. Sites in it are patched only if there is one
    /// thread, and this is stopped.
    pub(crate) fn with_original_vdso<T>(
        &self,
        vdso: &Range<u64>,
        memory: &Memory,
        work: impl FnOnce() -> T,
    ) -> T {
        let sites = || self.sites.iter().filter(|site| vdso.contains(&site.pattern.start));
        sites().for_each(|site| site.restore(memory));
        let done = work();
        for site in sites() {
            // If this fails, its calls trap.
            let _patched = site.patch(memory);
        }
        done
    }
}
