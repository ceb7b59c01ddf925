//! What the client of a file system and the node that has the files say to each other.
//!
//! ```text
//!  client ── Ask, and what is to be written ──▶ server      frame 1, its tag counts the asks of this lane
//!         ◀─ Answer, and what was read ────────             frame 2, with the ask's tag
//! ```
//! On slow links either may be packed (`packing.rs`). A connection is a *lane*: one ask at a time, so that many run at once on many lanes. All lanes of one mounted tree are
//! one *session*, which holds its objects and open files, and outlives its lanes for a while: after a broken connection the
//! client asks again under the same number, and what was done already is not done twice.
//!
//! Before each answer stands a number: how many leases this session was asked for by then. On the ear it is that of the last that goes
//! with the answer, and of all before it.

mod deed;
mod extended;

pub use deed::Deed;
pub use extended::Extended;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// The kind of a frame that asks.
pub const ASK: u8 = 1;

/// The kind of a frame that answers.
pub const ANSWER: u8 = 2;

/// The version of all this. A node that speaks another one is told so.
pub const VERSION: u16 = 8;

/// The most bytes that are read or written at once.
pub const MOST_DATA: usize = 1 << 20;

/// How large a file may be whose content comes with the answer to an open.
pub const SMALL: usize = 64 << 10;

/// The most entries that are looked up by one [`Deed::ReadDir`].
pub const MOST_LOOKED_UP: usize = 512;

/// The most steps that go with an ask.
pub const MOST_STEPS: usize = 256;

/// The most groups of a caller: the kernel's own limit.
pub const MOST_GROUPS: usize = 65_536;

/// A file, directory or link that the session holds, by the server's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Object(pub u64);

/// The directory where the export begins; every session holds it.
pub const ROOT: Object = Object(0);

/// An open file or directory of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Opened(pub u64);

/// One name in a directory, or the target of a symbolic link.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name(Vec<u8>);

impl Name {
    /// As the kernel takes it.
    #[must_use]
    pub fn as_os(&self) -> &OsStr {
        OsStr::from_bytes(&self.0)
    }

    /// Whether it is one step down, and nothing else: not empty, not `.` or `..`, without `/` and zero bytes, and not
    /// longer than 255 bytes.
    #[must_use]
    pub fn is_one_step(&self) -> bool {
        let name = &self.0[..];
        !matches!(name, b"" | b"." | b"..")
            && name.len() <= 255
            && !name.iter().any(|b| matches!(b, 0 | b'/'))
    }
}

impl From<&OsStr> for Name {
    fn from(name: &OsStr) -> Self {
        Self(name.as_bytes().to_vec())
    }
}

impl From<Name> for OsString {
    fn from(name: Name) -> Self {
        Self::from_vec(name.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_os().fmt(f)
    }
}

/// Who wants it, as the client's kernel says.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Caller {
    /// The user.
    pub uid: u32,
    /// His first group.
    pub gid: u32,
    /// His other groups.
    pub groups: Vec<u32>,
}

/// One ask.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Ask {
    /// The first on a connection: which lane of which session this is.
    Begin {
        /// [`VERSION`].
        version: u16,
        /// Chosen by the client, for as long as the tree is mounted.
        session: [u8; 16],
        /// Counted from 0.
        lane: u16,
        /// Its asks up to this number are given up: the client has no answer to that one, and what it has opened is to be
        /// closed. 0 if there is none.
        given_up: u64,
        /// It is the ear: on it the client is asked for its leases ([`Ask::Hear`]), and nothing else is done.
        ear: bool,
        /// What the tree is for.
        purpose: Purpose,
    },
    /// Do something, if these steps still lead where they did ([`Answer::Elsewhere`] if not).
    Do {
        /// For whom.
        caller: Caller,
        /// The steps of paths that the client's kernel may have gone on its own word.
        steps: Vec<Step>,
        /// What is said besides.
        beside: Beside,
        /// What.
        deed: Deed,
    },
    /// Nothing but what goes besides.
    Release(Beside),
    /// Its lasting leases are to hold for another term.
    Renew,
    /// It believes nothing of these any more, and waits for the next that are asked back.
    Hear {
        /// What it was asked for last.
        given_back: Vec<Lease>,
    },
}

/// What a mounted tree is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// For everybody, as `/mfs`.
    All,
    /// For the commands that another node has placed: it goes by lasting leases where it can have them ([`Attributes::lasts`]).
    Room,
    /// For guests, who map files of their homes from it: what they have so is theirs to read also when a home's files are nobody else's any more
    /// (`mosctl nomfs`).
    Guests,
}

/// A name that the client's kernel may have believed to mean an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// In which directory.
    pub dir: Object,
    /// Which name.
    pub name: Name,
    /// What it was.
    pub is: Object,
}

/// What goes with an ask, so that nobody need wait for it. Heard once, however often the ask is sent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beside {
    /// The client knows these no more: as many look-ups of each are taken back.
    pub forgotten: Vec<(Object, u64)>,
    /// The session lets go of these.
    pub released: Vec<Release>,
}

/// What a session lets go of. It may be said again, in any order: the numbers are never used for something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Release {
    /// An open file.
    File(Opened),
    /// This owner has closed a descriptor of the file, and so lost all its record locks.
    Owner(FileKey, u64),
}

/// A moment, as `struct timespec` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// Since 1970; negative before.
    pub seconds: i64,
    /// 0 to 999,999,999.
    pub nanos: u32,
}

