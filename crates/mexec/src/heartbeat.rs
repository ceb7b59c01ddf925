//! Heartbeats of a connection.

use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// The timers of heartbeats: when to send one, and when the peer counts as lost.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    sent: Instant,
    received: Instant,
    timeout: Duration,
}

impl Heartbeat {
    /// Interval between heartbeats.
    pub(crate) const INTERVAL: Duration = Duration::from_secs(2);

    /// How long another node may be silent.
    pub(crate) const NODE_TIMEOUT: Duration = Duration::from_secs(10);

    /// Starts the timers. The peer counts as lost after `timeout` without a frame.
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { sent: Instant::now(), received: Instant::now(), timeout }
    }

    /// A frame of the peer has arrived.
    pub(crate) fn record_received(&mut self) {
        self.received = Instant::now();
    }

    /// Whether a heartbeat is due. If so, the caller must send it, since the timer restarts.
    ///
    /// # Errors
    /// If the peer has been silent for too long.
    pub(crate) fn is_due(&mut self) -> Result<bool> {
        if self.received.elapsed() > self.timeout {
            bail!("nothing was received from it for {} s", self.timeout.as_secs());
        }
        if self.sent.elapsed() < Self::INTERVAL {
            return Ok(false);
        }
        self.sent = Instant::now();
        Ok(true)
    }
}
