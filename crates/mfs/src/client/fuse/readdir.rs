//! Reading directories. Entries are read and looked up in batches, and buffered until the kernel
//! asks for them.

use crate::client::cache::validity::ValidityStamp;
use crate::client::fuse::attributes::{file_type, synthetic_attr};
use crate::client::fuse::calls::{FsResult, MountedTree, ROOT};
use crate::client::fuse::entry_reply::EntryReply;
use crate::client::fuse::handle::Handle;
use crate::client::fuse::inode::Inode;
use crate::client::root_links::{RootLink, RootName};
use crate::lock;
use crate::message::{DirEntry, FileReply, MAX_READDIR_LOOKUPS, Op};
use fuser::{FileAttr, FileHandle, FileType, INodeNo, ReplyDirectoryPlus};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Bytes of directory entries read at once: with lookups, or for names alone. The latter is not
/// much more than one batch of lookups, in case lookups follow.
const LOOKUP_BATCH_BYTES: u32 = 64 << 10;
const NAME_BATCH_BYTES: u32 = 16 << 10;

/// How long after a lookup in a directory its other entries are expected to be looked up too.
const RECENT_LOOKUP: Duration = Duration::from_secs(60);

/// When a name was last looked up in a directory.
#[derive(Debug, Default)]
pub(crate) struct LastLookup(Mutex<Option<Instant>>);

impl LastLookup {
    pub(crate) fn note(&self) {
        *lock(&self.0) = Some(Instant::now());
    }

    fn is_recent(&self) -> bool {
        lock(&self.0).is_some_and(|last| last.elapsed() < RECENT_LOOKUP)
    }
}

/// Entries of a directory that were read and not returned yet.
#[derive(Debug, Default)]
pub(crate) struct ReaddirBuffer {
    /// The offset of the first entry.
    first_offset: u64,
    entries: VecDeque<BufferedEntry>,
    /// Stamp and lease time (ms) of the names, if the entries were looked up.
    lookups: Option<(ValidityStamp, u32)>,
    /// No entries followed these when they were read. Used once: entries may be added later.
    is_last_batch: bool,
}

#[derive(Debug)]
struct BufferedEntry {
    entry: DirEntry,
    /// Its inode, with a counted lookup although the kernel does not have the entry yet.
    inode: Option<Arc<Inode>>,
}

impl ReaddirBuffer {
    /// Whether the last read has reached the end and all entries were returned.
    fn is_at_end(&mut self, after: u64) -> bool {
        after != 0
            && after == self.first_offset
            && self.entries.is_empty()
            && std::mem::take(&mut self.is_last_batch)
    }
}

impl MountedTree {
    /// Replies with the entries that follow offset `after`, from the buffer if it begins there. The
    /// first batch is looked up, and further batches if names in the directory were looked up
    /// recently. Most programs that list a directory look its entries up, often after they have
    /// read it all (find, rm, git). The kernel's own heuristic (`FUSE_READDIRPLUS_AUTO`) covers
    /// only about the first twenty entries then, and each other entry costs a round trip. A lookup
    /// costs the server some 20 µs, which is wasted if only names are needed.
    ///
    /// The kernel takes the entries to be as new as its request. So the buffer is filled again if
    /// its lease has ended, or if this client has changed anything on the node since the buffer was
    /// filled.
    pub(crate) fn read_directory_plus(
        &self,
        handle: FileHandle,
        after: u64,
        mut reply: ReplyDirectoryPlus,
    ) -> Result<(), (ReplyDirectoryPlus, Errno)> {
        let handle = match self.handle(handle) {
            Ok(handle) => handle,
            Err(errno) => return Err((reply, errno)),
        };
        let mut buffer = lock(&handle.readdir_buffer);
        if buffer.is_at_end(after) {
            reply.ok();
            return Ok(());
        }
        let is_current = buffer.lookups.as_ref().is_none_or(|(stamp, lease)| stamp.is_current(*lease));
        if after == 0 || buffer.first_offset != after || buffer.entries.is_empty() || !is_current {
            let look_up = after == 0 || handle.inode.last_lookup.is_recent();
            if let Err(errno) = self.fill_buffer(&handle, &mut buffer, after, look_up) {
                return Err((reply, errno));
            }
        }
        let lookups = buffer.lookups.clone();
        let mut take_while_room = |add_entry: &mut dyn FnMut(&mut BufferedEntry) -> bool| {
            while let Some(buffered) = buffer.entries.front_mut()
                && add_entry(buffered)
            {
                let after = buffered.entry.cookie;
                buffer.entries.pop_front();
                buffer.first_offset = after;
            }
        };
        if let Some((stamp, lease)) = lookups {
            stamp.deliver(|remaining| {
                take_while_room(&mut |buffered| {
                    self.add_entry(&handle, buffered, lease, remaining, &stamp, &mut reply)
                });
                reply.ok();
                self.0.invalidator.note_listing();
            });
        } else {
            take_while_room(&mut |buffered| {
                let entry = &buffered.entry;
                let kind = file_type(entry.kind).unwrap_or_else(|| self.look_up_kind(&handle, entry));
                add_name(&handle, entry, kind, &mut reply)
            });
            reply.ok();
        }
        Ok(())
    }

