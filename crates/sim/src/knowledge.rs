//! What each node knows of the others: by the daemon's own gossip, or as if by magic.

use crate::chance::Chance;
use crate::report::Ages;
use crate::world::{GOSSIP_MS, Information, Placing, Settings, id};
use tern_balancer::{LinkCost, Node};
use tern_gossip::{Config, Event, Gossip, Seen, Status};
use tern_ids::NodeId;

/// What a node says of itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Entry {
    pub(crate) speed: u32,
    pub(crate) cpus: f32,
    pub(crate) load: f32,
    pub(crate) free: u64,
    pub(crate) total: u64,
    pub(crate) pressure: f32,
    pub(crate) takes_guests: bool,
}

/// What a node knows of another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known {
    pub(crate) node: usize,
    pub(crate) age_ms: u64,
    pub(crate) alive: bool,
    pub(crate) entry: Entry,
}

impl Known {
    /// As the balancer wants it.
    pub(crate) fn node(&self) -> Node {
        let entry = self.entry;
        Node {
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

/// Where nodes know of each other from.
#[derive(Debug)]
pub(crate) enum Knowledge {
    Nothing,
    Gossip(Network),
    Ideal(Ideal),
}

impl Knowledge {
    pub(crate) fn new(settings: &Settings, alive: &[bool]) -> Self {
        match (settings.placing, settings.information) {
            (Placing::Balanced, Information::Gossip) => Self::Gossip(Network::new(settings.seed, alive)),
            (Placing::Balanced, Information::Ideal) => Self::Ideal(Ideal::new(alive.len(), settings.seed)),
            // Nobody asks.
            _ => Self::Nothing,
        }
    }

    /// It is the turn of these nodes, in the order of their places, to tell others how they stand.
    pub(crate) fn tell(&mut self, turn: &[(usize, Entry)], now_ms: u64, alive: &[bool]) {
        match self {
            Self::Nothing => {}
            Self::Gossip(network) => network.tell(turn, now_ms, alive),
            Self::Ideal(ideal) => {
                for (node, entry) in turn {
                    ideal.entries[*node] = Some((now_ms, *entry));
                }
            }
        }
    }

    /// What a node knows of others, and of those where its guests are in any case.
    pub(crate) fn view(
        &mut self,
        node: usize,
        guests: impl Iterator<Item = usize>,
        now_ms: u64,
        alive: &[bool],
        into: &mut Vec<Known>,
    ) {
        match self {
            Self::Nothing => {}
            Self::Gossip(network) => network.view(node, guests, now_ms, into),
            Self::Ideal(ideal) => ideal.view(guests, now_ms, alive, into),
        }
    }

    /// A node has come, or come back.
    pub(crate) fn join(&mut self, node: usize, now_ms: u64) {
        if let Self::Gossip(network) = self {
            network.join(node, now_ms);
        }
    }

    /// A node has died.
    pub(crate) fn failed(&mut self, node: usize, now_ms: u64) {
        if let Self::Gossip(network) = self {
            network.died_ms[node] = Some(now_ms);
        }
    }

    /// Looks at the age of information now and then.
    pub(crate) fn measure(&mut self, now_ms: u64, alive: &[bool]) {
        if let Self::Gossip(network) = self
            && now_ms >= 60_000
            && now_ms.is_multiple_of(30_000)
        {
            network.measure(now_ms, alive);
        }
    }

    pub(crate) fn ages(&self) -> Option<Ages> {
        match self {
            Self::Gossip(network) if network.measured > 0.0 => {
                let Ages { average_ms, worst_ms, known } = network.ages;
                let all = network.measured;
                Some(Ages { average_ms: average_ms / all, worst_ms: worst_ms / all, known: known / all })
            }
            _ => None,
        }
    }

    /// Seconds after which nodes knew of deaths.
    pub(crate) fn deaths_s(&self) -> Vec<f64> {
        match self {
            Self::Gossip(network) => network.deaths_s.clone(),
            _ => Vec::new(),
        }
    }
}

/// In larger clusters a decision looks at the newest entries only, as many as a message carries, and not at a view
/// of thousands.
const WHOLE_VIEW: usize = 256;
/// Nodes whose ages are looked at.
const MEASURED: usize = 64;

/// All nodes' gossip; messages arrive at once.
#[derive(Debug)]
pub(crate) struct Network {
    nodes: Vec<Gossip>,
    seed: u64,
    died_ms: Vec<Option<u64>>,
    deaths_s: Vec<f64>,
    ages: Ages,
    measured: f64,
}

impl Network {
    fn new(seed: u64, alive: &[bool]) -> Self {
        let mut network = Self {
            nodes: Vec::with_capacity(alive.len()),
            seed,
            died_ms: vec![None; alive.len()],
            deaths_s: Vec::new(),
            ages: Ages { average_ms: 0.0, worst_ms: 0.0, known: 0.0 },
            measured: 0.0,
        };
        for node in 0..alive.len() {
            let gossip = network.begin(node, alive.len(), 1);
            network.nodes.push(gossip);
        }
        network
    }

    fn begin(&self, node: usize, all: usize, incarnation: u64) -> Gossip {
        let config = Config { period: GOSSIP_MS, ..Config::default() };
        let seed = Chance::new(self.seed ^ (node as u64) << 32 ^ incarnation).bits();
        let mut gossip = Gossip::new(id(node), incarnation, config, seed);
        gossip.set_members((0..all).map(id));
        gossip
    }

    fn join(&mut self, node: usize, now_ms: u64) {
        let gossip = self.begin(node, self.nodes.len(), now_ms.max(2));
        self.nodes[node] = gossip;
        self.died_ms[node] = None;
    }

    /// First all speak, then all listen, each half of the nodes on a thread of its own. What comes of it does not
    /// depend on the threads: a node only ever changes by what it sends, and by what it receives in a fixed order.
    fn tell(&mut self, turn: &[(usize, Entry)], now_ms: u64, alive: &[bool]) {
        let middle = self.nodes.len() / 2;
        let (low, high) = self.nodes.split_at_mut(middle);
        let (first, last) = turn.split_at(turn.partition_point(|(node, _)| *node < middle));
        let (mut messages, more) =
            in_two(turn.len(), || speak(low, 0, first, now_ms), || speak(high, middle, last, now_ms));
        messages.extend(more);
        in_two(
            turn.len(),
            || listen(low, 0, &messages, now_ms, alive),
            || listen(high, middle, &messages, now_ms, alive),
        );
        for (node, _) in turn {
            for event in self.nodes[*node].events() {
                if let Event::Died(other) = event
                    && let Some(at) = self.died_ms[place(other)]
                {
                    self.deaths_s.push((now_ms - at) as f64 / 1000.0);
                }
            }
        }
    }

    fn view(&mut self, node: usize, guests: impl Iterator<Item = usize>, now_ms: u64, into: &mut Vec<Known>) {
        let whole = self.nodes.len() <= WHOLE_VIEW;
        let gossip = &mut self.nodes[node];
        if whole {
            into.extend(gossip.view(now_ms).filter_map(|seen| known(&seen)));
        } else {
            into.extend(gossip.newest(now_ms).filter_map(|seen| known(&seen)));
            into.extend(guests.filter_map(|at| known(&gossip.seen(now_ms, id(at))?)));
        }
    }

    fn measure(&mut self, now_ms: u64, alive: &[bool]) {
        let stride = self.nodes.len().div_ceil(MEASURED);
        for node in (0..self.nodes.len()).step_by(stride).filter(|node| alive[*node]) {
            let living = self.nodes[node].view(now_ms).filter(|seen| alive[place(seen.node)]);
            let ages: Vec<u64> = living.filter_map(|seen| seen.age).collect();
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

/// One message on its way.
#[derive(Debug)]
struct Message {
    from: usize,
    to: NodeId,
    bytes: Vec<u8>,
}

/// With fewer nodes a thread is not worth its start.
const WORTH_A_THREAD: usize = 200;

fn in_two<T: Send>(size: usize, one: impl FnOnce() -> T, other: impl FnOnce() -> T + Send) -> (T, T) {
    if size < WORTH_A_THREAD {
        return (one(), other());
    }
    std::thread::scope(|scope| {
        let other = scope.spawn(other);
        (one(), other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// What those whose turn it is have to say; `nodes` are those from place `start` on.
fn speak(nodes: &mut [Gossip], start: usize, turn: &[(usize, Entry)], now_ms: u64) -> Vec<Message> {
    let mut messages = Vec::with_capacity(turn.len());
    for (from, entry) in turn {
        let gossip = &mut nodes[from - start];
        // Never longer than a payload may be.
        let _ = gossip.set_own(&encode(entry));
        messages.extend(gossip.tick(now_ms).map(|(to, bytes)| Message { from: *from, to, bytes }));
    }
    messages
}

/// What these nodes receive, and how their own messages fared.
fn listen(nodes: &mut [Gossip], start: usize, messages: &[Message], now_ms: u64, alive: &[bool]) {
    let here = start..start + nodes.len();
    for message in messages {
        let target = place(message.to);
        if alive[target] && here.contains(&target) {
            let read = nodes[target - start].receive(now_ms, id(message.from), &message.bytes);
            debug_assert!(read.is_ok(), "{read:?}");
        }
        if here.contains(&message.from) {
            let sender = &mut nodes[message.from - start];
            if alive[target] {
                sender.reached(message.to);
            } else {
                sender.unreachable(now_ms, message.to);
            }
        }
    }
}

fn place(node: NodeId) -> usize {
    usize::from(node.0).saturating_sub(1)
}

fn known(seen: &Seen<'_>) -> Option<Known> {
    let alive = seen.status == Status::Alive && seen.reachable;
    Some(Known { node: place(seen.node), age_ms: seen.age?, alive, entry: decode(seen.payload)? })
}

const MIB: u64 = 1 << 20;

/// An entry as nodes pass it on: 22 bytes.
fn encode(entry: &Entry) -> [u8; 22] {
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

fn decode(bytes: &[u8]) -> Option<Entry> {
    let bytes: &[u8; 22] = bytes.try_into().ok()?;
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    Some(Entry {
        speed: word(0),
        cpus: f32::from_bits(word(4)),
        load: f32::from_bits(word(8)),
        free: u64::from(word(12)) * MIB,
        total: u64::from(word(16)) * MIB,
        pressure: f32::from(bytes[20]),
        takes_guests: bytes[21] != 0,
    })
}

/// Everybody knows everything at once: for comparison.
#[derive(Debug)]
pub(crate) struct Ideal {
    entries: Vec<Option<(u64, Entry)>>,
    chance: Chance,
}

impl Ideal {
    fn new(nodes: usize, seed: u64) -> Self {
        Self { entries: vec![None; nodes], chance: Chance::new(seed) }
    }

    fn view(
        &mut self,
        guests: impl Iterator<Item = usize>,
        now_ms: u64,
        alive: &[bool],
        into: &mut Vec<Known>,
    ) {
        let all = self.entries.len();
        // Of many nodes some are drawn by chance, or each decision would look at all.
        let drawn: Vec<usize> = if all <= WHOLE_VIEW {
            (0..all).collect()
        } else {
            (0..WHOLE_VIEW).map(|_| self.chance.below(all)).chain(guests).collect()
        };
        for node in drawn {
            if let Some((at, entry)) = self.entries[node] {
                into.push(Known { node, age_ms: now_ms - at, alive: alive[node], entry });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_survive_the_way() {
        let entry = Entry {
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
