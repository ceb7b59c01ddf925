//! Files of this node: its kernel reads, writes and maps them itself, as without a tree (FUSE passthrough, Linux 6.9 and later).
//!
//! Opening is as ever, by way of the server, which looks whether the caller may. Then it gives us what is behind the open file
//! (`serve/passthrough.rs`), which the kernel is told of with our answer.
//!
//! - The kernel has one way for all who have a file open at a time. So who opens it first decides, and the others follow him; it
//!   forgets who has closed it before it tells us. What is small and only read has come with its open already, and is not worth it.
//! - What is written so we do not see. So the kernel is let believe nothing of what such a file is like, as of one with locks.
//! - The kernel does all of this as whoever tells it of the file, for all who have it open: so as nobody, who may use nothing
//!   that is kept for root on a disk, and takes from what he writes the rights to become another user.

use super::calls::Mounted;
use super::handle::Handle;
use super::told::Open;
use crate::message::{Opened, SMALL};
use crate::{NOBODY, lock};
use fuser::BackingId;
use rustix::fs::{FileType, OFlags};
use rustix::process::Uid;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_res_uid};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tern_control::door;
use tern_control::shim::ShimRequest;

/// How long the server may take, which is on this node.
const PATIENCE: Duration = Duration::from_secs(2);

/// How the files that stand for one inode are open.
#[derive(Debug, Default)]
pub(crate) struct Passage(Mutex<Way>);

#[derive(Debug, Default)]
struct Way {
    open: usize,
    /// What the kernel reads and writes for all of them, if it does.
    behind: Option<Arc<Behind>>,
}

/// What is behind a file.
#[derive(Debug)]
pub(crate) struct Behind {
    /// As the kernel calls it.
    pub(crate) id: BackingId,
    /// By a descriptor of `O_PATH`.
    file: OwnedFd,
}

impl Passage {
    /// One more is open, in the way of the others; the first decides which.
    fn opens(&self, first: impl FnOnce() -> Option<Behind>) -> Option<Arc<Behind>> {
        let mut way = lock(&self.0);
        if way.open == 0 {
            way.behind = first().map(Arc::new);
        }
        way.open += 1;
        way.behind.clone()
    }

    /// Whether the kernel reads and writes it itself.
    pub(crate) fn is_taken(&self) -> bool {
        lock(&self.0).behind.is_some()
    }

    /// One of them is closed.
    fn closes(&self) {
        let mut way = lock(&self.0);
        way.open -= 1;
        if way.open == 0 {
            way.behind = None;
        }
    }
}

/// One open file, as long as it is.
#[derive(Debug)]
pub(crate) struct Passing(Arc<super::inode::Inode>);

impl Drop for Passing {
    fn drop(&mut self) {
        self.0.passage.closes();
    }
}

impl Mounted {
    /// What the kernel is to read and write for a file that has been opened, if it is to do that itself. `tell` tells it of what is behind the
    /// file, and what that is called.
    pub(crate) fn behind(
        &self,
        open: &Open,
        tell: impl FnOnce(BorrowedFd<'_>) -> io::Result<BackingId>,
    ) -> Option<Arc<Behind>> {
        if !self.0.passes(&open.inode) || FileType::from_raw_mode(open.is.mode) != FileType::RegularFile {
            return None;
        }
        let handle = self.0.handles.get(open.handle)?;
        let writes = OFlags::from_bits_retain(handle.flags) & OFlags::ACCMODE != OFlags::RDONLY;
        let first = || {
            let volume = open.inode.volume();
            if !writes && open.is.size <= SMALL as u64 || lock(&self.0.unpassed).contains(&volume) {
                return None;
            }
            let file = self.ask(&handle).ok()?;
            match as_nobody(|| tell(file.as_fd())) {
                Ok(id) => Some(Behind { id, file }),
                // As of a file system that is made of others.
                Err(error) => {
                    tracing::info!(%error, "files of one of this node's file systems are not passed through");
                    lock(&self.0.unpassed).insert(volume);
                    None
                }
            }
        };
        let behind = open.inode.passage.opens(first);
        let _once = handle.passing.set(Passing(open.inode.clone()));
        if behind.is_some() {
            // What it has of its content is its own, of another way.
            open.inode.content.doubt();
            if writes {
                if open.inode.wants_lock() {
                    self.0.forgetting.forget_attributes(open.inode.number);
                }
                open.inode.has_lock();
            }
        }
        behind
    }

    /// A file is closed. What may be mapped stays in its way until nobody can store to it: who read it in another would not see that.
    pub(crate) fn may_be_mapped(&self, handle: &Handle) {
        let stores = OFlags::from_bits_retain(handle.flags) & OFlags::ACCMODE == OFlags::RDWR;
        if !stores || handle.passing.get().is_none() {
            return;
        }
        // It is open still.
        let behind = handle.inode.passage.opens(|| None);
        let passing = Passing(handle.inode.clone());
        if let (Some(mapped), Some(file)) =
            (self.0.mapped.get(), behind.and_then(|b| b.file.try_clone().ok()))
        {
            mapped.take(file, passing);
        }
    }

    fn ask(&self, handle: &Handle) -> io::Result<OwnedFd> {
        let Opened(opened) = handle.opened();
        let behind = ShimRequest::FileBehind { session: self.0.common.session, opened };
        door::ask_for(&self.0.door, &behind, PATIENCE).map(|(file, _)| file)
    }
}

/// Does something as a thread that is nobody, and may do what only administrators of a system may; the kernel asks for that.
fn as_nobody<T>(act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let own = capabilities(None)?;
    // Others of this process have no part in it: these are the raw system calls. With the user goes all that the thread may.
    set_thread_res_uid(None, Some(Uid::from_raw(NOBODY)), None)?;
    let some = CapabilitySets { effective: CapabilitySet::SYS_ADMIN, ..own };
    let done = set_capabilities(None, some).map_err(io::Error::from).and_then(|()| act());
    let back = set_thread_res_uid(None, Some(Uid::ROOT), None).and_then(|()| set_capabilities(None, own));
    // One that stays nobody can serve nobody.
    back.map_err(io::Error::from).and(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::geteuid;

    #[test]
    fn nobody_may_no_more_than_he_must_and_the_thread_comes_back() {
        if !geteuid().is_root() {
            return;
        }
        let before = capabilities(None).unwrap();
        let may = as_nobody(|| {
            assert_eq!(geteuid().as_raw(), NOBODY);
            Ok(capabilities(None)?.effective)
        });
        assert_eq!(may.unwrap(), CapabilitySet::SYS_ADMIN);
        assert_eq!((geteuid(), capabilities(None).unwrap()), (Uid::ROOT, before));
        assert!(as_nobody(|| Err::<(), _>(io::ErrorKind::NotFound.into())).is_err());
        assert_eq!(geteuid(), Uid::ROOT);
    }

    #[test]
    fn the_first_decides_and_the_last_lets_go() {
        let passage = Passage::default();
        assert!(passage.opens(|| None).is_none());
        assert!(passage.opens(|| panic!("it is decided")).is_none());
        passage.closes();
        assert!(passage.opens(|| panic!("it is decided")).is_none());
        passage.closes();
        passage.closes();
        let mut asked = false;
        passage.opens(|| {
            asked = true;
            None
        });
        assert!(asked);
    }
}
