//! The network topology of a lab, with names and addresses, and the `ip` and `tc` command lines
//! that create it. Functions here only compute text.
//!
//! Each network interface of a node is one end of a veth pair. The other end, the port, is in the
//! switch's network namespace. The ports of one segment are joined by a bridge or by the link
//! emulator process.

use crate::lab::options::LabName;
use crate::network::link_spec::{LinkSpec, Topology};
use std::net::Ipv4Addr;

/// The interface that discards frames. To cut a pair of nodes, frames between them are redirected
/// to it, because not every kernel has the "drop" action for tc.
const DISCARD_INTERFACE: &str = "hole";

/// One network interface of a node and the port it is plugged into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Port {
    /// The bridge or emulated segment, counted from 0.
    pub(crate) segment: usize,
    pub(crate) node: u16,
    /// The interface's name in the node.
    pub(crate) interface: String,
    /// The name of the other end, in the switch.
    pub(crate) port: String,
    /// The MAC address in the node.
    pub(crate) mac: String,
    /// With point-to-point cables: the node at the other end.
    pub(crate) peer: Option<u16>,
}

/// The network of a lab.
#[derive(Debug, Clone)]
pub(crate) struct NetworkLayout {
    pub(crate) link: LinkSpec,
    pub(crate) ports: Vec<Port>,
    octet: u8,
}

impl NetworkLayout {
    /// Computes the topology; the same arguments always give the same result.
    pub(crate) fn new(lab: &LabName, link: &LinkSpec, nodes: u16) -> Self {
        let octet = octet(lab);
        let mut ports = Vec::new();
        if link.topology == Topology::P2p {
            let pairs = (1..=nodes).flat_map(|a| (a + 1..=nodes).map(move |b| (a, b)));
            for (segment, (a, b)) in pairs.enumerate() {
                ports.push(port(octet, segment, a, Some(b)));
                ports.push(port(octet, segment, b, Some(a)));
            }
        } else {
            ports.extend((1..=nodes).map(|node| port(octet, 0, node, None)));
        }
        Self { link: *link, ports, octet }
    }

    /// The address of a node: 10.X.0.N, with X derived from the lab's name.
    pub(crate) fn address(&self, node: u16) -> Ipv4Addr {
        let [high, low] = node.to_be_bytes();
        Ipv4Addr::new(10, self.octet, high, low)
    }

    /// The ports of one node.
    pub(crate) fn ports_of(&self, node: u16) -> impl Iterator<Item = &Port> {
        self.ports.iter().filter(move |p| p.node == node)
    }

    /// Number of segments.
    pub(crate) fn segments(&self) -> usize {
        self.ports.iter().map(|p| p.segment + 1).max().unwrap_or(0)
    }

    /// Lines for `ip` in the switch, run once. `emulated`: the link emulator joins the ports
    /// instead of bridges.
    pub(crate) fn switch_lines(&self, emulated: bool) -> Vec<String> {
        let mut lines = vec![
            format!("link add {DISCARD_INTERFACE} type veth peer name {DISCARD_INTERFACE}-end"),
            format!("link set {DISCARD_INTERFACE} addrgenmode none up"),
            format!("link set {DISCARD_INTERFACE}-end addrgenmode none up"),
        ];
        for segment in 0..if emulated { 0 } else { self.segments() } {
            // With snooping, a bridge withholds multicast until a host joins the group; a simple
            // switch does not.
            lines.push(format!("link add br{segment} type bridge mcast_snooping 0"));
            lines.push(format!("link set br{segment} addrgenmode none up"));
        }
        lines
    }

    /// Lines for `ip` in the switch: the cables to the node whose init has this pid. The ports are
    /// left down.
    pub(crate) fn veth_lines(&self, node: u16, init: i32, emulated: bool) -> Vec<String> {
        let mut lines = Vec::new();
        for Port { segment, interface, port, mac, .. } in self.ports_of(node) {
            lines.push(format!("link add {port} type veth peer name {interface} address {mac} netns {init}"));
            let master = if emulated { String::new() } else { format!(" master br{segment}") };
            lines.push(format!("link set {port} addrgenmode none{master}"));
        }
        lines
    }

    /// Lines for `tc` in the switch: shaping of frames to this node. `netem`: the kernel makes
    /// delay and loss.
    pub(crate) fn shape_lines(&self, node: u16, netem: bool) -> Vec<String> {
        let mut lines = Vec::new();
        for Port { port, .. } in self.ports_of(node) {
            if netem {
                let micros = self.link.delay.as_micros();
                let percent = self.link.loss * 100.0;
                lines.push(format!(
                    "qdisc add dev {port} root handle 1: netem delay {micros}us loss {percent}% limit 50000"
                ));
                lines.extend(self.tbf_line(&format!("{port} parent 1:1 handle 10:")));
            } else {
                lines.extend(self.tbf_line(&format!("{port} root")));
            }
            lines.push(format!("qdisc add dev {port} clsact"));
        }
        lines
    }

    /// Lines for `ip` in the node.
    pub(crate) fn node_lines(&self, node: u16, emulated: bool) -> Vec<String> {
        let own = self.address(node);
        let mut lines = vec!["link set lo up".to_owned()];
        for Port { interface, peer, .. } in self.ports_of(node) {
            // The interface sends nothing on its own, so that seeded losses hit the same frames
            // each time.
            lines.push(format!("link set {interface} addrgenmode none"));
            if self.needs_small_frames(emulated) {
                lines.push(format!("link set {interface} gso_max_segs 1"));
            }
            lines.push(match peer {
                Some(peer) => format!("addr add {own} peer {}/32 dev {interface}", self.address(*peer)),
                None => format!("addr add {own}/24 dev {interface}"),
            });
            lines.push(format!("link set {interface} up"));
        }
        lines
    }

