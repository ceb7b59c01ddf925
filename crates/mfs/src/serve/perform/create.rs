//! Creating and opening a file, as one operation.

use super::{OPEN_FLAGS, OpContext, OpError, component, opens_for_writing, proc_path};
use crate::message::{Attributes, FileReply, Found, Name, Object};
use crate::serve::export::ExportPosition;
use crate::serve::session::HeldObject;
use crate::serve::stat::attributes;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::os::fd::OwnedFd;

/// Maximum number of attempts, if other processes create and remove the name concurrently.
const MAX_ATTEMPTS: usize = 10;

/// The mode of a file created in this directory: the umask applies unless the directory has a
/// default access list (acl(5)).
pub(super) fn create_mode(dir: &OwnedFd, mode: u32, umask: u32) -> Mode {
    let no_value = &mut [0_u8; 0][..];
    let has_default_acl = rustix::fs::getxattr(proc_path(dir), "system.posix_acl_default", no_value).is_ok();
    Mode::from_raw_mode(if has_default_acl { mode } else { mode & !(umask & 0o777) })
}

impl OpContext<'_> {
    /// Creates and opens a file, or opens the file that has the name already.
    ///
    /// A file is opened by name only if this call creates it (`O_EXCL`). An existing file is first
    /// held and examined: opening has side effects on a device, and on a process that waits for a
    /// pipe's other end.
    pub(super) fn create(
        &self,
        dir: Object,
        name: &Name,
        (mode, umask): (u32, u32),
        flags: u32,
    ) -> Result<FileReply, OpError> {
        let at = self.exported_object(dir)?;
        let mode = create_mode(&at.fd, mode, umask);
        let flags = OFlags::from_bits_retain(flags) & OPEN_FLAGS;
        let create_flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for _ in 0..MAX_ATTEMPTS {
            match rustix::fs::openat(&at.fd, component(name)?, flags | create_flags, mode) {
                Err(Errno::EXIST) if !flags.contains(OFlags::EXCL) => {}
                created => return self.open_created(&at, created?, flags),
            }
            match self.lookup(&at, name) {
                Err(OpError::Errno(Errno::NOENT)) => {}
                found => {
                    let (fd, position) = found?;
                    let (parent, existing) = (attributes(&at.fd)?, attributes(&fd)?);
                    let is_sticky = Mode::from_raw_mode(parent.mode).contains(Mode::SVTX);
                    // The kernel may have to refuse another user's file here
                    // (fs.protected_regular). The client's kernel checks that rule, when it looks
                    // up the name again.
                    if is_sticky && existing.uid != parent.uid && existing.uid != geteuid().as_raw() {
                        return Err(Errno::STALE.into());
                    }
                    return self.open_existing(&at, fd, position, &existing, flags);
                }
            }
        }
        // The client's kernel looks the name up again.
        Err(Errno::STALE.into())
    }

    fn open_created(&self, dir: &HeldObject, fd: OwnedFd, flags: OFlags) -> Result<FileReply, OpError> {
        // Opened by descriptor, since the name may mean another file by now.
        let path_fd = rustix::fs::open(proc_path(&fd), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let key = attributes(&fd)?.key;
        // Another session may have found the file already, or have a lease of a removed file with
        // the same inode number.
        self.leases.change(self.session, &[key], |_| {
            let dir_attributes = self.name_lease(&dir.fd)?;
            let found = self.hold(path_fd, ExportPosition::Exported)?;
            let opened = self.insert_open(fd, key, ExportPosition::Exported, flags);
            let opened = opened.inspect_err(|_full| self.session.forget(found.object, 1))?;
            Ok(FileReply::Created(found, opened, dir_attributes))
        })
    }

    fn open_existing(
        &self,
        dir: &HeldObject,
        fd: OwnedFd,
        position: ExportPosition,
        existing: &Attributes,
        flags: OFlags,
    ) -> Result<FileReply, OpError> {
        match FileType::from_raw_mode(existing.mode) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR.into()),
            FileType::Symlink => return Err(Errno::LOOP.into()),
            _ => return Err(Errno::NXIO.into()),
        }
        let key = [existing.key];
        let changed = if opens_for_writing(flags) { &key[..] } else { &[] };
        self.leases.change(self.session, changed, |_| {
            let dir_attributes = self.name_lease(&dir.fd)?;
            let object = self.hold(fd, position)?.object;
            let open = self.open(object, flags).inspect_err(|_refused| self.session.forget(object, 1));
            let (opened, attributes) = open?;
            Ok(FileReply::Created(Found { object, attributes }, opened, dir_attributes))
        })
    }
}
