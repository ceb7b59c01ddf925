//! Memory shared with a deputy, and the futexes in it.
//!
//! While its program is away, the deputy runs only Tern's blob, but its memory cannot be trusted:
//! everything read here is read once and validated as hostile input.

use crate::error::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A mapping shared with another process, or a part of one.
#[derive(Debug)]
pub struct SharedMapping {
    base: *mut u8,
    len: usize,
    /// Shared by all parts, and unmapped with the last of them.
    mapping: Arc<Mapping>,
}

#[derive(Debug)]
struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: all access is through atomics or raw copies, and the mapping lives as long as the value.
unsafe impl Send for SharedMapping {}
// SAFETY: as above; the bytes are shared with another process anyway.
unsafe impl Sync for SharedMapping {}
// SAFETY: it is only accessed by its last owner, which unmaps it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl SharedMapping {
    /// Maps `len` bytes of `fd`.
    ///
    /// # Errors
    /// If the file cannot be mapped.
    pub fn map(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(Error::last("map a mailbox", 0));
        }
        let base = base.cast();
        Ok(Self { base, len, mapping: Arc::new(Mapping { base, len }) })
    }

    /// A part of the mapping. As long as the part exists, the whole mapping stays mapped.
    ///
    /// # Panics
    /// If it is not within the mapping, or not aligned to 8 bytes. The arguments are never received
    /// from another process.
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
    /// If the offset is out of bounds or unaligned. It is a constant of the mailbox layout, never a
    /// received number.
    #[must_use]
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.len);
        // SAFETY: in bounds and aligned (checked above); the deputy accesses it atomically too.
        unsafe { AtomicU32::from_ptr(self.base.add(offset).cast()) }
    }

    /// The bytes from `offset` to the end.
    ///
    /// The deputy does not write them between its reply and the next request, which is when this is
    /// called. A misbehaving deputy may change them at any time, and the caller must tolerate that.
    #[must_use]
    pub fn bytes(&mut self, offset: usize) -> &mut [u8] {
        let offset = offset.min(self.len);
        // SAFETY: in bounds. Access is exclusive: in this process through `&mut self`, and against
        // the deputy by the protocol.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(offset), self.len - offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this process's own mapping, to which no reference is left.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// Wakes all waiters on this word.
pub fn wake(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE only uses the address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Sleeps until the word differs from `value` or the time is over, and returns the word. A signal
/// may end the sleep earlier.
pub fn wait_while(word: &AtomicU32, value: u32, most: Option<Duration>) -> u32 {
    let now = word.load(Ordering::Acquire);
    if now != value {
        return now;
    }
    let time =
        most.map(|d| libc::timespec { tv_sec: d.as_secs() as i64, tv_nsec: i64::from(d.subsec_nanos()) });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word is valid; FUTEX_WAIT only reads it and the timeout.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, time) };
    word.load(Ordering::Acquire)
}

/// Spins until the word differs from `value` or the time is over, and returns the word.
pub fn spin_while(word: &AtomicU32, value: u32, most: Duration) -> u32 {
    let begun = Instant::now();
    loop {
        let now = word.load(Ordering::Acquire);
        if now != value || begun.elapsed() >= most {
            return now;
        }
        std::hint::spin_loop();
    }
}
