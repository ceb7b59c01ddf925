//! The path of a connection's packets between its home and the guest's node.

use crate::packets::Packets;
use crate::tunnel::Flushes;
use anyhow::{Context, Result};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tern_redirect::{Ends, PathProbe, ProbeToken, Tunnel};

/// How long the other node's packet is waited for. It arrives within milliseconds if the network carries
/// it and the machines are not too busy.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval at which an examination looks for the other node's packet.
const ARRIVAL_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The path of a connection's packets.
#[derive(Debug, Clone)]
pub enum Path {
    /// Home sends the client's packets to the guest's node as they are, and that sends the answers to
    /// the client. Has the address of the other node.
    Direct(IpAddr),
    /// Both go through a tunnel.
    Tunnel(Arc<TunnelInterface>),
}

impl Path {
    /// Guest's node: waits until the packets that are in a tunnel have arrived, in both directions.
    /// Returns false if it is interrupted, or that takes longer than `limit`. Packets may be lost then,
    /// and TCP sends them again.
    pub(crate) fn flush(&self, limit: Duration) -> bool {
        let Self::Tunnel(tunnel) = self else { return true };
        let flushed = tunnel.flushes.as_ref().is_some_and(|flushes| flushes.wait(limit));
        if !flushed {
            tracing::info!("a tunnel was not flushed");
        }
        flushed
    }
}

/// This node's end of a tunnel. Dropping it removes the interface.
#[derive(Debug)]
pub struct TunnelInterface {
    /// `None` only while the value is dropped.
    tunnel: Option<Tunnel>,
    packets: Arc<Packets>,
    flushes: Option<Flushes>,
    /// Whether a link carries its frames.
    connected: AtomicBool,
}

impl TunnelInterface {
    /// `flushes`: on the guest's node.
    pub(crate) fn new(tunnel: Tunnel, packets: Arc<Packets>, flushes: Option<Flushes>) -> Self {
        Self { tunnel: Some(tunnel), packets, flushes, connected: AtomicBool::new(false) }
    }

    /// Whether a link carries its frames.
    pub(crate) fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }

    /// Called when a link begins or ends to carry its frames.
    pub(crate) fn set_connected(&self, connected: bool) {
        self.connected.store(connected, Ordering::Release);
        if let Some(flushes) = &self.flushes {
            flushes.set_connected(connected);
        }
    }

    pub(crate) fn tunnel(&self) -> Result<&Tunnel> {
        self.tunnel.as_ref().context("the interface is gone")
    }

    pub(crate) fn flushes(&self) -> Option<&Flushes> {
        self.flushes.as_ref()
    }
}

impl Drop for TunnelInterface {
    fn drop(&mut self) {
        if let Some(tunnel) = self.tunnel.take() {
            self.packets.remove_tunnel(tunnel);
        }
    }
}

/// One node's part of an examination: whether packets with home's address arrive that the other node
/// sends, and a packet of this node's to the other one. Dropping it removes its rules.
#[derive(Debug)]
pub(crate) struct Examination {
    packets: Arc<Packets>,
    probe: PathProbe,
    outgoing: Ends,
    token: ProbeToken,
    began: Instant,
}

impl Examination {
    pub(crate) fn new(packets: Arc<Packets>, probe: PathProbe, outgoing: Ends, token: ProbeToken) -> Self {
        Self { packets, probe, outgoing, token, began: Instant::now() }
    }

    /// Time since it began.
    pub(crate) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// Whether it is the one with this content.
    pub(crate) fn has_token(&self, token: ProbeToken) -> bool {
        self.token == token
    }

    /// Sends this node's packet.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(crate) fn send(&self) -> Result<()> {
        self.packets.send_probe(&self.outgoing, &self.token)
    }

    /// Whether the other node's packet arrives in time.
    pub(crate) fn arrives(&self) -> bool {
        let until = Instant::now() + ARRIVAL_TIMEOUT;
        loop {
            if self.probe.has_arrived() {
                return true;
            }
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(ARRIVAL_CHECK_INTERVAL);
        }
    }
}

impl Drop for Examination {
    fn drop(&mut self) {
        self.packets.end_examination(self.outgoing);
    }
}
