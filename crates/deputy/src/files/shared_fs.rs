//! Files on file systems that the nodes share, by NFS or the like, as home's `ternd.toml` declares.
//! Decides whether a file that is only read may be read where its program runs
//! (docs/design/delegation.md, "Files that nodes share").

use crate::files::delegation::{Delegations, MIN_LOCAL_OPEN_SIZE};
use crate::files::timed_worker::TimedWorker;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tern_control::shared::{SharedDir, stat_file};
use tern_ids::SharedFile;
use tern_image::node_file::{fs_credentials, mounts_changed};
use tern_migrate::message::{FileNotice, SharedFileRef};
use tern_syscall::ByteBuf;

/// The directories that home declares as shared, and their devices.
#[derive(Debug, Default)]
pub(crate) struct SharedFilesystems {
    declared: Vec<PathBuf>,
    /// The mount table. `devices` is valid until this changes.
    table: Option<File>,
    /// The device of each directory examined so far; none if it must not be used.
    devices: BTreeMap<PathBuf, Option<u64>>,
    /// Examines them, which may wait for their server.
    worker: TimedWorker,
}

impl SharedFilesystems {
    pub(crate) fn new(declared: Vec<PathBuf>) -> Self {
        Self { declared, ..Self::default() }
    }

    /// The location of an open file below one of them. If the process has another root, or mounts
    /// of its own, the path may name another file; the node that opens it detects that.
    pub(crate) fn locate(&mut self, pid: i32, fd: i32, device: u64) -> Option<(PathBuf, Vec<u8>)> {
        if self.declared.is_empty() {
            return None;
        }
        let path = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
        let root = self.declared.iter().filter(|root| path.starts_with(root));
        let root = root.max_by_key(|root| root.as_os_str().len())?.clone();
        let below = path.strip_prefix(&root).ok()?.as_os_str().as_bytes().to_vec();
        let is_there = self.device(&root) == Some(device) && !below.is_empty();
        is_there.then_some((root, below))
    }

    /// The device of a declared directory. Only a directory of which a file is open is examined:
    /// the server of another may be unreachable.
    fn device(&mut self, root: &Path) -> Option<u64> {
        if self.table.as_ref().is_none_or(mounts_changed) {
            self.devices.clear();
            // The kernel reports changes only after a first read.
            let table = File::open("/proc/self/mountinfo").and_then(|mut table| {
                table.read_to_end(&mut Vec::new())?;
                Ok(table)
            });
            self.table = table.ok();
        }
        if let Some(known) = self.devices.get(root) {
            return *known;
        }
        let examined = root.to_owned();
        let open = move || SharedDir::open(&examined).ok().filter(|dir| !dir.is_nocto).map(|dir| dir.device);
        let device = self.worker.run(open)?;
        self.devices.insert(root.to_owned(), device);
        device
    }
}

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

impl crate::files::delegation::ReadDelegation {
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

    #[test]
    fn shared_file_is_located_by_path_and_device() {
        let place = std::env::temp_dir().join(format!("tern-shares-{}", std::process::id()));
        std::fs::create_dir_all(place.join("deep")).unwrap();
        let file = File::create(place.join("deep/a")).unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let device = rustix::fs::fstat(&file).unwrap().st_dev;
        let me = std::process::id().cast_signed();
        let found = |declared: &[&str], device| {
            let declared = declared.iter().map(|below| place.join(below)).collect();
            SharedFilesystems::new(declared).locate(me, fd, device)
        };
        let path = |root: &str, below: &str| Some((place.join(root), below.as_bytes().to_vec()));
        assert_eq!(found(&["deep"], device), path("deep", "a"));
        assert_eq!(found(&["", "deep", "other"], device), path("deep", "a"), "the innermost one");
        assert_eq!(found(&["deep"], device + 1), None, "another mount");
        assert_eq!(found(&["dee", "deep/a"], device), None);
        assert_eq!(found(&[], device), None);
        std::fs::remove_dir_all(&place).unwrap();
    }
}
