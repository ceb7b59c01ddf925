//! The content of mapped files on a node where their processes are guests.

use crate::layout::FileRef;
use crate::object::Objects;
use crate::place::Place;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{HashMap, VecDeque};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tern_ids::{ContentHash, HomePid};

/// Whose end is to be kept as long as a file is open.
#[derive(Debug)]
pub enum Holder {
    /// The node's server of files, whose own it is.
    Server(UnixStream),
    /// Who shows a file of home: when he ends it is of no use any more.
    Tree(UnixStream),
}

/// How a node opens a file that has a place for a guest.
pub type Open = Box<dyn Fn(&Place) -> io::Result<(OwnedFd, Holder)>>;

/// So many files of the node's own are known to its server as open for the guests of one family.
const MOST_SERVED: usize = 64;

/// The content of mapped files on a node where the process is a guest.
pub struct Cache {
    dir: PathBuf,
    own: Option<Open>,
    served: VecDeque<UnixStream>,
    /// By hash: the open file, and its device and inode as maps shows them once it is mapped.
    open: HashMap<ContentHash, OwnedFd>,
    /// Of those that are shown, who does.
    trees: HashMap<ContentHash, UnixStream>,
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
        let (open, arriving, objects, served, trees) = Default::default();
        Self { dir: dir.join("content"), own: None, served, open, trees, arriving, objects }
    }

    /// One that opens files that have a place in this way.
    #[must_use]
    pub fn with_own(mut self, open: Open) -> Self {
        self.own = Some(open);
        self
    }

    /// Opens a file that has a place.
    fn has_own(&mut self, file: &FileRef) -> bool {
        let (Some(open), Some(place)) = (&self.own, &file.place) else { return false };
        match open(place) {
            Ok((own, holder)) => {
                match holder {
                    // The oldest is mapped all the same; what others have of it is no longer asked back before it is written.
                    Holder::Server(server) => {
                        self.served.truncate(MOST_SERVED - 1);
                        self.served.push_front(server);
                    }
                    Holder::Tree(tree) => drop(self.trees.insert(file.hash, tree)),
                }
                self.open.insert(file.hash, own);
                true
            }
            Err(_) => false,
        }
    }

    /// Whether it comes page by page from another node.
    #[must_use]
    pub fn is_shown(&self, file: &FileRef) -> bool {
        self.trees.contains_key(&file.hash)
    }

    /// Whether the content is here, or comes by itself; opens it.
    pub fn has(&mut self, file: &FileRef) -> bool {
        if file.live {
            return true;
        }
        if self.trees.get(&file.hash).is_some_and(has_ended) {
            self.trees.remove(&file.hash);
            self.open.remove(&file.hash);
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

/// Whether the other end has gone.
fn has_ended(other: &UnixStream) -> bool {
    let mut fds = [PollFd::new(other, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
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

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::NodeId;

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
                Ok((File::open("/dev/null")?.into(), Holder::Server(ours)))
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
    fn what_is_shown_is_no_longer_had_when_who_shows_it_has_ended() {
        let place = Place { node: NodeId(1), path: b"a".to_vec(), number: 7, who: (0, 0, Vec::new()) };
        let file = FileRef { shareable: false, place: Some(Box::new(place)), ..reference(b"hello world") };
        let (ours, theirs) = UnixStream::pair().unwrap();
        let shown = std::cell::Cell::new(Some(ours));
        let open: Open = Box::new(move |_place| {
            let tree = shown.take().ok_or(io::ErrorKind::NotFound)?;
            Ok((File::open("/dev/null")?.into(), Holder::Tree(tree)))
        });
        let mut cache = Cache::new(&directory("shown")).with_own(open);
        assert!(cache.has(&file) && cache.is_shown(&file) && cache.has(&file));
        drop(theirs);
        assert!(!cache.has(&file) && cache.get(&file).is_none() && !cache.is_shown(&file));
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
