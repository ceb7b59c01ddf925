//! Each node's information about the others: from the daemon's own gossip, or always current.

use crate::report::InformationAges;
use crate::rng::Rng;
use crate::world::{GOSSIP_MS, Information, PlacementPolicy, SimSettings, id};
use tern_balancer::{LinkCost, NodeSnapshot};
use tern_gossip::{Gossip, GossipConfig, Member, MemberStatus, MembershipEvent};
use tern_ids::NodeId;

/// Information that a node publishes about itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LoadEntry {
    pub(crate) speed: u32,
    pub(crate) cpus: f32,
    pub(crate) load: f32,
    pub(crate) free: u64,
    pub(crate) total: u64,
    pub(crate) pressure: f32,
    pub(crate) takes_guests: bool,
}

/// A node's information about another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeInfo {
    pub(crate) node: usize,
    pub(crate) age_ms: u64,
    pub(crate) alive: bool,
    pub(crate) entry: LoadEntry,
}

impl NodeInfo {
    /// Converts it for the balancer.
    pub(crate) fn node(&self) -> NodeSnapshot {
        let entry = self.entry;
        NodeSnapshot {
            id: id(self.node),
            speed: entry.speed,
            cpus: f64::from(entry.cpus),
            load: f64::from(entry.load),
            mem_free: entry.free,
            mem_total: entry.total,
            swap_free: 0,
            swap_total: 0,
            mem_pressure: f64::from(entry.pressure),
            takes_guests: entry.takes_guests,
            age_ms: self.age_ms,
            alive: self.alive,
            link: LinkCost { rtt_us: 200, bytes_per_s: 117_000_000 },
        }
    }
}

/// The source of the nodes' information.
#[derive(Debug)]
pub(crate) enum InformationSource {
    Nothing,
    Gossip(Network),
    Ideal(Ideal),
}

impl InformationSource {
    pub(crate) fn new(settings: &SimSettings, alive: &[bool]) -> Self {
        match (settings.placing, settings.information) {
            (PlacementPolicy::Balanced, Information::Gossip) => {
                Self::Gossip(Network::new(settings.seed, alive))
            }
            (PlacementPolicy::Balanced, Information::Ideal) => {
                Self::Ideal(Ideal::new(alive.len(), settings.seed))
            }
            // Static placement uses no information.
            _ => Self::Nothing,
        }
    }

    /// These nodes, ordered by index, publish their entries in this step.
    pub(crate) fn publish(&mut self, senders: &[(usize, LoadEntry)], now_ms: u64, alive: &[bool]) {
        match self {
            Self::Nothing => {}
            Self::Gossip(network) => network.publish(senders, now_ms, alive),
            Self::Ideal(ideal) => {
                for (node, entry) in senders {
                    ideal.entries[*node] = Some((now_ms, *entry));
                }
            }
        }
    }

    /// Collects a node's information about others, always including `guests`, the nodes where its
    /// own processes are guests.
    pub(crate) fn view(
        &mut self,
        node: usize,
        guests: impl Iterator<Item = usize>,
        now_ms: u64,
        alive: &[bool],
        into: &mut Vec<NodeInfo>,
    ) {
        match self {
            Self::Nothing => {}
            Self::Gossip(network) => network.view(node, guests, now_ms, into),
            Self::Ideal(ideal) => ideal.view(guests, now_ms, alive, into),
        }
    }

    /// A node has joined, or rejoined.
    pub(crate) fn join(&mut self, node: usize, now_ms: u64) {
        if let Self::Gossip(network) = self {
            network.join(node, now_ms);
        }
    }

    /// A node has failed.
    pub(crate) fn fail(&mut self, node: usize, now_ms: u64) {
        if let Self::Gossip(network) = self {
            network.died_ms[node] = Some(now_ms);
        }
    }

    /// Measures the age of information from time to time.
    pub(crate) fn measure(&mut self, now_ms: u64, alive: &[bool]) {
        if let Self::Gossip(network) = self
            && now_ms >= 60_000
            && now_ms.is_multiple_of(30_000)
        {
            network.measure(now_ms, alive);
        }
    }

    pub(crate) fn ages(&self) -> Option<InformationAges> {
        match self {
            Self::Gossip(network) if network.measured > 0.0 => {
                let InformationAges { average_ms, worst_ms, known } = network.ages;
                let all = network.measured;
                Some(InformationAges {
                    average_ms: average_ms / all,
                    worst_ms: worst_ms / all,
                    known: known / all,
                })
            }
            _ => None,
        }
    }

    /// Seconds from each death until a node detected it.
    pub(crate) fn deaths_s(&self) -> Vec<f64> {
        match self {
            Self::Gossip(network) => network.deaths_s.clone(),
            _ => Vec::new(),
        }
    }
}

