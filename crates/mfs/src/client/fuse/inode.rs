//! Inodes: the files of all nodes by their inode numbers in this tree, each with the server's
//! object.
//!
//! The number is derived from the node, and from the file system and inode number on the node. So
//! it is stable across lookups and restarts (`st_ino`, on which tar, git and make rely), and hard
//! links share an inode. When the server has lost the object, the file is looked up again by its
//! last known parent and name, and must prove to be the same file.

mod table;

use crate::client::cache::dentries::Dentries;
use crate::client::cache::name_cache::NameCache;
use crate::client::cache::pages::CachedPages;
use crate::client::cache::renewable_lease::RenewableCache;
use crate::client::cache::unsynced::UnsyncedWrites;
use crate::client::cache::validity::{FileVersion, TTL_SLACK, ValidityStamp};
use crate::client::caller::create_intent::CreateHistory;
use crate::client::connection::peer::{CallError, Peer};
use crate::client::fuse::locks::LockOwners;
use crate::client::fuse::readdir::LastLookup;
use crate::lock;
use crate::message::{Attributes, FileKey, Name, Object, Op, ROOT, Release, Timespec, XattrKinds};
use rustix::io::Errno;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_ids::{Credentials, NodeId, inode_number};

pub(crate) use table::InodeTable;

/// Number of parents through which a file is looked up again.
const MAX_DEPTH: u32 = 200;

/// Identifies a file on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileIdentity {
    node: NodeId,
    key: FileKey,
    btime: (i64, u32),
}

impl FileIdentity {
    pub(crate) fn new(node: NodeId, attributes: &Attributes) -> Self {
        let Timespec { seconds, nanos } = attributes.btime;
        Self { node, key: attributes.key, btime: (seconds, nanos) }
    }
}

/// A file, directory or symbolic link.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) number: u64,
    pub(crate) peer: Arc<Peer>,
    identity: FileIdentity,
    server_object: Mutex<ServerObject>,
    /// Owners of record locks on it here.
    pub(crate) lock_owners: LockOwners,
    pub(crate) unsynced: UnsyncedWrites,
    pub(crate) pages: CachedPages,
    /// The dentries by which the kernel may reach it.
    pub(crate) dentries: Dentries,
    /// When a name was last looked up in this directory.
    pub(crate) last_lookup: LastLookup,
    /// Names in this directory, if the kernel's dentries cannot be invalidated.
    pub(crate) name_cache: NameCache,
    /// State cached under renewable leases.
    pub(crate) renewable_cache: RenewableCache,
    /// Files recently created in this directory.
    pub(crate) creates: CreateHistory,
    /// Its attributes after this client's last operation, for the kernel's next FUSE_GETATTR.
    after_change: Mutex<Option<(Attributes, ValidityStamp)>>,
    /// Its attributes as of the last FUSE_GETATTR before a read.
    for_read: Mutex<Option<(Attributes, ValidityStamp)>>,
    /// Counts locks acquired on it here, plus one for the first request. Leaves zero only under the
    /// lock of `notices`.
    lock_events: AtomicU64,
    /// Number of notifications about it that are being sent, and their end.
    notices: (Mutex<usize>, Condvar),
    /// The version of the attributes that the kernel may have, and until when.
    kernel_version: Mutex<Option<(FileVersion, Instant)>>,
    /// The kinds of its extended attributes, with the lease under which they are cached.
    pub(in crate::client) xattr_kinds: Mutex<Option<(XattrKinds, ValidityStamp, u32)>>,
}

/// How long the attributes that a directory has after an operation may answer a FUSE_GETATTR.
/// Short, since they must not answer a FUSE_GETATTR that checks whether a caller may search the
/// directory.
const AFTER_CHANGE_TTL: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct ServerObject {
    object: Object,
    /// Number of lookups that the server has counted.
    lookups: u64,
    /// The parent and name by which it was last seen; none for a node's root.
    name: Option<(Arc<Inode>, OsString)>,
}

impl Inode {
    /// The server's object, as far as known.
    pub(crate) fn object(&self) -> Object {
        self.server_object().object
    }

    /// The parent and name by which it was last seen; none for a node's root.
    pub(crate) fn last_name(&self) -> Option<(Arc<Self>, OsString)> {
        self.server_object().name.clone()
    }

    /// The node that has the file.
    pub(crate) fn node(&self) -> NodeId {
        self.identity.node
    }

    /// The inode number listed for an entry of this directory: that of the file itself, unless a
    /// file system is mounted there.
    pub(crate) fn entry_number(&self, inode: u64) -> u64 {
        inode_number::of(self.identity.node, self.identity.key.volume, inode)
    }

