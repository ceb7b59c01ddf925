//! The mailbox of one deputy thread: memory shared with it, through which it is given calls.
//!
//! Fast calls are waited for on the spot, awake where that has paid off, so that they cost one wake-up or two;
//! slow ones are handed to a waiter thread, which shows their end by a descriptor of the main loop.

use crate::blob::{DONE, HEADER, IDLE, NUMBER, REQUEST, RESULT, STATE};
use crate::thread::Current;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use tern_image::Reserve;
use tern_syscall::{Layout, Outcome};
use tern_tracee::inject::Injection;
use tern_tracee::shared::{self, Shared};
use tern_tracee::{Error, Result};

/// What its memory is called in lists of open files and mappings.
const NAME: &[u8] = b"tern-mailbox\0";
/// Bytes of the mailbox of a thread that is not the first.
const ROOM: usize = 64 << 10;
/// Where those are, one after the other: below our range, which they would otherwise have no room in.
const ROOMS: u64 = Reserve::AREA - (1 << 40);
/// How long a call is waited for on the spot.
const SOON: Duration = Duration::from_micros(60);
/// How long of this awake: a deputy that wakes on another processor has answered a short call by then, and to be
/// woken in our turn would take as long again.
const AWAKE: Duration = Duration::from_micros(30);
/// At most so many calls are waited for asleep from the start, after some that did not end while we were awake.
const MOST_ASLEEP: u8 = 63;

/// A deputy's mailbox.
#[derive(Debug)]
pub(crate) struct Mailbox {
    header: Arc<Shared>,
    data: Data,
    bell: Bell,
    /// Its waiter, once it has had one.
    slow: Option<Sender<()>>,
    vigil: Vigil,
}

/// Where a mailbox is in its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) at: u64,
    len: usize,
}

impl Room {
    /// In our range: for the only thread of a process, or the first of several.
    pub(crate) fn first(reserve: Reserve) -> Self {
        Self { at: reserve.room(), len: Reserve::ROOM }
    }

    /// One of those for the other threads.
    pub(crate) fn other(number: u64) -> Self {
        Self { at: ROOMS + number * ROOM as u64, len: ROOM }
    }

    /// Whether it is one of those.
    pub(crate) fn is_other(self) -> bool {
        self.len == ROOM
    }

    /// The addresses of so many of those.
    pub(crate) fn others(count: u64) -> (u64, u64) {
        (Self::other(1).at, Self::other(count + 1).at)
    }

    fn is_in(self, reserve: Reserve) -> bool {
        reserve.meets(self.at, self.at + 1)
    }

    /// Bytes of data behind the header. The last page is left for injected calls.
    fn small(self) -> usize {
        self.len - HEADER - tern_tracee::PAGE as usize
    }
}

/// Whether to wait awake. It pays where the deputy has a processor of its own to wake up on, and its calls are
/// short; where it does not, the processor is the deputy's, or somebody else's.
#[derive(Debug, Default)]
struct Vigil {
    /// So many calls are still waited for asleep.
    asleep: u8,
    /// How many it was the last time.
    last: u8,
}

/// Where a call's data lies: behind the header, or for a large call in a mapping of its own.
#[derive(Debug)]
struct Data {
    small: Shared,
    room: Room,
    large: Option<(Shared, u64)>,
}

/// Shows the main loop that some deputy's slow call has ended.
#[derive(Debug, Clone)]
pub(crate) struct Bell(Arc<OwnedFd>);