/// The largest cluster in which a decision uses the whole view. In larger ones it uses the newest
/// entries only, as many as a message carries.
const MAX_WHOLE_VIEW: usize = 256;
/// Limit of nodes whose ages are measured.
const MAX_MEASURED: usize = 64;

/// All nodes' gossip; messages arrive at once.
#[derive(Debug)]
pub(crate) struct Network {
    nodes: Vec<Gossip>,
    seed: u64,
    died_ms: Vec<Option<u64>>,
    deaths_s: Vec<f64>,
    ages: InformationAges,
    measured: f64,
}

impl Network {
    fn new(seed: u64, alive: &[bool]) -> Self {
        let mut network = Self {
            nodes: Vec::with_capacity(alive.len()),
            seed,
            died_ms: vec![None; alive.len()],
            deaths_s: Vec::new(),
            ages: InformationAges { average_ms: 0.0, worst_ms: 0.0, known: 0.0 },
            measured: 0.0,
        };
        for node in 0..alive.len() {
            let gossip = network.new_gossip(node, alive.len(), 1);
            network.nodes.push(gossip);
        }
        network
    }

    fn new_gossip(&self, node: usize, all: usize, incarnation: u64) -> Gossip {
        let config = GossipConfig { period: GOSSIP_MS, ..GossipConfig::default() };
        let seed = Rng::new(self.seed ^ (node as u64) << 32 ^ incarnation).next_u64();
        let mut gossip = Gossip::new(id(node), incarnation, config, seed);
        gossip.set_members((0..all).map(id));
        gossip
    }

    fn join(&mut self, node: usize, now_ms: u64) {
        let gossip = self.new_gossip(node, self.nodes.len(), now_ms.max(2));
        self.nodes[node] = gossip;
        self.died_ms[node] = None;
    }

    /// First all nodes send, then all receive, each half of the nodes on its own thread. The result
    /// does not depend on the threads: a node's state depends only on what it sends, and on what it
    /// receives in a fixed order.
    fn publish(&mut self, senders: &[(usize, LoadEntry)], now_ms: u64, alive: &[bool]) {
        let middle = self.nodes.len() / 2;
        let (low, high) = self.nodes.split_at_mut(middle);
        let (first, last) = senders.split_at(senders.partition_point(|(node, _)| *node < middle));
        let (mut messages, more) = in_two(
            senders.len(),
            || send_messages(low, 0, first, now_ms),
            || send_messages(high, middle, last, now_ms),
        );
        messages.extend(more);
        in_two(
            senders.len(),
            || receive_messages(low, 0, &messages, now_ms, alive),
            || receive_messages(high, middle, &messages, now_ms, alive),
        );
        for (node, _) in senders {
            for event in self.nodes[*node].events() {
                if let MembershipEvent::Died(other) = event
                    && let Some(at) = self.died_ms[index_of(other)]
                {
                    self.deaths_s.push((now_ms - at) as f64 / 1000.0);
                }
            }
        }
    }

    fn view(
        &mut self,
        node: usize,
        guests: impl Iterator<Item = usize>,
        now_ms: u64,
        into: &mut Vec<NodeInfo>,
    ) {
        let whole = self.nodes.len() <= MAX_WHOLE_VIEW;
        let gossip = &mut self.nodes[node];
        if whole {
            into.extend(gossip.view(now_ms).filter_map(|member| node_info(&member)));
        } else {
            into.extend(gossip.newest(now_ms).filter_map(|member| node_info(&member)));
            into.extend(guests.filter_map(|at| node_info(&gossip.member(now_ms, id(at))?)));
        }
    }

    fn measure(&mut self, now_ms: u64, alive: &[bool]) {
        let stride = self.nodes.len().div_ceil(MAX_MEASURED);
        for node in (0..self.nodes.len()).step_by(stride).filter(|node| alive[*node]) {
            let living = self.nodes[node].view(now_ms).filter(|member| alive[index_of(member.node)]);
            let ages: Vec<u64> = living.filter_map(|member| member.age).collect();
            if ages.is_empty() {
                continue;
            }
            self.ages.average_ms += ages.iter().sum::<u64>() as f64 / ages.len() as f64;
            self.ages.worst_ms += ages.iter().copied().max().unwrap_or(0) as f64;
            self.ages.known += ages.len() as f64;
            self.measured += 1.0;
        }
    }
}

/// A message in transit.
#[derive(Debug)]
struct Message {
    from: usize,
    to: NodeId,
    bytes: Vec<u8>,
}

