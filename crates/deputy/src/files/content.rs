//! Contents of mapped files that guests have requested.

mod sending;

use crate::links::peers::PeerId;
use tern_ids::HomePid;
use tern_image::FileRef;
use tern_image::content::{ContentReader, OpenContent};

/// No more of a file's content is queued on a link that has more than this many unsent bytes.
const MAX_UNSENT_BYTES: usize = 512 << 10;

/// Maximum number of files that are read at once. The others wait.
const MAX_READERS: usize = 16;

/// The content of a file that is being sent to a guest that has mapped it.
struct ContentTransfer {
    /// The thread that waits for it, and the peer that holds that thread.
    tid: HomePid,
    to: PeerId,
    reference: FileRef,
    offset: u64,
    source: Source,
}

/// Where the content of a transfer comes from.
enum Source {
    /// It waits until fewer files are being read.
    Waiting(OpenContent),
    /// A thread reads it.
    Read(ContentReader),
}

impl std::fmt::Debug for ContentTransfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ContentTransfer({} for {}, at {})", self.reference.hash, self.tid, self.offset)
    }
}

/// The contents that are being sent to guests: at most one for each thread, however many a guest's
/// shim requests.
#[derive(Debug, Default)]
pub(crate) struct ContentTransfers(Vec<ContentTransfer>);

impl ContentTransfers {
    /// Adds a transfer. It replaces an earlier one of the same thread: a thread waits for one file
    /// at a time, so its last request is the one that counts.
    fn add(&mut self, transfer: ContentTransfer) {
        self.0.retain(|earlier| earlier.tid != transfer.tid);
        self.0.push(transfer);
    }

    /// Starts reading for as many transfers as may be read at once, each with `start`.
    fn start_readers(&mut self, start: impl Fn() -> std::io::Result<ContentReader>) {
        let waits = |transfer: &ContentTransfer| matches!(transfer.source, Source::Waiting(_));
        let reading = self.0.iter().filter(|transfer| !waits(transfer)).count();
        let waiting = self.0.iter_mut().filter(|transfer| waits(transfer));
        for transfer in waiting.take(MAX_READERS.saturating_sub(reading)) {
            // If no thread can be started, the transfer waits for the next turn of the main loop.
            let Ok(reader) = start() else { return };
            let FileRef { size, location, .. } = &transfer.reference;
            let size = (*size, location.is_some());
            if let Source::Waiting(open) = std::mem::replace(&mut transfer.source, Source::Read(reader))
                && let Source::Read(reader) = &transfer.source
            {
                reader.request(open, size);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tern_ids::ContentHash;

    /// The guest's shim belongs to another node: it may request contents faster than they are sent.
    #[test]
    fn burst_of_requests_reads_few_files_and_one_per_thread() {
        const THREADS: usize = 3 * MAX_READERS;
        let (mut transfers, opened) = (ContentTransfers::default(), Arc::new(AtomicUsize::new(0)));
        let started = AtomicUsize::new(0);
        let start = || {
            started.fetch_add(1, Ordering::Relaxed);
            ContentReader::start(|| {})
        };
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
            let count = Arc::clone(&opened);
            let open = move || {
                count.fetch_add(1, Ordering::Relaxed);
                Err(std::io::ErrorKind::NotFound.into())
            };
            let source = Source::Waiting(Box::new(open));
            let tid = HomePid((request % THREADS) as i32);
            transfers.add(ContentTransfer { tid, to: PeerId::NONE, reference, offset: 0, source });
            if request % 1000 == 0 {
                // Each closure may hold a descriptor.
                let (held, queued) = (Arc::strong_count(&opened) - 1, transfers.0.len());
                assert!(held <= THREADS && queued <= THREADS, "{held} held, {queued} queued");
            }
        }
        let last: Vec<u64> = transfers.0.iter().map(|transfer| transfer.reference.inode).collect();
        let expected: Vec<u64> = (30_000 - THREADS as u64..30_000).collect();
        assert_eq!(last, expected, "the last request of each thread counts");
        transfers.start_readers(start);
        transfers.start_readers(start);
        assert_eq!(started.load(Ordering::Relaxed), MAX_READERS);
        transfers.0.remove(0);
        transfers.start_readers(start);
        assert_eq!(started.load(Ordering::Relaxed), MAX_READERS + 1, "one is done, and the next one begins");
        while opened.load(Ordering::Relaxed) <= MAX_READERS {
            std::thread::yield_now();
        }
        drop(transfers);
        while Arc::strong_count(&opened) > 1 {
            std::thread::yield_now();
        }
    }
}
