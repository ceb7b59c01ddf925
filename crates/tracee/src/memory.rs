//! Another process' memory. Its addresses are plain numbers here: nothing can dereference them by mistake.

use crate::error::{Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The memory of one process, as long as it does not execute another program.
#[derive(Debug)]
pub struct Memory {
    pid: i32,
    file: File,
}

impl Memory {
    /// Opens it.
    ///
    /// # Errors
    /// If the process is gone, or not ours to trace.
    pub fn open(pid: i32) -> Result<Self> {
        let file = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"));
        let file = file.map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::Gone { pid },
            _ => Error::from_io("open memory", pid, e),
        })?;
        Ok(Self { pid, file })
    }

    /// Whose it is.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Fills `into` from `from`.
    ///
    /// # Errors
    /// If not all of it is readable; `into` is then partly filled.
    pub fn read(&self, from: u64, into: &mut [u8]) -> Result<()> {
        let got = self.read_some(from, into)?;
        if got == into.len() { Ok(()) } else { self.read_forced(from, into) }
    }

    /// Reads as much as is readable without a gap, and says how much; 0 if nothing is.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn read_some(&self, from: u64, into: &mut [u8]) -> Result<usize> {
        let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        let remote =
            libc::iovec { iov_base: std::ptr::without_provenance_mut(from as usize), iov_len: into.len() };
        // SAFETY: `local` describes `into`, which is exclusively ours; the remote part is not dereferenced here.
        let n = unsafe { libc::process_vm_readv(self.pid, &raw const local, 1, &raw const remote, 1, 0) };
        self.count(n, "read memory")
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

    /// Reads many runs `(address, length)` one behind the other into `into`, with few system calls.
    ///
    /// # Errors
    /// If one of them is not readable.
    pub fn read_runs(&self, runs: &[(u64, u64)], into: &mut [u8]) -> Result<()> {
        let mut rest = into;
        for some in runs.chunks(512) {
            let total: u64 = some.iter().map(|r| r.1).sum();
            let Some((now, later)) = std::mem::take(&mut rest).split_at_mut_checked(total as usize) else {
                return Err(Error::Astray { what: "runs longer than their buffer".into(), pid: self.pid });
            };
            rest = later;
            let remote: Vec<libc::iovec> = some
                .iter()
                .map(|&(addr, len)| libc::iovec {
                    iov_base: std::ptr::without_provenance_mut(addr as usize),
                    iov_len: len as usize,
                })
                .collect();
            let local = libc::iovec { iov_base: now.as_mut_ptr().cast(), iov_len: now.len() };
            // SAFETY: `local` describes `now`, which is exclusively ours and as long as the runs together.
            let n = unsafe {
                libc::process_vm_readv(self.pid, &raw const local, 1, remote.as_ptr(), remote.len() as u64, 0)
            };
            if usize::try_from(n) != Ok(now.len()) {
                // Some page is there but not readable by the process itself: read run by run, with force.
                let mut at = 0;
                for &(addr, len) in some {
                    self.read_forced(addr, &mut now[at..at + len as usize])?;
                    at += len as usize;
                }
            }
        }
        Ok(())
    }

    /// Writes `data` at `to`, as the process itself could.
    ///
    /// # Errors
    /// If not all of it is writable; a part may have been written.
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

    /// Writes `data` at `to` also where the process itself may not write; private pages are copied first,
    /// as a debugger's breakpoint does.
    ///
    /// # Errors
    /// If nothing is mapped there.
    pub fn write_forced(&self, to: u64, data: &[u8]) -> Result<()> {
        if self.write(to, data).is_ok() {
            return Ok(());
        }
        self.file.write_all_at(data, to).map_err(|e| Error::from_io("write memory", self.pid, e))
    }

    /// Reads one machine word.
    ///
    /// # Errors
    /// If it is not readable.
    pub fn word(&self, from: u64) -> Result<u64> {
        let mut bytes = [0; 8];
        self.read(from, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}
