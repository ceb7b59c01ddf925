//! Files that a process maps shared while it is away, so that it may write to them. If no other process
//! has such a file, it becomes shared memory of this process, as if it had been mapped before the
//! process left: the guest's node gets the content that the file has now. Otherwise the process maps
//! the file at home.

use super::objects::is_nameless;
use super::openers::{Opener, find_opener};
use super::sharers::scan_shared_maps;
use crate::calls::current::CurrentCall;
use crate::process::state::State;
use crate::shim::Shim;
use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;
use tern_ids::HomePid;
use tern_image::object::{self, Extent, ObjectId};
use tern_syscall::ByteBuf;
use tern_tracee::procfs;

/// Maximum content of such a file, in bytes, without holes: it is sent in one message.
const MAX_CONTENT: u64 = 4 << 20;

/// Maximum number of objects of a process that shares one more.
const MAX_OBJECTS: usize = 256;

/// Maximum length of a piece of the content, in bytes.
const MAX_PIECE: u64 = 256 << 10;

/// The content of a file: pieces, and the offset of each. The rest is zeroes.
pub(crate) type Pieces = Vec<(u64, ByteBuf)>;

impl Shim {
    /// Makes a file that a thread away has just mapped shared memory of its process, and returns its
    /// content. Pending while a worker opens or reads the file; the worker then wakes the main loop.
    /// The content of an earlier attempt is old, so `since` identifies this one.
    ///
    /// # Errors
    /// Why the file must be mapped at home.
    pub(crate) fn share_mapped_file(
        &mut self,
        tid: HomePid,
        id: ObjectId,
        since: Instant,
    ) -> Poll<Result<Pieces, String>> {
        match self.try_to_share(tid, id, since) {
            Ok(content) => content.map(Ok),
            Err(why) => Poll::Ready(Err(why)),
        }
    }

    fn try_to_share(&mut self, tid: HomePid, id: ObjectId, since: Instant) -> Result<Poll<Pieces>, String> {
        let gone = || "it has ended".to_owned();
        let process = self.find_process(tid).ok_or_else(gone)?;
        let pid = process.pid;
        if !matches!(process.state, State::Away) {
            return Err("its process is on its way".into());
        }
        if !self.shared_memory.contains(id) {
            let maps = procfs::maps(process.memory.pid()).map_err(|error| error.to_string())?;
            let mapping = maps.iter().find(|m| m.shared && object::id(m) == id).ok_or_else(gone)?;
            let open = process.files.object_opener(mapping);
            let open = move || open().and_then(check_file_system);
            let is_nameless = is_nameless(&mapping.name);
            // The kernel opens anonymous memory at once. A file's server may delay an open.
            // munmap is not noticed, so the files of a process away only become more.
            if !is_nameless && process.files.objects.len() >= MAX_OBJECTS {
                return Err("it has mapped too many".into());
            }
            let opened =
                if is_nameless { Some(open()) } else { self.shared_memory.open_in_worker((id, since), open) };
            let Some(opened) = opened else { return Ok(Poll::Pending) };
            opened.and_then(|file| self.track_object(id, file)).map_err(|error| error.to_string())?;
            if is_nameless {
                return Ok(Poll::Ready(Pieces::new()));
            }
            self.shared_memory.uncheck(id);
        }
        // From here on, opens are noticed, and a call of this process on the file fetches it home.
        if self.is_accessed_by_others(tid, id) {
            return Err("another of its threads uses the file".into());
        }
        self.shared_memory
            .read_unshared(id, pid, since)
            .map_or(Ok(Poll::Pending), |content| content.map(Poll::Ready))
    }

    /// Whether another thread of a thread's process makes a call on the content of this object.
    fn is_accessed_by_others(&self, tid: HomePid, id: ObjectId) -> bool {
        let Some(process) = self.find_process(tid) else { return false };
        let others = process.threads.values().filter(|thread| thread.tid != tid);
        // An mmap of the same file waits.
        let uses = |call: &&CurrentCall| i64::from(call.request.call.nr) != libc::SYS_mmap;
        let mut calls = others.filter_map(|thread| thread.current.as_ref()).filter(uses);
        calls.any(|current| self.accessed_object(process, &current.request.call) == Some(id))
    }
}

/// The content of an object that is mapped and open in this process only. For a thread: it examines
/// all processes.
///
/// # Errors
/// If another process has the file, or may have it; if the content is too large, or cannot be read.
pub(super) fn read_unshared(
    id: ObjectId,
    file: &Arc<File>,
    inode: (u64, u64),
    pid: HomePid,
) -> Result<Pieces, String> {
    let maps = scan_shared_maps().map_err(|pid| format!("process {pid} cannot be examined in time"))?;
    if let Some((other, _)) = maps.iter().find(|(other, maps)| **other != pid.0 && maps.contains(&id)) {
        return Err(format!("process {other} maps it"));
    }
    match find_opener(HashSet::from([inode]), &BTreeSet::from([pid.0])) {
        Opener::None => {}
        Opener::Process(other) => return Err(format!("process {other} has it open")),
        Opener::Pending | Opener::Unknown => return Err("another process may have it open".into()),
    }
    read(file).map_err(|error| error.to_string())
}

/// The file, unless its file system may answer late, or other machines may change the file.
fn check_file_system(file: File) -> io::Result<File> {
    // statfs(2), FUSE, NFS, SMB, CIFS, 9P, Ceph and AFS.
    const REMOTE: [u32; 8] =
        [0x6573_5546, 0x6969, 0xfe53_4d42, 0xff53_4d42, 0x0102_1997, 0x00c3_6400, 0x5346_414f, 0x6b41_4653];
    if REMOTE.contains(&(rustix::fs::fstatfs(&file)?.f_type as u32)) {
        return Err(io::Error::other("its file system is not local"));
    }
    Ok(file)
}

/// The content of a file, without holes.
fn read(file: &File) -> io::Result<Pieces> {
    let meta = file.metadata()?;
    if !fits(file, meta.size().saturating_sub(meta.blocks() * 512))? {
        return Err(io::Error::other("its file system is nearly full"));
    }
    let (mut pieces, mut offset, mut total) = (Pieces::new(), 0, 0);
    while offset < meta.size() {
        match object::extent_at(file, offset, meta.size())? {
            Extent::Hole(length) => offset += length,
            Extent::Content(length) => {
                let length = length.min(MAX_PIECE);
                total += length;
                if total > MAX_CONTENT {
                    return Err(io::Error::other("it is large"));
                }
                let mut piece = vec![0; length as usize];
                file.read_exact_at(&mut piece, offset)?;
                pieces.push((offset, ByteBuf::from(piece)));
                offset += length;
            }
        }
    }
    Ok(pieces)
}

/// Whether the file system has twice the room that the holes of a file need: what the program writes
/// into them away must find room at home. A file system without a limit reports no blocks.
fn fits(file: &File, holes: u64) -> io::Result<bool> {
    let room = rustix::fs::fstatvfs(file)?;
    Ok(room.f_blocks == 0 || holes <= (room.f_bavail / 2).saturating_mul(room.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_read_without_holes_and_up_to_a_limit() {
        let memfd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(memfd);
        file.set_len(1 << 40).unwrap();
        assert!(read(&file).unwrap().is_empty());
        file.write_all_at(b"content", 1 << 30).unwrap();
        let pieces = read(&file).unwrap();
        assert!(
            matches!(&pieces[..], [(offset, piece)] if *offset == 1 << 30 && piece.starts_with(b"content\0"))
        );
        file.write_all_at(&vec![1; MAX_CONTENT as usize], 0).unwrap();
        assert!(read(&file).is_err());
    }
}
