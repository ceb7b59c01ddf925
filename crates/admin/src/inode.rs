//! The tree's inodes, and their numbers.
//!
//! There is no inode table: an inode number encodes the inode completely.

use tern_ids::{HomePid, NodeId};

/// A directory, or the link `proc/self`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dir {
    /// The tree's root.
    Root,
    /// `admin`: this node.
    Admin,
    /// `decay`: the process that opens a file in it.
    Decay,
    /// `nodes`.
    Nodes,
    /// `remote`: the guests of this node.
    Remote,
    /// `proc`: the processes of this node.
    Proc,
    /// `proc/self`: a link to the directory of the process that follows it.
    SelfLink,
    /// A node.
    Node(NodeId),
    /// A guest, by its home and its pid there.
    Guest(NodeId, HomePid),
    /// A process.
    Process(HomePid),
}

/// A file, in whichever directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaf {
    Mospe,
    Stay,
    Lstay,
    Block,
    Quiet,
    NoMfs,
    Bring,
    Expel,
    OwnSpeed,
    Version,
    Config,
    DecayInterval,
    SlowDecay,
    FastDecay,
    CpuJob,
    IoJob,
    Slow,
    Fast,
    Cpus,
    Load,
    Mem,
    Rmem,
    Tmem,
    Speed,
    Status,
    Util,
    From,
    Identity,
    Statm,
    Stats,
    Out,
    Where,
    CantMove,
    Goto,
    Migrate,
    Lock,
    Nmigs,
    Selected,
}

/// Directory, name and permissions of a file. Names are MOSIX's.
#[derive(Debug)]
pub(crate) struct FileRow {
    leaf: Leaf,
    /// The type of its directory, as returned by [`dir_type`].
    dir_type: u8,
    name: &'static str,
    mode: u16,
}

const fn row(leaf: Leaf, dir_type: u8, name: &'static str, mode: u16) -> FileRow {
    FileRow { leaf, dir_type, name, mode }
}

/// Readable by all users, writable by root or the process' owner.
const READ_WRITE: u16 = 0o644;
const READ_ONLY: u16 = 0o444;

const ADMIN: u8 = 1;
const DECAY: u8 = 2;
const NODE: u8 = 7;
const GUEST: u8 = 8;
const PROCESS: u8 = 9;

/// All files. The index is part of the inode number.
const FILES: [FileRow; 38] = [
    row(Leaf::Mospe, ADMIN, "mospe", READ_WRITE),
    row(Leaf::Stay, ADMIN, "stay", READ_WRITE),
    row(Leaf::Lstay, ADMIN, "lstay", READ_WRITE),
    row(Leaf::Block, ADMIN, "block", READ_WRITE),
    row(Leaf::Quiet, ADMIN, "quiet", READ_WRITE),
    row(Leaf::NoMfs, ADMIN, "nomfs", READ_WRITE),
    row(Leaf::Bring, ADMIN, "bring", READ_WRITE),
    row(Leaf::Expel, ADMIN, "expel", READ_WRITE),
    row(Leaf::OwnSpeed, ADMIN, "speed", READ_WRITE),
    row(Leaf::Version, ADMIN, "version", READ_ONLY),
    row(Leaf::Config, ADMIN, "config", READ_ONLY),
    row(Leaf::DecayInterval, ADMIN, "decay-interval", READ_WRITE),
    row(Leaf::SlowDecay, ADMIN, "slow-decay", READ_WRITE),
    row(Leaf::FastDecay, ADMIN, "fast-decay", READ_WRITE),
    row(Leaf::CpuJob, DECAY, "cpujob", 0o222),
    row(Leaf::IoJob, DECAY, "iojob", 0o222),
    row(Leaf::Slow, DECAY, "slow", 0o222),
    row(Leaf::Fast, DECAY, "fast", 0o222),
    row(Leaf::Cpus, NODE, "CPUs", READ_ONLY),
    row(Leaf::Load, NODE, "load", READ_ONLY),
    row(Leaf::Mem, NODE, "mem", READ_ONLY),
    row(Leaf::Rmem, NODE, "rmem", READ_ONLY),
    row(Leaf::Tmem, NODE, "tmem", READ_ONLY),
    row(Leaf::Speed, NODE, "speed", READ_ONLY),
    row(Leaf::Status, NODE, "status", READ_ONLY),
    row(Leaf::Util, NODE, "util", READ_ONLY),
    row(Leaf::From, GUEST, "from", READ_ONLY),
    row(Leaf::Identity, GUEST, "identity", READ_ONLY),
    row(Leaf::Statm, GUEST, "statm", READ_ONLY),
    row(Leaf::Stats, GUEST, "stats", READ_ONLY),
    row(Leaf::Out, GUEST, "migrate", 0o200),
    row(Leaf::Where, PROCESS, "where", READ_ONLY),
    row(Leaf::CantMove, PROCESS, "cantmove", READ_ONLY),
    row(Leaf::Goto, PROCESS, "goto", READ_WRITE),
    row(Leaf::Migrate, PROCESS, "migrate", READ_WRITE),
    row(Leaf::Lock, PROCESS, "lock", READ_WRITE),
    row(Leaf::Nmigs, PROCESS, "nmigs", READ_ONLY),
    row(Leaf::Selected, PROCESS, "selected", READ_WRITE),
];

