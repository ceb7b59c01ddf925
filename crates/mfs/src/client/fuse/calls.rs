//! Handles each FUSE request, independent of fuser's reply types.

use crate::client::cache::dentries::are_names_cacheable;
use crate::client::cache::name_cache::is_in_non_creating_call;
use crate::client::cache::path_retry::{LookupMode, may_path_begin_in};
use crate::client::cache::validity::ValidityStamp;
use crate::client::caller::create_intent::is_exclusive_create;
use crate::client::connection::peer::Response;
use crate::client::fuse::attributes::synthetic_attr;
use crate::client::fuse::entry_reply::{Dentry, EntryReply};
use crate::client::fuse::handle::{Handle, ReadData};
use crate::client::fuse::inode::Inode;
use crate::client::root_links::{RootLink, RootName};
use crate::client::tree::Tree;
use crate::message::{Attributes, FileReply, Found, MAX_DATA, Name, Object, Op, OpenId};
use fuser::{FileAttr, FileHandle, FileType, INodeNo, Request};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::Duration;
use tern_ids::Credentials;
use tern_wire::limits::MAX_PAYLOAD;

/// Upper bound for the encoded size (bytes) of an operation on an open file, with its caller but
/// without the caller's groups.
const MAX_OP_HEADER: usize = 128;

/// Milliseconds for which a renewable lease holds after its renewal.
const RENEWABLE_LEASE_MS: u32 = 1000;

/// Inode number of the tree's root.
pub(crate) const ROOT: u64 = 1;

/// The tree, as the file system that fuser serves.
#[derive(Debug, Clone)]
pub(crate) struct MountedTree(pub(crate) Arc<Tree>);

pub(crate) type FsResult<T> = Result<T, Errno>;

impl MountedTree {
    pub(crate) fn caller(&self, request: &Request) -> Credentials {
        self.0.callers.caller(request.pid(), request.uid(), request.gid())
    }

    /// The caller on whose behalf data is written. FUSE_WRITE from write-back carries no caller;
    /// the opener counts then.
    pub(crate) fn writer(&self, request: &Request, handle: &Handle) -> Credentials {
        if request.uid() == u32::MAX || request.pid() == 0 {
            handle.opener.clone()
        } else {
            self.caller(request)
        }
    }

    /// The inode of a node's file. Fails for the tree's root and its links: no node performs
    /// operations on them.
    pub(crate) fn inode(&self, number: INodeNo) -> FsResult<Arc<Inode>> {
        if is_synthetic(number) {
            return Err(Errno::PERM);
        }
        self.0.inode(number.0)
    }

    pub(crate) fn handle(&self, number: FileHandle) -> FsResult<Arc<Handle>> {
        self.0.handle(number.0)
    }

    pub(crate) fn look_up(&self, request: &Request, parent: INodeNo, name: &OsStr) -> FsResult<EntryReply> {
        let caller = self.caller(request);
        if parent.0 != ROOT {
            let dir = self.inode(parent)?;
            dir.last_lookup.note();
            let stamp = ValidityStamp::now(&dir.peer);
            let op = |dir| Op::Lookup { dir, name: Name::from(name) };
            let tid = request.pid();
            let path_retries = &self.0.path_retries;
            let response = match path_retries.lookup_mode(tid, dir.number, name) {
                LookupMode::StaleUnlessPathStart if !may_path_begin_in(tid, &dir) => {
                    path_retries.fail_at_lookup(tid, dir.number, name, true);
                    return Err(Errno::STALE);
                }
                LookupMode::Checked => {
                    let cached = self.renewable_name(&dir, name);
                    if let Some(reply) = cached.or_else(|| self.cached_name(tid, &dir, name)) {
                        return Ok(reply);
                    }
                    if is_exclusive_create(tid, &caller, &self.0.device, &dir, name) {
                        return Err(Errno::NOENT);
                    }
                    self.0.call_at_path_end(tid, &dir, &caller, &[], op).inspect_err(|errno| {
                        if *errno == Errno::STALE {
                            path_retries.fail_at_lookup(tid, dir.number, name, false);
                        }
                    })
                }
                mode => {
                    if mode == LookupMode::StaleUnlessPathStart {
                        path_retries.note_restart_in(tid, dir.number);
                    }
                    self.0.call_without_path(&dir, &caller, &[], op)
                }
            };
            let response = response.inspect_err(|errno| {
                if *errno != Errno::STALE {
                    path_retries.note_lookup(tid, None);
                }
            })?;
            if let FileReply::NotFound(dir_attributes) = &response.reply {
                path_retries.note_lookup(tid, None);
                dir.renewable_cache.set_name(&dir.peer, dir_attributes, &stamp, name, None);
                return Ok(self.negative_reply(&dir, dir_attributes.lease, stamp));
            }
            let reply = self.found_reply(&dir, name, &response.reply, stamp)?;
            path_retries.note_lookup(tid, Some(reply.attr.ino.0));
            return Ok(reply);
        }
        match self.0.resolve_root_name(name).ok_or(Errno::NOENT)? {
            RootName::Link(link) => Ok(EntryReply::synthetic(link_attr(link))),
            RootName::Node(node) => {
                let (inode, attributes, stamp) = self.0.node_root(node, &caller)?;
                Ok(EntryReply::for_file(inode, &attributes, stamp, false).with_dentry(Dentry::Synthetic))
            }
        }
    }

