//! The inodes that the kernel has, by number and by file.

use super::{FileIdentity, Inode, ServerObject};
use crate::client::cache::dentries::Dentries;
use crate::client::cache::name_cache::NameCache;
use crate::client::cache::pages::CachedPages;
use crate::client::cache::renewable_lease::RenewableCache;
use crate::client::cache::unsynced::UnsyncedWrites;
use crate::client::caller::create_intent::CreateHistory;
use crate::client::connection::peer::Peer;
use crate::client::fuse::locks::LockOwners;
use crate::client::fuse::readdir::LastLookup;
use crate::lock;
use crate::message::{FileKey, Found};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use tern_ids::{NodeId, inode_number};

/// All inodes that the kernel has.
#[derive(Debug, Default)]
pub(crate) struct InodeTable {
    maps: Mutex<InodeMaps>,
}

#[derive(Debug, Default)]
struct InodeMaps {
    /// By number, with the kernel's lookup count (`nlookup`).
    inodes: HashMap<u64, (Arc<Inode>, u64)>,
    /// The numbers of a file: more than one only if deleted files had the same inode number on the
    /// node and are still open here.
    numbers: HashMap<(NodeId, FileKey), Vec<u64>>,
}

impl InodeTable {
    /// The inode with this number.
    pub(crate) fn get(&self, number: u64) -> Option<Arc<Inode>> {
        lock(&self.maps).inodes.get(&number).map(|(inode, _)| inode.clone())
    }

    /// The inodes of this file.
    pub(crate) fn of_file(&self, node: NodeId, key: &FileKey) -> Vec<Arc<Inode>> {
        let maps = lock(&self.maps);
        let numbers = maps.numbers.get(&(node, *key)).into_iter().flatten();
        numbers.filter_map(|number| maps.inodes.get(number)).map(|(inode, _)| inode.clone()).collect()
    }

    /// A file was renamed from the first name to the second.
    pub(crate) fn rename(
        &self,
        file: Option<FileKey>,
        (old_dir, old): (&Arc<Inode>, &OsStr),
        (dir, name): (&Arc<Inode>, &OsStr),
    ) {
        let Some(key) = file else { return };
        for inode in self.of_file(dir.node(), &key) {
            inode.dentries.remove(old_dir, old);
            if inode.is_ancestor_of(dir) {
                continue;
            }
            let last = inode.server_object().name.replace((dir.clone(), name.to_owned()));
            // Dropping the last reference to a directory takes other locks.
            drop(last);
        }
    }

    /// The inode of a looked-up file; counts a lookup by the kernel.
    pub(crate) fn add_lookup(
        &self,
        node: NodeId,
        peer: &Arc<Peer>,
        found: &Found,
        name: Option<(&Arc<Inode>, &OsStr)>,
    ) -> Arc<Inode> {
        let identity = FileIdentity::new(node, &found.attributes);
        let name = name.map(|(parent, name)| (parent.clone(), name.to_owned()));
        let mut maps = lock(&self.maps);
        let InodeMaps { inodes, numbers } = &mut *maps;
        let numbers = numbers.entry((node, identity.key)).or_default();
        for number in &*numbers {
            if let Some((inode, lookups)) =
                inodes.get_mut(number).filter(|(inode, _)| inode.identity == identity)
            {
                *lookups += 1;
                inode.note_lookup(found.object, name);
                return inode.clone();
            }
        }
        let mut number = inode_number::of(node, identity.key.volume, identity.key.inode);
        // The number is taken: by a collision, or by a deleted file that is still open here.
        while inodes.contains_key(&number) {
            number = inode_number::next(number);
        }
        numbers.push(number);
        let server_object = ServerObject { object: found.object, lookups: 1, name };
        let (lock_owners, pages) = (LockOwners::default(), CachedPages::default());
        let (server_object, unsynced) = (Mutex::new(server_object), UnsyncedWrites::default());
        let (peer, dentries, name_cache) = (peer.clone(), Dentries::default(), NameCache::default());
        let last_lookup = LastLookup::default();
        let (creates, renewable_cache) = (CreateHistory::default(), RenewableCache::default());
        let (after_change, for_read) = (Mutex::default(), Mutex::default());
        let (xattr_kinds, kernel_version, lock_events) =
            (Mutex::default(), Mutex::default(), AtomicU64::new(0));
        let inode = Arc::new(Inode {
            number,
            peer,
            identity,
            server_object,
            lock_owners,
            unsynced,
            pages,
            dentries,
            last_lookup,
            name_cache,
            renewable_cache,
            creates,
            after_change,
            for_read,
            lock_events,
            notices: Default::default(),
            xattr_kinds,
            kernel_version,
        });
        inodes.insert(number, (inode.clone(), 1));
        inode
    }

