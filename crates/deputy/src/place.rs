//! Whose file an open file is, if it is one of the cluster's: seen through MFS.

use rustix::fs::Stat;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tern_ids::NodeId;
use tern_migrate::message::Place;
use tern_syscall::ByteBuf;
use tern_tracee::procfs;

/// What statfs says of a mounted tree of ours, and of all others of FUSE.
pub(crate) const FUSE: u32 = 0x6573_5546;

/// The kind of our trees in a process's table of mounts.
const KIND: &str = "fuse.mfs";

/// Where an open file of a process is in MFS; nothing if it is not there, or if that cannot be told by its path: it may have been
/// removed, or the process have a root of its own.
pub(crate) fn of(pid: i32, fd: i32, stat: &Stat) -> Option<Place> {
    let table = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).ok()?;
    let path = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
    let device = format!("{}:{}", rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let (node, path) = table.lines().find_map(|line| below(line, &device, &path))?;
    let status = procfs::status(pid).ok()?;
    let who = (status.uid[3], status.gid[3], status.groups);
    Some(Place { node, path: ByteBuf::from(path), number: stat.st_ino, who })
}

/// Whether its tree lets guests have such a file open themselves (`mount.mfs -o dfsa=1`): it answers that without asking anybody.
pub(crate) fn may_be_opened_there(pid: i32, fd: i32) -> bool {
    let mut said = [0; 1];
    let path = format!("/proc/{pid}/fd/{fd}");
    rustix::fs::getxattr(path, "system.mfs_dfsa", &mut said) == Ok(1) && said == *b"1"
}

/// The node and what comes after it, if this is the line of the tree that the path is in.
fn below(line: &str, device: &str, path: &Path) -> Option<(NodeId, Vec<u8>)> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(2);
    let (of, root, at) = (fields.next()?, fields.next()?, fields.next()?);
    // A part of it, mounted elsewhere, begins further down; and a name with a blank is written in another way.
    if of != device || root != "/" || at.contains('\\') || kind.split(' ').next() != Some(KIND) {
        return None;
    }
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
        let found = |path: &str| below(line, "0:50", Path::new(path));
        assert_eq!(found("/mfs/2/root/a b"), Some((NodeId(2), b"root/a b".to_vec())));
        assert_eq!(found("/mfs/2"), None);
        assert_eq!(found("/home/2/x"), None);
        assert_eq!(below(line, "0:51", Path::new("/mfs/2/x")), None, "another tree");
        for other in ["90 24 0:50 /2 /mfs rw - fuse.mfs m rw", "90 24 0:50 / /mfs rw - fuse.sshfs m rw", "90"]
        {
            assert_eq!(below(other, "0:50", Path::new("/mfs/2/x")), None, "{other}");
        }
    }
}
