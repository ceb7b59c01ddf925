//! Sending the contents of mapped files.

use super::{ContentTransfer, MAX_UNSENT_BYTES};
use crate::links::peers::PeerId;
use crate::shim::Shim;
use tern_ids::HomePid;
use tern_wire::Link;

impl Shim {
    pub(crate) fn send_content(&mut self, tid: HomePid, to: PeerId, hash: tern_ids::ContentHash) {
        let Some(process) = self.process_of_thread(tid) else { return };
        let Some(reference) = process.files.by_hash(hash).next().cloned() else { return };
        let opened = process.open_mapped(&reference);
        match opened {
            Ok(file) => {
                self.content_transfers.add(ContentTransfer { tid, to, file, reference, offset: 0 });
            }
            Err(error) => tracing::warn!(%tid, %error, "a mapped file cannot be opened any more"),
        }
    }

    /// Sends as much of the requested file contents as the links will take.
    pub(crate) fn continue_content_transfers(&mut self) {
        let mut content_transfers = std::mem::take(&mut self.content_transfers);
        content_transfers.0.retain_mut(|content| {
            // The thread may have ended: other threads may follow it without a limit.
            if self.process_of_thread(content.tid).is_none() {
                return false;
            }
            // If the link breaks, the guest asks again on the next one.
            while let Some(unsent) = self.peers.link(content.to).map(Link::unsent) {
                if unsent > MAX_UNSENT_BYTES {
                    return true;
                }
                let Ok(piece) = content.read() else { return false };
                // The content may reveal a change that follows a change to a directory.
                self.send_name_changes();
                let sent = self.peers.get_mut(content.to).map(|peer| content.send(peer, &piece));
                if !matches!(sent, Some(Ok(true))) {
                    return false;
                }
            }
            false
        });
        self.content_transfers = content_transfers;
    }
}
