//! FUSE passthrough for files of this node (Linux 6.9 and later): the kernel reads, writes and maps
//! the backing file itself.
//!
//! A file is opened through the server as usual, which checks the caller's permission. The server
//! then passes a descriptor of the backing file (`serve/passthrough.rs`), which is registered with
//! the kernel in the reply to FUSE_OPEN.
//!
//! - The kernel has one mode for all opens of an inode at a time. So the first open decides, and
//!   the others follow; the kernel ends an open before it sends FUSE_RELEASE. A small file opened
//!   for reading gets its content with the reply to FUSE_OPEN, so passthrough would gain nothing.
//! - Passthrough writes are not visible here. So attributes of a file that is open for passthrough
//!   writing get no TTL, like those of a file with locks.
//! - The kernel accesses the backing file with the credentials of the thread that registers it. So
//!   that thread acts as user nobody, which may not use a disk's reserved blocks, and whose writes
//!   clear set-user-ID bits.

use crate::client::fuse::calls::MountedTree;
use crate::client::fuse::entry_reply::OpenedFile;
use crate::client::fuse::handle::Handle;
use crate::message::{MAX_INLINE_CONTENT, OpenId};
use crate::{NOBODY, lock};
use fuser::BackingId;
use rustix::fs::{FileType, OFlags};
use rustix::process::Uid;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_res_uid};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tern_control::control_socket;
use tern_control::shim::ShimRequest;

/// Timeout for the server, which is on this node.
const SERVER_TIMEOUT: Duration = Duration::from_secs(2);

/// The open files of an inode, and whether they use passthrough.
#[derive(Debug, Default)]
pub(crate) struct PassthroughState(Mutex<OpenFiles>);

#[derive(Debug, Default)]
struct OpenFiles {
    count: usize,
    /// The backing file of all opens, if they use passthrough.
    backing: Option<Arc<BackingFile>>,
}

/// A registered backing file.
#[derive(Debug)]
pub(crate) struct BackingFile {
    /// The kernel's identifier.
    pub(crate) id: BackingId,
    /// An `O_PATH` descriptor.
    file: OwnedFd,
}

impl PassthroughState {
    /// Counts an open. The first one decides whether all use passthrough.
    fn add_open(&self, open_first: impl FnOnce() -> Option<BackingFile>) -> Option<Arc<BackingFile>> {
        let mut files = lock(&self.0);
        if files.count == 0 {
            files.backing = open_first().map(Arc::new);
        }
        files.count += 1;
        files.backing.clone()
    }

    /// Whether the file is open for passthrough.
    pub(crate) fn is_active(&self) -> bool {
        lock(&self.0).backing.is_some()
    }

    /// Counts a close; after the last one the next open decides again.
    fn remove_open(&self) {
        let mut files = lock(&self.0);
        files.count -= 1;
        if files.count == 0 {
            files.backing = None;
        }
    }
}

/// Counts an open file for as long as this lives.
#[derive(Debug)]
pub(crate) struct PassthroughOpen(Arc<crate::client::fuse::inode::Inode>);

impl Drop for PassthroughOpen {
    fn drop(&mut self) {
        self.0.passthrough.remove_open();
    }
}

