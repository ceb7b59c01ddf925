//! Memory that we share with a deputy, and the futexes in it.
//!
//! The deputy runs only our blob while its program is away, but its memory is not ours: everything read
//! here is read once and checked, as input from a stranger.

use crate::error::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A mapping shared with another process, or a part of one.
#[derive(Debug)]
pub struct Shared {
    base: *mut u8,
    len: usize,
    /// Lives as long as the last of its parts.
    mapping: Arc<Mapping>,
}

#[derive(Debug)]
struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: all access goes through atomics or raw copies, and the mapping lives as long as the value.
unsafe impl Send for Shared {}
// SAFETY: as above; the bytes are shared with another process anyway.
unsafe impl Sync for Shared {}
// SAFETY: nobody looks at it but the last of its users, who unmaps it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Shared {
    /// Maps `len` bytes of `fd`.
    ///
    /// # Errors
    /// If the file cannot be mapped.
    pub fn map(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(Error::last("map a mailbox", 0));
        }
        let base = base.cast();
        Ok(Self { base, len, mapping: Arc::new(Mapping { base, len }) })
    }

    /// A part of it, which is there on.
    ///
    /// # Panics
    /// If it does not lie in it: where parts are is ours to say.
    #[must_use]
    pub fn part(&self, offset: usize, len: usize) -> Self {
        assert!(offset.is_multiple_of(8) && offset.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: in bounds (checked above).
        let base = unsafe { self.base.add(offset) };
        Self { base, len, mapping: Arc::clone(&self.mapping) }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The 32-bit word at this offset.
    ///
    /// # Panics
    /// If the offset is not ours to use: it is a constant of the mailbox's layout, never a stranger's number.
    #[must_use]
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.len);
        // SAFETY: in bounds and aligned (checked above); the other side uses it atomically too.
        unsafe { AtomicU32::from_ptr(self.base.add(offset).cast()) }
    }

    /// The bytes from `offset` to the end.
    ///
    /// The deputy does not touch them between its answer and the next request, which is when this is called;
    /// one that strayed would change bytes under our eyes, which its user must then bear.
    #[must_use]
    pub fn bytes(&mut self, offset: usize) -> &mut [u8] {
        let offset = offset.min(self.len);
        // SAFETY: in bounds; exclusive on our side through `&mut self`, and by the protocol on the other.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(offset), self.len - offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which no reference is left.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// Wakes who waits for this word.
pub fn wake(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE looks at the address only.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Waits until the word is not `value` any more, or the time is over, and returns the word.
pub fn wait_while(word: &AtomicU32, value: u32, most: Option<Duration>) -> u32 {
    let now = word.load(Ordering::Acquire);
    if now != value {
        return now;
    }
    let time =
        most.map(|d| libc::timespec { tv_sec: d.as_secs() as i64, tv_nsec: i64::from(d.subsec_nanos()) });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word is valid; FUTEX_WAIT reads it and the time only.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, time) };
    word.load(Ordering::Acquire)
}

/// Watches the word, awake, until it is not `value` any more, or the time is over, and returns it.
pub fn watch_while(word: &AtomicU32, value: u32, most: Duration) -> u32 {
    let begun = Instant::now();
    loop {
        let now = word.load(Ordering::Acquire);
        if now != value || begun.elapsed() >= most {
            return now;
        }
        std::hint::spin_loop();
    }
}
