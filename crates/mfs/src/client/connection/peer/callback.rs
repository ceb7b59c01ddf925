//! The callback channel: the connection on which a node recalls leases.

use super::{CALLBACK, PROBE_INTERVAL, Peer};
use crate::client::cache::invalidator::Invalidator;
use crate::client::fuse::inode::InodeTable;
use crate::message::{FileReply, FileRequest, Lease, REQUEST_FRAME};
use crate::packing;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use tern_wire::Link;

/// Pause before the callback channel is reconnected.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(200);

impl Peer {
    /// Connects the callback channel.
    fn connect_callback(&self) -> Option<Link> {
        Some(self.connect(CALLBACK, 0, Instant::now() + PROBE_INTERVAL).ok()?.0)
    }

    /// Sends a request on the callback channel, and waits for the reply and its recall count.
    fn exchange_callback(
        &self,
        link: &mut Link,
        number: u64,
        request: &FileRequest,
    ) -> Option<(u64, FileReply)> {
        let head = tern_wire::encode(request).ok()?;
        link.send(REQUEST_FRAME, number, &[&head], Instant::now() + PROBE_INTERVAL).ok()?;
        let frame = packing::unpack(link.recv(Instant::now() + PROBE_INTERVAL).ok()?)?;
        (frame.tag == number).then_some(())?;
        tern_wire::decode(&frame.payload).ok()
    }

    /// Sends pending releases, and reconnects the connections whose last request was abandoned.
    /// `None` if that fails.
    fn send_pending(&self, link: &mut Link, number: u64) -> Option<()> {
        loop {
            let batch = self.pending_releases.take();
            if batch.is_empty() {
                break;
            }
            if self.exchange_callback(link, number, &FileRequest::Release(batch.piggyback.clone())).is_none()
            {
                self.pending_releases.put_back(batch);
                return None;
            }
        }
        loop {
            let mut state = self.state();
            let Some(at) = state.idle.iter().position(|connection| connection.is_abandon_pending) else {
                return Some(());
            };
            let mut connection = state.idle.swap_remove(at);
            drop(state);
            connection.link = self
                .connect(connection.number, connection.last_abandoned, Instant::now() + PROBE_INTERVAL)
                .ok();
            let is_connected = connection.link.is_some();
            connection.is_abandon_pending = !is_connected;
            self.return_connection(connection);
            is_connected.then_some(())?;
        }
    }
}

/// Receives recalls from a node for as long as the tree is mounted.
///
/// Sends to `tried` when the channel works, and after each failed attempt to connect it.
pub(crate) fn run_callback_channel(
    peer: &Peer,
    inodes: &InodeTable,
    invalidator: &Invalidator,
    tried: &Sender<()>,
) -> ! {
    loop {
        let link = peer.connect_callback();
        let _broken = link.and_then(|link| receive_recalls(link, peer, inodes, invalidator, tried));
        let _ignored = tried.send(());
        if peer.uses_renewable_leases() {
            peer.invalidate_renewable();
        }
        std::thread::sleep(RECONNECT_INTERVAL);
    }
}

fn receive_recalls(
    mut link: Link,
    peer: &Peer,
    inodes: &InodeTable,
    invalidator: &Invalidator,
    tried: &Sender<()>,
) -> Option<()> {
    let mut acknowledged: Vec<Lease> = Vec::new();
    for number in 1.. {
        peer.send_pending(&mut link, number)?;
        let request = FileRequest::WaitForRecalls { returned: std::mem::take(&mut acknowledged) };
        let (recalls, FileReply::Recalled(leases)) = peer.exchange_callback(&mut link, number, &request)?
        else {
            return None;
        };
        // The last reply that the server sent on the previous callback channel may have been lost,
        // although the server counts its recalls as sent. So everything cached here is invalidated.
        // The server's thread for the old channel has ended by now, so no further reply can be
        // lost. The kernel's dentries expire soon; invalidating them here would unmount what is
        // mounted below them (in a container that is being set up).
        if number == 1 {
            peer.renewal.invalidate();
        }
        if !leases.is_empty() {
            // Which dentries the kernel may have is recorded only under renewable leases.
            let mut may_kernel_have_dentries = !peer.uses_renewable_leases();
            let renewable = if peer.uses_renewable_leases() { &leases[..] } else { &[] };
            peer.count_recall(|| {
                for inode in renewable.iter().flat_map(|lease| inodes.of_file(peer.node(), &lease.file)) {
                    inode.renewable_cache.recall();
                    may_kernel_have_dentries |= inode.renewable_cache.may_kernel_have_dentries();
                }
            });
            // All dentries are invalidated, since it is not known which of the files are
            // directories, nor which dentries the kernel has in these.
            if may_kernel_have_dentries {
                invalidator.invalidate_dentries_for_recall();
            }
            // Invalidating attributes makes the kernel ignore replies in flight, and use the old
            // attributes for those requests. The callers of these requests cannot have learned of
            // the change, since each reply that follows the change waits until this recall is
            // processed.
            let late = renewable.iter().filter(|lease| lease.is_after_change);
            for inode in late.flat_map(|lease| inodes.of_file(peer.node(), &lease.file)) {
                if inode.clear_kernel_version() {
                    inode.pages.note_attribute_invalidation();
                    inode.notify_unless_locked(|| invalidator.invalidate_attributes(inode.number));
                }
            }
        }
        // The recalls count as processed before pages are invalidated, since the invalidation waits
        // for reads in progress, which may wait for these recalls.
        peer.renewal.set_processed_recalls(recalls);
        if number == 1 {
            let _ignored = tried.send(());
        }
        for lease in &leases {
            for inode in inodes.of_file(peer.node(), &lease.file) {
                inode.pages.forget_version();
                // After a late recall (`is_after_change`), a request for the changed file may be in
                // flight. An invalidation would make the kernel ignore its reply, and use the old
                // attributes. So, except under renewable leases (above), the kernel revalidates by
                // itself: soon if the file is open, otherwise when its name is looked up.
                if !lease.is_after_change {
                    inode.notify_unless_locked(|| invalidator.invalidate_inode(inode.number));
                    inode.note_local_change();
                }
            }
        }
        acknowledged = leases;
    }
    None
}
