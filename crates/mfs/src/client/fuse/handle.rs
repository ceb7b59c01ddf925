//! FUSE file handles: the files that programs here have open.

use crate::client::cache::renewable_lease::CachedOpen;
use crate::client::cache::unsynced::Boot;
use crate::client::cache::validity::ValidityStamp;
use crate::client::connection::peer::Response;
use crate::client::fuse::inode::Inode;
use crate::client::fuse::readdir::ReaddirBuffer;
use crate::lock;
use crate::message::OpenId;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tern_ids::Credentials;

/// An open file or directory.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) inode: Arc<Inode>,
    /// The caller that opened it. The kernel's own reads and writes (readahead, write-back) use
    /// these credentials.
    pub(crate) opener: Credentials,
    pub(crate) flags: u32,
    /// The server's open file; replaced when the file had to be opened again.
    pub(crate) server_file: Mutex<OpenId>,
    /// The boot of the server's node during which the file was first opened.
    pub(crate) boot: Boot,
    /// Set if the server's open file is shared with other handles.
    pub(crate) cached_open: Mutex<Option<Arc<CachedOpen>>>,
    /// It holds a flock(2) lock.
    pub(crate) has_flock: AtomicBool,
    /// The kernel sends no FUSE_FLUSH for it (`FOPEN_NOFLUSH`), only FUSE_RELEASE.
    pub(crate) skips_flush: bool,
    /// Owners (the kernel's numbers) of record locks that end with this handle: the open file
    /// description (`F_OFD_SETLK`), and processes, if the kernel does not report when they close
    /// the file.
    pub(crate) lock_owners: Mutex<HashSet<u64>>,
    /// Directory entries that were read and not returned yet.
    pub(crate) readdir_buffer: Mutex<ReaddirBuffer>,
    /// The content that came with the reply to the open, until it is read.
    prefetched: Mutex<Option<PrefetchedContent>>,
}

/// How long prefetched content may be used. Within this time the kernel's pages are not taken to be
/// of a newer version ([`crate::client::cache::pages`]).
const PREFETCH_TIMEOUT: Duration = Duration::from_millis(20);

/// A file's whole content as of its open.
#[derive(Debug)]
struct PrefetchedContent {
    response: Response,
    stamp: ValidityStamp,
    lease: u32,
    /// The inode's counts of writes and of lock events when the open was sent. If either has
    /// changed, the content is not used.
    write_count: u64,
    lock_events: u64,
}

/// Data that was read.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "short-lived, and only one exists at a time")]
pub(crate) enum ReadData {
    /// All of a reply.
    Whole(Response),
    /// A part of the prefetched content.
    Part(Vec<u8>),
}

impl ReadData {
    pub(crate) fn data(&self) -> &[u8] {
        match self {
            Self::Whole(response) => response.data(),
            Self::Part(data) => data,
        }
    }
}

impl Handle {
    pub(crate) fn new(
        inode: Arc<Inode>,
        opener: Credentials,
        flags: u32,
        server_file: OpenId,
        boot: Boot,
    ) -> Self {
        inode.pages.note_open();
        Self {
            inode,
            opener,
            flags,
            server_file: Mutex::new(server_file),
            boot,
            cached_open: Mutex::default(),
            readdir_buffer: Mutex::default(),
            has_flock: AtomicBool::new(false),
            skips_flush: false,
            lock_owners: Mutex::default(),
            prefetched: Mutex::default(),
        }
    }

    /// A handle that shares the server's open file. Such files are open for reading only. A
    /// compiler opens and closes hundreds, and would wait for the reply to each FUSE_FLUSH.
    /// FUSE_FLUSH matters only with locks.
    pub(crate) fn with_cached_open(
        inode: Arc<Inode>,
        opener: Credentials,
        flags: u32,
        cached_open: Arc<CachedOpen>,
    ) -> Self {
        let mut handle = Self::new(inode, opener, flags, cached_open.opened, cached_open.boot);
        handle.cached_open = Mutex::new(Some(cached_open));
        handle.skips_flush = handle.inode.lock_events() == 0;
        handle
    }

    /// Whether unsynced writes since the first open may be lost; `boot` is the node's current one.
    pub(crate) fn has_lost_writes(&self, boot: Boot) -> bool {
        self.inode.unsynced.has_lost_writes(self.boot, boot)
    }

    /// Stores the content that came with the reply to the open.
    pub(crate) fn set_prefetched(
        &self,
        response: Response,
        stamp: ValidityStamp,
        lease: u32,
        (write_count, lock_events): (u64, u64),
    ) {
        *lock(&self.prefetched) =
            Some(PrefetchedContent { response, stamp, lease, write_count, lock_events });
    }

    /// The requested part of the prefetched content, if that is still valid.
    pub(crate) fn read_prefetched(&self, at: u64, length: u32) -> Option<ReadData> {
        let mut prefetched = lock(&self.prefetched);
        let content = prefetched.as_ref()?;
        // A later open may have found a newer version; this content must not be mixed into its
        // pages.
        let is_valid = content.stamp.age() < PREFETCH_TIMEOUT
            && content.stamp.deliver(|left| !left(content.lease).is_zero());
        let is_unchanged = (content.write_count, content.lock_events)
            == (self.inode.unsynced.write_count(), self.inode.lock_events());
        if !is_valid || !is_unchanged {
            *prefetched = None;
            return None;
        }
        let data = content.response.data();
        let from = usize::try_from(at).unwrap_or(usize::MAX).min(data.len());
        let to = from.saturating_add(length as usize).min(data.len());
        if from == 0 && to == data.len() {
            return prefetched.take().map(|all| ReadData::Whole(all.response));
        }
        Some(ReadData::Part(data[from..to].to_vec()))
    }

    /// The server's open file.
    pub(crate) fn server_file(&self) -> OpenId {
        *lock(&self.server_file)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inode.pages.note_close();
        for owner in lock(&self.lock_owners).drain() {
            self.inode.release_locks_of(owner);
        }
    }
}

/// All handles, by the number that the kernel has for each.
#[derive(Debug, Default)]
pub(crate) struct HandleTable {
    all: Mutex<(HashMap<u64, Arc<Handle>>, u64)>,
}

impl HandleTable {
    pub(crate) fn insert(&self, handle: Handle) -> u64 {
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
