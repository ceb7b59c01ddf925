//! Performs each operation by its system calls, as the caller.
//!
//! The kernel checks permissions at each system call: the server remembers no earlier decision,
//! except that a file is open.

mod create;
mod readdir;
mod revalidate;

use super::export::{self, Export, ExportPosition};
use super::leases::LeaseTable;
use super::locks;
use super::release::release;
use super::session::{HeldObject, OpenFile, Session};
use super::stat::{attributes, fs_stats};
use crate::message::{
    AttributeChange, Attributes, DentryCheck, FileKey, FileReply, Found, MAX_DATA, MAX_INLINE_CONTENT, Name,
    Object, Op, OpenId, Release, SetTime,
};
use create::create_mode;
use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, SeekFrom, Timespec, Timestamps,
    UTIME_NOW, UTIME_OMIT, Uid, XattrFlags,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Why an operation failed.
#[derive(Debug)]
pub(crate) enum OpError {
    /// A system call failed.
    Errno(Errno),
    /// The session no longer holds the object or open file.
    Forgotten,
}

impl From<Errno> for OpError {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// Flags of open that have the same meaning on the server.
const OPEN_FLAGS: OFlags = OFlags::ACCMODE
    .union(OFlags::APPEND)
    .union(OFlags::TRUNC)
    .union(OFlags::DSYNC)
    .union(OFlags::SYNC)
    .union(OFlags::NOATIME)
    .union(OFlags::EXCL);

/// Maximum size of an extended attribute's value, and of the list of names: the kernel's limit.
const MAX_XATTR_SIZE: usize = 65_536;

/// Maximum number of attempts. After waiting for leases, the changed files are determined again.
const MAX_ATTEMPTS: usize = 4;

/// Maximum number of bytes copied by one operation.
const MAX_COPY: usize = 64 << 20;

/// The context of an operation: its session, the export rules and the leases.
#[derive(Debug)]
pub(crate) struct OpContext<'a> {
    pub(crate) session: &'a Arc<Session>,
    pub(crate) export: &'a Export,
    pub(crate) leases: &'a LeaseTable,
}

