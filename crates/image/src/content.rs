//! Files by the hash of their content, and the node's cache of them.
//!
//! A mapped file travels as its BLAKE3 hash; only a node that has no file with that hash asks for the bytes.
//! The cache holds files that everybody at their home may read (knowing a hash must not become a right to
//! read); others are kept for one family only, in memory, and vanish with it. A file written to within the
//! last seconds is treated like one of these: its timestamp could not tell a later change.

use crate::layout::{FileRef, Files};
use crate::process::Unmovable;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tern_ids::ContentHash;
use tern_tracee::procfs::Mapping;

/// A file changed so recently (seconds) is not cached by hash.
const FRESH: i64 = 2;

/// What is read of a process' mapped files at its home.
#[derive(Debug)]
pub struct HomeFiles {
    pid: i32,
    cache_dir: PathBuf,
    known: HashMap<(u64, u64), FileRef>,
}

impl HomeFiles {
    /// For the process at home. Hashes already computed are remembered below `cache_dir`.
    #[must_use]
    pub fn new(pid: i32, cache_dir: &Path) -> Self {
        Self { pid, cache_dir: cache_dir.to_owned(), known: HashMap::new() }
    }

    /// Opens the file behind a mapping of the process, deleted or not.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(&self, m: &Mapping) -> io::Result<File> {
        let direct = File::open(format!("/proc/{}/map_files/{:x}-{:x}", self.pid, m.start, m.end));
        // Without the privilege for map_files: by name.
        direct.or_else(|_refused| self.open_named(&m.name, m.inode))
    }

    /// Opens a file that has been unmapped since it was identified.
    ///
    /// # Errors
    /// If its name does not lead to it any more.
    pub fn open_by_name(&self, file: &FileRef) -> io::Result<File> {
        self.open_named(&file.path, file.inode)
    }

    /// Opens a file of the process' root by name, if that still is the same file.
    fn open_named(&self, name: &[u8], inode: u64) -> io::Result<File> {
        use std::os::unix::ffi::OsStrExt;
        let root = PathBuf::from(format!("/proc/{}/root", self.pid));
        let name = std::ffi::OsStr::from_bytes(name.strip_prefix(b"/").unwrap_or(name));
        let file = File::open(root.join(name))?;
        if file.metadata()?.ino() == inode { Ok(file) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// The file with this content, if it has been identified.
    #[must_use]
    pub fn by_hash(&self, hash: &ContentHash) -> Option<&FileRef> {
        self.known.values().find(|f| f.hash == *hash)
    }

    /// Forgets all: the process has executed another program, and may map changed files.
    pub fn forget(&mut self) {
        self.known.clear();
    }

    fn hash(&self, file: &File, meta: &fs::Metadata, settled: bool) -> io::Result<ContentHash> {
        let stamp = format!(
            "{:x}-{:x}-{:x}-{:x}.{:x}-{:x}.{:x}",
            meta.dev(),
            meta.ino(),
            meta.size(),
            meta.mtime(),
            meta.mtime_nsec(),
            meta.ctime(),
            meta.ctime_nsec()
        );
        let note = self.cache_dir.join("hashes").join(stamp);
        if settled
            && let Ok(bytes) = fs::read(&note)
            && let Ok(hash) = bytes.try_into()
        {
            return Ok(ContentHash(hash));
        }
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; 256 << 10];
        let mut at = 0;
        loop {
            let n = file.read_at(&mut buffer, at)?;
            if n == 0 {
                break;
            }
            hasher.update(&buffer[..n]);
            at += n as u64;
        }
        let hash = ContentHash(*hasher.finalize().as_bytes());
        if settled {
            // Only to save time later; a cache that cannot be written to is no error.
            let _unwritable =
                fs::create_dir_all(self.cache_dir.join("hashes")).and_then(|()| fs::write(note, hash.0));
        }
        Ok(hash)
    }
}

impl Files for HomeFiles {
    fn identify(&mut self, m: &Mapping) -> Result<FileRef, Unmovable> {
        if let Some(known) = self.known.get(&(m.device, m.inode)) {
            return Ok(known.clone());
        }
        let unreadable =
            |_e: io::Error| Unmovable::UnreadableFile(String::from_utf8_lossy(&m.name).into_owned());
        let file = self.open(m).map_err(unreadable)?;
        let meta = file.metadata().map_err(unreadable)?;
        if !meta.is_file() {
            return Err(Unmovable::SpecialMapping(String::from_utf8_lossy(&m.name).into_owned()));
        }
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let settled = now.cast_signed() - meta.mtime().max(meta.ctime()) > FRESH;
        let hash = self.hash(&file, &meta, settled).map_err(unreadable)?;
        let shareable = settled && meta.permissions().mode() & 0o004 != 0;
        let path = m.name.clone();
        let file = FileRef { device: m.device, inode: m.inode, path, size: meta.size(), hash, shareable };
        self.known.insert((m.device, m.inode), file.clone());
        Ok(file)
    }
}

/// The content of mapped files on a node where the process is a guest.
#[derive(Debug)]
pub struct Cache {
    dir: PathBuf,
    /// By hash: the open file, and its device and inode as maps shows them once it is mapped.
    open: HashMap<ContentHash, OwnedFd>,
    arriving: HashMap<ContentHash, Arriving>,
}

#[derive(Debug)]
struct Arriving {
    file: File,
    /// Its final place; none for content that is kept in memory.
    place: Option<(PathBuf, PathBuf)>,
    hasher: blake3::Hasher,
    at: u64,
    size: u64,
}

