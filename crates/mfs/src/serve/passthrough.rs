//! Files of this node that its own kernel reads and writes for a tree mounted here (`client/passthrough.rs`).
//!
//! The tree's process asks for what is behind a file that we have opened for it: whether that may be was looked at then. From
//! now on we see nothing of what is done with it but that it is open; so nobody else has a lease of what is open for writing. What may
//! be mapped then counts as open until nobody can store to it ([`crate::mapped`]).

use super::leases::Leases;
use super::near::refusal;
use super::session::OpenFile;
use super::{Serving, notice};
use crate::lock;
use crate::mapped::of_ours;
use crate::message::{FileKey, Opened};
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Weak;
use tern_control::door;
use tern_control::shim::ShimRequest;

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

/// Whose the files are that are closed, and may be mapped: of no session, so that nobody has leases of them, that tree neither.
pub(super) const MAPPED: u64 = 0;

/// One of these, until it is dropped.
#[derive(Debug)]
pub(super) struct Stays(pub(super) Weak<Leases>, pub(super) FileKey);

impl Drop for Stays {
    fn drop(&mut self) {
        if let Some(leases) = self.0.upgrade() {
            leases.closed(MAPPED, self.1);
        }
    }
}

impl OpenFile {
    /// What is behind it, if this node's programs may store to that when it is closed.
    pub(super) fn may_be_mapped(&self) -> Option<OwnedFd> {
        let behind = self.behind.get().filter(|_| self.flags & OFlags::ACCMODE == OFlags::RDWR);
        behind.and_then(|behind| behind.try_clone().ok())
    }
}
