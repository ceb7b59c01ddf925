//! What the kernel asks of the tree, and the answers.

use crate::item::{Item, Whose};
use crate::tasks;
use crate::tree::{Outcome, Tree, error, item, kind};
use fuser::{
    BsdFileFlags, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The kernel asks each time.
const TTL: Duration = Duration::ZERO;

/// Whether somebody may do this to a file is for the kernel to look at; these are for nobody.
macro_rules! never {
    ($reply:ident) => {
        $reply.error(error(Errno::PERM))
    };
}

impl Filesystem for Tree {
    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = item(parent).and_then(|parent| self.find(parent, name)).and_then(Self::attr);
        match found {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn getattr(&self, _request: &Request, number: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match item(number).and_then(Self::attr) {
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
        // `>` makes a file empty before it writes, which these always are.
        let may = if mode.is_some() || uid.is_some() || gid.is_some() { Err(Errno::PERM) } else { Ok(()) };
        match may.and_then(|()| item(number)).and_then(Self::attr) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn readlink(&self, request: &Request, number: INodeNo, reply: ReplyData) {
        match (item(number), tasks::process_of(request.pid())) {
            (Ok(Item { whose: Whose::Me, .. }), Some(pid)) => reply.data(pid.to_string().as_bytes()),
            (Ok(Item { whose: Whose::Me, .. }), None) => reply.error(error(Errno::NOENT)),
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
        self.written(request, handle, data, reply);
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
            let own = item(number)?;
            let dots = [".", ".."].into_iter().zip(1..).map(|(name, place)| (place, own, name.to_owned()));
            let all = dots.chain(self.entries(own)?);
            for (place, entry, name) in all.filter(|(place, ..)| *place > after) {
                if reply.add(INodeNo(entry.number()), place, kind(entry), name) {
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
        // As in /proc: there is no such file, and there will be none.
        reply.error(error(Errno::NOENT));
    }

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        never!(reply);
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        never!(reply);
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        never!(reply);
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        never!(reply);
    }

    fn symlink(&self, _: &Request, _: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        never!(reply);
    }

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(error(Errno::NOTSUP));
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(error(Errno::NOTSUP));
    }
}
