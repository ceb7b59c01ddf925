//! FUSE_SETATTR: mode, owner, times and length.

use crate::client::fuse::attributes::file_attr;
use crate::client::fuse::calls::{FsResult, MountedTree};
use crate::client::fuse::handle::Handle;
use crate::client::fuse::inode::Inode;
use crate::message::{AttributeChange, Attributes, FileReply, Op};
use fuser::{FileAttr, FileHandle, INodeNo, Request};
use rustix::io::Errno;
use std::sync::Arc;
use tern_ids::Credentials;

impl MountedTree {
    pub(crate) fn set_attributes(
        &self,
        request: &Request,
        number: INodeNo,
        handle: Option<FileHandle>,
        change: &AttributeChange,
    ) -> FsResult<FileAttr> {
        let inode = self.inode(number)?;
        let caller = self.caller(request);
        let handle = handle.and_then(|handle| self.handle(handle).ok());
        inode.creates.note_permission_change();
        let set = self.set_attributes_as(request, &inode, &caller, handle.as_deref(), change);
        inode.creates.note_permission_change();
        let attributes = set?;
        // The kernel takes the new size from this reply. Its pages are revalidated before they are
        // used.
        inode.pages.forget_version();
        Ok(file_attr(&inode, &attributes))
    }

    fn set_attributes_as(
        &self,
        request: &Request,
        inode: &Arc<Inode>,
        caller: &Credentials,
        handle: Option<&Handle>,
        change: &AttributeChange,
    ) -> FsResult<Attributes> {
        match handle {
            // With this request `call_without_path` looks the object up again, if the server has
            // lost both the object and the open file.
            Some(handle) if change.size.is_some() => {
                self.0.call_without_path(inode, caller, &[], |of| Op::GetAttr { of })?;
                let op =
                    |opened| Op::SetAttr { of: inode.object(), opened: Some(opened), change: change.clone() };
                attributes_of(&self.0.call_on_open(handle, caller, &[], op)?.reply)
            }
            _ => {
                let op = |of| Op::SetAttr { of, opened: None, change: change.clone() };
                attributes_of(&self.call_by_path_or_handle(request, inode, caller, &[], op)?.reply)
            }
        }
    }
}

fn attributes_of(reply: &FileReply) -> FsResult<Attributes> {
    if let FileReply::Attributes(attributes) = reply { Ok(*attributes) } else { Err(Errno::IO) }
}
