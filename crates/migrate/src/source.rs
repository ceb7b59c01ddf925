//! The sending half: a process' memory, round by round, piece by piece.
//!
//! [`Source`] does not wait: its owner calls [`Source::pump`] whenever the link has room, so that the family's
//! other members are served meanwhile, and the process itself while it still runs.

use crate::journey::Phase;
use crate::message::{Conversation, Message, send};
use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;
use tern_ids::HomePid;
use tern_image::object::{self, ObjectId, Objects, Part};
use tern_image::pages::{self, Finder, Rest};
use tern_image::{FileRef, Layout, ProcessImage, content};
use tern_tracee::pagemap::Run;
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::{Memory, Result};
use tern_wire::Link;

/// Bytes of pages in one message.
const PIECE: u64 = 256 << 10;
/// No more is queued while the link holds this many unsent bytes.
const AHEAD: usize = 512 << 10;
/// A round that would send no more than this is sent while the process stands still.
const SMALL: u64 = 2 << 20;
/// After so many rounds it is frozen whatever is left.
const MOST_ROUNDS: u32 = 5;
/// A round that is not shorter than this part of the one before it (in percent) is sent while the process stands
/// still: it writes as fast as we send, and what is sent before would be sent again.
const SHRINKS: u64 = 75;

#[derive(Debug)]
enum Item {
    File { file: u32, offset: u64 },
    Object { file: u32, object: File, offset: u64, size: u64 },
    Forget(Vec<Run>),
    Fresh(Rest),
    Pages { runs: Vec<Run>, whole: bool },
}

/// A process being sent.
#[derive(Debug)]
pub struct Source {
    pid: HomePid,
    memory: Memory,
    finder: Finder,
    queue: VecDeque<Item>,
    contents: Vec<Option<File>>,
    sizes: Vec<(u64, bool)>,
    /// The content of one piece.
    content: Vec<u8>,
    /// Bytes queued so far.
    pub bytes: u64,
    /// Bytes found by the last look, and by the one before it.
    rounds: [u64; 2],
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The link is full; pump again when it has room.
    Wait,
    /// Everything found so far is on its way.
    Drained,
}

impl Source {
    /// Begins to send the process that `memory` and `finder` look at.
    #[must_use]
    pub fn new(pid: HomePid, memory: Memory, finder: Finder) -> Self {
        let (queue, contents, sizes, content) = Default::default();
        Self { pid, memory, finder, queue, contents, sizes, content, bytes: 0, rounds: [u64::MAX; 2] }
    }

    /// Whether rounds while the process runs are worth it: the first look can be followed by cheap ones.
    #[must_use]
    pub fn can_precopy(&self) -> bool {
        self.finder.tracks()
    }

    /// Queues the content of a file that the receiver wants, of this size; whether it may be shorter by now.
    pub fn want(&mut self, index: u32, file: File, size: (u64, bool)) {
        let at = index as usize;
        if self.contents.len() <= at {
            self.contents.resize_with(at + 1, || None);
            self.sizes.resize(at + 1, (0, false));
        }
        self.contents[at] = Some(file);
        self.sizes[at] = size;
        self.queue.push_back(Item::File { file: index, offset: 0 });
    }

    /// Looks for pages to send, and queues them.
    ///
    /// # Errors
    /// If the process is gone, or the link is closed.
    pub fn look(&mut self, layout: &Layout) -> std::result::Result<(), SendError> {
        let found = self.finder.look(layout)?;
        self.rounds = [found.send.iter().map(|r| r.1).sum(), self.rounds[0]];
        // In its place in the queue: behind the files without which there is no address space yet.
        self.queue.extend(found.forget.chunks(4096).map(|runs| Item::Forget(runs.to_vec())));
        let written = pages::cut(&found.send, PIECE).into_iter();
        self.queue.extend(written.map(|runs| Item::Pages { runs, whole: false }));
        self.queue.extend(found.fresh.into_iter().map(Item::Fresh));
        Ok(())
    }

    /// Whether the last look has found nearly as much as the one before it.
    #[must_use]
    pub fn stagnates(&self) -> bool {
        let [last, before] = self.rounds;
        self.finder.looks() > 1 && last > before / 100 * SHRINKS
    }

