//! Reading the files that a process maps, so that neither the process nor others notice.
//!
//! To open a file breaks a lease on it, for which the open waits (45 s), and inotify and fanotify
//! report it. To read a file is reported too. So a file is examined through an `O_PATH`
//! descriptor, which is neither, and its content is read, in this order,
//!
//! 1. from the memory of the process, if one mapping shows the whole file;
//! 2. through a descriptor of the process, duplicated (pidfd_getfd) and mapped by Tern;
//! 3. by opening the file, unless the file has a lease that this would break.

use super::identify::Identifier;
use super::{MAX_COPY_BYTES, PIECE_BYTES};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxFlags, fcntl_getfl, makedev, open, statx};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use tern_tracee::file_mapping::FileMapping;
use tern_tracee::pagemap::Pagemap;
use tern_tracee::pidfd::Pidfd;
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::{Memory, PAGE};

/// The content of a file.
#[derive(Debug)]
pub enum FileContent {
    /// Read by read(2).
    File(File),
    /// The file as a running process shows it, copied. The process may have exchanged the mapping
    /// meanwhile, so only this process may get it as the file.
    ShownByProcess(File),
    /// Read through memory.
    Mapping(FileMapping),
}

impl From<File> for FileContent {
    fn from(file: File) -> Self {
        Self::File(file)
    }
}

impl FileContent {
    pub(super) fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        match self {
            Self::File(file) | Self::ShownByProcess(file) => file.read_at(into, offset),
            Self::Mapping(mapping) => mapping.read_at(into, offset),
        }
    }
}

/// The regular files that a process has open, by device and inode, each with one descriptor.
#[derive(Debug, Default)]
pub(super) struct Descriptors(HashMap<(u64, u64), i32>);

impl Descriptors {
    /// Lists the descriptors of a process.
    pub(super) fn of(pid: i32) -> Self {
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let regular = entries.filter_map(|entry| {
            // Asks no file server: one that does not answer may have other files of the process.
            let (flags, fields) = (AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE | StatxFlags::INO);
            let found = statx(CWD, entry.path(), flags, fields).ok()?;
            let is_file = FileType::from_raw_mode(found.stx_mode.into()) == FileType::RegularFile;
            let key = (makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino);
            Some((key, entry.file_name().to_str()?.parse().ok()?)).filter(|_| is_file)
        });
        Self(regular.collect())
    }

    /// A descriptor of this file.
    pub(super) fn get(&self, meta: &fs::Metadata) -> Option<i32> {
        self.0.get(&(meta.dev(), meta.ino())).copied()
    }
}

