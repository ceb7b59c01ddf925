//! The dentries by which the kernel may reach a file without a lookup.
//!
//! The kernel caches a dentry as long as the directory's lease holds, and drops all dentries when a
//! lease is recalled (`FUSE_NOTIFY_INC_EPOCH`; `name_cache` is for kernels without it). A program
//! on the server's own node takes no part in leases. So an operation at the end of a path carries
//! all dentries by which the kernel may have come there, and the server checks them in the same
//! round trip ([`crate::message::DentryCheck`]). If a dentry is stale, the operation fails with
//! `ESTALE`. The kernel then walks the whole path again and looks up each component
//! (`LOOKUP_REVAL`).
//!
//! A superfluous check costs only that second walk. (A check is superfluous if, for example, the
//! path began in a directory whose own name has changed.) A missing check would let an operation
//! reach an outdated file. So a dentry is recorded before the kernel gets it, and kept for longer
//! than its TTL. After a recall its dentries are still checked for a while, for path walks that
//! were in progress ([`crate::client::cache::invalidator::Invalidator::first_epoch_to_check`]).
//! When a program on the server's node has made a change, the recall comes after the change, and
//! must not remove the dentry by which the change is detected.

use crate::client::cache::validity::TTL_SLACK;
use crate::client::fuse::inode::Inode;
use crate::lock;
use crate::message::{DentryCheck, MAX_DENTRY_CHECKS, Name};
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The epoch of dentries from a directory listing. They never become outdated by epoch: the kernel
/// gives them the epoch of the time when it processes the reply, not when it sent the request.
pub(crate) const ANY_EPOCH: u64 = u64::MAX - MAX_EPOCH_LAG;

/// How many invalidations of all dentries may happen during one path walk.
const MAX_EPOCH_LAG: u64 = 16;

/// Maximum number of dentries recorded for one inode. The kernel may not cache further ones.
const MAX_DENTRIES: usize = 8;

/// The kernel may cache dentries in a directory only if the directory needs fewer dentry checks
/// than this.
const MAX_DIRECTORY_CHECKS: usize = 64;

#[derive(Debug)]
struct CachedDentry {
    dir: Arc<Inode>,
    name: OsString,
    until: Instant,
    /// The dentry epoch to which it belongs; the kernel uses only dentries of the current epoch.
    epoch: u64,
}

/// The dentries that the kernel may have of one inode.
#[derive(Debug, Default)]
pub(crate) struct Dentries(Mutex<Vec<CachedDentry>>);

impl Dentries {
    /// Records that the kernel may use this dentry for `ttl`. False if the kernel must not use it,
    /// because too many are recorded.
    pub(crate) fn add(&self, dir: &Arc<Inode>, name: &OsStr, ttl: Duration, epoch: u64) -> bool {
        let now = Instant::now();
        let until = now + ttl + TTL_SLACK;
        let mut dentries = lock(&self.0);
        if let Some(dentry) = dentries.iter_mut().find(|dentry| dentry.matches(dir, name)) {
            (dentry.until, dentry.epoch) = (dentry.until.max(until), epoch);
            return true;
        }
        let expired: Vec<CachedDentry> = dentries
            .extract_if(.., |dentry| dentry.until < now || dentry.epoch + MAX_EPOCH_LAG < epoch)
            .collect();
        let has_room = dentries.len() < MAX_DENTRIES;
        if has_room {
            dentries.push(CachedDentry { dir: dir.clone(), name: name.to_owned(), until, epoch });
        }
        // Dropping the last reference to a directory takes other locks.
        drop(dentries);
        drop(expired);
        has_room
    }

    /// The kernel itself has removed or renamed this name.
    pub(crate) fn remove(&self, dir: &Arc<Inode>, name: &OsStr) {
        let gone: Vec<CachedDentry> =
            lock(&self.0).extract_if(.., |dentry| dentry.matches(dir, name)).collect();
        drop(gone);
    }

    /// The kernel has dropped the inode.
    pub(crate) fn clear(&self) {
        let gone = std::mem::take(&mut *lock(&self.0));
        drop(gone);
    }

    fn valid_since(&self, from: u64) -> Vec<(Arc<Inode>, Name)> {
        let now = Instant::now();
        let dentries = lock(&self.0);
        let still = dentries.iter().filter(|dentry| dentry.until >= now && dentry.epoch >= from);
        still.map(|dentry| (dentry.dir.clone(), Name::from(&*dentry.name))).collect()
    }
}

impl CachedDentry {
    fn matches(&self, dir: &Arc<Inode>, name: &OsStr) -> bool {
        Arc::ptr_eq(&self.dir, dir) && self.name == name
    }
}

/// The checks of all dentries since the epoch `from` by which the kernel may have reached these
/// inodes. `None` if they do not fit into a request.
pub(crate) fn dentry_checks(inodes: &[&Arc<Inode>], from: u64) -> Option<Vec<DentryCheck>> {
    let mut seen: HashSet<u64> = inodes.iter().map(|inode| inode.number).collect();
    let mut left: Vec<Arc<Inode>> = inodes.iter().map(|inode| (*inode).clone()).collect();
    let mut checks = Vec::new();
    while let Some(inode) = left.pop() {
        for (dir, name) in inode.dentries.valid_since(from) {
            if checks.len() >= MAX_DENTRY_CHECKS {
                return None;
            }
            checks.push(DentryCheck { dir: dir.object(), name, object: inode.object() });
            if seen.insert(dir.number) {
                left.push(dir);
            }
        }
    }
    Some(checks)
}

/// Whether the kernel may cache dentries in this directory. It may not if the directory itself
/// needs too many checks.
pub(crate) fn are_names_cacheable(dir: &Arc<Inode>, epoch: u64) -> bool {
    dentry_checks(&[dir], epoch).is_some_and(|checks| checks.len() < MAX_DIRECTORY_CHECKS)
}
