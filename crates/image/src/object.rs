//! Memory that several processes share and write: an *object*. MAP_SHARED memory without a file, System V and POSIX
//! segments, memfds, and mapped files that are written.
//!
//! At home it is the kernel's, named by device and inode as /proc/PID/maps shows them. Away it is a memfd of the guest
//! shim, one for all of the family's guests there that map it. Its content has no hash: it is sent once everybody stands
//! still who maps it, piece by piece, holes left out, and everybody goes on together.

use crate::layout::FileRef;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use tern_tracee::procfs::Mapping;

/// The most that one object may measure (bytes): an address space.
const MOST_BYTES: u64 = tern_tracee::TASK_END;
/// The most objects that a family may have on a node.
const MOST_OBJECTS: usize = 20_000;

/// What names an object: device and inode at home.
pub type ObjectId = (u64, u64);

/// The name of what a mapping shows.
#[must_use]
pub fn id(m: &Mapping) -> ObjectId {
    (m.device, m.inode)
}

/// Opened objects by their names.
#[derive(Debug, Default)]
pub struct Objects(HashMap<ObjectId, File>);

impl Objects {
    /// Takes an object that has been opened for reading and writing.
    pub fn add(&mut self, id: ObjectId, file: File) {
        self.0.insert(id, file);
    }

    /// Closes those that are of no use any more.
    pub fn keep(&mut self, of_use: impl Fn(&ObjectId) -> bool) {
        self.0.retain(|id, _| of_use(id));
    }

    /// The object, if it has been opened.
    #[must_use]
    pub fn get(&self, id: ObjectId) -> Option<&File> {
        self.0.get(&id)
    }

    /// Makes an object for guests, if there is none of this name, empty.
    ///
    /// # Errors
    /// If there are too many, it is too large, or there is no memory.
    pub fn make(&mut self, file: &FileRef) -> io::Result<()> {
        let id = (file.device, file.inode);
        if let Some(there) = self.0.get(&id) {
            if there.metadata()?.len() < file.size && file.size <= MOST_BYTES {
                there.set_len(file.size)?;
            }
            return Ok(());
        }
        if self.0.len() >= MOST_OBJECTS || file.size > MOST_BYTES {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let made = File::from(rustix::fs::memfd_create("tern-shared", rustix::fs::MemfdFlags::CLOEXEC)?);
        made.set_len(file.size)?;
        self.0.insert(id, made);
        Ok(())
    }

    /// Its descriptor, to map it.
    #[must_use]
    pub fn descriptor(&self, file: &FileRef) -> Option<BorrowedFd<'_>> {
        self.0.get(&(file.device, file.inode)).map(AsFd::as_fd)
    }

    /// Puts a piece of an object's content in its place.
    ///
    /// # Errors
    /// If there is no such object, or the piece does not lie in it.
    pub fn put(&self, file: &FileRef, offset: u64, piece: &[u8]) -> io::Result<()> {
        self.within(file, offset, piece.len() as u64)?.write_all_at(piece, offset)
    }

    /// Makes a part of an object zero.
    ///
    /// # Errors
    /// As [`put`](Self::put); also if the file cannot have holes.
    pub fn clear(&self, file: &FileRef, offset: u64, length: u64) -> io::Result<()> {
        use rustix::fs::FallocateFlags as Flags;
        let object = self.within(file, offset, length)?;
        Ok(rustix::fs::fallocate(object, Flags::PUNCH_HOLE | Flags::KEEP_SIZE, offset, length)?)
    }

    fn within(&self, file: &FileRef, offset: u64, length: u64) -> io::Result<&File> {
        let none = || io::Error::new(io::ErrorKind::InvalidInput, "no part of shared memory");
        let object = self.0.get(&(file.device, file.inode)).filter(|_| file.live && length > 0);
        let object = object.ok_or_else(none)?;
        // Not as the sender says: at home it is somebody's file.
        let size = object.metadata()?.len();
        if offset.checked_add(length).is_some_and(|end| end <= size) { Ok(object) } else { Err(none()) }
    }
}

/// What comes next in an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// So many bytes of content.
    Content(u64),
    /// So many bytes of zero that take no memory.
    Hole(u64),
}

/// What an object of this size holds at an offset below that.
///
/// # Errors
/// Those of the kernel.
pub fn part_at(object: &File, offset: u64, size: u64) -> io::Result<Part> {
    use rustix::fs::{SeekFrom, seek};
    use rustix::io::Errno;
    let hole_to = match seek(object, SeekFrom::Data(offset)) {
        Ok(data) if data == offset => {
            let end = seek(object, SeekFrom::Hole(offset))?;
            return Ok(Part::Content(end.min(size).max(offset + 1) - offset));
        }
        Ok(data) => data.min(size),
        Err(Errno::NXIO) => size,
        Err(error) => return Err(error.into()),
    };
    Ok(Part::Hole(hole_to - offset))
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
            live: true,
            place: None,
        }
    }

    #[test]
    fn an_object_is_sent_without_its_holes() {
        let file = object(0x10_0000);
        let mut objects = Objects::default();
        objects.make(&file).unwrap();
        objects.put(&file, 0x8000, b"content").unwrap();
        let made = objects.get((1, 7)).unwrap();
        assert_eq!(part_at(made, 0, file.size).unwrap(), Part::Hole(0x8000));
        assert_eq!(part_at(made, 0x8000, file.size).unwrap(), Part::Content(0x1000));
        assert_eq!(part_at(made, 0x9000, file.size).unwrap(), Part::Hole(0xf_7000));
        objects.clear(&file, 0x8000, 0x1000).unwrap();
        assert_eq!(part_at(objects.get((1, 7)).unwrap(), 0, file.size).unwrap(), Part::Hole(file.size));
    }

    #[test]
    fn nothing_is_put_outside_of_an_object() {
        let file = object(0x2000);
        let mut objects = Objects::default();
        assert!(objects.put(&file, 0, b"x").is_err(), "not made");
        objects.make(&file).unwrap();
        assert!(objects.put(&file, 0x1fff, b"xy").is_err());
        assert!(objects.put(&file, u64::MAX, b"x").is_err());
        assert!(objects.clear(&file, 0x1000, 0x1001).is_err());
        assert!(objects.put(&FileRef { live: false, ..file.clone() }, 0, b"x").is_err());
        assert!(objects.make(&FileRef { inode: 8, size: u64::MAX, ..file }).is_err());
    }
}
