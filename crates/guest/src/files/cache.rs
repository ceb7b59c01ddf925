//! The cache of a process's delegated files: read-ahead, pending writes, and the offsets that home
//! has confirmed. It sends nothing itself; `files/io.rs` does.

mod conflict;
mod local_files;
mod open_close;
mod pending_closes;
pub(crate) mod publish;

use crate::files::limits::{CACHE_TERM, FASTPATH_BUFFER_LEN};
use crate::files::local::{LocalFile, LocalNode};
pub(crate) use conflict::Conflict;
use pending_closes::PendingCloses;
use std::collections::BTreeMap;
use std::time::Instant;
use tern_migrate::message::{FileDelegation, FileNotice};
use tern_migrate::prefetch::FileAttributes;
use tern_syscall::{Arg, ByteBuf, Call};

/// The smallest amount of read-ahead.
const MIN_READ_AHEAD: u64 = 16 << 10;
/// The largest amount: two buffers of the fast path.
const MAX_READ_AHEAD: u64 = 2 * FASTPATH_BUFFER_LEN;
/// Limits for the pending writes of all files together: bytes, and pieces.
const MAX_PENDING_BYTES: usize = 256 << 10;
const MAX_PENDING_WRITES: usize = 64;
/// Limit for the number of delegated files.
const MAX_DELEGATIONS: usize = 32;

/// The delegated files of a process.
#[derive(Debug, Default)]
pub(crate) struct FileCache {
    files: BTreeMap<i32, DelegatedFile>,
    /// Since when writes are pending.
    dirty_since: Option<Instant>,
    /// The number of the call whose prelude was sent and is not confirmed, and the steps of the
    /// prelude.
    in_flight: Option<(u64, Vec<(i32, PreludeStep)>)>,
    /// The number of a call, and how much of its prelude is confirmed: home may confirm it again.
    confirmed: (u64, usize),
    /// Incremented when read-ahead becomes invalid, including read-ahead that has not arrived yet.
    generation: u64,
    /// Descriptors in the guest whose local files are no longer delegated.
    stale_fds: Vec<i32>,
    /// The program may be inside a call that was let through, so the kernel's offset may change.
    in_native_call: bool,
    /// How often data was read ahead.
    fill_count: u64,
    /// The process shares its file descriptor table with another one, so no file is delegated.
    pub(crate) shares_fd_table: bool,
    /// All delegations are being returned; no new one is accepted.
    is_returning_all: bool,
    /// Files that are closed here and not at home.
    closing: PendingCloses,
    /// The data prefetched with the last closed file was not read, so no more is requested.
    skip_prefetch: bool,
    /// [`FileCache::generation`] when the last call of the program was sent home.
    request_generation: u64,
    /// The program has used locks. After it gets a lock, it must read at home what others wrote
    /// before they released that lock.
    has_used_locks: bool,
}

/// A delegated file: an open file that only this process has open.
#[derive(Debug)]
pub(crate) struct DelegatedFile {
    /// The delegation: offset, access modes, and identity of the file.
    pub(crate) delegation: FileDelegation,
    /// The deputy's offset.
    home_offset: u64,
    read_ahead: Option<ReadAhead>,
    /// The expected offset of the next read, and how much is then read ahead.
    expected_read: (u64, u64),
    /// Pending writes, in order.
    pending_writes: Vec<(u64, ByteBuf)>,
    /// The delegation ends as soon as home has everything.
    is_returning: bool,
    /// The file is on this node, or on a file system shared with it.
    pub(crate) local_file: Option<LocalFile>,
    /// When the last call was sent whose result reported the file as unchanged; none if a later
    /// result or signal has invalidated that.
    validated_at: Option<Instant>,
    /// Its offset and newest writes are in the fast path's table and buffers only
    /// (`cache/publish.rs`).
    is_published: bool,
    /// Its attributes when it was opened, and when home was asked for them. Dropped with the next
    /// result, signal, or transfer.
    attributes: Option<(FileAttributes, Instant)>,
    /// The data that came with its delegation has not been read yet.
    prefetch_unread: bool,
    /// The program has requested a lock or a lease on it, so others may wait for its close.
    may_hold_lock: bool,
}

/// Data that was read ahead.
#[derive(Debug)]
struct ReadAhead {
    start: u64,
    bytes: ByteBuf,
    /// The file ended after these bytes.
    is_eof: bool,
    /// A read has reported that end.
    end_reported: bool,
    /// The file was not changing when it was read, so the data serves more than the read that
    /// waited.
    is_stable: bool,
    since: Instant,
    /// The read that waited has got it.
    is_used: bool,
    /// Its sequence number.
    number: u64,
}