    /// Resolves a name from the client's own name cache, which stands in for the kernel's dentries.
    /// Like every dentry that the kernel gets, the name is first recorded in the inode's
    /// `dentries`.
    fn cached_name(&self, tid: u32, dir: &Arc<Inode>, name: &OsStr) -> Option<EntryReply> {
        let epoch = self.0.invalidator.dentry_epoch();
        let (inode, attributes, stamp) = dir.name_cache.get(name, epoch)?;
        let remaining = stamp.deliver(|remaining| remaining(attributes.lease));
        if !is_in_non_creating_call(tid)
            || !inode.dentries.add(dir, name, remaining, epoch)
            || !self.0.inodes.count_lookup_again(&inode)
        {
            return None;
        }
        Some(EntryReply::for_file(inode, &attributes, stamp, false))
    }

    /// Resolves a name, or its absence, from state cached under renewable leases.
    fn renewable_name(&self, dir: &Arc<Inode>, name: &OsStr) -> Option<EntryReply> {
        let peer = &dir.peer;
        let stamp = peer.renewed_stamp(&[dir])?;
        let Some(inode) = dir.renewable_cache.lookup(peer, name)? else {
            return Some(self.negative_reply(dir, RENEWABLE_LEASE_MS, stamp));
        };
        let stamp = peer.renewed_stamp(&[dir, &inode])?;
        let is_still =
            dir.renewable_cache.lookup(peer, name)?.is_some_and(|still| Arc::ptr_eq(&still, &inode));
        let attributes = inode.renewable_cache.attributes(peer).filter(|_| is_still)?;
        let epoch = self.0.invalidator.dentry_epoch();
        let is_cacheable = are_names_cacheable(dir, epoch) && self.0.invalidator.can_invalidate_dentries();
        if !inode.dentries.add(dir, name, Duration::ZERO, epoch) || !self.0.inodes.count_lookup_again(&inode)
        {
            return None;
        }
        let dentry = Dentry::Positive(
            if is_cacheable { RENEWABLE_LEASE_MS } else { 0 },
            dir.clone(),
            name.to_owned(),
            inode.clone(),
            epoch,
        );
        Some(EntryReply::for_file(inode, &attributes, stamp, false).with_dentry(dentry))
    }

    /// A negative reply, which the kernel may cache if its dentries can be invalidated.
    fn negative_reply(&self, dir: &Arc<Inode>, lease: u32, stamp: ValidityStamp) -> EntryReply {
        EntryReply::negative(dir, if self.0.invalidator.can_invalidate_dentries() { lease } else { 0 }, stamp)
    }

