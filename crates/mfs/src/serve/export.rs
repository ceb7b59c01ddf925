//! Which files a node exports, and which it never exports.
//!
//! Each lookup is of a single component, and never follows a symbolic link: the client's node
//! follows links itself, as with NFS. So no name leads out of an exported directory, except through
//! a mount, and each object's mount is checked.

use rustix::fs::{FsWord, StatxFlags, fstatfs};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Type of MFS mounts in `/proc/self/mountinfo`.
const MFS_TYPE: &str = "fuse.mfs";

/// Type of the administration tree's mounts: its content depends on the reading process and the
/// node of that process.
const ADMIN_TYPE: &str = "fuse.mosix";

/// Magic numbers of file systems that show the kernel or its devices rather than files
/// (linux/magic.h).
const PSEUDO_FILESYSTEMS: [FsWord; 20] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x1cd1,      // devpts
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xcafe_4a11, // bpf
    0xde5e_81e4, // efivarfs
    0x6265_6570, // configfs
    0xf97c_ff8c, // selinuxfs
    0x6165_676c, // pstore
    0x4249_4e4d, // binfmt_misc
    0x6e73_6673, // nsfs
    0x1980_0202, // mqueue
    0x6573_5543, // fusectl
    0x534f_434b, // sockfs
    0x5049_5045, // pipefs
    0x0904_1934, // anonymous inodes
];

/// Magic number of FUSE file systems, whatever serves them.
const FUSE_MAGIC: FsWord = 0x6573_5546;

/// Position of an object relative to the exported paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ExportPosition {
    /// In an exported path.
    Exported,
    /// An ancestor of an exported path: only the directories on the way down are visible.
    Ancestor(PathBuf),
}

/// The export rules of a node.
#[derive(Debug, Clone, Default)]
pub(crate) struct Export {
    /// Refuse all changes.
    pub(crate) is_read_only: bool,
    /// Map root of other nodes to `nobody`.
    pub(crate) squashes_root: bool,
    /// Export only these subtrees, given without symbolic links; everything if empty.
    pub(crate) paths: Vec<PathBuf>,
}

impl Export {
    /// Position of the root directory.
    pub(crate) fn root(&self) -> ExportPosition {
        if self.paths.is_empty() || self.paths.iter().any(|path| path == Path::new("/")) {
            ExportPosition::Exported
        } else {
            ExportPosition::Ancestor("/".into())
        }
    }

    /// Position of the entry `name` in a directory at this position.
    ///
    /// # Errors
    /// `ENOENT` if the entry neither is exported nor leads to an exported path.
    pub(crate) fn child(&self, of: &ExportPosition, name: &OsStr) -> Result<ExportPosition, Errno> {
        let ExportPosition::Ancestor(path) = of else { return Ok(ExportPosition::Exported) };
        let path = path.join(name);
        if self.paths.contains(&path) {
            Ok(ExportPosition::Exported)
        } else if self.paths.iter().any(|exported| exported.starts_with(&path)) {
            Ok(ExportPosition::Ancestor(path))
        } else {
            Err(Errno::NOENT)
        }
    }
}

/// Whether an object that was just looked up is on a file system that may be exported.
///
/// # Errors
/// `ELOOP` for an MFS mount (`/mfs/1/mfs/…` would recurse); `EACCES` for a pseudo file system and
/// the administration tree.
pub(crate) fn check_exportable(fd: impl AsFd) -> Result<(), Errno> {
    let kind = fstatfs(&fd)?.f_type;
    if PSEUDO_FILESYSTEMS.contains(&kind) {
        return Err(Errno::ACCESS);
    }
    if kind == FUSE_MAGIC { check_mount(fd) } else { Ok(()) }
}

/// Refuses mounts of Tern's own trees, and mounts whose type cannot be determined.
fn check_mount(fd: impl AsFd) -> Result<(), Errno> {
    let flags = rustix::fs::AtFlags::EMPTY_PATH;
    let Ok(stat) = rustix::fs::statx(fd, "", flags, StatxFlags::MNT_ID) else { return Err(Errno::LOOP) };
    let Ok(table) = tern_control::procfs::read_text("/proc/self/mountinfo") else { return Err(Errno::LOOP) };
    check_mount_in(&table, stat.stx_mnt_id)
}

fn check_mount_in(table: &str, mount: u64) -> Result<(), Errno> {
    let number = mount.to_string();
    let line = table.lines().find(|line| line.split(' ').next() == Some(&number));
    // After the optional fields comes " - TYPE SOURCE OPTIONS".
    let kind = line.and_then(|line| line.split_once(" - ")).and_then(|(_, rest)| rest.split(' ').next());
    match kind {
        None | Some(MFS_TYPE) => Err(Errno::LOOP),
        Some(ADMIN_TYPE) => Err(Errno::ACCESS),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_way_down_to_exported_paths_is_visible() {
        let export = Export { paths: vec!["/home".into(), "/srv/data".into()], ..Export::default() };
        let root = export.root();
        assert_eq!(root, ExportPosition::Ancestor("/".into()));
        assert_eq!(export.child(&root, "home".as_ref()), Ok(ExportPosition::Exported));
        let srv = export.child(&root, "srv".as_ref()).unwrap();
        assert_eq!(srv, ExportPosition::Ancestor("/srv".into()));
        assert_eq!(export.child(&srv, "data".as_ref()), Ok(ExportPosition::Exported));
        assert_eq!(export.child(&srv, "dat".as_ref()), Err(Errno::NOENT));
        assert_eq!(export.child(&root, "etc".as_ref()), Err(Errno::NOENT));
        assert_eq!(export.child(&ExportPosition::Exported, "etc".as_ref()), Ok(ExportPosition::Exported));
    }

    #[test]
    fn everything_is_exported_without_paths() {
        assert_eq!(Export::default().root(), ExportPosition::Exported);
    }

    #[test]
    fn pseudo_file_systems_are_refused() {
        let open = |path| std::fs::File::open(path).unwrap();
        assert_eq!(check_exportable(open("/proc")), Err(Errno::ACCESS));
        assert_eq!(check_exportable(open("/proc/self/mountinfo")), Err(Errno::ACCESS));
        assert_eq!(check_exportable(open("/sys")), Err(Errno::ACCESS));
        assert_eq!(check_exportable(open("/")), Ok(()));
    }

    #[test]
    fn own_mounts_are_recognised_by_type() {
        let table = "24 1 254:0 / / rw - ext4 /dev/vda rw\n\
                     90 24 0:50 / /mfs rw,nosuid shared:1 - fuse.mfs mymfs rw\n\
                     91 24 0:51 / /mnt rw - fuse.sshfs h:/ rw\n\
                     92 24 0:52 / /run/mosix rw - fuse.mosix mosix rw\n";
        assert_eq!(check_mount_in(table, 90), Err(Errno::LOOP));
        assert_eq!(check_mount_in(table, 91), Ok(()));
        assert_eq!(check_mount_in(table, 24), Ok(()));
        assert_eq!(check_mount_in(table, 92), Err(Errno::ACCESS), "the administration tree");
        assert_eq!(check_mount_in(table, 9), Err(Errno::LOOP), "an unknown mount is refused");
    }
}
