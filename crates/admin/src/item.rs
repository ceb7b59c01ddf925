//! What there is in the tree, and the numbers by which the kernel knows it.
//!
//! Nothing is remembered of what the kernel was told: a number says all of it.

use tern_ids::{HomePid, NodeId};

/// Something that has files, or is a directory of such.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    /// The tree's own root.
    Root,
    /// `admin`: this node.
    Admin,
    /// `decay`: whoever writes there.
    Decay,
    /// `nodes`.
    Nodes,
    /// `remote`: the guests of this node.
    Remote,
    /// `proc`: the processes of this node.
    Proc,
    /// `proc/self`: a link to whoever follows it.
    Me,
    /// One node.
    Node(NodeId),
    /// One guest, by its home and its number there.
    Guest(NodeId, HomePid),
    /// One process.
    Process(HomePid),
}

/// A file, whosever it is.
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

/// A file's name, and what may be done with it. Names are MOSIX's.
#[derive(Debug)]
pub(crate) struct Row {
    leaf: Leaf,
    /// The number of its directory's kind, as in [`kind`].
    of: u8,
    name: &'static str,
    mode: u16,
}

const fn row(leaf: Leaf, of: u8, name: &'static str, mode: u16) -> Row {
    Row { leaf, of, name, mode }
}

/// To be read by all, and written by root or whose it is.
const BOTH: u16 = 0o644;
const READ: u16 = 0o444;

const ADMIN: u8 = 1;
const DECAY: u8 = 2;
const NODE: u8 = 7;
const GUEST: u8 = 8;
const PROCESS: u8 = 9;

/// All files; their order is that of their numbers.
const FILES: [Row; 38] = [
    row(Leaf::Mospe, ADMIN, "mospe", BOTH),
    row(Leaf::Stay, ADMIN, "stay", BOTH),
    row(Leaf::Lstay, ADMIN, "lstay", BOTH),
    row(Leaf::Block, ADMIN, "block", BOTH),
    row(Leaf::Quiet, ADMIN, "quiet", BOTH),
    row(Leaf::NoMfs, ADMIN, "nomfs", BOTH),
    row(Leaf::Bring, ADMIN, "bring", BOTH),
    row(Leaf::Expel, ADMIN, "expel", BOTH),
    row(Leaf::OwnSpeed, ADMIN, "speed", BOTH),
    row(Leaf::Version, ADMIN, "version", READ),
    row(Leaf::Config, ADMIN, "config", READ),
    row(Leaf::DecayInterval, ADMIN, "decay-interval", BOTH),
    row(Leaf::SlowDecay, ADMIN, "slow-decay", BOTH),
    row(Leaf::FastDecay, ADMIN, "fast-decay", BOTH),
    row(Leaf::CpuJob, DECAY, "cpujob", 0o222),
    row(Leaf::IoJob, DECAY, "iojob", 0o222),
    row(Leaf::Slow, DECAY, "slow", 0o222),
    row(Leaf::Fast, DECAY, "fast", 0o222),
    row(Leaf::Cpus, NODE, "CPUs", READ),
    row(Leaf::Load, NODE, "load", READ),
    row(Leaf::Mem, NODE, "mem", READ),
    row(Leaf::Rmem, NODE, "rmem", READ),
    row(Leaf::Tmem, NODE, "tmem", READ),
    row(Leaf::Speed, NODE, "speed", READ),
    row(Leaf::Status, NODE, "status", READ),
    row(Leaf::Util, NODE, "util", READ),
    row(Leaf::From, GUEST, "from", READ),
    row(Leaf::Identity, GUEST, "identity", READ),
    row(Leaf::Statm, GUEST, "statm", READ),
    row(Leaf::Stats, GUEST, "stats", READ),
    row(Leaf::Out, GUEST, "migrate", 0o200),
    row(Leaf::Where, PROCESS, "where", READ),
    row(Leaf::CantMove, PROCESS, "cantmove", READ),
    row(Leaf::Goto, PROCESS, "goto", BOTH),
    row(Leaf::Migrate, PROCESS, "migrate", BOTH),
    row(Leaf::Lock, PROCESS, "lock", BOTH),
    row(Leaf::Nmigs, PROCESS, "nmigs", READ),
    row(Leaf::Selected, PROCESS, "selected", BOTH),
];

/// The directories below the root.
pub(crate) const TOP: [(Whose, &str); 5] = [
    (Whose::Admin, "admin"),
    (Whose::Decay, "decay"),
    (Whose::Nodes, "nodes"),
    (Whose::Remote, "remote"),
    (Whose::Proc, "proc"),
];

