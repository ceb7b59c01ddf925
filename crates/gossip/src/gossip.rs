//! One node's part of the protocol: what it sends at each step, and how it applies received
//! messages.
//!
//! Evidence about a node is an entry or a death. The higher incarnation wins; within one
//! incarnation the younger evidence wins. Between two entries the higher sequence number decides,
//! which needs no clock.

use crate::clock::Clock;
use crate::config::{GossipConfig, MAX_PAYLOAD};
use crate::message::{self, Entry, ReceiveError, Rumour, RumourKind};
use crate::model;
use crate::pending::{ASKED_NODES, Pending, Probe, Suspicion};
use crate::rng::Rng;
use crate::table::{Row, RowIndex, Table};
use crate::view::{Member, MemberStatus, MembershipEvent};
use std::collections::VecDeque;
use tern_ids::NodeId;

/// A gap between two calls longer than this, in periods, is a clock jump or a stopped daemon.
const JUMP_PERIODS: u64 = 10;
/// How long a probe waits for its acknowledgement, in periods. The peer sends the acknowledgement
/// in its second step after the probe at the latest, unless many nodes probe it at once.
const ACK_TIMEOUT_PERIODS: i64 = 5;
/// Number of probes sent before a missing acknowledgement counts as a failure.
const MAX_PROBES: u8 = 3;
/// When no other node can be asked, this many failures declare a death.
const FAILURES_WHEN_ALONE: u8 = 3;
/// Periods without a verdict after which other nodes are asked again.
const ASK_INTERVAL_PERIODS: i64 = 20;
/// Number of rows checked for silence in each step, so that a step costs the same in every cluster.
const ROWS_PER_STEP: usize = 8;
/// Limit of queued events; beyond it the oldest are dropped.
const MAX_EVENTS: usize = 1024;

/// The payload exceeds [`MAX_PAYLOAD`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a payload of {0} bytes exceeds the limit of {MAX_PAYLOAD}; shorten it")]
pub struct PayloadTooLong(pub usize);

/// A gossiping node. It has no socket and no clock: its owner calls [`Gossip::tick`] once a period
/// and sends the message that it returns, passes received messages to [`Gossip::receive`], and
/// reports whether sending succeeded.
#[derive(Debug)]
pub struct Gossip {
    pub(crate) me: NodeId,
    pub(crate) incarnation: u64,
    pub(crate) sequence: u32,
    pub(crate) own: Vec<u8>,
    pub(crate) config: GossipConfig,
    pub(crate) clock: Clock,
    pub(crate) table: Table,
    pub(crate) pending: Pending,
    rng: Rng,
    events: VecDeque<MembershipEvent>,
    /// The last message was a reply or a probe.
    was_directed: bool,
    next_row: usize,
    piggyback_sends: u8,
    silence_limit: i64,
}

impl Gossip {
    /// A node with no members yet. `incarnation` must be higher than in its earlier runs, such as
    /// its start time. If it is not (the clock was set back), this node raises it when it receives
    /// an entry of its earlier run from another node.
    #[must_use]
    pub fn new(me: NodeId, incarnation: u64, config: GossipConfig, seed: u64) -> Self {
        let config = config.within_bounds();
        Self {
            me,
            incarnation,
            sequence: 0,
            own: Vec::new(),
            config,
            clock: Clock::new(JUMP_PERIODS * config.period),
            // One entry more than a message carries of other nodes, because the receiver's own
            // entry is skipped.
            table: Table::new(config.window),
            pending: Pending::default(),
            rng: Rng::new(seed),
            events: VecDeque::new(),
            was_directed: false,
            next_row: 0,
            piggyback_sends: 0,
            silence_limit: i64::MAX,
        }
    }

