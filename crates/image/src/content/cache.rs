//! The content of mapped files on a guest's node.

use crate::layout::FileRef;
use crate::object::SharedObjects;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tern_ids::{ContentHash, HomePid};

/// A connection that stays open as long as a file is open.
#[derive(Debug)]
pub enum OpenFileConnection {
    /// To the MFS server of the node that stores the file.
    Server(UnixStream),
    /// To the process that shows files of home. When it closes the connection, the file is
    /// unusable.
    Tree(UnixStream),
}

/// A file that was opened where it is, so that its content need not be sent.
#[derive(Debug)]
pub struct OpenedFile {
    /// As in its [`FileRef`].
    pub hash: ContentHash,
    /// Open for reading.
    pub fd: OwnedFd,
    /// Stays open as long as the file is used.
    pub connection: OpenFileConnection,
}

/// Maximum number of files per family that are registered as open with the node's MFS server.
const MAX_SERVED_FILES: usize = 64;

/// The content that is kept in memory, to be compared with the mappings of all guests.
#[derive(Debug)]
pub struct KeptContent {
    /// The cache's number of requests when this list was made.
    requests: u64,
    /// The hash of each file, and the device and inode under which guests map it.
    files: Vec<(ContentHash, (u64, u64))>,
}

impl KeptContent {
    /// Whether no content is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Keeps the files whose device and inode are not in `mapped`.
    pub fn retain_unmapped(&mut self, mapped: &HashSet<(u64, u64)>) {
        self.files.retain(|(_, file)| !mapped.contains(file));
    }
}

/// The content cache for the guests of one family.
pub struct ContentCache {
    dir: PathBuf,
    served: VecDeque<UnixStream>,
    /// Open files, by hash.
    open: HashMap<ContentHash, OwnedFd>,
    /// Device and inode of the open files whose content is only in memory.
    in_memory: HashMap<ContentHash, (u64, u64)>,
    /// Number of requests for files so far.
    requests: u64,
    /// Connections to the processes that show files of home, by the file's hash.
    trees: HashMap<ContentHash, UnixStream>,
    /// Incomplete content, by hash and by the process that requested it: two may request the same
    /// content.
    incoming: HashMap<(ContentHash, HomePid), Incoming>,
    /// The shared memory of the family's guests here.
    pub objects: SharedObjects,
}

impl std::fmt::Debug for ContentCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("dir", &self.dir).field("open", &self.open).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Incoming {
    file: File,
    /// Temporary and final path; none for content that is kept in memory.
    paths: Option<(PathBuf, PathBuf)>,
    hasher: blake3::Hasher,
    at: u64,
    size: u64,
}