    /// Differs between files that get the same `number` one after the other.
    pub(crate) fn generation(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.identity.btime.hash(&mut hasher);
        hasher.finish()
    }

    /// An operation of this client changes the file. Invalidates the cached attributes, and the
    /// record of those that the kernel has.
    pub(crate) fn note_local_change(&self) {
        *lock(&self.after_change) = None;
        *lock(&self.kernel_version) = None;
        self.renewable_cache.note_local_change();
    }

    /// Records that the kernel gets this version, with this TTL. Replies may overtake each other,
    /// so an earlier, longer TTL is kept.
    pub(crate) fn note_kernel_version(&self, version: FileVersion, ttl: Duration) {
        let until = Instant::now() + ttl;
        let mut kernel = lock(&self.kernel_version);
        *kernel = match *kernel {
            Some((was, later)) if later > until => Some((if ttl.is_zero() { was } else { version }, later)),
            _ => (!ttl.is_zero()).then_some((version, until)),
        };
    }

    /// Clears the record of the kernel's attributes. Returns whether the kernel may have used them
    /// until now, so that they must be invalidated.
    pub(crate) fn clear_kernel_version(&self) -> bool {
        lock(&self.kernel_version).take().is_some_and(|(_, until)| Instant::now() < until + TTL_SLACK)
    }

    /// Whether the kernel may have attributes of another version.
    pub(crate) fn may_kernel_differ(&self, version: FileVersion) -> bool {
        lock(&self.kernel_version)
            .is_some_and(|(kernel, until)| kernel != version && Instant::now() < until + TTL_SLACK)
    }

    /// Caches its attributes after an operation.
    pub(crate) fn cache_after_change(&self, attributes: Attributes, stamp: ValidityStamp) {
        if attributes.lease > 0 && attributes.key == self.identity.key {
            *lock(&self.after_change) = Some((attributes, stamp));
        }
    }

    /// Takes its attributes after an operation out of the cache.
    pub(crate) fn take_attributes_after_change(&self) -> Option<(Attributes, ValidityStamp)> {
        let cached = lock(&self.after_change).take();
        cached.filter(|(attributes, stamp)| {
            stamp.age() < AFTER_CHANGE_TTL && stamp.is_lease_valid(attributes.lease)
        })
    }

    /// Caches its attributes for reads; `lock_events` is the count before the attributes were
    /// requested.
    pub(crate) fn cache_for_read(&self, attributes: Attributes, stamp: ValidityStamp, lock_events: u64) {
        let mut cached = lock(&self.for_read);
        *cached = (attributes.lease > 0 && lock_events == self.lock_events()).then_some((attributes, stamp));
    }

    /// Counts locks acquired here, plus one for the first request. From then on the kernel gets no
    /// TTL for its attributes.
    pub(crate) fn lock_events(&self) -> u64 {
        self.lock_events.load(Ordering::Acquire)
    }

    /// A program requests a lock on it. Returns whether it is the first request.
    pub(crate) fn note_lock_request(&self) -> bool {
        if self.lock_events() > 0 {
            return false;
        }
        // Afterwards the kernel has every reply that was being delivered, and later replies get no
        // TTL.
        self.peer.with_deliveries_paused(|| {
            let _notices = lock(&self.notices.0);
            self.lock_events.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
        })
    }

    /// Sends a notification that makes the kernel discard the attributes in replies to earlier
    /// requests; not if a program here has requested a lock.
    ///
    /// A program that has acquired a lock reads next, and must not find the old end of the file. The
    /// kernel caches no attributes of such a file, so it asks before each read. It drops cached pages
    /// then too, but those in a mapping stay until then.
    pub(crate) fn notify_unless_locked(&self, notify: impl FnOnce()) {
        let (sending, ended) = &self.notices;
        let mut count = lock(sending);
        if self.lock_events() > 0 {
            return;
        }
        *count += 1;
        drop(count);
        notify();
        *lock(sending) -= 1;
        ended.notify_all();
    }

    /// Whether a notification is being sent. None follows after the first lock request.
    pub(crate) fn is_being_notified(&self) -> bool {
        *lock(&self.notices.0) > 0
    }