    /// Sets the nodes of the map. Nodes that have left it are dropped, and evidence about them is
    /// ignored.
    pub fn set_members(&mut self, nodes: impl IntoIterator<Item = NodeId>) {
        let mut nodes: Vec<NodeId> = nodes.into_iter().filter(|node| *node != self.me).collect();
        nodes.sort_unstable();
        nodes.dedup();
        self.table.set_nodes(&nodes);
        let table = &self.table;
        let stays = |node: NodeId| table.find(node).is_some();
        self.pending.suspicions.retain(|suspicion| stays(suspicion.node));
        self.pending.probes.retain(|probe| stays(probe.node));
        self.pending.piggybacks.retain(|news| stays(news.node));
        let all = nodes.len() + 1;
        self.piggyback_sends = model::piggyback_sends(all);
        // Four times the expected worst age, and at least 20 periods: in small clusters every entry
        // is sent, and the model does not apply.
        let worst = 4.0 * model::worst_age(all.max(2), self.config.window.min(all / 2).max(1));
        self.silence_limit = self.periods(worst.max(20.0) as i64);
    }

    /// Sets this node's payload, from the next message on.
    ///
    /// # Errors
    /// If it is longer than [`MAX_PAYLOAD`]; then the old payload stays.
    pub fn set_payload(&mut self, payload: &[u8]) -> Result<(), PayloadTooLong> {
        if payload.len() > MAX_PAYLOAD {
            return Err(PayloadTooLong(payload.len()));
        }
        self.own.clear();
        self.own.extend_from_slice(payload);
        Ok(())
    }

    /// Makes one step; to be called once a period. Returns the message to send and its target, or
    /// `None` if there is no other node.
    pub fn tick(&mut self, now: u64) -> Option<(NodeId, Vec<u8>)> {
        self.advance(now);
        self.clock.step();
        self.probe_silent_nodes();
        self.expire_probes();
        self.renew_questions();
        match self.sequence.checked_add(1) {
            Some(sequence) => self.sequence = sequence,
            None => self.raise_incarnation(self.incarnation),
        }
        let directed = if self.was_directed { None } else { self.next_reply_or_probe() };
        self.was_directed = directed.is_some();
        let (to, about, wants_ack) = directed.or_else(|| Some((self.choose_target()?, None, false)))?;
        Some((self.table.row(to).node, self.compose(to, about, wants_ack)))
    }

    /// Applies a received message.
    ///
    /// # Errors
    /// If it is malformed, or its sender is not in the map; nothing has changed then.
    pub fn receive(&mut self, now: u64, from: NodeId, bytes: &[u8]) -> Result<(), ReceiveError> {
        let sender = self.table.find(from).ok_or(ReceiveError::UnknownSender(from))?;
        let message = message::decode(from, bytes)?;
        self.advance(now);
        if !self.apply_entry(sender, message.own) {
            // The sender has used a higher incarnation before, and needs its old entry to correct
            // itself.
            self.pending.queue_reply(from, Some(from));
        }
        if message.wants_ack {
            self.pending.queue_reply(from, None);
        }
        for entry in message.entries {
            if entry.node == self.me {
                if (entry.incarnation, entry.sequence) > (self.incarnation, self.sequence) {
                    self.raise_incarnation(entry.incarnation);
                }
            } else if let Some(index) = self.table.find(entry.node) {
                self.apply_entry(index, entry);
            }
        }
        for rumour in message.rumours {
            self.apply_rumour(from, rumour);
        }
        Ok(())
    }

    /// Reports that a message to `node` could not be sent.
    pub fn mark_unreachable(&mut self, now: u64, node: NodeId) {
        self.advance(now);
        let Some(index) = self.table.find(node) else { return };
        self.table.change(index, |row| row.is_unreachable = true);
        self.record_failure(index, 1);
    }

    /// Reports that a message to `node` was sent.
    pub fn mark_reachable(&mut self, node: NodeId) {
        if let Some(index) = self.table.find(node) {
            self.table.change(index, |row| row.is_unreachable = false);
        }
    }

