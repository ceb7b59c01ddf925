//! The sending half: reads a process's memory round by round and sends it piece by piece.
//!
//! Nothing here waits. The owner calls [`MemorySender::pump`] whenever the link has room, so that
//! the shim serves the family's other processes, and this process's own calls during pre-copy,
//! meanwhile.

mod files;
mod memory;

pub use memory::MemorySender;

use crate::journey::Phase;
use crate::message::{Message, ProcessSync, send};
use memory::{MAX_ROUNDS, PumpStatus};
use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;
use tern_ids::HomePid;
use tern_image::content::{ContentReader, OpenContent};
use tern_image::object::{ObjectId, SharedObjects};
use tern_image::{FileRef, Layout, ProcessImage};
use tern_tracee::Result;
use tern_tracee::procfs::Mapping;
use tern_wire::Link;

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
    /// Its current address space. None while its mapped files are being identified, which another
    /// thread does: the caller comes back later.
    ///
    /// # Errors
    /// If it cannot be moved, with the reason.
    fn describe(&mut self) -> std::result::Result<Option<Layout>, SendError>;

    /// Numbers of its current threads except the first, as the process sees them.
    fn thread_ids(&self) -> Vec<i32>;

    /// Starts a thread that reads the contents of files, and wakes the owner's loop.
    ///
    /// # Errors
    /// If there can be no more threads.
    fn start_reader(&self) -> std::io::Result<ContentReader>;

    /// How the reader opens a file that the process maps: as the file was identified, or,
    /// `any_copy`, any copy of it if that has failed.
    ///
    /// # Errors
    /// If its content is not here any more.
    fn open_content(&self, file: &FileRef, any_copy: bool) -> std::io::Result<OpenContent>;

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
    description: Description,
    /// A changed address space, sent to the receiver once everything queued for the current one is
    /// sent.
    next: Option<Layout>,
    /// How often a mapped file was gone when its content was requested.
    vanished: u32,
    /// When the process was frozen.
    pub frozen: Option<Instant>,
    sent: bool,
}

/// Whether the layout that the receiver has describes the process.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Description {
    /// It does, as far as is known.
    #[default]
    Current,
    /// The process is to be described again. If its layout has changed, the new layout is sent.
    Outdated,
    /// The process is to be described again, and its layout is sent even if it has not changed.
    SendAnyway,
}

impl ProcessSender {
    /// Starts: sends the address space, which the receiver answers with [`Message::RequestFiles`].
    /// Takes `source` only when the address space is sent. Returns none if it must be called again.
    ///
    /// # Errors
    /// If the process cannot be moved, or the link is closed. The process runs on.
    pub fn begin(
        source: &mut Option<MemorySender>,
        process: &mut dyn MigrationSource,
        link: &mut Link,
    ) -> std::result::Result<Option<Self>, SendError> {
        let Some(ready) = source else { return Ok(None) };
        let maps = ready.maps()?;
        let Some(mut layout) = process.describe()? else { return Ok(None) };
        ready.mark_remapped(&mut layout);
        send_space(link, ready.pid(), process, &layout)?;
        let begun = |source| Self {
            source,
            layout,
            maps,
            awaits_file_request: true,
            scan_pending: false,
            description: Description::Current,
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

    /// Whether the process is frozen, and has been described since.
    #[must_use]
    pub fn is_frozen_and_described(&self) -> bool {
        self.frozen.is_some() && self.description == Description::Current
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

    /// Describes the address space again, for which the kernel walks all its pages. If the receiver
    /// has this address space already, scans it. Returns false if its files are still being
    /// identified.
    fn describe_again(&mut self, process: &mut dyn MigrationSource) -> std::result::Result<bool, SendError> {
        let Some(layout) = process.describe()? else { return Ok(false) };
        let always = std::mem::take(&mut self.description) == Description::SendAnyway;
        // A changed address space is sent later: the queued pages belong to the one that the receiver
        // has.
        self.next = Some(layout).filter(|layout| always || !layout.is_same(&self.layout));
        if self.next.is_none() {
            self.scan()?;
        }
        Ok(true)
    }

    /// Reads the list of mappings, and compares it with the last one.
    fn maps_have_changed(&mut self) -> Result<bool> {
        let maps = self.source.maps()?;
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
                && self.description == Description::Current
                && !self.scan_pending
                && self.source.is_stagnating();
            let status = match freeze_at_once {
                true => PumpStatus::Drained,
                false => self.source.pump(link, &self.layout.files, process)?,
            };
            match status {
                PumpStatus::Wait => return Ok(false),
                // A running process may have unmapped the file meanwhile, or the file may have
                // changed. When the address space is described again, it does not contain the file
                // any more, or contains its new hash.
                PumpStatus::Unreadable(_) if self.frozen.is_none() && self.vanished < MAX_ROUNDS => {
                    self.vanished += 1;
                    self.source.drop_files();
                    (self.scan_pending, self.description) = (false, Description::SendAnyway);
                }
                PumpStatus::Unreadable(error) => return Err(SendError::File(error)),
                PumpStatus::Drained => {}
            }
            if std::mem::take(&mut self.scan_pending) {
                self.scan()?;
            } else if self.description != Description::Current {
                if !self.describe_again(process)? {
                    return Ok(false);
                }
            } else if let Some(mut layout) = self.next.take() {
                self.source.mark_remapped(&mut layout);
                send_space(link, self.source.pid(), process, &layout)?;
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
                send(link, self.source.pid(), &Message::Image(Box::new(image), sync), &[])?;
                self.sent = true;
            } else {
                if self.source.should_freeze() {
                    crate::fault::point("source", Phase::Freeze);
                    if !process.freeze()? {
                        return Ok(false);
                    }
                    self.frozen = Some(Instant::now());
                }
                // While the process runs, an unchanged list of mappings counts as an unchanged
                // layout; flags that the list does not show are read after the freeze.
                if self.frozen.is_none() && !self.maps_have_changed()? {
                    self.scan()?;
                } else {
                    self.description = Description::Outdated;
                    if !self.describe_again(process)? {
                        return Ok(false);
                    }
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

impl SendError {
    /// The error that says that the process has ended, if this is one.
    #[must_use]
    pub fn gone(self) -> Option<tern_tracee::Error> {
        match self {
            Self::Process(error) if error.is_gone() => Some(error),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::ContentHash;
    use tern_image::pages::PageFinder;
    use tern_tracee::Memory;

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
            description: Description::Current,
            next: None,
            vanished: 0,
            frozen: None,
            sent: false,
        };
        sender.handle_file_request(&vec![1; 1_000_000]).unwrap();
        assert_eq!(sender.source.queued_files(), 1);
        // A second request is ignored until a new address space is sent.
        sender.handle_file_request(&[0, 1]).unwrap();
        assert_eq!(sender.source.queued_files(), 1);
        sender.awaits_file_request = true;
        assert!(sender.handle_file_request(&[2]).is_err(), "there is no such file");
    }
}