    /// Waits until no notification is being sent.
    pub(crate) fn wait_for_notices(&self) {
        let (sending, ended) = &self.notices;
        let waited = ended.wait_while(lock(sending), |count| *count > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// A lock was acquired, and the reply follows: everything cached before is void.
    pub(crate) fn note_lock_acquired(&self) {
        let mut cached = lock(&self.for_read);
        self.lock_events.fetch_add(1, Ordering::AcqRel);
        *cached = None;
        *lock(&self.after_change) = None;
        self.renewable_cache.note_local_change();
    }

    /// Its attributes, if they are known to be current: no lease of the node was recalled since,
    /// and this client has changed nothing.
    pub(crate) fn cached_for_read(&self) -> Option<(Attributes, ValidityStamp)> {
        let cached = lock(&self.for_read).clone();
        cached.filter(|(attributes, stamp)| stamp.is_current(attributes.lease))
    }

    /// This lock owner has closed a descriptor of the file, which releases all its record locks.
    pub(crate) fn release_locks_of(&self, owner: u64) {
        if let Some(number) = self.lock_owners.remove(owner) {
            self.release_owner(number);
        }
    }

    /// Releases the locks of the owner with this number at the server.
    pub(crate) fn release_owner(&self, number: u64) {
        self.peer.release_now(Release::LockOwner(self.identity.key, number));
    }

    fn server_object(&self) -> MutexGuard<'_, ServerObject> {
        lock(&self.server_object)
    }

    /// Whether `dir` is this inode or below it, as far as known. A hostile server may claim that a
    /// parent is below its child; the two would then hold references to each other for ever.
    fn is_ancestor_of(&self, dir: &Arc<Self>) -> bool {
        let mut at = dir.clone();
        for _ in 0..MAX_DEPTH {
            if std::ptr::eq(Arc::as_ptr(&at), self) {
                return true;
            }
            let parent = at.server_object().name.as_ref().map(|(parent, _)| parent.clone());
            match parent {
                Some(parent) => at = parent,
                None => return false,
            }
        }
        true
    }

    fn note_lookup(&self, object: Object, name: Option<(Arc<Inode>, OsString)>) {
        let name = name.filter(|(parent, _)| !self.is_ancestor_of(parent));
        let mut server_object = self.server_object();
        if server_object.object == object {
            server_object.lookups += 1;
        } else {
            // The server had lost it meanwhile.
            (server_object.object, server_object.lookups) = (object, 1);
        }
        if name.is_some() {
            server_object.name = name;
        }
    }

    /// Looks the file up again, since the server holds it no more.
    ///
    /// # Errors
    /// `ESTALE` if its name is gone or refers to another file.
    pub(crate) fn look_up_again(&self, caller: &Credentials) -> Result<(), Errno> {
        self.look_up_again_below(caller, MAX_DEPTH)
    }

    /// [`Self::look_up_again`] through fewer than `depth` parents, since outdated names may form a
    /// cycle.
    fn look_up_again_below(&self, caller: &Credentials, depth: u32) -> Result<(), Errno> {
        let depth = depth.checked_sub(1).ok_or(Errno::STALE)?;
        let Some((parent, name)) = self.server_object().name.clone() else { return Ok(()) };
        for _ in 0..2 {
            let op = Op::Lookup { dir: parent.object(), name: Name::from(&*name) };
            match self.peer.call(caller, Vec::new(), op, &[]) {
                Ok(response) => {
                    let found = match response.reply {
                        crate::message::FileReply::Found(found, _) => found,
                        crate::message::FileReply::NotFound(_) => return Err(Errno::STALE),
                        _ => return Err(Errno::IO),
                    };
                    if FileIdentity::new(self.identity.node, &found.attributes) != self.identity {
                        self.peer.queue_forget(found.object, 1);
                        return Err(Errno::STALE);
                    }
                    self.note_lookup(found.object, None);
                    return Ok(());
                }
                Err(CallError::Expired) => parent.look_up_again_below(caller, depth)?,
                Err(CallError::StalePath | CallError::Errno(Errno::NOENT)) => return Err(Errno::STALE),
                Err(CallError::Errno(errno)) => return Err(errno),
            }
        }
        Err(Errno::STALE)
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        let (object, count) = {
            let server_object = self.server_object();
            (server_object.object, server_object.lookups)
        };
        if object != ROOT {
            self.peer.queue_forget(object, count);
        }
    }
}

#[cfg(test)]
pub(in crate::client) mod tests {
    use super::*;
    use crate::message::Found;

    /// An empty file with this inode number, as a server reports it.
    pub(in crate::client) fn found(inode: u64, born: i64) -> Found {
        let zero = Timespec { seconds: 0, nanos: 0 };
        let key = FileKey { volume: 1, device: 1, inode };
        let attributes = Attributes {
            key,
            btime: Timespec { seconds: born, nanos: 0 },
            mode: 0o100_644,
            nlink: 1,
            uid: 0,
            gid: 0,
            size: 0,
            blocks: 0,
            block_size: 4096,
            atime: zero,
            mtime: zero,
            ctime: zero,
            lease: 0,
            is_renewable: false,
            is_settled: true,
            xattrs: XattrKinds::NONE,
        };
        Found { object: Object(inode + 1), attributes }
    }
}
