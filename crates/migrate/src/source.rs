//! The sending half: reads a process's memory round by round and sends it piece by piece.
//!
//! Nothing here waits. The owner calls [`MemorySender::pump`] whenever the link has room, so that
//! the shim serves the family's other processes, and this process's own calls during pre-copy,
//! meanwhile.

use crate::journey::Phase;
use crate::message::{Message, ProcessSync, send};
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;
use tern_ids::HomePid;
use tern_image::object::{self, Extent, ObjectId, SharedObjects};
use tern_image::pages::{self, NewPart, PageFinder};
use tern_image::{FileRef, Layout, ProcessImage, content};
use tern_tracee::pagemap::{Run, push_run};
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::{Memory, Result};
use tern_wire::Link;

/// Bytes of pages or file content in one message.
const PIECE_BYTES: u64 = 256 << 10;
/// Nothing more is queued while the link holds this many unsent bytes.
const MAX_QUEUED_BYTES: usize = 512 << 10;
/// If the last round found at most this many bytes, the process is frozen.
const FREEZE_BYTES: u64 = 2 << 20;
/// The process is frozen after this many rounds, however much is left.
const MAX_ROUNDS: u32 = 5;
/// A round that found more than this percentage of the one before it ends pre-copy: the process
/// writes as fast as the link sends, so that pages sent now would have to be sent again.
const STAGNATION_PERCENT: u64 = 75;

#[derive(Debug)]
enum Item {
    File { file: u32, offset: u64, size: (u64, bool) },
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
    /// The file whose content is being sent. Files are opened one by one, since a process may map
    /// more files than a shim may have open.
    open_file: Option<File>,
    /// Buffer for one piece.
    content: Vec<u8>,
    /// Bytes queued so far.
    pub bytes: u64,
    /// Bytes found by the last scan, and by the one before it.
    rounds: [u64; 2],
}

/// Opens a file of the layout, given its index.
type OpenFile<'a> = dyn FnMut(u32) -> std::io::Result<File> + 'a;

/// Result of [`MemorySender::pump`].
#[derive(Debug)]
pub(crate) enum PumpStatus {
    /// The link is full. Pump again when it has room.
    Wait,
    /// Everything found so far is queued on the link.
    Drained,
    /// A mapped file cannot be opened. It is still queued.
    Unopened(std::io::Error),
}

impl MemorySender {
    /// A sender for the process that `memory` and `finder` read.
    #[must_use]
    pub fn new(pid: HomePid, memory: Memory, finder: PageFinder) -> Self {
        let (queue, open_file, content) = Default::default();
        Self { pid, memory, finder, queue, open_file, content, bytes: 0, rounds: [u64::MAX; 2] }
    }

    /// Whether pre-copy is worthwhile: written pages can be tracked, so that scans after the first
    /// are cheap.
    #[must_use]
    pub(crate) fn can_precopy(&self) -> bool {
        self.finder.can_track()
    }

    /// Queues a file whose content the receiver needs. `size` is its length, and whether the file
    /// may be shorter by now.
    pub(crate) fn queue_file(&mut self, index: u32, size: (u64, bool)) {
        self.queue.push_back(Item::File { file: index, offset: 0, size });
    }

