//! Sending the contents of mapped files.

use super::{ContentTransfer, MAX_UNSENT_BYTES, Source};
use crate::links::peers::PeerId;
use crate::shim::Shim;
use tern_ids::HomePid;
use tern_image::content::ContentReader;
use tern_migrate::message::Message;
use tern_wire::Link;

impl Shim {
    pub(crate) fn send_content(&mut self, tid: HomePid, to: PeerId, hash: tern_ids::ContentHash) {
        let Some(process) = self.process_of_thread(tid) else { return };
        let Some(reference) = process.files.by_hash(hash).next().cloned() else { return };
        let (as_identified, any_copy) =
            (process.files.open_content(&reference), process.files.open_any(&reference));
        let open = || as_identified().or_else(|_has_changed| any_copy());
        let source = Source::Waiting(Box::new(open));
        self.content_transfers.add(ContentTransfer { tid, to, reference, offset: 0, source });
    }

    /// Sends as much of the requested file contents as the links will take.
    pub(crate) fn continue_content_transfers(&mut self) {
        let mut content_transfers = std::mem::take(&mut self.content_transfers);
        content_transfers.start_readers(|| {
            let waker = self.waker.clone();
            ContentReader::start(move || waker.wake())
        });
        content_transfers.0.retain_mut(|transfer| self.continue_content_transfer(transfer));
        self.content_transfers = content_transfers;
    }

    /// Sends what has been read and the link will take. Returns whether there is more to send.
    fn continue_content_transfer(&mut self, transfer: &mut ContentTransfer) -> bool {
        let ContentTransfer { tid, to, .. } = *transfer;
        // The transfer ends with its thread: threads may follow each other without a limit. If the
        // link breaks, the guest asks again on the next link.
        while self.process_of_thread(tid).is_some()
            && let Some(unsent) = self.peers.link(to).map(Link::unsent)
        {
            let Source::Read(reader) = &mut transfer.source else { return true };
            if unsent > MAX_UNSENT_BYTES {
                return true;
            }
            let piece = match reader.next_piece() {
                Ok(Some(piece)) => piece,
                Ok(None) => return true,
                Err(error) => {
                    tracing::warn!(%tid, %error, "a mapped file cannot be read any more");
                    let failure = Message::NoContent(transfer.reference.hash);
                    let _lost_link = self.peers.get_mut(to).map(|peer| peer.send(tid, &failure, &[]));
                    return false;
                }
            };
            // The content may reveal a change that follows a change to a directory.
            self.send_name_changes();
            let content = Message::Content { hash: transfer.reference.hash, offset: transfer.offset };
            transfer.offset += piece.len() as u64;
            let sent = self.peers.get_mut(to).map(|peer| peer.send(tid, &content, &piece));
            if !matches!(sent, Some(Ok(()))) || transfer.offset >= transfer.reference.size {
                return false;
            }
        }
        false
    }
}
