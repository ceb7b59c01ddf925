//! Files whose content the kernel here is to keep.
//!
//! When it is told to forget all names it lets go of the files that had them, if nobody has them open, and of all that it had of their content; in
//! a room of commands that happens whenever something is made or removed at their home, and a compiler of 30 MB would come over the
//! link for each file that it compiles. So what was read lately is held by a descriptor of `O_PATH`. It is opened by the kernel's own number for
//! the file (open_by_handle_at(2)), which asks nobody, and holds the file whatever becomes of its names. What is kept of the content is
//! right or not as ever ([`super::content`]).

use super::inode::Inode;
use crate::lock;
use rustix::fs::{Mode, OFlags};
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// How many files are held.
const MOST: usize = 4096;

/// How long after it was opened last. What was removed takes room at its home as long.
const LONG: Duration = Duration::from_secs(120);

/// FUSE's kind of handle: number and generation (`FILEID_INO64_GEN`, `fs/fuse/inode.c`).
const KIND: i32 = 0x81;

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    mount: OnceLock<OwnedFd>,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    files: HashMap<u64, (OwnedFd, Instant)>,
    /// In the order in which they were opened first, or looked at last.
    order: VecDeque<u64>,
}

impl Pins {
    /// The tree is mounted there. To be told by a thread that does not serve it: the kernel asks for it.
    pub(crate) fn are_in(&self, at: &Path) {
        match rustix::fs::open(at, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(root) => drop(self.mount.set(root)),
            Err(error) => {
                tracing::info!(%error, "the kernel keeps no file's content for longer than its names");
            }
        }
    }

    /// Holds a file that the kernel knows now; nothing if it cannot be held.
    pub(crate) fn hold(&self, inode: &Inode) {
        let Some(mount) = self.mount.get() else { return };
        let now = Instant::now();
        if let Some((_, opened)) = lock(&self.held).files.get_mut(&inode.number) {
            *opened = now;
            return;
        }
        let file = match tern_control::handle::open(mount, KIND, &handle(inode.number, inode.generation())) {
            Ok(file) => file,
            Err(error) => {
                tracing::debug!(%error, "a file cannot be held");
                return;
            }
        };
        let mut held = lock(&self.held);
        let mut gone = held.let_go(now);
        if let Some((twice, _)) = held.files.insert(inode.number, (file, now)) {
            gone.push(twice);
        } else {
            held.order.push_back(inode.number);
        }
        // The kernel says of the last who holds a file that it has forgotten it.
        drop(held);
        drop(gone);
    }
}

impl Held {
    /// Lets go of the first in order, of which some were looked at lately.
    fn let_go(&mut self, now: Instant) -> Vec<OwnedFd> {
        let mut gone = Vec::new();
        for _ in 0..4 {
            let Some(number) = self.order.pop_front() else { break };
            match self.files.get(&number) {
                Some((_, opened)) if now.duration_since(*opened) < LONG && self.files.len() < MOST => {
                    self.order.push_back(number);
                }
                _ => gone.extend(self.files.remove(&number).map(|(file, _)| file)),
            }
        }
        gone
    }
}

/// As the kernel has it: the upper and the lower half of the number, and the lower half of the generation, each as its own.
fn handle(number: u64, generation: u64) -> Vec<u8> {
    [(number >> 32) as u32, number as u32, generation as u32].map(u32::to_ne_bytes).concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_not_opened_for_long_is_let_go_and_so_are_the_first_of_many() {
        let open = || rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let now = Instant::now();
        let mut held = Held::default();
        for number in 0..3 {
            held.files.insert(number, (open(), now));
            held.order.push_back(number);
        }
        assert!(held.let_go(now).is_empty() && held.order.len() == 3);
        held.files.get_mut(&1).unwrap().1 = now + LONG;
        assert_eq!(held.let_go(now + LONG).len(), 2);
        assert_eq!((held.files.len(), held.order.len()), (1, 1));
    }

    #[test]
    fn a_handle_has_both_halves() {
        assert_eq!(handle(0x1_0000_0002, 0x3_0000_0004), [1_u32, 2, 4].map(u32::to_ne_bytes).concat());
    }
}
