//! Caching under renewable leases, which outlive their term ([`Attributes::is_renewable`]).
//!
//! A tree that uses them (`tern-mfs mount --renewable`, for the container of a home's placed
//! commands) does not ask the node at each open and for each absent name, as other trees do. It
//! renews all its leases with one request: before it uses cached state when the last renewal is too
//! old, and on demand (fsync of the root, before a command begins and before it receives something
//! from home). Before the server replies to a renewal, it has recalled the leases of all files that
//! were changed on its node before. Each reply of the server carries the number of leases recalled
//! so far, and a client that has not processed all of these recalls waits for them. So once a
//! program has seen the effect of a change, no cached state from before that change is used
//! (docs/design/files.md).

use crate::client::cache::unsynced::Boot;
use crate::client::cache::validity::{TTL_SLACK, ValidityStamp};
use crate::client::connection::peer::{Peer, WhenLost};
use crate::client::fuse::inode::Inode;
use crate::lock;
use crate::message::{Attributes, Name, OpenId, Release};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use tern_ids::Credentials;

/// Leases are renewed when the last renewal is older than this. Somewhat less than the term.
const RENEWAL_INTERVAL: Duration = Duration::from_millis(800);

/// How long to wait for recalls that are known to be on their way.
const RECALL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long after a recall a directory counts as being changed by other nodes. During this time the
/// kernel may not cache dentries in the directory, since each change would then invalidate all
/// dentries.
const RECALL_BACKOFF: Duration = Duration::from_secs(2);

/// Number of names cached of one directory.
const MAX_CACHED_NAMES: usize = 4096;

/// Number of files of a node that stay open at the server, to be opened again without a request.
const MAX_CACHED_OPENS: usize = 2048;

/// The renewable leases from one node.
#[derive(Debug, Default)]
pub(crate) struct LeaseRenewal {
    callback: Mutex<CallbackState>,
    recalls_processed: Condvar,
    /// When the leases were last renewed: the time at which the request was sent.
    renewed_at: Mutex<Option<Instant>>,
    /// Held by the thread that renews the leases, so that only one does.
    renewing: Mutex<()>,
    /// How often everything cached from this node was invalidated.
    invalidations: AtomicU64,
    cached_opens: AtomicUsize,
}

#[derive(Debug, Default)]
struct CallbackState {
    /// The callback channel is connected.
    is_connected: bool,
    /// Number of the last recall that was processed.
    processed_recalls: u64,
}

impl LeaseRenewal {
    /// All recalls up to this number were processed: nothing is cached under their leases any more.
    pub(crate) fn set_processed_recalls(&self, recalls: u64) {
        *lock(&self.callback) = CallbackState { is_connected: true, processed_recalls: recalls };
        self.recalls_processed.notify_all();
    }

    /// Invalidates everything. Nothing is cached until the callback channel gets its next reply.
    pub(crate) fn invalidate(&self) {
        self.invalidations.fetch_add(1, Ordering::AcqRel);
        lock(&self.callback).is_connected = false;
        self.recalls_processed.notify_all();
    }

    /// Waits until recalls up to this number were processed. False on timeout.
    fn wait_for_recalls(&self, recalls: u64) -> bool {
        let is_behind =
            |callback: &mut CallbackState| callback.is_connected && callback.processed_recalls < recalls;
        let callback = lock(&self.callback);
        let waited = self.recalls_processed.wait_timeout_while(callback, RECALL_TIMEOUT, is_behind);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn valid_renewal(&self) -> Option<Instant> {
        lock(&self.renewed_at).filter(|renewed| renewed.elapsed() < RENEWAL_INTERVAL)
    }
}

impl Peer {
    /// Waits for the recalls that the server had sent when it replied, as counted in the reply. If
    /// they do not arrive, everything cached from the node is invalidated.
    pub(crate) fn wait_for_recalls(&self, recalls: u64) {
        if self.uses_renewable_leases() && !self.renewal.wait_for_recalls(recalls) {
            tracing::info!(node = %self.node(), "timed out waiting for recalls of leases; all cached state is dropped");
            self.invalidate_renewable();
        }
    }

    /// Invalidates everything cached from this node under renewable leases.
    pub(crate) fn invalidate_renewable(&self) {
        self.renewal.invalidate();
        self.invalidator().invalidate_dentries();
    }

    /// Whether recalls under renewable leases arrive here, so that a reply may be cached. A client
    /// that has no callback channel does not wait for recalls, so neither it nor the kernel may have
    /// anything to recall.
    pub(crate) fn receives_recalls(&self) -> bool {
        !self.uses_renewable_leases() || lock(&self.renewal.callback).is_connected
    }

    /// Renews the leases. When this returns, all changes made on the node so far are visible here.
    ///
    /// # Errors
    /// `EIO` if the node does not respond; the leases then end with their term.
    pub(crate) fn renew_leases(&self, when_lost: WhenLost) -> Result<(), Errno> {
        let requested_at = Instant::now();
        self.send_renewal(when_lost)?;
        *lock(&self.renewal.renewed_at) = Some(requested_at);
        Ok(())
    }

