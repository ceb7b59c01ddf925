//! Files that programs here have open.

use super::inode::Inode;
use super::unsaved::Boot;
use crate::lock;
use crate::message::{Caller, Entry, Opened};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// One open file or directory.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) inode: Arc<Inode>,
    /// Who opened it: what the kernel does with it by itself is done as he.
    pub(crate) opener: Caller,
    pub(crate) flags: u32,
    /// The server's number; another one when it had to be opened again.
    pub(crate) opened: Mutex<Opened>,
    /// The boot in which it was opened first.
    pub(crate) boot: Boot,
    /// Entries of a directory that were read and not shown yet, and where the first of them is.
    pub(crate) ahead: Mutex<(u64, VecDeque<Entry>)>,
    /// It has flock's lock.
    pub(crate) is_locked: AtomicBool,
    /// The kernel's number for it as an owner of record locks of its own (`F_OFD_SETLK`), if it has had some.
    pub(crate) as_owner: OnceLock<u64>,
}

impl Handle {
    pub(crate) fn new(inode: Arc<Inode>, opener: Caller, flags: u32, opened: Opened, boot: Boot) -> Self {
        inode.content.opened();
        Self {
            inode,
            opener,
            flags,
            opened: Mutex::new(opened),
            boot,
            ahead: Mutex::default(),
            is_locked: AtomicBool::new(false),
            as_owner: OnceLock::new(),
        }
    }

    /// Whether something was written since it was opened first, and may be lost, when this is the boot of its node now.
    pub(crate) fn has_lost(&self, boot: Boot) -> bool {
        self.inode.unsaved.has_lost(self.boot, boot)
    }

    /// The server's number of it.
    pub(crate) fn opened(&self) -> Opened {
        *lock(&self.opened)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inode.content.closed();
        // The kernel says it of processes that close a file, and not of the file.
        if let Some(owner) = self.as_owner.get() {
            self.inode.disown(*owner);
        }
    }
}

/// All of them, by the numbers that the kernel has for them.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    all: Mutex<(HashMap<u64, Arc<Handle>>, u64)>,
}

impl Handles {
    pub(crate) fn keep(&self, handle: Handle) -> u64 {
        let mut all = self.table();
        all.1 += 1;
        let number = all.1;
        all.0.insert(number, Arc::new(handle));
        number
    }

    pub(crate) fn get(&self, number: u64) -> Option<Arc<Handle>> {
        self.table().0.get(&number).cloned()
    }

    pub(crate) fn remove(&self, number: u64) -> Option<Arc<Handle>> {
        self.table().0.remove(&number)
    }

    fn table(&self) -> MutexGuard<'_, (HashMap<u64, Arc<Handle>>, u64)> {
        lock(&self.all)
    }
}
