//! Files of this node that its own kernel reads and writes for a tree mounted here (`client/passthrough.rs`).
//!
//! The tree's process asks for what is behind a file that we have opened for it: whether that may be was looked at then. From
//! now on we see nothing of what is done with it but that it is open; so nobody else has a lease of what is open for writing.
//!
//! A mapping outlives that. The kernel keeps a file of its own for it, and tells the tree that the file is closed while somebody
//! may still store to it. So what could be mapped and stored to counts as open until nobody has it so; this the kernel knows
//! (fcntl(2): `F_SETLEASE` with `F_RDLCK` is refused while anybody has the file open for writing).

use super::near::refusal;
use super::session::{OpenFile, Session};
use super::{Leases, Serving, notice};
use crate::lock;
use crate::message::{FileKey, Opened};
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use tern_control::door;
use tern_control::shim::ShimRequest;

/// Which signal tells of a lease (asm-generic/fcntl.h).
const F_SETSIG: libc::c_int = 10;

/// How often it is looked whether a file is mapped yet.
const LOOK: Duration = Duration::from_secs(1);

impl Serving {
    /// Gives a tree of this node what is behind one of its open files.
    pub(super) fn give_behind(&self, caller: door::Caller) {
        let ShimRequest::FileBehind { session, opened } = caller.request() else { return };
        let session = lock(&self.sessions).get(&(self.node, *session)).cloned();
        let Some(file) = session.and_then(|session| session.file(Opened(*opened))) else {
            return caller.answer(&refusal("no such file is open"));
        };
        match behind(&file) {
            Ok(fd) => drop(caller.give(fd)),
            Err(error) => caller.answer(&refusal(&error.to_string())),
        }
    }
}

/// What is behind it, if this kernel may do with it what it likes: nothing that loses rights when it is written, which our kernel would not
/// see to, and of no other machine, which would ask who it is.
fn behind(file: &OpenFile) -> Result<BorrowedFd<'_>, Errno> {
    if let Some(fd) = file.behind.get() {
        return Ok(fd.as_fd());
    }
    let mode = fstat(&file.fd)?.st_mode;
    let is_plain = FileType::from_raw_mode(mode) == FileType::RegularFile;
    let gives_rights = mode & (libc::S_ISUID | libc::S_ISGID) != 0
        || rustix::fs::fgetxattr(&file.fd, "security.capability", &mut [0; 0]).is_ok();
    if !is_plain || gives_rights || !notice::is_local(&file.fd) {
        return Err(Errno::OPNOTSUPP);
    }
    let fd = open(of_ours(&file.fd), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    Ok(file.behind.get_or_init(|| fd).as_fd())
}

fn of_ours(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// A file that a session has closed, and that may be mapped.
#[derive(Debug)]
struct Closed {
    session: u64,
    key: FileKey,
    fd: OwnedFd,
}

/// The way to those who count as open until nobody can store to them.
#[derive(Debug)]
pub(super) struct Mapped(Sender<Closed>);

impl Mapped {
    /// Begins to look after them, as whoever this process is.
    ///
    /// # Errors
    /// If there is no thread for it.
    pub(super) fn look_after(leases: &Arc<Leases>) -> io::Result<Self> {
        let (tell, closed) = channel();
        let leases = leases.clone();
        std::thread::Builder::new().name("mapped".into()).spawn(move || look(&closed, &leases))?;
        Ok(Self(tell))
    }

    /// A session closes a file; false if that is all there is to it.
    pub(super) fn take(&self, session: &Session, file: &OpenFile) -> bool {
        let stores = file.flags & OFlags::ACCMODE == OFlags::RDWR;
        let Some(behind) = file.behind.get().filter(|_| stores) else { return false };
        let Ok(fd) = behind.try_clone() else { return false };
        self.0.send(Closed { session: session.number, key: file.key, fd }).is_ok()
    }
}

fn look(closed: &Receiver<Closed>, leases: &Leases) {
    let mut all: Vec<Closed> = Vec::new();
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
        all.retain(|one| {
            let is_open = is_open_for_writing(&one.fd);
            if !is_open {
                leases.closed(one.session, one.key);
            }
            is_open
        });
    }
}

/// Whether anybody on this node has it open for writing, or mapped so. Who is not known not to may have.
fn is_open_for_writing(behind: &OwnedFd) -> bool {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    !open(of_ours(behind), flags, Mode::empty()).is_ok_and(|file| is_leased(&file).is_ok())
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
