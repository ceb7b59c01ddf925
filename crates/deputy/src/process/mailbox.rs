//! The mailbox of one deputy thread: memory shared with it, through which the shim passes it calls.
//!
//! The shim waits inline for a call to finish: first spinning, if that has paid off before, then
//! asleep. Fast calls then cost one or two wake-ups. A slow call is handed to a waiter thread,
//! which signals an eventfd of the main loop when the call has finished.

use crate::process::blob::{CALL_OFFSET, DONE, HEADER_SIZE, IDLE, REQUEST, RESULT_OFFSET, STATE_OFFSET};
use crate::waker::Waker;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use tern_image::Reserve;
use tern_migrate::Partial;
use tern_syscall::{MailboxLayout, Outcome};
use tern_tracee::inject::Injection;
use tern_tracee::shared_memory::{self, SharedMapping};
use tern_tracee::{Error, Result, threads};

/// The name of the mailbox's memfd, as shown in lists of open files and mappings.
const MEMFD_NAME: &[u8] = b"tern-mailbox\0";
/// Bytes of the mailbox of a thread other than the first.
const SECONDARY_AREA_SIZE: usize = 64 << 10;
/// Start of these mailboxes, which follow each other. They lie below the reserved range, which is
/// too small for them.
const SECONDARY_AREAS_START: u64 = Reserve::HINT - (1 << 40);
/// Where the mappings for large calls are, far from the addresses at which the program, which is away, may
/// map memory. Each thread has a place of its own there, unless it shares it with one that was created
/// 4,096 threads earlier and still has a mapping.
const LARGE_AREAS_START: u64 = Reserve::HINT - (2 << 40);
const LARGE_AREAS: u64 = 4096;
/// The distance of these places: more than the largest call needs.
const LARGE_AREA_DISTANCE: u64 = 2 * tern_syscall::limits::MAX_DATA;
/// How long the shim waits inline, asleep, for a call to finish.
const INLINE_WAIT_TIMEOUT: Duration = Duration::from_micros(60);
/// How long it spins before that. A deputy that wakes on another CPU has finished a short call by
/// then; for the shim to sleep and be woken would take about as long again.
const SPIN_TIMEOUT: Duration = Duration::from_micros(30);
/// Upper bound on the number of calls that are waited for without spinning, after spinning failed.
const MAX_CALLS_WITHOUT_SPIN: u8 = 63;

/// Bytes of stack of the thread that waits for calls.
const WAITER_STACK_SIZE: usize = 64 << 10;

/// A deputy's mailbox.
#[derive(Debug)]
pub(crate) struct Mailbox {
    header: Arc<SharedMapping>,
    data: Data,
    waker: Waker,
    /// Sends requests to the waiter thread, once that thread has been started.
    waiter: Option<Sender<()>>,
    spin: AdaptiveSpin,
}

/// The address range of a mailbox in its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MailboxArea {
    pub(crate) at: u64,
    len: usize,
}

impl MailboxArea {
    /// The area inside the reserved range: for the first or only thread of a process.
    pub(crate) fn primary(reserve: Reserve) -> Self {
        Self { at: reserve.data_start(), len: Reserve::DATA_LEN }
    }

    /// An area for another thread.
    pub(crate) fn secondary(number: u64) -> Self {
        Self { at: SECONDARY_AREAS_START + number * SECONDARY_AREA_SIZE as u64, len: SECONDARY_AREA_SIZE }
    }

    /// Where to map memory for large calls of its thread.
    fn large_area(self) -> u64 {
        let number = if self.is_secondary() {
            (self.at - SECONDARY_AREAS_START) / SECONDARY_AREA_SIZE as u64
        } else {
            0
        };
        LARGE_AREAS_START + number % LARGE_AREAS * LARGE_AREA_DISTANCE
    }

    /// Whether it is an area for another thread.
    pub(crate) fn is_secondary(self) -> bool {
        self.len == SECONDARY_AREA_SIZE
    }

    /// The address range of the first `count` areas for other threads.
    pub(crate) fn secondary_range(count: u64) -> (u64, u64) {
        (Self::secondary(1).at, Self::secondary(count + 1).at)
    }

    /// Its address range.
    pub(crate) fn range(self) -> (u64, u64) {
        (self.at, self.at + self.len as u64)
    }

    fn is_in(self, reserve: Reserve) -> bool {
        reserve.overlaps(self.at, self.at + 1)
    }

