//! Finds the pages of a process that have content of their own (PAGEMAP_SCAN, Linux 6.7; before
//! that /proc/PID/pagemap).

use crate::error::{Error, Result};
use crate::{PAGE, TASK_END};
use std::cell::RefCell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// `_IOWR('f', 16, struct pm_scan_arg)`
const PAGEMAP_SCAN: u64 = 0xc060_6610;
const WRITTEN: u64 = 1 << 1;
const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const ZERO: u64 = 1 << 5;
/// A guard page (MADV_GUARD_INSTALL), since Linux 6.16.
const GUARD: u64 = 1 << 8;
const WP_MATCHING: u64 = 1 << 0;
const CHECK_WPASYNC: u64 = 1 << 1;
/// Maximum number of regions that one call returns. A gigabyte of which every tenth page is dirty
/// has 26,000.
const MAX_REGIONS: usize = 8192;
/// Maximum number of pages in one part of a scan, so that one call can return them all as separate
/// regions.
const PART_PAGES: u64 = MAX_REGIONS as u64;

#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// A run of pages: first address, and length in bytes.
pub type Run = (u64, u64);

/// The page map of one process.
#[derive(Debug)]
pub struct Pagemap {
    pid: i32,
    file: File,
    /// Whether the kernel supports PAGEMAP_SCAN.
    has_pagemap_scan: bool,
    /// [`GUARD`], or 0 if the kernel does not report guard pages.
    guard: u64,
    /// Buffer for the regions that a call returns.
    regions: RefCell<Vec<Region>>,
}

/// Pages of a range written since the last scan.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Pages with content.
    pub content: Vec<Run>,
    /// Pages that were written and then discarded: they read as zeroes, or as their file.
    pub dropped: Vec<Run>,
}

