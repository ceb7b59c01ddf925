//! Each deed as the system calls that do it, made as the caller.
//!
//! Whether he may is for the kernel to say, at each of them: nothing is remembered of what he was allowed before, except that
//! a file is open.

mod create;
mod listing;
mod steps;

use super::export::{self, Export, Place};
use super::leases::Leases;
use super::locks;
use super::release::release;
use super::session::{Held, OpenFile, Session};
use super::stat::{attributes, space};
use crate::message::{
    Answer, Attributes, Change, Deed, FileKey, Found, MOST_DATA, Name, Object, Opened, Release, SMALL,
    SetTime, Step,
};
use create::mode_in;
use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, SeekFrom, Timespec, Timestamps,
    UTIME_NOW, UTIME_OMIT, Uid, XattrFlags,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

/// Why a deed was not done.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The kernel's word.
    Errno(Errno),
    /// The session does not hold what was named.
    Forgotten,
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// Flags of open that mean the same here as there.
const OPEN_FLAGS: OFlags = OFlags::ACCMODE
    .union(OFlags::APPEND)
    .union(OFlags::TRUNC)
    .union(OFlags::DSYNC)
    .union(OFlags::SYNC)
    .union(OFlags::NOATIME)
    .union(OFlags::EXCL);

/// The longest list of names of extended attributes, and the longest value: the kernel's.
const MOST_ATTRIBUTE: usize = 65_536;

/// How often it is looked anew which file a name means.
const TRIES: usize = 4;

/// The most bytes that are copied at once.
const MOST_COPIED: usize = 64 << 20;

/// One caller's deed, under the rules and in the session that it belongs to.
#[derive(Debug)]
pub(crate) struct Performance<'a> {
    pub(crate) session: &'a Arc<Session>,
    pub(crate) export: &'a Export,
    pub(crate) leases: &'a Leases,
}

