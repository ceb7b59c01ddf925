//! Memory that several processes share and write, called an *object*: MAP_SHARED memory without a
//! file, System V and POSIX segments, memfds, and mapped files that are written.
//!
//! At home the object belongs to the kernel, and is identified by device and inode as in
//! /proc/PID/maps. Away it is a memfd of the guest shim, shared by all guests of the family there
//! that map it. It has no content hash: its content is sent, piece by piece and without holes, when
//! all processes that map it are stopped. After that the processes resume together.

use crate::layout::FileRef;
use rustix::fs::{MemfdFlags, SealFlags};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tern_tracee::procfs::Mapping;

/// Maximum size of an object, in bytes: an address space.
const MAX_OBJECT_BYTES: u64 = tern_tracee::TASK_END;
/// Maximum number of objects of a family on a node.
const MAX_OBJECTS: usize = 20_000;

/// Identifies an object: device and inode at home.
pub type ObjectId = (u64, u64);

/// The identifier of the object behind a mapping.
#[must_use]
pub fn id(m: &Mapping) -> ObjectId {
    (m.device, m.inode)
}

/// The open objects of a family. A transfer shares their descriptors and does not duplicate them: a
/// process may map so many objects that two descriptors for each would exceed the shim's limit.
#[derive(Debug, Default)]
pub struct SharedObjects(HashMap<ObjectId, Arc<File>>);

impl SharedObjects {
    /// Adds an object that is open for reading and writing.
    pub fn add(&mut self, id: ObjectId, file: File) {
        self.0.insert(id, Arc::new(file));
    }

    /// Closes the objects for which `is_used` returns false.
    pub fn retain(&mut self, is_used: impl Fn(&ObjectId) -> bool) {
        self.0.retain(|id, _| is_used(id));
    }

    /// Removes an object. When the last reference to it is dropped, the kernel frees its pages, which
    /// takes a tenth of a second for a gibibyte.
    pub fn remove(&mut self, id: ObjectId) -> Option<Arc<File>> {
        self.0.remove(&id)
    }

    /// An open object.
    #[must_use]
    pub fn get(&self, id: ObjectId) -> Option<&Arc<File>> {
        self.0.get(&id)
    }

    /// Creates an empty object for guests, unless one with this identifier exists. An existing
    /// object that is too small is enlarged.
    ///
    /// # Errors
    /// If there are too many objects, if it is too large, or if there is no memory.
    pub fn create(&mut self, file: &FileRef) -> io::Result<()> {
        let id = (file.device, file.inode);
        if let Some(existing) = self.0.get(&id) {
            if existing.metadata()?.len() < file.size && file.size <= MAX_OBJECT_BYTES {
                existing.set_len(file.size)?;
            }
            return Ok(());
        }
        if self.0.len() >= MAX_OBJECTS || file.size > MAX_OBJECT_BYTES {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = File::from(rustix::fs::memfd_create("tern-shared", flags)?);
        memfd.set_len(file.size)?;
        self.0.insert(id, Arc::new(memfd));
        Ok(())
    }

    /// The descriptor of an object, for mapping it.
    #[must_use]
    pub fn fd(&self, file: &FileRef) -> Option<BorrowedFd<'_>> {
        self.0.get(&(file.device, file.inode)).map(|object| object.as_fd())
    }

    /// Writes a piece of an object's content.
    ///
    /// # Errors
    /// If there is no such object, or the piece does not lie within it.
    pub fn write(&self, file: &FileRef, offset: u64, piece: &[u8]) -> io::Result<()> {
        self.object_for_range(file, offset, piece.len() as u64)?.write_all_at(piece, offset)
    }

    /// Zeroes a part of an object, by punching a hole.
    ///
    /// # Errors
    /// Those of [`write`](Self::write), and if the file system does not support holes.
    pub fn punch_hole(&self, file: &FileRef, offset: u64, length: u64) -> io::Result<()> {
        use rustix::fs::FallocateFlags as Flags;
        let object = self.object_for_range(file, offset, length)?;
        Ok(rustix::fs::fallocate(object, Flags::PUNCH_HOLE | Flags::KEEP_SIZE, offset, length)?)
    }

