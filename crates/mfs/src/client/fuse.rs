//! The FUSE requests of a mounted tree, and the replies.

pub(crate) mod attributes;
pub(crate) mod calls;
pub(crate) mod entry_reply;
pub(crate) mod handle;
pub(crate) mod inode;
pub(crate) mod interrupts;
pub(crate) mod locks;
pub(crate) mod namespace;
pub(crate) mod open;
pub(crate) mod readdir;
pub(crate) mod setattr;

use crate::client::fuse::attributes::set_time;
use crate::client::fuse::calls::{MountedTree, ROOT, is_synthetic};
use crate::client::fuse::entry_reply::EntryReply;
use crate::client::fuse::inode::Inode;
use crate::client::fuse::readdir::attributes_without_lookup;
use crate::message::{AttributeChange, FileReply, MAX_DATA, Name, Op, OpenId, XattrKinds};
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, RequestId, TimeOrNow, WriteFlags,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

/// TTL of values that are under no lease.
const TTL: Duration = Duration::ZERO;

/// The extended attribute by which a deputy asks whether a guest may open files of this tree
/// directly (`crates/image/src/node_file.rs`). The kernel lets every user read attributes in the
/// `system` namespace.
const DFSA: &str = "system.mfs_dfsa";

/// Converts an error number to fuser's type.
fn error(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.raw_os_error())
}

/// Sends the result, or the error.
macro_rules! respond {
    ($reply:ident, $outcome:expr, |$value:pat_param| $done:expr) => {
        match $outcome {
            Ok($value) => $done,
            Err(errno) => $reply.error(error(errno)),
        }
    };
}

fn send_xattr(reply: ReplyXattr, size: u32, value: &[u8]) {
    match u32::try_from(value.len()) {
        Ok(length) if size == 0 => reply.size(length),
        Ok(length) if length <= size => reply.data(value),
        _ => reply.error(error(Errno::RANGE)),
    }
}

/// Sends an entry reply.
fn send_entry(reply: ReplyEntry, entry: &EntryReply) {
    entry.deliver(|ttl, name| reply.entry_with_ttls(&ttl, &name, &entry.attr, entry.generation));
}

/// How late to reply to FUSE_GETATTR. Set by tests, so that recalls come first.
fn late_attributes() -> Option<Duration> {
    static DELAY: OnceLock<Option<Duration>> = OnceLock::new();
    *DELAY.get_or_init(|| {
        let delay = std::env::var("TERN_LATE_ATTRIBUTES").ok()?;
        delay.parse().ok().map(Duration::from_millis)
    })
}

/// Maximum number of background requests (readahead) of the kernel in flight: more than the
/// connections to one node, and fewer than the threads, so that an unresponsive node leaves
/// background requests and threads for other nodes.
const MAX_BACKGROUND: u16 = 48;

