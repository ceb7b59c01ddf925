//! Contents of mapped files that guests have requested.

mod sending;

use crate::links::peer::Peer;
use crate::links::peers::PeerId;
use std::fs::File;
use tern_ids::HomePid;
use tern_image::FileRef;
use tern_image::content::read_piece;
use tern_migrate::message::Message;

/// No more of a file's content is queued on a link that has more than this many unsent bytes.
const MAX_UNSENT_BYTES: usize = 512 << 10;
/// Bytes of a file's content in one message.
const PIECE_SIZE: usize = 256 << 10;

/// The content of a file that is being sent to a guest that has mapped it.
#[derive(Debug)]
struct ContentTransfer {
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

/// The contents that are being sent to guests: at most one for each thread, however many a guest's
/// shim requests, since each has a file open.
#[derive(Debug, Default)]
pub(crate) struct ContentTransfers(Vec<ContentTransfer>);

impl ContentTransfers {
    /// Adds a transfer. It replaces an earlier one of the same thread: a thread waits for one file
    /// at a time, so its last request is the one that counts.
    fn add(&mut self, transfer: ContentTransfer) {
        self.0.retain(|earlier| earlier.tid != transfer.tid);
        self.0.push(transfer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::ContentHash;

    /// Number of descriptors of this program's file, which only one test opens.
    fn descriptors(path: &std::path::Path) -> usize {
        let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        all.filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == path)).count()
    }

    /// The guest's shim belongs to another node: it may request contents faster than they are sent.
    #[test]
    fn burst_of_requests_opens_one_file_per_thread() {
        const THREADS: usize = 3;
        let path = std::env::current_exe().unwrap();
        let mut transfers = ContentTransfers::default();
        for request in 0..30_000 {
            let reference = FileRef {
                device: 1,
                inode: request as u64,
                path: b"/lib/x".to_vec(),
                size: 7,
                hash: ContentHash([0; 32]),
                shareable: true,
                is_object: false,
                location: None,
            };
            let (tid, file) = (HomePid((request % THREADS) as i32), File::open(&path).unwrap());
            transfers.add(ContentTransfer { tid, to: PeerId::NONE, file, reference, offset: 0 });
            if request % 1000 == 0 {
                let (open, queued) = (descriptors(&path), transfers.0.len());
                assert!(open <= THREADS && queued <= THREADS, "{open} open, {queued} queued");
            }
        }
        let last: Vec<u64> = transfers.0.iter().map(|transfer| transfer.reference.inode).collect();
        assert_eq!(last, [29_997, 29_998, 29_999], "the last request of each thread counts");
        drop(transfers);
        assert_eq!(descriptors(&path), 0);
    }
}