/// A time that is to be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetTime {
    /// The server's now.
    Now,
    /// That one.
    To(Moment),
}

/// What is to change of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Permissions.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length.
    pub size: Option<u64>,
    /// When it was last read.
    pub read: Option<SetTime>,
    /// When it was last written.
    pub written: Option<SetTime>,
}

/// A lock, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockKind {
    /// With others who read.
    Shared,
    /// Alone.
    Exclusive,
    /// None any more.
    Unlocked,
}

/// Which file of a node it is, for as long as it is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileKey {
    /// The file system as a whole, where that has several devices (overlayfs, btrfs); the same after a restart.
    pub volume: u64,
    /// The device, as the server's kernel numbers it.
    pub device: u64,
    /// The file's number on it.
    pub inode: u64,
}

/// One lease of a file: the next one of the same file has another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Of which.
    pub of: FileKey,
    /// Counted by the server.
    pub number: u64,
    /// It is asked back for a change that has been made already, by a local program: nobody waits.
    pub is_late: bool,
}

/// What a file is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// Which it is.
    pub key: FileKey,
    /// When it was made, by the file system; with the number it is the file's identity. Zero if that is not known.
    pub born: Moment,
    /// Kind and permissions, as `st_mode`.
    pub mode: u32,
    /// Names that it has.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Blocks of 512 bytes.
    pub blocks: u64,
    /// How much is best read at once.
    pub block_size: u32,
    /// Last read.
    pub read: Moment,
    /// Last written.
    pub written: Moment,
    /// Last changed in any way.
    pub changed: Moment,
    /// Its extended attributes.
    pub extended: Extended,
    /// Milliseconds for which it stays so, but for what this session changes itself: a lease. 0 is none.
    pub lease: u32,
    /// The lease lasts: it can be renewed, with all others that do, and is asked back for whatever changes the file, also when its
    /// term is over.
    pub lasts: bool,
    /// A change that comes now would change `changed` too: the clock of the file system has moved on since the last one.
    pub settled: bool,
}

/// An object that was looked up, which counts as one look-up of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Which.
    pub object: Object,
    /// What it is like now.
    pub attributes: Attributes,
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its name.
    pub name: Name,
    /// Its number on the server's file system.
    pub inode: u64,
    /// Its kind, as the upper bits of `st_mode`; 0 if the file system does not say.
    pub kind: u32,
    /// Where to read on after it.
    pub after: u64,
    /// What it is, if that was asked for and can be said.
    pub found: Option<Found>,
}

/// `statfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in struct statvfs")]
pub struct Space {
    pub blocks: u64,
    pub free: u64,
    pub available: u64,
    pub files: u64,
    pub files_free: u64,
    pub block_size: u32,
    pub name_length: u32,
    pub fragment_size: u32,
}

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// To `Begin`: whether the session is new to the server, which then holds nothing of it but the root.
    Begun {
        /// It is new.
        fresh: bool,
        /// Another one after the server's machine was reset: what was not on its disk is gone then.
        boot: String,
    },
    /// It is done. What was read or linked to follows, if there is any.
    Done,
    /// An object, and the directory where it was found. The name holds as long as the directory's lease.
    Found(Found, Attributes),
    /// Nothing has this name, in a directory that is like this; said to who goes by lasting leases.
    Nothing(Attributes),
    /// What it is like.
    Attributes(Attributes),
    /// A file was opened, which is like this. Its whole content follows, if it was asked for and is small.
    Opened(Opened, Attributes),
    /// A file was made, or was there, and was opened; and its directory.
    Created(Found, Opened, Attributes),
    /// A name was removed.
    Removed {
        /// What had it.
        gone: Option<FileKey>,
        /// The directory now.
        dir: Attributes,
    },
    /// So many bytes were written, or that is the place.
    Count(u64),
    /// What has the new name now, and what has the old one if they were exchanged.
    Renamed {
        /// The new one.
        moved: Option<FileKey>,
        /// The old one.
        back: Option<FileKey>,
        /// What had the new name.
        gone: Option<FileKey>,
        /// The directories now: where it was, and where it is.
        dirs: [Attributes; 2],
    },
    /// Entries of a directory.
    Entries {
        /// None if there are no more.
        entries: Vec<Entry>,
        /// For how many milliseconds the names hold.
        lease: u32,
        /// There are no more after these.
        ends: bool,
    },
    /// Room.
    Space(Space),
    /// The lock in the way, or `Unlocked`.
    InTheWay {
        /// What it is.
        kind: LockKind,
        /// First byte.
        start: u64,
        /// Last byte; `u64::MAX` for all that follow.
        end: u64,
    },
    /// Leases of these files are asked back; none if there was nothing to ask for a while.
    Recalled(Vec<Lease>),
    /// It failed, with an error number of Linux.
    Failed(i32),
    /// The server holds this object or file no more; look it up again.
    Forgotten,
    /// A step does not lead where the client believed. Nothing was done.
    Elsewhere,
    /// The server does not speak with this client at all; a sentence why.
    Refused(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_step_is_one_step() {
        for good in ["a", "...", ".a", "a b", "-"] {
            assert!(Name::from(OsStr::new(good)).is_one_step(), "{good}");
        }
        let long = "x".repeat(256);
        for bad in ["", ".", "..", "a/b", "/", "a\0", &long] {
            assert!(!Name::from(OsStr::new(bad)).is_one_step(), "{bad:?}");
        }
    }
}
