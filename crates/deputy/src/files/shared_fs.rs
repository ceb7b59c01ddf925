//! Files on file systems that the nodes share, by NFS or the like, as home's `ternd.toml` declares.
//! Decides whether a file that is only read may be read where its program runs
//! (docs/design/delegation.md, "Files that nodes share").

use crate::files::timed_worker::TimedWorker;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tern_control::shared::SharedDir;
use tern_image::node_file::mounts_changed;

/// The directories that home declares as shared, and their devices.
#[derive(Debug, Default)]
pub(crate) struct SharedFilesystems {
    declared: Vec<PathBuf>,
    /// The mount table. `devices` is valid until this changes.
    table: Option<File>,
    /// The device of each directory examined so far; none if it must not be used.
    devices: BTreeMap<PathBuf, Option<u64>>,
    /// Examines the directories. An examination may wait for a file server.
    worker: TimedWorker,
}

impl SharedFilesystems {
    pub(crate) fn new(declared: Vec<PathBuf>) -> Self {
        Self { declared, ..Self::default() }
    }

    /// The location of an open file below a declared directory. If the process has another root, or
    /// mounts of its own, the path may name another file; the node that opens it detects that.
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

    /// The device of a declared directory. A directory is examined only if a file below it is open:
    /// the file server of any other directory may be unreachable.
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

#[cfg(test)]
mod tests {
    use super::*;

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
