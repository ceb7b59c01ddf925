//! Opening and closing files.

use crate::client::cache::renewable_lease::CachedOpen;
use crate::client::cache::validity::{FileVersion, ValidityStamp};
use crate::client::fuse::calls::{FsResult, MountedTree};
use crate::client::fuse::entry_reply::{Dentry, OpenedFile};
use crate::client::fuse::handle::Handle;
use crate::client::fuse::inode::Inode;
use crate::lock;
use crate::message::{Attributes, FileReply, Op, Release};
use fuser::{FileHandle, INodeNo, Request};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tern_ids::Credentials;

impl MountedTree {
    pub(crate) fn open_file(&self, request: &Request, number: INodeNo, flags: u32) -> FsResult<OpenedFile> {
        let caller = self.caller(request);
        let inode = self.inode(number)?;
        let truncates = OFlags::from_bits_retain(flags).contains(OFlags::TRUNC);
        // O_TRUNC advances the inode's generation, which voids a stamp of that inode. A stamp of
        // the whole node keeps the lease in the reply usable; without the lease the file could not
        // be mapped.
        let stamp =
            if truncates { ValidityStamp::now(&inode.peer) } else { ValidityStamp::for_inode(&inode) };
        let (write_count, lock_events) = (inode.unsynced.write_count(), inode.lock_events());
        let prefetch = may_cache(flags) && !inode.pages.is_version_known();
        let op = |of| Op::Open { of, flags, content: prefetch };
        let is_retry = self.0.path_retries.is_retrying_to(request.pid(), &[&inode]);
        if !is_retry && let Some(open) = self.open_cached(request.pid(), &inode, &caller, flags) {
            return Ok(open);
        }
        let response = self.0.call_at_path_end(request.pid(), &inode, &caller, &[], op)?;
        let FileReply::FileOpened(opened, attributes) = response.reply else { return Err(Errno::IO) };
        if !is_retry && !truncates && inode.may_kernel_differ(FileVersion::new(&attributes)) {
            // The reply to FUSE_OPEN carries no attributes. ESTALE makes the kernel look the file
            // up again, and so get the new ones.
            inode.peer.pending_releases.release(Release::File(opened), false);
            self.0.path_retries.fail_at_end(request.pid());
            return Err(Errno::STALE);
        }
        self.0.note_created(request.pid(), &inode);
        inode.cache_xattr_kinds(&attributes, &stamp);
        inode.renewable_cache.set_attributes(&inode.peer, &attributes, &stamp);
        if attributes.is_renewable && FileType::from_raw_mode(attributes.mode) == FileType::RegularFile {
            self.0.pins.pin(&inode);
        }
        let may_share = attributes.is_renewable && is_shareable(flags);
        let cached = if may_share {
            CachedOpen::new(&inode.peer, &caller, flags, opened, response.boot)
        } else {
            None
        };
        let handle = match cached {
            Some(cached) => {
                inode.renewable_cache.set_open(&inode.peer, &stamp, &cached);
                Handle::with_cached_open(inode, caller, flags, cached)
            }
            None => Handle::new(inode, caller, flags, opened, response.boot),
        };
        // Only complete content is used; an empty file has none.
        if prefetch
            && attributes.lease > 0
            && attributes.size > 0
            && response.data().len() as u64 == attributes.size
        {
            handle.set_prefetched(response, stamp.clone(), attributes.lease, (write_count, lock_events));
        }
        Ok(self.add_handle(handle, attributes, stamp, Dentry::Uncacheable))
    }

    pub(crate) fn add_handle(
        &self,
        handle: Handle,
        attributes: Attributes,
        stamp: ValidityStamp,
        dentry: Dentry,
    ) -> OpenedFile {
        let (inode, may_cache) = (handle.inode.clone(), may_cache(handle.flags) && attributes.lease > 0);
        let skips_flush = handle.skips_flush;
        let handle = self.0.handles.insert(handle);
        OpenedFile { handle, inode, attributes, may_cache, skips_flush, stamp, dentry }
    }

    /// Opens a file that is still open at the server, without a request.
    fn open_cached(
        &self,
        tid: u32,
        inode: &Arc<Inode>,
        caller: &Credentials,
        flags: u32,
    ) -> Option<OpenedFile> {
        let stamp = inode.peer.renewed_stamp(&[inode])?;
        let (attributes, cached) = inode.renewable_cache.find_open(&inode.peer, caller, flags)?;
        if inode.may_kernel_differ(FileVersion::new(&attributes)) {
            return None;
        }
        self.0.note_created(tid, inode);
        if FileType::from_raw_mode(attributes.mode) == FileType::RegularFile {
            self.0.pins.pin(inode);
        }
        let handle = Handle::with_cached_open(inode.clone(), caller.clone(), flags, cached);
        Some(self.add_handle(handle, attributes, stamp, Dentry::Uncacheable))
    }

    pub(crate) fn close(&self, number: FileHandle) {
        let Some(handle) = self.0.handles.remove(number.0) else { return };
        self.clear_buffer(&handle, &mut lock(&handle.readdir_buffer));
        if lock(&handle.cached_open).is_some() {
            return;
        }
        let mut is_urgent = OFlags::from_bits_retain(handle.flags) & OFlags::ACCMODE != OFlags::RDONLY;
        is_urgent |= handle.has_flock.load(Ordering::Acquire);
        handle.inode.peer.pending_releases.release(Release::File(handle.server_file()), is_urgent);
    }
}

/// Whether the kernel may cache pages of a file opened with these flags: not if it is open for
/// writing only or for appending.
fn may_cache(flags: u32) -> bool {
    let flags = OFlags::from_bits_retain(flags);
    flags & OFlags::ACCMODE != OFlags::WRONLY && !flags.contains(OFlags::APPEND)
}

/// Whether a file opened with these flags can be shared with other opens that use the same flags.
fn is_shareable(flags: u32) -> bool {
    let flags = OFlags::from_bits_retain(flags);
    may_cache(flags.bits()) && flags & OFlags::ACCMODE == OFlags::RDONLY && !flags.contains(OFlags::TRUNC)
}
