//! The tree's FUSE operations.

use crate::inode::{Dir, Inode};
use crate::procfs;
use crate::tree::{Outcome, Tree, error, file_type, inode};
use fuser::{
    BsdFileFlags, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Nothing is cached by the kernel.
const TTL: Duration = Duration::ZERO;

/// Replies EPERM. The kernel checks permissions of files; no user may perform these operations.
macro_rules! deny {
    ($reply:ident) => {
        $reply.error(error(Errno::PERM))
    };
}

impl Filesystem for Tree {
    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let result = inode(parent).and_then(|parent| self.lookup_entry(parent, name)).and_then(Self::attr);
        match result {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn getattr(&self, _request: &Request, number: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match inode(number).and_then(Self::attr) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        _size: Option<u64>,
        _read: Option<TimeOrNow>,
        _written: Option<TimeOrNow>,
        _changed: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _born: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // The shell's `>` truncates a file before it writes. The size of these files is always 0,
        // so there is nothing to do.
        let allowed =
            if mode.is_some() || uid.is_some() || gid.is_some() { Err(Errno::PERM) } else { Ok(()) };
        match allowed.and_then(|()| inode(number)).and_then(Self::attr) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn readlink(&self, request: &Request, number: INodeNo, reply: ReplyData) {
        match (inode(number), procfs::process_of(request.pid())) {
            (Ok(Inode { dir: Dir::SelfLink, .. }), Some(pid)) => reply.data(pid.to_string().as_bytes()),
            (Ok(Inode { dir: Dir::SelfLink, .. }), None) => reply.error(error(Errno::NOENT)),
            _ => reply.error(error(Errno::INVAL)),
        }
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.open_file(request, number, flags) {
            Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::FOPEN_DIRECT_IO),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn read(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        at: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.read_at(handle, at, size) {
            Ok(data) => reply.data(&data),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn write(
        &self,
        request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        _at: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.write_to(request, handle, data, reply);
    }

    fn flush(&self, _request: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _request: &Request, _: INodeNo, _: FileHandle, _data_only: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.close(handle);
        reply.ok();
    }

    fn readdir(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        after: u64,
        mut reply: ReplyDirectory,
    ) {
        let list = |reply: &mut ReplyDirectory| {
            let dir = inode(number)?;
            let dots = [".", ".."].into_iter().zip(1..).map(|(name, cookie)| (cookie, dir, name.to_owned()));
            let entries = dots.chain(self.entries(dir)?);
            for (cookie, entry, name) in entries.filter(|(cookie, ..)| *cookie > after) {
                if reply.add(INodeNo(entry.number()), cookie, file_type(entry), name) {
                    break;
                }
            }
            Outcome::Ok(())
        };
        match list(&mut reply) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn statfs(&self, _request: &Request, _number: INodeNo, reply: ReplyStatfs) {
        reply.statfs(0, 0, 0, 0, 0, 4096, 255, 4096);
    }

    fn create(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        // As in /proc: ENOENT for a name that can never exist.
        reply.error(error(Errno::NOENT));
    }

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        deny!(reply);
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        deny!(reply);
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        deny!(reply);
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        deny!(reply);
    }

    fn symlink(&self, _: &Request, _: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        deny!(reply);
    }

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(error(Errno::NOTSUP));
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(error(Errno::NOTSUP));
    }
}
