use std::io;
use std::ptr::NonNull;

use crate::session::MAX_WRITE_SIZE;

/// Size of the buffer for reading a request from the kernel. Since the kernel may send
/// up to `MAX_WRITE_SIZE` bytes in a write request, we use that value plus some extra space.
const BUFFER_SIZE: usize = MAX_WRITE_SIZE + 4096;

/// Tern's change: a buffer that is a mapping of its own, so that it begins at a page, only those of its pages
/// that were written use memory, and none of them does when the thread has ended. The allocator would keep
/// the memory of ended threads, and clear 16 MiB of it for the next.
#[derive(Debug)]
pub(crate) struct FuseReadBuf {
    start: NonNull<libc::c_void>,
}

impl FuseReadBuf {
    /// Maps a buffer of the default size.
    pub(crate) fn new() -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses unused addresses.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), BUFFER_SIZE, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Self { start })
    }

    /// Returns the buffer.
    pub(crate) fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is as long, initialised by the kernel, and this value's alone until it is dropped.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast().as_ptr(), BUFFER_SIZE) }
    }
}

impl Drop for FuseReadBuf {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        unsafe { libc::munmap(self.start.as_ptr(), BUFFER_SIZE) };
    }
}
