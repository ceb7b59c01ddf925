//! Pending releases: files closed here and objects the kernel has forgotten, of which the server
//! need not be notified at once.
//!
//! They are sent with the next request, whatever that is. When a release has waited for some
//! milliseconds, a thread sends all that is pending; the callback thread does so before each of its
//! requests. If the node cannot be reached, releases stay pending, and the callback thread sends
//! them as soon as it has reconnected.

use crate::client::connection::peer::Peer;
use crate::lock;
use crate::message::{Object, Piggyback, Release};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Items of each kind sent with one request.
const MAX_BATCH: usize = 256;

/// How long a release waits for a request that can carry it. An urgent release waits for a shorter
/// time: that of a file with a lock, or of a file that was open for writing, since a program may
/// execute that file next (ETXTBSY while it is open for writing).
const URGENT_DELAY: Duration = Duration::from_millis(1);
const RELEASE_DELAY: Duration = Duration::from_millis(5);

/// Pause after a failed attempt to send.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Everything pending for one node.
#[derive(Debug, Default)]
pub(crate) struct PendingReleases {
    queue: Mutex<Queue>,
    is_nonempty: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// Counts server instances: a new one has none of the objects and files of the old one.
    server_epoch: u64,
    forgotten: Vec<(Object, u64)>,
    released: Vec<Release>,
    /// One of the releases is urgent.
    has_urgent: bool,
}

/// The part sent with one request, and the server instance it belongs to.
#[derive(Debug, Default)]
pub(crate) struct ReleaseBatch {
    pub(crate) piggyback: Piggyback,
    server_epoch: u64,
}

impl ReleaseBatch {
    pub(crate) fn is_empty(&self) -> bool {
        self.piggyback.forgotten.is_empty() && self.piggyback.released.is_empty()
    }
}

impl PendingReleases {
    /// Queues a FUSE_FORGET. It does not wake the sending thread.
    pub(crate) fn forget(&self, object: Object, count: u64) {
        self.queue().forgotten.push((object, count));
    }

    /// Queues a release of a file or a lock owner.
    pub(crate) fn release(&self, release: Release, is_urgent: bool) {
        let mut queue = self.queue();
        queue.released.push(release);
        queue.has_urgent |= is_urgent;
        drop(queue);
        self.is_nonempty.notify_one();
    }

    /// Takes a batch out of the queue, so that two threads do not send the same items.
    pub(crate) fn take(&self) -> ReleaseBatch {
        let mut queue = self.queue();
        queue.has_urgent = false;
        let (forgotten, released) =
            (queue.forgotten.len().min(MAX_BATCH), queue.released.len().min(MAX_BATCH));
        let forgotten = queue.forgotten.drain(..forgotten).collect();
        let released = queue.released.drain(..released).collect();
        ReleaseBatch { piggyback: Piggyback { forgotten, released }, server_epoch: queue.server_epoch }
    }

    /// Puts back a batch that could not be sent, unless the server has restarted since and holds
    /// nothing of it. Lookup counts are dropped: the server may have applied them already, and they
    /// must not be applied twice.
    pub(crate) fn put_back(&self, batch: ReleaseBatch) {
        let mut queue = self.queue();
        if queue.server_epoch == batch.server_epoch {
            queue.released.extend(batch.piggyback.released);
        }
    }

    /// The server has restarted, and holds nothing of this session.
    pub(crate) fn server_restarted(&self) {
        let mut queue = self.queue();
        *queue = Queue { server_epoch: queue.server_epoch + 1, ..Queue::default() };
    }

    /// Sends pending releases that no request has taken along. Never returns.
    pub(crate) fn run(peer: &Peer) -> ! {
        let pending = &peer.pending_releases;
        loop {
            let queue = pending.queue();
            let queue = pending.is_nonempty.wait_while(queue, |queue| queue.released.is_empty());
            let has_urgent = queue.unwrap_or_else(PoisonError::into_inner).has_urgent;
            std::thread::sleep(if has_urgent { URGENT_DELAY } else { RELEASE_DELAY });
            let batch = pending.take();
            if !batch.is_empty() && !peer.send_releases(batch) {
                std::thread::sleep(RETRY_INTERVAL);
            }
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }
}
