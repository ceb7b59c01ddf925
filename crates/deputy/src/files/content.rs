//! Contents of mapped files that guests have requested.

use crate::links::peer::Peer;
use crate::links::peers::PeerId;
use crate::migrate::source::open_mapped;
use crate::shim::Shim;
use std::fs::File;
use tern_ids::HomePid;
use tern_image::FileRef;
use tern_image::content::read_piece;
use tern_migrate::message::Message;
use tern_wire::Link;

/// No more of a file's content is queued on a link that has more than this many unsent bytes.
const MAX_UNSENT_BYTES: usize = 512 << 10;
/// Bytes of a file's content in one message.
const PIECE_SIZE: usize = 256 << 10;

/// The content of a file that is being sent to a guest that has mapped it.
#[derive(Debug)]
pub(crate) struct ContentTransfer {
    /// The thread that waits for it, and the peer that holds that thread.
    tid: HomePid,
    to: PeerId,
    file: File,
    reference: FileRef,
    offset: u64,
}

impl ContentTransfer {
    /// Reads the next piece.
    fn read(&self) -> std::io::Result<Vec<u8>> {
        let FileRef { size, location, .. } = &self.reference;
        read_piece(&self.file, self.offset, PIECE_SIZE, (*size, location.is_some()))
    }

    /// Sends a piece. Returns whether there is more.
    fn send(&mut self, peer: &mut Peer, piece: &[u8]) -> anyhow::Result<bool> {
        let (hash, offset) = (self.reference.hash, self.offset);
        peer.send(self.tid, &Message::Content { hash, offset }, piece)?;
        self.offset += piece.len() as u64;
        Ok(self.offset < self.reference.size)
    }
}

impl Shim {
    pub(crate) fn send_content(&mut self, tid: HomePid, to: PeerId, hash: tern_ids::ContentHash) {
        let Some(process) = self.process_of_thread(tid) else { return };
        let Some(reference) = process.files.by_hash(hash).next().cloned() else { return };
        let opened = open_mapped(process, &reference);
        match opened {
            Ok(file) => {
                // A thread waits for one file at a time, so its last request is the one that counts.
                self.content_transfers.retain(|earlier| earlier.tid != tid);
                self.content_transfers.push(ContentTransfer { tid, to, file, reference, offset: 0 });
            }
            Err(error) => tracing::warn!(%tid, %error, "a mapped file cannot be opened any more"),
        }
    }

    /// Sends as much of the requested file contents as the links will take.
    pub(crate) fn continue_content_transfers(&mut self) {
        let mut content_transfers = std::mem::take(&mut self.content_transfers);
        content_transfers.retain_mut(|content| {
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
        self.content_transfers.append(&mut content_transfers);
    }
}
