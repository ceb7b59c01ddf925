//! Home's ends of tunnels, one for each node that needs one, and home's part of examinations.

use crate::message::NetReply;
use crate::packets::Packets;
use crate::path::{Examination, TunnelInterface};
use crate::tunnel::carry;
use anyhow::{Result, ensure};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_redirect::{PathProbe, ProbeToken, TunnelEnd};
use tern_wire::Link;

/// How long an end without a link is kept for the node's next link, if no connection uses it.
const LINKLESS_TIMEOUT: Duration = Duration::from_secs(180);

/// How long an examination may take.
const EXAMINATION_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of examinations at a time.
const MAX_EXAMINATIONS: usize = 64;

/// The ends of tunnels at one home.
#[derive(Debug)]
pub(crate) struct Tunnels {
    packets: Arc<Packets>,
    ends: Mutex<HashMap<NodeId, End>>,
    examinations: Mutex<HashMap<(NodeId, ProbeToken), Examination>>,
}

#[derive(Debug)]
struct End {
    interface: Arc<TunnelInterface>,
    /// Number of the last link. The thread of an earlier one ends.
    link: u64,
    /// Since when there is no link.
    linkless: Option<Instant>,
}

impl Tunnels {
    pub(crate) fn new(packets: Arc<Packets>) -> Self {
        Self { packets, ends: Mutex::default(), examinations: Mutex::default() }
    }

    fn ends(&self) -> MutexGuard<'_, HashMap<NodeId, End>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tunnel of a node.
    pub(crate) fn get(&self, node: NodeId) -> Option<Arc<TunnelInterface>> {
        Some(self.ends().get(&node)?.interface.clone())
    }

    /// Begins to use a new link of this node. Returns its number for [`carry`](Self::carry).
    ///
    /// # Errors
    /// If there can be no interface.
    pub(crate) fn begin(&self, node: NodeId) -> Result<u64> {
        let mut ends = self.ends();
        if let Some(end) = ends.get_mut(&node) {
            (end.link, end.linkless) = (end.link + 1, None);
            return Ok(end.link);
        }
        let tunnel = self.packets.create_tunnel(&format!("ternh{node}"), TunnelEnd::Home)?;
        let interface = Arc::new(TunnelInterface::new(tunnel, self.packets.clone(), None));
        ends.insert(node, End { interface, link: 1, linkless: None });
        Ok(1)
    }

    /// Carries the frames of a node's tunnel on the link with this number, until it breaks or the node
    /// has another one.
    ///
    /// # Errors
    /// If it breaks.
    pub(crate) fn carry(&self, node: NodeId, number: u64, link: &mut Link) -> Result<()> {
        let Some(interface) = self.get(node) else { return Ok(()) };
        let is_last = || self.ends().get(&node).is_some_and(|end| end.link == number);
        let carried = carry(link, &interface, is_last);
        if let Some(end) = self.ends().get_mut(&node)
            && end.link == number
        {
            end.linkless = Some(Instant::now());
        }
        carried
    }

    /// Sends a packet to a node at `from`, to home's address at which that node reaches home, and begins
    /// to look for the one that the node sends.
    ///
    /// # Errors
    /// If this machine does not have that address, or cannot send such packets.
    pub(crate) fn examine(
        &self,
        node: NodeId,
        from: IpAddr,
        address: IpAddr,
        token: ProbeToken,
    ) -> Result<NetReply> {
        ensure!(self.packets.is_local(address)?, "{address} is not an address of home");
        let mut examinations = self.examinations.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(examinations.len() < MAX_EXAMINATIONS, "home examines too many paths");
        let incoming = PathProbe::connection(address, token).reversed();
        let examination = self.packets.examine(from, incoming, token)?;
        examination.send()?;
        examinations.insert((node, token), examination);
        Ok(NetReply::Done)
    }

    /// Whether the packet of a node has arrived.
    ///
    /// # Errors
    /// If it has not.
    pub(crate) fn has_arrived(&self, node: NodeId, token: ProbeToken) -> Result<NetReply> {
        let examination = {
            let mut examinations = self.examinations.lock().unwrap_or_else(PoisonError::into_inner);
            examinations.remove(&(node, token))
        };
        let arrived = examination.is_some_and(|examination| examination.arrives());
        ensure!(arrived, "no packet with home's address has arrived from the node");
        Ok(NetReply::Done)
    }

    /// Ends examinations that their node does not continue, and removes ends without a link that no
    /// connection uses.
    pub(crate) fn expire(&self) {
        let mut examinations = self.examinations.lock().unwrap_or_else(PoisonError::into_inner);
        examinations.retain(|_, examination| examination.age() < EXAMINATION_TIMEOUT);
        drop(examinations);
        self.ends().retain(|_, end| {
            Arc::strong_count(&end.interface) > 1
                || end.linkless.is_none_or(|since| since.elapsed() < LINKLESS_TIMEOUT)
        });
    }
}