impl Identifier {
    /// Opens the file behind a mapping for reading its attributes only (`O_PATH`).
    pub(super) fn look(&self, m: &Mapping) -> io::Result<File> {
        let direct = open(self.map_file((m.start, m.end)), OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        match direct.map_err(io::Error::from) {
            // Without the privilege for map_files, find it by name.
            Err(refused) if refused.kind() == io::ErrorKind::PermissionDenied => {
                self.look_up(&m.name, m.inode)
            }
            other => Ok(other?.into()),
        }
    }

    /// The content of the file behind a mapping. `found` is the file as [`Self::look`] opened it,
    /// and `descriptor` a descriptor of it in the process, if there is one.
    pub(super) fn content(
        &self,
        m: &Mapping,
        found: &File,
        descriptor: Option<i32>,
    ) -> io::Result<FileContent> {
        let meta = found.metadata()?;
        if let Some(copy) = self.copy_from_memory(m, &meta) {
            return Ok(FileContent::ShownByProcess(copy));
        }
        if let Some(file) = descriptor.and_then(|number| self.duplicate(number, &meta))
            && let Ok(mapping) = FileMapping::map(file.as_fd(), meta.size())
        {
            return Ok(FileContent::Mapping(mapping));
        }
        self.open(m).map(FileContent::File)
    }

    /// Duplicates a descriptor of the process, if it is open for reading and refers to this file.
    pub(super) fn duplicate(&self, number: i32, meta: &fs::Metadata) -> Option<File> {
        let file = File::from(Pidfd::open(self.pid).and_then(|pidfd| pidfd.descriptor(number)).ok()?);
        let flags = fcntl_getfl(&file).ok()?;
        let found = file.metadata().ok()?;
        let is_readable = flags & OFlags::ACCMODE != OFlags::WRONLY && !flags.contains(OFlags::PATH);
        (is_readable && (found.dev(), found.ino()) == (meta.dev(), meta.ino())).then_some(file)
    }

    /// Copies a file from the memory of the process into a memfd, if the mapping shows all of it.
    /// A private mapping that is writable is not used: the process may write a page and discard it
    /// again while the page is read.
    fn copy_from_memory(&self, m: &Mapping, meta: &fs::Metadata) -> Option<File> {
        let size = meta.size();
        let shows_file = |m: &Mapping| {
            let is_unwritten = m.shared || m.prot & libc::PROT_WRITE as u32 == 0;
            is_unwritten && m.offset == 0 && m.len() >= size.next_multiple_of(PAGE)
        };
        if size == 0 || size > MAX_COPY_BYTES || !shows_file(m) {
            return None;
        }
        let pages = Pagemap::open(self.pid).ok()?;
        let end = m.start + size.next_multiple_of(PAGE);
        // A private page that was written before the mapping became read-only.
        let has_own_pages = || {
            let mut at = m.start;
            while at < end {
                match pages.content(at, end) {
                    Ok((runs, done)) if runs.is_empty() && done > at => at = done,
                    _ => return true,
                }
            }
            false
        };
        if has_own_pages() {
            return None;
        }
        let memory = Memory::open(self.pid).ok()?;
        let mut copy =
            File::from(rustix::fs::memfd_create("tern-copy", rustix::fs::MemfdFlags::CLOEXEC).ok()?);
        let (mut buffer, mut at) = (vec![0; PIECE_BYTES], 0);
        while at < size {
            let piece = &mut buffer[..(size - at).min(PIECE_BYTES as u64) as usize];
            memory.read(m.start + at, piece).ok()?;
            copy.write_all(piece).ok()?;
            at += piece.len() as u64;
        }
        let now = procfs::mapping_at(self.pid, m.start).ok()??;
        let is_same =
            (now.device, now.inode, now.start, now.shared) == (m.device, m.inode, m.start, m.shared);
        (is_same && shows_file(&now) && !has_own_pages()).then_some(copy)
    }
}

/// Opens a file by this link in /proc, without waiting for the holder of a lease. The access time
/// changes only if the file belongs to another user.
///
/// # Errors
/// `WouldBlock` if there is a lease that this would break.
pub(super) fn open_unleased(link: &str, access: OFlags) -> io::Result<File> {
    if would_break_lease(&fs::metadata(link)?, access) {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let quiet = open(link, flags | OFlags::NOATIME, Mode::empty());
    Ok(quiet.or_else(|_not_ours| open(link, flags, Mode::empty()))?.into())
}

/// Whether there is a lease on this file that would be broken by opening the file.
pub(super) fn would_break_lease(meta: &fs::Metadata, access: OFlags) -> bool {
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    breaks_lease(&locks, (meta.dev(), meta.ino()), access)
}

/// Whether `locks` (/proc/locks) lists a lease on this file that would be broken by opening the
/// file.
fn breaks_lease(locks: &str, (device, inode): (u64, u64), access: OFlags) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    locks.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "LEASE", _, kind, _, of, ..] = fields[..] else { return false };
        of == file && (kind != "READ" || access != OFlags::RDONLY)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_that_an_open_would_break_is_found() {
        let locks = "1: POSIX  ADVISORY  WRITE 71 00:1f:5 0 EOF\n\
                     2: LEASE  ACTIVE    READ  72 00:1f:6 0 EOF\n\
                     3: LEASE  ACTIVE    WRITE 73 00:1f:7 0 EOF\n\
                     4: LEASE  BREAKING  UNLCK 73 00:1f:8 0 EOF\n";
        let breaks = |minor, access| -> Vec<u64> {
            let device = makedev(0, minor);
            (5..10).filter(|inode| breaks_lease(locks, (device, *inode), access)).collect()
        };
        assert_eq!(breaks(31, OFlags::RDONLY), [7, 8]);
        assert_eq!(breaks(31, OFlags::RDWR), [6, 7, 8]);
        assert_eq!(breaks(30, OFlags::RDWR), [0; 0]);
    }
}
