//! Invalidation of the dentries, attributes and pages that the kernel has cached.

use crate::client::cache::pages::REPLY_SETTLE_TIME;
use crate::lock;
use fuser::{INodeNo, Notifier};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Invalidates the kernel's caches by notifications. After a notification about an inode, the
/// kernel ignores replies to earlier requests as outdated. So only the callback thread and the
/// first lock on a file send one; in all other cases the reply itself must invalidate.
#[derive(Debug, Clone, Default)]
pub(crate) struct Invalidator {
    channel: Arc<OnceLock<(Notifier, OwnedFd, bool)>>,
    dentry_epoch: Arc<AtomicU64>,
    /// Path walks in progress may use dentries from this epoch on, until this time.
    walks_in_progress: Arc<Mutex<Option<(u64, Instant)>>>,
    /// When the kernel last got a listing with names that it may cache.
    listed_at: Arc<Mutex<Option<Instant>>>,
}

/// How long a path walk may take on a busy machine.
const MAX_PATH_WALK: Duration = Duration::from_millis(300);

/// Invalidates all dentries, including those in replies on their way to the kernel, except listings
/// (`FUSE_NOTIFY_INC_EPOCH` in `linux/fuse.h`, since 6.16). fuser does not support it, so this is
/// the `fuse_out_header`: length, notification code, and no request.
const INC_EPOCH: [u8; 16] = [16, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

impl Invalidator {
    /// Attaches the kernel's connection.
    pub(crate) fn attach(&self, notifier: Notifier, device: OwnedFd) {
        // Older kernels return EINVAL. The variable is for tests of that case.
        let is_old = std::env::var_os("TERN_NO_EPOCH").is_some();
        let can_invalidate_dentries = !is_old && rustix::io::write(&device, &INC_EPOCH).is_ok();
        let _once = self.channel.set((notifier, device, can_invalidate_dentries));
    }

    /// Whether the kernel's dentries can be invalidated, and so may have a TTL.
    pub(crate) fn can_invalidate_dentries(&self) -> bool {
        self.channel.get().is_some_and(|(.., can_invalidate_dentries)| *can_invalidate_dentries)
    }

    /// Records that the kernel gets a listing with names that it may cache.
    ///
    /// The names belong to the epoch in which the kernel processes the reply, not to that in which
    /// it sent the request. So an invalidation that comes before the kernel has processed the reply
    /// does not cover them.
    pub(crate) fn note_listing(&self) {
        *lock(&self.listed_at) = Some(Instant::now());
    }

    /// Invalidates all dentries for a recall, and once more when a recent listing has been
    /// processed.
    pub(crate) fn invalidate_dentries_for_recall(&self) {
        self.invalidate_dentries();
        let listed_at = *lock(&self.listed_at);
        let left = listed_at.map(|listed_at| REPLY_SETTLE_TIME.saturating_sub(listed_at.elapsed()));
        if let Some(left) = left.filter(|left| !left.is_zero()) {
            std::thread::sleep(left);
            self.invalidate_dentries();
        }
    }

    /// The dentry epoch: how often all dentries were invalidated.
    pub(crate) fn dentry_epoch(&self) -> u64 {
        self.dentry_epoch.load(Ordering::Acquire)
    }

    /// The first epoch whose dentries must be checked: a path walk that was in progress at an
    /// invalidation may have used one.
    pub(crate) fn first_epoch_to_check(&self) -> u64 {
        let walks_in_progress = *lock(&self.walks_in_progress);
        walks_in_progress
            .filter(|(_, until)| *until > Instant::now())
            .map_or_else(|| self.dentry_epoch(), |(from, _)| from)
    }

    /// Invalidates all dentries, without blocking. Invalidating a single one would wait for the
    /// directory's inode lock; its holder may wait for another node, which may wait for this one.
    pub(crate) fn invalidate_dentries(&self) {
        let now = Instant::now();
        let mut walks_in_progress = lock(&self.walks_in_progress);
        let from = walks_in_progress
            .filter(|(_, until)| *until > now)
            .map_or_else(|| self.dentry_epoch(), |(from, _)| from);
        *walks_in_progress = Some((from, now + MAX_PATH_WALK));
        drop(walks_in_progress);
        // The epoch is advanced before the kernel is notified. Dentries that the kernel gets in
        // between stay recorded although it cannot use them, which is harmless.
        self.dentry_epoch.fetch_add(1, Ordering::AcqRel);
        if let Some((_, device, true)) = self.channel.get() {
            let _unmounted = rustix::io::write(device, &INC_EPOCH);
        }
    }

    /// Invalidates a file's attributes and pages. Waits for reads and writes in progress, so no
    /// request of the kernel may wait for the calling thread.
    pub(crate) fn invalidate_inode(&self, number: u64) {
        if let Some((notifier, ..)) = self.channel.get() {
            let _unknown = notifier.inval_inode(INodeNo(number), 0, 0);
        }
    }

    /// Invalidates a file's attributes but not its pages, without blocking. The kernel ignores
    /// attributes in replies to earlier requests.
    pub(crate) fn invalidate_attributes(&self, number: u64) {
        if let Some((notifier, ..)) = self.channel.get() {
            let _unknown = notifier.inval_inode(INodeNo(number), -1, 0);
        }
    }
}
