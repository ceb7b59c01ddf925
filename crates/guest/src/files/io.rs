//! Reads and writes of delegated files, without a round trip home for each (docs/design/delegation.md).
//!
//! Home delegates an open file that only this process has open ([`FileDelegation`]). Until the
//! delegation is returned, its offset is kept here, reads are served from read-ahead, and writes
//! are written behind. Home's kernel still makes each transfer, by the deputy; only the time is
//! chosen here:
//! * Every other call that goes home is preceded by the pending writes and seeks
//!   (`CallRequest::prelude`). So an effect that follows a write is never visible without the
//!   write.
//! * Read-ahead is valid until home reports, with the result of any call, that the file has
//!   changed, until a signal arrives, and for one second at most without a report from home. So the
//!   program never observes an effect that follows a change while still reading pre-change data.
//! * Pending writes older than one second are flushed.
//!
//! If the process is lost here, its pending writes are lost with it. It is as if the process had
//! been killed a moment earlier, after the last effect that others have seen.
//!
//! Only processes with one thread have delegated files: their calls come one after the other. The
//! shim's own requests for these files are an [`InternalCall`]; a trap that arrives meanwhile waits
//! in `Process::queued_traps`. Before the process departs or ends by a fault, its delegations are
//! returned: all writes are flushed, home has the offsets, and calls on the files are forwarded.

use crate::error::GuestResult;
use crate::files::internal_call::CallPurpose;
use crate::files::limits::MAX_OFFSET_BITS;
use crate::files::local::LocalNode;
use crate::process::Guest;
use crate::process::memory::GuestMemory;
use crate::process::outbox::Outbox;
use crate::process::shared::{Process, State};
use crate::process::thread::Thread;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_migrate::message::{CallResult, FileNotice, MAX_DELEGATED_IO};
use tern_syscall::UserMemory;
use tern_tracee::listener::Notification;
use tern_tracee::registers::restart;
use tern_tracee::stop;

/// How soon a signal that the kernel has refused is raised again.
const SIGNAL_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Offsets beyond this are left to home, because some file systems refuse them.
const MAX_OFFSET: u64 = 1 << MAX_OFFSET_BITS;

/// A transfer on a descriptor.
struct Transfer {
    fd: i32,
    /// The position in the file, and whether the file offset advances.
    offset: u64,
    advances: bool,
    /// The buffers in memory, and their total length.
    buffers: Vec<(u64, u64)>,
    count: u64,
}

/// The buffers of an array of iovecs; none if home is to check it.
fn iovec_buffers(at: u64, count: u64, memory: &mut GuestMemory<'_>) -> Option<Vec<(u64, u64)>> {
    if count > tern_syscall::limits::MAX_SEGMENTS {
        return None;
    }
    let mut entries = vec![0; count as usize * 16];
    memory.read(at, &mut entries).ok()?;
    let word = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).ok();
    entries.as_chunks::<16>().0.iter().map(|entry| Some((word(&entry[..8])?, word(&entry[8..])?))).collect()
}

impl Transfer {
    /// The transfer that a call makes on a file, if it can be made here.
    fn of(trap: &Notification, file_offset: u64, memory: &mut GuestMemory<'_>) -> Option<Self> {
        let [fd, at, length, offset, _, flags] = trap.args;
        let nr = i64::from(trap.nr);
        let advances = match nr {
            libc::SYS_read | libc::SYS_write | libc::SYS_readv | libc::SYS_writev => true,
            libc::SYS_pread64 | libc::SYS_pwrite64 | libc::SYS_preadv | libc::SYS_pwritev => false,
            libc::SYS_preadv2 | libc::SYS_pwritev2 if flags == 0 => offset == u64::MAX,
            _ => return None,
        };
        let whole = [libc::SYS_read, libc::SYS_write, libc::SYS_pread64, libc::SYS_pwrite64].contains(&nr);
        let buffers = if whole { vec![(at, length)] } else { iovec_buffers(at, length, memory)? };
        let sum = |sum: u64, (_, length): &(u64, u64)| sum.checked_add(*length);
        let count = buffers.iter().try_fold(0, sum).filter(|count| (1..=MAX_DELEGATED_IO).contains(count))?;
        let offset = if advances { file_offset } else { offset };
        (offset < MAX_OFFSET).then_some(Self { fd: fd as i32, offset, advances, buffers, count })
    }
}

