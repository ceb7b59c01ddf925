//! Files by the hash of their content, and the node's cache of them.
//!
//! A mapped file travels as its BLAKE3 hash; only a node that has no file with that hash asks for the bytes.
//! The cache holds files that everybody at their home may read (knowing a hash must not become a right to
//! read); others are kept for one family only, in memory, and vanish with it. A file written to within the
//! last seconds is treated like one of these: its timestamp could not tell a later change.
//!
//! A file of the node where the guest is (home sees it through MFS) is not read at all: the node opens it itself, and the guest maps that. It goes by a
//! hash of what changes whenever its content does; who takes its content under that from another node cannot check it, and keeps it for the family.

use crate::layout::{FileRef, Files, is_shared_memory};
use crate::object::{self, ObjectId, Objects};
use crate::place::{FUSE, Place, Trees};
use crate::process::Unmovable;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tern_ids::{ContentHash, HomePid, NodeId};
use tern_tracee::procfs::Mapping;

/// A file changed so recently (seconds) is not cached by hash.
const FRESH: i64 = 2;

/// Of files up to this size that are being written a copy is sent: they may be something else by then.
const MOST_COPIED: u64 = 64 << 20;

/// A file of the guest's node is mapped there from this size on: less is sent as fast.
const WORTH_OPENING: u64 = 64 << 10;

/// What is read of a process' mapped files at its home.
#[derive(Debug, Default)]
pub struct HomeFiles {
    pid: i32,
    cache_dir: PathBuf,
    /// By device and inode.
    known: HashMap<(u64, u64), Known>,
    /// The memory that it shares with those that move with it.
    pub objects: HashSet<ObjectId>,
    /// Where its guest is, or is to be.
    guest: Option<NodeId>,
    trees: Trees,
}

/// A file that has been identified.
#[derive(Debug)]
struct Known {
    file: FileRef,
    /// By which it is known whether it is the same still; of one that was written to just then that is not known.
    stamp: Option<String>,
    /// The content of such a one, which may be written to again.
    copy: Option<File>,
}

impl HomeFiles {
    /// For the process at home. Hashes already computed are remembered below `cache_dir`.
    #[must_use]
    pub fn new(pid: i32, cache_dir: &Path) -> Self {
        Self { pid, cache_dir: cache_dir.to_owned(), known: HashMap::new(), ..Self::default() }
    }

    /// From now on its guest is on this node, or on its way there.
    pub fn for_guest(&mut self, node: NodeId) {
        if self.guest.replace(node) != Some(node) {
            self.known.retain(|_, known| known.file.place.is_none());
        }
    }

    /// For a child, which shares what its parent shares and is where that is.
    #[must_use]
    pub fn of_child(&self, pid: i32) -> Self {
        let objects = self.objects.clone();
        Self { objects, guest: self.guest, ..Self::new(pid, &self.cache_dir) }
    }

    /// From now on looks at it through this thread of it.
    pub fn look_through(&mut self, thread: i32) {
        self.pid = thread;
    }