impl Cache {
    /// The cache below `dir`, which is made when something is put there.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.join("content"), open: HashMap::new(), arriving: HashMap::new() }
    }

    /// Whether the content is here; opens it.
    pub fn has(&mut self, file: &FileRef) -> bool {
        if self.open.contains_key(&file.hash) {
            return true;
        }
        // What a family may not share it must not find here either.
        if !file.shareable {
            return false;
        }
        let Ok(found) = File::open(self.dir.join(file.hash.to_string())) else { return false };
        if !found.metadata().is_ok_and(|m| m.len() == file.size) {
            return false;
        }
        self.open.insert(file.hash, found.into());
        true
    }

    /// The content, opened read-only.
    #[must_use]
    pub fn get(&self, hash: &ContentHash) -> Option<BorrowedFd<'_>> {
        self.open.get(hash).map(AsFd::as_fd)
    }

    /// Takes the next piece of a file's content; true when it is complete and its hash right.
    ///
    /// # Errors
    /// If the piece is not the next, the content is not what its hash says, or there is no room. Nothing of
    /// it is kept then.
    pub fn put(&mut self, file: &FileRef, offset: u64, piece: &[u8]) -> io::Result<bool> {
        let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let mut arriving = match self.arriving.remove(&file.hash) {
            Some(arriving) => arriving,
            None => Arriving::begin(&self.dir, file)?,
        };
        if offset != arriving.at || piece.len() as u64 > arriving.size - arriving.at {
            arriving.discard();
            return Err(bad("file content out of order"));
        }
        arriving.file.write_all(piece).inspect_err(|_e| arriving.discard())?;
        arriving.hasher.update(piece);
        arriving.at += piece.len() as u64;
        if arriving.at < arriving.size {
            self.arriving.insert(file.hash, arriving);
            return Ok(false);
        }
        if arriving.hasher.finalize().as_bytes() != &file.hash.0 {
            arriving.discard();
            return Err(bad("file content does not have its hash"));
        }
        self.open.insert(file.hash, arriving.settle()?);
        Ok(true)
    }
}

impl Arriving {
    fn begin(dir: &Path, file: &FileRef) -> io::Result<Self> {
        let (hasher, at, size) = (blake3::Hasher::new(), 0, file.size);
        if !file.shareable {
            let flags = rustix::fs::MemfdFlags::CLOEXEC;
            let memory = File::from(rustix::fs::memfd_create("tern-content", flags)?);
            return Ok(Self { file: memory, place: None, hasher, at, size });
        }
        fs::create_dir_all(dir)?;
        // Two families may fetch the same content at once: each has its own temporary name.
        let temporary = dir.join(format!(".{}.{}", file.hash, std::process::id()));
        let place = Some((temporary.clone(), dir.join(file.hash.to_string())));
        let _stale = fs::remove_file(&temporary);
        let file = File::options().write(true).read(true).create_new(true).mode(0o444).open(&temporary)?;
        Ok(Self { file, place, hasher, at, size })
    }

    /// Puts it in its place and opens it read-only, so that no guest can be given a writable descriptor.
    fn settle(self) -> io::Result<OwnedFd> {
        use std::os::fd::AsRawFd;
        if let Some((temporary, place)) = &self.place {
            fs::rename(temporary, place)?;
            return Ok(File::open(place)?.into());
        }
        Ok(File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))?.into())
    }

    fn discard(&self) {
        if let Some((temporary, _)) = &self.place {
            let _gone = fs::remove_file(temporary);
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.arriving.values().for_each(Arriving::discard);
    }
}

/// Reads a file piece by piece to send it.
///
/// # Errors
/// Those of the file; `InvalidData` if it is shorter than it was.
pub fn read_piece(file: &File, offset: u64, most: usize, size: u64) -> io::Result<Vec<u8>> {
    let want = usize::try_from(size - offset).unwrap_or(usize::MAX).min(most);
    let mut piece = Vec::with_capacity(want);
    let mut reader = At { file, offset };
    (&mut reader).take(want as u64).read_to_end(&mut piece)?;
    if piece.len() < want {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a mapped file has become shorter"));
    }
    Ok(piece)
}

struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(buffer, self.offset)?;
        self.offset += n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(content: &[u8]) -> FileRef {
        let hash = ContentHash(*blake3::hash(content).as_bytes());
        FileRef { device: 1, inode: 1, path: Vec::new(), size: content.len() as u64, hash, shareable: true }
    }

    fn directory(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("tern-content-{name}-{}", std::process::id()));
        let _old = fs::remove_dir_all(&dir);
        dir
    }

    #[test]
    fn content_arrives_in_pieces() {
        let dir = directory("pieces");
        let file = reference(b"hello world");
        let mut cache = Cache::new(&dir);
        assert!(!cache.has(&file));
        assert!(!cache.put(&file, 0, b"hello ").unwrap());
        assert!(cache.put(&file, 6, b"world").unwrap());
        assert!(Cache::new(&dir).has(&file), "another family finds it");
        let private = FileRef { shareable: false, ..file };
        assert!(!Cache::new(&dir).has(&private), "but not one that may not share");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn false_content_is_refused() {
        let dir = directory("false");
        let file = reference(b"hello world");
        let mut cache = Cache::new(&dir);
        assert!(cache.put(&file, 0, b"hello_world").is_err());
        assert!(cache.put(&file, 3, b"lo").is_err());
        assert!(cache.put(&file, 0, b"hello world and more").is_err());
        assert!(!cache.has(&file));
        assert_eq!(fs::read_dir(dir.join("content")).unwrap().count(), 0, "nothing is left");
        fs::remove_dir_all(dir).unwrap();
    }
}
