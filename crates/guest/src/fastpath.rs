//! Calls on delegated files that do not trap at all. Frequently used call sites in the program are
//! patched to jump to code in the reserved range ([`code`], [`sites`]), which reads, writes and
//! seeks in the parts of those files that the shim has published there (compare rr's syscallbuf).
//!
//! Shim and guest share only the guest's own memory: a table and two buffers in the reserved range.
//! They write these in turns.
//! With one thread:
//! * The shim writes them while the thread is in a trap, right before it replies to a call on a
//!   delegated file ([`Fastpath::publish`]).
//! * From then on the offsets of the published files are in the table only, and the data written to
//!   them is in the buffers only, until the thread traps again or is stopped. Then the shim
//!   reclaims them ([`Fastpath::reclaim`]) before anything reads the state of the files. So every
//!   call that goes home is preceded by all pending writes, and the thread is never inside the code
//!   while the table is read.
//! * While the thread runs, the shim only clears the flags at the beginning of the table: nothing
//!   is published any more ([`Fastpath::unpublish`]). An operation that the code has already begun
//!   still completes, and counts as made before the flags were cleared.
//!
//! No thread is observed inside the code: before the shim reads a stopped thread's registers, or
//! lets a handler run, it moves the thread out ([`Fastpath::step_out`]), to a point before or after
//! its call. A fault inside the code is a fault on the program's buffer: the program's own
//! `syscall` makes the call again, and home or the shim reports the error.
//!
//! This is used only in processes with memory of their own. Before another process is created, and
//! before the memory is sent elsewhere, the original code is restored ([`Fastpath::unpatch`]).
//!
//! **Programs with several threads** have no published files, only connections. While the table has
//! any, each thread that is not in a trap or stopped may be inside the code. After they are removed from
//! the table, it may still be, until it traps or stops ([`Fastpath::unpublished`]); before anything
//! changes that such a thread may rely on, it is stopped. So a thread may read the table while the shim
//! writes it: it may use the members of the old sets as well as those of the new ones. Code is changed
//! only while all threads are stopped ([`Guest::change_code`](crate::process::Guest::change_code)),
//! since a thread may execute the bytes meanwhile.
//!
//! **Local files** ([`crate::files::local`]) and **connections** ([`crate::files::connections`]) are
//! not published: the code makes the system call itself, without a trap. Their descriptors are in the
//! table while anything is published, and until the shim reclaims the files the program counts as
//! being inside a call that was let through. While connections are in the table, no file is
//! published: a call on a connection may tell others what was written, or the program that a file has
//! changed.
//!
//! **The process's CPU time** is also read without a trap, by programs with patched sites: the time
//! that this kernel has counted, plus home's last report ([`crate::time::cpu::HomeCpuTime`]), plus
//! the time used on other nodes. The shim updates the table whenever it has replied to such a call.
//!
//! The guest can write anything to the table and the buffers. The shim checks all that it reads
//! there, and wrong data can harm only the guest's own files.

mod clock;
mod code;
mod descriptors;
mod patching;
mod places;
mod sites;
mod slots;

use crate::files::cache::FileCache;
use crate::files::cache::publish::Publishable;
use crate::files::limits::{FASTPATH_BUFFER_LEN, FASTPATH_TABLE, MAX_OFFSET_BITS};
use clock::CpuClock;
pub(crate) use descriptors::NativeDescriptors;
use places::Stage;
use sites::{CodeCave, PatchedSite};
use slots::{PUBLICATION_TERM, Slot};
use std::collections::HashMap;
use std::time::Instant;
use tern_image::Reserve;
use tern_tracee::registers::Registers;
use tern_tracee::{Memory, PAGE, Result};

/// Transfers larger than this are not worth the additional copy.
const MAX_PUBLISHED_TRANSFER: u64 = 32 << 10;
/// Where the buffers begin in the reserved range.
const BUFFERS: u64 = FASTPATH_TABLE + PAGE;