/// A piece of a file to be read ahead.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fill {
    pub(crate) fd: i32,
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// [`FileCache::generation`] when it was requested.
    pub(crate) generation: u64,
}

#[derive(Debug, Clone, Copy)]
enum PreludeStep {
    Write(usize),
    Seek(u64),
    Close,
}

impl FileCache {
    /// The delegated file of a descriptor.
    pub(crate) fn get(&mut self, fd: i32) -> Option<&mut DelegatedFile> {
        self.files.get_mut(&fd).filter(|file| !file.is_returning)
    }

    /// Whether the guest has this descriptor open on this node.
    pub(crate) fn is_local(&self, fd: i32) -> bool {
        self.files.get(&fd).is_some_and(DelegatedFile::is_local)
    }

    /// Whether home has not received all writes and closes.
    pub(crate) fn must_flush(&self) -> bool {
        !self.closing.fds().is_empty() || !self.files.values().all(DelegatedFile::has_no_pending_writes)
    }

    /// Whether no write is pending and the guest has no file open on this node.
    pub(crate) fn home_has_all_data(&self) -> bool {
        self.files.values().all(|file| file.has_no_pending_writes() && !file.is_local())
    }

    /// Whether home has all writes and offsets.
    pub(crate) fn is_clean(&self) -> bool {
        let no_writes = self.files.values().all(DelegatedFile::is_clean) && self.closing.fds().is_empty();
        self.in_flight.is_none() && no_writes && !self.must_await_native_call()
    }

    /// Starts to return all delegations, and accepts no new one.
    pub(crate) fn return_delegations(&mut self) {
        self.is_returning_all = true;
        self.files.values_mut().for_each(|file| file.is_returning = true);
        self.detach_local();
        self.files.retain(|_, file| !file.is_returned());
    }

    /// Accepts delegations again: the process continues here.
    pub(crate) fn allow_delegations(&mut self) {
        self.is_returning_all = false;
    }

    /// Drops all data that was read ahead.
    pub(crate) fn invalidate(&mut self) {
        self.generation += 1;
        self.files
            .values_mut()
            .for_each(|file| (file.read_ahead, file.attributes, file.validated_at) = (None, None, None));
    }

    /// Whether a write of `more` further bytes exceeds a limit for pending writes.
    pub(crate) fn would_exceed_limit(&self, more: usize) -> bool {
        let pieces = || self.files.values().flat_map(|file| &file.pending_writes);
        let bytes: usize = pieces().map(|(_, bytes)| bytes.len()).sum();
        bytes + more > MAX_PENDING_BYTES || pieces().count() >= MAX_PENDING_WRITES
    }

    /// Adds a write to the pending writes of a delegated file.
    pub(crate) fn write(&mut self, fd: i32, offset: u64, bytes: Vec<u8>) {
        // Writes that were sent are confirmed piece by piece, so they must not be merged.
        let has_in_flight = self.in_flight.is_some();
        if let Some(file) = self.files.get_mut(&fd) {
            file.attributes = None;
            if has_in_flight {
                file.pending_writes.push((offset, bytes.into()));
            } else {
                file.write(offset, bytes);
            }
            self.dirty_since.get_or_insert_with(Instant::now);
        }
    }

    /// Returns the prelude of the call with this number: all pending writes, closes, and offsets.
    /// Until home confirms it, the prelude of the next call repeats it. So while a call is pending,
    /// however long that is, everything was sent, and the process can depart.
    pub(crate) fn prelude_for_call(&mut self, number: u64, nr: u32, args: &[u64; 6]) -> Vec<Call> {
        self.request_generation = self.generation;
        if let Some(file) = self.files.get_mut(&(args[0] as i32)) {
            file.may_hold_lock |= conflict::is_lock_call(nr, args);
        }
        if conflict::is_lock_call(nr, args) {
            self.has_used_locks = true;
            self.files.values_mut().for_each(DelegatedFile::stop_sharing);
        }
        self.collect_prelude(number, Conflict::of(nr, args), true)
    }

