//! Opening files, and closing them.

use super::belief::{Before, Version};
use super::calls::{Mounted, Outcome};
use super::handle::Handle;
use super::inode::Inode;
use super::lasting::Kept;
use super::told::{Named, Open};
use crate::lock;
use crate::message::{Answer, Attributes, Caller, Deed, Release};
use fuser::{FileHandle, INodeNo, Request};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Mounted {
    pub(crate) fn open_file(&self, request: &Request, number: INodeNo, flags: u32) -> Outcome<Open> {
        let who = self.who(request);
        let inode = self.inode(number)?;
        let truncates = OFlags::from_bits_retain(flags).contains(OFlags::TRUNC);
        // What is cut off by this is another one than before; and must be mapped as ever.
        let before = if truncates { Before::asking(&inode.peer) } else { Before::of(&inode) };
        let (writes, locks) = (inode.unsaved.writes(), inode.locks());
        let content = reads(flags) && !inode.content.is_known();
        let deed = |of| Deed::Open { of, flags, content };
        let asks = self.0.refused.goes_again(request.pid(), &[&inode]);
        if !asks && let Some(open) = self.open_kept(request.pid(), &inode, &who, flags) {
            return Ok(open);
        }
        let heard = self.0.at_end(request.pid(), &inode, &who, &[], deed)?;
        let Answer::Opened(opened, is) = heard.answer else { return Err(Errno::IO) };
        if !asks && !truncates && inode.is_believed_to_differ(Version::seen(&is)) {
            // To an open the kernel cannot be told what the file is like; so it is to look it up again.
            inode.peer.owed.release(Release::File(opened), false);
            self.0.refused.at_end(request.pid());
            return Err(Errno::STALE);
        }
        self.0.made(request.pid(), &inode);
        inode.has_extended(&is, &before);
        inode.lasting.is(&inode.peer, &is, &before);
        if is.lasts && FileType::from_raw_mode(is.mode) == FileType::RegularFile {
            self.0.pins.hold(&inode);
        }
        let stays = is.lasts && only_reads(flags);
        let kept = if stays { Kept::new(&inode.peer, &who, flags, opened, heard.boot) } else { None };
        let handle = match kept {
            Some(kept) => {
                inode.lasting.opens(&inode.peer, &before, &kept);
                Handle::kept(inode, who, flags, kept)
            }
            None => Handle::new(inode, who, flags, opened, heard.boot),
        };
        // All of it, and not of nothing: that is not asked for.
        if content && is.lease > 0 && is.size > 0 && heard.data().len() as u64 == is.size {
            handle.has_early(heard, before.clone(), is.lease, (writes, locks));
        }
        Ok(self.opened(handle, is, before, Named::Anew))
    }

    pub(crate) fn opened(&self, handle: Handle, is: Attributes, before: Before, name: Named) -> Open {
        let (inode, keeps) = (handle.inode.clone(), reads(handle.flags) && is.lease > 0);
        let is_unflushed = handle.is_unflushed;
        let handle = self.0.handles.keep(handle);
        Open { handle, inode, is, keeps, is_unflushed, before, name }
    }

    /// Opens what is left open, without asking for it.
    fn open_kept(&self, tid: u32, inode: &Arc<Inode>, who: &Caller, flags: u32) -> Option<Open> {
        let before = inode.peer.believes(&[inode])?;
        let (is, kept) = inode.lasting.opened(&inode.peer, who, flags)?;
        if inode.is_believed_to_differ(Version::seen(&is)) {
            return None;
        }
        self.0.made(tid, inode);
        if FileType::from_raw_mode(is.mode) == FileType::RegularFile {
            self.0.pins.hold(inode);
        }
        let handle = Handle::kept(inode.clone(), who.clone(), flags, kept);
        Some(self.opened(handle, is, before, Named::Anew))
    }

    pub(crate) fn close(&self, number: FileHandle) {
        let Some(handle) = self.0.handles.remove(number.0) else { return };
        self.may_be_mapped(&handle);
        self.drop_ahead(&handle, &mut lock(&handle.ahead));
        if lock(&handle.kept).is_some() {
            return;
        }
        let mut soon = OFlags::from_bits_retain(handle.flags) & OFlags::ACCMODE != OFlags::RDONLY;
        soon |= handle.is_locked.load(Ordering::Acquire);
        handle.inode.peer.owed.release(Release::File(handle.opened()), soon);
    }
}

/// Whether the kernel may keep of what is opened so: what is only written, or appended to, is never kept.
fn reads(flags: u32) -> bool {
    let flags = OFlags::from_bits_retain(flags);
    flags & OFlags::ACCMODE != OFlags::WRONLY && !flags.contains(OFlags::APPEND)
}

/// Whether what is opened so can be shared with others who open it so.
fn only_reads(flags: u32) -> bool {
    let flags = OFlags::from_bits_retain(flags);
    reads(flags.bits()) && flags & OFlags::ACCMODE == OFlags::RDONLY && !flags.contains(OFlags::TRUNC)
}
