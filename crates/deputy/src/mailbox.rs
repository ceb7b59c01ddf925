//! The mailbox of one deputy: memory shared with it, through which it is given calls.
//!
//! Fast calls are waited for on the spot, awake where that has paid off, so that they cost one wake-up or two;
//! slow ones are handed to a waiter thread, which shows their end by a descriptor of the main loop.

use crate::blob::{DONE, HEADER, IDLE, NUMBER, REQUEST, RESULT, STATE};
use crate::member::Current;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use tern_image::Reserve;
use tern_syscall::{Layout, Outcome};
use tern_tracee::inject::Injection;
use tern_tracee::pidfd::Pidfd;
use tern_tracee::shared::{self, Shared};
use tern_tracee::{Error, Result};

/// What its memory is called in lists of open files and mappings.
const NAME: &[u8] = b"tern-mailbox\0";
/// Bytes of data behind the header. The last page is left for injected calls.
const SMALL: usize = Reserve::ROOM - HEADER - tern_tracee::PAGE as usize;
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
    slow: Sender<()>,
    vigil: Vigil,
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
    small_at: u64,
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
    /// Makes a mailbox in a process under injection, over the writable part of its reserved range.
    ///
    /// # Errors
    /// If the process is gone, or has no room for a descriptor for a moment.
    pub(crate) fn make(injection: &mut Injection, reserve: Reserve, bell: Bell) -> Result<Self> {
        let (pid, name) = (injection.pid(), reserve.room());
        tern_tracee::Memory::open(pid)?.write(name, NAME)?;
        let make = &mut |nr, args| injection.call(nr, args);
        let (memory, _) = map(make, pid, name, Reserve::ROOM, Some(reserve.room()))?;
        Self::over(memory, reserve, bell)
    }

    fn over(memory: OwnedFd, reserve: Reserve, bell: Bell) -> Result<Self> {
        let header = Arc::new(Shared::map(memory.as_fd(), Reserve::ROOM)?);
        let small = Shared::map(memory.as_fd(), Reserve::ROOM)?;
        let (slow, wanted) = channel::<()>();
        let word = Arc::clone(&header);
        std::thread::spawn(move || {
            while wanted.recv().is_ok() {
                while shared::wait_while(word.word(STATE), REQUEST, None) == REQUEST {}
                bell.ring();
            }
        });
        let data = Data { small, small_at: reserve.room() + HEADER as u64, large: None };
        Ok(Self { header, data, slow, vigil: Vigil::default() })
    }

    /// The addresses, in the deputy, of the mapping for large calls.
    pub(crate) fn large(&self) -> Option<(u64, u64)> {
        self.data.large.as_ref().map(|(memory, at)| (*at, at + memory.len() as u64))
    }

    /// Whether the data of this call fits what there is.
    pub(crate) fn fits(&self, size: usize) -> bool {
        size <= SMALL || self.data.large.as_ref().is_some_and(|l| size <= l.0.len())
    }

    /// Makes room for a large call, by calls of the deputy under injection.
    ///
    /// # Errors
    /// If it is gone, or has no memory or descriptor left.
    pub(crate) fn grow(&mut self, injection: &mut Injection, size: usize) -> Result<()> {
        let size = size.next_multiple_of(1 << 20);
        if let Some((memory, at)) = self.data.large.take() {
            let unmap = [at, memory.len() as u64, 0, 0, 0, 0];
            injection.must("release a mailbox", libc::SYS_munmap, unmap)?;
        }
        let pid = injection.pid();
        let name = self.data.small_at + SMALL as u64;
        self.data.small.bytes(HEADER + SMALL)[..NAME.len()].copy_from_slice(NAME);
        let (memory, at) = map(&mut |nr, args| injection.call(nr, args), pid, name, size, None)?;
        self.data.large = Some((Shared::map(memory.as_fd(), size)?, at));
        Ok(())
    }

    /// Writes a call and its data, and has the deputy make it.
    ///
    /// # Errors
    /// If the data does not fit.
    pub(crate) fn post(&mut self, layout: &Layout) -> std::result::Result<(), i32> {
        let (memory, offset, at) = self.data.of(layout.size());
        layout.fill(at, memory.bytes(offset)).map_err(|_e| libc::ENOMEM)?;
        self.post_raw(i64::from(layout.nr()), layout.args(at));
        Ok(())
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
    pub(crate) fn ring_later(&self) {
        let _thread_lives = self.slow.send(());
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
            Some((memory, at)) if size > SMALL => (memory, 0, *at),
            _ => (&mut self.small, HEADER, self.small_at),
        }
    }
}

/// Has a process make shared memory and map it, at `at` or where there is room; its descriptor comes to us and
/// is closed there. `name` is the address of any string in the process.
fn map(
    call: &mut dyn FnMut(i64, [u64; 6]) -> Result<i64>,
    pid: i32,
    name: u64,
    size: usize,
    at: Option<u64>,
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
    let memory = Pidfd::open(pid)?.descriptor(number as i32)?;
    rustix::fs::ftruncate(&memory, size as u64).map_err(|e| Error::Refused {
        operation: "size a mailbox",
        pid,
        source: e.into(),
    })?;
    let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = libc::MAP_SHARED | if at.is_some() { libc::MAP_FIXED } else { 0 };
    // Without a given place: where the program, which may grow elsewhere meanwhile, will have nothing.
    let args = [at.unwrap_or(Reserve::AREA + (1 << 32)), size as u64, prot, flags as u64, number, 0];
    let mapped = must("map a mailbox", libc::SYS_mmap, args);
    must("close a mailbox", libc::SYS_close, [number, 0, 0, 0, 0, 0])?;
    Ok((memory, mapped?))
}
