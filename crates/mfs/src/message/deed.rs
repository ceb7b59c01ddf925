//! What a client can have done.

use super::{Change, LockKind, Name, Object, Opened};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

/// What can be done. The flags are those of Linux.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is the system call of that name, with its arguments")]
pub enum Deed {
    Lookup {
        dir: Object,
        name: Name,
    },
    Stat {
        of: Object,
    },
    Set {
        of: Object,
        opened: Option<Opened>,
        change: Change,
    },
    ReadLink {
        of: Object,
    },
    MakeNode {
        dir: Object,
        name: Name,
        mode: u32,
        umask: u32,
    },
    MakeDir {
        dir: Object,
        name: Name,
        mode: u32,
        umask: u32,
    },
    MakeLink {
        dir: Object,
        name: Name,
        target: Name,
    },
    Unlink {
        dir: Object,
        name: Name,
    },
    RemoveDir {
        dir: Object,
        name: Name,
    },
    Rename {
        dir: Object,
        name: Name,
        to: Object,
        new: Name,
        flags: u32,
    },
    Link {
        of: Object,
        dir: Object,
        name: Name,
    },
    /// If the file is small, and a lease of it is had, its content comes with the answer when that is asked for.
    Open {
        of: Object,
        flags: u32,
        content: bool,
    },
    Create {
        dir: Object,
        name: Name,
        mode: u32,
        umask: u32,
        flags: u32,
    },
    Read {
        opened: Opened,
        at: u64,
        length: u32,
    },
    /// What is opened for appending appends, wherever `at` is.
    Write {
        opened: Opened,
        at: u64,
        append: bool,
    },
    Sync {
        opened: Opened,
        data_only: bool,
    },
    /// Looks the entries up as well, if that is asked for.
    ReadDir {
        opened: Opened,
        after: u64,
        most: u32,
        look: bool,
    },
    StatFs {
        of: Object,
    },
    GetAttribute {
        of: Object,
        name: Name,
    },
    SetAttribute {
        of: Object,
        name: Name,
        flags: u32,
    },
    ListAttributes {
        of: Object,
    },
    RemoveAttribute {
        of: Object,
        name: Name,
    },
    Allocate {
        opened: Opened,
        mode: u32,
        at: u64,
        length: u64,
    },
    Seek {
        opened: Opened,
        at: u64,
        data: bool,
    },
    /// Between two files of this node, without their content going anywhere else.
    Copy {
        from: Opened,
        at: u64,
        to: Opened,
        to_at: u64,
        length: u64,
    },
    /// fcntl's record locks: the client's number of who wants it stands for the process, until that is released.
    Lock {
        opened: Opened,
        owner: u64,
        kind: LockKind,
        start: u64,
        end: u64,
    },
    /// Who has a lock in the way of this one?
    TestLock {
        opened: Opened,
        owner: u64,
        kind: LockKind,
        start: u64,
        end: u64,
    },
    /// flock's, which the open file has until it is closed.
    Flock {
        opened: Opened,
        kind: LockKind,
    },
}

impl Deed {
    /// Whether it may be asked again of a server that has begun anew, when nobody knows whether the last one has done it.
    /// What it said of open files is not held any more then.
    #[must_use]
    pub fn survives_restart(&self) -> bool {
        self.is_repeatable()
            || matches!(
                self,
                Self::Open { .. }
                    | Self::Set { .. }
                    | Self::Lock { .. }
                    | Self::Flock { .. }
                    | Self::Write { append: false, .. }
            )
    }

    /// Whether it only reads what has been opened before.
    #[must_use]
    pub fn reads_what_is_open(&self) -> bool {
        matches!(self, Self::Read { .. })
    }

    /// Whether a path may go on behind it.
    #[must_use]
    pub fn is_on_the_way(&self) -> bool {
        matches!(self, Self::Lookup { .. } | Self::ReadLink { .. } | Self::Stat { .. })
    }

    /// The names that mean something else when it is done.
    #[must_use]
    pub fn names(&self) -> Vec<Name> {
        match self {
            Self::MakeNode { name, .. }
            | Self::MakeDir { name, .. }
            | Self::MakeLink { name, .. }
            | Self::Unlink { name, .. }
            | Self::RemoveDir { name, .. }
            | Self::Link { name, .. }
            | Self::Create { name, .. } => vec![name.clone()],
            Self::Rename { name, new, .. } => vec![name.clone(), new.clone()],
            _ => Vec::new(),
        }
    }

    /// Whether it changes what is on a disk.
    #[must_use]
    pub fn changes(&self) -> bool {
        match self {
            Self::Open { flags, .. } => OFlags::from_bits_retain(*flags).contains(OFlags::TRUNC),
            Self::Lock { .. } | Self::Flock { .. } => false,
            _ => !self.is_repeatable(),
        }
    }

    /// Whether doing it twice is the same as doing it once, so that it may simply be asked again.
    #[must_use]
    pub fn is_repeatable(&self) -> bool {
        matches!(
            self,
            Self::Lookup { .. }
                | Self::Stat { .. }
                | Self::ReadLink { .. }
                | Self::Read { .. }
                | Self::Sync { .. }
                | Self::ReadDir { .. }
                | Self::StatFs { .. }
                | Self::GetAttribute { .. }
                | Self::ListAttributes { .. }
                | Self::Seek { .. }
                | Self::TestLock { .. }
        )
    }
}