    /// Adds an entry with its attributes to the reply. Returns whether there was room.
    fn add_entry(
        &self,
        handle: &Handle,
        buffered: &mut BufferedEntry,
        lease: u32,
        remaining: &dyn Fn(u32) -> Duration,
        stamp: &ValidityStamp,
        reply: &mut ReplyDirectoryPlus,
    ) -> bool {
        let entry = &buffered.entry;
        let Some(found) = &entry.found else {
            return add_name(handle, entry, file_type(entry.kind).unwrap_or(FileType::RegularFile), reply);
        };
        let inode =
            buffered.inode.get_or_insert_with(|| self.add_lookup(&handle.inode, entry.name.as_os(), found));
        let reply_entry = EntryReply::for_listing(inode.clone(), &found.attributes, stamp.clone());
        let valid_for = handle
            .inode
            .renewable_cache
            .dentry_ttl(remaining(lease))
            .min(reply_entry.ttl(remaining(found.attributes.lease)));
        let is_cacheable = reply_entry.is_fully_cacheable()
            && self.0.invalidator.can_invalidate_dentries()
            && crate::client::cache::dentries::are_names_cacheable(
                &handle.inode,
                self.0.invalidator.dentry_epoch(),
            )
            && !valid_for.is_zero()
            && inode.dentries.add(
                &handle.inode,
                entry.name.as_os(),
                valid_for,
                crate::client::cache::dentries::ANY_EPOCH,
            );
        let ttl = if is_cacheable { valid_for } else { Duration::ZERO };
        if !self.0.invalidator.can_invalidate_dentries() {
            self.dentry_for(&handle.inode, entry.name.as_os(), inode, found, lease, stamp);
        }
        reply_entry.note_ttl(ttl);
        !reply.add(
            INodeNo(inode.number),
            entry.cookie,
            entry.name.as_os(),
            &ttl,
            &reply_entry.attr,
            reply_entry.generation,
        )
    }

    fn fill_buffer(
        &self,
        handle: &Arc<Handle>,
        buffer: &mut ReaddirBuffer,
        after: u64,
        look_up: bool,
    ) -> FsResult<()> {
        self.clear_buffer(handle, buffer);
        let stamp = ValidityStamp::now(&handle.inode.peer);
        let max_bytes = if after == 0 || look_up { LOOKUP_BATCH_BYTES } else { NAME_BATCH_BYTES };
        let op = |opened| Op::ReadDir { opened, cookie: after, max_bytes, lookup: look_up };
        let response = self.0.call_on_open(handle, &handle.opener, &[], op)?;
        let FileReply::Entries { entries, lease, is_end } = response.reply else { return Err(Errno::IO) };
        buffer.first_offset = after;
        buffer.entries = entries
            .into_iter()
            .take(max_entries(look_up))
            .map(|entry| BufferedEntry { entry, inode: None })
            .collect();
        (buffer.lookups, buffer.is_last_batch) = (look_up.then_some((stamp, lease)), is_end);
        Ok(())
    }

    /// Discards buffered entries.
    pub(crate) fn clear_buffer(&self, handle: &Handle, buffer: &mut ReaddirBuffer) {
        for buffered in buffer.entries.drain(..) {
            self.release_entry(handle, buffered);
        }
    }

    fn release_entry(&self, handle: &Handle, buffered: BufferedEntry) {
        match (buffered.inode, buffered.entry.found) {
            (Some(inode), _) => self.0.inodes.forget(inode.number, 1),
            (None, Some(found)) => handle.inode.peer.queue_forget(found.object, 1),
            (None, None) => {}
        }
    }

    /// The type of an entry for which the file system did not report it.
    fn look_up_kind(&self, handle: &Handle, entry: &DirEntry) -> FileType {
        let op = |dir| Op::Lookup { dir, name: entry.name.clone() };
        let response = self.0.call_without_path(&handle.inode, &handle.opener, &[], op);
        let Ok(FileReply::Found(found, _)) = response.map(|response| response.reply) else {
            return FileType::RegularFile;
        };
        handle.inode.peer.queue_forget(found.object, 1);
        file_type(found.attributes.mode).unwrap_or(FileType::RegularFile)
    }

    /// Lists the root: the nodes, and the links.
    pub(crate) fn list_root(&self, after: u64, mut add: impl FnMut(u64, u64, FileType, &str) -> bool) {
        let links = self.0.links().map(|(link, name)| (link.number(), FileType::Symlink, name.to_owned()));
        let own = [".", ".."].map(|name| (ROOT, FileType::Directory, name.to_owned()));
        let nodes = self.0.map().nodes().into_iter();
        let nodes = nodes.map(|node| match self.0.root_entry(node) {
            RootName::Link(link) => (link.number(), FileType::Symlink, node.to_string()),
            // The directory's real inode number would have to be requested from the server.
            RootName::Node(node) => (RootLink::Node(node).number(), FileType::Directory, node.to_string()),
        });
        let all = own.into_iter().chain(links).chain(nodes);
        for ((number, kind, name), next) in all.zip(1..).skip(usize::try_from(after).unwrap_or(usize::MAX)) {
            if add(number, next, kind, &name) {
                break;
            }
        }
    }
}

/// Attributes of an entry of which only number and type are known. Its node ID in the reply is 0,
/// since otherwise the kernel would take these attributes for the file's own. A lookup gets the
/// real ones, or the error.
pub(crate) fn attributes_without_lookup(number: u64, kind: FileType) -> FileAttr {
    synthetic_attr(number, kind, 0, 0)
}

/// Adds an entry without attributes to the reply. Returns whether there was room.
fn add_name(handle: &Handle, entry: &DirEntry, kind: FileType, reply: &mut ReplyDirectoryPlus) -> bool {
    let attr = attributes_without_lookup(handle.inode.entry_number(entry.inode), kind);
    let (ttl, none) = (Duration::ZERO, fuser::Generation(0));
    !reply.add(INodeNo(0), entry.cookie, entry.name.as_os(), &ttl, &attr, none)
}

/// How many entries of a reply are used.
fn max_entries(look_up: bool) -> usize {
    if look_up { MAX_READDIR_LOOKUPS } else { usize::MAX }
}