impl Pagemap {
    /// Opens the page map of a process.
    ///
    /// # Errors
    /// If the process is gone, or may not be traced.
    pub fn open(pid: i32) -> Result<Self> {
        let file = File::open(format!("/proc/{pid}/pagemap")).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::Gone { pid },
            _ => Error::from_io("open pagemap", pid, e),
        })?;
        let regions = RefCell::new(vec![Region::default(); MAX_REGIONS]);
        let mut map = Self { pid, file, has_pagemap_scan: true, guard: GUARD, regions };
        map.has_pagemap_scan = map.scan(0, 0, ScanArg::default(), |_| ()).is_ok();
        let guards = ScanArg { return_mask: GUARD, ..ScanArg::default() };
        if map.scan(0, 0, guards, |_| ()).is_err() {
            map.guard = 0;
        }
        Ok(map)
    }

    /// Scans from `start`, either everything or up to `query.max_pages` matching pages. Returns where
    /// it stopped.
    fn scan(
        &self,
        start: u64,
        end: u64,
        query: ScanArg,
        mut each: impl FnMut(&Region),
    ) -> std::io::Result<u64> {
        let mut regions = self.regions.borrow_mut();
        let mut at = start;
        loop {
            let mut arg = ScanArg {
                size: size_of::<ScanArg>() as u64,
                start: at,
                end,
                vec: regions.as_mut_ptr() as u64,
                vec_len: MAX_REGIONS as u64,
                ..query
            };
            // SAFETY: `arg` has the size it states, and `regions` has space for `vec_len` regions.
            let n = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN as _, &raw mut arg) };
            let n = usize::try_from(n).map_err(|_e| std::io::Error::last_os_error())?;
            regions.iter().take(n).for_each(&mut each);
            let stopped = (at < arg.walk_end && arg.walk_end < end).then_some(arg.walk_end);
            match stopped {
                Some(stopped) if query.max_pages > 0 => return Ok(stopped),
                Some(stopped) if n == MAX_REGIONS => at = stopped,
                _ => return Ok(end),
            }
        }
    }

    /// The pages that have content of the process's own: present or swapped, not zero, and not the
    /// file's. Scans one part from `start`, no further than `end`. Returns where the part ends.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn content(&self, start: u64, end: u64) -> Result<(Vec<Run>, u64)> {
        if !self.has_pagemap_scan {
            let end = end.min(start.saturating_add(PART_PAGES * PAGE));
            return Ok((self.content_from_entries(start, end)?, end));
        }
        let mut runs = Vec::new();
        let query = ScanArg {
            max_pages: PART_PAGES,
            category_inverted: ZERO | FILE | self.guard,
            category_mask: ZERO | FILE | self.guard,
            category_anyof_mask: PRESENT | SWAPPED,
            return_mask: PRESENT,
            ..ScanArg::default()
        };
        let done = self.scan(start, end, query, |r| push_run(&mut runs, (r.start, r.end - r.start)));
        Ok((runs, done.map_err(|e| Error::from_io("scan pages", self.pid, e))?))
    }

    /// The parts of a range that may have content, in units of one page table (2 MiB): those with a
    /// present or swapped page. The whole range if the kernel does not support PAGEMAP_SCAN.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn populated(&self, start: u64, end: u64) -> Result<Vec<Run>> {
        /// Bytes mapped by one page table.
        const TABLE_BYTES: u64 = 512 * PAGE;
        if !self.has_pagemap_scan {
            return Ok(vec![(start, end - start)]);
        }
        let mut runs: Vec<Run> = Vec::new();
        let any = PRESENT | SWAPPED;
        let query = ScanArg { category_anyof_mask: any, return_mask: any, ..ScanArg::default() };
        let done = self.scan(start, end, query, |r| {
            let from = (r.start & !(TABLE_BYTES - 1)).max(start);
            let to = r.end.next_multiple_of(TABLE_BYTES).min(end);
            match runs.last_mut() {
                Some(last) if last.0 + last.1 >= from => last.1 = last.1.max(to - last.0),
                _ => runs.push((from, to - from)),
            }
        });
        done.map(|_end| runs).map_err(|e| Error::from_io("scan pages", self.pid, e))
    }

    /// The guard pages (MADV_GUARD_INSTALL) of the whole address space. None before Linux 6.16, which
    /// does not report them; they exist since Linux 6.13.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn guards(&self) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        if self.guard != 0 {
            let query = ScanArg { category_mask: GUARD, return_mask: GUARD, ..ScanArg::default() };
            self.scan(0, TASK_END, query, |r| push_run(&mut runs, (r.start, r.end - r.start)))
                .map_err(|e| Error::from_io("scan guard pages", self.pid, e))?;
        }
        Ok(runs)
    }

    fn content_from_entries(&self, start: u64, end: u64) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        let mut entries = vec![0u8; 8 << 12];
        let mut at = start;
        while at < end {
            let want = usize::try_from((end - at) / PAGE).unwrap_or(usize::MAX).min(entries.len() / 8);
            let part = &mut entries[..want * 8];
            self.file
                .read_exact_at(part, at / PAGE * 8)
                .map_err(|e| Error::from_io("read pagemap", self.pid, e))?;
            for entry in part.as_chunks::<8>().0 {
                let entry = u64::from_le_bytes(*entry);
                let (present, swapped, file) = (entry >> 63 & 1, entry >> 62 & 1, entry >> 61 & 1);
                if (present | swapped) == 1 && file == 0 {
                    push_run(&mut runs, (at, PAGE));
                }
                at += PAGE;
            }
        }
        Ok(runs)
    }

    /// Returns the pages in `[start, end)` written since the last call, and write-protects the
    /// range again. `None` unless writes are tracked in the whole range (see
    /// [`crate::write_tracker`]).
    ///
    /// # Errors
    /// If the process is gone.
    pub fn written(&self, start: u64, end: u64) -> Result<Option<Written>> {
        let query = ScanArg { category_mask: WRITTEN, ..ScanArg::default() };
        Ok(self.scan_and_protect(start, end, query)?.map(|(written, _end)| written))
    }

    /// Like [`Self::content`], and write-protects the part; `None` as in [`Self::written`]. Each
    /// page is examined and protected in one step, so that a page written meanwhile is either found
    /// or counts as written afterwards. In a range that was protected before, pages never touched
    /// are returned as well: the kernel reports them as swapped.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn content_and_protect(&self, start: u64, end: u64) -> Result<Option<(Vec<Run>, u64)>> {
        // Pages that were protected before and not written since are content too.
        let query = ScanArg {
            max_pages: PART_PAGES,
            category_anyof_mask: WRITTEN | PRESENT | SWAPPED,
            ..ScanArg::default()
        };
        Ok(self.scan_and_protect(start, end, query)?.map(|(found, end)| (found.content, end)))
    }

    fn scan_and_protect(&self, start: u64, end: u64, query: ScanArg) -> Result<Option<(Written, u64)>> {
        let query = ScanArg {
            flags: WP_MATCHING | CHECK_WPASYNC,
            return_mask: WRITTEN | PRESENT | SWAPPED | FILE | ZERO | self.guard,
            ..query
        };
        let mut written = Written::default();
        let done = self.scan(start, end, query, |r| {
            // The kernel reports guard pages as swapped too.
            let has_content =
                r.categories & (PRESENT | SWAPPED) != 0 && r.categories & (FILE | ZERO | GUARD) == 0;
            let runs = if has_content { &mut written.content } else { &mut written.dropped };
            push_run(runs, (r.start, r.end - r.start));
        });
        match done {
            Ok(end) => Ok(Some((written, end))),
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => Ok(None),
            Err(e) => Err(Error::from_io("scan written pages", self.pid, e)),
        }
    }
}

/// Adds a run behind others, and joins it with the last one if they are adjacent.
pub fn push_run(runs: &mut Vec<Run>, (start, len): Run) {
    match runs.last_mut() {
        Some(last) if last.0 + last.1 == start => last.1 += len,
        _ => runs.push((start, len)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guard_pages_are_found_and_have_no_content() {
        const MADV_GUARD_INSTALL: i32 = 102;
        let (len, prot) = (4 * PAGE as usize, libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, which only this test uses, and which stays until the test ends.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        // SAFETY: the mapping is writable.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 7, len) };
        let at = start.addr() as u64;
        let map = Pagemap::open(std::process::id() as i32).unwrap();
        let found = || {
            let own = |run: &Run| run.0 >= at && run.0 < at + len as u64;
            let guards: Vec<Run> = map.guards().unwrap().into_iter().filter(own).collect();
            (guards, map.content(at, at + len as u64).unwrap().0)
        };
        assert_eq!(found(), (vec![], vec![(at, 4 * PAGE)]));
        // SAFETY: one page of the mapping.
        let installed =
            unsafe { libc::madvise(start.byte_add(PAGE as usize), PAGE as usize, MADV_GUARD_INSTALL) };
        if installed == 0 && map.guard != 0 {
            assert_eq!(found(), (vec![(at + PAGE, PAGE)], vec![(at, PAGE), (at + 2 * PAGE, 2 * PAGE)]));
        }
    }
}
