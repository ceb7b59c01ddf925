//! Whose file it is that a process has open or mapped, as MFS shows it to all nodes.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tern_ids::NodeId;
use tern_tracee::procfs;

/// What statfs says of a mounted tree of ours, and of all others of FUSE.
pub const FUSE: u32 = 0x6573_5546;

/// The kind of our trees in a process's table of mounts.
const KIND: &str = "fuse.mfs";

/// A file of a node, as another one sees it through MFS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Whose file it is.
    pub node: NodeId,
    /// The path there, without links.
    pub path: Vec<u8>,
    /// Its inode number in MFS.
    pub number: u64,
    /// Who has it open: user, group, and his other groups.
    pub who: (u32, u32, Vec<u32>),
}

/// The trees of MFS that a process sees. To ask for them is dear (statfs goes to the other node, and the table is long), and programs
/// open many files of one tree; so they are known until the table of mounts changes. While we have that open its mounts are there,
/// also when the process goes to other ones; so the number of a tree's device is no other's.
#[derive(Debug, Default)]
pub struct Trees {
    table: Option<File>,
    known: BTreeMap<u64, Tree>,
}

#[derive(Debug, Default)]
struct Tree {
    /// Where it is mounted.
    at: Vec<PathBuf>,
    /// Whether it lets guests have its files open themselves (`mount.mfs -o dfsa=1`), if it has been asked.
    lets: Option<bool>,
}

impl Trees {
    /// Whether a file of this device is in a tree that is known already.
    pub fn has(&mut self, device: u64) -> bool {
        if self.table.as_ref().is_some_and(has_changed) {
            *self = Self::default();
        }
        self.known.contains_key(&device)
    }

    /// The same, for a process that may see more.
    pub fn find(&mut self, pid: i32, device: u64) -> bool {
        if self.has(device) {
            return true;
        }
        // It may have others by now.
        *self = Self::default();
        let Ok(mut table) = File::open(format!("/proc/{pid}/mountinfo")) else { return false };
        let mut text = String::new();
        if table.rewind().and_then(|()| table.read_to_string(&mut text)).is_err() {
            return false;
        }
        for (device, at) in text.lines().filter_map(tree) {
            self.known.entry(device).or_default().at.push(at);
        }
        self.table = Some(table);
        self.known.contains_key(&device)
    }

    /// Where a file of a process is in a tree that is known, by this link to it and its path; nothing if it may not be opened there, or if that
    /// cannot be told by its path: it may have been removed, or the process have a root of its own.
    pub fn place(
        &mut self,
        pid: i32,
        (link, path): (&Path, &Path),
        (device, number): (u64, u64),
    ) -> Option<Place> {
        let tree = self.known.get_mut(&device)?;
        // It answers that without asking anybody, and the same as long as it is there.
        let asks = || {
            let mut said = [0; 1];
            rustix::fs::getxattr(link, "system.mfs_dfsa", &mut said) == Ok(1) && said == *b"1"
        };
        if !*tree.lets.get_or_insert_with(asks) {
            return None;
        }
        let (node, path) = tree.at.iter().find_map(|at| below(at, path))?;
        let status = procfs::status(pid).ok()?;
        let who = (status.uid[3], status.gid[3], status.groups);
        Some(Place { node, path, number, who })
    }

    /// The same of one of its open files.
    pub fn place_of(&mut self, pid: i32, fd: i32, id: (u64, u64)) -> Option<Place> {
        let link = PathBuf::from(format!("/proc/{pid}/fd/{fd}"));
        let path = std::fs::read_link(&link).ok()?;
        self.place(pid, (&link, &path), id)
    }
}

/// Whether mounts have come or gone since it was read, or asked last: then poll(2) says so.
pub fn has_changed(table: &File) -> bool {
    let mut fds = [PollFd::new(table, PollFlags::PRI)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).map_or(true, |changed| changed > 0)
}

/// The device of a tree and where it is, if this is its line.
fn tree(line: &str) -> Option<(u64, PathBuf)> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(2);
    let (device, root, at) = (fields.next()?, fields.next()?, fields.next()?);
    // A part of it, mounted elsewhere, begins further down; and a name with a blank is written in another way.
    if root != "/" || at.contains('\\') || kind.split(' ').next() != Some(KIND) {
        return None;
    }
    let (major, minor) = device.split_once(':')?;
    Some((rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?), at.into()))
}

/// The node and what comes after it, of a path in a tree that is there.
fn below(at: &Path, path: &Path) -> Option<(NodeId, Vec<u8>)> {
    let below = path.strip_prefix(at).ok()?;
    let node = below.components().next()?.as_os_str();
    let rest = below.strip_prefix(node).ok()?.as_os_str().as_bytes().to_vec();
    Some((NodeId(node.to_str()?.parse().ok()?), rest)).filter(|(_, rest)| !rest.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_in_the_tree_is_a_node_and_a_path_there() {
        let line = "90 24 0:50 / /mfs rw,nosuid shared:1 - fuse.mfs mymfs rw";
        let (device, at) = tree(line).unwrap();
        assert_eq!((device, at.as_path()), (rustix::fs::makedev(0, 50), Path::new("/mfs")));
        let found = |path: &str| below(&at, Path::new(path));
        assert_eq!(found("/mfs/2/root/a b"), Some((NodeId(2), b"root/a b".to_vec())));
        assert_eq!(found("/mfs/2"), None);
        assert_eq!(found("/home/2/x"), None);
        for other in ["90 24 0:50 /2 /mfs rw - fuse.mfs m rw", "90 24 0:50 / /mfs rw - fuse.sshfs m rw", "90"]
        {
            assert_eq!(tree(other), None, "{other}");
        }
    }

    #[test]
    fn what_is_no_tree_of_ours_is_none() {
        let mut trees = Trees::default();
        let device = rustix::fs::stat("/").unwrap().st_dev;
        assert!(!trees.find(std::process::id().cast_signed(), device));
        assert!(
            trees.table.as_ref().is_some_and(|table| !has_changed(table)),
            "nothing was mounted meanwhile"
        );
    }
}