    /// Opens the file behind a mapping of the process, deleted or not.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(&self, m: &Mapping) -> io::Result<File> {
        let direct = File::open(format!("/proc/{}/map_files/{:x}-{:x}", self.pid, m.start, m.end));
        direct.or_else(|refused| match refused.kind() {
            // Without the privilege for map_files: by name.
            io::ErrorKind::PermissionDenied => self.open_named(&m.name, m.inode),
            _ => Err(refused),
        })
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
        of_inode(self.open_place(name, OFlags::RDONLY)?, inode)
    }

    /// The files with this content that have been identified.
    pub fn by_hash(&self, hash: ContentHash) -> impl Iterator<Item = &FileRef> {
        self.known.values().map(|known| &known.file).filter(move |file| file.hash == hash)
    }

    /// Opens what has this file's content, as it was when it was identified.
    ///
    /// # Errors
    /// If there is none any more.
    pub fn content(&self, file: &FileRef, maps: &[Mapping]) -> io::Result<File> {
        let copy =
            self.known.values().filter(|known| known.file.hash == file.hash).find_map(|k| k.copy.as_ref());
        copy.map_or_else(|| self.open_like(file, maps), File::try_clone)
    }

    /// Opens a file, or another with the same content: of those a node of its guest cannot tell one from the other, nor
    /// can its program. `maps` is what the process maps now.
    ///
    /// # Errors
    /// If there is none any more.
    pub fn open_like(&self, file: &FileRef, maps: &[Mapping]) -> io::Result<File> {
        let one = |file: &FileRef| {
            let is_it = |m: &&Mapping| (m.device, m.inode) == (file.device, file.inode);
            maps.iter().find(is_it).map_or_else(|| self.open_by_name(file), |m| self.open(m))
        };
        one(file).or_else(|error| self.by_hash(file.hash).find_map(|file| one(file).ok()).ok_or(error))
    }

    /// The process has mapped a file just now: what is known of that from before may not be true any more.
    pub fn mapped(&mut self, m: &Mapping) {
        let stamp = self.open(m).and_then(|file| Ok(stamp(&file.metadata()?))).ok();
        let known = self.known.get(&(m.device, m.inode)).and_then(|known| known.stamp.clone());
        if stamp.is_none() || known != stamp {
            self.known.remove(&(m.device, m.inode));
        }
    }

    /// Forgets all: the process has executed another program, and may map changed files.
    pub fn forget(&mut self) {
        self.known.clear();
        self.objects.clear();
    }

    /// From now on it is known to share these with those that move with it.
    pub fn share(&mut self, objects: &HashSet<ObjectId>) {
        self.objects.clone_from(objects);
        self.measure_again();
    }

    /// What it shares may have another size by now.
    pub fn measure_again(&mut self) {
        self.known.retain(|_, known| !known.file.live);
    }

    /// Opens what is behind a mapping of shared memory.
    ///
    /// # Errors
    /// If it cannot be opened: that needs CAP_CHECKPOINT_RESTORE, where its name does not lead to it.
    pub fn open_object(&self, m: &Mapping) -> io::Result<File> {
        let mut how = File::options();
        how.read(true).write(true);
        let direct = how.open(format!("/proc/{}/map_files/{:x}-{:x}", self.pid, m.start, m.end));
        let opened = direct.or_else(|refused| match refused.kind() {
            // What anybody has put in its place by now root could write all the same.
            io::ErrorKind::PermissionDenied if !rustix::process::geteuid().is_root() => {
                self.open_place(&m.name, OFlags::RDWR)
            }
            _ => Err(refused),
        });
        opened.and_then(|file| of_inode(file, m.inode))
    }

    /// Opens what bears this name in the process' root. The kernel has told the name without symbolic links: whoever has
    /// put one there since wants us to open something else.
    fn open_place(&self, name: &[u8], how: OFlags) -> io::Result<File> {
        let root = File::open(format!("/proc/{}/root", self.pid))?;
        let how = how | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        Ok(rustix::fs::openat2(root, name, how, Mode::empty(), resolve)?.into())
    }

    /// Where a file is that is the guest's node's own.
    fn place(&mut self, m: &Mapping, file: &File, meta: &fs::Metadata) -> Option<Place> {
        if meta.size() < WORTH_OPENING || self.guest.is_none() {
            return None;
        }
        if !self.trees.has(meta.dev()) {
            let kind = rustix::fs::fstatfs(file).ok()?.f_type as u32;
            if kind != FUSE || !self.trees.find(self.pid, meta.dev()) {
                return None;
            }
        }
        let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let place = self.trees.place(
            self.pid,
            (&link, OsStr::from_bytes(&m.name).as_ref()),
            (meta.dev(), meta.ino()),
        );
        place.filter(|place| Some(place.node) == self.guest)
    }

    fn hash(&self, file: &File, meta: &fs::Metadata, settled: bool) -> io::Result<ContentHash> {
        let note = self.cache_dir.join("hashes").join(stamp(meta));
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

fn of_inode(file: File, inode: u64) -> io::Result<File> {
    if file.metadata()?.ino() == inode { Ok(file) } else { Err(io::ErrorKind::NotFound.into()) }
}

/// Copies a file into memory.
fn copy(file: &File) -> io::Result<File> {
    let mut copy = File::from(rustix::fs::memfd_create("tern-copy", rustix::fs::MemfdFlags::CLOEXEC)?);
    io::copy(&mut At { file, offset: 0 }.take(MOST_COPIED), &mut copy)?;
    Ok(copy)
}

/// What changes whenever a file's content does, but within a timestamp's granularity.
fn stamp(meta: &fs::Metadata) -> String {
    format!(
        "{:x}-{:x}-{:x}-{:x}.{:x}-{:x}.{:x}",
        meta.dev(),
        meta.ino(),
        meta.size(),
        meta.mtime(),
        meta.mtime_nsec(),
        meta.ctime(),
        meta.ctime_nsec()
    )
}

/// By what a file of this node goes that nobody has read; one without a stamp is another one each time.
fn version(node: NodeId, stamp: Option<&str>) -> ContentHash {
    let mut hasher = blake3::Hasher::new_derive_key("tern 2026-11-26 a version of a file");
    let once = || format!("{:?}", std::time::Instant::now());
    hasher.update(&node.0.to_le_bytes()).update(stamp.map_or_else(once, str::to_owned).as_bytes());
    ContentHash(*hasher.finalize().as_bytes())
}

/// The number of /dev/zero: 1, 5.
const DEV_ZERO: u64 = 1 << 8 | 5;

impl Files for HomeFiles {
    /// Whether those who share it move together is seen to when they stand.
    fn is_live(&self, m: &Mapping) -> bool {
        is_shared_memory(m) || m.shared && self.objects.contains(&object::id(m))
    }

    fn identify(&mut self, m: &Mapping) -> Result<Option<FileRef>, Unmovable> {
        let live = self.is_live(m);
        if let Some(known) = self.known.get(&(m.device, m.inode))
            && (known.file.live || !live)
        {
            return Ok(Some(known.file.clone()));
        }
        let unreadable =
            |_e: io::Error| Unmovable::UnreadableFile(String::from_utf8_lossy(&m.name).into_owned());
        let file = if live { self.open_object(m) } else { self.open(m) }.map_err(unreadable)?;
        let meta = file.metadata().map_err(unreadable)?;
        if live {
            let (path, hash) = (m.name.clone(), ContentHash([0; 32]));
            let (device, inode) = object::id(m);
            let file =
                FileRef { device, inode, path, size: meta.size(), hash, shareable: false, live, place: None };
            self.known.insert((device, inode), Known { file: file.clone(), stamp: None, copy: None });
            return Ok(Some(file));
        }
        if meta.file_type().is_char_device() && meta.rdev() == DEV_ZERO {
            return Ok(None);
        }
        if !meta.is_file() {
            return Err(Unmovable::SpecialMapping(String::from_utf8_lossy(&m.name).into_owned()));
        }
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let settled = now.cast_signed() - meta.mtime().max(meta.ctime()) > FRESH;
        let stamped = settled.then(|| stamp(&meta));
        if let Some(place) = self.place(m, &file, &meta) {
            let (path, hash) = (m.name.clone(), version(place.node, stamped.as_deref()));
            let (device, inode, place) = (m.device, m.inode, Some(Box::new(place)));
            let file =
                FileRef { device, inode, path, size: meta.size(), hash, shareable: false, live, place };
            let known = Known { file: file.clone(), stamp: stamped, copy: None };
            self.known.insert((device, inode), known);
            return Ok(Some(file));
        }
        let copied = !settled && meta.size() <= MOST_COPIED;
        let copy = if copied { Some(copy(&file).map_err(unreadable)?) } else { None };
        let size = copy.as_ref().map_or(Ok(meta.size()), |copy| copy.metadata().map(|m| m.size()));
        let size = size.map_err(unreadable)?;
        let hash = self.hash(copy.as_ref().unwrap_or(&file), &meta, settled).map_err(unreadable)?;
        let shareable = settled && meta.permissions().mode() & 0o004 != 0;
        let path = m.name.clone();
        let file =
            FileRef { device: m.device, inode: m.inode, path, size, hash, shareable, live, place: None };
        self.known.insert((m.device, m.inode), Known { file: file.clone(), stamp: stamped, copy });
        Ok(Some(file))
    }
}

/// How a node opens a file of its own for a guest; with what is to be kept as long as that has it.
pub type Open = Box<dyn Fn(&Place) -> io::Result<(OwnedFd, UnixStream)>>;

/// So many files of the node's own are known to its server as open for the guests of one family.
const MOST_SERVED: usize = 64;

/// The content of mapped files on a node where the process is a guest.
pub struct Cache {
    dir: PathBuf,
    own: Option<Open>,
    served: VecDeque<UnixStream>,
    /// By hash: the open file, and its device and inode as maps shows them once it is mapped.
    open: HashMap<ContentHash, OwnedFd>,
    /// By hash, and for whom it comes: two may have asked at the same time.
    arriving: HashMap<(ContentHash, HomePid), Arriving>,
    /// The memory that the family's guests share here.
    pub objects: Objects,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("dir", &self.dir).field("open", &self.open).finish_non_exhaustive()
    }
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
        let (open, arriving, objects, served) = Default::default();
        Self { dir: dir.join("content"), own: None, served, open, arriving, objects }
    }

    /// One that opens files of its node's own in this way.
    #[must_use]
    pub fn with_own(mut self, open: Open) -> Self {
        self.own = Some(open);
        self
    }

    /// Opens a file of this node's own.
    fn has_own(&mut self, file: &FileRef) -> bool {
        let (Some(open), Some(place)) = (&self.own, &file.place) else { return false };
        match open(place) {
            Ok((own, server)) => {
                // The oldest is mapped all the same; what others have of it is no longer asked back before it is written.
                self.served.truncate(MOST_SERVED - 1);
                self.served.push_front(server);
                self.open.insert(file.hash, own);
                true
            }
            Err(_) => false,
        }
    }

    /// Whether the content is here, or comes by itself; opens it.
    pub fn has(&mut self, file: &FileRef) -> bool {
        if file.live {
            return true;
        }
        if self.open.contains_key(&file.hash) {
            return true;
        }
        // What a family may not share it must not find here either.
        if !file.shareable {
            return self.has_own(file);
        }
        let Ok(found) = File::open(self.dir.join(file.hash.to_string())) else { return false };
        if !found.metadata().is_ok_and(|m| m.len() == file.size) {
            return false;
        }
        self.open.insert(file.hash, found.into());
        true
    }

    /// The content, opened read-only; what is shared, for writing.
    #[must_use]
    pub fn get(&self, file: &FileRef) -> Option<BorrowedFd<'_>> {
        if file.live { self.objects.descriptor(file) } else { self.open.get(&file.hash).map(AsFd::as_fd) }
    }

    /// Takes the next piece of a file's content, sent for this process or thread; true when it is complete and its hash right. The first piece begins anew:
    /// whoever sent what has come so far, or waited for it, is gone.
    ///
    /// # Errors
    /// If the piece is not the next, the content is not what its hash says, or there is no room. Nothing of
    /// it is kept then.
    pub fn put(&mut self, file: &FileRef, to: HomePid, offset: u64, piece: &[u8]) -> io::Result<bool> {
        let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let key = (file.hash, to);
        let begun = self.arriving.remove(&key);
        if let Some(begun) = begun.as_ref().filter(|_| offset == 0) {
            begun.discard();
        }
        let mut arriving = match begun.filter(|_| offset > 0) {
            Some(arriving) => arriving,
            None => Arriving::begin(&self.dir, file, to)?,
        };
        if offset != arriving.at || piece.len() as u64 > arriving.size - arriving.at {
            arriving.discard();
            return Err(bad("file content out of order"));
        }
        arriving.file.write_all(piece).inspect_err(|_e| arriving.discard())?;
        arriving.hasher.update(piece);
        arriving.at += piece.len() as u64;
        if arriving.at < arriving.size {
            self.arriving.insert(key, arriving);
            return Ok(false);
        }
        if file.place.is_none() && arriving.hasher.finalize().as_bytes() != &file.hash.0 {
            arriving.discard();
            return Err(bad("file content does not have its hash"));
        }
        self.open.insert(file.hash, arriving.settle()?);
        Ok(true)
    }
}

