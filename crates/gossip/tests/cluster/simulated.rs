//! An in-memory cluster: every node has its own clock, and the test decides what happens to each
//! message.

use std::collections::HashSet;
use tern_gossip::rng::Rng;
use tern_gossip::{Gossip, GossipConfig, MemberStatus, MembershipEvent};
use tern_ids::NodeId;

/// The fate of a message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// It arrives.
    Delivered,
    /// It cannot be sent, and the sender gets an error.
    Failed,
    /// It is lost without an error.
    Lost,
}

pub(crate) struct Node {
    pub(crate) gossip: Gossip,
    /// How far its clock is ahead of the true time, in ms.
    pub(crate) clock_offset: i64,
    /// The daemon is stopped: messages to it are queued.
    pub(crate) paused: bool,
    waiting: Vec<(NodeId, Vec<u8>)>,
    pub(crate) events: Vec<MembershipEvent>,
}

/// The fate of a message from one node to another.
type Network = dyn Fn(u16, u16, &mut Rng) -> Delivery;

pub(crate) struct Cluster {
    /// Node n is at n - 1; `None` if its machine is off.
    pub(crate) nodes: Vec<Option<Node>>,
    pub(crate) deliver: Box<Network>,
    pub(crate) rng: Rng,
    pub(crate) now: u64,
    pub(crate) longest: usize,
    pub(crate) messages: u64,
    order: Vec<usize>,
}

/// True time at which every simulation begins; above 0, so that clocks can jump back.
const BEGIN: u64 = 1 << 32;
pub(crate) const PERIOD: u64 = 500;

impl Cluster {
    pub(crate) fn new(nodes: u16, seed: u64) -> Self {
        let mut cluster = Self {
            nodes: (0..nodes).map(|_| None).collect(),
            deliver: Box::new(|_, _, _| Delivery::Delivered),
            rng: Rng::new(seed),
            now: BEGIN,
            longest: 0,
            messages: 0,
            order: (0..usize::from(nodes)).collect(),
        };
        (1..=nodes).for_each(|node| cluster.start(node, 1));
        cluster
    }

    /// A cluster in which every node has an entry of every other.
    pub(crate) fn converged(nodes: u16, seed: u64) -> Self {
        let mut cluster = Self::new(nodes, seed);
        cluster.step_until("all know all", 40 + 2 * u64::from(nodes), |cluster| {
            cluster.all_agree(MemberStatus::Alive)
        });
        cluster.clear_events();
        cluster
    }

    pub(crate) fn start(&mut self, node: u16, incarnation: u64) {
        let mut gossip = Gossip::new(NodeId(node), incarnation, GossipConfig::default(), self.rng.next_u64());
        gossip.set_members((1..=self.nodes.len() as u16).map(NodeId));
        gossip.set_payload(format!("{node} in life {incarnation}").as_bytes()).unwrap();
        let node = usize::from(node) - 1;
        let (clock_offset, paused) = (0, false);
        self.nodes[node] =
            Some(Node { gossip, clock_offset, paused, waiting: Vec::new(), events: Vec::new() });
    }

    pub(crate) fn stop(&mut self, node: u16) {
        self.nodes[usize::from(node) - 1] = None;
    }

    pub(crate) fn node(&mut self, node: u16) -> &mut Node {
        self.nodes[usize::from(node) - 1].as_mut().unwrap()
    }

    /// One period: every node makes its step, in a fixed order, and its message arrives at once.
    pub(crate) fn step(&mut self) {
        for at in 0..self.order.len() {
            let now = self.now + at as u64 * PERIOD / self.order.len() as u64;
            self.step_of(self.order[at], now);
        }
        self.now += PERIOD;
    }

    fn step_of(&mut self, at: usize, now: u64) {
        let Some(node) = self.nodes[at].as_mut().filter(|node| !node.paused) else { return };
        let own = now.saturating_add_signed(node.clock_offset);
        for (from, message) in std::mem::take(&mut node.waiting) {
            node.gossip.receive(own, from, &message).unwrap();
        }
        let Some((to, message)) = node.gossip.tick(own) else { return };
        node.events.extend(node.gossip.events());
        self.messages += 1;
        self.longest = self.longest.max(message.len());
        let from = NodeId(at as u16 + 1);
        let delivery = (self.deliver)(from.0, to.0, &mut self.rng);
        let target = usize::from(to.0) - 1;
        if delivery == Delivery::Lost {
            return;
        }
        if delivery == Delivery::Failed || self.nodes[target].is_none() {
            self.nodes[at].as_mut().unwrap().gossip.mark_unreachable(own, to);
            return;
        }
        self.nodes[at].as_mut().unwrap().gossip.mark_reachable(to);
        let other = self.nodes[target].as_mut().unwrap();
        if other.paused {
            other.waiting.push((from, message));
        } else {
            other.gossip.receive(now.saturating_add_signed(other.clock_offset), from, &message).unwrap();
        }
    }

    pub(crate) fn steps(&mut self, steps: u64) {
        (0..steps).for_each(|_| self.step());
    }

    /// Steps until the condition holds; returns the number of steps.
    pub(crate) fn step_until(&mut self, what: &str, max_steps: u64, holds: impl Fn(&Self) -> bool) -> u64 {
        for steps in 0..max_steps {
            if holds(self) {
                return steps;
            }
            self.step();
        }
        panic!("not within {max_steps} periods: {what}");
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = (u16, &Node)> {
        (1..).zip(&self.nodes).filter_map(|(number, node)| Some((number, node.as_ref()?)))
    }

    pub(crate) fn status(&self, of: u16, seen_by: &Node) -> MemberStatus {
        seen_by.gossip.member(self.now, NodeId(of)).unwrap().status
    }

    /// Whether all running nodes record this status for the node `of`.
    pub(crate) fn all_have(&self, of: u16, status: MemberStatus) -> bool {
        self.running().filter(|(number, _)| *number != of).all(|(_, node)| self.status(of, node) == status)
    }

    /// Whether all running nodes record this status for all running nodes.
    pub(crate) fn all_agree(&self, status: MemberStatus) -> bool {
        self.running().all(|(of, _)| self.all_have(of, status))
    }

    /// All nodes that were declared dead since events were cleared.
    pub(crate) fn declared_dead(&self) -> HashSet<u16> {
        let died = |event: &MembershipEvent| match event {
            MembershipEvent::Died(node) => Some(node.0),
            MembershipEvent::Joined(_) | MembershipEvent::Returned(_) => None,
        };
        self.running().flat_map(|(_, node)| node.events.iter().filter_map(died)).collect()
    }

    pub(crate) fn clear_events(&mut self) {
        for node in self.nodes.iter_mut().flatten() {
            node.gossip.events().for_each(drop);
            node.events.clear();
        }
    }

    /// The average age of all running nodes' entries of each other, in periods.
    pub(crate) fn average_age(&self) -> f64 {
        let mut ages = Vec::new();
        for (_, node) in self.running() {
            let own = self.now.saturating_add_signed(node.clock_offset);
            ages.extend(node.gossip.view(own).filter_map(|member| member.age));
        }
        ages.iter().sum::<u64>() as f64 / ages.len() as f64 / PERIOD as f64
    }
}
