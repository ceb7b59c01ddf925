//! Whether names still mean what a client's kernel believes, when something is done on its word.
//!
//! The kernel there goes through directories by itself, under their leases. Programs of this node know nothing of leases; so each deed
//! at the end of a path says by which steps it may have come, and they are looked at here, as the caller: what he may not
//! search any more leads nowhere.

use super::{Fault, Performance, path};
use crate::message::{Attributes, MOST_STEPS, Object, Step};
use crate::serve::leases;
use crate::serve::stat;
use rustix::fs::{AtFlags, FileType, StatxFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};

impl Performance<'_> {
    /// Whether all these steps lead where they did. What is not held any more must be looked up anew as well.
    ///
    /// # Errors
    /// `EINVAL` if there are too many.
    pub(super) fn stand(&self, steps: &[Step]) -> Result<bool, Fault> {
        if steps.len() > MOST_STEPS {
            return Err(Errno::INVAL.into());
        }
        Ok(steps.iter().all(|step| self.stands(step)))
    }

    fn stands(&self, step: &Step) -> bool {
        let (Some(dir), Some(is)) = (self.session.object(step.dir), self.session.object(step.is)) else {
            return false;
        };
        if !step.name.is_one_step() || self.export.step(&dir.place, step.name.as_os()).is_err() {
            return false;
        }
        let how = AtFlags::SYMLINK_NOFOLLOW;
        // What is held cannot have given its number to another one.
        rustix::fs::statx(&dir.fd, step.name.as_os(), how, StatxFlags::INO)
            .is_ok_and(|now| (stat::device(&now), now.stx_ino) == (is.key.device, is.key.inode))
    }

    /// What a directory is like, with a lease under which its names may be believed.
    pub(super) fn named_in(&self, dir: Object) -> Result<Attributes, Fault> {
        Ok(self.names(&self.object(dir)?.fd)?)
    }

    /// The same, of what is open. Names are believed only where the client's kernel sees as well as this one who may look for them.
    pub(super) fn names(&self, fd: &OwnedFd) -> Result<Attributes, Errno> {
        let is = self.leased(fd)?;
        let may_differ =
            self.export.squash_root || is.extended.may_have(OsStr::new("system.posix_acl_access"));
        let lease = if may_differ { 0 } else { is.lease };
        Ok(Attributes { lease, lasts: is.lasts && lease > 0, ..is })
    }

    /// What an object is like, with a lease of that if it can have one.
    pub(super) fn leased(&self, fd: impl AsFd) -> Result<Attributes, Errno> {
        let is = stat::attributes(&fd)?;
        let kind = FileType::from_raw_mode(is.mode);
        if !matches!(kind, FileType::RegularFile | FileType::Directory | FileType::Symlink)
            || !self.leases.grant(self.session, is.key)
        {
            return Ok(is);
        }
        let lasts = self.leases.watch(self.session, &fd, is.key, kind);
        // What was there before the promise was made may have changed.
        let extended = stat::extended(&path(&fd));
        Ok(Attributes { extended, lease: leases::MILLIS, lasts, ..stat::attributes_of(fd, is.key.volume)? })
    }
}
