//! The preamble: sent in clear before TLS, it says which service the connection is for.
//!
//! ```text
//!  0..4    "TERN"
//!  4       version
//!  5       kind: 1 Node, 2 Join, 3 Shim, 4 Files, 5 Exec, 6 Net
//!  6..16   zero
//!  16..32  the shim's id, or zero
//! ```
//! It grants no rights: the service that gets the connection authenticates the peer.

use crate::limits::{PREAMBLE_LEN, PREAMBLE_VERSION};
use tern_ids::ShimId;

const MAGIC: [u8; 4] = *b"TERN";

/// The service that a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preamble {
    /// ternd, from a member of the cluster.
    Node,
    /// ternd, from a machine that wants to join.
    Join,
    /// This shim.
    Shim(ShimId),
    /// The MFS server of this node.
    Files,
    /// The server that runs other nodes' commands here (mexec).
    Exec,
    /// The program that moves connections (tern-net).
    Net,
}

/// Why the bytes are not a preamble.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PreambleError {
    /// They do not start with "TERN".
    #[error("the peer does not use Tern's protocol")]
    Magic,
    /// The version is not supported.
    #[error("the peer uses preamble version {0}, this node version {PREAMBLE_VERSION}")]
    Version(u8),
    /// An unknown kind, or bytes that must be zero are not.
    #[error("malformed preamble")]
    Malformed,
}

impl Preamble {
    /// Encodes the preamble.
    pub fn to_bytes(self) -> [u8; PREAMBLE_LEN] {
        let mut bytes = [0; PREAMBLE_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = PREAMBLE_VERSION;
        bytes[5] = match self {
            Self::Node => 1,
            Self::Join => 2,
            Self::Shim(_) => 3,
            Self::Files => 4,
            Self::Exec => 5,
            Self::Net => 6,
        };
        if let Self::Shim(id) = self {
            bytes[16..].copy_from_slice(&id.0);
        }
        bytes
    }

    /// Decodes a preamble.
    ///
    /// # Errors
    /// If the bytes are not exactly as [`Self::to_bytes`] encodes them.
    pub fn from_bytes(bytes: &[u8; PREAMBLE_LEN]) -> Result<Self, PreambleError> {
        if bytes[..4] != MAGIC {
            return Err(PreambleError::Magic);
        }
        if bytes[4] != PREAMBLE_VERSION {
            return Err(PreambleError::Version(bytes[4]));
        }
        let mut id = [0; 16];
        id.copy_from_slice(&bytes[16..]);
        let preamble = match bytes[5] {
            1 => Self::Node,
            2 => Self::Join,
            3 => Self::Shim(ShimId(id)),
            4 => Self::Files,
            5 => Self::Exec,
            6 => Self::Net,
            _ => return Err(PreambleError::Malformed),
        };
        if preamble.to_bytes() == *bytes { Ok(preamble) } else { Err(PreambleError::Malformed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_kinds_round_trip() {
        let all = [
            Preamble::Node,
            Preamble::Join,
            Preamble::Shim(ShimId([9; 16])),
            Preamble::Files,
            Preamble::Exec,
            Preamble::Net,
        ];
        for preamble in all {
            assert_eq!(Preamble::from_bytes(&preamble.to_bytes()), Ok(preamble));
        }
    }

    #[test]
    fn changed_preamble_bytes_are_refused() {
        let good = Preamble::Node.to_bytes();
        for at in 0..PREAMBLE_LEN {
            let mut bad = good;
            bad[at] ^= 0x80;
            assert!(Preamble::from_bytes(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn another_protocol_is_reported() {
        let mut http = [b' '; PREAMBLE_LEN];
        http[..14].copy_from_slice(b"GET / HTTP/1.1");
        assert_eq!(Preamble::from_bytes(&http), Err(PreambleError::Magic));
    }
}