    /// A stamp for cached state of these inodes under renewable leases. Renews the leases if
    /// necessary. `None` if they cannot be relied on. The stamp must be taken before the cache is
    /// read.
    pub(crate) fn renewed_stamp(self: &Arc<Self>, inodes: &[&Arc<Inode>]) -> Option<ValidityStamp> {
        if !self.uses_renewable_leases() || !self.receives_recalls() {
            return None;
        }
        if self.renewal.valid_renewal().is_none() {
            let _one = lock(&self.renewal.renewing);
            if self.renewal.valid_renewal().is_none() {
                self.renew_leases(WhenLost::Fail).ok()?;
            }
        }
        Some(ValidityStamp::now(self).dated(self.renewal.valid_renewal()?, inodes))
    }

    fn invalidations(&self) -> u64 {
        self.renewal.invalidations.load(Ordering::Acquire)
    }
}

/// A file that stays open at the server, for opens by the same caller with the same flags.
#[derive(Debug)]
pub(crate) struct CachedOpen {
    peer: Arc<Peer>,
    caller: Credentials,
    flags: u32,
    pub(crate) opened: OpenId,
    pub(crate) boot: Boot,
}

impl CachedOpen {
    /// Keeps the file open as long as the result lives. `None` if too many files are kept open.
    pub(crate) fn new(
        peer: &Arc<Peer>,
        caller: &Credentials,
        flags: u32,
        opened: OpenId,
        boot: Boot,
    ) -> Option<Arc<Self>> {
        if peer.renewal.cached_opens.fetch_add(1, Ordering::AcqRel) >= MAX_CACHED_OPENS {
            peer.renewal.cached_opens.fetch_sub(1, Ordering::AcqRel);
            return None;
        }
        Some(Arc::new(Self { peer: peer.clone(), caller: caller.clone(), flags, opened, boot }))
    }
}

impl Drop for CachedOpen {
    fn drop(&mut self) {
        self.peer.renewal.cached_opens.fetch_sub(1, Ordering::AcqRel);
        self.peer.pending_releases.release(Release::File(self.opened), false);
    }
}

/// The cached state of one inode under renewable leases.
#[derive(Debug, Default)]
pub(crate) struct RenewableCache {
    state: Mutex<CachedState>,
    /// Advances whenever cached state is invalidated.
    generation: AtomicU64,
    /// When the inode's lease was last recalled.
    recalled_at: Mutex<Option<Instant>>,
    /// Until when the kernel may use a dentry in this directory.
    dentries_until: Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct CachedState {
    /// The node's invalidation count when this was cached.
    invalidations: u64,
    attributes: Option<Attributes>,
    /// Cached names of a directory: their inodes, or none where a name does not exist.
    names: Option<HashMap<OsString, Option<Weak<Inode>>>>,
    /// The target of a symbolic link.
    link_target: Option<Vec<u8>>,
    open: Option<Arc<CachedOpen>>,
}

impl RenewableCache {
    /// The current generation.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The inode's lease was recalled.
    pub(crate) fn recall(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        *lock(&self.recalled_at) = Some(Instant::now());
        let gone = std::mem::take(&mut *lock(&self.state));
        // Dropping an open file queues its release, which takes other locks.
        drop(gone);
    }

    /// Whether others have changed the inode recently, so that the kernel should not cache dentries
    /// in it.
    fn was_recently_recalled(&self) -> bool {
        lock(&self.recalled_at).is_some_and(|at| at.elapsed() < RECALL_BACKOFF)
    }

    /// TTL of a dentry in this directory if the lease holds for `remaining`. Records that the
    /// kernel gets it.
    pub(crate) fn dentry_ttl(&self, remaining: Duration) -> Duration {
        let ttl = if self.was_recently_recalled() { Duration::ZERO } else { remaining };
        self.note_dentry_ttl(ttl);
        ttl
    }

    /// Records that the kernel gets a dentry in this directory with this TTL.
    fn note_dentry_ttl(&self, ttl: Duration) {
        if !ttl.is_zero() {
            let mut until = lock(&self.dentries_until);
            *until = (*until).max(Some(Instant::now() + ttl + TTL_SLACK));
        }
    }

    /// Whether the kernel may use a dentry in this directory without asking.
    pub(crate) fn may_kernel_have_dentries(&self) -> bool {
        lock(&self.dentries_until).is_some_and(|until| Instant::now() < until)
    }

    /// An operation of this client changes the inode. Names in a directory are invalidated
    /// separately, by [`invalidate_names`](Self::invalidate_names).
    pub(crate) fn note_local_change(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        let mut state = lock(&self.state);
        (state.attributes, state.link_target) = (None, None);
        let open = state.open.take();
        drop(state);
        drop(open);
    }

    /// Invalidates cached names whose meaning an operation may change.
    pub(crate) fn invalidate_names(&self, names: &[Name]) {
        if names.is_empty() {
            return;
        }
        self.generation.fetch_add(1, Ordering::AcqRel);
        if let Some(known) = &mut lock(&self.state).names {
            names.iter().for_each(|name| drop(known.remove(name.as_os())));
        }
    }