/// The patched call sites of a process, and the data that is published to them.
#[derive(Debug, Default)]
pub(crate) struct Fastpath {
    /// Whether sites may be patched.
    pub(crate) is_allowed: bool,
    /// The number of calls on delegated files and connections, by their return address and number. The
    /// shim tries to patch a site when this number reaches [`PATCH_THRESHOLD`].
    counts: HashMap<(u64, u32), u32>,
    sites: Vec<PatchedSite>,
    /// Calls whose sites are to be patched when all threads are stopped.
    waiting_calls: Vec<(u64, u32)>,
    /// The program's code is to be restored when all threads are stopped.
    must_unpatch: bool,
    /// How often threads could not be stopped to patch sites.
    failed_stops: u32,
    /// Number of records that sites have used.
    records: usize,
    caves: Vec<CodeCave>,
    slots: [Slot; 2],
    /// The slot that was assigned last.
    last: usize,
    native: NativeCalls,
    clock: Option<CpuClock>,
}

/// The state of local files and connections. The code makes the calls on them itself.
#[derive(Debug, Default)]
struct NativeCalls {
    /// A call on a local file was let through while sites were patched. Only then are local files
    /// put into the table.
    has_local_files: bool,
    /// The descriptors in the table are valid.
    is_published: bool,
    /// How often they were removed from the table.
    unpublished: u64,
    /// The program may have made calls on them, or be in one.
    in_use: bool,
    /// There are connections among them.
    has_connections: bool,
    /// The call that was let through when they were published is on a connection.
    is_in_let_through: bool,
    /// When the publication ends, because of local files.
    until: Option<Instant>,
    /// The sets in the table.
    written: NativeDescriptors,
    /// The time stamp counter, and the time, at which they were first published.
    published_at: Option<(u64, Instant)>,
}

/// The address behind the first `syscall` of the code in this reserved range. Those of all records
/// follow each other; the filter of [`tern_syscall`] allows calls from them.
pub(crate) fn first_return_addr(reserve: Reserve) -> u64 {
    reserve.start + code::CODE + places::call(0) + 2
}

/// Whether this address is in the code of the fast path.
pub(crate) fn is_inside(addr: u64, reserve: Reserve) -> bool {
    addr.checked_sub(reserve.start + code::CODE).is_some_and(|at| places::stage(at).is_some())
}

fn buffer(reserve: Reserve, slot: usize) -> u64 {
    reserve.start + BUFFERS + slot as u64 * FASTPATH_BUFFER_LEN
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
    word.map_or(0, u64::from_le_bytes)
}

impl Fastpath {
    /// Whether the program's code is patched.
    pub(crate) fn is_patched(&self) -> bool {
        !self.sites.is_empty()
    }

    /// Publishes what can be published of this file and of the other files with a slot. The last
    /// call on this file has transferred `moved` bytes. The thread is in that call's trap, and the
    /// reply follows.
    pub(crate) fn publish(
        &mut self,
        (fd, moved): (i32, Option<u64>),
        files: &mut FileCache,
        connections: NativeDescriptors,
        (memory, reserve): (&Memory, Reserve),
    ) -> Result<()> {
        if !self.is_patched() {
            return Ok(());
        }
        if !self.slots.iter().any(|slot| slot.fd == fd) {
            let free = self.slots.iter().position(|slot| slot.fd < 0);
            self.last = free.unwrap_or(1 - self.last);
            self.slots[self.last] = Slot { fd, ..Slot::default() };
        }
        if let (Some(moved), Some(slot)) = (moved, self.slots.iter_mut().find(|slot| slot.fd == fd)) {
            slot.is_bulk = moved > MAX_PUBLISHED_TRANSFER;
        }
        self.republish(files, connections, memory, reserve)
    }

    /// Whether it has files that may be published again.
    pub(crate) fn has_files(&self) -> bool {
        self.native.has_local_files || self.slots.iter().any(|slot| slot.fd >= 0)
    }

    /// Has local files put into the table from now on, if sites are patched. Returns whether sites
    /// are patched.
    pub(crate) fn publish_local(&mut self) -> bool {
        self.native.has_local_files = self.is_patched();
        self.native.has_local_files
    }

