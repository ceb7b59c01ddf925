//! Revalidates the dentries on which a client's kernel relied to resolve a path.
//!
//! That kernel walks through directories by itself, under their leases. Programs of this node take
//! no leases, and may have changed a name meanwhile. So each operation at the end of a path carries
//! the dentries that the kernel may have used, and they are looked up here, with the caller's
//! permissions: a directory that the caller may not search any more fails the check.

use super::{OpContext, OpError, proc_path};
use crate::message::{Attributes, DentryCheck, MAX_DENTRY_CHECKS, Object};
use crate::serve::leases;
use crate::serve::stat;
use rustix::fs::{AtFlags, FileType, StatxFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};

impl OpContext<'_> {
    /// Whether all dentries still name the same objects. A dentry whose object is no longer held
    /// fails too: the client must look it up anew.
    ///
    /// # Errors
    /// `EINVAL` if there are too many.
    pub(super) fn are_valid(&self, checks: &[DentryCheck]) -> Result<bool, OpError> {
        if checks.len() > MAX_DENTRY_CHECKS {
            return Err(Errno::INVAL.into());
        }
        Ok(checks.iter().all(|check| self.is_valid(check)))
    }

    fn is_valid(&self, check: &DentryCheck) -> bool {
        let (Some(dir), Some(object)) = (self.session.object(check.dir), self.session.object(check.object))
        else {
            return false;
        };
        if !check.name.is_component() || self.export.child(&dir.position, check.name.as_os()).is_err() {
            return false;
        }
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        // A held object keeps its inode number, so an equal number is the same file.
        rustix::fs::statx(&dir.fd, check.name.as_os(), flags, StatxFlags::INO)
            .is_ok_and(|now| (stat::device(&now), now.stx_ino) == (object.key.device, object.key.inode))
    }

    /// Attributes of a directory, with a lease under which its names are valid.
    pub(super) fn directory_attributes(&self, dir: Object) -> Result<Attributes, OpError> {
        Ok(self.name_lease(&self.object(dir)?.fd)?)
    }

    /// Like [`Self::directory_attributes`], for a descriptor of the directory. The lease is 0 if
    /// the client's kernel cannot check who may search the directory.
    pub(super) fn name_lease(&self, fd: &OwnedFd) -> Result<Attributes, Errno> {
        let attributes = self.leased_attributes(fd)?;
        let may_differ =
            self.export.squashes_root || attributes.xattrs.may_have(OsStr::new("system.posix_acl_access"));
        let lease = if may_differ { 0 } else { attributes.lease };
        let is_renewable = attributes.is_renewable && lease > 0;
        Ok(Attributes { lease, is_renewable, ..attributes })
    }

    /// Attributes of an object, with a lease if it can have one.
    pub(super) fn leased_attributes(&self, fd: impl AsFd) -> Result<Attributes, Errno> {
        let attributes = stat::attributes(&fd)?;
        let kind = FileType::from_raw_mode(attributes.mode);
        if !matches!(kind, FileType::RegularFile | FileType::Directory | FileType::Symlink)
            || !self.leases.grant(self.session, attributes.key)
        {
            return Ok(attributes);
        }
        let is_renewable = self.leases.watch(self.session, &fd, attributes.key, kind);
        // The attributes are read again, since they may have changed before the lease was granted.
        let xattrs = stat::xattr_kinds(&proc_path(&fd));
        let attributes = stat::attributes_on(fd, attributes.key.volume)?;
        Ok(Attributes { xattrs, lease: leases::TERM_MS, is_renewable, ..attributes })
    }
}
