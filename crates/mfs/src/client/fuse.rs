//! What the kernel asks of a mounted tree, and the answers.

use super::attributes::{file, set_time};
use super::belief::Before;
use super::calls::{Mounted, ROOT, is_ours};
use super::handle::Handle;
use super::inode::Inode;
use super::listing::not_looked_up;
use super::locks;
use super::told::Told;
use super::tree::By;
use crate::mapped::Mapped;
use crate::message::{Answer, Change, Deed, Extended, MOST_DATA, Name, Opened};
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, RequestId, TimeOrNow, WriteFlags,
};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// How long the kernel may believe what is not under a lease.
const TTL: Duration = Duration::ZERO;

/// The attribute by which a deputy asks whether a guest may have files of this tree open itself (`deputy/place.rs`). The
/// kernel lets everybody read one of that kind.
const DFSA: &str = "system.mfs_dfsa";

/// What the kernel looks for when a file is executed or written.
const CAPABILITY: &str = "security.capability";

/// fuser's error of ours.
fn error(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.raw_os_error())
}

/// Answers with what was found out, or the error.
macro_rules! answer {
    ($reply:ident, $outcome:expr, |$value:pat_param| $done:expr) => {
        match $outcome {
            Ok($value) => $done,
            Err(errno) => $reply.error(error(errno)),
        }
    };
}

fn sized(reply: ReplyXattr, size: u32, value: &[u8]) {
    match u32::try_from(value.len()) {
        Ok(length) if size == 0 => reply.size(length),
        Ok(length) if length <= size => reply.data(value),
        _ => reply.error(error(Errno::RANGE)),
    }
}

/// Tells the kernel what has a name.
fn entry(reply: ReplyEntry, told: &Told) {
    told.pass(|ttl, name| reply.entry_with_ttls(&ttl, &name, &told.attr, told.generation));
}

/// The most reads that the kernel has under way: more than one node has lanes, and fewer than there are threads, so that one that does not answer
/// keeps neither.
const MOST_AHEAD: u16 = 48;

