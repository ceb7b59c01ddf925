//! Messages between the client half of a mounted tree and the node that has the files.
//!
//! ```text
//!  client ── FileRequest, data to write ──▶ server    frame kind 1, tag: number of the request
//!         ◀─ FileReply, data read ──────────           frame kind 2, same tag
//! ```
//! Either frame may be packed on slow links (`packing.rs`). A connection carries one request at a
//! time; a client opens several connections to run requests in parallel. All connections of one
//! mounted tree belong to one *session*. The session holds the tree's objects and open files, and
//! outlives its connections for a while. After a broken connection the client repeats the request
//! under the same number, and the server does not execute it twice.
//!
//! Each reply begins with a recall count: the number of leases recalled from this session so far.
//! On the callback channel it is the number of the last recall in this reply. In replies to `Begin`
//! and `Release` it is 0.

mod op;
mod xattr;

pub use op::Op;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use tern_ids::Credentials;
pub use xattr::XattrKinds;

/// Frame kind of a request.
pub const REQUEST_FRAME: u8 = 1;

/// Frame kind of a reply.
pub const REPLY_FRAME: u8 = 2;

/// Version of this protocol. A server refuses a client that uses another one.
pub const VERSION: u16 = 8;

/// Maximum number of bytes read or written by one request.
pub const MAX_DATA: usize = 1 << 20;

/// Maximum size in bytes of a file whose content is sent with the reply to an open.
pub const MAX_INLINE_CONTENT: usize = 64 << 10;

/// Maximum number of entries looked up by one [`Op::ReadDir`].
pub const MAX_READDIR_LOOKUPS: usize = 512;

/// Maximum number of dentry checks in a request.
pub const MAX_DENTRY_CHECKS: usize = 256;

/// Maximum number of supplementary groups of a caller: the kernel's own limit (`NGROUPS_MAX`).
pub const MAX_GROUPS: usize = 65_536;

/// A file, directory or link held by the session: a number chosen by the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Object(pub u64);

/// The root directory of the export, which every session holds.
pub const ROOT: Object = Object(0);

/// An open file or directory of the session: a number chosen by the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OpenId(pub u64);

/// One path component, the target of a symbolic link, or the name of an extended attribute.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name(Vec<u8>);

impl Name {
    /// The name as the kernel takes it.
    #[must_use]
    pub fn as_os(&self) -> &OsStr {
        OsStr::from_bytes(&self.0)
    }

    /// Whether it is exactly one path component: not empty, not `.` or `..`, without `/` and NUL
    /// bytes, and at most 255 bytes long.
    #[must_use]
    pub fn is_component(&self) -> bool {
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

/// A request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FileRequest {
    /// The first request on a connection: attaches it to a session.
    Begin {
        /// [`VERSION`].
        version: u16,
        /// Session ID, chosen at random by the client when the tree is mounted.
        session: [u8; 16],
        /// Number of the connection in its session, from 0.
        connection: u16,
        /// The client has abandoned its requests on this connection up to this number, and has not
        /// received the reply to the last of them. If that request opened a file, the server closes
        /// it. 0 if none was abandoned.
        abandoned: u64,
        /// This is the callback channel: it carries lease recalls ([`FileRequest::WaitForRecalls`]) and
        /// nothing else.
        is_callback: bool,
        /// Purpose of the mounted tree.
        purpose: Purpose,
    },
    /// Performs an operation, if all dentry checks hold; otherwise the reply is
    /// [`FileReply::StaleDentry`].
    Call {
        /// The user on whose behalf the operation is performed.
        caller: Credentials,
        /// Cached dentries by which the client's kernel may have resolved the path.
        checks: Vec<DentryCheck>,
        /// Pending releases and forgets.
        piggyback: Piggyback,
        /// The operation.
        op: Op,
    },
    /// Carries only pending releases and forgets.
    Release(Piggyback),
    /// Renews all renewable leases of the session for another term.
    Renew,
    /// Returns recalled leases, and waits for the next recalls.
    WaitForRecalls {
        /// Leases recalled by the previous reply: the client's caches no longer rely on them.
        returned: Vec<Lease>,
    },
}

/// Purpose of a mounted tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// For all users, as `/mfs`.
    All,
    /// For the container of commands placed by another node: it uses renewable leases where it can
    /// ([`Attributes::is_renewable`]).
    Container,
    /// For guests that map files of their home. Files that are already open stay readable after the
    /// home stops exporting its files (`mosctl nomfs`).
    Guests,
}