    /// Counts a lookup by the kernel that needed no request. False if the kernel has dropped the
    /// inode.
    pub(crate) fn count_lookup_again(&self, inode: &Arc<Inode>) -> bool {
        match lock(&self.maps).inodes.get_mut(&inode.number) {
            Some((found, lookups)) if Arc::ptr_eq(found, inode) => {
                *lookups += 1;
                true
            }
            _ => false,
        }
    }

    /// The kernel has sent FUSE_FORGET for this many lookups.
    pub(crate) fn forget(&self, number: u64, count: u64) {
        let mut maps = lock(&self.maps);
        let Some((inode, lookups)) = maps.inodes.get_mut(&number) else { return };
        *lookups = lookups.saturating_sub(count);
        if *lookups > 0 {
            return;
        }
        let of = (inode.identity.node, inode.identity.key);
        let gone = maps.inodes.remove(&number);
        if let Some(numbers) = maps.numbers.get_mut(&of) {
            numbers.retain(|other| *other != number);
            if numbers.is_empty() {
                maps.numbers.remove(&of);
            }
        }
        // Dropping the inode may drop its parents too; each drop takes only the lock of the peer's
        // pending releases.
        drop(maps);
        if let Some((inode, _)) = &gone {
            inode.dentries.clear();
        }
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::cache::invalidator::Invalidator;
    use crate::client::connection::peer::MountContext;
    use crate::client::fuse::inode::tests::found;
    use std::time::Duration;

    const NODE: NodeId = NodeId(2);

    #[test]
    fn file_keeps_its_inode_when_others_share_its_number() {
        let authority = tern_wire::Authority::create("test").unwrap();
        let identity = tern_wire::Identity::issued_by_authority(&authority, NodeId(1)).unwrap();
        let timeout = Duration::from_secs(1);
        let context = MountContext {
            identity,
            map: "/dev/null".into(),
            session: [0; 16],
            timeout,
            purpose: crate::message::Purpose::Container,
            invalidator: Invalidator::default(),
        };
        let peer = Arc::new(Peer::new(NODE, context.into()));
        let inodes = InodeTable::default();
        let add = |file: &Found| inodes.add_lookup(NODE, &peer, file, None);
        // Three files with the same inode number; the first two are deleted and still open here.
        let files = [1, 2, 3].map(|born| found(7, born));
        let added = files.map(|file| add(&file));
        let key = &files[0].attributes.key;
        assert_eq!(inodes.of_file(NODE, key).len(), 3);
        inodes.forget(added[1].number, 1);
        // A recall reaches all that are left, and another lookup finds the same inode.
        let left: Vec<_> = inodes.of_file(NODE, key).iter().map(|inode| inode.number).collect();
        assert_eq!(left, [added[0].number, added[2].number]);
        assert_eq!(add(&files[2]).number, added[2].number);
        for (number, count) in [(added[0].number, 1), (added[2].number, 2)] {
            inodes.forget(number, count);
        }
        assert!(inodes.of_file(NODE, key).is_empty());
        assert!(lock(&inodes.maps).numbers.is_empty());
        assert_eq!(add(&files[1]).number, added[0].number, "the preferred number is free again");
    }
}
