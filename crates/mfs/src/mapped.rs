//! Detects when a closed file is no longer mapped writable by any program of this node.
//!
//! With FUSE passthrough the mapping of a file outlives the FUSE file: the kernel keeps a reference
//! to the backing file. The kernel refuses a read lease (fcntl(2): `F_SETLEASE` with `F_RDLCK`)
//! while any process has the file open for writing or mapped writable, so a file is polled by
//! trying to take such a lease.

use rustix::fs::{Mode, OFlags, open};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Sets the signal that announces a lease break (asm-generic/fcntl.h).
const F_SETSIG: libc::c_int = 10;

/// How often each file is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Sends files to the polling thread, each with a value that is dropped when no process can store
/// to the file any more.
#[derive(Debug)]
pub(crate) struct MappedFiles<T>(Sender<(OwnedFd, T)>);

impl<T: Send + 'static> MappedFiles<T> {
    /// Starts the polling thread, which runs with this process's credentials.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start() -> io::Result<Self> {
        let (sender, closed) = channel();
        std::thread::Builder::new().name("mapped".into()).spawn(move || poll(&closed))?;
        Ok(Self(sender))
    }

    /// Polls a file, given as an `O_PATH` descriptor, from now on.
    pub(crate) fn watch(&self, file: OwnedFd, guard: T) {
        let _ended = self.0.send((file, guard));
    }
}

fn poll<T>(closed: &Receiver<(OwnedFd, T)>) {
    let mut all: Vec<(OwnedFd, T)> = Vec::new();
    loop {
        let next = if all.is_empty() {
            closed.recv().map_err(|_no_more| RecvTimeoutError::Disconnected)
        } else {
            closed.recv_timeout(POLL_INTERVAL)
        };
        match next {
            Ok(one) => all.push(one),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        all.retain(|(file, _)| is_open_for_writing(file));
    }
}

/// The path of one of our own descriptors.
pub(crate) fn proc_fd_path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Whether any process on this node has the file open for writing or mapped writable. True also if
/// that cannot be determined.
fn is_open_for_writing(file: &OwnedFd) -> bool {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    !open(proc_fd_path(file), flags, Mode::empty()).is_ok_and(|file| take_lease(&file).is_ok())
}

/// Takes a kernel lease (`F_SETLEASE`) on the file, and releases it at once.
#[expect(unsafe_code, reason = "F_SETLEASE has no safe wrapper")]
fn take_lease(file: &OwnedFd) -> io::Result<()> {
    // A process that opens the file meanwhile breaks the lease; the kernel then sends SIGURG, which
    // is ignored by default.
    for (command, argument) in
        [(F_SETSIG, libc::SIGURG), (libc::F_SETLEASE, libc::F_RDLCK), (libc::F_SETLEASE, libc::F_UNLCK)]
    {
        // SAFETY: all three commands take a number, and the descriptor is open.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};

    #[test]
    fn writable_opens_and_mappings_are_detected() {
        let path = std::env::temp_dir().join(format!("tern-mapped-{}", std::process::id()));
        std::fs::write(&path, [0; 4096]).unwrap();
        let fd = open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        assert!(!is_open_for_writing(&fd));
        let reads = File::open(&path).unwrap();
        assert!(!is_open_for_writing(&fd));
        let writes = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        assert!(is_open_for_writing(&fd));
        let mapping = Mapping::of(&writes);
        drop(writes);
        std::fs::remove_file(&path).unwrap();
        assert!(is_open_for_writing(&fd), "it is mapped, and has no name");
        drop((mapping, reads));
        assert!(!is_open_for_writing(&fd));
    }

    struct Mapping(*mut libc::c_void);

    #[expect(unsafe_code, reason = "a mapping")]
    impl Mapping {
        fn of(file: &File) -> Self {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: the kernel chooses the address, and nothing reads or writes the mapping.
            let at = unsafe {
                libc::mmap(std::ptr::null_mut(), 4096, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
            };
            assert_ne!(at, libc::MAP_FAILED);
            Self(at)
        }
    }

    #[expect(unsafe_code, reason = "a mapping")]
    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: the mapping is ours, and nothing uses it.
            unsafe { libc::munmap(self.0, 4096) };
        }
    }
}
