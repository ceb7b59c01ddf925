//! The memory and the files of a process, sent round by round.

use super::files::{FileQueue, Piece};
use super::{MigrationSource, SendError, SharedObject};
use crate::message::{Message, send};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tern_ids::HomePid;
use tern_image::object::{self, Extent, ObjectId};
use tern_image::pages::{self, NewPart, PageFinder};
use tern_image::{FileRef, Layout};
use tern_tracee::pagemap::{Run, push_run};
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::{Memory, Result};
use tern_wire::Link;

/// Bytes of pages or shared memory in one message.
const PIECE_BYTES: u64 = 256 << 10;
/// Nothing more is queued while the link holds this many unsent bytes.
const MAX_QUEUED_BYTES: usize = 512 << 10;
/// If the last round found at most this many bytes, the process is frozen.
const FREEZE_BYTES: u64 = 2 << 20;
/// The process is frozen after this many rounds, however much is left.
pub(super) const MAX_ROUNDS: u32 = 5;
/// A round that found more than this percentage of the one before it ends pre-copy: the process
/// writes as fast as the link sends, so that pages sent now would have to be sent again.
const STAGNATION_PERCENT: u64 = 75;

#[derive(Debug)]
enum Item {
    Object { file: u32, object: Arc<File>, offset: u64, size: u64 },
    Discard(Vec<Run>),
    NewPart(NewPart),
    Pages { runs: Vec<Run>, send_zeroes: bool },
}

/// Sends the memory and mapped files of one process.
#[derive(Debug)]
pub struct MemorySender {
    pid: HomePid,
    memory: Memory,
    finder: PageFinder,
    queue: VecDeque<Item>,
    /// The files whose content is to be sent before the queue.
    files: FileQueue,
    /// Buffer for one piece.
    content: Vec<u8>,
    /// Bytes queued so far.
    pub bytes: u64,
    /// Bytes found by the last scan, and by the one before it.
    rounds: [u64; 2],
}

/// Result of [`MemorySender::pump`].
#[derive(Debug)]
pub(super) enum PumpStatus {
    /// The link is full, or the next piece of a file is being read. Pump again when the link has
    /// room, and when the reader wakes the loop.
    Wait,
    /// Everything found so far is queued on the link.
    Drained,
    /// A mapped file cannot be opened or read.
    Unreadable(std::io::Error),
}

impl MemorySender {
    /// A sender for the process that `memory` and `finder` read.
    #[must_use]
    pub fn new(pid: HomePid, memory: Memory, finder: PageFinder) -> Self {
        let (queue, files, content) = Default::default();
        Self { pid, memory, finder, queue, files, content, bytes: 0, rounds: [u64::MAX; 2] }
    }

    /// Whether pre-copy is worthwhile: written pages can be tracked, so that scans after the first
    /// are cheap.
    #[must_use]
    pub(super) fn can_precopy(&self) -> bool {
        self.finder.can_track()
    }

    /// The pid of the process at home.
    pub(super) fn pid(&self) -> HomePid {
        self.pid
    }

    /// Its current mappings.
    pub(super) fn maps(&self) -> Result<Vec<Mapping>> {
        procfs::maps(self.memory.pid())
    }

    /// Marks the regions that the receiver must map anew.
    pub(super) fn mark_remapped(&self, layout: &mut Layout) {
        self.finder.mark_remapped(layout);
    }

    /// Sends no more content of the files that are queued.
    pub(super) fn drop_files(&mut self) {
        self.files = FileQueue::default();
    }

    #[cfg(test)]
    pub(super) fn queued_files(&self) -> usize {
        self.files.len()
    }

    /// Queues a file whose content the receiver needs. `size` is its length, and whether the file
    /// may be shorter by now.
    pub(super) fn queue_file(&mut self, index: u32, size: (u64, bool)) {
        self.files.push(index, size);
    }

    /// Scans for pages to send, and queues them.
    ///
    /// # Errors
    /// If the process is gone, or the link is closed.
    pub(super) fn scan(&mut self, layout: &Layout) -> std::result::Result<(), SendError> {
        let found = self.finder.scan(layout)?;
        self.rounds = [found.send.iter().map(|r| r.1).sum(), self.rounds[0]];
        self.queue.extend(found.discard.chunks(4096).map(|runs| Item::Discard(runs.to_vec())));
        let written = pages::cut(&found.send, PIECE_BYTES).into_iter();
        self.queue.extend(written.map(|runs| Item::Pages { runs, send_zeroes: false }));
        self.queue.extend(found.new_parts.into_iter().map(Item::NewPart));
        Ok(())
    }

    /// Whether the last scan found nearly as much as the one before it.
    #[must_use]
    pub(super) fn is_stagnating(&self) -> bool {
        let [last, before] = self.rounds;
        self.finder.scan_count() > 1 && last > before / 100 * STAGNATION_PERCENT
    }

    /// Whether to freeze the process, after a drained round.
    #[must_use]
    pub(super) fn should_freeze(&self) -> bool {
        let small = self.rounds[0] <= FREEZE_BYTES;
        !self.can_precopy() || self.finder.scan_count() >= MAX_ROUNDS || small || self.is_stagnating()
    }

