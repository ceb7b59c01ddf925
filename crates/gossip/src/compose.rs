//! Composes a message: the node's own entry; then rumours (a requested death, suspicions, deaths);
//! then entries (a requested one, nodes that returned, and the newest).

use crate::config::MAX_RUMOURS;
use crate::gossip::Gossip;
use crate::message::{Entry, Rumour, RumourKind, Writer};
use crate::table::RowIndex;
use crate::view::MemberStatus;
use tern_ids::NodeId;

impl Gossip {
    /// Composes the message to node `to`. `about`: a node whose entry or death it must include.
    pub(crate) fn compose(&mut self, to: RowIndex, about: Option<NodeId>, wants_ack: bool) -> Vec<u8> {
        let target = *self.table.row(to);
        // A node recorded as dead may be alive: its death is reported to it first, so that it can
        // refute the report.
        let about = about.or((target.status == MemberStatus::Dead).then_some(target.node));
        let about = about.and_then(|node| self.table.find(node));
        let capacity = self.config.max_message_len().min(2048);
        let mut writer = Writer::new(capacity, wants_ack, self.incarnation, self.sequence, &self.own);
        let (mut rumours, mut priority_entries) = (Vec::new(), Vec::new());
        if let Some(index) = about {
            match self.table.row(index).status {
                MemberStatus::Dead => rumours.push(self.death_rumour(index)),
                MemberStatus::Alive | MemberStatus::Suspect => priority_entries.push(index),
                MemberStatus::NeverSeen => {}
            }
        }
        self.add_suspicions(target.node, &mut rumours);
        self.add_piggybacks(&mut rumours, &mut priority_entries);
        rumours.into_iter().for_each(|rumour| writer.add_rumour(rumour));
        writer.begin_entries();
        let max_others = self.config.window - 1;
        priority_entries.iter().for_each(|&index| writer.add_entry(self.entry(index)));
        self.table.rebuild_newest();
        let newest = self.table.newest().filter(|index| *index != to && !priority_entries.contains(index));
        newest
            .take(max_others - priority_entries.len())
            .for_each(|index| writer.add_entry(self.entry(index)));
        writer.finish()
    }

    /// Adds suspicions of nodes that this node cannot reach.
    fn add_suspicions(&mut self, target: NodeId, rumours: &mut Vec<Rumour>) {
        let now = self.clock.now();
        for suspicion in self
            .pending
            .suspicions
            .iter_mut()
            .filter(|suspicion| suspicion.asks_left > 0 && suspicion.node != target)
        {
            // Half of the rumours are reserved for deaths.
            if rumours.len() >= MAX_RUMOURS / 2 {
                break;
            }
            let Some(index) = self.table.find(suspicion.node) else { continue };
            (suspicion.asks_left, suspicion.asked_at) = (suspicion.asks_left - 1, now);
            let (incarnation, age) = (self.table.row(index).incarnation, age(now, suspicion.since));
            rumours.push(Rumour { node: suspicion.node, kind: RumourKind::Suspect, incarnation, age });
        }
    }

    /// Adds deaths and returns, those that have been sent least often first. Returns take at most
    /// half the window, because many nodes return when a partition heals.
    fn add_piggybacks(&mut self, rumours: &mut Vec<Rumour>, priority_entries: &mut Vec<RowIndex>) {
        let max_entries = self.config.window / 2;
        self.pending.piggybacks.sort_by_key(|news| std::cmp::Reverse(news.sends_left));
        let news = self.pending.piggybacks.clone();
        for node in news.iter().map(|news| news.node) {
            let Some(index) = self.table.find(node) else { continue };
            if self.table.row(index).status == MemberStatus::Dead {
                let death = self.death_rumour(index);
                if rumours.len() < MAX_RUMOURS && !rumours.contains(&death) {
                    rumours.push(death);
                    self.pending.mark_sent(node);
                }
            } else if priority_entries.len() < max_entries && !priority_entries.contains(&index) {
                priority_entries.push(index);
                self.pending.mark_sent(node);
            }
        }
        self.pending.piggybacks.retain(|news| news.sends_left > 0);
    }

    fn death_rumour(&self, index: RowIndex) -> Rumour {
        let row = self.table.row(index);
        let age = age(self.clock.now(), row.born);
        Rumour { node: row.node, kind: RumourKind::Dead, incarnation: row.incarnation, age }
    }

    fn entry(&self, index: RowIndex) -> Entry<'_> {
        let row = self.table.row(index);
        Entry {
            node: row.node,
            incarnation: row.incarnation,
            sequence: row.sequence,
            age: age(self.clock.now(), row.born),
            payload: self.table.payload(index),
        }
    }
}

/// An age as encoded in a message; saturates at 49 days.
fn age(now: i64, born: i64) -> u32 {
    u32::try_from(now.saturating_sub(born).max(0)).unwrap_or(u32::MAX)
}
