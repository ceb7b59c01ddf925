//! How long a reply may be cached, here and by the kernel, and the versions of files.
//!
//! A lease comes with a reply, and its time counts from when the request was sent. Recalls arrive
//! on another connection, the callback channel, and could overtake a reply on its way to the
//! kernel. So the callback thread first advances a counter and then invalidates. A thread that
//! delivers a reply checks that the counter is still what it was before the request, and keeps it
//! from being advanced until the kernel has the reply.

use crate::client::connection::peer::Peer;
use crate::client::fuse::inode::Inode;
use crate::message::{Attributes, Timespec};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// How much longer than its TTL the kernel may use a value: the kernel counts the TTL from when it
/// processes the reply.
pub(crate) const TTL_SLACK: Duration = Duration::from_millis(500);

/// The state of leases and local changes when a request was sent. Determines whether and for how
/// long the reply may be cached.
#[derive(Debug, Clone)]
pub(crate) struct ValidityStamp {
    peer: Arc<Peer>,
    requested_at: Instant,
    recalls: u64,
    local_changes: u64,
    xattr_changes: u64,
    /// Under renewable leases, which outlive their term
    /// ([`renewable_lease`](super::renewable_lease)): the generations of the inodes that the reply
    /// is about.
    generations: Vec<(Arc<Inode>, u64)>,
}

impl ValidityStamp {
    pub(crate) fn now(peer: &Arc<Peer>) -> Self {
        let (recalls, local_changes, xattr_changes) =
            (peer.recalls(), peer.local_changes(), peer.xattr_changes());
        Self {
            peer: peer.clone(),
            requested_at: Instant::now(),
            recalls,
            local_changes,
            xattr_changes,
            generations: Vec::new(),
        }
    }

    /// A stamp for a reply about one inode: under renewable leases, recalls of other files do not
    /// void it. Must not be stored in an inode, since it holds a reference to one.
    pub(crate) fn for_inode(inode: &Arc<Inode>) -> Self {
        let stamp = Self::now(&inode.peer);
        if inode.peer.uses_renewable_leases() { stamp.dated(Instant::now(), &[inode]) } else { stamp }
    }

    /// This stamp, but with `requested_at` as the time of the request, and with the present
    /// generations of these inodes.
    pub(crate) fn dated(self, requested_at: Instant, inodes: &[&Arc<Inode>]) -> Self {
        let generations =
            inodes.iter().map(|inode| ((*inode).clone(), inode.renewable_cache.generation())).collect();
        Self { requested_at, generations, ..self }
    }

    /// Delivers a reply to the kernel, and blocks the processing of recalls meanwhile. `deliver`
    /// gets a function that computes how long a lease (ms) in the reply still holds.
    pub(crate) fn deliver<T>(&self, deliver: impl FnOnce(&dyn Fn(u32) -> Duration) -> T) -> T {
        let delivery_lock = self.peer.delivery_lock.read().unwrap_or_else(PoisonError::into_inner);
        let delivered = deliver(&|lease| self.remaining(lease));
        drop(delivery_lock);
        delivered
    }

    /// How long a lease that came with the reply still holds.
    fn remaining(&self, lease: u32) -> Duration {
        let end = self.requested_at + Duration::from_millis(lease.into());
        let is_unrecalled = match &self.generations[..] {
            [] => self.peer.recalls() == self.recalls,
            all => all.iter().all(|(inode, generation)| inode.renewable_cache.generation() == *generation),
        };
        let is_unrecalled = is_unrecalled && self.peer.receives_recalls();
        let end = if is_unrecalled { end } else { self.requested_at };
        end.saturating_duration_since(Instant::now())
    }

    /// Whether a lease that came with the reply still holds.
    pub(crate) fn is_lease_valid(&self, lease: u32) -> bool {
        !self.remaining(lease).is_zero()
    }

    /// Whether a lease that came with the reply holds, and this client has changed nothing since
    /// the request. (The generations, if there are any, cover changes by this client too.)
    ///
    /// For replies that are kept and answer a later request of the kernel. The kernel takes them to
    /// be as new as that request, so a change made by this client in between would be lost.
    pub(crate) fn is_current(&self, lease: u32) -> bool {
        (!self.generations.is_empty() || self.peer.local_changes() == self.local_changes)
            && self.is_lease_valid(lease)
    }

    /// Whether this client has set no extended attribute since the request.
    pub(crate) fn are_xattrs_unchanged(&self) -> bool {
        self.peer.xattr_changes() == self.xattr_changes
    }

    /// The time since the request was sent.
    pub(crate) fn age(&self) -> Duration {
        self.requested_at.elapsed()
    }
}

/// Identifies a state of a file's content and attributes (NFSv4: change attribute).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileVersion {
    ctime: Timespec,
    mtime: Timespec,
    size: u64,
}

impl FileVersion {
    #[cfg(test)]
    pub(crate) fn at_time(moment: Timespec) -> Self {
        Self { ctime: moment, mtime: moment, size: 0 }
    }

    /// The version that the attributes show.
    pub(crate) fn new(attributes: &Attributes) -> Self {
        Self { ctime: attributes.ctime, mtime: attributes.mtime, size: attributes.size }
    }

    /// The version, or `None` if a change that is made now could leave these attributes as they
    /// are.
    pub(crate) fn if_settled(attributes: &Attributes) -> Option<Self> {
        attributes.is_settled.then_some(Self::new(attributes))
    }
}
