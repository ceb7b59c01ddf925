//! One node's part: what it sends at each step, and what it makes of what it receives.
//!
//! Of two pieces of evidence about a node the one of the later incarnation counts; within one incarnation the one that
//! is younger, be it an entry or a death. Of two entries it is the one with the higher sequence number, which needs no
//! clock.

use crate::clock::Clock;
use crate::config::{Config, MOST_PAYLOAD};
use crate::dice::Dice;
use crate::message::{self, Entry, Kind, Refused, Rumour};
use crate::model;
use crate::pending::{ASKED, Doubt, Pending, Probe};
use crate::table::{Place, Row, Table};
use crate::view::{Event, Seen, Status};
use std::collections::VecDeque;
use tern_ids::NodeId;

/// A longer gap between two times shown, in periods, is a jump of the clock or a daemon that was stopped.
const LEAP: u64 = 10;
/// How long an answer to a probe is awaited, in periods. It comes with the other's next step but one at the latest,
/// unless many ask at once.
const ANSWER_WITHIN: i64 = 5;
/// How often an answer is asked for before its absence counts.
const TRIES: u8 = 3;
/// With nobody left to ask, so many failures are taken for a death.
const ALONE: u8 = 3;
/// After so many periods without a verdict others are asked again.
const ASK_AGAIN: i64 = 20;
/// Silence is looked for in so many rows each step, so that a step costs the same in every cluster.
const LOOKED_AT: usize = 8;
/// Events that are kept for a caller who does not fetch them; then the oldest are dropped.
const MOST_EVENTS: usize = 1024;

/// The payload is longer than a message has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an entry of {0} bytes is longer than {MOST_PAYLOAD}; leave something out")]
pub struct TooLong(pub usize);

/// A node that gossips. It has no socket and no clock: whoever holds it calls [`Gossip::tick`] once a period and sends
/// the message that this gives, passes on what arrives, and says which messages could not be sent.
#[derive(Debug)]
pub struct Gossip {
    pub(crate) me: NodeId,
    pub(crate) incarnation: u64,
    pub(crate) sequence: u32,
    pub(crate) own: Vec<u8>,
    pub(crate) config: Config,
    pub(crate) clock: Clock,
    pub(crate) table: Table,
    pub(crate) pending: Pending,
    dice: Dice,
    events: VecDeque<Event>,
    /// The last message went to somebody who was owed it or had to be probed.
    directed: bool,
    look: usize,
    sendings: u8,
    silence: i64,
}

impl Gossip {
    /// A node that knows nobody yet. `incarnation` must be higher than in its earlier lives, such as the time of its
    /// start: if it is not (a clock set back), the others' memory of it corrects it.
    #[must_use]
    pub fn new(me: NodeId, incarnation: u64, config: Config, seed: u64) -> Self {
        let config = config.within_bounds();
        Self {
            me,
            incarnation,
            sequence: 0,
            own: Vec::new(),
            config,
            clock: Clock::new(LEAP * config.period),
            // One more than a message carries: the receiver's own entry is left out.
            table: Table::new(config.window),
            pending: Pending::default(),
            dice: Dice::new(seed),
            events: VecDeque::new(),
            directed: false,
            look: 0,
            sendings: 0,
            silence: i64::MAX,
        }
    }

    /// The nodes of the map. Those that have left it are forgotten, and what others say of them is not heard.
    pub fn set_members(&mut self, nodes: impl IntoIterator<Item = NodeId>) {
        let mut nodes: Vec<NodeId> = nodes.into_iter().filter(|node| *node != self.me).collect();
        nodes.sort_unstable();
        nodes.dedup();
        self.table.set_nodes(&nodes);
        let table = &self.table;
        let stays = |node: NodeId| table.find(node).is_some();
        self.pending.doubts.retain(|doubt| stays(doubt.node));
        self.pending.probes.retain(|probe| stays(probe.node));
        self.pending.news.retain(|news| stays(news.node));
        let all = nodes.len() + 1;
        self.sendings = model::urgent_sendings(all);
        // Four times the worst age that is to be expected. In small clusters, where all is passed on, 20 periods.
        let worst = 4.0 * model::worst_age(all.max(2), self.config.window.min(all / 2).max(1));
        self.silence = self.periods(worst.max(20.0) as i64);
    }

