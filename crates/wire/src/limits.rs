//! Every limit of the wire, in one place.

use std::time::Duration;

/// The version of the frame format, in the first byte of each frame.
pub const FRAME_VERSION: u8 = 0xa1;

/// The version of the preamble.
pub const PREAMBLE_VERSION: u8 = 1;

/// Bytes of a frame's header.
pub const HEADER: usize = 16;

/// Bytes of the preamble.
pub const PREAMBLE: usize = 32;

/// The longest payload of a frame, in bytes: one mebibyte of data, and a page for what is said about it.
pub const MOST_PAYLOAD: usize = (1 << 20) + 4096;

/// Encrypted bytes that a link holds for a socket which does not take them; beyond it nothing more can be
/// queued until some have left. It holds the largest message, begun when some others were waiting.
pub const MOST_UNSENT: usize = 128 << 20;

/// Payload bytes of whole frames that a link reads ahead while it waits for its own bytes to leave: all that its peer
/// can have queued, so that two which wait so do not wait for each other.
pub const MOST_READ_AHEAD: usize = MOST_UNSENT;

/// The most plaintext in one TLS record.
pub const RECORD: usize = 16 << 10;

/// Encrypted bytes read at once when a link begins; enough for one record.
pub const FIRST_READ: usize = RECORD + 512;

/// Encrypted bytes read at once on a link that is used for bulk.
pub const MOST_READ: usize = 256 << 10;

/// How long a preamble and a handshake may take, unless the caller says otherwise.
pub const HANDSHAKE: Duration = Duration::from_secs(5);

/// Longest name of a cluster.
pub const MOST_CLUSTER_NAME: usize = 40;

/// Longest PEM file that is read, in bytes.
pub const MOST_PEM: u64 = 64 << 10;