    /// The reply to a successful lookup.
    pub(crate) fn found_reply(
        &self,
        dir: &Arc<Inode>,
        name: &OsStr,
        reply: &FileReply,
        stamp: ValidityStamp,
    ) -> FsResult<EntryReply> {
        let FileReply::Found(found, dir_attributes) = reply else { return Err(Errno::IO) };
        let inode = self.add_lookup(dir, name, found);
        inode.renewable_cache.set_attributes(&dir.peer, &found.attributes, &stamp);
        dir.renewable_cache.set_name(&dir.peer, dir_attributes, &stamp, name, Some(&inode));
        let dentry = self.dentry_for(dir, name, &inode, found, dir_attributes.lease, &stamp);
        Ok(EntryReply::for_file(inode, &found.attributes, stamp, false).with_dentry(dentry))
    }

    /// The dentry for a lookup's result, valid as long as the directory's lease. If the kernel's
    /// dentries cannot be invalidated, the name is cached here and not by the kernel.
    pub(crate) fn dentry_for(
        &self,
        dir: &Arc<Inode>,
        name: &OsStr,
        inode: &Arc<Inode>,
        found: &Found,
        dir_lease: u32,
        stamp: &ValidityStamp,
    ) -> Dentry {
        use rustix::fs::FileType::{Directory, RegularFile, Symlink};
        let kind = rustix::fs::FileType::from_raw_mode(found.attributes.mode);
        let epoch = self.0.invalidator.dentry_epoch();
        // Recorded even with a zero TTL. The call at the end of the path has the node check every
        // recorded dentry on the way, and the kernel may have taken the earlier components from its
        // cache.
        inode.dentries.add(dir, name, Duration::ZERO, epoch);
        // Other kinds (pipes, sockets) are opened by this kernel without a request to the node, so
        // their names are never cached.
        if !matches!(kind, RegularFile | Directory | Symlink) || !are_names_cacheable(dir, epoch) {
            return Dentry::Uncacheable;
        }
        if self.0.invalidator.can_invalidate_dentries() {
            return Dentry::Positive(dir_lease, dir.clone(), name.to_owned(), inode.clone(), epoch);
        }
        let lease = dir_lease.min(found.attributes.lease);
        dir.name_cache.insert(name, inode, Attributes { lease, ..found.attributes }, stamp, epoch);
        Dentry::Uncacheable
    }

    pub(crate) fn add_lookup(&self, dir: &Arc<Inode>, name: &OsStr, found: &Found) -> Arc<Inode> {
        dir.creates.note_name(name);
        self.0.inodes.add_lookup(dir.node(), &dir.peer, found, Some((dir, name)))
    }

    /// Attributes of a file. `reading`: the kernel is about to read the content.
    pub(crate) fn attributes(
        &self,
        request: &Request,
        number: INodeNo,
        reading: bool,
    ) -> FsResult<EntryReply> {
        if number.0 == ROOT {
            return Ok(EntryReply::synthetic(synthetic_attr(ROOT, FileType::Directory, 0o755, 0)));
        }
        if let Some(link) = RootLink::of(number.0) {
            return Ok(EntryReply::synthetic(link_attr(link)));
        }
        let inode = self.inode(number)?;
        if let Some(stamp) = inode.peer.renewed_stamp(&[&inode])
            && let Some(attributes) = inode.renewable_cache.attributes(&inode.peer)
        {
            return Ok(EntryReply::for_file(inode, &attributes, stamp, reading));
        }
        let cached = if reading { inode.cached_for_read() } else { inode.take_attributes_after_change() };
        if let Some((attributes, stamp)) = cached {
            return Ok(EntryReply::for_file(inode, &attributes, stamp, reading));
        }
        let (stamp, lock_events) = (ValidityStamp::for_inode(&inode), inode.lock_events());
        let op = |of| Op::GetAttr { of };
        let response = if reading {
            self.0.call_without_path(&inode, &self.caller(request), &[], op)?
        } else {
            // By path, since the kernel may check permissions with these attributes; or by handle,
            // since an open file may have no name any more.
            self.call_by_path_or_handle(request, &inode, &self.caller(request), &[], op)?
        };
        let FileReply::Attributes(attributes) = response.reply else { return Err(Errno::IO) };
        if reading && !inode.peer.uses_renewable_leases() {
            inode.cache_for_read(attributes, stamp.clone(), lock_events);
        }
        inode.renewable_cache.set_attributes(&inode.peer, &attributes, &stamp);
        Ok(EntryReply::for_file(inode, &attributes, stamp, reading))
    }

