//! All limits of the wire protocol.

use std::time::Duration;

/// The version of the frame format, in the first byte of each frame.
pub const FRAME_VERSION: u8 = 0xa1;

/// The version of the preamble.
pub const PREAMBLE_VERSION: u8 = 1;

/// Length of a frame's header, in bytes.
pub const HEADER_LEN: usize = 16;

/// Length of the preamble, in bytes.
pub const PREAMBLE_LEN: usize = 32;

/// Maximum payload of a frame, in bytes: 1 MiB of data, and a page for its description.
pub const MAX_PAYLOAD: usize = (1 << 20) + 4096;

/// Maximum of encrypted bytes that a link buffers while the socket does not accept them. Above it
/// no more frames can be queued. It leaves room for the largest message, a call with 64 MiB of data
/// in many frames, after other frames that still wait.
pub const MAX_UNSENT: usize = 128 << 20;

/// Maximum of payload bytes, in complete frames, that a link reads ahead while it waits to send: as
/// much as its peer can have queued, so that two peers that both wait to send do not deadlock.
pub const MAX_READ_AHEAD: usize = MAX_UNSENT;

/// Maximum plaintext of a TLS record, in bytes.
pub const MAX_RECORD: usize = 16 << 10;

/// Size of the first reads of a link, in bytes of ciphertext: enough for one record.
pub const FIRST_READ_SIZE: usize = MAX_RECORD + 512;

/// Maximum size of a read, in bytes of ciphertext, on a link with bulk traffic.
pub const MAX_READ_SIZE: usize = 256 << 10;

/// Default timeout for preamble and handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How much longer a handshake with a shim may take while its machine acknowledges what it is sent:
/// then the link and the machine work, and the shim waits for a CPU.
pub const SLOW_SHIM_TIMEOUT: Duration = Duration::from_secs(15);

/// Maximum length of a cluster's name.
pub const MAX_CLUSTER_NAME: usize = 40;

/// Maximum size of a PEM file, in bytes.
pub const MAX_PEM: u64 = 64 << 10;