    /// Sends as much as the link accepts now. `layout` are the files of the layout.
    ///
    /// # Errors
    /// If the process is gone, shared memory is unreadable, or the link is closed.
    pub(super) fn pump(
        &mut self,
        link: &mut Link,
        layout: &[FileRef],
        process: &mut dyn MigrationSource,
    ) -> std::result::Result<PumpStatus, SendError> {
        while link.unsent() < MAX_QUEUED_BYTES {
            if !self.files.is_empty() {
                match self.files.next_piece(layout, process) {
                    Ok(Some(piece)) => self.send_piece(&piece, link)?,
                    Ok(None) => return Ok(PumpStatus::Wait),
                    Err(error) => return Ok(PumpStatus::Unreadable(error)),
                }
                continue;
            }
            let Some(item) = self.queue.pop_front() else { return Ok(PumpStatus::Drained) };
            match item {
                Item::Pages { mut runs, send_zeroes } => {
                    // Pages that were unmapped after the scan that found them are reported as
                    // discarded by the next scan.
                    let bytes = &mut self.content;
                    if pages::read(&self.memory, &runs, bytes).is_err() {
                        self.send_page_by_page(&runs, link)?;
                        continue;
                    }
                    if self.finder.scan_count() == 1 && !send_zeroes {
                        pages::drop_zero(&mut runs, bytes);
                    }
                    self.bytes += bytes.len() as u64;
                    send(link, self.pid, &Message::Pages(runs), bytes)?;
                }
                Item::NewPart(part) => self.scan_parts(part)?,
                Item::Discard(runs) => send(link, self.pid, &Message::DiscardPages(runs), &[])?,
                Item::Object { file, object, offset, size } => {
                    self.send_object(file, object, (offset, size), link)?;
                }
            }
        }
        Ok(PumpStatus::Wait)
    }

    /// Scans this new part, and those that follow it in the queue, until there is content for a
    /// message: an address space may have very many small parts. Queues that content at the front.
    fn scan_parts(&mut self, first: NewPart) -> Result<()> {
        let send_zeroes = first.send_zeroes;
        let (mut found, mut bytes) = (Vec::new(), 0);
        let mut next = Some(first);
        while let Some(part) = next.filter(|_| bytes < PIECE_BYTES) {
            let (content, rest) = self.finder.scan_part(part)?;
            bytes += content.iter().map(|run| run.1).sum::<u64>();
            content.into_iter().for_each(|run| push_run(&mut found, run));
            next = rest.or_else(|| self.take_part(send_zeroes));
        }
        self.rounds[0] += bytes;
        if let Some(part) = next {
            self.queue.push_front(Item::NewPart(part));
        }
        for runs in pages::cut(&found, PIECE_BYTES).into_iter().rev() {
            self.queue.push_front(Item::Pages { runs, send_zeroes });
        }
        Ok(())
    }

    /// Takes the first item of the queue if it is a new part with this `send_zeroes`.
    fn take_part(&mut self, send_zeroes: bool) -> Option<NewPart> {
        match self.queue.front() {
            Some(Item::NewPart(part)) if part.send_zeroes == send_zeroes => {
                let part = *part;
                self.queue.pop_front();
                Some(part)
            }
            _ => None,
        }
    }

    /// Queues the content of shared memory. All processes that share it are stopped.
    pub(super) fn queue_objects(&mut self, files: &[FileRef], shared: Vec<SharedObject>) {
        let objects = files.iter().enumerate().filter(|(_, file)| file.is_object);
        let indices: HashMap<ObjectId, u32> =
            objects.map(|(at, file)| ((file.device, file.inode), at as u32)).collect();
        for SharedObject { file, object } in shared {
            if let Some(&at) = indices.get(&(file.device, file.inode)) {
                self.queue.push_back(Item::Object { file: at, object, offset: 0, size: file.size });
            }
        }
    }

    fn send_object(
        &mut self,
        file: u32,
        object: Arc<File>,
        (offset, size): (u64, u64),
        link: &mut Link,
    ) -> std::result::Result<(), SendError> {
        if offset >= size {
            return Ok(());
        }
        let length = match object::extent_at(&object, offset, size).map_err(SendError::File)? {
            Extent::Hole(length) => {
                send(link, self.pid, &Message::Hole { file, offset, length }, &[])?;
                length
            }
            Extent::Content(length) => {
                let length = length.min(PIECE_BYTES);
                self.content.resize(length as usize, 0);
                object.read_exact_at(&mut self.content, offset).map_err(SendError::File)?;
                self.bytes += length;
                send(link, self.pid, &Message::Object { file, offset }, &self.content)?;
                length
            }
        };
        self.queue.push_front(Item::Object { file, object, offset: offset + length, size });
        Ok(())
    }

    fn send_page_by_page(&mut self, runs: &[Run], link: &mut Link) -> std::result::Result<(), SendError> {
        let step = tern_tracee::PAGE;
        for page in runs.iter().flat_map(|&(start, len)| (start..start + len).step_by(step as usize)) {
            if pages::read(&self.memory, &[(page, step)], &mut self.content).is_ok() {
                self.bytes += step;
                send(link, self.pid, &Message::Pages(vec![(page, step)]), &self.content)?;
            }
        }
        Ok(())
    }

    fn send_piece(&mut self, piece: &Piece, link: &mut Link) -> std::result::Result<(), SendError> {
        let Piece { file, offset, content } = piece;
        self.bytes += content.len() as u64;
        Ok(send(link, self.pid, &Message::File { file: *file, offset: *offset }, content)?)
    }
}