/// A cached dentry to revalidate: a name that the client's kernel may have resolved without a
/// request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DentryCheck {
    /// The directory.
    pub dir: Object,
    /// The name in it.
    pub name: Name,
    /// The object to which the client's kernel resolved it.
    pub object: Object,
}

/// Pending releases and forgets, sent along with another request. The server applies them once,
/// however often the request is sent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piggyback {
    /// Objects forgotten by the client's kernel, each with the number of lookups to subtract (as in
    /// `FUSE_FORGET`).
    pub forgotten: Vec<(Object, u64)>,
    /// Resources to release.
    pub released: Vec<Release>,
}

/// A resource that a session releases. Releasing it twice, or in any order, is harmless: numbers
/// are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Release {
    /// An open file.
    File(OpenId),
    /// A lock owner that has closed a descriptor of the file, and so lost all its record locks on
    /// the file.
    LockOwner(FileKey, u64),
}

/// A point in time, as `struct timespec`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timespec {
    /// Seconds since 1970; negative before.
    pub seconds: i64,
    /// Nanoseconds, 0 to 999,999,999.
    pub nanos: u32,
}

/// A timestamp to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetTime {
    /// The server's current time.
    Now,
    /// The given time.
    To(Timespec),
}

/// Attributes to change; those that are `None` stay as they are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttributeChange {
    /// Permissions.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size in bytes.
    pub size: Option<u64>,
    /// Last access.
    pub atime: Option<SetTime>,
    /// Last modification of the content.
    pub mtime: Option<SetTime>,
}

/// Kind of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockKind {
    /// Read lock.
    Shared,
    /// Write lock.
    Exclusive,
    /// No lock.
    Unlocked,
}

/// Identifies a file of a node, for as long as the file exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileKey {
    /// File system ID (`f_fsid`): a file system may span several devices (overlayfs, btrfs). It is
    /// stable across restarts of the server.
    pub volume: u64,
    /// Device number on the server.
    pub device: u64,
    /// Inode number on the device.
    pub inode: u64,
}

/// One lease of a file. A later lease of the same file has another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The file.
    pub file: FileKey,
    /// Assigned by the server; a later lease has a higher number.
    pub number: u64,
    /// Nothing waits for the lease's return: a local program has already changed the file, or the
    /// lease has ended, or the file is no longer watched for changes.
    pub is_after_change: bool,
}

/// Attributes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// The file.
    pub key: FileKey,
    /// Creation time; with the inode number it identifies the file. Zero if the file system has
    /// none.
    pub btime: Timespec,
    /// Type and permissions, as `st_mode`.
    pub mode: u32,
    /// Number of hard links.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Number of 512-byte blocks.
    pub blocks: u64,
    /// Preferred I/O size in bytes.
    pub block_size: u32,
    /// Last access.
    pub atime: Timespec,
    /// Last modification of the content.
    pub mtime: Timespec,
    /// Last change of the inode.
    pub ctime: Timespec,
    /// Kinds of extended attributes that it has.
    pub xattrs: XattrKinds,
    /// Term of the lease in milliseconds, during which no other session changes the file. 0 means
    /// no lease.
    pub lease: u32,
    /// The lease is renewable: [`FileRequest::Renew`] renews it together with the session's others, and
    /// it is recalled for any change of the file even after its term has ended.
    pub is_renewable: bool,
    /// The clock of the file system has advanced since the last change, so that a further change
    /// would set another ctime.
    pub is_settled: bool,
}

