//! Files of other nodes that processes have open or mapped through MFS.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tern_ids::{Credentials, NodeId};
use tern_tracee::procfs;

/// The file system type that statfs(2) reports for every FUSE file system.
pub const FUSE_SUPER_MAGIC: u32 = 0x6573_5546;

/// The type of MFS mounts in /proc/PID/mountinfo.
const MFS_FSTYPE: &str = "fuse.mfs";

/// The types, as in /proc/PID/mountinfo, of local file systems: only this kernel changes their
/// files, and it sets their change times.
const LOCAL_FSTYPES: [&str; 13] = [
    "ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", ZFS, "tmpfs", "devtmpfs", "ramfs", "rootfs",
    "overlay",
];

/// The local file system in which a lookup may find a file by a name that differs from the file's
/// name, for example in case.
pub const ZFS: &str = "zfs";

/// How home treats the files of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountKind {
    /// An MFS tree.
    Mfs,
    /// Only this kernel changes its files, and sets their change times.
    Local,
    /// Any other.
    Other,
}

/// A file of a node, as another node sees it through MFS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFile {
    /// The node that stores the file.
    pub node: NodeId,
    /// The path there, without symbolic links.
    pub path: Vec<u8>,
    /// Its inode number in MFS.
    pub number: u64,
    /// The credentials of the process that has it open.
    pub credentials: Credentials,
}

/// The credentials with which a process accesses files, `None` if it is gone.
#[must_use]
pub fn fs_credentials(pid: i32) -> Option<Credentials> {
    let status = procfs::status(pid).ok()?;
    Some(Credentials { uid: status.uid[3], gid: status.gid[3], groups: status.groups })
}

/// The mounts that a process sees, cached until its mount table changes: the table is long, and
/// programs open many files of one tree. statfs(2) is not used instead, since it would ask the
/// server of a file system, which may not answer.
///
/// The mount table is kept open. As long as it is open, its mounts stay alive, even if the process
/// changes to another mount namespace. So no other file system gets a tree's device number.
#[derive(Debug, Default)]
pub struct MfsMounts {
    table: Option<File>,
    /// MFS trees, by device.
    mounts: BTreeMap<u64, Tree>,
    /// The other mounts in the table, by mount id, and whether each is local.
    others: BTreeMap<u64, bool>,
}

#[derive(Debug, Default)]
struct Tree {
    /// Its mount points.
    at: Vec<PathBuf>,
    /// Whether the tree lets guests open its files directly (`mount.mfs -o dfsa=1`). `None` until
    /// the MFS client has answered.
    allows_direct: Option<bool>,
}

impl MfsMounts {
    /// Whether a device is a tree that is already cached.
    pub fn is_cached(&mut self, device: u64) -> bool {
        if self.table.as_ref().is_some_and(mounts_changed) {
            *self = Self::default();
        }
        self.mounts.contains_key(&device)
    }

    /// Whether a device is a tree. Reads the mount table of the process if it is not cached.
    pub fn find(&mut self, pid: i32, device: u64) -> bool {
        self.is_cached(device) || self.read(pid) && self.mounts.contains_key(&device)
    }

    /// The kind of the mount with the id `mount`, where the process has a file on the device
    /// `device` open.
    pub fn kind(&mut self, pid: i32, device: u64, mount: u64) -> MountKind {
        let known = self.is_cached(device) || self.others.contains_key(&mount);
        if !known && !self.read(pid) {
            return MountKind::Other;
        }
        match self.others.get(&mount) {
            _ if self.mounts.contains_key(&device) => MountKind::Mfs,
            Some(true) => MountKind::Local,
            _ => MountKind::Other,
        }
    }

    /// Reads the mount table of a process. Returns whether that was possible.
    fn read(&mut self, pid: i32) -> bool {
        // The process may have other mounts now.
        *self = Self::default();
        let Ok(mut table) = File::open(format!("/proc/{pid}/mountinfo")) else { return false };
        let mut text = String::new();
        if table.rewind().and_then(|()| table.read_to_string(&mut text)).is_err() {
            return false;
        }
        for line in text.lines() {
            if let Some((device, at)) = parse_mfs_mount(line) {
                self.mounts.entry(device).or_default().at.push(at);
            } else if let Some((mount, fstype)) = parse_mount(line) {
                self.others.insert(mount, is_local(fstype));
            }
        }
        self.table = Some(table);
        true
    }

    /// The location of a file in a cached tree, given a link under /proc that leads to the file,
    /// and the file's path. `ask` calls [`allows_direct`] for that link, or returns `None` if there
    /// is no answer in time. `None` if the tree does not let guests open its files directly, or if
    /// the path is not below a mount point of the tree, for example because the process has another
    /// root directory.
    pub fn locate(
        &mut self,
        pid: i32,
        (link, path): (&Path, &Path),
        (device, number): (u64, u64),
        ask: impl FnOnce(PathBuf) -> Option<bool>,
    ) -> Option<NodeFile> {
        let tree = self.mounts.get_mut(&device)?;
        if tree.allows_direct.is_none() {
            tree.allows_direct = ask(link.to_owned());
        }
        if tree.allows_direct != Some(true) {
            return None;
        }
        let (node, path) = tree.at.iter().find_map(|at| split_node(at, path))?;
        let credentials = fs_credentials(pid)?;
        Some(NodeFile { node, path, number, credentials })
    }

