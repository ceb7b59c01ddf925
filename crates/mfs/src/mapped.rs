//! Files that this node's programs may store to although they have closed them.
//!
//! A mapping of a file that the kernel reads and writes itself (passthrough) outlives that file: the kernel keeps one of its own for it. Whether
//! anybody has such a file open for writing, or mapped so, the kernel knows, and refuses a lease of its own then (fcntl(2): `F_SETLEASE`
//! with `F_RDLCK`).

use rustix::fs::{Mode, OFlags, open};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Which signal tells of a lease (asm-generic/fcntl.h).
const F_SETSIG: libc::c_int = 10;

/// How often it is looked whether a file is mapped yet.
const LOOK: Duration = Duration::from_millis(100);

/// The way to those that are looked after; each has something that is dropped when nobody can store to its file any more.
#[derive(Debug)]
pub(crate) struct Mapped<T>(Sender<(OwnedFd, T)>);

impl<T: Send + 'static> Mapped<T> {
    /// Begins to look after them, as whoever this process is.
    ///
    /// # Errors
    /// If there is no thread for it.
    pub(crate) fn look_after() -> io::Result<Self> {
        let (tell, closed) = channel();
        std::thread::Builder::new().name("mapped".into()).spawn(move || look(&closed))?;
        Ok(Self(tell))
    }

    /// Looks after a file from now on, by a descriptor of `O_PATH`.
    pub(crate) fn take(&self, file: OwnedFd, until: T) {
        let _no_thread = self.0.send((file, until));
    }
}

fn look<T>(closed: &Receiver<(OwnedFd, T)>) {
    let mut all: Vec<(OwnedFd, T)> = Vec::new();
    loop {
        let next = if all.is_empty() {
            closed.recv().map_err(|_no_more| RecvTimeoutError::Disconnected)
        } else {
            closed.recv_timeout(LOOK)
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
pub(crate) fn of_ours(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Whether anybody on this node has it open for writing, or mapped so. Who is not known not to may have.
fn is_open_for_writing(file: &OwnedFd) -> bool {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    !open(of_ours(file), flags, Mode::empty()).is_ok_and(|file| is_leased(&file).is_ok())
}

/// Takes a lease of the kernel's on it, and lets go of it at once.
#[expect(unsafe_code, reason = "no safe wrapper knows F_SETLEASE")]
fn is_leased(file: &OwnedFd) -> io::Result<()> {
    // Who opens it meanwhile has the kernel tell us, by a signal of which nothing comes.
    for (command, word) in
        [(F_SETSIG, libc::SIGURG), (libc::F_SETLEASE, libc::F_RDLCK), (libc::F_SETLEASE, libc::F_UNLCK)]
    {
        // SAFETY: all three take a number, and the descriptor is open.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, word) } < 0 {
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
    fn who_has_it_open_or_mapped_to_write_is_seen() {
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
            // SAFETY: where the kernel likes, and nobody reads or writes there.
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
            // SAFETY: it is ours, and nobody uses it.
            unsafe { libc::munmap(self.0, 4096) };
        }
    }
}
