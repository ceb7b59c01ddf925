//! Pins: descriptors that keep inodes of recently opened files in the kernel, and with them their
//! cached pages.
//!
//! When the kernel invalidates all dentries it drops inodes that no process has open, with their
//! page cache. In a container of placed commands all dentries are invalidated whenever a file is
//! created or removed at their home. Without pins a compiler of 30 MB would be transferred again
//! for each file that it compiles. So a recently opened file is held by an `O_PATH` descriptor. It
//! is opened by FUSE's own file handle (open_by_handle_at(2)), which sends no request, and holds
//! the inode whatever happens to its names. Whether the cached pages are valid is decided as for
//! any file ([`crate::client::cache::pages`]).

use crate::client::fuse::inode::Inode;
use crate::lock;
use rustix::fs::{Mode, OFlags};
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Number of files pinned at a time.
const MAX_PINS: usize = 4096;

/// How long a file stays pinned after it was last opened. A removed file occupies disk space at its
/// home until its pin is gone.
const PIN_TIMEOUT: Duration = Duration::from_secs(120);

/// FUSE's type of file handle: inode number and generation (`FILEID_INO64_GEN`, `fs/fuse/inode.c`).
const FILEID_INO64_GEN: i32 = 0x81;

/// The pinned files of a tree.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    mount: OnceLock<OwnedFd>,
    pinned: Mutex<PinnedFiles>,
}

#[derive(Debug, Default)]
struct PinnedFiles {
    files: HashMap<u64, (OwnedFd, Instant)>,
    /// Inode numbers in the order in which they were first opened or last kept by eviction.
    order: VecDeque<u64>,
}

impl Pins {
    /// Opens the mount point, which is needed to open handles. Call it from a thread that does not
    /// serve the tree, since the kernel sends requests to the tree for this.
    pub(crate) fn set_mount_point(&self, at: &Path) {
        match rustix::fs::open(at, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(root) => drop(self.mount.set(root)),
            Err(error) => {
                tracing::info!(%error, "cannot open the mount point; cached pages are dropped with their dentries");
            }
        }
    }

    /// Pins a file that the kernel has an inode of. Does nothing if that fails.
    pub(crate) fn pin(&self, inode: &Inode) {
        let Some(mount) = self.mount.get() else { return };
        let now = Instant::now();
        if let Some((_, opened)) = lock(&self.pinned).files.get_mut(&inode.number) {
            *opened = now;
            return;
        }
        let file = match tern_control::handle::open_by_handle(
            mount,
            FILEID_INO64_GEN,
            &encode_handle(inode.number, inode.generation()),
        ) {
            Ok(file) => file,
            Err(error) => {
                tracing::debug!(%error, "cannot pin a file");
                return;
            }
        };
        let mut pinned = lock(&self.pinned);
        let mut evicted = pinned.evict(now);
        if let Some((twice, _)) = pinned.files.insert(inode.number, (file, now)) {
            evicted.push(twice);
        } else {
            pinned.order.push_back(inode.number);
        }
        // Closing the last descriptor makes the kernel send FUSE_FORGET, so no lock may be held.
        drop(pinned);
        drop(evicted);
    }
}

impl PinnedFiles {
    /// Inspects some pins from the front of the order. A pin of a recently opened file is kept
    /// unless there are too many; the others are evicted.
    fn evict(&mut self, now: Instant) -> Vec<OwnedFd> {
        let mut evicted = Vec::new();
        for _ in 0..4 {
            let Some(number) = self.order.pop_front() else { break };
            match self.files.get(&number) {
                Some((_, opened))
                    if now.duration_since(*opened) < PIN_TIMEOUT && self.files.len() < MAX_PINS =>
                {
                    self.order.push_back(number);
                }
                _ => evicted.extend(self.files.remove(&number).map(|(file, _)| file)),
            }
        }
        evicted
    }
}

/// The handle as FUSE encodes it: upper and lower half of the number, lower half of the generation.
fn encode_handle(number: u64, generation: u64) -> Vec<u8> {
    [(number >> 32) as u32, number as u32, generation as u32].map(u32::to_ne_bytes).concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_not_opened_recently_are_evicted() {
        let open = || rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let now = Instant::now();
        let mut pinned = PinnedFiles::default();
        for number in 0..3 {
            pinned.files.insert(number, (open(), now));
            pinned.order.push_back(number);
        }
        assert!(pinned.evict(now).is_empty() && pinned.order.len() == 3);
        pinned.files.get_mut(&1).unwrap().1 = now + PIN_TIMEOUT;
        assert_eq!(pinned.evict(now + PIN_TIMEOUT).len(), 2);
        assert_eq!((pinned.files.len(), pinned.order.len()), (1, 1));
    }

    #[test]
    fn handle_encodes_both_halves_of_the_number() {
        assert_eq!(encode_handle(0x1_0000_0002, 0x3_0000_0004), [1_u32, 2, 4].map(u32::to_ne_bytes).concat());
    }
}
