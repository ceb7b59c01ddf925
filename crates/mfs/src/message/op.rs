//! File operations that a client requests.

use super::{AttributeChange, LockKind, Name, Object, OpenId};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

/// A file operation. Flags are those of Linux.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is the system call of that name, with its arguments")]
pub enum Op {
    Lookup {
        dir: Object,
        name: Name,
    },
    GetAttr {
        of: Object,
    },
    SetAttr {
        of: Object,
        opened: Option<OpenId>,
        change: AttributeChange,
    },
    ReadLink {
        of: Object,
    },
    Mknod {
        dir: Object,
        name: Name,
        mode: u32,
        umask: u32,
    },
    Mkdir {
        dir: Object,
        name: Name,
        mode: u32,
        umask: u32,
    },
    Symlink {
        dir: Object,
        name: Name,
        target: Name,
    },
    Unlink {
        dir: Object,
        name: Name,
    },
    Rmdir {
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
    /// The content of a small file is sent with the reply, if it was requested and a lease was
    /// granted.
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
        opened: OpenId,
        at: u64,
        length: u32,
    },
    /// `append`: the file is open with `O_APPEND`, so the data is appended, whatever `at` is.
    Write {
        opened: OpenId,
        at: u64,
        append: bool,
    },
    Fsync {
        opened: OpenId,
        data_only: bool,
    },
    /// Also looks up the entries, if that is requested.
    ReadDir {
        opened: OpenId,
        cookie: u64,
        max_bytes: u32,
        lookup: bool,
    },
    StatFs {
        of: Object,
    },
    GetXattr {
        of: Object,
        name: Name,
    },
    SetXattr {
        of: Object,
        name: Name,
        flags: u32,
    },
    ListXattr {
        of: Object,
    },
    RemoveXattr {
        of: Object,
        name: Name,
    },
    Fallocate {
        opened: OpenId,
        mode: u32,
        at: u64,
        length: u64,
    },
    Lseek {
        opened: OpenId,
        at: u64,
        data: bool,
    },
    /// Copies between two files of the server's node, which does not send their content.
    CopyFileRange {
        from: OpenId,
        at: u64,
        to: OpenId,
        to_at: u64,
        length: u64,
    },
    /// Sets or removes a record lock of fcntl. `owner` is the client's number for the lock owner (a
    /// process or an open file description), valid until the owner is released.
    SetLock {
        opened: OpenId,
        owner: u64,
        kind: LockKind,
        start: u64,
        end: u64,
    },
    /// Finds a record lock that conflicts with this one.
    GetLock {
        opened: OpenId,
        owner: u64,
        kind: LockKind,
        start: u64,
        end: u64,
    },
    /// Sets or removes a lock of flock, which the open file holds until it is closed.
    Flock {
        opened: OpenId,
        kind: LockKind,
    },
}

impl Op {
    /// Whether the operation may be repeated after a restart of the server, when it is unknown
    /// whether the previous server executed the operation. A file that the previous server opened
    /// is no longer open then.
    #[must_use]
    pub fn may_retry_after_restart(&self) -> bool {
        self.is_idempotent()
            || matches!(
                self,
                Self::Open { .. }
                    | Self::SetAttr { .. }
                    | Self::SetLock { .. }
                    | Self::Flock { .. }
                    | Self::Write { append: false, .. }
            )
    }

    /// Whether it only reads a file that is already open.
    #[must_use]
    pub fn is_read(&self) -> bool {
        matches!(self, Self::Read { .. })
    }

    /// Whether it can be an intermediate step of a path walk.
    #[must_use]
    pub fn is_path_walk(&self) -> bool {
        matches!(self, Self::Lookup { .. } | Self::ReadLink { .. } | Self::GetAttr { .. })
    }

    /// The names that may resolve to something else afterwards.
    #[must_use]
    pub fn changed_names(&self) -> Vec<Name> {
        match self {
            Self::Mknod { name, .. }
            | Self::Mkdir { name, .. }
            | Self::Symlink { name, .. }
            | Self::Unlink { name, .. }
            | Self::Rmdir { name, .. }
            | Self::Link { name, .. }
            | Self::Create { name, .. } => vec![name.clone()],
            Self::Rename { name, new, .. } => vec![name.clone(), new.clone()],
            _ => Vec::new(),
        }
    }

    /// Whether it changes the file system.
    #[must_use]
    pub fn modifies(&self) -> bool {
        match self {
            Self::Open { flags, .. } => OFlags::from_bits_retain(*flags).contains(OFlags::TRUNC),
            Self::SetLock { .. } | Self::Flock { .. } => false,
            _ => !self.is_idempotent(),
        }
    }

    /// Whether it is idempotent, so that it can simply be repeated.
    #[must_use]
    pub fn is_idempotent(&self) -> bool {
        matches!(
            self,
            Self::Lookup { .. }
                | Self::GetAttr { .. }
                | Self::ReadLink { .. }
                | Self::Read { .. }
                | Self::Fsync { .. }
                | Self::ReadDir { .. }
                | Self::StatFs { .. }
                | Self::GetXattr { .. }
                | Self::ListXattr { .. }
                | Self::Lseek { .. }
                | Self::GetLock { .. }
        )
    }
}
