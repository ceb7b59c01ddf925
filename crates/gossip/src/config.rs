//! Settings, and the size limits of a message.

use crate::message::{ENTRY_LEN, HEAD_LEN, RUMOUR_LEN};

/// The largest payload of an entry, in bytes.
pub const MAX_PAYLOAD: usize = 256;

/// The largest number of entries in a message, including the sender's own.
pub const MAX_WINDOW: usize = 255;

/// The largest number of suspicions and deaths in a message.
pub const MAX_RUMOURS: usize = 16;

/// How a node gossips. All nodes of a cluster should have the same settings; different settings do
/// no harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GossipConfig {
    /// Time between calls of `tick`, in ms. MOSIX: 500.
    pub period: u64,
    /// Number of entries in a message, including the sender's own: 2 to [`MAX_WINDOW`]. MOSIX: 16.
    pub window: usize,
}

impl Default for GossipConfig {
    fn default() -> Self {
        Self { period: 500, window: 16 }
    }
}

impl GossipConfig {
    /// The same settings with every value clamped to its range.
    #[must_use]
    pub fn within_bounds(self) -> Self {
        Self { period: self.period.clamp(1, 3_600_000), window: self.window.clamp(2, MAX_WINDOW) }
    }

    /// Length of the longest message that a node with this configuration sends, in bytes, for any
    /// cluster size.
    #[must_use]
    pub fn max_message_len(self) -> usize {
        // HEAD_LEN includes the sender's own entry without its payload.
        HEAD_LEN + MAX_PAYLOAD + MAX_RUMOURS * RUMOUR_LEN + (self.window - 1) * (ENTRY_LEN + MAX_PAYLOAD)
    }
}

/// The longest message that is accepted, in bytes.
pub const MAX_MESSAGE_LEN: usize =
    HEAD_LEN + MAX_PAYLOAD + MAX_RUMOURS * RUMOUR_LEN + MAX_WINDOW * (ENTRY_LEN + MAX_PAYLOAD);
