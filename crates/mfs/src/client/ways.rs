//! By which names the kernel here may come to a file without asking.
//!
//! It believes a name for as long as the lease of its directory lasts, and forgets all names when one is asked back
//! (`FUSE_NOTIFY_INC_EPOCH`; kernels that have it not are told to believe none). A program on the server's own node knows nothing
//! of leases. So what opens or changes something says all steps by which the kernel may have come to it, and the server looks at them
//! in the same trip ([`crate::message::Step`]): if one of them leads elsewhere the call fails with `ESTALE`, upon which the kernel
//! goes the whole path again, asking at each step (`LOOKUP_REVAL`).
//!
//! A step too many does no harm but that: a path may have begun at a directory whose own name has changed. One too few would let
//! something old be opened. So a way is kept for longer than the kernel believes it, and noted before it is told.

use super::inode::Inode;
use crate::lock;
use crate::message::{MOST_STEPS, Name, Step};
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How much longer than the kernel may believe it: it counts from when it takes the answer.
const LONGER: Duration = Duration::from_secs(2);

/// The most ways to one inode. Others the kernel does not believe.
const MOST: usize = 8;

/// How many steps may lead to a directory whose names are believed.
const DEEPEST: usize = 64;

/// How long who was told that a step leads elsewhere takes to go the path again.
const AGAIN: Duration = Duration::from_millis(200);

#[derive(Debug)]
struct Way {
    dir: Arc<Inode>,
    name: OsString,
    until: Instant,
}

/// The names that the kernel may believe of one inode.
#[derive(Debug, Default)]
pub(crate) struct Ways(Mutex<Vec<Way>>);

impl Ways {
    /// The kernel may believe this name for so long; false if it must not, there being too many.
    pub(crate) fn add(&self, dir: &Arc<Inode>, name: &OsStr, left: Duration) -> bool {
        let now = Instant::now();
        let until = now + left + LONGER;
        let mut ways = lock(&self.0);
        if let Some(way) = ways.iter_mut().find(|way| way.is(dir, name)) {
            way.until = way.until.max(until);
            return true;
        }
        let over: Vec<Way> = ways.extract_if(.., |way| way.until < now).collect();
        let room = ways.len() < MOST;
        if room {
            ways.push(Way { dir: dir.clone(), name: name.to_owned(), until });
        }
        // They may be the last to hold their directories, whose end wants locks of its own.
        drop(ways);
        drop(over);
        room
    }

    /// It has this name no more, by the kernel's own doing.
    pub(crate) fn remove(&self, dir: &Arc<Inode>, name: &OsStr) {
        let gone: Vec<Way> = lock(&self.0).extract_if(.., |way| way.is(dir, name)).collect();
        drop(gone);
    }

    /// The kernel does not know the inode any more.
    pub(crate) fn clear(&self) {
        let gone = std::mem::take(&mut *lock(&self.0));
        drop(gone);
    }

    fn now(&self) -> Vec<(Arc<Inode>, Name)> {
        let now = Instant::now();
        let ways = lock(&self.0);
        let still = ways.iter().filter(|way| way.until >= now);
        still.map(|way| (way.dir.clone(), Name::from(&*way.name))).collect()
    }
}

impl Way {
    fn is(&self, dir: &Arc<Inode>, name: &OsStr) -> bool {
        Arc::ptr_eq(&self.dir, dir) && self.name == name
    }
}

/// All steps by which the kernel may have come to these; `None` if they are too many to be said.
pub(crate) fn steps(inodes: &[&Arc<Inode>]) -> Option<Vec<Step>> {
    let mut seen: HashSet<u64> = inodes.iter().map(|inode| inode.number).collect();
    let mut left: Vec<Arc<Inode>> = inodes.iter().map(|inode| (*inode).clone()).collect();
    let mut steps = Vec::new();
    while let Some(inode) = left.pop() {
        for (dir, name) in inode.ways.now() {
            if steps.len() >= MOST_STEPS {
                return None;
            }
            steps.push(Step { dir: dir.object(), name, is: inode.object() });
            if seen.insert(dir.number) {
                left.push(dir);
            }
        }
    }
    Some(steps)
}

/// Whether the kernel may believe what is in this directory: not too far down, so that the steps can be said.
pub(crate) fn may_be_believed(dir: &Arc<Inode>) -> bool {
    steps(&[dir]).is_some_and(|steps| steps.len() < DEEPEST)
}

/// The threads that were told `ESTALE` for a step just now. Each goes its path again, asking at each step; so no step of that
/// need be said, and another change meanwhile is no reason to be sent round once more.
#[derive(Debug, Default)]
pub(crate) struct Refused(Mutex<HashMap<u32, Instant>>);

impl Refused {
    /// This thread is told so now.
    pub(crate) fn add(&self, tid: u32) {
        let mut all = lock(&self.0);
        all.retain(|_, since| since.elapsed() < AGAIN);
        all.insert(tid, Instant::now());
    }

    /// Whether it goes its path again.
    pub(crate) fn has(&self, tid: u32) -> bool {
        lock(&self.0).get(&tid).is_some_and(|since| since.elapsed() < AGAIN)
    }

    /// It is at the end of its path.
    pub(crate) fn remove(&self, tid: u32) {
        lock(&self.0).remove(&tid);
    }
}