    /// Publishes what can be published of the files with a slot, or else these connections.
    pub(crate) fn republish(
        &mut self,
        files: &mut FileCache,
        connections: NativeDescriptors,
        memory: &Memory,
        reserve: Reserve,
    ) -> Result<()> {
        let mut table = [0; code::RECORDS];
        let has_connections = !connections.is_empty();
        let mut published_len = 0;
        for (at, slot) in self.slots.iter_mut().enumerate() {
            let buffer_addr = buffer(reserve, at);
            match (slot.fd >= 0 && !has_connections).then(|| files.publish(slot.fd, published_len)).flatten()
            {
                Some(Publishable::Reads { offset, read_ahead }) => {
                    let read_ahead = read_ahead.filter(|_| !slot.is_bulk);
                    slot.publish_read(offset, read_ahead, memory, buffer_addr)?;
                }
                Some(Publishable::Writes { offset, len }) => {
                    let len = len.min(FASTPATH_BUFFER_LEN);
                    published_len += len;
                    slot.publish_write(offset, len);
                }
                None => *slot = Slot::default(),
            }
            table[at] = slot.kind;
            let bytes = &mut table[code::SLOTS + at * code::SLOT..][..code::SLOT];
            bytes[..4].copy_from_slice(&slot.fd.to_le_bytes());
            for (n, word) in [slot.offset, slot.start, slot.end, buffer_addr].into_iter().enumerate() {
                bytes[8 + 8 * n..][..8].copy_from_slice(&word.to_le_bytes());
            }
        }
        let mut native = connections;
        let mut until = None;
        if self.native.has_local_files {
            // A call on a connection may tell the program that a shared file has changed.
            let local: Vec<i32> = files.local_fds(!has_connections).collect();
            if !local.is_empty() {
                files.enter_native_call();
                // The server that opened them may be replaced by one without their state.
                let latest = Instant::now() + PUBLICATION_TERM;
                until = Some(files.valid_until().map_or(latest, |valid| valid.min(latest)));
            }
            local.into_iter().for_each(|fd| native.add_file(fd));
        }
        if !native.is_empty() {
            if native != self.native.written {
                memory.write(reserve.start + code::TABLE + code::DESCRIPTOR_SETS as u64, native.bytes())?;
                self.native.written = native;
            }
            table[code::NATIVE] = 1;
            (self.native.is_published, self.native.in_use) = (true, true);
            (self.native.has_connections, self.native.until) = (has_connections, until);
            self.native.published_at.get_or_insert_with(|| (places::time_stamp_counter(), Instant::now()));
        } else if std::mem::take(&mut self.native.is_published) {
            self.native.unpublished += 1;
        }
        if let Some(clock) = &mut self.clock {
            clock.is_published = Instant::now() < clock.until;
            table[code::CLOCK] = clock.is_published.into();
            table[code::CLOCK_OFFSET..][..16].copy_from_slice(&clock.bytes());
        }
        memory.write(reserve.start + code::TABLE, &table)
    }