    fn object_for_range(&self, file: &FileRef, offset: u64, length: u64) -> io::Result<&File> {
        let out_of_range =
            || io::Error::new(io::ErrorKind::InvalidInput, "not within a shared memory object");
        let object = self.0.get(&(file.device, file.inode)).filter(|_| file.is_object && length > 0);
        let object = object.ok_or_else(out_of_range)?;
        // The actual size, not the one that the sender states: at home the object may be another
        // user's file, which must not grow.
        let size = object.metadata()?.len();
        if offset.checked_add(length).is_some_and(|end| end <= size) {
            Ok(object)
        } else {
            Err(out_of_range())
        }
    }
}

/// Seals an object created by [`SharedObjects::create`] against writes (fcntl(2), F_SEAL_WRITE),
/// which the kernel refuses while a shared mapping of the object exists. So true means that no
/// process has such a mapping, and that none can write the object, or map it writable, any more.
///
/// The kernel also waits up to 0.2 s for devices that use the object's pages.
#[must_use]
pub fn seal_unmapped(object: &File) -> bool {
    rustix::fs::fcntl_add_seals(object, SealFlags::WRITE).is_ok()
}

/// A part of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// This many bytes of content.
    Content(u64),
    /// This many zero bytes that occupy no memory.
    Hole(u64),
}

/// The part that begins at `offset`, which is below the object's `size`.
///
/// # Errors
/// Those of the kernel.
pub fn extent_at(object: &File, offset: u64, size: u64) -> io::Result<Extent> {
    use rustix::fs::{SeekFrom, seek};
    use rustix::io::Errno;
    let hole_to = match seek(object, SeekFrom::Data(offset)) {
        Ok(data) if data == offset => {
            let end = seek(object, SeekFrom::Hole(offset))?;
            return Ok(Extent::Content(end.min(size).max(offset + 1) - offset));
        }
        Ok(data) => data.min(size),
        Err(Errno::NXIO) => size,
        Err(error) => return Err(error.into()),
    };
    Ok(Extent::Hole(hole_to - offset))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::ContentHash;

    fn object(size: u64) -> FileRef {
        let hash = ContentHash([0; 32]);
        FileRef {
            device: 1,
            inode: 7,
            path: Vec::new(),
            size,
            hash,
            shareable: false,
            is_object: true,
            location: None,
        }
    }

    #[test]
    fn holes_of_an_object_are_found() {
        let file = object(0x10_0000);
        let mut objects = SharedObjects::default();
        objects.create(&file).unwrap();
        objects.write(&file, 0x8000, b"content").unwrap();
        let made = objects.get((1, 7)).unwrap();
        assert_eq!(extent_at(made, 0, file.size).unwrap(), Extent::Hole(0x8000));
        assert_eq!(extent_at(made, 0x8000, file.size).unwrap(), Extent::Content(0x1000));
        assert_eq!(extent_at(made, 0x9000, file.size).unwrap(), Extent::Hole(0xf_7000));
        objects.punch_hole(&file, 0x8000, 0x1000).unwrap();
        assert_eq!(extent_at(objects.get((1, 7)).unwrap(), 0, file.size).unwrap(), Extent::Hole(file.size));
    }

    #[test]
    fn writes_outside_of_an_object_are_refused() {
        let file = object(0x2000);
        let mut objects = SharedObjects::default();
        assert!(objects.write(&file, 0, b"x").is_err(), "not made");
        objects.create(&file).unwrap();
        assert!(objects.write(&file, 0x1fff, b"xy").is_err());
        assert!(objects.write(&file, u64::MAX, b"x").is_err());
        assert!(objects.punch_hole(&file, 0x1000, 0x1001).is_err());
        assert!(objects.write(&FileRef { is_object: false, ..file.clone() }, 0, b"x").is_err());
        assert!(objects.create(&FileRef { inode: 8, size: u64::MAX, ..file }).is_err());
    }
}