    /// Scans for pages to send, and queues them.
    ///
    /// # Errors
    /// If the process is gone, or the link is closed.
    pub(crate) fn scan(&mut self, layout: &Layout) -> std::result::Result<(), SendError> {
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
    pub(crate) fn is_stagnating(&self) -> bool {
        let [last, before] = self.rounds;
        self.finder.scan_count() > 1 && last > before / 100 * STAGNATION_PERCENT
    }

    /// Whether to freeze the process, after a drained round.
    #[must_use]
    pub(crate) fn should_freeze(&self) -> bool {
        let small = self.rounds[0] <= FREEZE_BYTES;
        !self.can_precopy() || self.finder.scan_count() >= MAX_ROUNDS || small || self.is_stagnating()
    }

    /// Sends as much as the link accepts now.
    ///
    /// # Errors
    /// If the process is gone, a file is unreadable, or the link is closed.
    pub(crate) fn pump(
        &mut self,
        link: &mut Link,
        open: &mut OpenFile<'_>,
    ) -> std::result::Result<PumpStatus, SendError> {
        while link.unsent() < MAX_QUEUED_BYTES {
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
                Item::File { file, offset, size } => {
                    if offset == 0 {
                        match open(file) {
                            Ok(opened) => self.open_file = Some(opened),
                            Err(error) => {
                                self.queue.push_front(Item::File { file, offset, size });
                                return Ok(PumpStatus::Unopened(error));
                            }
                        }
                    }
                    self.send_file(file, offset, size, link)?;
                }
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

    /// Takes the first item of the queue if it is such a new part.
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
    fn queue_objects(&mut self, files: &[FileRef], shared: Vec<SharedObject>) {
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

    fn send_file(
        &mut self,
        index: u32,
        offset: u64,
        size: (u64, bool),
        link: &mut Link,
    ) -> std::result::Result<(), SendError> {
        let Some(file) = &self.open_file else { return Ok(()) };
        let piece = content::read_piece(file, offset, PIECE_BYTES as usize, size).map_err(SendError::File)?;
        let next = offset + piece.len() as u64;
        self.bytes += piece.len() as u64;
        send(link, self.pid, &Message::File { file: index, offset }, &piece)?;
        if next < size.0 {
            self.queue.push_front(Item::File { file: index, offset: next, size });
        } else {
            self.open_file = None;
        }
        Ok(())
    }
}

/// A shared memory object whose content is sent with this process.
#[derive(Debug)]
pub struct SharedObject {
    /// Its entry in the layout.
    pub file: FileRef,
    /// A descriptor of the object.
    pub object: Arc<File>,
}

impl SharedObject {
    /// Returns the shared memory objects among a layout's files that no other process of the group
    /// has `taken`. Adds them to `carries`, so that they are not returned again.
    ///
    /// # Errors
    /// If `objects` lacks one of them: the processes must not resume with empty memory in its
    /// place.
    pub fn claim(
        files: &[FileRef],
        objects: &SharedObjects,
        taken: &HashSet<ObjectId>,
        carries: &mut HashSet<ObjectId>,
    ) -> std::io::Result<Vec<Self>> {
        let mut shared = Vec::new();
        for file in files.iter().filter(|file| file.is_object) {
            let id = (file.device, file.inode);
            if !taken.contains(&id) && carries.insert(id) {
                let object = Arc::clone(objects.get(id).ok_or(std::io::ErrorKind::NotFound)?);
                shared.push(Self { file: file.clone(), object });
            }
        }
        Ok(shared)
    }
}

/// Access to a process that is being sent, implemented by each shim for its processes.
pub trait MigrationSource {
    /// Its current address space.
    ///
    /// # Errors
    /// If it cannot be moved, with the reason.
    fn describe(&mut self) -> std::result::Result<Layout, SendError>;

    /// Numbers of its current threads except the first, as the process sees them.
    fn thread_ids(&self) -> Vec<i32>;

    /// Opens a file that it maps.
    ///
    /// # Errors
    /// If it cannot be opened.
    fn open_mapped_file(&mut self, file: &FileRef) -> std::io::Result<File>;

    /// Stops it. Returns false if it cannot be stopped now, and runs on.
    ///
    /// # Errors
    /// If it is gone.
    fn freeze(&mut self) -> Result<bool>;

    /// The shared memory objects, among its layout's files, that this stopped process sends.
    /// Another process that shares them does not send them again. Empty if there are none, and
    /// after the first call. `None` while a process that shares memory with it still runs.
    ///
    /// # Errors
    /// Those of [`SharedObject::claim`].
    fn take_objects(&mut self, files: &[FileRef]) -> std::io::Result<Option<Vec<SharedObject>>>;

    /// Captures the stopped process, with this address space.
    ///
    /// # Errors
    /// If it is gone.
    fn capture(&mut self, layout: Layout) -> Result<(ProcessImage, ProcessSync)>;
}

/// The source's side of a migration, from the first address space to the image.
#[derive(Debug)]
pub struct ProcessSender {
    source: MemorySender,
    layout: Layout,
    /// The list of mappings, read just before the layout was described.
    maps: Vec<Mapping>,
    awaits_file_request: bool,
    /// The address space is to be scanned once all queued files are sent; the receiver cannot build
    /// it before.
    scan_pending: bool,
    /// A changed address space, sent to the receiver once everything queued for the current one is
    /// sent.
    next: Option<Layout>,
    /// How often a mapped file was gone when its content was requested.
    vanished: u32,
    /// When the process was frozen.
    pub frozen: Option<Instant>,
    sent: bool,
}

impl ProcessSender {
    /// Starts: sends the address space, to which the receiver answers with
    /// [`Message::RequestFiles`]. Takes the source only on success.
    ///
    /// # Errors
    /// If the process cannot be moved, or the link is closed. The process runs on.
    pub fn begin(
        source: &mut Option<MemorySender>,
        process: &mut dyn MigrationSource,
        link: &mut Link,
    ) -> std::result::Result<Option<Self>, SendError> {
        let Some(ready) = source else { return Ok(None) };
        let maps = procfs::maps(ready.memory.pid())?;
        let mut layout = process.describe()?;
        ready.finder.mark_remapped(&mut layout);
        send_space(link, ready.pid, process, &layout)?;
        let begun = |source| Self {
            source,
            layout,
            maps,
            awaits_file_request: true,
            scan_pending: false,
            next: None,
            frozen: None,
            vanished: 0,
            sent: false,
        };
        Ok(source.take().map(begun))
    }

    /// Bytes of content sent so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.source.bytes
    }

    /// Whether an answer of the receiver is pending.
    #[must_use]
    pub fn awaits_answer(&self) -> bool {
        self.awaits_file_request
    }

    /// Handles the receiver's [`Message::RequestFiles`].
    ///
    /// # Errors
    /// If the receiver requests a file that does not exist.
    pub fn handle_file_request(&mut self, indices: &[u32]) -> std::result::Result<(), SendError> {
        if !std::mem::take(&mut self.awaits_file_request) {
            return Ok(());
        }
        // Each file once, however often the receiver names it.
        let indices: BTreeSet<u32> = indices.iter().copied().collect();
        for index in indices {
            let none = || SendError::File(std::io::ErrorKind::NotFound.into());
            let file = self.layout.files.get(index as usize).ok_or_else(none)?;
            self.source.queue_file(index, (file.size, file.location.is_some()));
        }
        self.scan_pending = self.frozen.is_some() || self.source.can_precopy();
        Ok(())
    }

    /// Scans the address space that the receiver has built. No region of it is new to the receiver
    /// afterwards.
    fn scan(&mut self) -> std::result::Result<(), SendError> {
        self.source.scan(&self.layout)?;
        self.layout.regions.iter_mut().for_each(|region| region.remap = false);
        Ok(())
    }

    /// Reads the list of mappings, and compares it with the last one.
    fn maps_have_changed(&mut self) -> Result<bool> {
        let maps = procfs::maps(self.source.memory.pid())?;
        Ok(std::mem::replace(&mut self.maps, maps) != self.maps)
    }

    /// Continues as far as the link has room. Returns true when the image is queued.
    ///
    /// # Errors
    /// If the process is gone or cannot be moved, or the link is closed. A frozen process stays
    /// frozen.
    pub fn advance(
        &mut self,
        process: &mut dyn MigrationSource,
        link: &mut Link,
    ) -> std::result::Result<bool, SendError> {
        while !self.awaits_file_request && !self.sent {
            // Once the rounds stop shrinking, the process is frozen at once, while pages of the
            // last round are still queued. Otherwise everything that is queued is sent first, in
            // particular before a changed address space.
            let freeze_at_once = self.frozen.is_none()
                && self.next.is_none()
                && !self.scan_pending
                && self.source.is_stagnating();
            let files = &self.layout.files;
            let open = &mut |index: u32| {
                let none = || std::io::Error::from(std::io::ErrorKind::NotFound);
                files.get(index as usize).ok_or_else(none).and_then(|file| process.open_mapped_file(file))
            };
            match if freeze_at_once { PumpStatus::Drained } else { self.source.pump(link, open)? } {
                PumpStatus::Wait => return Ok(false),
                // A process that runs may have unmapped the file meanwhile. Its address space,
                // described again, then no longer has the file. The queue holds nothing but files
                // until all files are sent, so it can be cleared.
                PumpStatus::Unopened(_) if self.frozen.is_none() && self.vanished < MAX_ROUNDS => {
                    self.vanished += 1;
                    self.source.queue.clear();
                    (self.scan_pending, self.next) = (false, Some(process.describe()?));
                }
                PumpStatus::Unopened(error) => return Err(SendError::File(error)),
                PumpStatus::Drained => {}
            }
            if std::mem::take(&mut self.scan_pending) {
                self.scan()?;
            } else if let Some(mut layout) = self.next.take() {
                self.source.finder.mark_remapped(&mut layout);
                send_space(link, self.source.pid, process, &layout)?;
                (self.layout, self.awaits_file_request) = (layout, true);
            } else if self.frozen.is_some() {
                let shared = process.take_objects(&self.layout.files).map_err(SendError::File)?;
                let Some(shared) = shared else { return Ok(false) };
                if !shared.is_empty() {
                    self.source.queue_objects(&self.layout.files, shared);
                    continue;
                }
                let (image, mut sync) = process.capture(self.layout.clone())?;
                let frozen = self.frozen.map(|f| f.elapsed()).unwrap_or_default();
                sync.frozen_us = frozen.as_micros() as u64;
                sync.wall = crate::wall::now().saturating_sub(frozen.as_nanos() as u64);
                sync.sent = self.source.bytes;
                send(link, self.source.pid, &Message::Image(Box::new(image), sync), &[])?;
                self.sent = true;
            } else {
                if self.source.should_freeze() {
                    crate::fault::point("source", Phase::Freeze);
                    if !process.freeze()? {
                        return Ok(false);
                    }
                    self.frozen = Some(Instant::now());
                }
                // To describe the address space, the kernel walks all its pages. While the process
                // runs, an unchanged list of mappings counts as an unchanged layout; flags that the
                // list does not show are read after the freeze.
                let is_unchanged = self.frozen.is_none() && !self.maps_have_changed()?;
                let changed = if is_unchanged { None } else { Some(process.describe()?) };
                // A changed address space is sent later: the queued pages belong to the one that
                // the receiver has.
                self.next = changed.filter(|layout| !layout.is_same(&self.layout));
                if self.next.is_none() {
                    self.scan()?;
                }
            }
        }
        Ok(self.sent)
    }
}

fn send_space(
    link: &mut Link,
    pid: HomePid,
    process: &dyn MigrationSource,
    layout: &Layout,
) -> std::result::Result<(), SendError> {
    send(link, pid, &Message::Threads(process.thread_ids()), &[])?;
    Ok(send(link, pid, &Message::Space(Box::new(layout.clone())), &[])?)
}

/// Why sending failed.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The process is gone, or in an unexpected state.
    #[error(transparent)]
    Process(#[from] tern_tracee::Error),
    /// The link is closed.
    #[error("the link was cut: {0}")]
    Link(#[from] tern_wire::LinkError),
    /// It executed another program meanwhile.
    #[error("it is executing another program; try again")]
    Executed,
    /// Its mappings change faster than they can be read.
    #[error("busy: its address space keeps changing; try again")]
    AddressSpaceBusy,
    /// It cannot be moved.
    #[error(transparent)]
    Unmovable(#[from] tern_image::Unmovable),
    /// A mapped file could not be read.
    #[error("cannot read a mapped file: {0}")]
    File(std::io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::ContentHash;

    /// The receiver is another node: it may name one file very often.
    #[test]
    fn file_is_queued_once_however_often_it_is_requested() {
        let me = std::process::id() as i32;
        let finder = PageFinder::new(me, None, true).unwrap();
        let source = MemorySender::new(HomePid(me), Memory::open(me).unwrap(), finder);
        let file = |inode: u64| FileRef {
            device: 1,
            inode,
            path: b"/lib/x".to_vec(),
            size: 7,
            hash: ContentHash([0; 32]),
            shareable: true,
            is_object: false,
            location: None,
        };
        let mut sender = ProcessSender {
            source,
            layout: Layout { files: vec![file(1), file(2)], ..Layout::default() },
            maps: Vec::new(),
            awaits_file_request: true,
            scan_pending: false,
            next: None,
            vanished: 0,
            frozen: None,
            sent: false,
        };
        sender.handle_file_request(&vec![1; 1_000_000]).unwrap();
        assert_eq!(sender.source.queue.len(), 1);
        // A second request is ignored until a new address space is sent.
        sender.handle_file_request(&[0, 1]).unwrap();
        assert_eq!(sender.source.queue.len(), 1);
        sender.awaits_file_request = true;
        assert!(sender.handle_file_request(&[2]).is_err(), "there is no such file");
    }
}
