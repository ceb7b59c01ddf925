//! Files on file systems that nodes share, to be opened where the program runs.

use super::{Delegations, MIN_LOCAL_OPEN_SIZE, ReadDelegation};
use crate::files::shared_fs::SharedFilesystems;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime};
use tern_control::shared::stat_file;
use tern_ids::SharedFile;
use tern_image::node_file::fs_credentials;
use tern_migrate::message::{FileNotice, SharedFileRef};
use tern_syscall::ByteBuf;

impl Delegations {
    /// Offers the location of files that are worth opening where the program runs, and that have
    /// not changed for long enough that the same content will be found there.
    pub(crate) fn offer_shared(
        &mut self,
        pid: i32,
        shared_filesystems: &mut SharedFilesystems,
    ) -> Vec<(i32, FileNotice)> {
        let mut notices = Vec::new();
        for (fd, watched) in self.read_delegations.iter_mut().filter(|(_, watched)| watched.is_shared) {
            let long = u64::try_from(watched.version.size).is_ok_and(|size| size >= MIN_LOCAL_OPEN_SIZE);
            if watched.location_sent || !long || !watched.was_settled(SystemTime::now()) {
                continue;
            }
            watched.location_sent = true;
            notices.extend(
                watched
                    .shared_file_ref(pid, *fd, shared_filesystems)
                    .map(|location| (*fd, FileNotice::Shared(Box::new(location)))),
            );
        }
        notices
    }
}

impl ReadDelegation {
    fn shared_file_ref(
        &self,
        pid: i32,
        fd: i32,
        shared_filesystems: &mut SharedFilesystems,
    ) -> Option<SharedFileRef> {
        // The file was just checked, so its status is cached: this does not ask the server.
        let file = stat_file(&*self.file, false).ok()??;
        let stat = version_of(&file);
        if stat != (self.version.size, self.version.modified, self.version.changed) {
            return None;
        }
        let device = self.device;
        // A lock holder sees what other nodes have written, but only on the node that holds the
        // lock.
        if is_locked(&std::fs::read_to_string("/proc/locks").ok()?, device, file.inode) {
            return None;
        }
        let (root, path) = shared_filesystems.locate(pid, fd, device)?;
        let credentials = fs_credentials(pid)?;
        let root = ByteBuf::from(root.as_os_str().as_bytes().to_vec());
        Some(SharedFileRef { root, path: ByteBuf::from(path), file, credentials })
    }
}

/// Size and times in the form that a `FileVersion` has.
fn version_of(file: &SharedFile) -> (i64, Duration, Duration) {
    let time = |(seconds, nanos): (i64, u32)| Duration::new(u64::try_from(seconds).unwrap_or(0), nanos);
    (i64::try_from(file.size).unwrap_or(i64::MAX), time(file.modified), time(file.changed))
}

/// Whether a process holds a lock on this file or waits for one (proc_locks(5)).
fn is_locked(table: &str, device: u64, inode: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    table.lines().any(|line| line.split_ascii_whitespace().any(|word| word == file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_is_found_by_device_and_inode() {
        let table = "1: POSIX  ADVISORY  WRITE 12 fe:00:1234 0 EOF\n\
                     1: -> FLOCK  ADVISORY  READ 13 00:2f:77 0 EOF\n";
        let device = rustix::fs::makedev;
        assert!(is_locked(table, device(0xfe, 0), 1234) && is_locked(table, device(0, 0x2f), 77));
        assert!(!is_locked(table, device(0xfe, 0), 123) && !is_locked(table, device(0, 0x2e), 77));
    }
}
