//! Files that programs here have open.

use super::belief::Before;
use super::inode::Inode;
use super::lasting::Kept;
use super::listing::Ahead;
use super::passthrough::Passing;
use super::peer::Heard;
use super::unsaved::Boot;
use crate::lock;
use crate::message::{Caller, Opened};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

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
    /// It is one that several have, of those that are left open.
    pub(crate) kept: Mutex<Option<Arc<Kept>>>,
    /// It has flock's lock.
    pub(crate) is_locked: AtomicBool,
    /// The kernel does not say who closes it (`FOPEN_NOFLUSH`), only that all have.
    pub(crate) is_unflushed: bool,
    /// The kernel's numbers for owners of record locks that end with it: its own (`F_OFD_SETLK`), and those of processes whose closing it
    /// is not said.
    pub(crate) owners: Mutex<HashSet<u64>>,
    /// Entries of a directory that were read and not shown yet.
    pub(crate) ahead: Mutex<Ahead>,
    /// It counts among those that are open in one way.
    pub(crate) passing: OnceLock<Passing>,
    /// The content that came with the open, until it is read.
    early: Mutex<Option<Early>>,
}

/// How long what came with an open waits to be read: what the kernel has is of one version for sure as long ([`super::content`]).
const EARLY: Duration = Duration::from_millis(20);

/// The whole content of a file, as it was when it was opened.
#[derive(Debug)]
struct Early {
    heard: Heard,
    before: Before,
    lease: u32,
    /// How often it had been written from here, and locked.
    writes: u64,
    locks: u64,
}

/// What was read.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one at a time, passed on at once")]
pub(crate) enum Read {
    /// All that came with an answer.
    All(Heard),
    /// Some of what came before.
    Some(Vec<u8>),
}

impl Read {
    pub(crate) fn data(&self) -> &[u8] {
        match self {
            Self::All(heard) => heard.data(),
            Self::Some(data) => data,
        }
    }
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
            kept: Mutex::default(),
            ahead: Mutex::default(),
            is_locked: AtomicBool::new(false),
            is_unflushed: false,
            owners: Mutex::default(),
            passing: OnceLock::new(),
            early: Mutex::default(),
        }
    }

    /// The same, as several have it. Such files are read only; a compiler opens and closes hundreds, and would wait for our answer to each
    /// close, which is of use only to who has a lock.
    pub(crate) fn kept(inode: Arc<Inode>, opener: Caller, flags: u32, kept: Arc<Kept>) -> Self {
        let mut handle = Self::new(inode, opener, flags, kept.opened, kept.boot);
        handle.kept = Mutex::new(Some(kept));
        handle.is_unflushed = handle.inode.locks() == 0;
        handle
    }

    /// Whether something was written since it was opened first, and may be lost, when this is the boot of its node now.
    pub(crate) fn has_lost(&self, boot: Boot) -> bool {
        self.inode.unsaved.has_lost(self.boot, boot)
    }

    /// All of its content came with the answer to its open, which holds for the lease.
    pub(crate) fn has_early(&self, heard: Heard, before: Before, lease: u32, (writes, locks): (u64, u64)) {
        *lock(&self.early) = Some(Early { heard, before, lease, writes, locks });
    }

    /// What came so of this piece, if it still holds.
    pub(crate) fn early(&self, at: u64, length: u32) -> Option<Read> {
        let mut early = lock(&self.early);
        let has = early.as_ref()?;
        // Somebody else who opens it later may have been told of another version, of which this must not become a part.
        let holds = has.before.age() < EARLY && has.before.pass(|left| !left(has.lease).is_zero());
        let is_same = (has.writes, has.locks) == (self.inode.unsaved.writes(), self.inode.locks());
        if !holds || !is_same {
            *early = None;
            return None;
        }
        let data = has.heard.data();
        let from = usize::try_from(at).unwrap_or(usize::MAX).min(data.len());
        let to = from.saturating_add(length as usize).min(data.len());
        if from == 0 && to == data.len() {
            return early.take().map(|all| Read::All(all.heard));
        }
        Some(Read::Some(data[from..to].to_vec()))
    }

    /// The server's number of it.
    pub(crate) fn opened(&self) -> Opened {
        *lock(&self.opened)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inode.content.closed();
        for owner in lock(&self.owners).drain() {
            self.inode.disown(owner);
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