    /// Bytes of data behind the header. The last page is kept for injected calls.
    fn data_size(self) -> usize {
        self.len - HEADER_SIZE - tern_tracee::PAGE as usize
    }
}

/// Decides whether to spin. Spinning pays where the deputy can wake on another CPU and its calls
/// are short. Otherwise it takes the CPU away from the deputy, or from another process.
#[derive(Debug, Default)]
struct AdaptiveSpin {
    /// Number of calls still to be waited for without spinning.
    skip: u8,
    /// The value that `skip` was last set to.
    last: u8,
}

/// The memory for a call's data: behind the header, or for a large call in a mapping of its own.
#[derive(Debug)]
struct Data {
    small: SharedMapping,
    area: MailboxArea,
    large: Option<(SharedMapping, u64)>,
}

impl Mailbox {
    /// Creates a mailbox in a process under injection.
    ///
    /// # Errors
    /// If the process is gone, or has no free file descriptor at the moment.
    pub(crate) fn create(
        injection: &mut Injection,
        reserve: Reserve,
        area: MailboxArea,
        waker: Waker,
    ) -> Result<Self> {
        let mut all = Self::create_all(injection, reserve, &[area], waker)?;
        all.pop().ok_or(Error::Gone { pid: injection.pid() })
    }

    /// Creates mailboxes whose areas follow each other.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub(crate) fn create_all(
        injection: &mut Injection,
        reserve: Reserve,
        areas: &[MailboxArea],
        waker: Waker,
    ) -> Result<Vec<Self>> {
        let Some(first) = areas.first() else { return Ok(Vec::new()) };
        let len = areas.iter().map(|area| area.len).sum();
        let (pid, name) = (injection.pid(), reserve.scratch());
        tern_tracee::Memory::open(pid)?.write(name, MEMFD_NAME)?;
        let make = &mut |nr, args| injection.call(nr, args);
        let (memory, _) = map_shared(make, pid, name, len, first.at, true)?;
        if !first.is_in(reserve) {
            // Children need none of these: a child has one thread, with its mailbox in the reserved
            // range.
            let dont_fork = [first.at, len as u64, libc::MADV_DONTFORK as u64, 0, 0, 0];
            injection.must("keep mailboxes out of children", libc::SYS_madvise, dont_fork)?;
        }
        let whole = SharedMapping::map(memory.as_fd(), len)?;
        let mailbox = |area: &MailboxArea| {
            let part = || whole.part((area.at - first.at) as usize, area.len);
            let data = Data { small: part(), area: *area, large: None };
            Self {
                header: Arc::new(part()),
                data,
                waker: waker.clone(),
                waiter: None,
                spin: AdaptiveSpin::default(),
            }
        };
        Ok(areas.iter().map(mailbox).collect())
    }

    /// The address ranges of this mailbox in the deputy that are not in the reserved range.
    pub(crate) fn ranges_outside(&self, reserve: Reserve) -> impl Iterator<Item = (u64, u64)> {
        let area = self.area();
        let own = (!area.is_in(reserve)).then_some(area.range());
        own.into_iter().chain(self.large_range())
    }

    /// The address range of the mapping for large calls.
    pub(crate) fn large_range(&self) -> Option<(u64, u64)> {
        self.data.large.as_ref().map(|(memory, at)| (*at, at + memory.len() as u64))
    }

    /// Its area.
    pub(crate) fn area(&self) -> MailboxArea {
        self.data.area
    }

    /// Whether the data of a call fits.
    pub(crate) fn fits(&self, size: usize) -> bool {
        size <= self.data.area.data_size() || self.data.large.as_ref().is_some_and(|l| size <= l.0.len())
    }

    /// Maps memory for a large call, by calls of the deputy under injection.
    ///
    /// # Errors
    /// If it is gone, or has no memory or descriptor left.
    pub(crate) fn grow(&mut self, injection: &mut Injection, reserve: Reserve, size: usize) -> Result<()> {
        let size = size.next_multiple_of(1 << 20);
        if let Some((memory, at)) = self.data.large.take() {
            let unmap = [at, memory.len() as u64, 0, 0, 0, 0];
            injection.must("release a mailbox", libc::SYS_munmap, unmap)?;
        }
        let (pid, name) = (injection.pid(), reserve.scratch());
        tern_tracee::Memory::open(pid)?.write(name, MEMFD_NAME)?;
        let hint = self.data.area.large_area();
        let (memory, at) =
            map_shared(&mut |nr, args| injection.call(nr, args), pid, name, size, hint, false)?;
        self.data.large = Some((SharedMapping::map(memory.as_fd(), size)?, at));
        Ok(())
    }

    /// Writes a call and its data and has the deputy make it.
    ///
    /// # Errors
    /// If the data does not fit.
    pub(crate) fn post(&mut self, layout: &MailboxLayout) -> std::result::Result<(), i32> {
        let args = self.stage(layout)?;
        self.post_raw(i64::from(layout.nr()), args);
        Ok(())
    }

    /// Writes only the data of a call that is made by injection. Returns the call's arguments.
    ///
    /// # Errors
    /// As [`post`](Self::post).
    pub(crate) fn stage(&mut self, layout: &MailboxLayout) -> std::result::Result<[u64; 6], i32> {
        let (memory, offset, at) = self.data.region_for(layout.size());
        layout.fill(at, memory.bytes(offset)).map_err(|_e| libc::ENOMEM)?;
        Ok(layout.args(at))
    }

    /// Records the result of a call that was made by injection.
    pub(crate) fn complete(&mut self, ret: i64) {
        self.data.small.bytes(0)[RESULT_OFFSET..RESULT_OFFSET + 8].copy_from_slice(&ret.to_le_bytes());
        self.header.word(STATE_OFFSET).store(DONE, std::sync::atomic::Ordering::Release);
    }

    /// The arguments with which a call was posted.
    pub(crate) fn staged_args(&mut self, layout: &MailboxLayout) -> [u64; 6] {
        let (_, _, at) = self.data.region_for(layout.size());
        layout.args(at)
    }

    /// Writes a call's data again, after it was changed.
    pub(crate) fn refill(&mut self, layout: &MailboxLayout) {
        let (memory, offset, at) = self.data.region_for(layout.size());
        let _fitted_before = layout.fill(at, memory.bytes(offset));
    }

    fn post_raw(&mut self, nr: i64, args: [u64; 6]) {
        let bytes = self.data.small.bytes(0);
        for (at, word) in [nr.cast_unsigned()].iter().chain(&args).enumerate() {
            let at = CALL_OFFSET + at * 8;
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        let state = self.header.word(STATE_OFFSET);
        state.store(REQUEST, std::sync::atomic::Ordering::Release);
        shared_memory::wake(state);
    }

    /// Waits inline for the call to finish. Returns whether it has.
    pub(crate) fn wait_inline(&mut self) -> bool {
        let state = self.header.word(STATE_OFFSET);
        if self.spin.should_spin() {
            let done = shared_memory::spin_while(state, REQUEST, SPIN_TIMEOUT) == DONE;
            self.spin.record(done);
            if done {
                return true;
            }
        }
        shared_memory::wait_while(state, REQUEST, Some(INLINE_WAIT_TIMEOUT)) == DONE
    }

    /// Has a waiter thread wake the main loop when the call finishes. If none can be started, the
    /// main loop must poll ([`Self::needs_polling`]).
    pub(crate) fn wake_when_done(&mut self) {
        if self.waiter.is_none() {
            self.waiter = self.start_waiter().ok();
        }
        if let Some(waiter) = &self.waiter {
            let _thread_lives = waiter.send(());
        }
    }

    fn start_waiter(&self) -> std::io::Result<Sender<()>> {
        let (waiter, wanted) = channel::<()>();
        let (word, waker) = (Arc::clone(&self.header), self.waker.clone());
        let wait = move || {
            while wanted.recv().is_ok() {
                while shared_memory::wait_while(word.word(STATE_OFFSET), REQUEST, None) == REQUEST {}
                waker.wake();
            }
        };
        threads::spawn("call", WAITER_STACK_SIZE, wait)?;
        Ok(waiter)
    }

    /// Whether nothing wakes the main loop when the call finishes: at a limit on the number of
    /// processes no thread could be started.
    pub(crate) fn needs_polling(&self) -> bool {
        self.waiter.is_none()
    }

    /// Whether the call has finished.
    pub(crate) fn is_done(&self) -> bool {
        self.header.word(STATE_OFFSET).load(std::sync::atomic::Ordering::Acquire) == DONE
    }

    /// Takes the result of a call that has finished.
    pub(crate) fn collect(&mut self, layout: &MailboxLayout, partial: Option<Partial>) -> Outcome {
        let mut ret = self.result();
        // If a signal ended the rest of a transfer, the result is the count moved before.
        if let Some(partial) = partial {
            ret = partial.total_result(ret);
        }
        let (memory, offset, _) = self.data.region_for(layout.size());
        let outcome = layout.collect(ret, memory.bytes(offset));
        self.set_idle();
        outcome
    }

    /// Takes the result of a call that a signal has interrupted. `ret` is the value that the kernel
    /// returned; the deputy was stopped before it stored this value.
    pub(crate) fn collect_interrupted(
        &mut self,
        layout: &MailboxLayout,
        partial: Option<Partial>,
        ret: i64,
    ) -> Outcome {
        let (memory, offset, _) = self.data.region_for(layout.size());
        let ret = partial.map_or(ret, |partial| partial.total_result(ret));
        layout.collect(ret, memory.bytes(offset))
    }

    /// The result of a call that has finished.
    pub(crate) fn result(&mut self) -> i64 {
        let bytes = &self.data.small.bytes(0)[RESULT_OFFSET..RESULT_OFFSET + 8];
        i64::from_le_bytes(bytes.try_into().unwrap_or_default())
    }

    fn set_idle(&mut self) {
        self.header.word(STATE_OFFSET).store(IDLE, std::sync::atomic::Ordering::Release);
    }
}