/// The directories in the root.
pub(crate) const TOP: [(Dir, &str); 5] = [
    (Dir::Admin, "admin"),
    (Dir::Decay, "decay"),
    (Dir::Nodes, "nodes"),
    (Dir::Remote, "remote"),
    (Dir::Proc, "proc"),
];

fn dir_type(dir: Dir) -> u8 {
    match dir {
        Dir::Root => 0,
        Dir::Admin => ADMIN,
        Dir::Decay => DECAY,
        Dir::Nodes => 3,
        Dir::Remote => 4,
        Dir::Proc => 5,
        Dir::SelfLink => 6,
        Dir::Node(_) => NODE,
        Dir::Guest(..) => GUEST,
        Dir::Process(_) => PROCESS,
    }
}

/// An inode: a file, or the directory (or link) itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inode {
    pub(crate) dir: Dir,
    pub(crate) leaf: Option<Leaf>,
}

impl Inode {
    /// The inode of a directory or link.
    pub(crate) fn of_dir(dir: Dir) -> Self {
        Self { dir, leaf: None }
    }

    /// The files in this directory.
    pub(crate) fn files(dir: Dir) -> impl Iterator<Item = (Self, &'static str)> {
        let rows = FILES.iter().filter(move |row| row.dir_type == dir_type(dir));
        rows.map(move |row| (Self { dir, leaf: Some(row.leaf) }, row.name))
    }

    fn index(leaf: Leaf) -> usize {
        FILES.iter().position(|row| row.leaf == leaf).unwrap_or(0)
    }

    /// Permissions.
    pub(crate) fn mode(self) -> u16 {
        match self.leaf {
            Some(leaf) => FILES[Self::index(leaf)].mode,
            None if self.dir == Dir::SelfLink => 0o777,
            None => 0o555,
        }
    }

    /// Whether at least one user may write to it.
    pub(crate) fn is_writable(self) -> bool {
        self.leaf.is_some() && self.mode() & 0o222 != 0
    }

    /// The inode number: `type << 56 | node << 40 | pid << 8 | file`, plus 1, since FUSE gives the
    /// root number 1.
    pub(crate) fn number(self) -> u64 {
        let (node, pid) = match self.dir {
            Dir::Node(node) => (node.0, 0),
            Dir::Guest(home, pid) => (home.0, pid.0),
            Dir::Process(pid) => (0, pid.0),
            _ => (0, 0),
        };
        let file = self.leaf.map_or(0, |leaf| Self::index(leaf) as u64 + 1);
        let pid = u64::from(pid.cast_unsigned() & 0x7fff_ffff);
        (u64::from(dir_type(self.dir)) << 56 | u64::from(node) << 40 | pid << 8 | file) + 1
    }

    /// The inode with this number.
    pub(crate) fn from_number(number: u64) -> Option<Self> {
        let number = number.checked_sub(1)?;
        let node = NodeId((number >> 40) as u16);
        let pid = HomePid((number >> 8 & 0x7fff_ffff) as i32);
        let dir = match (number >> 56) as u8 {
            0 => Dir::Root,
            ADMIN => Dir::Admin,
            DECAY => Dir::Decay,
            3 => Dir::Nodes,
            4 => Dir::Remote,
            5 => Dir::Proc,
            6 => Dir::SelfLink,
            NODE => Dir::Node(node),
            GUEST => Dir::Guest(node, pid),
            PROCESS => Dir::Process(pid),
            _ => return None,
        };
        let leaf = match usize::try_from(number & 0xff).ok()?.checked_sub(1) {
            None => None,
            Some(index) => Some(FILES.get(index).filter(|row| row.dir_type == dir_type(dir))?.leaf),
        };
        let inode = Self { dir, leaf };
        // Each inode has only one number.
        (inode.number() == number + 1).then_some(inode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inode_numbers_are_unique() {
        let dirs = [
            Dir::Root,
            Dir::Admin,
            Dir::Decay,
            Dir::Nodes,
            Dir::Remote,
            Dir::Proc,
            Dir::SelfLink,
            Dir::Node(NodeId(1)),
            Dir::Node(NodeId(u16::MAX)),
            Dir::Guest(NodeId(u16::MAX), HomePid(4_194_304)),
            Dir::Guest(NodeId(1), HomePid(1)),
            Dir::Process(HomePid(1)),
            Dir::Process(HomePid(i32::MAX)),
        ];
        let mut seen = std::collections::HashSet::new();
        for dir in dirs {
            for inode in Inode::files(dir).map(|(inode, _)| inode).chain([Inode::of_dir(dir)]) {
                assert_eq!(Inode::from_number(inode.number()), Some(inode));
                assert!(seen.insert(inode.number()), "{inode:?}");
            }
        }
        assert_eq!(Inode::of_dir(Dir::Root).number(), 1);
        for number in [0, 3, u64::MAX, 1 << 60, (u64::from(PROCESS) << 56) + 2] {
            assert_eq!(Inode::from_number(number), None, "{number:x}");
        }
    }

    #[test]
    fn files_are_listed_in_order() {
        for (index, row) in FILES.iter().enumerate() {
            assert_eq!(Inode::index(row.leaf), index, "{}", row.name);
        }
        let names: Vec<_> = Inode::files(Dir::Process(HomePid(7))).map(|(_, name)| name).collect();
        assert_eq!(names, ["where", "cantmove", "goto", "migrate", "lock", "nmigs", "selected"]);
    }
}