    /// As [`prelude_for_call`](Self::prelude_for_call), but for an internal call, and with the
    /// offsets of returning files only. If there is anything to send, also returns a no-op call
    /// that the prelude can precede.
    pub(crate) fn prelude_for_internal_call(&mut self, number: u64) -> (Vec<Call>, Option<Call>) {
        let prelude = self.collect_prelude(number, Conflict::None, false);
        let files = self.files.iter().filter(|(_, file)| !file.is_clean()).map(|(fd, _)| fd);
        // If the descriptor is closed by then, the no-op fails, which does no harm.
        let noop = files.chain(self.closing.fds()).next();
        let noop = noop.map(|fd| noop_call(*fd));
        (prelude, noop)
    }

    /// Postpones the next flush: the last prelude was not completed.
    pub(crate) fn retry_later(&mut self) {
        self.dirty_since = self.dirty_since.map(|_| Instant::now());
        self.closing.retry_later();
    }

    /// Plans to read a piece of a file ahead.
    pub(crate) fn plan_fill(&mut self, fd: i32, start: u64, count: u64) -> Option<Fill> {
        let length = self.files.get_mut(&fd)?.plan_fill(start, count);
        self.skip_prefetch = false;
        Some(Fill { fd, start, length, generation: self.generation })
    }

    fn collect_prelude(&mut self, number: u64, conflict: Conflict, offsets: bool) -> Vec<Call> {
        let closes = self.closing.fds().iter();
        let mut calls: Vec<Call> = closes.clone().map(|fd| call_on(*fd, libc::SYS_close, 0, 0)).collect();
        let mut steps: Vec<(i32, PreludeStep)> = closes.map(|fd| (*fd, PreludeStep::Close)).collect();
        for (fd, file) in &mut self.files {
            file.is_returning |= conflict == Conflict::All || conflict == Conflict::File(*fd);
            file.delegation.offset = file.offset();
            for (at, bytes) in &file.pending_writes {
                calls.push(call_on(*fd, libc::SYS_pwrite64, bytes.len() as u64, *at));
                if let Some(call) = calls.last_mut() {
                    call.args[1] = Arg::Bytes(bytes.clone());
                }
                steps.push((*fd, PreludeStep::Write(bytes.len())));
            }
            let offset = file.delegation.offset;
            if (file.is_returning || offsets) && file.home_offset != offset {
                let mut seek = call_on(*fd, libc::SYS_lseek, libc::SEEK_SET as u64, 0);
                seek.args[1] = Arg::Value(offset);
                calls.push(seek);
                steps.push((*fd, PreludeStep::Seek(offset)));
            }
        }
        self.in_flight = (!steps.is_empty()).then_some((number, steps));
        self.detach_local();
        self.files.retain(|_, file| !file.is_returned());
        calls
    }

    /// Handles home's results for the prelude of the call with this number, or for a part of it.
    /// Home may repeat them, and may have confirmed a part before, which was not sent again.
    pub(crate) fn confirm(&mut self, number: u64, results: &[i64]) {
        let Some((_, steps)) = self.in_flight.take_if(|(sent, _)| *sent == number) else { return };
        let confirmed = if self.confirmed.0 == number { self.confirmed.1 } else { 0 };
        self.confirmed = (number, confirmed.max(results.len()));
        for ((fd, step), result) in steps.into_iter().zip(results.iter().skip(confirmed)) {
            if matches!(step, PreludeStep::Close) {
                self.closing.remove(fd);
                continue;
            }
            let Some(file) = self.files.get_mut(&fd) else { continue };
            match step {
                PreludeStep::Close => {}
                PreludeStep::Write(length) => {
                    file.pending_writes.remove(0);
                    // Home reports the error with the next call that it makes on this file.
                    file.is_returning |= *result != length as i64;
                }
                PreludeStep::Seek(offset) if offset.cast_signed() == *result => file.home_offset = offset,
                // The file system does not support this offset.
                PreludeStep::Seek(_) => file.seek(file.home_offset),
            }
        }
        if self.files.values().all(|file| file.pending_writes.is_empty()) {
            self.dirty_since = None;
        }
        self.files.retain(|_, file| !file.is_returned());
    }

    /// Handles the result of a call of the program that home has made.
    pub(crate) fn home_call_done(&mut self, nr: u32, args: &[u64; 6], ret: i64) {
        let Some(file) = self.files.get_mut(&(args[0] as i32)).filter(|_| ret >= 0) else { return };
        let at = match i64::from(nr) {
            libc::SYS_lseek => ret.cast_unsigned(),
            libc::SYS_read | libc::SYS_write | libc::SYS_readv | libc::SYS_writev => {
                file.delegation.offset + ret.cast_unsigned()
            }
            libc::SYS_preadv2 | libc::SYS_pwritev2 if args[3] == u64::MAX => {
                file.delegation.offset + ret.cast_unsigned()
            }
            _ => return,
        };
        (file.home_offset, file.expected_read.0) = (at, at);
        file.seek(at);
    }