fn kind(whose: Whose) -> u8 {
    match whose {
        Whose::Root => 0,
        Whose::Admin => ADMIN,
        Whose::Decay => DECAY,
        Whose::Nodes => 3,
        Whose::Remote => 4,
        Whose::Proc => 5,
        Whose::Me => 6,
        Whose::Node(_) => NODE,
        Whose::Guest(..) => GUEST,
        Whose::Process(_) => PROCESS,
    }
}

/// One inode: a file, or the directory (or link) itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) whose: Whose,
    pub(crate) leaf: Option<Leaf>,
}

impl Item {
    /// The directory, or link, itself.
    pub(crate) fn own(whose: Whose) -> Self {
        Self { whose, leaf: None }
    }

    /// The files that this has.
    pub(crate) fn files(whose: Whose) -> impl Iterator<Item = (Self, &'static str)> {
        let rows = FILES.iter().filter(move |row| row.of == kind(whose));
        rows.map(move |row| (Self { whose, leaf: Some(row.leaf) }, row.name))
    }

    fn place(leaf: Leaf) -> usize {
        FILES.iter().position(|row| row.leaf == leaf).unwrap_or(0)
    }

    /// The permissions of a file or directory.
    pub(crate) fn mode(self) -> u16 {
        match self.leaf {
            Some(leaf) => FILES[Self::place(leaf)].mode,
            None if self.whose == Whose::Me => 0o777,
            None => 0o555,
        }
    }

    /// Whether somebody may write to it.
    pub(crate) fn is_written(self) -> bool {
        self.leaf.is_some() && self.mode() & 0o222 != 0
    }

    /// `kind << 56 | node << 40 | pid << 8 | file`, and one more, since the root's is 1.
    pub(crate) fn number(self) -> u64 {
        let (node, pid) = match self.whose {
            Whose::Node(node) => (node.0, 0),
            Whose::Guest(home, pid) => (home.0, pid.0),
            Whose::Process(pid) => (0, pid.0),
            _ => (0, 0),
        };
        let file = self.leaf.map_or(0, |leaf| Self::place(leaf) as u64 + 1);
        let pid = u64::from(pid.cast_unsigned() & 0x7fff_ffff);
        (u64::from(kind(self.whose)) << 56 | u64::from(node) << 40 | pid << 8 | file) + 1
    }

    /// What has this number.
    pub(crate) fn of(number: u64) -> Option<Self> {
        let number = number.checked_sub(1)?;
        let node = NodeId((number >> 40) as u16);
        let pid = HomePid((number >> 8 & 0x7fff_ffff) as i32);
        let whose = match (number >> 56) as u8 {
            0 => Whose::Root,
            ADMIN => Whose::Admin,
            DECAY => Whose::Decay,
            3 => Whose::Nodes,
            4 => Whose::Remote,
            5 => Whose::Proc,
            6 => Whose::Me,
            NODE => Whose::Node(node),
            GUEST => Whose::Guest(node, pid),
            PROCESS => Whose::Process(pid),
            _ => return None,
        };
        let leaf = match usize::try_from(number & 0xff).ok()?.checked_sub(1) {
            None => None,
            Some(place) => Some(FILES.get(place).filter(|row| row.of == kind(whose))?.leaf),
        };
        let item = Self { whose, leaf };
        // Nothing has two numbers.
        (item.number() == number + 1).then_some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_has_a_number_of_its_own() {
        let whose = [
            Whose::Root,
            Whose::Admin,
            Whose::Decay,
            Whose::Nodes,
            Whose::Remote,
            Whose::Proc,
            Whose::Me,
            Whose::Node(NodeId(1)),
            Whose::Node(NodeId(u16::MAX)),
            Whose::Guest(NodeId(u16::MAX), HomePid(4_194_304)),
            Whose::Guest(NodeId(1), HomePid(1)),
            Whose::Process(HomePid(1)),
            Whose::Process(HomePid(i32::MAX)),
        ];
        let mut seen = std::collections::HashSet::new();
        for whose in whose {
            for item in Item::files(whose).map(|(item, _)| item).chain([Item::own(whose)]) {
                assert_eq!(Item::of(item.number()), Some(item));
                assert!(seen.insert(item.number()), "{item:?}");
            }
        }
        assert_eq!(Item::own(Whose::Root).number(), 1);
        for number in [0, 3, u64::MAX, 1 << 60, (u64::from(PROCESS) << 56) + 2] {
            assert_eq!(Item::of(number), None, "{number:x}");
        }
    }

    #[test]
    fn files_are_in_their_order() {
        for (place, row) in FILES.iter().enumerate() {
            assert_eq!(Item::place(row.leaf), place, "{}", row.name);
        }
        let names: Vec<_> = Item::files(Whose::Process(HomePid(7))).map(|(_, name)| name).collect();
        assert_eq!(names, ["where", "cantmove", "goto", "migrate", "lock", "nmigs", "selected"]);
    }
}
