//! Reading a file through memory: unlike read(2), this causes no IN_ACCESS event.

use crate::PAGE;
use crate::error::{Error, Result};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// A private, read-only mapping of the beginning of a file.
#[derive(Debug)]
pub struct FileMapping {
    base: u64,
    len: u64,
}

impl FileMapping {
    /// Maps the first `len` bytes of `fd`, which is open for reading.
    ///
    /// # Errors
    /// If the file cannot be mapped.
    pub fn map(fd: BorrowedFd<'_>, len: u64) -> Result<Self> {
        let (prot, how) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_NORESERVE);
        let size = len.max(1).next_multiple_of(PAGE) as usize;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), size, prot, how, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(Error::last("map a file", 0));
        }
        Ok(Self { base: base.expose_provenance() as u64, len })
    }

    /// Reads from this offset in the file. Returns the number of bytes read, 0 at the end of the
    /// mapping.
    ///
    /// # Errors
    /// If the file is shorter by now, or its file system cannot read it.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = (into.len() as u64).min(self.len.saturating_sub(offset));
        let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: len as usize };
        let from = std::ptr::without_provenance_mut((self.base + offset) as usize);
        let mapped = libc::iovec { iov_base: from, iov_len: len as usize };
        // By a system call, since an access to a page that the file has lost would raise SIGBUS.
        // SAFETY: `local` describes a part of `into`; only the kernel dereferences the other address.
        let n =
            unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const mapped, 1, 0) };
        usize::try_from(n).map_err(|_e| io::Error::last_os_error())
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        let size = self.len.max(1).next_multiple_of(PAGE) as usize;
        // SAFETY: mapped in `map`, and nothing refers to it.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.base as usize), size) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    #[test]
    fn file_is_read_through_memory_also_when_it_was_truncated() {
        // SAFETY: the name is a string that ends with a zero.
        let memfd = unsafe { libc::memfd_create(c"test".as_ptr(), 0) };
        // SAFETY: the kernel has just returned this new descriptor.
        let mut file: std::fs::File = unsafe { std::os::fd::FromRawFd::from_raw_fd(memfd) };
        file.write_all(&[7; 5000]).unwrap();
        let mapping = FileMapping::map(file.as_fd(), 5000).unwrap();
        let mut buffer = [0; 100];
        assert_eq!(mapping.read_at(&mut buffer, 4950).unwrap(), 50);
        assert_eq!(buffer[..50], [7; 50]);
        assert_eq!(mapping.read_at(&mut buffer, 5000).unwrap(), 0);
        file.set_len(100).unwrap();
        assert!(mapping.read_at(&mut buffer, 4950).is_err(), "the page is gone");
    }
}