    pub(crate) fn link_target(&self, request: &Request, number: INodeNo) -> FsResult<Vec<u8>> {
        if let Some(link) = RootLink::of(number.0) {
            return self.0.link_target(link, request.pid());
        }
        let inode = self.inode(number)?;
        if inode.peer.renewed_stamp(&[]).is_some()
            && let Some(target) = inode.renewable_cache.link_target(&inode.peer)
        {
            return Ok(target);
        }
        let stamp = ValidityStamp::for_inode(&inode);
        let op = |of| Op::ReadLink { of };
        let response = self.0.call_at_path_end(request.pid(), &inode, &self.caller(request), &[], op)?;
        inode.renewable_cache.set_link_target(&inode.peer, &stamp, response.data());
        Ok(response.data().to_vec())
    }

    /// Calls an operation on a file that was reached by path or through an open file; FUSE does not
    /// say which.
    ///
    /// The kernel does not retry ESTALE for a call on an open file. So if a dentry on the path is
    /// stale and the file is open here, the operation is repeated without the path.
    pub(crate) fn call_by_path_or_handle(
        &self,
        request: &Request,
        inode: &Arc<Inode>,
        caller: &Credentials,
        data: &[u8],
        op: impl Fn(Object) -> Op,
    ) -> FsResult<Response> {
        match self.0.call_at_path_end(request.pid(), inode, caller, data, &op) {
            Err(Errno::STALE) if inode.pages.is_open() => {
                self.0.path_retries.finish(request.pid());
                self.0.call_without_path(inode, caller, data, op)
            }
            done => done,
        }
    }

    /// An extended attribute was changed. If it is an access list, search permission on the
    /// directory may differ, which this kernel cannot check; so all dentries are invalidated.
    pub(crate) fn note_acl_change(&self, of: &Inode, name: &OsStr) {
        of.creates.note_permission_change();
        if name.as_encoded_bytes().starts_with(b"system.posix_acl") {
            self.0.invalidator.invalidate_dentries();
        }
    }

    pub(crate) fn read_at(
        &self,
        request: &Request,
        handle: FileHandle,
        at: u64,
        length: u32,
    ) -> FsResult<ReadData> {
        let handle = self.handle(handle)?;
        if let Some(read) = handle.read_prefetched(at, length) {
            return Ok(read);
        }
        let op = |opened| Op::Read { opened, at, length };
        let response = self.0.call_on_open(&handle, &handle.opener, &[], op)?;
        self.0.traffic.count(request.pid(), handle.inode.node(), response.data().len());
        Ok(ReadData::Whole(response))
    }

    pub(crate) fn write_at(
        &self,
        request: &Request,
        handle: FileHandle,
        at: u64,
        data: &[u8],
    ) -> FsResult<u32> {
        let handle = self.handle(handle)?;
        let caller = self.writer(request, &handle);
        let append = OFlags::from_bits_retain(handle.flags).contains(OFlags::APPEND);
        let mut done = 0;
        // A single chunk unless the caller has very many groups. In write-back the kernel ignores a
        // short count, so all chunks must be written.
        for piece in data.chunks(max_data(&caller)) {
            let at = at + done;
            let response =
                self.0.call_on_open(&handle, &caller, piece, |opened| Op::Write { opened, at, append })?;
            handle.inode.pages.forget_version();
            self.0.traffic.count(request.pid(), handle.inode.node(), piece.len());
            let count = checked_count(&response.reply, piece.len() as u64)?;
            done += count;
            if count < piece.len() as u64 {
                break;
            }
        }
        u32::try_from(done).map_err(|_large| Errno::IO)
    }