fn writes(nr: i64) -> bool {
    [libc::SYS_write, libc::SYS_pwrite64, libc::SYS_writev, libc::SYS_pwritev, libc::SYS_pwritev2]
        .contains(&nr)
}

impl Thread {
    /// Makes a call on a delegated file; false if it is another call, or home is to make it.
    ///
    /// # Errors
    /// As [`handle_trap`](Self::handle_trap).
    pub(crate) fn handle_file_call(
        &mut self,
        trap: &Notification,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult<bool> {
        // A call that home may have made already is sent home again under its number.
        if self.sync.call_pending || self.sync.partial.is_some() {
            return Ok(false);
        }
        let [fd, second, third, ..] = trap.args;
        let fd = fd as i32;
        if self.pass_to_local(trap, process, home)? {
            return Ok(true);
        }
        let Some(file) = process.files.get(fd) else { return Ok(false) };
        let nr = i64::from(trap.nr);
        if nr == libc::SYS_lseek {
            let base = match third as i32 {
                libc::SEEK_SET => Some(0),
                libc::SEEK_CUR => Some(file.delegation.offset),
                _ => None,
            };
            let to = base.and_then(|base| base.checked_add_signed(second.cast_signed()));
            let Some(to) = to.filter(|to| *to < MAX_OFFSET) else { return Ok(false) };
            file.delegation.offset = to;
            return self.reply_here(trap, to.cast_signed(), process);
        }
        let delegation = file.delegation;
        let Some(transfer) = Transfer::of(trap, delegation.offset, &mut GuestMemory(&process.memory)) else {
            return match process.files.reply_from_prefetch(trap, &process.memory) {
                Some(ret) => self.reply_cached(trap, ret, process),
                None => Ok(false),
            };
        };
        match writes(nr) {
            // A file that is also writable is read at home: a read must include the pending writes.
            false if delegation.can_read && !delegation.can_write => {
                self.read_cached(trap, &transfer, process, home)
            }
            true if delegation.can_write => self.write_cached(trap, &transfer, process, home),
            _ => Ok(false),
        }
    }

    fn reply_here(&mut self, trap: &Notification, ret: i64, process: &mut Process) -> GuestResult<bool> {
        self.sync.restart_code = None;
        if !process.shares_parent_memory {
            let connections = process.native_connections();
            let Process { fastpath, files, memory, reserve, .. } = process;
            fastpath.count_call((trap.ip, trap.nr), false, memory, *reserve)?;
            let moved = (i64::from(trap.nr) != libc::SYS_lseek).then_some(ret.cast_unsigned());
            fastpath.publish((trap.args[0] as i32, moved), files, connections, (memory, *reserve))?;
        }
        self.reply(trap.id, ret)?;
        Ok(true)
    }

    /// Replies to a call from cached attributes or names.
    fn reply_cached(&mut self, trap: &Notification, ret: i64, process: &mut Process) -> GuestResult<bool> {
        self.sync.restart_code = None;
        process.republish()?;
        self.reply(trap.id, ret)?;
        Ok(true)
    }

    /// Replies to a call about a cached name; false if it is another call, or home is to make it.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn handle_name_call(
        &mut self,
        trap: &Notification,
        process: &mut Process,
    ) -> GuestResult<bool> {
        // A call that home may have made already is sent home again under its number. Pending
        // writes change attributes. And a program that has files open on this node may observe
        // changes before home's notices arrive.
        if self.sync.call_pending || self.sync.partial.is_some() || !process.files.home_has_all_data() {
            return Ok(false);
        }
        // Another thread may learn of a change by a connection, and tell this one.
        if process.connections.has_other_threads() && process.connections.may_let_through() {
            return Ok(false);
        }
        match process.names.reply_to(trap, &process.memory) {
            Some(ret) => self.reply_cached(trap, ret, process),
            None => Ok(false),
        }
    }