    /// What this node says of itself from the next message on.
    ///
    /// # Errors
    /// If it is longer than [`MOST_PAYLOAD`]; then it goes on saying what it said.
    pub fn set_own(&mut self, payload: &[u8]) -> Result<(), TooLong> {
        if payload.len() > MOST_PAYLOAD {
            return Err(TooLong(payload.len()));
        }
        self.own.clear();
        self.own.extend_from_slice(payload);
        Ok(())
    }

    /// One step, to be made once a period: the message to send, and to whom. None if there is nobody.
    pub fn tick(&mut self, now: u64) -> Option<(NodeId, Vec<u8>)> {
        self.advance(now);
        self.clock.step();
        self.look_for_silence();
        self.judge_silent_probes();
        self.ask_again();
        match self.sequence.checked_add(1) {
            Some(sequence) => self.sequence = sequence,
            None => self.live_on(self.incarnation),
        }
        let directed = if self.directed { None } else { self.owed() };
        self.directed = directed.is_some();
        let (to, about, answer) = directed.or_else(|| Some((self.choose()?, None, false)))?;
        Some((self.table.row(to).node, self.compose(to, about, answer)))
    }

    /// Takes in a message.
    ///
    /// # Errors
    /// If it is none, or the sender is not in the map; nothing has changed then.
    pub fn receive(&mut self, now: u64, from: NodeId, bytes: &[u8]) -> Result<(), Refused> {
        let sender = self.table.find(from).ok_or(Refused::Stranger(from))?;
        let message = message::read(from, bytes)?;
        self.advance(now);
        if !self.hear(sender, message.own) {
            // It has lived before with a higher incarnation, and must be told.
            self.pending.answer(from, Some(from));
        }
        if message.answer {
            self.pending.answer(from, None);
        }
        for entry in message.entries {
            if entry.node == self.me {
                if (entry.incarnation, entry.sequence) > (self.incarnation, self.sequence) {
                    self.live_on(entry.incarnation);
                }
            } else if let Some(place) = self.table.find(entry.node) {
                self.hear(place, entry);
            }
        }
        for rumour in message.rumours {
            self.hear_rumour(from, rumour);
        }
        Ok(())
    }

    /// A message to this node could not be sent.
    pub fn unreachable(&mut self, now: u64, node: NodeId) {
        self.advance(now);
        let Some(place) = self.table.find(node) else { return };
        self.table.change(place, |row| row.unreached = true);
        self.failed(place, 1);
    }

    /// A message to this node was sent.
    pub fn reached(&mut self, node: NodeId) {
        if let Some(place) = self.table.find(node) {
            self.table.change(place, |row| row.unreached = false);
        }
    }