impl OpContext<'_> {
    /// Performs the operation, if all dentry checks hold. The data to write is in `data`; the data
    /// read is put into `out`, which must be empty.
    ///
    /// # Errors
    /// Errors of the system call, which define what has been done, and [`OpError::Forgotten`].
    pub(crate) fn perform(
        &self,
        checks: &[DentryCheck],
        op: Op,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<FileReply, OpError> {
        if self.export.is_read_only && op.modifies() {
            return Err(Errno::ROFS.into());
        }
        let (mut op, mut attempts_left) = (op, MAX_ATTEMPTS);
        loop {
            let files = self.changed_files(&op)?;
            attempts_left -= 1;
            let done = self.leases.change(self.session, &files, |has_waited| {
                // While this operation waited for leases, a name may have come to mean another
                // file.
                if has_waited && attempts_left > 0 && self.changed_files(&op).is_ok_and(|now| now != files) {
                    return Err(op);
                }
                // The dentries are checked only now, since waiting for leases may have taken long.
                Ok(self.check_and_execute(checks, op, data, out))
            });
            match done {
                Ok(done) => return done,
                Err(retried) => op = retried,
            }
        }
    }

    /// The files that an operation changes. Their leases must be recalled. A write to an open file
    /// recalls none: no other session has had a lease of the file since it was opened for writing.
    fn changed_files(&self, op: &Op) -> Result<Vec<FileKey>, OpError> {
        let dir_and = |dir: &Object, names: &[(&Object, &Name)]| {
            let named = names.iter().filter_map(|(dir, name)| self.key_of(**dir, name));
            Ok(named.chain([self.object(*dir)?.key]).collect())
        };
        match op {
            // `create` recalls the leases of the file that it creates, or opens for writing, once
            // that file is known.
            Op::Create { dir, .. }
            | Op::Mknod { dir, .. }
            | Op::Mkdir { dir, .. }
            | Op::Symlink { dir, .. } => dir_and(dir, &[]),
            Op::Unlink { dir, name } | Op::Rmdir { dir, name } => dir_and(dir, &[(dir, name)]),
            Op::Rename { dir, name, to, new, .. } => {
                let mut files: Vec<_> = dir_and(dir, &[(dir, name), (to, new)])?;
                files.push(self.object(*to)?.key);
                Ok(files)
            }
            Op::Link { of, dir, .. } => Ok(vec![self.object(*of)?.key, self.object(*dir)?.key]),
            Op::Open { of, flags, .. } if opens_for_writing(OFlags::from_bits_retain(*flags)) => {
                Ok(vec![self.object(*of)?.key])
            }
            Op::SetAttr { of, .. } | Op::SetXattr { of, .. } | Op::RemoveXattr { of, .. } => {
                Ok(vec![self.object(*of)?.key])
            }
            _ => Ok(Vec::new()),
        }
    }

    /// The file with this name, if there is one and it may be looked up.
    fn key_of(&self, dir: Object, name: &Name) -> Option<FileKey> {
        self.key_in(&*self.object(dir).ok()?, name)
    }

    fn key_in(&self, dir: &HeldObject, name: &Name) -> Option<FileKey> {
        let (fd, _) = self.lookup(dir, name).ok()?;
        attributes(fd).ok().map(|attributes| attributes.key)
    }

    /// Performs the operation, if all dentry checks hold.
    fn check_and_execute(
        &self,
        checks: &[DentryCheck],
        op: Op,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<FileReply, OpError> {
        // A lookup that finds something is an intermediate step: the operation at the end of the
        // path carries all checks. A failed lookup ends the path.
        if matches!(op, Op::Lookup { .. }) {
            let result = self.execute(op, data, out);
            let is_missing = matches!(
                result,
                Err(OpError::Errno(Errno::NOENT | Errno::ACCESS)) | Ok(FileReply::NotFound(_))
            );
            return if is_missing && !self.are_valid(checks)? { Ok(FileReply::StaleDentry) } else { result };
        }
        if self.are_valid(checks)? { self.execute(op, data, out) } else { Ok(FileReply::StaleDentry) }
    }

    fn execute(&self, op: Op, data: &[u8], out: &mut Vec<u8>) -> Result<FileReply, OpError> {
        Ok(match op {
            Op::Lookup { dir, name } => {
                // The directory's lease is granted before the lookup, since the lease covers what
                // the directory's names mean from then on.
                let dir_attributes = self.directory_attributes(dir)?;
                match self.object(dir).and_then(|dir| self.lookup(&dir, &name)) {
                    Ok((fd, position)) => FileReply::Found(self.hold(fd, position)?, dir_attributes),
                    Err(OpError::Errno(Errno::NOENT)) if dir_attributes.is_renewable => {
                        FileReply::NotFound(dir_attributes)
                    }
                    Err(error) => return Err(error),
                }
            }
            Op::GetAttr { of } => FileReply::Attributes(self.leased_attributes(&self.object(of)?.fd)?),
            Op::SetAttr { of, opened, change } => self.set_attributes(of, opened, &change)?,
            Op::ReadLink { of } => {
                let target = rustix::fs::readlinkat(&self.exported_object(of)?.fd, "", Vec::new())?;
                out.extend_from_slice(target.as_bytes());
                FileReply::Done
            }
            Op::Mknod { dir, name, mode, umask } => {
                let kind = FileType::from_raw_mode(mode);
                // Devices are local to a node: a device file created here would name a device of
                // this node.
                if !matches!(kind, FileType::RegularFile | FileType::Fifo | FileType::Socket) {
                    return Err(Errno::PERM.into());
                }
                let at = self.exported_object(dir)?;
                rustix::fs::mknodat(&at.fd, component(&name)?, kind, create_mode(&at.fd, mode, umask), 0)?;
                self.found_new(&at, &name)?
            }
            Op::Mkdir { dir, name, mode, umask } => {
                let at = self.exported_object(dir)?;
                rustix::fs::mkdirat(&at.fd, component(&name)?, create_mode(&at.fd, mode, umask))?;
                self.found_new(&at, &name)?
            }
            Op::Symlink { dir, name, target } => {
                let at = self.exported_object(dir)?;
                rustix::fs::symlinkat(target.as_os(), &at.fd, component(&name)?)?;
                self.found_new(&at, &name)?
            }
            Op::Unlink { dir, name } => self.remove(dir, &name, AtFlags::empty())?,
            Op::Rmdir { dir, name } => self.remove(dir, &name, AtFlags::REMOVEDIR)?,
            Op::Rename { dir, name, to, new, flags } => {
                let (from, into) = (self.exported_object(dir)?, self.exported_object(to)?);
                let flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
                let replaced = self.key_in(&into, &new);
                rustix::fs::renameat_with(&from.fd, component(&name)?, &into.fd, component(&new)?, flags)?;
                let is_exchange = flags.contains(RenameFlags::EXCHANGE);
                // Other files may have these names by now.
                let exchanged = is_exchange.then(|| self.key_in(&from, &name)).flatten();
                let dirs = [self.leased_attributes(&from.fd)?, self.leased_attributes(&into.fd)?];
                FileReply::Renamed { moved: self.key_in(&into, &new), exchanged, replaced, dirs }
            }
            Op::Link { of, dir, name } => {
                let (of, at) = (self.exported_object(of)?, self.exported_object(dir)?);
                let flags = AtFlags::SYMLINK_FOLLOW;
                rustix::fs::linkat(rustix::fs::CWD, proc_path(&of.fd), &at.fd, component(&name)?, flags)?;
                self.found_new(&at, &name)?
            }
            Op::Open { of, flags, content } => {
                let (opened, attributes) = self.open(of, OFlags::from_bits_retain(flags))?;
                let is_regular = FileType::from_raw_mode(attributes.mode) == FileType::RegularFile;
                if content
                    && is_regular
                    && attributes.lease > 0
                    && attributes.size <= MAX_INLINE_CONTENT as u64
                {
                    let size = usize::try_from(attributes.size).unwrap_or(MAX_INLINE_CONTENT);
                    // An error is reported by the read that follows.
                    if read(&self.open_file(opened)?.fd, 0, size, out).is_err() {
                        out.clear();
                    }
                }
                FileReply::FileOpened(opened, attributes)
            }
            Op::Create { dir, name, mode, umask, flags } => self.create(dir, &name, (mode, umask), flags)?,
            Op::Read { opened, at, length } => {
                read(&self.open_file(opened)?.fd, at, (length as usize).min(MAX_DATA), out)?;
                FileReply::Done
            }
            Op::Write { opened, at, .. } => {
                let file = self.open_file(opened)?;
                FileReply::Count(rustix::io::pwrite(&file.fd, data, at)? as u64)
            }
            Op::Fsync { opened, data_only } => {
                let file = self.open_file(opened)?;
                if data_only {
                    rustix::fs::fdatasync(&file.fd)?;
                } else {
                    rustix::fs::fsync(&file.fd)?;
                }
                FileReply::Done
            }
            Op::ReadDir { opened, cookie, max_bytes, lookup } => {
                self.read_dir(opened, cookie, max_bytes, lookup)?
            }
            Op::StatFs { of } => FileReply::FsStats(fs_stats(&self.object(of)?.fd)?),
            Op::GetXattr { of, name } => {
                let held = self.exported_object(of)?;
                let mut value = vec![0; MAX_XATTR_SIZE];
                let length = rustix::fs::getxattr(proc_path(&held.fd), name.as_os(), &mut value[..])?;
                out.extend_from_slice(&value[..length]);
                FileReply::Done
            }
            Op::SetXattr { of, name, flags } => {
                let flags = XattrFlags::from_bits(flags).ok_or(Errno::INVAL)?;
                rustix::fs::setxattr(proc_path(&self.exported_object(of)?.fd), name.as_os(), data, flags)?;
                FileReply::Done
            }
            Op::ListXattr { of } => {
                let mut names = vec![0; MAX_XATTR_SIZE];
                let length = rustix::fs::listxattr(proc_path(&self.exported_object(of)?.fd), &mut names[..])?;
                out.extend_from_slice(&names[..length]);
                FileReply::Done
            }
            Op::RemoveXattr { of, name } => {
                rustix::fs::removexattr(proc_path(&self.exported_object(of)?.fd), name.as_os())?;
                FileReply::Done
            }
            Op::Fallocate { opened, mode, at, length } => {
                let mode = FallocateFlags::from_bits(mode).ok_or(Errno::OPNOTSUPP)?;
                rustix::fs::fallocate(&self.open_file(opened)?.fd, mode, at, length)?;
                FileReply::Done
            }
            Op::Lseek { opened, at, data } => {
                let to = if data { SeekFrom::Data(at) } else { SeekFrom::Hole(at) };
                FileReply::Count(rustix::fs::seek(&self.open_file(opened)?.fd, to)?)
            }
            Op::CopyFileRange { from, at, to, to_at, length } => {
                let (from, to) = (self.open_file(from)?, self.open_file(to)?);
                let (mut at, mut to_at) = (at, to_at);
                // A longer copy would delay the caller's reaction to signals.
                let length = usize::try_from(length).unwrap_or(usize::MAX).min(MAX_COPY);
                let count =
                    rustix::fs::copy_file_range(&from.fd, Some(&mut at), &to.fd, Some(&mut to_at), length)?;
                FileReply::Count(count as u64)
            }
            Op::SetLock { opened, owner, kind, start, end } => {
                locks::set(self.session, &*self.open_file(opened)?, owner, kind, (start, end))?;
                FileReply::Done
            }
            Op::GetLock { opened, owner, kind, start, end } => {
                locks::test(self.session, &*self.open_file(opened)?, owner, kind, (start, end))?
            }
            Op::Flock { opened, kind } => {
                locks::flock(&*self.open_file(opened)?, kind)?;
                FileReply::Done
            }
        })
    }

    fn object(&self, object: Object) -> Result<Arc<HeldObject>, OpError> {
        self.session.object(object).ok_or(OpError::Forgotten)
    }

    /// An object in an exported path. Above the exported paths, only lookups, listings and reading
    /// attributes are allowed.
    fn exported_object(&self, object: Object) -> Result<Arc<HeldObject>, OpError> {
        let held = self.object(object)?;
        if held.position == ExportPosition::Exported { Ok(held) } else { Err(Errno::ACCESS.into()) }
    }

    fn open_file(&self, opened: OpenId) -> Result<Arc<OpenFile>, OpError> {
        self.session.open_file(opened).ok_or(OpError::Forgotten)
    }

    /// Looks up an entry of a directory. The session does not hold it yet.
    fn lookup(&self, dir: &HeldObject, name: &Name) -> Result<(OwnedFd, ExportPosition), OpError> {
        let name = component(name)?;
        let position = self.export.child(&dir.position, name)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&dir.fd, name, flags, Mode::empty())?;
        export::check_exportable(&fd)?;
        Ok((fd, position))
    }

    fn hold(&self, fd: OwnedFd, position: ExportPosition) -> Result<Found, OpError> {
        let attributes = self.leased_attributes(&fd)?;
        Ok(Found { object: self.session.hold(HeldObject { fd, key: attributes.key, position })?, attributes })
    }

    /// The reply for an entry that was just created. Nothing here may depend on an object that can
    /// be forgotten meanwhile: the client would repeat the operation, which has succeeded.
    fn found_new(&self, dir: &HeldObject, name: &Name) -> Result<FileReply, OpError> {
        let (fd, position) = self.lookup(dir, name)?;
        Ok(FileReply::Found(self.hold(fd, position)?, self.name_lease(&dir.fd)?))
    }

    fn remove(&self, dir: Object, name: &Name, flags: AtFlags) -> Result<FileReply, OpError> {
        let at = self.exported_object(dir)?;
        let removed = self.key_in(&at, name);
        rustix::fs::unlinkat(&at.fd, component(name)?, flags)?;
        Ok(FileReply::Removed { removed, dir: self.leased_attributes(&at.fd)? })
    }

    fn open(&self, of: Object, flags: OFlags) -> Result<(OpenId, Attributes), OpError> {
        let held = self.object(of)?;
        let fd = match FileType::from_raw_mode(attributes(&held.fd)?.mode) {
            // Entries are read only by `read_dir`, which omits those that are not exported. To open
            // "." in the directory would need the right to search it.
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                rustix::fs::open(proc_path(&held.fd), flags, Mode::empty())?
            }
            FileType::RegularFile => {
                let flags = (flags & OPEN_FLAGS) | OFlags::CLOEXEC | OFlags::NOCTTY;
                if self.export.is_read_only && opens_for_writing(flags) {
                    return Err(Errno::ROFS.into());
                }
                rustix::fs::open(proc_path(&held.fd), flags - OFlags::EXCL, Mode::empty())?
            }
            // A pipe, socket or device is opened by the client's kernel on its own node.
            _ => return Err(Errno::NXIO.into()),
        };
        let opened = self.insert_open(fd, held.key, held.position.clone(), flags)?;
        let attributes = self.leased_attributes(&held.fd);
        let attributes =
            attributes.inspect_err(|_error| release(self.session, self.leases, Release::File(opened)))?;
        Ok((opened, attributes))
    }

    fn insert_open(
        &self,
        fd: OwnedFd,
        key: FileKey,
        position: ExportPosition,
        flags: OFlags,
    ) -> Result<OpenId, Errno> {
        let flags = flags & OPEN_FLAGS;
        let opened =
            self.session.insert_open(OpenFile { fd, key, position, flags, reading: Mutex::default() })?;
        if opens_for_writing(flags) {
            self.leases.add_writer(self.session, key);
        }
        Ok(opened)
    }

    fn set_attributes(
        &self,
        of: Object,
        opened: Option<OpenId>,
        change: &AttributeChange,
    ) -> Result<FileReply, OpError> {
        let held = self.exported_object(of)?;
        let path = proc_path(&held.fd);
        // A change of nothing is a chown(-1, -1), which nevertheless clears the set-ID bits.
        if change.uid.is_some() || change.gid.is_some() || *change == AttributeChange::default() {
            let (uid, gid) = (change.uid.map(Uid::from_raw), change.gid.map(Gid::from_raw));
            rustix::fs::chownat(&held.fd, "", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = change.mode {
            rustix::fs::chmod(&path, Mode::from_raw_mode(mode))?;
        }
        if let Some(size) = change.size {
            // Truncation is allowed through a descriptor open for writing, whatever the permissions
            // are by now.
            match opened.map(|opened| self.open_file(opened)).transpose()? {
                Some(file) if file.flags & OFlags::ACCMODE != OFlags::RDONLY => {
                    rustix::fs::ftruncate(&file.fd, size)?;
                }
                // Opening a device or pipe may have side effects, even if it fails.
                _ if FileType::from_raw_mode(attributes(&held.fd)?.mode) != FileType::RegularFile => {
                    return Err(Errno::INVAL.into());
                }
                _ => {
                    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
                    let fd = rustix::fs::open(&path, flags, Mode::empty())?;
                    rustix::fs::ftruncate(fd, size)?;
                }
            }
        }
        if change.atime.is_some() || change.mtime.is_some() {
            let times =
                Timestamps { last_access: timespec(change.atime), last_modification: timespec(change.mtime) };
            rustix::fs::utimensat(rustix::fs::CWD, &path, &times, AtFlags::empty())?;
        }
        Ok(FileReply::Attributes(self.leased_attributes(&held.fd)?))
    }
}

/// Whether a file with these open flags may be written.
pub(crate) fn opens_for_writing(flags: OFlags) -> bool {
    flags & OFlags::ACCMODE != OFlags::RDONLY || flags.contains(OFlags::TRUNC)
}

/// Reads up to `max` bytes from this offset, or to the end of the file.
fn read(file: &OwnedFd, at: u64, max: usize, out: &mut Vec<u8>) -> Result<(), Errno> {
    out.reserve_exact(max);
    while out.len() < max {
        let at = at + out.len() as u64;
        if rustix::io::pread(file, rustix::buffer::spare_capacity(out), at)? == 0 {
            break;
        }
    }
    // A vector may have more capacity than was reserved.
    out.truncate(max);
    Ok(())
}

fn component(name: &Name) -> Result<&OsStr, Errno> {
    match name.is_component() {
        true => Ok(name.as_os()),
        false if name.as_os().len() > 255 => Err(Errno::NAMETOOLONG),
        false => Err(Errno::INVAL),
    }
}

/// A path to the file of an `O_PATH` descriptor, for system calls that take only paths. The kernel
/// resolves it to the file itself, whatever the thread's permissions on the directories are.
fn proc_path(fd: impl AsFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()).into()
}

fn timespec(time: Option<SetTime>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(SetTime::To(time)) => {
            Timespec { tv_sec: time.seconds, tv_nsec: time.nanos.min(999_999_999).into() }
        }
    }
}

#[cfg(test)]
mod tests;