impl ContentCache {
    /// A cache in `dir`, which is created when the first file is stored.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        let (open, in_memory, incoming, objects, served, trees) = Default::default();
        let dir = dir.join("content");
        Self { dir, served, open, in_memory, requests: 0, trees, incoming, objects }
    }

    /// Selects the files that can be opened where they are. Leaves out those whose content is here.
    pub fn to_be_opened(&mut self, files: &[FileRef]) -> Vec<FileRef> {
        files.iter().filter(|file| file.location.is_some() && !self.has(file)).cloned().collect()
    }

    /// Adds a file that was opened where it is. Returns the descriptor that it replaces, which may
    /// be closed by a worker only: its file system may be slow.
    #[must_use]
    pub fn add_opened(&mut self, OpenedFile { hash, fd, connection }: OpenedFile) -> Option<OwnedFd> {
        match connection {
            // The connection of the oldest file is closed. The file stays mapped, but the server no
            // longer recalls other nodes' cached data before writes to it.
            OpenFileConnection::Server(server) => {
                self.served.truncate(MAX_SERVED_FILES - 1);
                self.served.push_front(server);
            }
            OpenFileConnection::Tree(tree) => drop(self.trees.insert(hash, tree)),
        }
        self.open.insert(hash, fd)
    }

    /// Whether the file is read page by page from another node.
    #[must_use]
    pub fn is_demand_paged(&self, file: &FileRef) -> bool {
        self.trees.contains_key(&file.hash)
    }

    /// Whether the content is available here. If it is in the cache's directory, opens it.
    pub fn has(&mut self, file: &FileRef) -> bool {
        if file.is_object {
            return true;
        }
        self.requests += 1;
        if self.trees.get(&file.hash).is_some_and(is_closed) {
            self.trees.remove(&file.hash);
            self.open.remove(&file.hash);
        }
        if self.open.contains_key(&file.hash) {
            return true;
        }
        // A file that families may not share must not be taken from the shared cache either.
        if !file.shareable {
            return false;
        }
        let Ok(found) = File::open(self.dir.join(file.hash.to_string())) else { return false };
        if !found.metadata().is_ok_and(|m| m.len() == file.size) {
            return false;
        }
        // ternd removes the least recently used files. Only their owner can note the use.
        let _not_the_owner = found.set_modified(SystemTime::now());
        self.open.insert(file.hash, found.into());
        true
    }

    /// The content, open for reading; a shared memory object, for reading and writing.
    #[must_use]
    pub fn get(&self, file: &FileRef) -> Option<BorrowedFd<'_>> {
        if file.is_object { self.objects.fd(file) } else { self.open.get(&file.hash).map(AsFd::as_fd) }
    }

    /// Adds the next piece of a file's content, requested by this process or thread. Returns true
    /// when the content is complete and verified. A piece at offset 0 begins the content anew: the
    /// earlier sender or requester is gone.
    ///
    /// # Errors
    /// If the piece is out of order, the content does not match its hash, or there is no space. The
    /// content received so far is discarded.
    pub fn put(&mut self, file: &FileRef, to: HomePid, offset: u64, piece: &[u8]) -> io::Result<bool> {
        let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let key = (file.hash, to);
        let begun = self.incoming.remove(&key);
        if let Some(begun) = begun.as_ref().filter(|_| offset == 0) {
            begun.discard();
        }
        let mut incoming = match begun.filter(|_| offset > 0) {
            Some(incoming) => incoming,
            None => Incoming::begin(&self.dir, file, to)?,
        };
        if offset != incoming.at || piece.len() as u64 > incoming.size - incoming.at {
            incoming.discard();
            return Err(bad("file content is out of order"));
        }
        incoming.file.write_all(piece).inspect_err(|_e| incoming.discard())?;
        incoming.hasher.update(piece);
        incoming.at += piece.len() as u64;
        if incoming.at < incoming.size {
            self.incoming.insert(key, incoming);
            return Ok(false);
        }
        if file.location.is_none() && incoming.hasher.finalize().as_bytes() != &file.hash.0 {
            incoming.discard();
            return Err(bad("file content does not match its hash"));
        }
        self.requests += 1;
        let is_in_memory = incoming.paths.is_none();
        let content = File::from(incoming.commit()?);
        self.in_memory.remove(&file.hash);
        if is_in_memory {
            let meta = content.metadata()?;
            self.in_memory.insert(file.hash, (meta.dev(), meta.ino()));
        }
        self.open.insert(file.hash, content.into());
        Ok(true)
    }

    /// The content that is kept in memory.
    #[must_use]
    pub fn kept_content(&self) -> KeptContent {
        let files = self.in_memory.iter().map(|(hash, file)| (*hash, *file)).collect();
        KeptContent { requests: self.requests, files }
    }

    /// Forgets the files in `unmapped`, which no guest maps. If any file has been requested since
    /// `unmapped` was taken, forgets none, since the request may be for one of these. Returns the
    /// descriptors of the forgotten files: closing them frees the memory. A file that is mapped
    /// again is sent again.
    #[must_use]
    pub fn forget_unmapped(&mut self, unmapped: &KeptContent) -> Vec<OwnedFd> {
        if unmapped.requests != self.requests {
            return Vec::new();
        }
        let forgotten = unmapped.files.iter().filter_map(|(hash, _)| {
            self.in_memory.remove(hash)?;
            self.open.remove(hash)
        });
        forgotten.collect()
    }
}

