//! Mounting and unmounting the tree.

use crate::tree::Tree;
use anyhow::{Context, Result};
use fuser::{Session, SessionACL};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Type of the mount in `/proc/self/mountinfo`, by which this node's file server recognises it.
const FS_TYPE: &str = "fuse.mosix";

/// Number of threads that serve the kernel's requests. A write that takes long waits in a thread of
/// its own.
const THREADS: usize = 8;

/// Maximum number of stacked mounts to remove, left by earlier processes that were killed.
const MAX_STALE_MOUNTS: usize = 16;

/// The mounted tree.
pub struct Mounted {
    session: Session<Tree>,
    at: PathBuf,
}

impl std::fmt::Debug for Mounted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mounted").field("at", &self.at).finish_non_exhaustive()
    }
}

/// Mounts the tree of the node with this run directory, after unmounting one that an earlier
/// process left there. Accesses block until [`Mounted::serve`] is called.
///
/// # Errors
/// If the tree cannot be mounted; nothing is mounted then.
pub fn mount(run_dir: &Path, at: &Path) -> Result<Mounted> {
    unmount(at);
    fs::create_dir_all(at).with_context(|| format!("cannot create {}", at.display()))?;
    let device = open_and_mount(at).with_context(|| format!("cannot mount at {}", at.display()))?;
    let mut config = fuser::Config::default();
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    let session = Session::from_fd(Tree::new(run_dir), device, SessionACL::All, config);
    let session = session.inspect_err(|_| unmount(at)).context("cannot initialise the FUSE session")?;
    Ok(Mounted { session, at: at.to_owned() })
}

fn open_and_mount(at: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/fuse", flags, Mode::empty())
        .context("cannot open /dev/fuse; try: modprobe fuse")?;
    // The kernel checks owner and mode of each file; ternd checks again.
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    );
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    rustix::mount::mount("mosix", at, FS_TYPE, flags, &*CString::new(options)?)?;
    Ok(device)
}

/// Unmounts the tree at this path, even if it is in use.
pub fn unmount(at: &Path) {
    for _ in 0..MAX_STALE_MOUNTS {
        let table = tern_control::procfs::read_text("/proc/self/mountinfo").unwrap_or_default();
        if !is_mounted(&table, at) {
            return;
        }
        if let Err(error) = rustix::mount::unmount(at, UnmountFlags::DETACH) {
            return tracing::warn!(%error, at = %at.display(), "cannot unmount the administration tree");
        }
    }
}

fn is_mounted(table: &str, at: &Path) -> bool {
    let is_ours = |line: &str| {
        let (head, tail) = line.split_once(" - ")?;
        let mount_point = head.split(' ').nth(4)?;
        Some(tail.split(' ').next()? == FS_TYPE && Path::new(mount_point) == at)
    };
    table.lines().any(|line| is_ours(line).unwrap_or(false))
}

impl Mounted {
    /// The mount point.
    #[must_use]
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// Serves the tree until it is unmounted.
    ///
    /// # Errors
    /// If the connection to the kernel fails.
    pub fn serve(self) -> Result<()> {
        self.session.run().context("the FUSE session has failed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_mounts_are_unmounted() {
        let table = "24 1 254:0 / / rw - ext4 /dev/vda rw\n\
                     90 24 0:50 / /run/mosix rw,nosuid shared:1 - fuse.mosix mosix rw\n\
                     91 24 0:51 / /mnt rw - fuse.sshfs h:/ rw\n\
                     92";
        assert!(is_mounted(table, Path::new("/run/mosix")));
        assert!(!is_mounted(table, Path::new("/mnt")));
        assert!(!is_mounted(table, Path::new("/")));
    }
}