    /// Copies within one node. Between nodes it fails with `EXDEV`, and the kernel reads and writes
    /// instead.
    pub(crate) fn copy(
        &self,
        request: &Request,
        from: (FileHandle, u64),
        to: (FileHandle, u64),
        length: u64,
    ) -> FsResult<u32> {
        let ((from, at), (to, to_at)) = ((self.handle(from.0)?, from.1), (self.handle(to.0)?, to.1));
        if !Arc::ptr_eq(&from.inode.peer, &to.inode.peer) {
            return Err(Errno::XDEV);
        }
        // FUSE replies with a 32-bit count.
        let length = length.min(1 << 30);
        let caller = self.writer(request, &to);
        let op = |[to, from]: [OpenId; 2]| Op::CopyFileRange { from, at, to, to_at, length };
        let count = checked_count(&self.0.call_on_all_open([&to, &from], &caller, &[], op)?.reply, length)?;
        u32::try_from(count).map_err(|_large| Errno::IO)
    }

    pub(crate) fn sync(&self, handle: FileHandle, data_only: bool) -> FsResult<()> {
        let handle = self.handle(handle)?;
        let unsynced = &handle.inode.unsynced;
        // A write that runs concurrently may or may not be covered by the fsync.
        let writes = unsynced.write_count();
        let op = |opened| Op::Fsync { opened, data_only };
        let response = self.0.call_on_open(&handle, &handle.opener, &[], op)?;
        unsynced.note_sync(writes, response.boot);
        if handle.has_lost_writes(response.boot) { Err(Errno::IO) } else { Ok(()) }
    }

    /// The value of an extended attribute, or the list of names.
    pub(crate) fn read_xattr(
        &self,
        request: &Request,
        number: INodeNo,
        op: impl Fn(Object) -> Op,
    ) -> FsResult<Vec<u8>> {
        if is_synthetic(number) {
            return Err(Errno::NODATA);
        }
        let inode = self.inode(number)?;
        Ok(self.0.call_without_path(&inode, &self.caller(request), &[], op)?.data().to_vec())
    }
}

/// How much data fits into one frame beside the operation and this caller.
fn max_data(caller: &Credentials) -> usize {
    // An encoded group takes 5 bytes at most.
    MAX_DATA.min((MAX_PAYLOAD - MAX_OP_HEADER).saturating_sub(5 * caller.groups.len())).max(1)
}

/// Whether this is the tree's root or one of its links, which belong to no node.
pub(crate) fn is_synthetic(number: INodeNo) -> bool {
    number.0 == ROOT || RootLink::of(number.0).is_some()
}

/// The count in a reply. It must not exceed `limit`.
fn checked_count(reply: &FileReply, limit: u64) -> FsResult<u64> {
    if let FileReply::Count(count) = reply
        && *count <= limit
    {
        Ok(*count)
    } else {
        Err(Errno::IO)
    }
}

/// Attributes of a link. Most links lead to a node number of at most five digits, which may depend
/// on the caller.
pub(crate) fn link_attr(link: RootLink) -> FileAttr {
    let size = match link {
        RootLink::Admin => 0,
        RootLink::OwnFiles => 1,
        _ => 5,
    };
    synthetic_attr(link.number(), FileType::Symlink, 0o777, size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{FileRequest, OpenId, Piggyback};

    #[test]
    fn reply_cannot_count_more_than_was_written() {
        assert_eq!(checked_count(&FileReply::Count(7), 7), Ok(7));
        for reply in [FileReply::Count(8), FileReply::Count(u64::MAX), FileReply::Done] {
            assert_eq!(checked_count(&reply, 7), Err(Errno::IO));
        }
    }

    #[test]
    fn data_fits_beside_any_number_of_groups() {
        for (groups, at) in [(0, 0), (700, u64::MAX), (800, 1 << 40), (65_536, u64::MAX)] {
            let caller = Credentials { uid: u32::MAX, gid: u32::MAX, groups: vec![u32::MAX; groups] };
            let op = Op::Write { opened: OpenId(u64::MAX), at, append: true };
            let limit = max_data(&caller);
            let head = tern_wire::encode(&FileRequest::Call {
                caller,
                checks: vec![],
                piggyback: Piggyback::default(),
                op,
            })
            .unwrap();
            assert!(head.len() + limit <= MAX_PAYLOAD, "{groups}");
            assert!(limit >= MAX_DATA / 2 && (groups > 750 || limit == MAX_DATA), "{groups}");
        }
    }
}