    /// Caches the content of a reply, if the lease holds and nothing was invalidated since the
    /// stamp.
    fn update(&self, peer: &Peer, lease: u32, stamp: &ValidityStamp, update: impl FnOnce(&mut CachedState)) {
        if !peer.uses_renewable_leases() {
            return;
        }
        // The callback thread advances the counters before it invalidates, and not during
        // `deliver`.
        stamp.deliver(|_| {
            if stamp.is_current(lease) {
                let invalidations = peer.invalidations();
                let mut state = lock(&self.state);
                let old = (state.invalidations != invalidations).then(|| std::mem::take(&mut *state));
                state.invalidations = invalidations;
                update(&mut state);
                drop(state);
                drop(old);
            }
        });
    }

    /// Caches attributes.
    pub(crate) fn set_attributes(&self, peer: &Peer, attributes: &Attributes, stamp: &ValidityStamp) {
        // Unsettled attributes are not cached: a later change might leave them as they are.
        if attributes.is_renewable && attributes.is_settled {
            self.update(peer, attributes.lease, stamp, |state| state.attributes = Some(*attributes));
        }
    }

    /// Caches a directory's attributes and the result of a lookup in it.
    pub(crate) fn set_name(
        &self,
        peer: &Peer,
        attributes: &Attributes,
        stamp: &ValidityStamp,
        name: &OsStr,
        found: Option<&Arc<Inode>>,
    ) {
        self.set_attributes(peer, attributes, stamp);
        if attributes.is_renewable {
            self.update(peer, attributes.lease, stamp, |state| {
                let names = state.names.get_or_insert_default();
                if names.len() < MAX_CACHED_NAMES {
                    names.insert(name.to_owned(), found.map(Arc::downgrade));
                }
            });
        }
    }

    /// Caches the target of a symbolic link.
    pub(crate) fn set_link_target(&self, peer: &Peer, stamp: &ValidityStamp, target: &[u8]) {
        self.update_known(peer, stamp, |state| state.link_target = Some(target.to_vec()));
    }

    pub(crate) fn set_open(&self, peer: &Peer, stamp: &ValidityStamp, open: &Arc<CachedOpen>) {
        let mut last = None;
        self.update_known(peer, stamp, |state| last = state.open.replace(open.clone()));
        drop(last);
    }

    /// Caches something if the attributes are cached.
    fn update_known(&self, peer: &Peer, stamp: &ValidityStamp, update: impl FnOnce(&mut CachedState)) {
        let Some(attributes) = lock(&self.state).attributes else { return };
        self.update(peer, attributes.lease, stamp, |state| {
            if state.attributes.is_some() {
                update(state);
            }
        });
    }

    fn get<T>(&self, peer: &Peer, get: impl FnOnce(&CachedState) -> Option<T>) -> Option<T> {
        let state = lock(&self.state);
        if state.invalidations == peer.invalidations() { get(&state) } else { None }
    }

    /// The cached attributes.
    pub(crate) fn attributes(&self, peer: &Peer) -> Option<Attributes> {
        self.get(peer, |state| state.attributes)
    }

    /// The result of a lookup, if it is cached: `Some(None)` if there is no file of this name, else
    /// the file's inode, if this client still has the inode.
    pub(crate) fn lookup(&self, peer: &Peer, name: &OsStr) -> Option<Option<Arc<Inode>>> {
        self.get(peer, |state| match state.names.as_ref()?.get(name)? {
            Some(found) => found.upgrade().map(Some),
            None => Some(None),
        })
    }

    /// The cached target of a symbolic link.
    pub(crate) fn link_target(&self, peer: &Peer) -> Option<Vec<u8>> {
        self.get(peer, |state| state.link_target.clone())
    }

    /// The file that this caller has left open with these flags, if there is one, and its
    /// attributes.
    pub(crate) fn find_open(
        &self,
        peer: &Peer,
        caller: &Credentials,
        flags: u32,
    ) -> Option<(Attributes, Arc<CachedOpen>)> {
        self.get(peer, |state| {
            let open = state.open.as_ref().filter(|open| open.caller == *caller && open.flags == flags)?;
            Some((state.attributes?, open.clone()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dentry_ttl_is_recorded_and_is_zero_after_a_recall() {
        let renewable = RenewableCache::default();
        renewable.note_dentry_ttl(Duration::ZERO);
        assert!(!renewable.may_kernel_have_dentries() && !renewable.was_recently_recalled());
        renewable.note_dentry_ttl(Duration::from_secs(3600));
        renewable.note_dentry_ttl(Duration::from_millis(1));
        assert!(renewable.may_kernel_have_dentries(), "a reply with a shorter TTL does not shorten it");
        let generation = renewable.generation();
        renewable.recall();
        assert!(renewable.was_recently_recalled() && renewable.generation() > generation);
        assert_eq!(renewable.dentry_ttl(RECALL_BACKOFF), Duration::ZERO);
        *lock(&renewable.recalled_at) = Instant::now().checked_sub(RECALL_BACKOFF);
        assert!(!renewable.was_recently_recalled());
        assert_eq!(renewable.dentry_ttl(RECALL_BACKOFF), RECALL_BACKOFF);
    }
}
