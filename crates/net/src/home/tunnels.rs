//! Home's ends of tunnels, and home's part of examinations.

use crate::message::NetReply;
use crate::packets::Packets;
use crate::path::{Examination, TunnelInterface};
use crate::tunnel::{CarryError, carry};
use anyhow::{Context, Result, ensure};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_redirect::{PathProbe, ProbeToken, TunnelEnd};
use tern_wire::Link;

/// How long an interface without a link is kept for the node's next link, if no connection uses it.
const DISCONNECTED_TIMEOUT: Duration = Duration::from_secs(180);

/// How long an examination may take.
const EXAMINATION_TIMEOUT: Duration = Duration::from_secs(5);

/// The tunnels and examinations at one home, at most one of each for each node.
#[derive(Debug)]
pub(crate) struct Tunnels {
    packets: Arc<Packets>,
    by_node: Mutex<HashMap<NodeId, HomeTunnel>>,
    examinations: Mutex<HashMap<NodeId, Examination>>,
}

#[derive(Debug, Clone)]
struct HomeTunnel {
    interface: Arc<TunnelInterface>,
    /// Number of the last link. The thread of an earlier one ends.
    link: Arc<AtomicU64>,
    /// Since when there is no link.
    disconnected_since: Option<Instant>,
}

impl Tunnels {
    pub(crate) fn new(packets: Arc<Packets>) -> Self {
        Self { packets, by_node: Mutex::default(), examinations: Mutex::default() }
    }

    fn by_node(&self) -> MutexGuard<'_, HashMap<NodeId, HomeTunnel>> {
        self.by_node.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn examinations(&self) -> MutexGuard<'_, HashMap<NodeId, Examination>> {
        self.examinations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tunnel of a node.
    ///
    /// # Errors
    /// If it has none, or that has no link.
    pub(crate) fn get(&self, node: NodeId) -> Result<Arc<TunnelInterface>> {
        let tunnel = self.by_node().get(&node).map(|tunnel| tunnel.interface.clone());
        let connected = tunnel.filter(|tunnel| tunnel.is_connected());
        connected.context("the tunnel between home and the node is interrupted")
    }

    /// Makes a new link of this node the one of its tunnel.
    ///
    /// # Errors
    /// If there can be no interface.
    pub(crate) fn begin(&self, node: NodeId) -> Result<NewLink<'_>> {
        let known = self.by_node().get(&node).cloned();
        let tunnel = match known {
            Some(tunnel) => tunnel,
            None => {
                let tunnel = self.packets.create_tunnel(&format!("ternh{node}"), TunnelEnd::Home)?;
                let interface = Arc::new(TunnelInterface::new(tunnel, self.packets.clone(), None));
                HomeTunnel { interface, link: Arc::default(), disconnected_since: None }
            }
        };
        let number = tunnel.link.fetch_add(1, Ordering::AcqRel) + 1;
        let tunnel = HomeTunnel { disconnected_since: None, ..tunnel };
        self.by_node().insert(node, tunnel.clone());
        Ok(NewLink { tunnels: self, node, tunnel, number })
    }

    /// Sends a packet to a node at `from`, to home's address at which that node reaches home, and begins
    /// to look for the one that the node sends. An earlier examination of the node ends.
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
        let incoming = PathProbe::connection(address, token).reversed();
        let examination = self.packets.examine(from, incoming, token)?;
        examination.send()?;
        let _earlier = self.examinations().insert(node, examination);
        Ok(NetReply::Done)
    }

    /// Whether the packet of a node has arrived.
    ///
    /// # Errors
    /// If it has not.
    pub(crate) fn has_arrived(&self, node: NodeId, token: ProbeToken) -> Result<NetReply> {
        let examination =
            self.examinations().remove(&node).filter(|examination| examination.has_token(token));
        let arrived = examination.is_some_and(|examination| examination.arrives());
        ensure!(arrived, "no packet with home's address has arrived from the node");
        Ok(NetReply::Done)
    }

    /// Ends examinations that their node does not continue, and removes tunnels without a link that no
    /// connection uses.
    pub(crate) fn expire(&self) {
        let is_over = |_: &NodeId, examination: &mut Examination| examination.age() > EXAMINATION_TIMEOUT;
        let _over: Vec<_> = self.examinations().extract_if(is_over).collect();
        let is_unused = |_: &NodeId, tunnel: &mut HomeTunnel| {
            Arc::strong_count(&tunnel.interface) == 1
                && tunnel.disconnected_since.is_some_and(|since| since.elapsed() > DISCONNECTED_TIMEOUT)
        };
        // Their interfaces are removed after the lock was released.
        let _unused: Vec<_> = self.by_node().extract_if(is_unused).collect();
    }
}

/// A link of a tunnel, which is disconnected when this is dropped.
#[derive(Debug)]
pub(crate) struct NewLink<'a> {
    tunnels: &'a Tunnels,
    node: NodeId,
    tunnel: HomeTunnel,
    number: u64,
}

impl NewLink<'_> {
    fn is_last(&self) -> bool {
        self.tunnel.link.load(Ordering::Acquire) == self.number
    }

    /// Carries the tunnel's frames on this link, until it breaks or the node has another one.
    ///
    /// # Errors
    /// If it breaks.
    pub(crate) fn carry(&self, link: &mut Link) -> Result<()> {
        let carried = carry(link, &self.tunnel.interface, || self.is_last());
        if let Err(CarryError::Interface(_)) = &carried {
            // The node's next link gets another interface.
            let _removed = self.tunnels.by_node().remove(&self.node);
        }
        Ok(carried?)
    }
}

impl Drop for NewLink<'_> {
    fn drop(&mut self) {
        if let Some(tunnel) = self.tunnels.by_node().get_mut(&self.node)
            && Arc::ptr_eq(&tunnel.link, &self.tunnel.link)
            && self.is_last()
        {
            tunnel.disconnected_since = Some(Instant::now());
        }
    }
}