impl Bell {
    pub(crate) fn new() -> std::io::Result<Self> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        Ok(Self(Arc::new(rustix::event::eventfd(0, flags)?)))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(crate) fn ring(&self) {
        let _full_is_rung = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn clear(&self) {
        let _was_not_rung = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl Mailbox {
    /// Makes a mailbox in a process under injection.
    ///
    /// # Errors
    /// If the process is gone, or has no room for a descriptor for a moment.
    pub(crate) fn make(injection: &mut Injection, reserve: Reserve, room: Room, bell: Bell) -> Result<Self> {
        let mut all = Self::make_all(injection, reserve, &[room], bell)?;
        all.pop().ok_or(Error::Gone { pid: injection.pid() })
    }

    /// Makes mailboxes that lie one behind the other.
    ///
    /// # Errors
    /// As [`make`](Self::make).
    pub(crate) fn make_all(
        injection: &mut Injection,
        reserve: Reserve,
        rooms: &[Room],
        bell: Bell,
    ) -> Result<Vec<Self>> {
        let Some(first) = rooms.first() else { return Ok(Vec::new()) };
        let len = rooms.iter().map(|room| room.len).sum();
        let (pid, name) = (injection.pid(), reserve.scratch());
        tern_tracee::Memory::open(pid)?.write(name, NAME)?;
        let make = &mut |nr, args| injection.call(nr, args);
        let (memory, _) = map(make, pid, name, len, first.at, true)?;
        if !first.is_in(reserve) {
            // A child has one thread, whose mailbox is in our range.
            let dont_fork = [first.at, len as u64, libc::MADV_DONTFORK as u64, 0, 0, 0];
            injection.must("keep mailboxes to one process", libc::SYS_madvise, dont_fork)?;
        }
        let whole = Shared::map(memory.as_fd(), len)?;
        let mailbox = |room: &Room| {
            let part = || whole.part((room.at - first.at) as usize, room.len);
            let data = Data { small: part(), room: *room, large: None };
            Self { header: Arc::new(part()), data, bell: bell.clone(), slow: None, vigil: Vigil::default() }
        };
        Ok(rooms.iter().map(mailbox).collect())
    }

    /// The addresses, in the deputy, of what of it is not in our range.
    pub(crate) fn outside(&self, reserve: Reserve) -> impl Iterator<Item = (u64, u64)> {
        let room = self.room();
        let own = (!room.is_in(reserve)).then_some((room.at, room.at + room.len as u64));
        own.into_iter().chain(self.large())
    }

    /// What of the latter is for large calls.
    pub(crate) fn large(&self) -> Option<(u64, u64)> {
        self.data.large.as_ref().map(|(memory, at)| (*at, at + memory.len() as u64))
    }

    /// Where it is.
    pub(crate) fn room(&self) -> Room {
        self.data.room
    }

    /// Whether the data of this call fits what there is.
    pub(crate) fn fits(&self, size: usize) -> bool {
        size <= self.data.room.small() || self.data.large.as_ref().is_some_and(|l| size <= l.0.len())
    }

    /// Makes room for a large call, by calls of the deputy under injection.
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
        tern_tracee::Memory::open(pid)?.write(name, NAME)?;
        // Where the program, which may grow elsewhere meanwhile, will have nothing.
        let hint = Reserve::AREA + (1 << 32);
        let (memory, at) = map(&mut |nr, args| injection.call(nr, args), pid, name, size, hint, false)?;
        self.data.large = Some((Shared::map(memory.as_fd(), size)?, at));
        Ok(())
    }

    /// Writes a call and its data, and has the deputy make it.
    ///
    /// # Errors
    /// If the data does not fit.
    pub(crate) fn post(&mut self, layout: &Layout) -> std::result::Result<(), i32> {
        let args = self.lay(layout)?;
        self.post_raw(i64::from(layout.nr()), args);
        Ok(())
    }

    /// Writes only the data of a call, which somebody else has the deputy make; its arguments.
    ///
    /// # Errors
    /// As [`post`](Self::post).
    pub(crate) fn lay(&mut self, layout: &Layout) -> std::result::Result<[u64; 6], i32> {
        let (memory, offset, at) = self.data.of(layout.size());
        layout.fill(at, memory.bytes(offset)).map_err(|_e| libc::ENOMEM)?;
        Ok(layout.args(at))
    }

    /// That call has been made, and returned this.
    pub(crate) fn made(&mut self, ret: i64) {
        self.data.small.bytes(0)[RESULT..RESULT + 8].copy_from_slice(&ret.to_le_bytes());
        self.header.word(STATE).store(DONE, std::sync::atomic::Ordering::Release);
    }

    /// The arguments with which a call was posted.
    pub(crate) fn arguments(&mut self, layout: &Layout) -> [u64; 6] {
        let (_, _, at) = self.data.of(layout.size());
        layout.args(at)
    }

    /// Writes a call's data again, after it was changed.
    pub(crate) fn refill(&mut self, layout: &Layout) {
        let (memory, offset, at) = self.data.of(layout.size());
        let _fitted_before = layout.fill(at, memory.bytes(offset));
    }

    fn post_raw(&mut self, nr: i64, args: [u64; 6]) {
        let bytes = self.data.small.bytes(0);
        for (at, word) in [nr.cast_unsigned()].iter().chain(&args).enumerate() {
            let at = NUMBER + at * 8;
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        let state = self.header.word(STATE);
        state.store(REQUEST, std::sync::atomic::Ordering::Release);
        shared::wake(state);
    }

    /// Waits a moment for the call to end; true if it has.
    pub(crate) fn soon(&mut self) -> bool {
        let state = self.header.word(STATE);
        if self.vigil.begins() {
            let done = shared::watch_while(state, REQUEST, AWAKE) == DONE;
            self.vigil.ends(done);
            if done {
                return true;
            }
        }
        shared::wait_while(state, REQUEST, Some(SOON)) == DONE
    }

    /// Has the bell rung when the call ends.
    pub(crate) fn ring_later(&mut self) {
        let slow = self.slow.get_or_insert_with(|| {
            let (slow, wanted) = channel::<()>();
            let (word, bell) = (Arc::clone(&self.header), self.bell.clone());
            std::thread::spawn(move || {
                while wanted.recv().is_ok() {
                    while shared::wait_while(word.word(STATE), REQUEST, None) == REQUEST {}
                    bell.ring();
                }
            });
            slow
        });
        let _thread_lives = slow.send(());
    }

    /// Whether the call has ended.
    pub(crate) fn is_done(&self) -> bool {
        self.header.word(STATE).load(std::sync::atomic::Ordering::Acquire) == DONE
    }

    /// Takes the result of a call that has ended.
    pub(crate) fn collect(&mut self, current: &Current) -> Outcome {
        let (mut ret, layout) = (self.result(), &current.layout);
        // Also when a signal ends it: what was moved is what a write or receive returns then.
        if let Some(partial) = current.partial {
            ret = partial.whole(ret);
        }
        let (memory, offset, _) = self.data.of(layout.size());
        let outcome = layout.collect(ret, memory.bytes(offset));
        self.rest();
        outcome
    }

    /// Takes the result of a call that a signal has interrupted: what the kernel returned, before the deputy could
    /// say so itself.
    pub(crate) fn cut_short(&mut self, current: &Current, ret: i64) -> Outcome {
        let (memory, offset, _) = self.data.of(current.layout.size());
        let ret = current.partial.map_or(ret, |partial| partial.whole(ret));
        current.layout.collect(ret, memory.bytes(offset))
    }

    fn result(&mut self) -> i64 {
        let bytes = &self.data.small.bytes(0)[RESULT..RESULT + 8];
        i64::from_le_bytes(bytes.try_into().unwrap_or_default())
    }

    fn rest(&mut self) {
        self.header.word(STATE).store(IDLE, std::sync::atomic::Ordering::Release);
    }
}

impl Vigil {
    fn begins(&mut self) -> bool {
        let awake = self.asleep == 0;
        self.asleep = self.asleep.saturating_sub(1);
        awake
    }

    fn ends(&mut self, in_time: bool) {
        self.last = if in_time { 0 } else { (self.last * 2 + 1).min(MOST_ASLEEP) };
        self.asleep = self.last;
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        // Lets a waiter go, whose deputy may never answer any more.
        let state = self.header.word(STATE);
        state.store(IDLE, std::sync::atomic::Ordering::Release);
        shared::wake(state);
    }
}

impl Data {
    /// The memory for a call of this size, the offset of its data there, and its address in the deputy.
    fn of(&mut self, size: usize) -> (&mut Shared, usize, u64) {
        match &mut self.large {
            Some((memory, at)) if size > self.room.small() => (memory, 0, *at),
            _ => (&mut self.small, HEADER, self.room.at + HEADER as u64),
        }
    }
}

/// Has a process make shared memory and map it at this address, or, unless that is a `must`, where there is room; its
/// descriptor comes to us and is closed there. `name` is the address of any string in the process.
fn map(
    call: &mut dyn FnMut(i64, [u64; 6]) -> Result<i64>,
    pid: i32,
    name: u64,
    size: usize,
    at: u64,
    must_be_there: bool,
) -> Result<(OwnedFd, u64)> {
    let mut must = |operation, nr, args| match call(nr, args)? {
        ret @ -4095..0 => {
            let source = std::io::Error::from_raw_os_error((-ret) as i32);
            Err(Error::Refused { operation, pid, source })
        }
        ret => Ok(ret.cast_unsigned()),
    };
    let number =
        must("make a mailbox", libc::SYS_memfd_create, [name, u64::from(libc::MFD_CLOEXEC), 0, 0, 0, 0])?;
    // By the thread that has made it: the first one may have ended.
    let path = format!("/proc/{pid}/fd/{number}");
    let memory = std::fs::File::options().read(true).write(true).open(path);
    let memory = memory.and_then(|memory| memory.set_len(size as u64).map(|()| memory));
    let memory = memory.map_err(|source| Error::Refused { operation: "size a mailbox", pid, source });
    let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = libc::MAP_SHARED | if must_be_there { libc::MAP_FIXED } else { 0 };
    let mapped = must("map a mailbox", libc::SYS_mmap, [at, size as u64, prot, flags as u64, number, 0]);
    must("close a mailbox", libc::SYS_close, [number, 0, 0, 0, 0, 0])?;
    Ok((memory?.into(), mapped?))
}
