//! What can be set, and the limits of a message.

use crate::message::{ENTRY, HEAD, RUMOUR};

/// The longest payload of a node's entry, in bytes.
pub const MOST_PAYLOAD: usize = 256;

/// The most entries in a message, the sender's own among them.
pub const MOST_WINDOW: usize = 255;

/// The most suspicions and deaths in a message.
pub const MOST_RUMOURS: usize = 16;

/// How a node gossips. All nodes of a cluster should have the same, but none is harmed if they have not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The time from one call of `tick` to the next, in ms. MOSIX: 500.
    pub period: u64,
    /// How many entries a message has, the sender's own among them: 2 to [`MOST_WINDOW`]. MOSIX: 16.
    pub window: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { period: 500, window: 16 }
    }
}

impl Config {
    /// The same with every value within its bounds.
    #[must_use]
    pub fn within_bounds(self) -> Self {
        Self { period: self.period.clamp(1, 3_600_000), window: self.window.clamp(2, MOST_WINDOW) }
    }

    /// The longest message that a node with this configuration sends, in bytes, however large its cluster is.
    #[must_use]
    pub fn longest_message(self) -> usize {
        // The head carries the sender's own entry, all but its payload.
        HEAD + MOST_PAYLOAD + MOST_RUMOURS * RUMOUR + (self.window - 1) * (ENTRY + MOST_PAYLOAD)
    }
}

/// The longest message that is read, in bytes.
pub const LONGEST_MESSAGE: usize =
    HEAD + MOST_PAYLOAD + MOST_RUMOURS * RUMOUR + MOST_WINDOW * (ENTRY + MOST_PAYLOAD);