/// Whether the peer has closed the connection.
fn is_closed(other: &UnixStream) -> bool {
    let mut fds = [PollFd::new(other, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

impl Incoming {
    fn begin(dir: &Path, file: &FileRef, to: HomePid) -> io::Result<Self> {
        let (hasher, at, size) = (blake3::Hasher::new(), 0, file.size);
        if !file.shareable {
            let flags = rustix::fs::MemfdFlags::CLOEXEC;
            let memory = File::from(rustix::fs::memfd_create("tern-content", flags)?);
            return Ok(Self { file: memory, paths: None, hasher, at, size });
        }
        fs::create_dir_all(dir)?;
        // Two families may fetch the same content at once, so each uses its own temporary name.
        let temporary = dir.join(format!(".{}.{}.{to}", file.hash, std::process::id()));
        let paths = Some((temporary.clone(), dir.join(file.hash.to_string())));
        let _stale = fs::remove_file(&temporary);
        let file = File::options().write(true).read(true).create_new(true).mode(0o444).open(&temporary)?;
        Ok(Self { file, paths, hasher, at, size })
    }

    /// Moves it to its final path and opens it read-only, so that guests cannot get a writable
    /// descriptor.
    fn commit(self) -> io::Result<OwnedFd> {
        if let Some((temporary, path)) = &self.paths {
            fs::rename(temporary, path)?;
            return Ok(File::open(path)?.into());
        }
        Ok(File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))?.into())
    }

    fn discard(&self) {
        if let Some((temporary, _)) = &self.paths {
            let _gone = fs::remove_file(temporary);
        }
    }
}

impl Drop for ContentCache {
    fn drop(&mut self) {
        self.incoming.values().for_each(Incoming::discard);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_file::NodeFile;
    use tern_ids::{Credentials, NodeId};

    fn reference(content: &[u8]) -> FileRef {
        let hash = ContentHash(*blake3::hash(content).as_bytes());
        FileRef {
            device: 1,
            inode: 1,
            path: Vec::new(),
            size: content.len() as u64,
            hash,
            shareable: true,
            is_object: false,
            location: None,
        }
    }

    fn directory(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("tern-content-{name}-{}", std::process::id()));
        let _old = fs::remove_dir_all(&dir);
        dir
    }

    #[test]
    fn content_is_assembled_from_pieces() {
        let dir = directory("pieces");
        let file = reference(b"hello world");
        let mut cache = ContentCache::new(&dir);
        assert!(!cache.has(&file));
        assert!(!cache.put(&file, HomePid(7), 0, b"hello ").unwrap());
        // Another process requests the same content before it is complete.
        assert!(!cache.put(&file, HomePid(8), 0, b"hello").unwrap());
        assert!(cache.put(&file, HomePid(7), 6, b"world").unwrap());
        assert!(cache.put(&file, HomePid(8), 5, b" world").unwrap());
        assert!(ContentCache::new(&dir).has(&file), "another family finds it");
        let private = FileRef { shareable: false, ..file };
        assert!(!ContentCache::new(&dir).has(&private), "but not one that may not share");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn node_file_is_opened_directly_or_received() {
        let dir = directory("own");
        let location = |node| NodeFile {
            node: NodeId(node),
            path: b"a".to_vec(),
            number: 7,
            credentials: Credentials { uid: 0, gid: 0, groups: Vec::new() },
        };
        let file = |node| FileRef {
            hash: ContentHash([node as u8; 32]),
            shareable: false,
            location: Some(Box::new(location(node))),
            ..reference(b"hello world")
        };
        let mut cache = ContentCache::new(&dir);
        assert_eq!(cache.to_be_opened(&[file(2), reference(b"sent")]), [file(2)]);
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let fd = File::open("/dev/null").unwrap().into();
        let connection = OpenFileConnection::Server(ours);
        assert!(cache.add_opened(OpenedFile { hash: file(2).hash, fd, connection }).is_none());
        assert!(cache.to_be_opened(&[file(2)]).is_empty());
        assert!(cache.has(&file(2)) && cache.get(&file(2)).is_some());
        assert!(!cache.has(&file(3)));
        assert!(cache.put(&file(3), HomePid(7), 0, b"hello wo.ld").unwrap());
        assert!(cache.has(&file(3)) && !ContentCache::new(&dir).has(&file(3)), "for this family only");
        assert!(!dir.exists());
    }

    #[test]
    fn shown_file_is_unusable_after_its_tree_ended() {
        let location = NodeFile {
            node: NodeId(1),
            path: b"a".to_vec(),
            number: 7,
            credentials: Credentials { uid: 0, gid: 0, groups: Vec::new() },
        };
        let file =
            FileRef { shareable: false, location: Some(Box::new(location)), ..reference(b"hello world") };
        let (ours, theirs) = UnixStream::pair().unwrap();
        let fd = File::open("/dev/null").unwrap().into();
        let mut cache = ContentCache::new(&directory("shown"));
        let connection = OpenFileConnection::Tree(ours);
        assert!(cache.add_opened(OpenedFile { hash: file.hash, fd, connection }).is_none());
        assert!(cache.has(&file) && cache.is_demand_paged(&file) && cache.has(&file));
        drop(theirs);
        assert!(!cache.has(&file) && cache.get(&file).is_none() && !cache.is_demand_paged(&file));
    }

    #[test]
    fn unmapped_content_in_memory_is_forgotten() {
        let file = FileRef { shareable: false, ..reference(b"hello") };
        let mut cache = ContentCache::new(&directory("unmapped"));
        assert!(cache.put(&file, HomePid(7), 0, b"hello").unwrap());
        let content = File::from(cache.get(&file).unwrap().try_clone_to_owned().unwrap());
        let meta = content.metadata().unwrap();
        let mut mapped = cache.kept_content();
        mapped.retain_unmapped(&[(meta.dev(), meta.ino())].into());
        assert!(mapped.is_empty());
        let unmapped = cache.kept_content();
        assert!(cache.has(&file));
        assert!(cache.forget_unmapped(&unmapped).is_empty());
        assert!(cache.has(&file), "it has been requested meanwhile");
        let unmapped = cache.kept_content();
        assert_eq!(cache.forget_unmapped(&unmapped).len(), 1);
        assert!(cache.get(&file).is_none() && cache.kept_content().is_empty());
    }

    #[test]
    fn content_with_wrong_hash_is_refused() {
        let dir = directory("false");
        let file = reference(b"hello world");
        let mut cache = ContentCache::new(&dir);
        assert!(cache.put(&file, HomePid(7), 0, b"hello_world").is_err());
        assert!(cache.put(&file, HomePid(7), 3, b"lo").is_err());
        assert!(cache.put(&file, HomePid(7), 0, b"hello world and more").is_err());
        assert!(!cache.has(&file));
        assert_eq!(fs::read_dir(dir.join("content")).unwrap().count(), 0, "nothing is left");
        fs::remove_dir_all(dir).unwrap();
    }
}