    fn read_cached(
        &mut self,
        trap: &Notification,
        transfer: &Transfer,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult<bool> {
        let Transfer { fd, offset, advances, ref buffers, count } = *transfer;
        let Some(file) = process.files.get(fd) else { return Ok(false) };
        let Some(data) = file.read(offset, count) else {
            let fill = process.files.plan_fill(fd, offset, count).map(CallPurpose::Fill);
            return self.queue_behind_internal_call(*trap, fill, process, home);
        };
        let (mut length, mut remaining) = (0, data);
        for (at, len) in buffers {
            let (piece, others) = remaining.split_at(remaining.len().min(*len as usize));
            if GuestMemory(&process.memory).write(*at, piece).is_err() {
                // The transfer ends there; if nothing was transferred, home replies.
                if length > 0 { break } else { return Ok(false) }
            }
            (length, remaining) = (length + piece.len() as u64, others);
        }
        if advances {
            file.delegation.offset = offset + length;
        }
        self.reply_here(trap, length.cast_signed(), process)
    }

    fn write_cached(
        &mut self,
        trap: &Notification,
        transfer: &Transfer,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult<bool> {
        let Transfer { fd, offset, advances, ref buffers, count: max_len } = *transfer;
        if process.files.would_exceed_limit(max_len as usize) {
            return self.queue_behind_internal_call(*trap, None, process, home);
        }
        let mut bytes = vec![0; max_len as usize];
        let (mut count, mut remaining) = (0, &mut bytes[..]);
        for (at, length) in buffers {
            let (piece, others) = remaining.split_at_mut(remaining.len().min(*length as usize));
            if GuestMemory(&process.memory).read(*at, piece).is_err() {
                if count > 0 { break } else { return Ok(false) }
            }
            (count, remaining) = (count + piece.len() as u64, others);
        }
        bytes.truncate(count as usize);
        let Some(file) = process.files.get(fd) else { return Ok(false) };
        if advances {
            file.delegation.offset = offset + count;
        }
        process.files.write(fd, offset, bytes);
        self.reply_here(trap, count.cast_signed(), process)
    }

    /// Sends an internal call, and queues a trap until that call is complete.
    pub(crate) fn queue_behind_internal_call(
        &mut self,
        trap: Notification,
        purpose: Option<CallPurpose>,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult<bool> {
        process.queued_traps.push(trap);
        self.send_internal_call(purpose, process, home);
        Ok(true)
    }

    /// Handles the notices about files in a result. Returns true if the result belongs to an
    /// internal call, and so contains nothing else.
    fn receive_notices(
        &mut self,
        result: &CallResult,
        process: &mut Process,
        has_one_thread: bool,
        local_node: &LocalNode,
    ) -> bool {
        let Process { files, names, .. } = process;
        let is_complete = !restart::is(result.outcome.ret);
        let Some(internal_call) = self.internal_call.take_if(|call| call.number == result.number) else {
            files.confirm(result.number, &result.prelude);
            let completed = self.pending.as_ref().filter(|pending| is_complete && pending.request.is_some());
            let completed = completed.filter(|_| result.number == self.sync.call);
            if let Some(pending) = completed {
                files.home_call_done(pending.trap.nr, &pending.trap.args, result.outcome.ret);
                names.confirm(pending.sent_at);
            }
            files.receive_notices(
                &result.notices,
                completed.map(|pending| pending.sent_at),
                has_one_thread,
                local_node,
            );
            return false;
        };
        names.confirm(internal_call.sent_at);
        files.confirm(result.number, &result.prelude);
        // If a part of its prelude was not run, home has not made the internal call itself.
        let is_complete = is_complete && result.prelude.len() == internal_call.prelude_len;
        if !is_complete {
            files.retry_later();
        }
        files.receive_notices(&result.notices, Some(internal_call.sent_at), has_one_thread, local_node);
        if let Some(CallPurpose::Revalidate(fd)) = internal_call.purpose.filter(|_| is_complete)
            && !files.is_validated(fd)
        {
            // Home could not validate the file, at all or in time. From now on the file is read at
            // home.
            files.return_local(fd);
        }
        if let Some(CallPurpose::Fill(fill)) = internal_call.purpose.filter(|_| is_complete) {
            let bytes = result.outcome.outs.first().cloned().unwrap_or_default();
            let length = usize::try_from(result.outcome.ret).ok();
            let read = length.filter(|length| *length as u64 <= fill.length).map(|length| {
                let mut bytes = bytes;
                if bytes.len() != length {
                    bytes.resize(length, 0);
                }
                bytes
            });
            let is_stable = result.notices.contains(&(fill.fd, FileNotice::Unchanged));
            files.complete_fill(fill, read, is_stable, internal_call.sent_at);
        }
        true
    }
}

impl Guest {
    /// Returns the delegations of a process that is to depart: sends home its pending writes and
    /// offsets. Returns whether home has confirmed them.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn return_delegations(&mut self, home: &mut Outbox) -> GuestResult<bool> {
        self.process.files.return_delegations();
        if !self.reclaim()? {
            return Ok(false);
        }
        let Self { process, threads } = self;
        if threads.values().all(|thread| thread.stopped.is_some()) {
            process.files.leave_native_call();
            threads.values_mut().for_each(|thread| thread.native_call = None);
        }
        process.files.return_delegations();
        let is_in_file_call = process.files.must_await_native_call();
        let may_be_in_call = process.connections.may_let_through();
        let in_call = |thread: &&Thread| is_in_file_call || may_be_in_call && thread.native_call.is_some();
        let mut must_await = false;
        for thread in threads.values().filter(in_call) {
            // The main loop resumes the thread after this stop.
            stop::interrupt(thread.host_tid)?;
            must_await = true;
        }
        if must_await {
            return Ok(false);
        }
        if !process.connections.return_all() {
            return Ok(false);
        }
        if process.files.is_clean() && threads.values().all(|thread| thread.internal_call.is_none()) {
            return Ok(true);
        }
        // A process with several threads has no delegated files.
        if let Some(thread) = threads.values_mut().next() {
            thread.send_internal_call(None, process, home);
        }
        Ok(false)
    }

    /// The next time at which the guest needs work without an event: to flush pending writes (while
    /// the deputy is busy they were sent already), to end a publication to the fast path, to
    /// release forks, to raise signals again, or to end waits.
    #[must_use]
    pub(crate) fn due(&self) -> Option<Instant> {
        let thread = self.threads.values().next()?;
        let write_due = self.process.files.due().filter(|_| !thread.is_deputy_busy());
        let forks = self
            .process
            .stop_reasons
            .forks_held_until()
            .filter(|_| matches!(self.process.state, State::Running));
        let refused = self.threads.values().any(|thread| thread.raised.has_refused());
        let signals = refused.then(|| Instant::now() + SIGNAL_RETRY_INTERVAL);
        let waits = self.threads.values().filter_map(Thread::wait_must_end_at);
        write_due
            .into_iter()
            .chain(self.process.fastpath.due())
            .chain(forks)
            .chain(signals)
            .chain(waits)
            .min()
    }

    /// Does the work that is due according to [`due`](Self::due).
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn do_due_work(&mut self, home: &mut Outbox) -> GuestResult {
        self.release_forks()?;
        self.threads.values_mut().try_for_each(Thread::raise_again)?;
        self.reclaim_due()?;
        let is_over =
            |thread: &&Thread| thread.wait_must_end_at().is_some_and(|until| until <= Instant::now());
        for thread in self.threads.values().filter(is_over) {
            // The stop ends its call.
            stop::interrupt(thread.host_tid)?;
        }
        let due = self.process.files.due().is_some_and(|due| due <= Instant::now());
        let Self { process, threads } = self;
        if let Some(thread) = threads.values_mut().next().filter(|_| due) {
            thread.send_internal_call(None, process, home);
        }
        Ok(())
    }

    /// Handles the notices about files in a result. Returns true if the result contains nothing
    /// else.
    pub(crate) fn receive_notices(
        &mut self,
        tid: HomePid,
        result: &CallResult,
        local_node: &LocalNode,
    ) -> bool {
        let Self { process, threads } = self;
        let has_one_thread = threads.len() == 1 && matches!(process.state, State::Running);
        let accepts = matches!(process.state, State::Running)
            && !process.files.shares_fd_table
            && !process.files.is_returning_delegations();
        process.connections.receive_notices(&result.notices, accepts);
        // If the guest is gone, its exit is reported soon.
        let _gone = process.fastpath.unpublish(&process.memory, process.reserve);
        threads
            .get_mut(&tid)
            .is_some_and(|thread| thread.receive_notices(result, process, has_one_thread, local_node))
    }

    /// Whether an internal call is pending.
    #[must_use]
    pub(crate) fn has_internal_call(&self) -> bool {
        self.threads.values().any(|thread| thread.internal_call.is_some())
    }
}