    /// Whether it is time to freeze the process, after a drained round.
    #[must_use]
    pub fn should_freeze(&self) -> bool {
        let small = self.rounds[0] <= SMALL;
        !self.can_precopy() || self.finder.looks() >= MOST_ROUNDS || small || self.stagnates()
    }

    /// Sends as much as the link will take now.
    ///
    /// # Errors
    /// If the process is gone, a file is unreadable, or the link is closed.
    pub fn pump(&mut self, link: &mut Link) -> std::result::Result<Next, SendError> {
        while link.unsent() < AHEAD {
            let Some(item) = self.queue.pop_front() else { return Ok(Next::Drained) };
            match item {
                Item::Pages { mut runs, whole } => {
                    // A page that has been unmapped since it was found is found again as forgotten.
                    let bytes = &mut self.content;
                    if pages::read(&self.memory, &runs, bytes).is_err() {
                        self.send_page_by_page(&runs, link)?;
                        continue;
                    }
                    if self.finder.looks() == 1 && !whole {
                        pages::drop_zero(&mut runs, bytes);
                    }
                    self.bytes += bytes.len() as u64;
                    send(link, self.pid, &Message::Pages(runs), bytes)?;
                }
                Item::Fresh(rest) => {
                    let (found, left) = self.finder.content(rest)?;
                    self.rounds[0] += found.iter().map(|r| r.1).sum::<u64>();
                    if let Some(left) = left {
                        self.queue.push_front(Item::Fresh(left));
                    }
                    for runs in pages::cut(&found, PIECE).into_iter().rev() {
                        self.queue.push_front(Item::Pages { runs, whole: rest.whole });
                    }
                }
                Item::Forget(runs) => send(link, self.pid, &Message::Forget(runs), &[])?,
                Item::File { file, offset } => self.send_file(file, offset, link)?,
                Item::Object { file, object, offset, size } => {
                    self.send_object(file, object, (offset, size), link)?;
                }
            }
        }
        Ok(Next::Wait)
    }

    /// Queues the content of shared memory, which nobody writes now.
    fn share(&mut self, files: &[FileRef], shared: Vec<Shared>) {
        for Shared { file, object } in shared {
            if let Some(at) = files.iter().position(|other| *other == file) {
                self.queue.push_back(Item::Object { file: at as u32, object, offset: 0, size: file.size });
            }
        }
    }

