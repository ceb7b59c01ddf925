//! Operations that change a directory: creating, linking, renaming and removing names.

use crate::client::cache::validity::ValidityStamp;
use crate::client::fuse::attributes::file_attr;
use crate::client::fuse::calls::{FsResult, MountedTree};
use crate::client::fuse::entry_reply::{EntryReply, OpenedFile};
use crate::client::fuse::handle::Handle;
use crate::client::tree::Via;
use crate::message::{FileReply, Name, Object, Op};
use fuser::{FileAttr, Generation, INodeNo, RenameFlags, Request};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::ffi::OsStr;

impl MountedTree {
    /// Creates a directory, a symbolic link or a special file.
    pub(crate) fn create_object(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        op: impl Fn(Object, Name) -> Op,
    ) -> FsResult<EntryReply> {
        let dir = self.inode(parent)?;
        let stamp = ValidityStamp::now(&dir.peer);
        let op = |object| op(object, Name::from(name));
        let response = self.0.call_at_path_end(request.pid(), &dir, &self.caller(request), &[], op)?;
        if let FileReply::Found(_, dir_attributes) = &response.reply {
            dir.cache_after_change(*dir_attributes, stamp.clone());
        }
        self.found_reply(&dir, name, &response.reply, stamp)
    }

    /// Creates a file, or opens an existing one, as FUSE_CREATE asks for.
    pub(crate) fn create_file(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        (mode, umask): (u32, u32),
        flags: u32,
    ) -> FsResult<(FileAttr, Generation, OpenedFile)> {
        let (dir, caller) = (self.inode(parent)?, self.caller(request));
        let (stamp, permission_count) = (ValidityStamp::now(&dir.peer), dir.creates.permission_count());
        let op = |dir| Op::Create { dir, name: Name::from(name), mode, umask, flags };
        let response = self.0.call_at_path_end(request.pid(), &dir, &caller, &[], op)?;
        let FileReply::Created(found, opened, dir_attributes) = response.reply else {
            return Err(Errno::IO);
        };
        dir.cache_after_change(dir_attributes, stamp.clone());
        dir.creates.note_create(
            request.pid(),
            caller.clone(),
            stamp.clone(),
            dir_attributes.lease,
            permission_count,
        );
        let inode = self.add_lookup(&dir, name, &found);
        self.0.note_created(request.pid(), &inode);
        if OFlags::from_bits_retain(flags).contains(OFlags::TRUNC) {
            // An existing file was truncated, or a new one created.
            inode.unsynced.note_write(response.boot);
            inode.note_local_change();
        }
        inode.cache_xattr_kinds(&found.attributes, &stamp);
        let dentry = self.dentry_for(&dir, name, &inode, &found, dir_attributes.lease, &stamp);
        let (attr, generation) = (file_attr(&inode, &found.attributes), Generation(inode.generation()));
        let handle = Handle::new(inode, caller, flags, opened, response.boot);
        Ok((attr, generation, self.add_handle(handle, found.attributes, stamp, dentry)))
    }

    /// Adds a name to an existing file.
    pub(crate) fn add_name(
        &self,
        request: &Request,
        number: INodeNo,
        parent: INodeNo,
        name: &OsStr,
    ) -> FsResult<EntryReply> {
        let (of, dir) = (self.inode(number)?, self.inode(parent)?);
        let op = |both: &[Object]| Op::Link { of: both[0], dir: both[1], name: Name::from(name) };
        let stamp = ValidityStamp::now(&dir.peer);
        let via = Via::Path(request.pid());
        let response = self.0.call_on_all(via, &[&of, &dir], &self.caller(request), &[], op)?;
        self.found_reply(&dir, name, &response.reply, stamp)
    }

    pub(crate) fn rename_name(
        &self,
        request: &Request,
        (parent, name): (INodeNo, &OsStr),
        (to, new): (INodeNo, &OsStr),
        flags: RenameFlags,
    ) -> FsResult<()> {
        let (from, to) = (self.inode(parent)?, self.inode(to)?);
        let op = |dirs: &[Object]| Op::Rename {
            dir: dirs[0],
            name: Name::from(name),
            to: dirs[1],
            new: Name::from(new),
            flags: flags.bits(),
        };
        let (via, stamp) = (Via::Path(request.pid()), ValidityStamp::now(&from.peer));
        let response = self.0.call_on_all(via, &[&from, &to], &self.caller(request), &[], op)?;
        // The kernel moves the old dentry, with its TTL, to the new name. If a program at the
        // node uses these names too, it is not known to which file that dentry refers now.
        self.0.invalidator.invalidate_dentries();
        if !flags.contains(RenameFlags::RENAME_EXCHANGE) {
            from.creates.note_removal(name);
        }
        to.creates.note_name(new);
        if let FileReply::Renamed { moved, exchanged, replaced, dirs } = response.reply {
            self.0.inodes.rename(moved, (&from, name), (&to, new));
            self.0.inodes.rename(exchanged, (&to, new), (&from, name));
            for key in [moved, exchanged, replaced].into_iter().flatten() {
                self.0
                    .inodes
                    .of_file(to.node(), &key)
                    .iter()
                    .for_each(|inode| inode.renewable_cache.note_local_change());
            }
            for (dir, attributes) in [&from, &to].into_iter().zip(dirs) {
                dir.cache_after_change(attributes, stamp.clone());
            }
        }
        Ok(())
    }

    pub(crate) fn remove_name(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        op: impl Fn(Object) -> Op,
    ) -> FsResult<()> {
        let dir = self.inode(parent)?;
        let stamp = ValidityStamp::now(&dir.peer);
        let response = self.0.call_at_path_end(request.pid(), &dir, &self.caller(request), &[], op)?;
        dir.creates.note_removal(name);
        if let FileReply::Removed { removed, dir: attributes } = response.reply {
            dir.cache_after_change(attributes, stamp);
            for inode in removed.into_iter().flat_map(|key| self.0.inodes.of_file(dir.node(), &key)) {
                inode.renewable_cache.note_local_change();
                inode.dentries.remove(&dir, name);
            }
        }
        Ok(())
    }
}