    /// Handles home's notices about files, from the result of a call that was sent at `sent_at`, if
    /// that is known. Delegations are accepted only if the process has one thread
    /// (`has_one_thread`) and stays here.
    pub(crate) fn receive_notices(
        &mut self,
        notices: &[(i32, FileNotice)],
        sent_at: Option<Instant>,
        has_one_thread: bool,
        local_node: &LocalNode,
    ) {
        self.files.values_mut().for_each(|file| (file.attributes, file.validated_at) = (None, None));
        for (fd, notice) in notices {
            // This notice follows a new delegation. It is ignored for a file that is open here
            // already.
            let new_file =
                self.files.get_mut(fd).filter(|file| file.local_file.is_none() && !file.is_returning);
            if let (FileNotice::LocalFile(location), Some(file)) = (notice, new_file) {
                file.local_file = LocalFile::offered(location, local_node);
            }
            self.receive_shared_notice(*fd, notice, sent_at, local_node);
            let read_ahead = self.files.get_mut(fd).map(|file| &mut file.read_ahead);
            match (notice, read_ahead) {
                (FileNotice::Changed, Some(read_ahead)) => *read_ahead = None,
                (FileNotice::Unchanged, Some(Some(read_ahead))) => {
                    read_ahead.since = sent_at.unwrap_or(read_ahead.since);
                }
                (FileNotice::Delegated(delegation), _)
                    if has_one_thread && !self.shares_fd_table && !self.is_returning_all =>
                {
                    self.accept_delegation(*fd, *delegation);
                }
                (FileNotice::Recalled, _) => {
                    self.files.get_mut(fd).into_iter().for_each(|file| file.is_returning = true);
                }
                (FileNotice::Prefetched(prefetch), _) => {
                    sent_at.iter().for_each(|sent_at| self.store_prefetched(*fd, prefetch, *sent_at));
                }
                _ => {}
            }
        }
    }

    /// Accepts a delegation. A file that has two descriptors, one of them writable, is not
    /// delegated: reads on one must return what the other writes.
    fn accept_delegation(&mut self, fd: i32, delegation: FileDelegation) {
        let mut has_twin = false;
        for (other, file) in &mut self.files {
            let is_twin = *other != fd
                && file.delegation.id == delegation.id
                && (file.delegation.can_write || delegation.can_write);
            file.is_returning |= is_twin;
            has_twin |= is_twin;
        }
        // The previous file of this descriptor was closed.
        let previous = self.files.get(&fd);
        if !has_twin && previous.is_none_or(DelegatedFile::is_clean) && self.files.len() < MAX_DELEGATIONS {
            let replaced = self.files.insert(fd, DelegatedFile::new(delegation));
            self.stale_fds.extend(replaced.filter(DelegatedFile::is_local).map(|_closed| fd));
        }
        self.files.retain(|_, file| !file.is_returned());
    }

    /// Handles the result of a fill: data, or none after an error. After an error the delegation is
    /// returned, so that home reports the error to the program's own read.
    pub(crate) fn complete_fill(
        &mut self,
        fill: Fill,
        bytes: Option<ByteBuf>,
        is_stable: bool,
        since: Instant,
    ) {
        let Some(file) = self.files.get_mut(&fill.fd) else { return };
        let Some(bytes) = bytes else {
            file.is_returning = true;
            return;
        };
        if fill.generation != self.generation {
            return;
        }
        if !is_stable {
            // A file that is being written is read anew each time.
            file.expected_read.1 = MIN_READ_AHEAD;
        }
        let is_eof = (bytes.len() as u64) < fill.length;
        self.fill_count += 1;
        let number = self.fill_count;
        file.read_ahead = Some(ReadAhead {
            start: fill.start,
            bytes,
            is_eof,
            end_reported: false,
            is_stable,
            since,
            is_used: false,
            number,
        });
    }
}

/// A call on a descriptor; the caller sets the second argument.
fn call_on(fd: i32, nr: i64, third: u64, fourth: u64) -> Call {
    Call { nr: nr as u32, args: [u64::from(fd.cast_unsigned()), 0, third, fourth, 0, 0].map(Arg::Value) }
}