    /// All other nodes of the map, in the order of their numbers.
    pub fn view(&self, now: u64) -> impl Iterator<Item = Member<'_>> {
        let now = self.clock.at(now);
        self.table.indices().map(move |index| self.member_at(now, index))
    }

    /// One other node; `None` if it is not in the map.
    #[must_use]
    pub fn member(&self, now: u64, node: NodeId) -> Option<Member<'_>> {
        self.table.find(node).map(|index| self.member_at(self.clock.at(now), index))
    }

    /// The newest entries, newest first, as many as a message carries: for callers that cannot scan
    /// a view of thousands. One or two can be missing between a death and the next step.
    pub fn newest(&self, now: u64) -> impl Iterator<Item = Member<'_>> {
        let now = self.clock.at(now);
        self.table.newest().map(move |index| self.member_at(now, index))
    }

    /// Changes since the last call.
    pub fn events(&mut self) -> impl Iterator<Item = MembershipEvent> + '_ {
        self.events.drain(..)
    }

    /// The incarnation that this node sends. It grows when the others have declared this node dead.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    fn member_at(&self, now: i64, index: RowIndex) -> Member<'_> {
        let row = self.table.row(index);
        Member {
            node: row.node,
            status: row.status,
            reachable: !row.is_unreachable,
            incarnation: row.incarnation,
            age: (row.status != MemberStatus::NeverSeen)
                .then(|| now.saturating_sub(row.born).max(0).unsigned_abs()),
            payload: self.table.payload(index),
        }
    }

    fn advance(&mut self, now: u64) {
        if !self.clock.advance(now) {
            return;
        }
        // An acknowledgement may have been due during the gap: old suspicions are no evidence.
        for suspicion in std::mem::take(&mut self.pending.suspicions) {
            self.clear_suspicion(suspicion.node);
        }
        self.pending.probes.clear();
        self.pending.replies.clear();
    }

    /// Applies a sign of life of a node, direct or relayed. False if a later one is already stored.
    fn apply_entry(&mut self, index: RowIndex, entry: Entry<'_>) -> bool {
        let old = *self.table.row(index);
        let mut born = self.born(entry.age);
        if entry.incarnation == old.incarnation && old.has_entry() {
            // An entry with a higher sequence number was born later, even if a clock on its way
            // here has distorted its age.
            born = born.max(old.born);
        }
        let later = match old.status {
            MemberStatus::NeverSeen => true,
            MemberStatus::Alive | MemberStatus::Suspect => {
                (entry.incarnation, entry.sequence) > (old.incarnation, old.sequence)
            }
            MemberStatus::Dead => (entry.incarnation, born) > (old.incarnation, old.born),
        };
        if !later {
            return false;
        }
        // A new incarnation is later than anything recorded of the old one.
        let since = if entry.incarnation > old.incarnation { i64::MAX } else { born };
        let suspicion_ended = self.pending.settle(old.node, since);
        let status = if old.status == MemberStatus::Suspect && !suspicion_ended {
            MemberStatus::Suspect
        } else {
            MemberStatus::Alive
        };
        let row = Row { born, incarnation: entry.incarnation, sequence: entry.sequence, status, ..old };
        self.table.replace_entry(index, row, entry.payload);
        match old.status {
            MemberStatus::NeverSeen => self.emit(MembershipEvent::Joined(old.node)),
            MemberStatus::Dead => {
                self.pending.queue_piggyback(old.node, self.piggyback_sends);
                self.emit(MembershipEvent::Returned(old.node));
            }
            MemberStatus::Alive | MemberStatus::Suspect => {}
        }
        true
    }

    fn apply_rumour(&mut self, from: NodeId, rumour: Rumour) {
        let born = self.born(rumour.age);
        if rumour.node == self.me {
            match rumour.kind {
                // The next message to the suspecting node carries our own entry, which ends the
                // suspicion.
                RumourKind::Suspect => self.pending.queue_reply(from, None),
                RumourKind::Dead if rumour.incarnation >= self.incarnation => {
                    self.raise_incarnation(rumour.incarnation);
                }
                RumourKind::Dead => {}
            }
            return;
        }
        let Some(index) = self.table.find(rumour.node) else { return };
        let row = *self.table.row(index);
        let known_later = (row.incarnation, row.born) > (rumour.incarnation, born);
        match rumour.kind {
            RumourKind::Dead if row.status == MemberStatus::Dead && rumour.incarnation <= row.incarnation => {
            }
            RumourKind::Dead if row.status == MemberStatus::NeverSeen || !known_later => {
                self.declare_dead(index, rumour.incarnation, born);
            }
            RumourKind::Suspect if row.status == MemberStatus::NeverSeen => {}
            // This node has later evidence: the node is already dead, or it was alive later.
            RumourKind::Dead => self.pending.queue_reply(from, Some(rumour.node)),
            RumourKind::Suspect if row.status == MemberStatus::Dead || known_later => {
                self.pending.queue_reply(from, Some(rumour.node));
            }
            // Two nodes suspect it independently.
            RumourKind::Suspect if row.status == MemberStatus::Suspect => {
                self.declare_dead(index, row.incarnation, self.clock.now());
            }
            RumourKind::Suspect => {
                let (node, asker) = (rumour.node, Some(from));
                self.pending.queue_probe(Probe { node, asker, since: born, sent: None, attempts: 0 });
            }
        }
    }

    /// A node could not be reached, or did not acknowledge repeated probes.
    fn record_failure(&mut self, index: RowIndex, times: u8) {
        let (node, status) = (self.table.row(index).node, self.table.row(index).status);
        if !self.table.row(index).has_entry() {
            return;
        }
        let now = self.clock.now();
        if self.pending.is_suspected_by_others(node) {
            return self.declare_dead(index, self.table.row(index).incarnation, now);
        }
        if status != MemberStatus::Suspect {
            self.table.change(index, |row| row.status = MemberStatus::Suspect);
            self.pending.suspicions.push(Suspicion {
                node,
                since: now,
                failures: 0,
                asks_left: ASKED_NODES,
                asked_at: now,
            });
        }
        let all_suspected = self.pending.suspicions.len() == self.table.targets();
        let Some(suspicion) = self.pending.suspicion(node) else { return };
        suspicion.failures = suspicion.failures.saturating_add(times);
        if all_suspected && suspicion.failures >= FAILURES_WHEN_ALONE {
            self.declare_dead(index, self.table.row(index).incarnation, now);
            // This node assumes the death for lack of others to ask. That proves nothing, so the
            // death is not passed on as urgent news once the others are reachable.
            self.pending.piggybacks.retain(|news| news.node != node);
        }
    }

    fn declare_dead(&mut self, index: RowIndex, incarnation: u64, born: i64) {
        let old = *self.table.row(index);
        self.table.change(index, |row| {
            (row.status, row.incarnation, row.born) = (MemberStatus::Dead, incarnation, born);
        });
        self.pending.drop_suspicion(old.node);
        self.pending.queue_piggyback(old.node, self.piggyback_sends);
        if old.has_entry() {
            self.emit(MembershipEvent::Died(old.node));
        }
    }

    /// Moves this node to an incarnation above the one that others have recorded.
    fn raise_incarnation(&mut self, than: u64) {
        self.incarnation = than.max(self.incarnation).saturating_add(1);
        self.sequence = 0;
    }

    fn clear_suspicion(&mut self, node: NodeId) {
        if let Some(index) = self.table.find(node) {
            self.table.change(index, |row| {
                if row.status == MemberStatus::Suspect {
                    row.status = MemberStatus::Alive;
                }
            });
        }
    }

    /// Probes nodes that have been silent for far longer than the model allows. Silence alone is no
    /// reason for suspicion: a node that all others have missed for the same reason would be
    /// suspected by all at once.
    fn probe_silent_nodes(&mut self) {
        let (now, all) = (self.clock.now(), self.table.len());
        for _ in 0..ROWS_PER_STEP.min(all) {
            self.next_row = (self.next_row + 1) % all;
            let index = self.next_row as RowIndex;
            let row = *self.table.row(index);
            let last_seen = row.born.max(self.clock.receiving_since());
            if row.status == MemberStatus::Alive && now.saturating_sub(last_seen) > self.silence_limit {
                self.pending.queue_probe(Probe {
                    node: row.node,
                    asker: None,
                    since: now,
                    sent: None,
                    attempts: 0,
                });
            }
        }
    }

    /// Counts probes whose acknowledgement is overdue as failures.
    fn expire_probes(&mut self) {
        let (now, within) = (self.clock.now(), self.periods(ACK_TIMEOUT_PERIODS));
        let over = |probe: &Probe| {
            probe.attempts >= MAX_PROBES && probe.sent.is_some_and(|sent| now.saturating_sub(sent) > within)
        };
        while let Some(at) = self.pending.probes.iter().position(over) {
            let Some(index) = self.table.find(self.pending.probes[at].node) else { return };
            // If another node asked for the probe, `record_failure` finds the probe still queued,
            // and declares the death: the asking node has failed to reach the probed node too.
            self.record_failure(index, FAILURES_WHEN_ALONE);
            if self.pending.probes.get(at).is_some_and(over) {
                self.pending.probes.remove(at);
            }
        }
    }

    fn renew_questions(&mut self) {
        let (now, interval) = (self.clock.now(), self.periods(ASK_INTERVAL_PERIODS));
        for suspicion in &mut self.pending.suspicions {
            if suspicion.asks_left == 0 && now.saturating_sub(suspicion.asked_at) > interval {
                suspicion.asks_left = ASKED_NODES;
            }
        }
    }

    /// The next reply or probe: its target, a node that it must include, and whether it asks for an
    /// acknowledgement. Called for every second message at most, so that no node can keep this one
    /// from gossiping by probing it.
    fn next_reply_or_probe(&mut self) -> Option<(RowIndex, Option<NodeId>, bool)> {
        while let Some(reply) = self.pending.replies.pop_front() {
            if let Some(index) = self.table.find(reply.to) {
                return Some((index, reply.about, false));
            }
        }
        let (now, within) = (self.clock.now(), self.periods(ACK_TIMEOUT_PERIODS));
        let due = |probe: &&mut Probe| {
            probe.sent.is_none_or(|sent| probe.attempts < MAX_PROBES && now.saturating_sub(sent) > within)
        };
        let node = self.pending.probes.iter_mut().find(due)?.node;
        // One message probes for all nodes that have asked.
        for probe in self.pending.probes.iter_mut().filter(|probe| probe.node == node) {
            (probe.sent, probe.attempts) = (Some(now), probe.attempts + 1);
        }
        self.table.find(node).map(|index| (index, None, true))
    }

    /// A random living node, but in one of max(5, living) steps any node, dead ones included. So
    /// dead nodes keep being tried, while the whole cluster sends at most about one message per
    /// step to a node that was drawn from all nodes.
    fn choose_target(&mut self) -> Option<RowIndex> {
        if self.rng.below(self.table.targets().max(5)) == 0 {
            return self.table.random_row(&mut self.rng);
        }
        // A suspect cannot be asked about itself or others.
        let to_ask = self.pending.suspicions.iter().any(|suspicion| suspicion.asks_left > 0);
        let wanted = |row: &Row| !to_ask || row.status != MemberStatus::Suspect;
        self.table
            .random_target(&mut self.rng, wanted)
            .or_else(|| self.table.random_target(&mut self.rng, |_| true))
    }

    fn emit(&mut self, event: MembershipEvent) {
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn born(&self, age: u32) -> i64 {
        self.clock.now().saturating_sub(i64::from(age)).saturating_sub(self.clock.queued_ms())
    }

    fn periods(&self, periods: i64) -> i64 {
        // A period is at most an hour.
        periods.saturating_mul(self.config.period as i64)
    }
}
