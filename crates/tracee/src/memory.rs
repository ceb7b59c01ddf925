//! Another process's memory. Addresses are plain integers, which cannot be dereferenced by mistake.

pub mod pagemap;
pub mod shared_memory;
pub mod write_tracker;

use crate::PAGE;
use crate::error::{Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Maximum number of runs that one system call transfers (at most `UIO_MAXIOV`).
const MAX_RUNS: usize = 512;

/// A run of another process's memory. Its address is not dereferenced here.
fn remote_part((addr, len): (u64, u64)) -> libc::iovec {
    libc::iovec { iov_base: std::ptr::without_provenance_mut(addr as usize), iov_len: len as usize }
}

/// The memory of a process, until it executes another program.
#[derive(Debug)]
pub struct Memory {
    pid: i32,
    file: File,
}

impl Memory {
    /// Opens the memory of a process.
    ///
    /// # Errors
    /// If the process is gone, or may not be traced.
    pub fn open(pid: i32) -> Result<Self> {
        let file = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"));
        let file = file.map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::Gone { pid },
            _ => Error::from_io("open memory", pid, e),
        })?;
        Ok(Self { pid, file })
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Fills `into` from address `from`, also from pages that the process itself may not read.
    ///
    /// # Errors
    /// If a part of it cannot be read. `into` may be partly filled.
    pub fn read(&self, from: u64, into: &mut [u8]) -> Result<()> {
        let got = self.read_some(from, into)?;
        if got == into.len() { Ok(()) } else { self.read_forced(from, into) }
    }

    /// Reads up to the first unreadable page, and returns the number of bytes read.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn read_some(&self, from: u64, into: &mut [u8]) -> Result<usize> {
        let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        let remote =
            libc::iovec { iov_base: std::ptr::without_provenance_mut(from as usize), iov_len: into.len() };
        // SAFETY: `local` describes `into`; the remote address is not dereferenced here.
        let n = unsafe { libc::process_vm_readv(self.pid, &raw const local, 1, &raw const remote, 1, 0) };
        self.count(n, "read memory")
    }

    /// The number of bytes from the beginning of this range that can be read. Reading a byte of each page
    /// shows that the page is mapped. Writing the byte back would race with the page's other users, so a
    /// read-only page counts.
    #[must_use]
    pub fn mapped_len(&self, from: u64, len: u64) -> u64 {
        let mut byte = [0];
        let mut pages = (from & !(PAGE - 1)..from.saturating_add(len)).step_by(PAGE as usize);
        let bad = pages.find(|page| !self.read_some((*page).max(from), &mut byte).is_ok_and(|n| n == 1));
        bad.map_or(len, |bad| bad.max(from) - from)
    }

    fn count(&self, n: isize, operation: &'static str) -> Result<usize> {
        usize::try_from(n).or_else(|_e| match Error::last(operation, self.pid) {
            Error::Refused { source, .. } if source.raw_os_error() == Some(libc::EFAULT) => Ok(0),
            e => Err(e),
        })
    }

    fn read_forced(&self, from: u64, into: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(into, from).map_err(|e| Error::from_io("read memory", self.pid, e))
    }

    /// Reads many runs `(address, length)` one after the other into `into`, with few system calls.
    ///
    /// # Errors
    /// If a part of a run cannot be read.
    pub fn read_runs(&self, runs: &[(u64, u64)], into: &mut [u8]) -> Result<()> {
        let mut rest = into;
        for some in runs.chunks(MAX_RUNS) {
            let total: u64 = some.iter().map(|r| r.1).sum();
            let Some((now, later)) = std::mem::take(&mut rest).split_at_mut_checked(total as usize) else {
                return Err(Error::Inconsistent {
                    what: "runs longer than their buffer".into(),
                    pid: self.pid,
                });
            };
            rest = later;
            let remote: Vec<libc::iovec> = some.iter().map(|run| remote_part(*run)).collect();
            let local = libc::iovec { iov_base: now.as_mut_ptr().cast(), iov_len: now.len() };
            // SAFETY: `local` describes `now`, which is as long as the runs together.
            let n = unsafe {
                libc::process_vm_readv(self.pid, &raw const local, 1, remote.as_ptr(), remote.len() as u64, 0)
            };
            if usize::try_from(n) != Ok(now.len()) {
                // A page is present but not readable for the process itself: read run by run
                // through /proc/PID/mem.
                let mut at = 0;
                for &(addr, len) in some {
                    self.read_forced(addr, &mut now[at..at + len as usize])?;
                    at += len as usize;
                }
            }
        }
        Ok(())
    }

    /// Writes `data` to address `to`, with the process's own access rights.
    ///
    /// # Errors
    /// If a part of it is not writable. Some of it may have been written.
    pub fn write(&self, to: u64, data: &[u8]) -> Result<()> {
        let local = libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
        let remote =
            libc::iovec { iov_base: std::ptr::without_provenance_mut(to as usize), iov_len: data.len() };
        // SAFETY: the kernel only reads from `local`, which describes `data`.
        let n = unsafe { libc::process_vm_writev(self.pid, &raw const local, 1, &raw const remote, 1, 0) };
        if self.count(n, "write memory")? == data.len() {
            return Ok(());
        }
        let fault = std::io::Error::from_raw_os_error(libc::EFAULT);
        Err(Error::Refused { operation: "write memory", pid: self.pid, source: fault })
    }

    /// Writes `data` to address `to` even if the process may not write there. Private pages are
    /// copied first, as for a debugger's breakpoint.
    ///
    /// # Errors
    /// If the address is not mapped.
    pub fn write_forced(&self, to: u64, data: &[u8]) -> Result<()> {
        if self.write(to, data).is_ok() {
            return Ok(());
        }
        self.file.write_all_at(data, to).map_err(|e| Error::from_io("write memory", self.pid, e))
    }

    /// Writes `data` to many runs `(address, length)`, one after the other, with few system calls
    /// and as [`write_forced`](Self::write_forced).
    ///
    /// # Errors
    /// If the runs are longer than `data`, or an address is not mapped.
    pub fn write_runs_forced(&self, runs: &[(u64, u64)], data: &[u8]) -> Result<()> {
        let (mut runs, mut data) = (runs, data);
        while !runs.is_empty() {
            let some = &runs[..runs.len().min(MAX_RUNS)];
            let total = some.iter().map(|run| run.1).sum::<u64>() as usize;
            let longer = || Error::Inconsistent { what: "runs longer than their data".into(), pid: self.pid };
            let mut written = self.write_some(some, data.get(..total).ok_or_else(longer)?);
            for &(to, length) in some {
                let (now, rest) = data.split_at(length as usize);
                (runs, data) = (&runs[1..], rest);
                if written < now.len() {
                    // The process may not write there.
                    self.file
                        .write_all_at(&now[written..], to + written as u64)
                        .map_err(|e| Error::from_io("write memory", self.pid, e))?;
                    break;
                }
                written -= now.len();
            }
        }
        Ok(())
    }

    /// Writes `data` to runs that together have its length, up to the first page that the process
    /// may not write. Returns the number of bytes written.
    fn write_some(&self, runs: &[(u64, u64)], data: &[u8]) -> usize {
        let remote: Vec<libc::iovec> = runs.iter().map(|run| remote_part(*run)).collect();
        let local = libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
        // SAFETY: the kernel only reads from `local`, which describes `data`.
        let n = unsafe {
            libc::process_vm_writev(self.pid, &raw const local, 1, remote.as_ptr(), remote.len() as u64, 0)
        };
        usize::try_from(n).unwrap_or(0)
    }

    /// Reads a 64-bit word.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn word(&self, from: u64) -> Result<u64> {
        let mut bytes = [0; 8];
        self.read(from, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}
