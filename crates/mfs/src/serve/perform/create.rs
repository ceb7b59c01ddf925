//! Making a file and opening it, as one deed.

use super::{Fault, OPEN_FLAGS, Performance, one_step, path, writes};
use crate::message::{Answer, Attributes, Found, Name, Object};
use crate::serve::export::Place;
use crate::serve::session::Held;
use crate::serve::stat::attributes;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::os::fd::OwnedFd;

/// How often it is tried when others make and remove what has the name.
const TRIES: usize = 10;

/// The mode with which something is made in a directory: the umask counts where no default access list does (acl(5)).
pub(super) fn mode_in(dir: &OwnedFd, mode: u32, umask: u32) -> Mode {
    let length_only = &mut [0_u8; 0][..];
    let has_list = rustix::fs::getxattr(path(dir), "system.posix_acl_default", length_only).is_ok();
    Mode::from_raw_mode(if has_list { mode } else { mode & !(umask & 0o777) })
}

impl Performance<'_> {
    /// Makes a file and opens it, or opens the one that has the name already.
    ///
    /// By its name only that is opened which was made by it. What is there already is held first, and looked at: to be opened
    /// does something to a device, and to who waits for a pipe.
    pub(super) fn create(
        &self,
        dir: Object,
        name: &Name,
        (mode, umask): (u32, u32),
        flags: u32,
    ) -> Result<Answer, Fault> {
        let at = self.inside(dir)?;
        let mode = mode_in(&at.fd, mode, umask);
        let flags = OFlags::from_bits_retain(flags) & OPEN_FLAGS;
        let only = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for _ in 0..TRIES {
            match rustix::fs::openat(&at.fd, one_step(name)?, flags | only, mode) {
                Err(Errno::EXIST) if !flags.contains(OFlags::EXCL) => {}
                made => return self.made_and_open(&at, made?, flags),
            }
            match self.step(&at, name) {
                Err(Fault::Errno(Errno::NOENT)) => {}
                there => {
                    let (fd, place) = there?;
                    let (holder, is) = (attributes(&at.fd)?, attributes(&fd)?);
                    let sticky = Mode::from_raw_mode(holder.mode).contains(Mode::SVTX);
                    // Here he may not open what is another's, it may be (fs.protected_regular). The client's kernel knows that
                    // rule, and finds the name there when it looks again.
                    if sticky && is.uid != holder.uid && is.uid != geteuid().as_raw() {
                        return Err(Errno::STALE.into());
                    }
                    return self.there_and_open(&at, fd, place, &is, flags);
                }
            }
        }
        // The client's kernel looks again.
        Err(Errno::STALE.into())
    }

    fn made_and_open(&self, dir: &Held, fd: OwnedFd, flags: OFlags) -> Result<Answer, Fault> {
        // Whatever the name means by now.
        let held = rustix::fs::open(path(&fd), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let key = attributes(&fd)?.key;
        // Somebody may have found it already, or believe something of one that is gone and had its number.
        self.leases.change(self.session, &[key], |_| {
            let under = self.names(&dir.fd)?;
            let found = self.found(held, Place::Inside)?;
            let kept = self.keep(fd, key, Place::Inside, flags);
            let opened = kept.inspect_err(|_full| self.session.forget(found.object, 1))?;
            Ok(Answer::Created(found, opened, under))
        })
    }

    fn there_and_open(
        &self,
        dir: &Held,
        fd: OwnedFd,
        place: Place,
        is: &Attributes,
        flags: OFlags,
    ) -> Result<Answer, Fault> {
        match FileType::from_raw_mode(is.mode) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR.into()),
            FileType::Symlink => return Err(Errno::LOOP.into()),
            _ => return Err(Errno::NXIO.into()),
        }
        let key = [is.key];
        let changed = if writes(flags) { &key[..] } else { &[] };
        self.leases.change(self.session, changed, |_| {
            let under = self.names(&dir.fd)?;
            let object = self.found(fd, place)?.object;
            let open = self.open(object, flags).inspect_err(|_refused| self.session.forget(object, 1));
            let (opened, attributes) = open?;
            Ok(Answer::Created(Found { object, attributes }, opened, under))
        })
    }
}