    /// All other nodes of the map, in the order of their numbers.
    pub fn view(&self, now: u64) -> impl Iterator<Item = Seen<'_>> {
        let now = self.clock.at(now);
        self.table.places().map(move |place| self.seen_at(now, place))
    }

    /// One other node, if it is in the map.
    #[must_use]
    pub fn seen(&self, now: u64, node: NodeId) -> Option<Seen<'_>> {
        self.table.find(node).map(|place| self.seen_at(self.clock.at(now), place))
    }

    /// The newest entries, newest first, as many as a message carries: for who cannot look at a view of thousands. One
    /// or two can be missing between a death and the next step.
    pub fn newest(&self, now: u64) -> impl Iterator<Item = Seen<'_>> {
        let now = self.clock.at(now);
        self.table.newest().map(move |place| self.seen_at(now, place))
    }

    /// What has changed since the last call.
    pub fn events(&mut self) -> impl Iterator<Item = Event> + '_ {
        self.events.drain(..)
    }

    /// Which life of this node the others are told of. It grows when they believe this one dead.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    fn seen_at(&self, now: i64, place: Place) -> Seen<'_> {
        let row = self.table.row(place);
        Seen {
            node: row.node,
            status: row.status,
            reachable: !row.unreached,
            incarnation: row.incarnation,
            age: (row.status != Status::Unheard).then(|| now.saturating_sub(row.born).max(0).unsigned_abs()),
            payload: self.table.payload(place),
        }
    }

    fn advance(&mut self, now: u64) {
        if !self.clock.advance(now) {
            return;
        }
        // Whatever was awaited may have come and gone meanwhile: old doubts are no evidence.
        for doubt in std::mem::take(&mut self.pending.doubts) {
            self.trust(doubt.node);
        }
        self.pending.probes.clear();
        self.pending.answers.clear();
    }

    /// A sign of life of a node, at first or second hand. False if a later one is known already.
    fn hear(&mut self, place: Place, entry: Entry<'_>) -> bool {
        let old = *self.table.row(place);
        let mut born = self.born(entry.age);
        if entry.incarnation == old.incarnation && old.told() {
            // A higher number was born later, whatever a clock on its way here has made of its age.
            born = born.max(old.born);
        }
        let later = match old.status {
            Status::Unheard => true,
            Status::Alive | Status::Suspect => {
                (entry.incarnation, entry.sequence) > (old.incarnation, old.sequence)
            }
            Status::Dead => (entry.incarnation, born) > (old.incarnation, old.born),
        };
        if !later {
            return false;
        }
        // A new life begins after whatever was known of the old one.
        let since = if entry.incarnation > old.incarnation { i64::MAX } else { born };
        let trusted = self.pending.alive_at(old.node, since);
        let status = if old.status == Status::Suspect && !trusted { Status::Suspect } else { Status::Alive };
        let row = Row { born, incarnation: entry.incarnation, sequence: entry.sequence, status, ..old };
        self.table.renew(place, row, entry.payload);
        match old.status {
            Status::Unheard => self.tell(Event::Joined(old.node)),
            Status::Dead => {
                self.pending.urgent(old.node, self.sendings);
                self.tell(Event::Returned(old.node));
            }
            Status::Alive | Status::Suspect => {}
        }
        true
    }

    fn hear_rumour(&mut self, from: NodeId, rumour: Rumour) {
        let born = self.born(rumour.age);
        if rumour.node == self.me {
            match rumour.kind {
                // The next message to the doubter carries our own entry, which ends the doubt.
                Kind::Suspect => self.pending.answer(from, None),
                Kind::Dead if rumour.incarnation >= self.incarnation => self.live_on(rumour.incarnation),
                Kind::Dead => {}
            }
            return;
        }
        let Some(place) = self.table.find(rumour.node) else { return };
        let row = *self.table.row(place);
        let known_later = (row.incarnation, row.born) > (rumour.incarnation, born);
        match rumour.kind {
            Kind::Dead if row.status == Status::Dead && rumour.incarnation <= row.incarnation => {}
            Kind::Dead if row.status == Status::Unheard || !known_later => {
                self.die(place, rumour.incarnation, born);
            }
            Kind::Suspect if row.status == Status::Unheard => {}
            // We know better: that it is dead already, or that it was alive later.
            Kind::Dead => self.pending.answer(from, Some(rumour.node)),
            Kind::Suspect if row.status == Status::Dead || known_later => {
                self.pending.answer(from, Some(rumour.node));
            }
            // Two of us have doubts of their own.
            Kind::Suspect if row.status == Status::Suspect => {
                self.die(place, row.incarnation, self.clock.now());
            }
            Kind::Suspect => {
                let (node, asker) = (rumour.node, Some(from));
                self.pending.probe(Probe { node, asker, since: born, sent: None, tries: 0 });
            }
        }
    }

    /// A node could not be reached, or did not answer when asked again and again.
    fn failed(&mut self, place: Place, times: u8) {
        let (node, status) = (self.table.row(place).node, self.table.row(place).status);
        if !self.table.row(place).told() {
            return;
        }
        let now = self.clock.now();
        if self.pending.doubted_by_others(node) {
            return self.die(place, self.table.row(place).incarnation, now);
        }
        if status != Status::Suspect {
            self.table.change(place, |row| row.status = Status::Suspect);
            self.pending.doubts.push(Doubt { node, since: now, failures: 0, asks: ASKED, asked: now });
        }
        let all_in_doubt = self.pending.doubts.len() == self.table.addressed();
        let Some(doubt) = self.pending.doubt(node) else { return };
        doubt.failures = doubt.failures.saturating_add(times);
        if all_in_doubt && doubt.failures >= ALONE {
            self.die(place, self.table.row(place).incarnation, now);
            // It is believed here for want of better. To others, once they can be reached again, it is no proof.
            self.pending.news.retain(|news| news.node != node);
        }
    }

    fn die(&mut self, place: Place, incarnation: u64, born: i64) {
        let old = *self.table.row(place);
        self.table.change(place, |row| {
            (row.status, row.incarnation, row.born) = (Status::Dead, incarnation, born);
        });
        self.pending.forget(old.node);
        self.pending.urgent(old.node, self.sendings);
        if old.told() {
            self.tell(Event::Died(old.node));
        }
    }

    /// This node is in a later life than the one that others speak of.
    fn live_on(&mut self, than: u64) {
        self.incarnation = than.max(self.incarnation).saturating_add(1);
        self.sequence = 0;
    }

    fn trust(&mut self, node: NodeId) {
        if let Some(place) = self.table.find(node) {
            self.table.change(place, |row| {
                if row.status == Status::Suspect {
                    row.status = Status::Alive;
                }
            });
        }
    }

    /// Who has not been heard of for far longer than the model allows for is asked for a sign of life. Silence alone is
    /// no reason for doubt: a node that everybody has missed for the same reason would be doubted by all at once.
    fn look_for_silence(&mut self) {
        let (now, all) = (self.clock.now(), self.table.len());
        for _ in 0..LOOKED_AT.min(all) {
            self.look = (self.look + 1) % all;
            let place = self.look as Place;
            let row = *self.table.row(place);
            let heard = row.born.max(self.clock.listening_since());
            if row.status == Status::Alive && now.saturating_sub(heard) > self.silence {
                self.pending.probe(Probe { node: row.node, asker: None, since: now, sent: None, tries: 0 });
            }
        }
    }

    /// Probes whose answer has been awaited long enough.
    fn judge_silent_probes(&mut self) {
        let (now, within) = (self.clock.now(), self.periods(ANSWER_WITHIN));
        let over = |probe: &Probe| {
            probe.tries >= TRIES && probe.sent.is_some_and(|sent| now.saturating_sub(sent) > within)
        };
        while let Some(at) = self.pending.probes.iter().position(over) {
            let Some(place) = self.table.find(self.pending.probes[at].node) else { return };
            // A probe for others is still there when the failure is judged, and makes it the second one.
            self.failed(place, ALONE);
            if self.pending.probes.get(at).is_some_and(over) {
                self.pending.probes.remove(at);
            }
        }
    }

    fn ask_again(&mut self) {
        let (now, patience) = (self.clock.now(), self.periods(ASK_AGAIN));
        for doubt in &mut self.pending.doubts {
            if doubt.asks == 0 && now.saturating_sub(doubt.asked) > patience {
                doubt.asks = ASKED;
            }
        }
    }

    /// Whom a message is owed, or who has to be probed; whom it must tell of; and whether an answer is wanted. At most
    /// every second message, so that nobody can keep this node from gossiping by asking.
    fn owed(&mut self) -> Option<(Place, Option<NodeId>, bool)> {
        while let Some(answer) = self.pending.answers.pop_front() {
            if let Some(place) = self.table.find(answer.to) {
                return Some((place, answer.about, false));
            }
        }
        let (now, within) = (self.clock.now(), self.periods(ANSWER_WITHIN));
        let due = |probe: &&mut Probe| {
            probe.sent.is_none_or(|sent| probe.tries < TRIES && now.saturating_sub(sent) > within)
        };
        let node = self.pending.probes.iter_mut().find(due)?.node;
        // One message asks for all who want to know of it.
        for probe in self.pending.probes.iter_mut().filter(|probe| probe.node == node) {
            (probe.sent, probe.tries) = (Some(now), probe.tries + 1);
        }
        self.table.find(node).map(|place| (place, None, true))
    }

    /// A random living node; rarely any node, so that about one of the dead is tried per step in the whole cluster.
    fn choose(&mut self) -> Option<Place> {
        if self.dice.below(self.table.addressed().max(5)) == 0 {
            return self.table.anyone(&mut self.dice);
        }
        // Who is in doubt cannot be asked about itself or others.
        let to_ask = self.pending.doubts.iter().any(|doubt| doubt.asks > 0);
        let wanted = |row: &Row| !to_ask || row.status != Status::Suspect;
        self.table.someone(&mut self.dice, wanted).or_else(|| self.table.someone(&mut self.dice, |_| true))
    }

    fn tell(&mut self, event: Event) {
        if self.events.len() >= MOST_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn born(&self, age: u32) -> i64 {
        self.clock.now().saturating_sub(i64::from(age)).saturating_sub(self.clock.waited())
    }

    fn periods(&self, periods: i64) -> i64 {
        // A period is an hour at most.
        periods.saturating_mul(self.config.period as i64)
    }
}
