//! A cluster in memory: every node has a clock of its own, and the network does what a test says.

use std::collections::HashSet;
use tern_gossip::dice::Dice;
use tern_gossip::{Config, Event, Gossip, Status};
use tern_ids::NodeId;

/// What becomes of a message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// It arrives.
    Open,
    /// It cannot be sent, and the sender learns so.
    Cut,
    /// It is lost, and nobody learns so.
    Lost,
}

pub(crate) struct Node {
    pub(crate) gossip: Gossip,
    /// What its clock is ahead of the true time.
    pub(crate) ahead: i64,
    /// Stopped: messages to it wait.
    pub(crate) paused: bool,
    waiting: Vec<(NodeId, Vec<u8>)>,
    pub(crate) events: Vec<Event>,
}

/// What becomes of a message from one node to another.
type Network = dyn Fn(u16, u16, &mut Dice) -> Way;

pub(crate) struct Cluster {
    /// Node n is at n - 1; `None` if its machine is off.
    pub(crate) nodes: Vec<Option<Node>>,
    pub(crate) way: Box<Network>,
    pub(crate) dice: Dice,
    pub(crate) now: u64,
    pub(crate) longest: usize,
    pub(crate) messages: u64,
    order: Vec<usize>,
}

/// True time at which every simulation begins, so that clocks can go back.
const BEGIN: u64 = 1 << 32;
pub(crate) const PERIOD: u64 = 500;

impl Cluster {
    pub(crate) fn new(nodes: u16, seed: u64) -> Self {
        let mut cluster = Self {
            nodes: (0..nodes).map(|_| None).collect(),
            way: Box::new(|_, _, _| Way::Open),
            dice: Dice::new(seed),
            now: BEGIN,
            longest: 0,
            messages: 0,
            order: (0..usize::from(nodes)).collect(),
        };
        (1..=nodes).for_each(|node| cluster.start(node, 1));
        cluster
    }

    /// A cluster in which everyone knows everyone.
    pub(crate) fn acquainted(nodes: u16, seed: u64) -> Self {
        let mut cluster = Self::new(nodes, seed);
        cluster.until("all know all", 40 + 2 * u64::from(nodes), |cluster| cluster.all_agree(Status::Alive));
        cluster.forget_events();
        cluster
    }

    pub(crate) fn start(&mut self, node: u16, incarnation: u64) {
        let mut gossip = Gossip::new(NodeId(node), incarnation, Config::default(), self.dice.bits());
        gossip.set_members((1..=self.nodes.len() as u16).map(NodeId));
        gossip.set_own(format!("{node} in life {incarnation}").as_bytes()).unwrap();
        let node = usize::from(node) - 1;
        let (ahead, paused) = (0, false);
        self.nodes[node] = Some(Node { gossip, ahead, paused, waiting: Vec::new(), events: Vec::new() });
    }

    pub(crate) fn stop(&mut self, node: u16) {
        self.nodes[usize::from(node) - 1] = None;
    }

    pub(crate) fn node(&mut self, node: u16) -> &mut Node {
        self.nodes[usize::from(node) - 1].as_mut().unwrap()
    }

    /// One period: every node makes its step, in an order that stays the same, and its message arrives at once.
    pub(crate) fn step(&mut self) {
        for at in 0..self.order.len() {
            let now = self.now + at as u64 * PERIOD / self.order.len() as u64;
            self.step_of(self.order[at], now);
        }
        self.now += PERIOD;
    }

    fn step_of(&mut self, at: usize, now: u64) {
        let Some(node) = self.nodes[at].as_mut().filter(|node| !node.paused) else { return };
        let own = now.saturating_add_signed(node.ahead);
        for (from, message) in std::mem::take(&mut node.waiting) {
            node.gossip.receive(own, from, &message).unwrap();
        }
        let Some((to, message)) = node.gossip.tick(own) else { return };
        node.events.extend(node.gossip.events());
        self.messages += 1;
        self.longest = self.longest.max(message.len());
        let from = NodeId(at as u16 + 1);
        let way = (self.way)(from.0, to.0, &mut self.dice);
        let target = usize::from(to.0) - 1;
        if way == Way::Lost {
            return;
        }
        if way == Way::Cut || self.nodes[target].is_none() {
            self.nodes[at].as_mut().unwrap().gossip.unreachable(own, to);
            return;
        }
        self.nodes[at].as_mut().unwrap().gossip.reached(to);
        let other = self.nodes[target].as_mut().unwrap();
        if other.paused {
            other.waiting.push((from, message));
        } else {
            other.gossip.receive(now.saturating_add_signed(other.ahead), from, &message).unwrap();
        }
    }

    pub(crate) fn steps(&mut self, steps: u64) {
        (0..steps).for_each(|_| self.step());
    }

    /// Steps until the condition holds; how many those were.
    pub(crate) fn until(&mut self, what: &str, most: u64, holds: impl Fn(&Self) -> bool) -> u64 {
        for steps in 0..most {
            if holds(self) {
                return steps;
            }
            self.step();
        }
        panic!("not within {most} periods: {what}");
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = (u16, &Node)> {
        (1..).zip(&self.nodes).filter_map(|(number, node)| Some((number, node.as_ref()?)))
    }

    pub(crate) fn status(&self, of: u16, seen_by: &Node) -> Status {
        seen_by.gossip.seen(self.now, NodeId(of)).unwrap().status
    }

    /// Whether all running nodes believe this of that node.
    pub(crate) fn all_say(&self, of: u16, status: Status) -> bool {
        self.running().filter(|(number, _)| *number != of).all(|(_, node)| self.status(of, node) == status)
    }

    /// Whether all running nodes believe this of all running nodes.
    pub(crate) fn all_agree(&self, status: Status) -> bool {
        self.running().all(|(of, _)| self.all_say(of, status))
    }

    /// Everyone who was ever found dead since events were forgotten.
    pub(crate) fn found_dead(&self) -> HashSet<u16> {
        let died = |event: &Event| match event {
            Event::Died(node) => Some(node.0),
            Event::Joined(_) | Event::Returned(_) => None,
        };
        self.running().flat_map(|(_, node)| node.events.iter().filter_map(died)).collect()
    }

    pub(crate) fn forget_events(&mut self) {
        for node in self.nodes.iter_mut().flatten() {
            node.gossip.events().for_each(drop);
            node.events.clear();
        }
    }

    /// The average age of all running nodes' entries of each other, in periods.
    pub(crate) fn average_age(&self) -> f64 {
        let mut ages = Vec::new();
        for (_, node) in self.running() {
            let own = self.now.saturating_add_signed(node.ahead);
            ages.extend(node.gossip.view(own).filter_map(|seen| seen.age));
        }
        ages.iter().sum::<u64>() as f64 / ages.len() as f64 / PERIOD as f64
    }
}