impl Arriving {
    fn begin(dir: &Path, file: &FileRef, to: HomePid) -> io::Result<Self> {
        let (hasher, at, size) = (blake3::Hasher::new(), 0, file.size);
        if !file.shareable {
            let flags = rustix::fs::MemfdFlags::CLOEXEC;
            let memory = File::from(rustix::fs::memfd_create("tern-content", flags)?);
            return Ok(Self { file: memory, place: None, hasher, at, size });
        }
        fs::create_dir_all(dir)?;
        // Two families may fetch the same content at once: each has its own temporary name.
        let temporary = dir.join(format!(".{}.{}.{to}", file.hash, std::process::id()));
        let place = Some((temporary.clone(), dir.join(file.hash.to_string())));
        let _stale = fs::remove_file(&temporary);
        let file = File::options().write(true).read(true).create_new(true).mode(0o444).open(&temporary)?;
        Ok(Self { file, place, hasher, at, size })
    }

    /// Puts it in its place and opens it read-only, so that no guest can be given a writable descriptor.
    fn settle(self) -> io::Result<OwnedFd> {
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
        FileRef {
            device: 1,
            inode: 1,
            path: Vec::new(),
            size: content.len() as u64,
            hash,
            shareable: true,
            live: false,
            place: None,
        }
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
        assert!(!cache.put(&file, HomePid(7), 0, b"hello ").unwrap());
        // Another process asks for the same before it is here.
        assert!(!cache.put(&file, HomePid(8), 0, b"hello").unwrap());
        assert!(cache.put(&file, HomePid(7), 6, b"world").unwrap());
        assert!(cache.put(&file, HomePid(8), 5, b" world").unwrap());
        assert!(Cache::new(&dir).has(&file), "another family finds it");
        let private = FileRef { shareable: false, ..file };
        assert!(!Cache::new(&dir).has(&private), "but not one that may not share");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_file_of_the_nodes_own_is_opened_there_or_taken_as_it_comes() {
        let dir = directory("own");
        let place =
            |node| Place { node: NodeId(node), path: b"a".to_vec(), number: 7, who: (0, 0, Vec::new()) };
        let file = |node| FileRef {
            hash: ContentHash([node as u8; 32]),
            shareable: false,
            place: Some(Box::new(place(node))),
            ..reference(b"hello world")
        };
        let open: Open = Box::new(|place| {
            let (ours, _theirs) = UnixStream::pair()?;
            if place.node == NodeId(2) {
                Ok((File::open("/dev/null")?.into(), ours))
            } else {
                Err(io::ErrorKind::NotFound.into())
            }
        });
        let mut cache = Cache::new(&dir).with_own(open);
        assert!(cache.has(&file(2)) && cache.get(&file(2)).is_some());
        assert!(!cache.has(&file(3)));
        assert!(cache.put(&file(3), HomePid(7), 0, b"hello wo.ld").unwrap());
        assert!(cache.has(&file(3)) && !Cache::new(&dir).has(&file(3)), "for this family only");
        assert!(!dir.exists());
    }

    #[test]
    fn false_content_is_refused() {
        let dir = directory("false");
        let file = reference(b"hello world");
        let mut cache = Cache::new(&dir);
        assert!(cache.put(&file, HomePid(7), 0, b"hello_world").is_err());
        assert!(cache.put(&file, HomePid(7), 3, b"lo").is_err());
        assert!(cache.put(&file, HomePid(7), 0, b"hello world and more").is_err());
        assert!(!cache.has(&file));
        assert_eq!(fs::read_dir(dir.join("content")).unwrap().count(), 0, "nothing is left");
        fs::remove_dir_all(dir).unwrap();
    }
}