/// A call without effect. Its result carries home's notices about files.
pub(crate) fn noop_call(fd: i32) -> Call {
    call_on(fd, libc::SYS_lseek, libc::SEEK_CUR as u64, 0)
}

impl Fill {
    /// The call that reads it.
    pub(crate) fn call(self) -> Call {
        let mut call = call_on(self.fd, libc::SYS_pread64, self.length, self.start);
        call.args[1] = Arg::Output;
        call
    }
}

impl DelegatedFile {
    fn new(delegation: FileDelegation) -> Self {
        Self {
            delegation,
            home_offset: delegation.offset,
            read_ahead: None,
            expected_read: (delegation.offset, MIN_READ_AHEAD),
            pending_writes: Vec::new(),
            is_returning: false,
            local_file: None,
            validated_at: None,
            is_published: false,
            attributes: None,
            prefetch_unread: false,
            may_hold_lock: false,
        }
    }

    fn seek(&mut self, to: u64) {
        self.delegation.offset = to;
        if let Some(local_file) = &self.local_file {
            local_file.seek(to);
        }
    }

    fn is_clean(&self) -> bool {
        !self.is_published && self.pending_writes.is_empty() && self.home_offset == self.offset()
    }

    fn is_local(&self) -> bool {
        self.local_file.as_ref().is_some_and(LocalFile::is_open)
    }

    /// Whether no write is pending.
    pub(crate) fn has_no_pending_writes(&self) -> bool {
        self.pending_writes.is_empty()
    }

    /// The current file offset.
    fn offset(&self) -> u64 {
        self.local_file.as_ref().and_then(LocalFile::offset).unwrap_or(self.delegation.offset)
    }

    /// Whether the delegation can be dropped.
    fn is_returned(&self) -> bool {
        self.is_returning && self.is_clean() && !self.is_local()
    }

    /// Serves a read from read-ahead, completely or up to the end of the file.
    pub(crate) fn read(&mut self, at: u64, count: u64) -> Option<&[u8]> {
        let read_ahead = self.read_ahead.as_mut()?;
        let data = read_ahead.bytes.get(usize::try_from(at.checked_sub(read_ahead.start)?).ok()?..)?;
        let data = &data[..data.len().min(count as usize)];
        let first = !std::mem::replace(&mut read_ahead.is_used, true);
        // The end of the file is reported from here only once. A program that reads there again
        // waits for the file to grow, so home makes that read.
        let is_whole = data.len() as u64 == count
            || read_ahead.is_eof && (first || !data.is_empty() || !read_ahead.end_reported);
        let is_valid = first || read_ahead.is_stable && read_ahead.since.elapsed() < CACHE_TERM;
        if !(is_whole && is_valid) {
            return None;
        }
        read_ahead.end_reported |= data.is_empty();
        (self.attributes, self.prefetch_unread) = (None, false);
        self.expected_read.0 = at + data.len() as u64;
        Some(data)
    }

    /// How much to read for a read that misses: more, the longer the reads have been sequential.
    fn plan_fill(&mut self, at: u64, count: u64) -> u64 {
        let (expected, len) = self.expected_read;
        if at != expected {
            self.expected_read.1 = MIN_READ_AHEAD;
            return count;
        }
        // If the last read-ahead has expired, its reader is slow, and needs less.
        let old = self.read_ahead.take_if(|read_ahead| read_ahead.since.elapsed() >= CACHE_TERM);
        let len = old.map_or(len, |old| {
            (2 * at.saturating_sub(old.start)).clamp(MIN_READ_AHEAD, len.max(MIN_READ_AHEAD))
        });
        self.expected_read.1 = (len * 2).min(MAX_READ_AHEAD);
        len.max(count)
    }

    fn write(&mut self, at: u64, bytes: Vec<u8>) {
        if let Some((start, last)) = self.pending_writes.last_mut()
            && let Some(from) = at.checked_sub(*start).and_then(|from| usize::try_from(from).ok())
        {
            if from == last.len() {
                return last.extend(bytes);
            }
            if let Some(overwritten) = last.get_mut(from..from.saturating_add(bytes.len())) {
                return overwritten.copy_from_slice(&bytes);
            }
        }
        self.pending_writes.push((at, bytes.into()));
    }
}

#[cfg(test)]
pub(crate) mod tests;