/// An object found by a lookup. The server counts one lookup of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The object.
    pub object: Object,
    /// Its current attributes.
    pub attributes: Attributes,
}

/// A directory entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirEntry {
    /// Its name.
    pub name: Name,
    /// Inode number on the server's file system.
    pub inode: u64,
    /// File type, as the upper bits of `st_mode`; 0 if the file system does not report it.
    pub kind: u32,
    /// Where to continue reading after this entry.
    pub cookie: u64,
    /// The object, if lookups were requested and this one succeeded.
    pub found: Option<Found>,
}

/// Result of `statfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in struct statvfs")]
pub struct FsStats {
    pub blocks: u64,
    pub free: u64,
    pub available: u64,
    pub files: u64,
    pub files_free: u64,
    pub block_size: u32,
    pub name_length: u32,
    pub fragment_size: u32,
}

/// A reply.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FileReply {
    /// To [`FileRequest::Begin`].
    Begun {
        /// The server did not know the session, and holds only the root for it.
        is_new: bool,
        /// Boot ID of the server's machine. If it has changed, data that was not synced to disk may
        /// be lost.
        boot_id: String,
    },
    /// Success. The data read or the target of the link follows, if the operation has any.
    Done,
    /// An object, and the attributes of the directory in which it was found. The name is valid for
    /// the directory's lease.
    Found(Found, Attributes),
    /// The name does not exist in the directory with these attributes. Sent only under a renewable
    /// lease of the directory.
    NotFound(Attributes),
    /// Attributes of the object.
    Attributes(Attributes),
    /// A file was opened and has these attributes. Its content follows, if it was requested and is
    /// small.
    FileOpened(OpenId, Attributes),
    /// A file that was created or existed already, the open file, and the directory's attributes.
    Created(Found, OpenId, Attributes),
    /// A name was removed.
    Removed {
        /// The file that it named.
        removed: Option<FileKey>,
        /// The directory's attributes after that.
        dir: Attributes,
    },
    /// Number of bytes written or copied, or the offset found.
    Count(u64),
    /// A name was renamed.
    Renamed {
        /// The file that has the new name now.
        moved: Option<FileKey>,
        /// The file that has the old name now, if the two were exchanged.
        exchanged: Option<FileKey>,
        /// The file that had the new name before.
        replaced: Option<FileKey>,
        /// Attributes of the source and the target directory after the rename.
        dirs: [Attributes; 2],
    },
    /// Entries of a directory.
    Entries {
        /// The entries; empty if there are no more.
        entries: Vec<DirEntry>,
        /// For how many milliseconds the names are valid.
        lease: u32,
        /// These are the last entries.
        is_end: bool,
    },
    /// Space of the file system.
    FsStats(FsStats),
    /// The conflicting lock, or `Unlocked` if there is none.
    LockConflict {
        /// Kind of the lock.
        kind: LockKind,
        /// First byte.
        start: u64,
        /// Last byte; `u64::MAX` for the end of the file and beyond.
        end: u64,
    },
    /// Recalled leases; empty if there were none for a while.
    Recalled(Vec<Lease>),
    /// The operation failed with this Linux error number.
    Failed(i32),
    /// The server no longer holds this object or open file; the client must look it up again.
    Forgotten,
    /// A dentry check failed. Nothing was done.
    StaleDentry,
    /// The server refuses this client; a sentence that says why.
    Refused(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_single_component_is_a_component() {
        for good in ["a", "...", ".a", "a b", "-"] {
            assert!(Name::from(OsStr::new(good)).is_component(), "{good}");
        }
        let long = "x".repeat(256);
        for bad in ["", ".", "..", "a/b", "/", "a\0", &long] {
            assert!(!Name::from(OsStr::new(bad)).is_component(), "{bad:?}");
        }
    }
}