impl Performance<'_> {
    /// Does it, if these steps stand. What is to be written comes in `data`; what was read goes into `out`, which is empty before.
    ///
    /// # Errors
    /// The kernel's, or that something is not held any more; what has happened then is what the system call says of it.
    pub(crate) fn perform(
        &self,
        steps: &[Step],
        deed: Deed,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Answer, Fault> {
        if self.export.read_only && deed.changes() {
            return Err(Errno::ROFS.into());
        }
        let (mut deed, mut tries) = (deed, TRIES);
        loop {
            let touched = self.touched(&deed)?;
            tries -= 1;
            let done = self.leases.change(self.session, &touched, |waited| {
                // While others gave back the file that has a name, another one may have got the name.
                if waited && tries > 0 && self.touched(&deed).is_ok_and(|now| now != touched) {
                    return Err(deed);
                }
                // As late as can be: others may have been waited for.
                Ok(self.act_there(steps, deed, data, out))
            });
            match done {
                Ok(done) => return done,
                Err(again) => deed = again,
            }
        }
    }

    /// The files that a deed changes, of which nobody else may believe anything meanwhile. What is written to an open file
    /// is not among them: nobody has had a lease since it was opened for that.
    fn touched(&self, deed: &Deed) -> Result<Vec<FileKey>, Fault> {
        let dir_and = |dir: &Object, names: &[(&Object, &Name)]| {
            let named = names.iter().filter_map(|(dir, name)| self.key_of(**dir, name));
            Ok(named.chain([self.object(*dir)?.key]).collect())
        };
        match deed {
            // What is opened by it is asked back when it is known.
            Deed::Create { dir, .. }
            | Deed::MakeNode { dir, .. }
            | Deed::MakeDir { dir, .. }
            | Deed::MakeLink { dir, .. } => dir_and(dir, &[]),
            Deed::Unlink { dir, name } | Deed::RemoveDir { dir, name } => dir_and(dir, &[(dir, name)]),
            Deed::Rename { dir, name, to, new, .. } => {
                let mut touched: Vec<_> = dir_and(dir, &[(dir, name), (to, new)])?;
                touched.push(self.object(*to)?.key);
                Ok(touched)
            }
            Deed::Link { of, dir, .. } => Ok(vec![self.object(*of)?.key, self.object(*dir)?.key]),
            Deed::Open { of, flags, .. } if writes(OFlags::from_bits_retain(*flags)) => {
                Ok(vec![self.object(*of)?.key])
            }
            Deed::Set { of, .. } | Deed::SetAttribute { of, .. } | Deed::RemoveAttribute { of, .. } => {
                Ok(vec![self.object(*of)?.key])
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Which file has this name, if one has and it may be looked up.
    fn key_of(&self, dir: Object, name: &Name) -> Option<FileKey> {
        self.key_in(&*self.object(dir).ok()?, name)
    }

    fn key_in(&self, dir: &Held, name: &Name) -> Option<FileKey> {
        let (fd, _) = self.step(dir, name).ok()?;
        attributes(fd).ok().map(|attributes| attributes.key)
    }

    /// Does it, if these steps stand.
    fn act_there(&self, steps: &[Step], deed: Deed, data: &[u8], out: &mut Vec<u8>) -> Result<Answer, Fault> {
        // What is found on the way is looked at from the end of the path; but that there is nothing ends it.
        if matches!(deed, Deed::Lookup { .. }) {
            let looked = self.act(deed, data, out);
            let is_nothing =
                matches!(looked, Err(Fault::Errno(Errno::NOENT | Errno::ACCESS)) | Ok(Answer::Nothing(_)));
            return if is_nothing && !self.stand(steps)? { Ok(Answer::Elsewhere) } else { looked };
        }
        if self.stand(steps)? { self.act(deed, data, out) } else { Ok(Answer::Elsewhere) }
    }

    fn act(&self, deed: Deed, data: &[u8], out: &mut Vec<u8>) -> Result<Answer, Fault> {
        Ok(match deed {
            Deed::Lookup { dir, name } => {
                // The promise of the directory first: it is of what its names mean then.
                let under = self.named_in(dir)?;
                match self.object(dir).and_then(|dir| self.step(&dir, &name)) {
                    Ok((fd, place)) => Answer::Found(self.found(fd, place)?, under),
                    Err(Fault::Errno(Errno::NOENT)) if under.lasts => Answer::Nothing(under),
                    Err(fault) => return Err(fault),
                }
            }
            Deed::Stat { of } => Answer::Attributes(self.leased(&self.object(of)?.fd)?),
            Deed::Set { of, opened, change } => self.set(of, opened, &change)?,
            Deed::ReadLink { of } => {
                let target = rustix::fs::readlinkat(&self.inside(of)?.fd, "", Vec::new())?;
                out.extend_from_slice(target.as_bytes());
                Answer::Done
            }
            Deed::MakeNode { dir, name, mode, umask } => {
                let kind = FileType::from_raw_mode(mode);
                // Devices are the node's own, and would be the server's wherever they are seen.
                if !matches!(kind, FileType::RegularFile | FileType::Fifo | FileType::Socket) {
                    return Err(Errno::PERM.into());
                }
                let at = self.inside(dir)?;
                rustix::fs::mknodat(&at.fd, one_step(&name)?, kind, mode_in(&at.fd, mode, umask), 0)?;
                self.made(&at, &name)?
            }
            Deed::MakeDir { dir, name, mode, umask } => {
                let at = self.inside(dir)?;
                rustix::fs::mkdirat(&at.fd, one_step(&name)?, mode_in(&at.fd, mode, umask))?;
                self.made(&at, &name)?
            }
            Deed::MakeLink { dir, name, target } => {
                let at = self.inside(dir)?;
                rustix::fs::symlinkat(target.as_os(), &at.fd, one_step(&name)?)?;
                self.made(&at, &name)?
            }
            Deed::Unlink { dir, name } => self.remove(dir, &name, AtFlags::empty())?,
            Deed::RemoveDir { dir, name } => self.remove(dir, &name, AtFlags::REMOVEDIR)?,
            Deed::Rename { dir, name, to, new, flags } => {
                let (from, into) = (self.inside(dir)?, self.inside(to)?);
                let flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
                let gone = self.key_in(&into, &new);
                rustix::fs::renameat_with(&from.fd, one_step(&name)?, &into.fd, one_step(&new)?, flags)?;
                let exchanged = flags.contains(RenameFlags::EXCHANGE);
                // Whatever has these names by now is found again by them.
                let back = exchanged.then(|| self.key_in(&from, &name)).flatten();
                let dirs = [self.leased(&from.fd)?, self.leased(&into.fd)?];
                Answer::Renamed { moved: self.key_in(&into, &new), back, gone, dirs }
            }
            Deed::Link { of, dir, name } => {
                let (of, at) = (self.inside(of)?, self.inside(dir)?);
                let flags = AtFlags::SYMLINK_FOLLOW;
                rustix::fs::linkat(rustix::fs::CWD, path(&of.fd), &at.fd, one_step(&name)?, flags)?;
                self.made(&at, &name)?
            }
            Deed::Open { of, flags, content } => {
                let (opened, attributes) = self.open(of, OFlags::from_bits_retain(flags))?;
                let regular = FileType::from_raw_mode(attributes.mode) == FileType::RegularFile;
                if content && regular && attributes.lease > 0 && attributes.size <= SMALL as u64 {
                    let size = usize::try_from(attributes.size).unwrap_or(SMALL);
                    // What cannot be read now is found out when it is asked for.
                    if read(&self.file(opened)?.fd, 0, size, out).is_err() {
                        out.clear();
                    }
                }
                Answer::Opened(opened, attributes)
            }
            Deed::Create { dir, name, mode, umask, flags } => {
                self.create(dir, &name, (mode, umask), flags)?
            }
            Deed::Read { opened, at, length } => {
                read(&self.file(opened)?.fd, at, (length as usize).min(MOST_DATA), out)?;
                Answer::Done
            }
            Deed::Write { opened, at, .. } => {
                let file = self.file(opened)?;
                Answer::Count(rustix::io::pwrite(&file.fd, data, at)? as u64)
            }
            Deed::Sync { opened, data_only } => {
                let file = self.file(opened)?;
                if data_only {
                    rustix::fs::fdatasync(&file.fd)?;
                } else {
                    rustix::fs::fsync(&file.fd)?;
                }
                Answer::Done
            }
            Deed::ReadDir { opened, after, most, look } => self.list(opened, after, most, look)?,
            Deed::StatFs { of } => Answer::Space(space(&self.object(of)?.fd)?),
            Deed::GetAttribute { of, name } => {
                let held = self.inside(of)?;
                let mut value = vec![0; MOST_ATTRIBUTE];
                let length = rustix::fs::getxattr(path(&held.fd), name.as_os(), &mut value[..])?;
                out.extend_from_slice(&value[..length]);
                Answer::Done
            }
            Deed::SetAttribute { of, name, flags } => {
                let flags = XattrFlags::from_bits(flags).ok_or(Errno::INVAL)?;
                rustix::fs::setxattr(path(&self.inside(of)?.fd), name.as_os(), data, flags)?;
                Answer::Done
            }
            Deed::ListAttributes { of } => {
                let mut names = vec![0; MOST_ATTRIBUTE];
                let length = rustix::fs::listxattr(path(&self.inside(of)?.fd), &mut names[..])?;
                out.extend_from_slice(&names[..length]);
                Answer::Done
            }
            Deed::RemoveAttribute { of, name } => {
                rustix::fs::removexattr(path(&self.inside(of)?.fd), name.as_os())?;
                Answer::Done
            }
            Deed::Allocate { opened, mode, at, length } => {
                let mode = FallocateFlags::from_bits(mode).ok_or(Errno::OPNOTSUPP)?;
                rustix::fs::fallocate(&self.file(opened)?.fd, mode, at, length)?;
                Answer::Done
            }
            Deed::Seek { opened, at, data } => {
                let to = if data { SeekFrom::Data(at) } else { SeekFrom::Hole(at) };
                Answer::Count(rustix::fs::seek(&self.file(opened)?.fd, to)?)
            }
            Deed::Copy { from, at, to, to_at, length } => {
                let (from, to) = (self.file(from)?, self.file(to)?);
                let (mut at, mut to_at) = (at, to_at);
                // A longer one would keep who asked from being interrupted.
                let length = usize::try_from(length).unwrap_or(usize::MAX).min(MOST_COPIED);
                let count =
                    rustix::fs::copy_file_range(&from.fd, Some(&mut at), &to.fd, Some(&mut to_at), length)?;
                Answer::Count(count as u64)
            }
            Deed::Lock { opened, owner, kind, start, end } => {
                locks::set(self.session, &*self.file(opened)?, owner, kind, (start, end))?;
                Answer::Done
            }
            Deed::TestLock { opened, owner, kind, start, end } => {
                locks::test(self.session, &*self.file(opened)?, owner, kind, (start, end))?
            }
            Deed::Flock { opened, kind } => {
                locks::flock(&*self.file(opened)?, kind)?;
                Answer::Done
            }
        })
    }

    fn object(&self, object: Object) -> Result<Arc<Held>, Fault> {
        self.session.object(object).ok_or(Fault::Forgotten)
    }

    /// An object that more may be done with than looking on the way down.
    fn inside(&self, object: Object) -> Result<Arc<Held>, Fault> {
        let held = self.object(object)?;
        if held.place == Place::Inside { Ok(held) } else { Err(Errno::ACCESS.into()) }
    }

    fn file(&self, opened: Opened) -> Result<Arc<OpenFile>, Fault> {
        self.session.file(opened).ok_or(Fault::Forgotten)
    }

    /// What a name is, held by nobody yet.
    fn step(&self, dir: &Held, name: &Name) -> Result<(OwnedFd, Place), Fault> {
        let name = one_step(name)?;
        let place = self.export.step(&dir.place, name)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&dir.fd, name, flags, Mode::empty())?;
        export::admit(&fd)?;
        Ok((fd, place))
    }

    fn found(&self, fd: OwnedFd, place: Place) -> Result<Found, Fault> {
        let attributes = self.leased(&fd)?;
        Ok(Found { object: self.session.hold(Held { fd, key: attributes.key, place })?, attributes })
    }

    /// What has been made there. It is done: so nothing here may depend on what can be forgotten meanwhile, or it would be asked for again.
    fn made(&self, dir: &Held, name: &Name) -> Result<Answer, Fault> {
        let (fd, place) = self.step(dir, name)?;
        Ok(Answer::Found(self.found(fd, place)?, self.names(&dir.fd)?))
    }

    fn remove(&self, dir: Object, name: &Name, how: AtFlags) -> Result<Answer, Fault> {
        let at = self.inside(dir)?;
        let gone = self.key_in(&at, name);
        rustix::fs::unlinkat(&at.fd, one_step(name)?, how)?;
        Ok(Answer::Removed { gone, dir: self.leased(&at.fd)? })
    }

    fn open(&self, of: Object, flags: OFlags) -> Result<(Opened, Attributes), Fault> {
        let held = self.object(of)?;
        let fd = match FileType::from_raw_mode(attributes(&held.fd)?.mode) {
            // Its entries are read here only: those that the rules hide are left out then.
            FileType::Directory => rustix::fs::openat(
                &held.fd,
                ".",
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )?,
            FileType::RegularFile => {
                let flags = (flags & OPEN_FLAGS) | OFlags::CLOEXEC | OFlags::NOCTTY;
                if self.export.read_only && writes(flags) {
                    return Err(Errno::ROFS.into());
                }
                rustix::fs::open(path(&held.fd), flags - OFlags::EXCL, Mode::empty())?
            }
            // What is behind a pipe, socket or device is the client's own business.
            _ => return Err(Errno::NXIO.into()),
        };
        let opened = self.keep(fd, held.key, held.place.clone(), flags)?;
        let is = self.leased(&held.fd);
        let is = is.inspect_err(|_gone| release(self.session, self.leases, Release::File(opened)))?;
        Ok((opened, is))
    }

    fn keep(&self, fd: OwnedFd, key: FileKey, place: Place, flags: OFlags) -> Result<Opened, Errno> {
        let flags = flags & OPEN_FLAGS;
        let opened = self.session.keep(OpenFile {
            fd,
            key,
            place,
            flags,
            reading: Mutex::default(),
            behind: OnceLock::new(),
        })?;
        if writes(flags) {
            self.leases.opened(self.session, key);
        }
        Ok(opened)
    }

    fn set(&self, of: Object, opened: Option<Opened>, change: &Change) -> Result<Answer, Fault> {
        let held = self.inside(of)?;
        let at = path(&held.fd);
        // A change of nothing is a chown(-1, -1), which takes set-id bits off all the same.
        if change.uid.is_some() || change.gid.is_some() || *change == Change::default() {
            let (uid, gid) = (change.uid.map(Uid::from_raw), change.gid.map(Gid::from_raw));
            rustix::fs::chownat(&held.fd, "", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = change.mode {
            rustix::fs::chmod(&at, Mode::from_raw_mode(mode))?;
        }
        if let Some(size) = change.size {
            // Who has it open for writing may, whatever its permissions say by now.
            match opened.map(|opened| self.file(opened)).transpose()? {
                Some(file) if file.flags & OFlags::ACCMODE != OFlags::RDONLY => {
                    rustix::fs::ftruncate(&file.fd, size)?;
                }
                // Nothing else is opened, not even to be refused: a device does something then.
                _ if FileType::from_raw_mode(attributes(&held.fd)?.mode) != FileType::RegularFile => {
                    return Err(Errno::INVAL.into());
                }
                _ => {
                    let how = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
                    let fd = rustix::fs::open(&at, how, Mode::empty())?;
                    rustix::fs::ftruncate(fd, size)?;
                }
            }
        }
        if change.read.is_some() || change.written.is_some() {
            let times = Timestamps {
                last_access: timespec(change.read),
                last_modification: timespec(change.written),
            };
            rustix::fs::utimensat(rustix::fs::CWD, &at, &times, AtFlags::empty())?;
        }
        Ok(Answer::Attributes(self.leased(&held.fd)?))
    }
}

/// Whether a file that is opened so is written to.
pub(crate) fn writes(flags: OFlags) -> bool {
    flags & OFlags::ACCMODE != OFlags::RDONLY || flags.contains(OFlags::TRUNC)
}

/// Reads up to so many bytes from this place on, as far as the file goes.
fn read(file: &OwnedFd, at: u64, most: usize, out: &mut Vec<u8>) -> Result<(), Errno> {
    out.reserve_exact(most);
    while out.len() < most {
        let at = at + out.len() as u64;
        if rustix::io::pread(file, rustix::buffer::spare_capacity(out), at)? == 0 {
            break;
        }
    }
    // A vector may have more room than it was asked for.
    out.truncate(most);
    Ok(())
}

fn one_step(name: &Name) -> Result<&OsStr, Errno> {
    match name.is_one_step() {
        true => Ok(name.as_os()),
        false if name.as_os().len() > 255 => Err(Errno::NAMETOOLONG),
        false => Err(Errno::INVAL),
    }
}

/// A path that means what a descriptor of `O_PATH` holds, for calls that take paths only. The kernel goes to the file
/// itself, and lets every thread of ours.
fn path(fd: impl AsFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()).into()
}

fn timespec(time: Option<SetTime>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(SetTime::To(moment)) => {
            Timespec { tv_sec: moment.seconds, tv_nsec: moment.nanos.min(999_999_999).into() }
        }
    }
}

#[cfg(test)]
mod tests;