impl MountedTree {
    /// The backing file for a file that was opened, if it is to use passthrough. `register`
    /// registers a descriptor with the kernel.
    pub(crate) fn backing_file(
        &self,
        open: &OpenedFile,
        register: impl FnOnce(BorrowedFd<'_>) -> io::Result<BackingId>,
    ) -> Option<Arc<BackingFile>> {
        if !self.0.can_pass_through(&open.inode)
            || FileType::from_raw_mode(open.attributes.mode) != FileType::RegularFile
        {
            return None;
        }
        let handle = self.0.handles.get(open.handle)?;
        let writes = OFlags::from_bits_retain(handle.flags) & OFlags::ACCMODE != OFlags::RDONLY;
        let open_first = || {
            let volume = open.inode.volume();
            if !writes && open.attributes.size <= MAX_INLINE_CONTENT as u64
                || lock(&self.0.no_passthrough).contains(&volume)
            {
                return None;
            }
            let file = self.request_backing_file(&handle).ok()?;
            match as_nobody(|| register(file.as_fd())) {
                Ok(id) => Some(BackingFile { id, file }),
                // For example EINVAL or ELOOP for a stacked file system.
                Err(error) => {
                    tracing::info!(%error, "a file system of this node does not support FUSE passthrough");
                    lock(&self.0.no_passthrough).insert(volume);
                    None
                }
            }
        };
        let backing = open.inode.passthrough.add_open(open_first);
        let _once = handle.passthrough_open.set(PassthroughOpen(open.inode.clone()));
        if backing.is_some() {
            // Pages cached by FUSE are not those of the backing file.
            open.inode.pages.forget_version();
            if writes {
                if open.inode.note_lock_request() {
                    self.0.invalidator.invalidate_attributes(open.inode.number);
                }
                open.inode.note_lock_acquired();
            }
        }
        backing
    }

    /// A file is closed. If it may be mapped writable, its inode stays in passthrough mode until no
    /// program can store to it: opens in another mode would not see such stores.
    pub(crate) fn keep_while_mapped(&self, handle: &Handle) {
        let is_writable = OFlags::from_bits_retain(handle.flags) & OFlags::ACCMODE == OFlags::RDWR;
        if !is_writable || handle.passthrough_open.get().is_none() {
            return;
        }
        // The handle itself still counts as open, so this does not decide the mode.
        let backing = handle.inode.passthrough.add_open(|| None);
        let open = PassthroughOpen(handle.inode.clone());
        if let (Some(mapped), Some(file)) =
            (self.0.mapped_files.get(), backing.and_then(|b| b.file.try_clone().ok()))
        {
            mapped.watch(file, open);
        }
    }

    fn request_backing_file(&self, handle: &Handle) -> io::Result<OwnedFd> {
        let OpenId(opened) = handle.server_file();
        let backing = ShimRequest::BackingFile { session: self.0.context.session, opened };
        control_socket::request_fd(&self.0.server_socket, &backing, SERVER_TIMEOUT).map(|(file, _)| file)
    }
}

/// Runs `act` with this thread's user set to nobody and with CAP_SYS_ADMIN, which the kernel
/// requires for registering a backing file.
fn as_nobody<T>(act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let own = capabilities(None)?;
    // These raw system calls affect this thread alone. Changing the user clears its capabilities.
    set_thread_res_uid(None, Some(Uid::from_raw(NOBODY)), None)?;
    let limited = CapabilitySets { effective: CapabilitySet::SYS_ADMIN, ..own };
    let done = set_capabilities(None, limited).map_err(io::Error::from).and_then(|()| act());
    let restored = set_thread_res_uid(None, Some(Uid::ROOT), None).and_then(|()| set_capabilities(None, own));
    // If the thread cannot become root again, this fails too.
    restored.map_err(io::Error::from).and(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::geteuid;

    #[test]
    fn nobody_has_one_capability_and_root_is_restored() {
        if !geteuid().is_root() {
            return;
        }
        let before = capabilities(None).unwrap();
        let effective = as_nobody(|| {
            assert_eq!(geteuid().as_raw(), NOBODY);
            Ok(capabilities(None)?.effective)
        });
        assert_eq!(effective.unwrap(), CapabilitySet::SYS_ADMIN);
        assert_eq!((geteuid(), capabilities(None).unwrap()), (Uid::ROOT, before));
        assert!(as_nobody(|| Err::<(), _>(io::ErrorKind::NotFound.into())).is_err());
        assert_eq!(geteuid(), Uid::ROOT);
    }

    #[test]
    fn first_open_decides_and_last_close_resets() {
        let state = PassthroughState::default();
        assert!(state.add_open(|| None).is_none());
        assert!(state.add_open(|| panic!("the mode is decided")).is_none());
        state.remove_open();
        assert!(state.add_open(|| panic!("the mode is decided")).is_none());
        state.remove_open();
        state.remove_open();
        let mut was_called = false;
        state.add_open(|| {
            was_called = true;
            None
        });
        assert!(was_called);
    }
}