    /// The location of a file that the process has open, as [`locate`](Self::locate).
    pub fn locate_fd(
        &mut self,
        pid: i32,
        fd: i32,
        id: (u64, u64),
        ask: impl FnOnce(PathBuf) -> Option<bool>,
    ) -> Option<NodeFile> {
        let link = PathBuf::from(format!("/proc/{pid}/fd/{fd}"));
        let path = std::fs::read_link(&link).ok()?;
        self.locate(pid, (&link, &path), id, ask)
    }
}

/// Asks the MFS client whether guests may open this file of a tree directly. The client answers
/// without asking another node, and answers the same for all files of the tree. If the client is
/// stopped, this call waits.
#[must_use]
pub fn allows_direct(link: &Path) -> bool {
    let mut reply = [0; 1];
    rustix::fs::getxattr(link, "system.mfs_dfsa", &mut reply) == Ok(1) && reply == *b"1"
}

/// Whether the mount table has changed since it was read or last polled; poll(2) reports it.
pub fn mounts_changed(table: &File) -> bool {
    let mut fds = [PollFd::new(table, PollFlags::PRI)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).map_or(true, |changed| changed > 0)
}

/// The device and mount point of an MFS tree, if the line describes the mount of one.
fn parse_mfs_mount(line: &str) -> Option<(u64, PathBuf)> {
    let (mount, fstype) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(2);
    let (device, root, at) = (fields.next()?, fields.next()?, fields.next()?);
    // A bind mount of a part of the tree has another root. Names with blanks are escaped.
    if root != "/" || at.contains('\\') || fstype.split(' ').next() != Some(MFS_FSTYPE) {
        return None;
    }
    let (major, minor) = device.split_once(':')?;
    Some((rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?), at.into()))
}

/// The id of a mount and the type of its file system, in a line of /proc/PID/mountinfo.
#[must_use]
pub fn parse_mount(line: &str) -> Option<(u64, &str)> {
    let (mount, fstype) = line.split_once(" - ")?;
    Some((mount.split(' ').next()?.parse().ok()?, fstype.split(' ').next()?))
}

/// Whether only this kernel changes the files of file systems of this type, and sets their change
/// times.
#[must_use]
pub fn is_local(fstype: &str) -> bool {
    LOCAL_FSTYPES.contains(&fstype)
}

/// The node, and the path on it, of a path below the mount point `at`.
fn split_node(at: &Path, path: &Path) -> Option<(NodeId, Vec<u8>)> {
    let below = path.strip_prefix(at).ok()?;
    let node = below.components().next()?.as_os_str();
    let rest = below.strip_prefix(node).ok()?.as_os_str().as_bytes().to_vec();
    Some((NodeId(node.to_str()?.parse().ok()?), rest)).filter(|(_, rest)| !rest.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_in_tree_splits_into_node_and_path() {
        let line = "90 24 0:50 / /mfs rw,nosuid shared:1 - fuse.mfs mymfs rw";
        let (device, at) = parse_mfs_mount(line).unwrap();
        assert_eq!((device, at.as_path()), (rustix::fs::makedev(0, 50), Path::new("/mfs")));
        let found = |path: &str| split_node(&at, Path::new(path));
        assert_eq!(found("/mfs/2/root/a b"), Some((NodeId(2), b"root/a b".to_vec())));
        assert_eq!(found("/mfs/2"), None);
        assert_eq!(found("/home/2/x"), None);
        for other in ["90 24 0:50 /2 /mfs rw - fuse.mfs m rw", "90 24 0:50 / /mfs rw - fuse.sshfs m rw", "90"]
        {
            assert_eq!(parse_mfs_mount(other), None, "{other}");
        }
    }

    #[test]
    fn mounts_have_kinds() {
        let mut mounts = MfsMounts::default();
        let mut kind_of = |path: &str| {
            use rustix::fs::{AtFlags, StatxFlags, makedev, statx};
            let found = statx(rustix::fs::CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).unwrap();
            let device = makedev(found.stx_dev_major, found.stx_dev_minor);
            mounts.kind(std::process::id().cast_signed(), device, found.stx_mnt_id)
        };
        assert_eq!(kind_of("/proc/self/status"), MountKind::Other);
        assert_eq!(kind_of("/dev/shm"), MountKind::Local);
        assert_eq!(parse_mount("90 24 0:50 / /mnt rw - fuse.sshfs h: rw"), Some((90, "fuse.sshfs")));
        assert!(!is_local("fuse.sshfs") && is_local(ZFS));
    }

    #[test]
    fn root_file_system_is_not_an_mfs_tree() {
        let mut trees = MfsMounts::default();
        let device = rustix::fs::stat("/").unwrap().st_dev;
        assert!(!trees.find(std::process::id().cast_signed(), device));
        assert!(
            trees.table.as_ref().is_some_and(|table| !mounts_changed(table)),
            "nothing was mounted meanwhile"
        );
    }
}