/// With fewer nodes than this, starting a thread takes longer than it saves.
const MIN_PARALLEL_NODES: usize = 200;

fn in_two<T: Send>(size: usize, one: impl FnOnce() -> T, other: impl FnOnce() -> T + Send) -> (T, T) {
    if size < MIN_PARALLEL_NODES {
        return (one(), other());
    }
    std::thread::scope(|scope| {
        let other = scope.spawn(other);
        (one(), other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// The messages that nodes send in this step; `nodes` begins with the node of index `start`.
fn send_messages(
    nodes: &mut [Gossip],
    start: usize,
    senders: &[(usize, LoadEntry)],
    now_ms: u64,
) -> Vec<Message> {
    let mut messages = Vec::with_capacity(senders.len());
    for (from, entry) in senders {
        let gossip = &mut nodes[from - start];
        // Always shorter than the limit.
        let _ = gossip.set_payload(&encode(entry));
        messages.extend(gossip.tick(now_ms).map(|(to, bytes)| Message { from: *from, to, bytes }));
    }
    messages
}

/// Delivers messages to these nodes, and reports to them whether their own messages were sent.
fn receive_messages(nodes: &mut [Gossip], start: usize, messages: &[Message], now_ms: u64, alive: &[bool]) {
    let here = start..start + nodes.len();
    for message in messages {
        let target = index_of(message.to);
        if alive[target] && here.contains(&target) {
            let read = nodes[target - start].receive(now_ms, id(message.from), &message.bytes);
            debug_assert!(read.is_ok(), "{read:?}");
        }
        if here.contains(&message.from) {
            let sender = &mut nodes[message.from - start];
            if alive[target] {
                sender.mark_reachable(message.to);
            } else {
                sender.mark_unreachable(now_ms, message.to);
            }
        }
    }
}

fn index_of(node: NodeId) -> usize {
    usize::from(node.0).saturating_sub(1)
}

fn node_info(member: &Member<'_>) -> Option<NodeInfo> {
    let alive = member.status == MemberStatus::Alive && member.reachable;
    Some(NodeInfo { node: index_of(member.node), age_ms: member.age?, alive, entry: decode(member.payload)? })
}

const MIB: u64 = 1 << 20;

/// An entry as published: 22 bytes.
fn encode(entry: &LoadEntry) -> [u8; 22] {
    let mut bytes = [0; 22];
    let mib = |count: u64| u32::try_from(count / MIB).unwrap_or(u32::MAX);
    let words = [entry.speed, entry.cpus.to_bits(), entry.load.to_bits(), mib(entry.free), mib(entry.total)];
    for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    bytes[20] = entry.pressure.clamp(0.0, 100.0) as u8;
    bytes[21] = u8::from(entry.takes_guests);
    bytes
}

fn decode(bytes: &[u8]) -> Option<LoadEntry> {
    let bytes: &[u8; 22] = bytes.try_into().ok()?;
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    Some(LoadEntry {
        speed: word(0),
        cpus: f32::from_bits(word(4)),
        load: f32::from_bits(word(8)),
        free: u64::from(word(12)) * MIB,
        total: u64::from(word(16)) * MIB,
        pressure: f32::from(bytes[20]),
        takes_guests: bytes[21] != 0,
    })
}

/// Information that is always current, for comparison with gossip.
#[derive(Debug)]
pub(crate) struct Ideal {
    entries: Vec<Option<(u64, LoadEntry)>>,
    rng: Rng,
}

impl Ideal {
    fn new(nodes: usize, seed: u64) -> Self {
        Self { entries: vec![None; nodes], rng: Rng::new(seed) }
    }

    fn view(
        &mut self,
        guests: impl Iterator<Item = usize>,
        now_ms: u64,
        alive: &[bool],
        into: &mut Vec<NodeInfo>,
    ) {
        let all = self.entries.len();
        // In a large cluster a random sample is used, or each decision would examine all nodes.
        let drawn: Vec<usize> = if all <= MAX_WHOLE_VIEW {
            (0..all).collect()
        } else {
            (0..MAX_WHOLE_VIEW).map(|_| self.rng.below(all)).chain(guests).collect()
        };
        for node in drawn {
            if let Some((at, entry)) = self.entries[node] {
                into.push(NodeInfo { node, age_ms: now_ms - at, alive: alive[node], entry });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_survive_encoding() {
        let entry = LoadEntry {
            speed: 9_000,
            cpus: 1.5,
            load: 123.25,
            free: 7 * MIB,
            total: 4096 * MIB,
            pressure: 30.0,
            takes_guests: true,
        };
        assert_eq!(decode(&encode(&entry)), Some(entry));
        assert_eq!(decode(&encode(&entry)[1..]), None);
    }
}
