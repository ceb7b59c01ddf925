//! What a node lets others reach, and what never.
//!
//! Only single names are ever looked up, and never through a symbolic link: links are for the client to follow, on its own
//! node, as NFS has it. So no name leads out of what is below; mounts do, and each is looked at.

use rustix::fs::{FsWord, StatxFlags, fstatfs};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// The kind of our own mounts in `/proc/self/mountinfo`.
const OURS: &str = "fuse.mfs";

/// The kind of the administration's tree, which goes by who looks into it on its own node.
const ADMIN: &str = "fuse.mosix";

/// File systems that show the kernel and its devices and no files (linux/magic.h).
const KERNELS_OWN: [FsWord; 20] = [
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

/// The file system of FUSE, whoever serves it.
const FUSE: FsWord = 0x6573_5546;

/// Where an object is, as far as the rules go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// In what is exported.
    Inside,
    /// Above a path that is; only the way down is shown.
    Above(PathBuf),
}

/// The rules of a node.
#[derive(Debug, Clone, Default)]
pub(crate) struct Export {
    /// Nothing can be changed.
    pub(crate) read_only: bool,
    /// Root of another node is nobody here.
    pub(crate) squash_root: bool,
    /// Only these paths and what is below them, without symbolic links; all if empty.
    pub(crate) paths: Vec<PathBuf>,
}

impl Export {
    /// Where the root is.
    pub(crate) fn root(&self) -> Place {
        if self.paths.is_empty() || self.paths.iter().any(|path| path == Path::new("/")) {
            Place::Inside
        } else {
            Place::Above("/".into())
        }
    }

    /// Where a name leads from here.
    ///
    /// # Errors
    /// `ENOENT` if neither into nor towards anything that is exported.
    pub(crate) fn step(&self, from: &Place, name: &OsStr) -> Result<Place, Errno> {
        let Place::Above(path) = from else { return Ok(Place::Inside) };
        let path = path.join(name);
        if self.paths.contains(&path) {
            Ok(Place::Inside)
        } else if self.paths.iter().any(|inside| inside.starts_with(&path)) {
            Ok(Place::Above(path))
        } else {
            Err(Errno::NOENT)
        }
    }
}

/// Whether what was just looked up may be reached.
///
/// # Errors
/// `ELOOP` for our own trees (`/mfs/1/mfs/…` would go round), `EACCES` for what is no file system of files, the tree of
/// administration included.
pub(crate) fn admit(fd: impl AsFd) -> Result<(), Errno> {
    let kind = fstatfs(&fd)?.f_type;
    if KERNELS_OWN.contains(&kind) {
        return Err(Errno::ACCESS);
    }
    if kind == FUSE { may_enter(fd) } else { Ok(()) }
}

/// Passes unless it is in a tree that Tern has mounted. What cannot be told is taken for one.
fn may_enter(fd: impl AsFd) -> Result<(), Errno> {
    let flags = rustix::fs::AtFlags::EMPTY_PATH;
    let Ok(stat) = rustix::fs::statx(fd, "", flags, StatxFlags::MNT_ID) else { return Err(Errno::LOOP) };
    let Ok(table) = std::fs::read_to_string("/proc/self/mountinfo") else { return Err(Errno::LOOP) };
    may_enter_in(&table, stat.stx_mnt_id)
}

fn may_enter_in(table: &str, mount: u64) -> Result<(), Errno> {
    let number = mount.to_string();
    let line = table.lines().find(|line| line.split(' ').next() == Some(&number));
    // After the optional fields comes " - KIND SOURCE OPTIONS".
    let kind = line.and_then(|line| line.split_once(" - ")).and_then(|(_, rest)| rest.split(' ').next());
    match kind {
        None | Some(OURS) => Err(Errno::LOOP),
        Some(ADMIN) => Err(Errno::ACCESS),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_down_is_shown_and_nothing_beside_it() {
        let export = Export { paths: vec!["/home".into(), "/srv/data".into()], ..Export::default() };
        let root = export.root();
        assert_eq!(root, Place::Above("/".into()));
        assert_eq!(export.step(&root, "home".as_ref()), Ok(Place::Inside));
        let srv = export.step(&root, "srv".as_ref()).unwrap();
        assert_eq!(srv, Place::Above("/srv".into()));
        assert_eq!(export.step(&srv, "data".as_ref()), Ok(Place::Inside));
        assert_eq!(export.step(&srv, "dat".as_ref()), Err(Errno::NOENT));
        assert_eq!(export.step(&root, "etc".as_ref()), Err(Errno::NOENT));
        assert_eq!(export.step(&Place::Inside, "etc".as_ref()), Ok(Place::Inside));
    }

    #[test]
    fn without_paths_all_is_inside() {
        assert_eq!(Export::default().root(), Place::Inside);
    }

    #[test]
    fn the_kernels_own_trees_are_refused() {
        let open = |path| std::fs::File::open(path).unwrap();
        assert_eq!(admit(open("/proc")), Err(Errno::ACCESS));
        assert_eq!(admit(open("/proc/self/mountinfo")), Err(Errno::ACCESS));
        assert_eq!(admit(open("/sys")), Err(Errno::ACCESS));
        assert_eq!(admit(open("/")), Ok(()));
    }

    #[test]
    fn our_own_trees_are_known_by_their_kind() {
        let table = "24 1 254:0 / / rw - ext4 /dev/vda rw\n\
                     90 24 0:50 / /mfs rw,nosuid shared:1 - fuse.mfs mymfs rw\n\
                     91 24 0:51 / /mnt rw - fuse.sshfs h:/ rw\n\
                     92 24 0:52 / /run/mosix rw - fuse.mosix mosix rw\n";
        assert_eq!(may_enter_in(table, 90), Err(Errno::LOOP));
        assert_eq!(may_enter_in(table, 91), Ok(()));
        assert_eq!(may_enter_in(table, 24), Ok(()));
        assert_eq!(may_enter_in(table, 92), Err(Errno::ACCESS), "the tree of administration");
        assert_eq!(may_enter_in(table, 9), Err(Errno::LOOP), "what cannot be told is taken for one");
    }
}
