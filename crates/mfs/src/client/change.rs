//! What is changed of a file but its content: mode, owner, times and length.

use super::attributes::file;
use super::calls::{Mounted, Outcome};
use super::handle::Handle;
use super::inode::Inode;
use crate::message::{Answer, Attributes, Caller, Change, Deed};
use fuser::{FileAttr, FileHandle, INodeNo, Request};
use rustix::io::Errno;
use std::sync::Arc;

impl Mounted {
    pub(crate) fn set(
        &self,
        request: &Request,
        number: INodeNo,
        handle: Option<FileHandle>,
        change: &Change,
    ) -> Outcome<FileAttr> {
        let inode = self.inode(number)?;
        let who = self.who(request);
        let handle = handle.and_then(|handle| self.handle(handle).ok());
        inode.maker.rights_change();
        let set = self.set_as(request, &inode, &who, handle.as_deref(), change);
        inode.maker.rights_change();
        let is = set?;
        // The kernel sets its own size by it, and looks again before it believes anything else.
        inode.content.doubt();
        Ok(file(&inode, &is))
    }

    fn set_as(
        &self,
        request: &Request,
        inode: &Arc<Inode>,
        who: &Caller,
        handle: Option<&Handle>,
        change: &Change,
    ) -> Outcome<Attributes> {
        match handle {
            // The file's own object is found again on the way, if the server has forgotten both.
            Some(handle) if change.size.is_some() => {
                self.0.with(inode, who, &[], |of| Deed::Stat { of })?;
                let deed =
                    |opened| Deed::Set { of: inode.object(), opened: Some(opened), change: change.clone() };
                attributes_in(&self.0.with_open(handle, who, &[], deed)?.answer)
            }
            _ => {
                let deed = |of| Deed::Set { of, opened: None, change: change.clone() };
                attributes_in(&self.by_hand_or_path(request, inode, who, &[], deed)?.answer)
            }
        }
    }
}

fn attributes_in(answer: &Answer) -> Outcome<Attributes> {
    if let Answer::Attributes(attributes) = answer { Ok(*attributes) } else { Err(Errno::IO) }
}