impl AdaptiveSpin {
    fn should_spin(&mut self) -> bool {
        let awake = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        awake
    }

    fn record(&mut self, in_time: bool) {
        self.last = if in_time { 0 } else { (self.last * 2 + 1).min(MAX_CALLS_WITHOUT_SPIN) };
        self.skip = self.last;
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        // Releases the waiter thread; the deputy may never finish the call.
        let state = self.header.word(STATE_OFFSET);
        state.store(IDLE, std::sync::atomic::Ordering::Release);
        shared_memory::wake(state);
    }
}

impl Data {
    /// The memory for a call of this size, the offset of its data there, and its address in the
    /// deputy.
    fn region_for(&mut self, size: usize) -> (&mut SharedMapping, usize, u64) {
        match &mut self.large {
            Some((memory, at)) if size > self.area.data_size() => (memory, 0, *at),
            _ => (&mut self.small, HEADER_SIZE, self.area.at + HEADER_SIZE as u64),
        }
    }
}

/// Creates shared memory in a process and maps it there at the address `at`, or, unless
/// `must_be_there`, at any free address. Returns the shim's descriptor of the memory and the
/// address. `name` is the address of the memory's name in the process.
///
/// The program must not notice that it has no descriptor free: then the memory has no name, and the
/// shim opens it by its mapping, which needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE (proc(5),
/// map_files).
fn map_shared(
    call: &mut dyn FnMut(i64, [u64; 6]) -> Result<i64>,
    pid: i32,
    name: u64,
    size: usize,
    at: u64,
    must_be_there: bool,
) -> Result<(OwnedFd, u64)> {
    let refused = |operation, source| Error::Refused { operation, pid, source };
    let mut must = |operation, nr, args| match call(nr, args)? {
        ret @ -4095..0 => Err(refused(operation, std::io::Error::from_raw_os_error((-ret) as i32))),
        ret => Ok(ret.cast_unsigned()),
    };
    let open = |path: String| std::fs::File::options().read(true).write(true).open(path);
    let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = libc::MAP_SHARED | if must_be_there { libc::MAP_FIXED } else { 0 };
    let created =
        must("make a mailbox", libc::SYS_memfd_create, [name, u64::from(libc::MFD_CLOEXEC), 0, 0, 0, 0]);
    let number = match created {
        Err(Error::Refused { source, .. }) if source.raw_os_error() == Some(libc::EMFILE) => {
            let flags = (flags | libc::MAP_ANONYMOUS) as u64;
            let mapped = must("map a mailbox", libc::SYS_mmap, [at, size as u64, prot, flags, u64::MAX, 0])?;
            let path = format!("/proc/{pid}/map_files/{mapped:x}-{:x}", mapped + size as u64);
            let memory = open(path).map_err(|source| refused("open a mailbox", source))?;
            return Ok((memory.into(), mapped));
        }
        created => created?,
    };
    // Through the thread that created it, since the first thread may have exited.
    let memory = open(format!("/proc/{pid}/fd/{number}"));
    let memory = memory.and_then(|memory| memory.set_len(size as u64).map(|()| memory));
    let memory = memory.map_err(|source| refused("size a mailbox", source));
    let mapped = must("map a mailbox", libc::SYS_mmap, [at, size as u64, prot, flags as u64, number, 0]);
    must("close a mailbox", libc::SYS_close, [number, 0, 0, 0, 0, 0])?;
    Ok((memory?.into(), mapped?))
}