impl Filesystem for MountedTree {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let max_data = u32::try_from(MAX_DATA).unwrap_or(u32::MAX);
        // Without a capability, or with a smaller limit, the kernel uses other requests.
        let _smaller = config.set_max_write(max_data);
        let _smaller = config.set_max_readahead(max_data);
        let _smaller = config.set_max_background(MAX_BACKGROUND);
        for flag in [
            InitFlags::FUSE_POSIX_LOCKS,
            InitFlags::FUSE_FLOCK_LOCKS,
            // The umask does not apply where there is a default access list, which only the server
            // knows.
            InitFlags::FUSE_DONT_MASK,
            // The kernel revalidates expired attributes before it reads cached pages, and drops the
            // pages if mtime or size have changed.
            InitFlags::FUSE_AUTO_INVAL_DATA,
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_PARALLEL_DIROPS,
            // All directory reads are FUSE_READDIRPLUS then.
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_ASYNC_DIO,
            // The server's kernel clears set-user-ID bits and capabilities, since the server writes
            // as the caller. With the second flag the kernel need not check before each write
            // whether there are any.
            InitFlags::FUSE_HANDLE_KILLPRIV,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        ] {
            let _not_offered = config.add_capabilities(flag);
        }
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        respond!(reply, self.look_up(request, parent, name), |entry| send_entry(reply, &entry));
    }

    fn forget(&self, _request: &Request, number: INodeNo, count: u64) {
        self.0.inodes.forget(number.0, count);
    }

    fn getattr(&self, request: &Request, number: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        // The kernel passes a handle only before a read and for SEEK_END, not for stat(2) and
        // fstat(2).
        respond!(reply, self.attributes(request, number, handle.is_some()), |attributes| {
            late_attributes().into_iter().for_each(std::thread::sleep);
            attributes.deliver(|ttl, _| reply.attr(&ttl, &attributes.attr));
        });
    }

    fn setattr(
        &self,
        request: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let (atime, mtime) = (atime.map(set_time), mtime.map(set_time));
        let change = AttributeChange { mode: mode.map(|mode| mode & 0o7777), uid, gid, size, atime, mtime };
        respond!(reply, self.set_attributes(request, number, handle, &change), |attr| reply
            .attr(&TTL, &attr));
    }

    fn readlink(&self, request: &Request, number: INodeNo, reply: ReplyData) {
        respond!(reply, self.link_target(request, number), |target| reply.data(&target));
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _device: u32,
        reply: ReplyEntry,
    ) {
        let made =
            self.create_object(request, parent, name, |dir, name| Op::Mknod { dir, name, mode, umask });
        respond!(reply, made, |entry| send_entry(reply, &entry));
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let made =
            self.create_object(request, parent, name, |dir, name| Op::Mkdir { dir, name, mode, umask });
        respond!(reply, made, |entry| send_entry(reply, &entry));
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed =
            self.remove_name(request, parent, name, |dir| Op::Unlink { dir, name: Name::from(name) });
        respond!(reply, removed, |()| reply.ok());
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed =
            self.remove_name(request, parent, name, |dir| Op::Rmdir { dir, name: Name::from(name) });
        respond!(reply, removed, |()| reply.ok());
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let target = Name::from(target.as_os_str());
        let op = |dir, name| Op::Symlink { dir, name, target: target.clone() };
        respond!(reply, self.create_object(request, parent, name, op), |entry| send_entry(reply, &entry));
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        to: INodeNo,
        new: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let renamed = self.rename_name(request, (parent, name), (to, new), flags);
        respond!(reply, renamed, |()| reply.ok());
    }

    fn link(&self, request: &Request, number: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let linked = self.add_name(request, number, parent, name);
        respond!(reply, linked, |entry| send_entry(reply, &entry));
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.open_file(request, number, flags.0.cast_unsigned());
        respond!(reply, opened, |open| {
            let handle = FileHandle(open.handle);
            open.deliver(|flags, _| reply.opened(handle, flags));
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let flags = flags.cast_unsigned();
        let created = self.create_file(request, parent, name, (mode, umask), flags);
        respond!(reply, created, |(attr, generation, open)| {
            let handle = FileHandle(open.handle);
            open.deliver(|flags, ttl| reply.created(&ttl, &attr, generation, handle, flags));
        });
    }

    fn read(
        &self,
        request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        at: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        respond!(reply, self.read_at(request, handle, at, size), |read| reply.data(read.data()));
    }

    fn write(
        &self,
        request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        at: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        respond!(reply, self.write_at(request, handle, at, data), |count| reply.written(count));
    }

    fn flush(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // All writes have their replies already, so only locks have to be released.
        respond!(reply, self.handle(handle), |handle| {
            handle.inode.release_locks_of(owner.0);
            reply.ok();
        });
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

    fn fsync(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        respond!(reply, self.sync(handle, data_only), |()| reply.ok());
    }

    fn opendir(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if number.0 == ROOT {
            reply.opened(FileHandle(0), FopenFlags::empty());
            return;
        }
        let opened = self.open_file(request, number, flags.0.cast_unsigned());
        respond!(reply, opened, |open| reply.opened(FileHandle(open.handle), FopenFlags::empty()));
    }

    fn readdirplus(
        &self,
        _request: &Request,
        number: INodeNo,
        handle: FileHandle,
        after: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        if number.0 == ROOT {
            self.list_root(after, |number, next, kind, name| {
                let attr = attributes_without_lookup(number, kind);
                reply.add(INodeNo(0), next, name, &TTL, &attr, Generation(0))
            });
            reply.ok();
            return;
        }
        if let Err((reply, errno)) = self.read_directory_plus(handle, after, reply) {
            reply.error(error(errno));
        }
    }

    fn releasedir(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.close(handle);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        number: INodeNo,
        handle: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        if number.0 == ROOT {
            respond!(reply, self.0.renew_all_leases(), |()| reply.ok());
            return;
        }
        respond!(reply, self.sync(handle, data_only), |()| reply.ok());
    }

    fn statfs(&self, request: &Request, number: INodeNo, reply: ReplyStatfs) {
        if is_synthetic(number) {
            reply.statfs(0, 0, 0, 0, 0, 4096, 255, 4096);
            return;
        }
        let space = self.inode(number).and_then(|inode| {
            let response =
                self.0.call_without_path(&inode, &self.caller(request), &[], |of| Op::StatFs { of })?;
            if let FileReply::FsStats(stats) = response.reply { Ok(stats) } else { Err(Errno::IO) }
        });
        respond!(reply, space, |s| reply.statfs(
            s.blocks,
            s.free,
            s.available,
            s.files,
            s.files_free,
            s.block_size,
            s.name_length,
            s.fragment_size,
        ));
    }

    fn setxattr(
        &self,
        request: &Request,
        number: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let flags = flags.cast_unsigned();
        let set = self.inode(number).and_then(|inode| {
            let op = |of| Op::SetXattr { of, name: Name::from(name), flags };
            inode.note_xattr_change();
            inode.creates.note_permission_change();
            let set =
                self.call_by_path_or_handle(request, &inode, &self.caller(request), value, op).map(drop);
            inode.note_xattr_change();
            self.note_acl_change(&inode, name);
            set
        });
        respond!(reply, set, |()| reply.ok());
    }

    fn getxattr(&self, request: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        if name == DFSA {
            send_xattr(reply, size, if self.0.dfsa { b"1" } else { b"0" });
            return;
        }
        if self.inode(number).is_ok_and(|inode| !inode.xattr_kinds().may_have(name)) {
            reply.error(error(Errno::NODATA));
            return;
        }
        let op = |of| Op::GetXattr { of, name: Name::from(name) };
        respond!(reply, self.read_xattr(request, number, op), |value| send_xattr(reply, size, &value));
    }

    fn listxattr(&self, request: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        // Root may see more attributes than those cached.
        let none = |inode: Arc<Inode>| request.uid() != 0 && inode.xattr_kinds() == XattrKinds::NONE;
        if self.inode(number).is_ok_and(none) {
            send_xattr(reply, size, &[]);
            return;
        }
        let names = self.read_xattr(request, number, |of| Op::ListXattr { of });
        respond!(reply, names, |names| send_xattr(reply, size, &names));
    }

    fn removexattr(&self, request: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.inode(number).and_then(|inode| {
            let op = |of| Op::RemoveXattr { of, name: Name::from(name) };
            inode.creates.note_permission_change();
            let removed = self.call_by_path_or_handle(request, &inode, &self.caller(request), &[], op);
            self.note_acl_change(&inode, name);
            removed
        });
        respond!(reply, removed, |_| reply.ok());
    }

    fn getlk(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        _pid: u32,
        reply: ReplyLock,
    ) {
        let tested =
            self.handle(handle).and_then(|handle| locks::test(&self.0, &handle, owner.0, (start, end), kind));
        respond!(reply, tested, |(start, end, kind)| reply.locked(start, end, kind, 0));
    }

    fn setlk(
        &self,
        request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        _pid: u32,
        sleep: bool,
        flock: bool,
        reply: ReplyEmpty,
    ) {
        let lock = locks::LockRequest {
            owner: owner.0,
            range: (start, end),
            raw_kind: kind,
            tid: request.pid(),
            is_flock: flock,
        };
        let waiter = sleep.then(|| self.0.interrupts.waiter(request.unique().0));
        match self.handle(handle) {
            Ok(handle) => locks::set(&self.0, handle, &lock, waiter, reply),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn interrupt(&self, _request: &Request, unique: RequestId) {
        self.0.interrupts.interrupt(unique.0);
    }

    fn fallocate(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        at: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let mode = mode.cast_unsigned();
        let done = self.handle(handle).and_then(|handle| {
            let op = |opened| Op::Fallocate { opened, mode, at, length };
            self.0.call_on_open(&handle, &handle.opener, &[], op).map(drop)
        });
        respond!(reply, done, |()| reply.ok());
    }

    fn lseek(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        at: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let seek = self.handle(handle).and_then(|handle| {
            let at = u64::try_from(at).map_err(|_negative| Errno::NXIO)?;
            let op = |opened: OpenId| Op::Lseek { opened, at, data: whence == libc::SEEK_DATA };
            match self.0.call_on_open(&handle, &handle.opener, &[], op)?.reply {
                FileReply::Count(place) => Ok(place.cast_signed()),
                _ => Err(Errno::IO),
            }
        });
        respond!(reply, seek, |place| reply.offset(place));
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _number: INodeNo,
        from: FileHandle,
        at: u64,
        _to_number: INodeNo,
        to: FileHandle,
        to_at: u64,
        length: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        respond!(reply, self.copy(request, (from, at), (to, to_at), length), |count| reply.written(count));
    }

    fn ioctl(
        &self,
        _request: &Request,
        _number: INodeNo,
        _handle: FileHandle,
        _flags: IoctlFlags,
        _command: u32,
        _data: &[u8],
        _size: u32,
        reply: ReplyIoctl,
    ) {
        // Most callers check whether the file is a terminal.
        reply.error(error(Errno::NOTTY));
    }
}
