//! Identifiers used by all parts of Tern, and nothing else.
#![forbid(unsafe_code)]

pub mod inode_number;

use serde::{Deserialize, Serialize};
use std::fmt;

/// A node of the cluster: 1 to 65,535, as in `/etc/mosix.map`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u16);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The pid of a process, or the tid of a thread, at its home node: in the pid namespace of that
/// node's ternd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HomePid(pub i32);

impl fmt::Display for HomePid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a period in a process's life. Home begins a new epoch, with a higher number,
/// whenever it decides where the process runs: at each hand-over, and when it resumes the process
/// itself. The deputy performs calls of the current epoch only, so at most one copy of the process
/// ever has effects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The following epoch.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 16]);

        // Text in human-readable formats, bytes on the wire.
        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                if to.is_human_readable() { to.collect_str(self) } else { self.0.serialize(to) }
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                if !from.is_human_readable() {
                    return <[u8; 16]>::deserialize(from).map(Self);
                }
                let text = String::deserialize(from)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl std::str::FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                if text.len() != 32 || !text.is_ascii() {
                    return Err(InvalidId);
                }
                let mut id = [0; 16];
                for (byte, at) in id.iter_mut().zip((0..32).step_by(2)) {
                    *byte = u8::from_str_radix(&text[at..at + 2], 16).map_err(|_e| InvalidId)?;
                }
                Ok(Self(id))
            }
        }
    };
}

random_id!(
    /// The identifier of a migration, the same in the logs and reports of all nodes.
    MigrationId
);
random_id!(
    /// The identifier of a shim. A peer sends it to be connected to that shim; it grants no rights.
    ShimId
);
random_id!(
    /// The identifier of an offer of a connection. Only the node to which it is offered can use it.
    ConnectionToken
);

/// The text is not an identifier of 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidId;

impl fmt::Display for InvalidId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not an identifier of 32 hexadecimal digits")
    }
}

impl std::error::Error for InvalidId {}

/// The BLAKE3 hash of a file's whole content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContentHash(pub [u8; 32]);

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// The SHA-256 fingerprint of a certificate (DER). Shims pin each other's certificates by
/// fingerprint, and a token contains the fingerprint of the cluster's authority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fingerprint(pub [u8; 32]);

/// The user and groups that a process acts with.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize)]
pub struct Credentials {
    /// User ID.
    pub uid: u32,
    /// Primary group ID.
    pub gid: u32,
    /// Supplementary group IDs.
    pub groups: Vec<u32>,
}

// A tuple in JSON too: shims and the file server can be of different versions, and exchange this
// format.
impl Serialize for Credentials {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        (self.uid, self.gid, &self.groups).serialize(to)
    }
}

/// A file on a shared file system as one node sees it. Two nodes compare these values to find out
/// whether they mean the same file in the same state. Times are seconds and nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedFile {
    /// Type and bytes of its file handle, if the file system has one. A network file system's
    /// handle is assigned by the server, and the same on all nodes.
    pub handle: Option<(i32, Vec<u8>)>,
    /// Its inode number.
    pub inode: u64,
    /// Its birth time, if known.
    pub born: Option<(i64, u32)>,
    /// Its size in bytes.
    pub size: u64,
    /// Its modification time (mtime), as the server reports it.
    pub modified: (i64, u32),
    /// Its change time (ctime).
    pub changed: (i64, u32),
}

impl SharedFile {
    /// Whether both are the same file in the same state. Times are compared to the nanosecond: a
    /// new file that reuses the inode number has a later change time.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        let state = |file: &Self| (file.inode, file.size, file.modified, file.changed);
        // Older kernels do not report handle or birth time.
        let handles = self.handle.as_ref().zip(other.handle.as_ref()).is_none_or(|(a, b)| a == b);
        let born = self.born.zip(other.born).is_none_or(|(a, b)| a == b);
        state(self) == state(other) && handles && born
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_as_text() {
        let id = ShimId([7; 16]);
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!("xyz".parse::<ShimId>(), Err(InvalidId));
        assert_eq!("é".repeat(16).parse::<ShimId>(), Err(InvalidId));
    }

    #[test]
    fn shared_file_equals_only_in_same_state() {
        let file = SharedFile {
            handle: Some((1, vec![1, 2])),
            inode: 7,
            born: None,
            size: 9,
            modified: (1, 2),
            changed: (3, 4),
        };
        assert!(file.is(&file) && file.is(&SharedFile { handle: None, ..file.clone() }));
        for other in [
            SharedFile { handle: Some((1, vec![1, 3])), ..file.clone() },
            SharedFile { inode: 8, ..file.clone() },
            SharedFile { size: 8, ..file.clone() },
            SharedFile { changed: (3, 5), ..file.clone() },
        ] {
            assert!(!file.is(&other), "{other:?}");
        }
        let born = |at| SharedFile { born: Some((at, 0)), ..file.clone() };
        assert!(born(1).is(&file) && born(1).is(&born(1)) && !born(1).is(&born(2)));
    }
}
