//! Reading of file contents ahead of the link on which they are sent.
//!
//! A file system may delay the opening and reading of a file, so a separate thread does both. It
//! reads the files in the order of the requests, and a few pieces ahead.

use super::At;
use std::fs::File;
use std::io::{self, Read};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::time::{Duration, Instant};
use tern_tracee::threads;

/// Bytes of a file's content in one message.
const PIECE_BYTES: usize = 256 << 10;

/// Number of pieces that are read ahead.
const PIECES_AHEAD: usize = 3;

/// How long the next piece may take to be opened and read.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The stack of the thread, in bytes.
const STACK_SIZE: usize = 128 << 10;

/// Opens a file. May wait for its file system.
pub type OpenContent = Box<dyn FnOnce() -> io::Result<File> + Send>;

/// Reads the contents of files in a thread of its own. The thread ends when this reader is dropped;
/// if the thread is then waiting for a file system, it ends when the file system answers.
#[derive(Debug)]
pub struct ContentReader {
    requests: Sender<Request>,
    pieces: Receiver<io::Result<Vec<u8>>>,
    waits_since: Option<Instant>,
}

struct Request {
    open: OpenContent,
    /// The length, and whether the file may be shorter by now.
    size: (u64, bool),
}

impl ContentReader {
    /// Starts the thread, which calls `wake` whenever a piece is ready.
    ///
    /// # Errors
    /// If there can be no more threads.
    pub fn start(wake: impl Fn() + Send + 'static) -> io::Result<Self> {
        let (requests, queue) = channel();
        let (sender, pieces) = sync_channel(PIECES_AHEAD);
        threads::spawn("content", STACK_SIZE, move || read_files(queue, &sender, &wake))?;
        Ok(Self { requests, pieces, waits_since: None })
    }

    /// Requests the content of one more file. `size` is its length in bytes, and whether the file may
    /// be shorter by now: what is missing is then read as zeroes.
    pub fn request(&self, open: OpenContent, size: (u64, bool)) {
        // A thread that has ended has reported why.
        let _ended = self.requests.send(Request { open, size });
    }

    /// The next piece of the files, in the order of the requests. It is shorter than
    /// 256 KiB only at the end of a file, and empty only if the file is. None if it has not
    /// been read yet.
    ///
    /// # Errors
    /// If the file cannot be opened or read, has become shorter, or takes longer than 10 s to
    /// answer. Later calls return an error too.
    pub fn next_piece(&mut self) -> io::Result<Option<Vec<u8>>> {
        let since = *self.waits_since.get_or_insert_with(Instant::now);
        match self.pieces.try_recv() {
            Ok(piece) => {
                self.waits_since = None;
                piece.map(Some)
            }
            Err(TryRecvError::Empty) if since.elapsed() > READ_TIMEOUT => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "its file system does not answer"))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

fn read_files(queue: Receiver<Request>, pieces: &SyncSender<io::Result<Vec<u8>>>, wake: &dyn Fn()) {
    // The owner has gone if it does not take a piece.
    let send = |piece| {
        let is_taken = pieces.send(piece).is_ok();
        wake();
        is_taken
    };
    for request in queue {
        match read_file(request, &send) {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                send(Err(error));
                return;
            }
        }
    }
}

/// Reads a file until its end, or until `send` returns false. Returns whether it read all of it.
fn read_file(request: Request, send: &dyn Fn(io::Result<Vec<u8>>) -> bool) -> io::Result<bool> {
    let (file, mut offset) = ((request.open)()?, 0);
    loop {
        let piece = read_piece(&file, offset, request.size)?;
        offset += piece.len() as u64;
        if !send(Ok(piece)) {
            return Ok(false);
        }
        if offset >= request.size.0 {
            return Ok(true);
        }
    }
}

/// Reads a piece of a file for sending. A file with a location (`may_shrink`) may have become
/// shorter where it is stored: pages behind its end are then sent as zeroes.
///
/// # Errors
/// Those of the file; `InvalidData` if a file without a location has become shorter.
fn read_piece(file: &File, offset: u64, (size, may_shrink): (u64, bool)) -> io::Result<Vec<u8>> {
    let want = usize::try_from(size - offset).unwrap_or(usize::MAX).min(PIECE_BYTES);
    let mut piece = Vec::with_capacity(want);
    let mut reader = At { file, offset };
    (&mut reader).take(want as u64).read_to_end(&mut piece)?;
    if piece.len() < want && may_shrink {
        piece.resize(want, 0);
    }
    if piece.len() < want {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a mapped file was truncated"));
    }
    Ok(piece)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Waits for the next piece.
    fn next(reader: &mut ContentReader, woken: &Receiver<()>) -> io::Result<Vec<u8>> {
        loop {
            if let Some(piece) = reader.next_piece()? {
                return Ok(piece);
            }
            // After its last piece the thread ends, and drops `wake`. Then `next_piece` fails.
            let _ended = woken.recv();
        }
    }

    fn file(content: &[u8]) -> OpenContent {
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = File::from(memory);
        file.write_all(content).unwrap();
        Box::new(move || Ok(file))
    }

    fn start() -> (ContentReader, Receiver<()>) {
        let (wake, woken) = channel();
        let wake = move || wake.send(()).unwrap_or(());
        (ContentReader::start(wake).unwrap(), woken)
    }

    #[test]
    fn files_are_read_in_order_and_in_pieces() {
        let (mut reader, woken) = start();
        let large = vec![7; 5 * PIECE_BYTES + 1];
        reader.request(file(&large), (large.len() as u64, false));
        reader.request(file(b""), (0, false));
        reader.request(file(b"abc"), (5, true));
        for _ in 0..5 {
            assert_eq!(next(&mut reader, &woken).unwrap(), large[..PIECE_BYTES]);
        }
        assert_eq!(next(&mut reader, &woken).unwrap(), [7]);
        assert_eq!(next(&mut reader, &woken).unwrap(), [0; 0]);
        assert_eq!(next(&mut reader, &woken).unwrap(), *b"abc\0\0", "what it has lost is zero");
        reader.request(file(b"abc"), (5, false));
        let error = next(&mut reader, &woken).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "it has become shorter");
        assert!(next(&mut reader, &woken).is_err(), "and no other file follows");
    }

    #[test]
    fn file_that_does_not_answer_holds_up_nobody() {
        let (mut reader, woken) = start();
        let (answer, answered) = channel::<()>();
        let open = move || {
            let _end = answered.recv();
            Err(io::ErrorKind::NotFound.into())
        };
        reader.request(Box::new(open), (5, false));
        assert!(reader.next_piece().unwrap().is_none());
        reader.waits_since = Instant::now().checked_sub(READ_TIMEOUT * 2);
        assert_eq!(reader.next_piece().unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(reader);
        drop(answer);
        // The thread ends, and drops `wake`.
        while woken.recv().is_ok() {}
    }
}
