//! FUSE passthrough: files of this node that its own kernel reads and writes for a tree mounted
//! here (`client/passthrough.rs`).
//!
//! The tree's process requests the backing file of a file that the server has opened for it; access
//! was checked by that open. From then on the server does not see the reads and writes, only that
//! the file is open, so no other session has a lease of a file that is open for writing. A file
//! that may be mapped counts as open until no mapping can store to it any more ([`crate::mapped`]).

use super::guest_files::refusal;
use super::leases::LeaseTable;
use super::session::OpenFile;
use super::{Server, fanotify};
use crate::lock;
use crate::mapped::proc_fd_path;
use crate::message::{FileKey, OpenId};
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Weak;
use tern_control::control_socket;
use tern_control::shim::ShimRequest;

impl Server {
    /// Sends a tree of this node the backing file of one of its open files.
    pub(super) fn send_backing_file(&self, caller: control_socket::PendingRequest) {
        let ShimRequest::BackingFile { session, opened } = caller.request() else { return };
        let session = lock(&self.sessions).get(&(self.node, *session)).cloned();
        let Some(file) = session.and_then(|session| session.open_file(OpenId(*opened))) else {
            return caller.reply(&refusal("no such file is open"));
        };
        match open_backing_file(&file) {
            Ok(fd) => drop(caller.reply_with_fd(fd)),
            Err(error) => caller.reply(&refusal(&error.to_string())),
        }
    }
}

/// The backing file, if the kernel may access it directly. The kernel may not access a file with
/// privileges that a write must clear (set-ID bits, capabilities), nor a file system that may be
/// remote, where another machine might check the user.
fn open_backing_file(file: &OpenFile) -> Result<BorrowedFd<'_>, Errno> {
    if let Some(fd) = file.backing_file.get() {
        return Ok(fd.as_fd());
    }
    let mode = fstat(&file.fd)?.st_mode;
    let is_regular = FileType::from_raw_mode(mode) == FileType::RegularFile;
    let is_privileged = mode & (libc::S_ISUID | libc::S_ISGID) != 0
        || rustix::fs::fgetxattr(&file.fd, "security.capability", &mut [0; 0]).is_ok();
    if !is_regular || is_privileged || !fanotify::is_local(&file.fd) {
        return Err(Errno::OPNOTSUPP);
    }
    let fd = open(proc_fd_path(&file.fd), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    Ok(file.backing_file.get_or_init(|| fd).as_fd())
}

/// Session number of the writers of closed files that may still be mapped. No session has this
/// number, so no session gets leases of these files, not even the tree's own.
pub(super) const MAPPED_SESSION: u64 = 0;

/// Counts as a writer of a file that may still be mapped, until this is dropped.
#[derive(Debug)]
pub(super) struct MappedWriter {
    pub(super) leases: Weak<LeaseTable>,
    pub(super) key: FileKey,
}

impl Drop for MappedWriter {
    fn drop(&mut self) {
        if let Some(leases) = self.leases.upgrade() {
            leases.remove_writer(MAPPED_SESSION, self.key);
        }
    }
}

impl OpenFile {
    /// The backing file, if programs of this node may have it mapped writably after it is closed.
    pub(super) fn mappable_backing_file(&self) -> Option<OwnedFd> {
        let fd = self.backing_file.get().filter(|_| self.flags & OFlags::ACCMODE == OFlags::RDWR);
        fd.and_then(|fd| fd.try_clone().ok())
    }
}
