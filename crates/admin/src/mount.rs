//! Mounting the tree, and unmounting it.

use crate::tree::Tree;
use anyhow::{Context, Result};
use fuser::{Session, SessionACL};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Its kind in `/proc/self/mountinfo`, by which the server of this node's files knows it.
const KIND: &str = "fuse.mosix";

/// Threads that hear the kernel. What takes a while is waited for by others.
const THREADS: usize = 8;

/// So many of ours may lie on each other, left by those who were killed.
const MOST_LEFT: usize = 16;

/// The tree, mounted.
pub struct Mounted {
    session: Session<Tree>,
    at: PathBuf,
}

impl std::fmt::Debug for Mounted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mounted").field("at", &self.at).finish_non_exhaustive()
    }
}

/// Mounts the tree of the node with this run directory. What an earlier one has left there is unmounted. Who looks into it now
/// waits for [`Mounted::serve`].
///
/// # Errors
/// With a sentence why not; nothing is mounted then.
pub fn mount(run_dir: &Path, at: &Path) -> Result<Mounted> {
    unmount(at);
    fs::create_dir_all(at).with_context(|| format!("cannot make {}", at.display()))?;
    let device = open_and_mount(at).with_context(|| format!("cannot mount at {}", at.display()))?;
    let mut config = fuser::Config::default();
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    let session = Session::from_fd(Tree::new(run_dir), device, SessionACL::All, config);
    let session = session.inspect_err(|_| unmount(at)).context("the kernel does not speak with us")?;
    Ok(Mounted { session, at: at.to_owned() })
}

fn open_and_mount(at: &Path) -> Result<OwnedFd> {
    let how = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/fuse", how, Mode::empty())
        .context("cannot open /dev/fuse; try: modprobe fuse")?;
    // The kernel looks at owner and mode of each file; ternd looks again.
    let said = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    );
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    rustix::mount::mount("mosix", at, KIND, flags, &*CString::new(said)?)?;
    Ok(device)
}

/// Unmounts what is ours at a place, also if somebody still looks into it.
pub fn unmount(at: &Path) {
    for _ in 0..MOST_LEFT {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        if !is_mounted(&table, at) {
            return;
        }
        if let Err(error) = rustix::mount::unmount(at, UnmountFlags::DETACH) {
            return tracing::warn!(%error, at = %at.display(), "it cannot be unmounted");
        }
    }
}

fn is_mounted(table: &str, at: &Path) -> bool {
    let ours = |line: &str| {
        let (head, tail) = line.split_once(" - ")?;
        let place = head.split(' ').nth(4)?;
        Some(tail.split(' ').next()? == KIND && Path::new(place) == at)
    };
    table.lines().any(|line| ours(line).unwrap_or(false))
}

impl Mounted {
    /// Where it is.
    #[must_use]
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// Serves it until it is unmounted.
    ///
    /// # Errors
    /// If the kernel speaks no more with us.
    pub fn serve(self) -> Result<()> {
        self.session.run().context("the kernel has ended it")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_is_unmounted() {
        let table = "24 1 254:0 / / rw - ext4 /dev/vda rw\n\
                     90 24 0:50 / /run/mosix rw,nosuid shared:1 - fuse.mosix mosix rw\n\
                     91 24 0:51 / /mnt rw - fuse.sshfs h:/ rw\n\
                     92";
        assert!(is_mounted(table, Path::new("/run/mosix")));
        assert!(!is_mounted(table, Path::new("/mnt")));
        assert!(!is_mounted(table, Path::new("/")));
    }
}