    /// Reclaims what is published: the files get their current offsets and pending writes, and the
    /// code does nothing with them any more. The thread is not inside the code.
    pub(crate) fn reclaim(&mut self, files: &mut FileCache, memory: &Memory, reserve: Reserve) -> Result<()> {
        if !self.may_be_in_use() {
            return Ok(());
        }
        (self.native.in_use, self.native.has_connections) = (false, false);
        self.native.is_in_let_through = false;
        let mut table = [0; code::RECORDS];
        memory.read(reserve.start + code::TABLE, &mut table)?;
        self.unpublish(memory, reserve)?;
        for (at, slot) in self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.in_use) {
            slot.in_use = false;
            let bytes = &table[code::SLOTS + at * code::SLOT..];
            let (offset, pread_end) = (word(bytes, 8), word(bytes, 40));
            if slot.writes {
                // An offset that the code cannot have written counts as nothing written.
                let length = offset.checked_sub(slot.start).filter(|length| *length <= slot.end - slot.start);
                let mut bytes = vec![0; length.unwrap_or(0) as usize];
                memory.read(buffer(reserve, at), &mut bytes)?;
                files.reclaim_written(slot.fd, bytes, slot.since);
            } else {
                let offset = if offset >> MAX_OFFSET_BITS == 0 { offset } else { slot.offset };
                files.reclaim_read(slot.fd, offset, (pread_end != 0).then_some(pread_end));
            }
        }
        Ok(())
    }

    /// Stops publishing; the thread may be running. Its effects so far must still be reclaimed.
    pub(crate) fn unpublish(&mut self, memory: &Memory, reserve: Reserve) -> Result<()> {
        let clock = self.clock.as_mut().is_some_and(|clock| std::mem::take(&mut clock.is_published));
        if self.slots.iter().all(|slot| slot.kind == 0) && !self.native.is_published && !clock {
            return Ok(());
        }
        self.slots.iter_mut().for_each(|slot| slot.kind = 0);
        self.native.unpublished += u64::from(std::mem::take(&mut self.native.is_published));
        memory.write(reserve.start + code::TABLE, &[0; 8])
    }

    /// Changes the registers of a stopped thread such that it is outside the code. Returns what it
    /// was doing there, if it was inside.
    pub(crate) fn step_out(
        &self,
        registers: &mut Registers,
        memory: &Memory,
        reserve: Reserve,
    ) -> Result<Option<Stage>> {
        let table = reserve.start + code::TABLE;
        let saved = |at: usize| memory.word(table + at as u64);
        if let Some((site, to)) =
            self.sites.iter().find_map(|site| Some((site, site.in_program(registers.rip)?)))
        {
            registers.rip = to;
            if let Some(nr) = site.pattern.nr.filter(|_| to == site.pattern.call()) {
                registers.rax = nr.into();
            }
            return Ok(Some(Stage::Selects));
        }
        let stage = registers.rip.checked_sub(reserve.start + code::CODE).and_then(places::stage);
        let Some(stage) = stage.filter(|_| self.is_patched()) else { return Ok(None) };
        let record = match stage {
            Stage::Calls(record) | Stage::Returned(record) => table + code::record(record) as u64,
            Stage::Selects | Stage::Checks | Stage::Reads | Stage::Times => registers.rcx,
            Stage::Claims | Stage::Copies | Stage::Done => saved(code::CURRENT_RECORD)?,
        };
        let mut records =
            self.sites.iter().flat_map(|site| site.records.iter().map(move |record| (site, record)));
        let found = records.find(|(_, (number, _))| table + code::record(*number) as u64 == record);
        let Some((site, &(_, nr))) = found else {
            return Err(tern_tracee::Error::Inconsistent {
                what: "at an address in the fast path that belongs to no site".into(),
                pid: memory.pid(),
            });
        };
        let call = site.pattern.call();
        let has_result = match stage {
            Stage::Done => true,
            Stage::Returned(_) => !sites::is_clock(nr),
            _ => false,
        };
        if has_result {
            registers.rip = call + 2;
            return Ok(Some(stage));
        }
        registers.rip = call;
        if stage != Stage::Selects {
            registers.rax = nr.into();
        }
        // If the kernel has made the call (that of the clock), the program makes it again.
        registers.orig_rax = u64::MAX;
        if stage == Stage::Times {
            registers.rdx = registers.r11;
        }
        if stage == Stage::Copies {
            (registers.rdi, registers.rsi) = (saved(code::SAVED_RDI)?, saved(code::SAVED_RSI)?);
        }
        Ok(Some(stage))
    }

    /// If a thread with these registers is behind a `syscall` of the code, or in it: its record.
    fn record_of_call(&self, registers: &Registers, reserve: Reserve) -> Option<usize> {
        match places::stage(registers.rip.checked_sub(reserve.start + code::CODE)?)? {
            Stage::Returned(record) => Some(record),
            _ => None,
        }
    }

    /// When a file must be reclaimed or a publication must end, whichever comes first.
    pub(crate) fn due(&self) -> Option<Instant> {
        let due = |slot: &Slot| slot.in_use && (slot.writes || slot.kind != 0);
        let local = self.native.until.filter(|_| self.native.is_published);
        let clock = self.clock.as_ref().filter(|clock| clock.is_published).map(|clock| clock.until);
        self.slots.iter().filter(|slot| due(slot)).map(|slot| slot.until).chain(local).chain(clock).min()
    }

    /// Whether a file must be reclaimed now, and whether a publication must end now.
    pub(crate) fn due_actions(&self) -> (bool, bool) {
        let now = Instant::now();
        let due = || self.slots.iter().filter(|slot| slot.in_use && slot.until <= now);
        let local = self.native.is_published && self.native.until.is_some_and(|until| until <= now);
        let clock = self.clock.as_ref().is_some_and(|clock| clock.is_published && clock.until <= now);
        (due().any(|slot| slot.writes), local || clock || due().any(|slot| !slot.writes && slot.kind != 0))
    }

    /// Publishes the process's CPU time: what this node's kernel has counted plus `offset`
    /// nanoseconds, until `until`. The thread is in a trap.
    pub(crate) fn publish_cpu_time(
        &mut self,
        (offset, until): (i64, Instant),
        memory: &Memory,
        reserve: Reserve,
    ) -> Result<()> {
        const SECOND: i64 = 1_000_000_000;
        let clock = CpuClock {
            offset: (offset.div_euclid(SECOND), offset.rem_euclid(SECOND)),
            until,
            is_published: true,
        };
        let table = reserve.start + code::TABLE;
        memory.write(table + code::CLOCK_OFFSET as u64, &clock.bytes())?;
        memory.write(table + code::CLOCK as u64, &[1])?;
        self.clock = Some(clock);
        Ok(())
    }

    /// Stops publishing the CPU time, because home's part changes.
    pub(crate) fn unpublish_cpu_time(&mut self, memory: &Memory, reserve: Reserve) -> Result<()> {
        match self.clock.take() {
            Some(clock) if clock.is_published => {
                memory.write(reserve.start + code::TABLE + code::CLOCK as u64, &[0])
            }
            _ => Ok(()),
        }
    }

    /// Whether something was published that has not been reclaimed since.
    pub(crate) fn may_be_in_use(&self) -> bool {
        self.native.in_use || self.slots.iter().any(|slot| slot.in_use)
    }

    /// Whether the program may have made calls on connections, or be in one.
    pub(crate) fn may_use_connections(&self) -> bool {
        self.native.in_use && self.native.has_connections
    }

    /// Records that a call on a connection is about to be let through.
    pub(crate) fn enter_connection_call(&mut self) {
        self.native.is_in_let_through = true;
    }

    /// Whether the program has made a call on a connection, perhaps, since they were published.
    pub(crate) fn has_used_connections(&self, memory: &Memory, reserve: Reserve) -> Result<bool> {
        if !self.may_use_connections() {
            return Ok(false);
        }
        let mut made = [0];
        memory.read(reserve.start + code::TABLE + code::CALL_MADE as u64, &mut made)?;
        Ok(self.native.is_in_let_through || made != [0])
    }

    /// Whether there are connections in the table.
    pub(crate) fn has_published_connections(&self) -> bool {
        self.native.is_published && self.native.has_connections
    }

    /// How often the descriptors were removed from the table. A thread that has trapped, or was stopped
    /// outside the code, since then is outside, until they are published again.
    pub(crate) fn unpublished(&self) -> u64 {
        self.native.unpublished
    }

    /// If a stopped thread is in a call that the code has made, or right behind it: when it began to
    /// wait, if the call does. A wait without a limit begins now.
    pub(crate) fn native_call_began(
        &self,
        registers: &Registers,
        memory: &Memory,
        reserve: Reserve,
    ) -> Result<Option<Instant>> {
        let Some(record) = self.record_of_call(registers, reserve) else { return Ok(None) };
        let Some((first, published_at)) = self.native.published_at else { return Ok(Some(Instant::now())) };
        let entry = (code::record(record) + code::WAITS) as u64 + code::wait_entry(registers.fs_base);
        let mut words = [0; 16];
        memory.read(reserve.start + code::TABLE + entry, &mut words)?;
        let (began, fs_base) = (word(&words, 0), word(&words, 8));
        let (now, last) = (Instant::now(), places::time_stamp_counter().max(first + 1));
        if fs_base != registers.fs_base {
            return Ok(Some(now));
        }
        let part = (began.clamp(first, last) - first) as f64 / (last - first) as f64;
        Ok(Some(published_at + now.saturating_duration_since(published_at).mul_f64(part)))
    }
}

#[cfg(test)]
mod tests;
