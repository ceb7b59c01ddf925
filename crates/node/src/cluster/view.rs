//! Views of the cluster: for the balancer of this home, and for tools.

use crate::cluster::load_entry::LoadEntry;
use crate::node::Node;
use crate::os::clock::boot_ms;
use crate::os::sync::lock;
use std::collections::HashSet;
use tern_balancer as balancer;
use tern_control::{ClusterReport, NodeFlags, NodeLoad, NodeState, RecentMigration};
use tern_gossip::MemberStatus;
use tern_ids::NodeId;
use tern_load::LinkEstimate;

/// A node with this load entry, in the balancer's form.
pub(super) fn to_balancer_node(
    id: NodeId,
    entry: &LoadEntry,
    age_ms: u64,
    link: LinkEstimate,
) -> balancer::NodeSnapshot {
    let unknown = balancer::LinkCost::default();
    let known = |measured: u64, default: u64| if measured == 0 { default } else { measured };
    balancer::NodeSnapshot {
        id,
        speed: entry.speed,
        cpus: entry.cpus.into(),
        load: entry.load.into(),
        mem_free: entry.mem_free,
        mem_total: entry.mem_total,
        swap_free: entry.swap_free,
        swap_total: entry.swap_total,
        mem_pressure: entry.mem_pressure.into(),
        takes_guests: entry.accepts_guests,
        age_ms,
        alive: true,
        link: balancer::LinkCost {
            rtt_us: known(link.rtt_us.into(), unknown.rtt_us.into()) as u32,
            bytes_per_s: known(link.bytes_per_s, unknown.bytes_per_s),
        },
    }
}

/// This node as of its last sample, in the balancer's form; its age is that of the sample.
pub(crate) fn local_node(node: &Node) -> balancer::NodeSnapshot {
    let now = boot_ms();
    let (entry, taken_ms) = (*lock(&node.cluster.own)).unwrap_or((EMPTY_ENTRY, now));
    let age_ms = now.saturating_sub(taken_ms);
    balancer::NodeSnapshot {
        takes_guests: true,
        ..to_balancer_node(node.me(), &entry, age_ms, LinkEstimate::default())
    }
}

/// The entry of a node without information, which receives no processes.
const EMPTY_ENTRY: LoadEntry = LoadEntry {
    load: 0.0,
    speed: 1,
    cpus: 1.0,
    mem_total: 0,
    mem_free: 0,
    mem_raw_free: 0,
    swap_total: 0,
    swap_free: 0,
    mem_pressure: 0.0,
    utilisability: 0,
    guests: 0,
    away: 0,
    flags: NodeFlags { stay: false, lstay: false, block: false, quiet: false, nomfs: false },
    accepts_guests: false,
};

/// The nodes that processes may not leave by decision of the balancer (`stay`).
pub(crate) fn staying_nodes(node: &Node) -> HashSet<NodeId> {
    let gossip = lock(&node.cluster.gossip);
    let keeps_processes = |payload| LoadEntry::decode(payload).is_some_and(|entry| entry.flags.stay);
    gossip.view(boot_ms()).filter(|seen| keeps_processes(seen.payload)).map(|seen| seen.node).collect()
}

/// The cluster in the form of the balancer of this home.
pub(crate) fn view(node: &Node) -> balancer::Cluster {
    let mut nodes = vec![node.balancing.expected_node(local_node(node))];
    let links = node.cluster.links();
    for seen in lock(&node.cluster.gossip).view(boot_ms()) {
        let Some((entry, age)) = LoadEntry::decode(seen.payload).zip(seen.age) else { continue };
        if seen.node == node.me() {
            continue;
        }
        let link = links.get(&seen.node).copied().unwrap_or_default();
        nodes.push(balancer::NodeSnapshot {
            alive: seen.status == MemberStatus::Alive && seen.reachable,
            takes_guests: entry.accepts_guests && node.config.trusts(seen.node),
            ..to_balancer_node(seen.node, &entry, age, link)
        });
    }
    balancer::Cluster::new(node.me(), nodes)
}

/// The cluster in the form that tools show.
pub(crate) fn report(node: &Node) -> ClusterReport {
    let map = node.map();
    let own = lock(&node.cluster.own).map(|(entry, _)| entry);
    let gossip = lock(&node.cluster.gossip);
    let now = boot_ms();
    let row = |id: NodeId| {
        let (state, age_ms, entry) = if id == node.me() {
            (NodeState::Alive, 0, own)
        } else {
            match gossip.member(now, id) {
                Some(seen) => {
                    (node_state(seen.status), seen.age.unwrap_or(0), LoadEntry::decode(seen.payload))
                }
                None => (NodeState::NeverSeen, 0, None),
            }
        };
        let entry = entry.unwrap_or(LoadEntry { speed: 0, cpus: 0.0, ..EMPTY_ENTRY });
        NodeLoad {
            node: id,
            host: map.host(id).unwrap_or_default(),
            state,
            age_ms,
            load: entry.load,
            speed: entry.speed,
            cpus: entry.cpus,
            mem_total: entry.mem_total,
            mem_free: entry.mem_free,
            mem_raw_free: entry.mem_raw_free,
            swap_total: entry.swap_total,
            swap_free: entry.swap_free,
            utilisability: entry.utilisability.into(),
            guests: entry.guests,
            away: entry.away,
            flags: entry.flags,
        }
    };
    let nodes = map.nodes().into_iter().map(row).collect();
    drop(gossip);
    let recent = lock(&node.cluster.recent);
    let migrations = recent.iter().map(|(at, report)| RecentMigration {
        ago_ms: u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX),
        report: report.clone(),
    });
    ClusterReport { me: node.me(), nodes, migrations: migrations.collect() }
}

fn node_state(status: MemberStatus) -> NodeState {
    match status {
        MemberStatus::NeverSeen => NodeState::NeverSeen,
        MemberStatus::Alive => NodeState::Alive,
        MemberStatus::Suspect => NodeState::Suspect,
        MemberStatus::Dead => NodeState::Dead,
    }
}
