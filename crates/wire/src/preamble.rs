//! What a client writes in clear before TLS begins: whose connection this is to be.
//!
//! ```text
//!  0..4    "TERN"
//!  4       version
//!  5       kind: 1 Node, 2 Join, 3 Shim, 4 Files, 5 Exec
//!  6..16   zero
//!  16..32  the shim, else zero
//! ```
//! It grants nothing: whoever gets the connection authenticates the peer.

use crate::limits::{PREAMBLE, PREAMBLE_VERSION};
use tern_ids::ShimId;

const MAGIC: [u8; 4] = *b"TERN";

/// Whose connection this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preamble {
    /// For the daemon, from a member of the cluster.
    Node,
    /// For the daemon, from a machine that wants to become a member.
    Join,
    /// For this shim.
    Shim(ShimId),
    /// For the server of this node's files.
    Files,
    /// For what runs other nodes' commands here.
    Exec,
}

/// Why bytes are no preamble.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PreambleError {
    /// The first bytes are something else.
    #[error("the peer does not speak tern")]
    Magic,
    /// A version that this build does not know.
    #[error("the peer speaks version {0} of the preamble, this node version {PREAMBLE_VERSION}")]
    Version(u8),
    /// An unknown kind, or bytes that must be zero are not.
    #[error("malformed preamble")]
    Malformed,
}

impl Preamble {
    /// The bytes that are sent.
    pub fn to_bytes(self) -> [u8; PREAMBLE] {
        let mut bytes = [0; PREAMBLE];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = PREAMBLE_VERSION;
        bytes[5] = match self {
            Self::Node => 1,
            Self::Join => 2,
            Self::Shim(_) => 3,
            Self::Files => 4,
            Self::Exec => 5,
        };
        if let Self::Shim(id) = self {
            bytes[16..].copy_from_slice(&id.0);
        }
        bytes
    }

    /// Reads what a client sent.
    ///
    /// # Errors
    /// If it is anything but exactly what [`Self::to_bytes`] makes.
    pub fn from_bytes(bytes: &[u8; PREAMBLE]) -> Result<Self, PreambleError> {
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
            _ => return Err(PreambleError::Malformed),
        };
        if preamble.to_bytes() == *bytes { Ok(preamble) } else { Err(PreambleError::Malformed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_kinds_survive() {
        let all = [
            Preamble::Node,
            Preamble::Join,
            Preamble::Shim(ShimId([9; 16])),
            Preamble::Files,
            Preamble::Exec,
        ];
        for preamble in all {
            assert_eq!(Preamble::from_bytes(&preamble.to_bytes()), Ok(preamble));
        }
    }

    #[test]
    fn every_changed_byte_of_a_plain_preamble_is_refused() {
        let good = Preamble::Node.to_bytes();
        for at in 0..PREAMBLE {
            let mut bad = good;
            bad[at] ^= 0x80;
            assert!(Preamble::from_bytes(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn another_protocol_is_named_so() {
        let mut http = [b' '; PREAMBLE];
        http[..14].copy_from_slice(b"GET / HTTP/1.1");
        assert_eq!(Preamble::from_bytes(&http), Err(PreambleError::Magic));
    }
}