    /// Lines for `tc` in the node: its sending rate.
    pub(crate) fn node_shape_lines(&self, node: u16) -> Vec<String> {
        self.ports_of(node).filter_map(|p| self.tbf_line(&format!("{} root", p.interface))).collect()
    }

    /// A line for `tc` in the switch that blocks or unblocks frames from `from` to `to` on a shared
    /// segment.
    pub(crate) fn block_line(&self, from: &Port, to: &Port, block: bool) -> String {
        let Port { port, .. } = to;
        let pref = from.node;
        if block {
            format!(
                "filter add dev {port} egress protocol all pref {pref} u32 match ether src {} \
                 action mirred egress redirect dev {DISCARD_INTERFACE}",
                from.mac
            )
        } else {
            format!("filter del dev {port} egress pref {pref}")
        }
    }

    /// Whether the node must send frames as small as on a real cable, not 64 KiB at a time. A 64
    /// KiB frame would be lost, or occupy a hub, as a whole. If it is larger than TBF's bucket, TBF
    /// splits it, TCP counts it as sent, and TCP then floods the queue (measured at 20 Mbit/s: more
    /// retransmissions than segments).
    fn needs_small_frames(&self, emulated: bool) -> bool {
        emulated && (self.link.loss > 0.0 || self.link.topology == Topology::Hub)
            || self.link.rate.is_some_and(|rate| tbf_burst(rate) < 66_000)
    }

    /// The qdisc that limits the rate; `None` for a hub, where the link emulator enforces one
    /// shared rate.
    fn tbf_line(&self, place: &str) -> Option<String> {
        let rate = self.link.rate.filter(|_| self.link.topology != Topology::Hub)?;
        let burst = tbf_burst(rate);
        Some(format!("qdisc add dev {place} tbf rate {rate}bit burst {burst} latency 50ms"))
    }
}

/// Bucket size in bytes: 2 ms of traffic, but at least two frames. A larger bucket makes slow links
/// look fast.
fn tbf_burst(rate: u64) -> u64 {
    (rate / 8 / 500).max(3_100)
}

fn port(octet: u8, segment: usize, node: u16, peer: Option<u16>) -> Port {
    let [high, low] = node.to_be_bytes();
    // A node's interfaces are numbered in the order of their peers.
    let index = peer.map_or(0, |peer| if peer < node { peer - 1 } else { peer - 2 });
    let port = peer.map_or_else(|| format!("p{node}"), |peer| format!("p{node}-{peer}"));
    let mac = format!("02:7e:{octet:02x}:{segment:02x}:{high:02x}:{low:02x}");
    Port { segment, node, interface: format!("eth{index}"), port, mac, peer }
}

/// 16 to 215, from the lab's name by FNV-1a.
fn octet(lab: &LabName) -> u8 {
    let hash =
        lab.as_str().bytes().fold(0x811c_9dc5_u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193));
    16 + (hash % 200) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn layout(link: &str, nodes: u16) -> NetworkLayout {
        NetworkLayout::new(&LabName::default(), &link.parse().unwrap(), nodes)
    }

    #[test]
    fn a_switch_has_one_port_a_node() {
        let layout = layout("switch:100mbit", 3);
        assert_eq!(layout.segments(), 1);
        assert_eq!(layout.ports.iter().map(|p| p.port.as_str()).collect::<Vec<_>>(), ["p1", "p2", "p3"]);
        assert!(layout.ports.iter().all(|p| p.interface == "eth0"));
        assert_eq!(layout.address(2).octets()[2..], [0, 2]);
        assert_eq!(
            layout.node_shape_lines(1),
            ["qdisc add dev eth0 root tbf rate 100000000bit burst 25000 latency 50ms"]
        );
    }

    #[test]
    fn cables_join_each_two_nodes() {
        let layout = layout("p2p", 4);
        assert_eq!(layout.segments(), 6);
        for node in 1..=4 {
            let names: BTreeSet<_> = layout.ports_of(node).map(|p| p.interface.clone()).collect();
            assert_eq!(names, ["eth0", "eth1", "eth2"].map(str::to_owned).into(), "node {node}");
        }
        for segment in 0..6 {
            let ends: Vec<_> = layout.ports.iter().filter(|p| p.segment == segment).collect();
            assert_eq!(ends.len(), 2);
            assert_eq!(ends[0].peer, Some(ends[1].node));
        }
        let macs: BTreeSet<_> = layout.ports.iter().map(|p| &p.mac).collect();
        assert_eq!(macs.len(), layout.ports.len());
        assert!(layout.ports.iter().all(|p| p.port.len() < 16), "interface names have 15 letters at most");
    }

    #[test]
    fn netem_carries_the_rate_as_its_child() {
        let lines = layout("switch:10mbit,5ms,1%", 1).shape_lines(1, true);
        assert!(lines[0].contains("root handle 1: netem delay 5000us loss 1%"), "{lines:?}");
        assert!(lines[1].contains("p1 parent 1:1 handle 10: tbf rate 10000000bit burst 3100"), "{lines:?}");
    }

    #[test]
    fn slow_and_lossy_links_get_small_frames() {
        let small = |link: &str, emulated| {
            layout(link, 2).node_lines(1, emulated).iter().any(|l| l.contains("gso_max_segs 1"))
        };
        assert!(small("switch:100mbit", false) && small("p2p:,1%", true) && small("hub", true));
        assert!(!small("switch:1gbit", false) && !small("switch:1ms", true) && !small("switch", false));
    }

    #[test]
    fn rate_of_a_hub_is_left_to_the_emulator() {
        assert!(layout("hub:10mbit", 2).node_shape_lines(1).is_empty());
    }
}