impl Filesystem for Mounted {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let most = u32::try_from(MOST_DATA).unwrap_or(u32::MAX);
        // What the kernel does not offer it does in another way.
        let _smaller = config.set_max_write(most);
        let _smaller = config.set_max_readahead(most);
        let _smaller = config.set_max_background(MOST_AHEAD);
        for wish in [
            InitFlags::FUSE_POSIX_LOCKS,
            InitFlags::FUSE_FLOCK_LOCKS,
            // It counts where no default access list does, which the server knows.
            InitFlags::FUSE_DONT_MASK,
            // Before each read from its own memory it asks again what has run out, and forgets what has changed.
            InitFlags::FUSE_AUTO_INVAL_DATA,
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_PARALLEL_DIROPS,
            // Then it asks in no other way for what is in a directory.
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_ASYNC_DIO,
            // The server does that as the caller; with the second the kernel need not ask before each write whether it is to be done.
            InitFlags::FUSE_HANDLE_KILLPRIV,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        ] {
            let _not_offered = config.add_capabilities(wish);
        }
        // Tests want to see what is done without it.
        let passes = std::env::var_os("TERN_NO_PASSTHROUGH").is_none()
            && rustix::process::geteuid().is_root()
            && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(1).is_ok();
        if passes && let Ok(mapped) = Mapped::look_after() {
            let _once = self.0.mapped.set(mapped);
        }
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        answer!(reply, self.look(request, parent, name), |told| entry(reply, &told));
    }

    fn forget(&self, _request: &Request, number: INodeNo, count: u64) {
        self.0.inodes.forget(number.0, count);
    }

    fn getattr(&self, request: &Request, number: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        // stat and fstat come without one; only what looks before it reads says it.
        answer!(reply, self.attributes(request, number, handle.is_some()), |told| {
            told.pass(|ttl, _| reply.attr(&ttl, &told.attr));
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
        read: Option<TimeOrNow>,
        written: Option<TimeOrNow>,
        _changed: Option<SystemTime>,
        handle: Option<FileHandle>,
        _born: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let (read, written) = (read.map(set_time), written.map(set_time));
        let change = Change { mode: mode.map(|mode| mode & 0o7777), uid, gid, size, read, written };
        answer!(reply, self.set(request, number, handle, &change), |attr| reply.attr(&TTL, &attr));
    }

    fn readlink(&self, request: &Request, number: INodeNo, reply: ReplyData) {
        answer!(reply, self.link_target(request, number), |target| reply.data(&target));
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
        let made = self.make(request, parent, name, |dir, name| Deed::MakeNode { dir, name, mode, umask });
        answer!(reply, made, |told| entry(reply, &told));
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
        let made = self.make(request, parent, name, |dir, name| Deed::MakeDir { dir, name, mode, umask });
        answer!(reply, made, |told| entry(reply, &told));
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.remove(request, parent, name, |dir| Deed::Unlink { dir, name: Name::from(name) });
        answer!(reply, removed, |()| reply.ok());
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed =
            self.remove(request, parent, name, |dir| Deed::RemoveDir { dir, name: Name::from(name) });
        answer!(reply, removed, |()| reply.ok());
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let target = Name::from(target.as_os_str());
        let deed = |dir, name| Deed::MakeLink { dir, name, target: target.clone() };
        answer!(reply, self.make(request, parent, name, deed), |told| entry(reply, &told));
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
        let rename = || {
            let (from, to) = (self.inode(parent)?, self.inode(to)?);
            let deed = |dirs: &[crate::message::Object]| Deed::Rename {
                dir: dirs[0],
                name: Name::from(name),
                to: dirs[1],
                new: Name::from(new),
                flags: flags.bits(),
            };
            let (by, before) = (By::Path(request.pid()), Before::asking(&from.peer));
            let heard = self.0.with_all(by, &[&from, &to], &self.who(request), &[], deed)?;
            // The kernel takes what it believes of the old name for the new one. Which file that is we do not know, if a
            // program there does something with these names too.
            self.0.forgetting.forget_names();
            if !flags.contains(RenameFlags::RENAME_EXCHANGE) {
                from.maker.took(name);
            }
            to.maker.tells(new);
            if let Answer::Renamed { moved, back, gone, dirs } = heard.answer {
                self.0.inodes.rename(moved, (&from, name), (&to, new));
                self.0.inodes.rename(back, (&to, new), (&from, name));
                for key in [moved, back, gone].into_iter().flatten() {
                    self.0.inodes.of(to.node(), &key).iter().for_each(|inode| inode.lasting.changes());
                }
                for (dir, is) in [&from, &to].into_iter().zip(dirs) {
                    dir.changed(is, before.clone());
                }
            }
            Ok(())
        };
        answer!(reply, rename(), |()| reply.ok());
    }

    fn link(&self, request: &Request, number: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let link = || {
            let (of, dir) = (self.inode(number)?, self.inode(parent)?);
            let deed = |both: &[crate::message::Object]| Deed::Link {
                of: both[0],
                dir: both[1],
                name: Name::from(name),
            };
            let before = Before::asking(&dir.peer);
            let by = By::Path(request.pid());
            let heard = self.0.with_all(by, &[&of, &dir], &self.who(request), &[], deed)?;
            self.tell(&dir, name, &heard.answer, before)
        };
        answer!(reply, link(), |told| entry(reply, &told));
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.open_file(request, number, flags.0.cast_unsigned());
        answer!(reply, opened, |open| {
            let behind = self.behind(&open, |fd| reply.open_backing(fd));
            let handle = FileHandle(open.handle);
            open.pass(|flags, _| match &behind {
                Some(behind) => reply.opened_passthrough(handle, FopenFlags::empty(), &behind.id),
                None => reply.opened(handle, flags),
            });
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
        let create = || {
            let (dir, who) = (self.inode(parent)?, self.who(request));
            let (before, rights) = (Before::asking(&dir.peer), dir.maker.rights());
            let deed = |dir| Deed::Create { dir, name: Name::from(name), mode, umask, flags };
            let heard = self.0.at_end(request.pid(), &dir, &who, &[], deed)?;
            let Answer::Created(found, opened, under) = heard.answer else { return Err(Errno::IO) };
            dir.changed(under, before.clone());
            dir.maker.made(request.pid(), who.clone(), before.clone(), under.lease, rights);
            let inode = self.told(&dir, name, &found);
            self.0.made(request.pid(), &inode);
            if OFlags::from_bits_retain(flags).contains(OFlags::TRUNC) {
                // It may have been there, with content.
                inode.unsaved.written(heard.boot);
                inode.changes();
            }
            inode.has_extended(&found.attributes, &before);
            let named = self.named(&dir, name, &inode, &found, under.lease, &before);
            let (attr, generation) = (file(&inode, &found.attributes), Generation(inode.generation()));
            let handle = Handle::new(inode, who, flags, opened, heard.boot);
            Ok((attr, generation, self.opened(handle, found.attributes, before, named)))
        };
        answer!(reply, create(), |(attr, generation, open)| {
            let behind = self.behind(&open, |fd| reply.open_backing(fd));
            let handle = FileHandle(open.handle);
            open.pass(|flags, ttl| match &behind {
                Some(behind) => {
                    reply.created_passthrough(
                        &ttl,
                        &attr,
                        generation,
                        handle,
                        FopenFlags::empty(),
                        &behind.id,
                    );
                }
                None => reply.created(&ttl, &attr, generation, handle, flags),
            });
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
        answer!(reply, self.read_at(request, handle, at, size), |read| reply.data(read.data()));
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
        answer!(reply, self.write_at(request, handle, at, data), |count| reply.written(count));
    }

    fn flush(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // All that was written has arrived and was answered, so that only locks are left.
        answer!(reply, self.handle(handle), |handle| {
            handle.inode.disown(owner.0);
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
        answer!(reply, self.sync(handle, data_only), |()| reply.ok());
    }

    fn opendir(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if number.0 == ROOT {
            reply.opened(FileHandle(0), FopenFlags::empty());
            return;
        }
        let opened = self.open_file(request, number, flags.0.cast_unsigned());
        answer!(reply, opened, |open| reply.opened(FileHandle(open.handle), FopenFlags::empty()));
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
                let attr = not_looked_up(number, kind);
                reply.add(INodeNo(0), next, name, &TTL, &attr, Generation(0))
            });
            reply.ok();
            return;
        }
        if let Err((reply, errno)) = self.list_looked_up(handle, after, reply) {
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
            answer!(reply, self.0.catch_up(), |()| reply.ok());
            return;
        }
        answer!(reply, self.sync(handle, data_only), |()| reply.ok());
    }

    fn statfs(&self, request: &Request, number: INodeNo, reply: ReplyStatfs) {
        if is_ours(number) {
            reply.statfs(0, 0, 0, 0, 0, 4096, 255, 4096);
            return;
        }
        let space = self.inode(number).and_then(|inode| {
            let heard = self.0.with(&inode, &self.who(request), &[], |of| Deed::StatFs { of })?;
            if let Answer::Space(space) = heard.answer { Ok(space) } else { Err(Errno::IO) }
        });
        answer!(reply, space, |s| reply.statfs(
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
            let deed = |of| Deed::SetAttribute { of, name: Name::from(name), flags };
            inode.is_given_extended();
            inode.maker.rights_change();
            let set = self.by_hand_or_path(request, &inode, &self.who(request), value, deed).map(drop);
            inode.is_given_extended();
            self.lists_may_differ(&inode, name);
            set
        });
        answer!(reply, set, |()| reply.ok());
    }

    fn getxattr(&self, request: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        if name == DFSA {
            sized(reply, size, if self.0.dfsa { b"1" } else { b"0" });
            return;
        }
        // Before it writes what it reads and writes itself the kernel asks how long its capabilities are, and takes them away by itself.
        let taken = |inode: &Inode| name == CAPABILITY && size == 0 && inode.passage.is_taken();
        if self.inode(number).is_ok_and(|inode| taken(&inode) || !inode.extended().may_have(name)) {
            reply.error(error(Errno::NODATA));
            return;
        }
        let deed = |of| Deed::GetAttribute { of, name: Name::from(name) };
        answer!(reply, self.attribute(request, number, deed), |value| sized(reply, size, &value));
    }

    fn listxattr(&self, request: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        // Root may see more than is told of.
        let none = |inode: Arc<Inode>| request.uid() != 0 && inode.extended() == Extended::NONE;
        if self.inode(number).is_ok_and(none) {
            sized(reply, size, &[]);
            return;
        }
        let names = self.attribute(request, number, |of| Deed::ListAttributes { of });
        answer!(reply, names, |names| sized(reply, size, &names));
    }

    fn removexattr(&self, request: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.inode(number).and_then(|inode| {
            let deed = |of| Deed::RemoveAttribute { of, name: Name::from(name) };
            inode.maker.rights_change();
            let removed = self.by_hand_or_path(request, &inode, &self.who(request), &[], deed);
            self.lists_may_differ(&inode, name);
            removed
        });
        answer!(reply, removed, |_| reply.ok());
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
        answer!(reply, tested, |(start, end, kind)| reply.locked(start, end, kind, 0));
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
        let wanted =
            locks::Wanted { owner: owner.0, range: (start, end), raw: kind, asker: request.pid(), flock };
        let waiter = sleep.then(|| self.0.interrupts.waiter(request.unique().0));
        match self.handle(handle) {
            Ok(handle) => locks::set(&self.0, handle, &wanted, waiter, reply),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn interrupt(&self, _request: &Request, ask: RequestId) {
        self.0.interrupts.interrupt(ask.0);
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
            let deed = |opened| Deed::Allocate { opened, mode, at, length };
            self.0.with_open(&handle, &handle.opener, &[], deed).map(drop)
        });
        answer!(reply, done, |()| reply.ok());
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
            let deed = |opened: Opened| Deed::Seek { opened, at, data: whence == libc::SEEK_DATA };
            match self.0.with_open(&handle, &handle.opener, &[], deed)?.answer {
                Answer::Count(place) => Ok(place.cast_signed()),
                _ => Err(Errno::IO),
            }
        });
        answer!(reply, seek, |place| reply.offset(place));
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
        answer!(reply, self.copy(request, (from, at), (to, to_at), length), |count| reply.written(count));
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
        // Among others all that look whether it is a terminal.
        reply.error(error(Errno::NOTTY));
    }
}