    fn send_object(
        &mut self,
        file: u32,
        object: File,
        (offset, size): (u64, u64),
        link: &mut Link,
    ) -> std::result::Result<(), SendError> {
        if offset >= size {
            return Ok(());
        }
        let length = match object::part_at(&object, offset, size).map_err(SendError::File)? {
            Part::Hole(length) => {
                send(link, self.pid, &Message::Hole { file, offset, length }, &[])?;
                length
            }
            Part::Content(length) => {
                let length = length.min(PIECE);
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

    fn send_file(&mut self, index: u32, offset: u64, link: &mut Link) -> std::result::Result<(), SendError> {
        let size = self.sizes[index as usize];
        let Some(file) = self.contents.get(index as usize).and_then(Option::as_ref) else { return Ok(()) };
        let piece = content::read_piece(file, offset, PIECE as usize, size).map_err(SendError::File)?;
        let next = offset + piece.len() as u64;
        self.bytes += piece.len() as u64;
        send(link, self.pid, &Message::File { file: index, offset }, &piece)?;
        if next < size.0 {
            self.queue.push_front(Item::File { file: index, offset: next });
        } else {
            self.contents[index as usize] = None;
        }
        Ok(())
    }
}

/// A piece of memory that a process shares, and that goes with it.
#[derive(Debug)]
pub struct Shared {
    /// Its record in the layout.
    pub file: FileRef,
    /// It.
    pub object: File,
}

impl Shared {
    /// Those of a layout's files that are shared memory and that nobody else has `taken`, each opened; a process `carries`
    /// them from now on, and they are not given to it again.
    ///
    /// # Errors
    /// If one cannot be had: without it the others would go on with memory that is empty.
    pub fn to_carry(
        files: &[FileRef],
        objects: &Objects,
        taken: &HashSet<ObjectId>,
        carries: &mut HashSet<ObjectId>,
    ) -> std::io::Result<Vec<Self>> {
        let mut shared = Vec::new();
        for file in files.iter().filter(|file| file.live) {
            let id = (file.device, file.inode);
            if !taken.contains(&id) && carries.insert(id) {
                let object = objects.get(id).ok_or(std::io::ErrorKind::NotFound)?.try_clone()?;
                shared.push(Self { file: file.clone(), object });
            }
        }
        Ok(shared)
    }
}

/// A process that is to be sent, as its owner holds it.
pub trait Movable {
    /// Its address space now.
    ///
    /// # Errors
    /// With the reason, if it cannot be moved.
    fn describe(&mut self) -> std::result::Result<Layout, SendError>;

    /// The numbers of its threads now, besides the first one, as they see them.
    fn crew(&self) -> Vec<i32>;

    /// The content of a file that it maps.
    ///
    /// # Errors
    /// If it cannot be opened.
    fn content(&mut self, file: &FileRef) -> std::io::Result<File>;

    /// Stops it; false if this is not the moment, and it runs on.
    ///
    /// # Errors
    /// If it is gone.
    fn freeze(&mut self) -> Result<bool>;

    /// The shared memory, of the files of its layout, whose content is to go with this process, stopped, and not with
    /// another one that shares it; nothing if there is none, or the second time. None as long as somebody still runs
    /// who shares memory with it.
    ///
    /// # Errors
    /// Those of [`Shared::to_carry`].
    fn shared(&mut self, files: &[FileRef]) -> std::io::Result<Option<Vec<Shared>>>;

    /// Captures it, stopped, with this address space.
    ///
    /// # Errors
    /// If it is gone.
    fn capture(&mut self, layout: Layout) -> Result<(ProcessImage, Conversation)>;
}

/// A migration from its sender's side, from the first address space to the image.
#[derive(Debug)]
pub struct Sending {
    source: Source,
    layout: Layout,
    /// The mappings as they were just before the layout was described.
    maps: Vec<Mapping>,
    awaits_want: bool,
    /// An address space that the receiver is to build as soon as everything has been queued that belongs to this one.
    next: Option<Layout>,
    /// How often a file of it was gone when its content was wanted.
    vanished: u32,
    /// When it was stopped.
    pub frozen: Option<Instant>,
    sent: bool,
}

impl Sending {
    /// Begins: describes the address space to the receiver, which answers with what it wants. The source is taken if
    /// that succeeds.
    ///
    /// # Errors
    /// If the process cannot be moved, or the link is closed. The process runs on.
    pub fn begin(
        source: &mut Option<Source>,
        process: &mut dyn Movable,
        link: &mut Link,
    ) -> std::result::Result<Option<Self>, SendError> {
        let Some(there) = source else { return Ok(None) };
        let maps = procfs::maps(there.memory.pid())?;
        let mut layout = process.describe()?;
        there.finder.mark(&mut layout);
        send_space(link, there.pid, process, &layout)?;
        let begun = |source| Self {
            source,
            layout,
            maps,
            awaits_want: true,
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

    /// Whether the receiver has been asked something and has not answered.
    #[must_use]
    pub fn awaits_answer(&self) -> bool {
        self.awaits_want
    }

    /// Takes the receiver's answer to an address space.
    ///
    /// # Errors
    /// As [`advance`](Self::advance); also if it wants what there is not.
    pub fn wanted(
        &mut self,
        indices: &[u32],
        process: &mut dyn Movable,
    ) -> std::result::Result<(), SendError> {
        if !std::mem::take(&mut self.awaits_want) {
            return Ok(());
        }
        let mut found = Vec::with_capacity(indices.len());
        for &index in indices {
            let none = || SendError::File(std::io::ErrorKind::NotFound.into());
            let file = self.layout.files.get(index as usize).ok_or_else(none)?;
            match process.content(file) {
                Ok(content) => found.push((index, content, (file.size, file.place.is_some()))),
                // Unmapped since, perhaps, by a process that runs: then it is not in its address space any more.
                Err(_) if self.frozen.is_none() && self.vanished < MOST_ROUNDS => {
                    self.vanished += 1;
                    self.next = Some(process.describe()?);
                    return Ok(());
                }
                Err(error) => return Err(SendError::File(error)),
            }
        }
        for (index, content, size) in found {
            self.source.want(index, content, size);
        }
        if self.frozen.is_some() || self.source.can_precopy() {
            self.look()?;
        }
        Ok(())
    }

    /// Looks at the address space that the receiver has, where nothing is new to it afterwards.
    fn look(&mut self) -> std::result::Result<(), SendError> {
        self.source.look(&self.layout)?;
        self.layout.regions.iter_mut().for_each(|region| region.anew = false);
        Ok(())
    }

    /// Goes on as far as the link has room; true when the image has been queued.
    ///
    /// # Errors
    /// If the process is gone or cannot be moved after all, or the link is closed. If it was frozen, it is still.
    pub fn advance(
        &mut self,
        process: &mut dyn Movable,
        link: &mut Link,
    ) -> std::result::Result<bool, SendError> {
        while !self.awaits_want && !self.sent {
            // But what is queued for the address space that the receiver has goes before it gets another one.
            let at_once = self.frozen.is_none() && self.next.is_none() && self.source.stagnates();
            if !at_once && self.source.pump(link)? == Next::Wait {
                return Ok(false);
            }
            if let Some(mut layout) = self.next.take() {
                self.source.finder.mark(&mut layout);
                send_space(link, self.source.pid, process, &layout)?;
                (self.layout, self.awaits_want) = (layout, true);
            } else if self.frozen.is_some() {
                let shared = process.shared(&self.layout.files).map_err(SendError::File)?;
                let Some(shared) = shared else { return Ok(false) };
                if !shared.is_empty() {
                    self.source.share(&self.layout.files, shared);
                    continue;
                }
                let (image, mut talk) = process.capture(self.layout.clone())?;
                let frozen = self.frozen.map(|f| f.elapsed()).unwrap_or_default();
                talk.frozen_us = frozen.as_micros() as u64;
                talk.wall = crate::wall::now().saturating_sub(frozen.as_nanos() as u64);
                talk.sent = self.source.bytes;
                send(link, self.source.pid, &Message::Image(Box::new(image), talk), &[])?;
                self.sent = true;
            } else {
                if self.source.should_freeze() {
                    crate::fault::point("source", Phase::Freeze);
                    if !process.freeze()? {
                        return Ok(false);
                    }
                    self.frozen = Some(Instant::now());
                }
                // To describe it the kernel walks through all its pages. While it runs, mappings that look the same
                // are taken as the same: what flags they have is looked at when it stands still.
                let maps = procfs::maps(self.source.memory.pid())?;
                let known = self.frozen.is_none() && maps == self.maps;
                self.maps = maps;
                let layout = if known { self.layout.clone() } else { process.describe()? };
                if layout.is_same(&self.layout) {
                    self.look()?;
                } else {
                    // What is queued belongs to the address space that the receiver has.
                    self.next = Some(layout);
                }
            }
        }
        Ok(self.sent)
    }
}

fn send_space(
    link: &mut Link,
    pid: HomePid,
    process: &dyn Movable,
    layout: &Layout,
) -> std::result::Result<(), SendError> {
    send(link, pid, &Message::Crew(process.crew()), &[])?;
    Ok(send(link, pid, &Message::Space(Box::new(layout.clone())), &[])?)
}

/// Why sending stopped.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The process is gone or astray.
    #[error(transparent)]
    Process(#[from] tern_tracee::Error),
    /// The link is closed.
    #[error("the link was cut: {0}")]
    Link(#[from] tern_wire::LinkError),
    /// It has executed another program meanwhile.
    #[error("it executes another program just now; try again")]
    Executed,
    /// Its maps change faster than they can be read.
    #[error("busy: its address space changes all the time; try again")]
    Restless,
    /// It cannot be moved.
    #[error(transparent)]
    Unmovable(#[from] tern_image::Unmovable),
    /// A mapped file could not be read.
    #[error("a mapped file: {0}")]
    File(std::io::Error),
}
