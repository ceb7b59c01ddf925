//! What goes into a message: the own entry; rumours (what it must tell of, questions, deaths); then entries (what it
//! must tell of, returns, and the newest).

use crate::config::MOST_RUMOURS;
use crate::gossip::Gossip;
use crate::message::{Entry, Kind, Rumour, Writer};
use crate::table::Place;
use crate::view::Status;
use tern_ids::NodeId;

impl Gossip {
    /// The message to this node. `about`: whom it must tell of.
    pub(crate) fn compose(&mut self, to: Place, about: Option<NodeId>, answer: bool) -> Vec<u8> {
        let target = *self.table.row(to);
        // A node that is believed dead, and lives, learns of it first.
        let about = about.or((target.status == Status::Dead).then_some(target.node));
        let about = about.and_then(|node| self.table.find(node));
        let capacity = self.config.longest_message().min(2048);
        let mut writer = Writer::new(capacity, answer, self.incarnation, self.sequence, &self.own);
        let (mut rumours, mut first) = (Vec::new(), Vec::new());
        if let Some(place) = about {
            match self.table.row(place).status {
                Status::Dead => rumours.push(self.death(place)),
                Status::Alive | Status::Suspect => first.push(place),
                Status::Unheard => {}
            }
        }
        self.ask(target.node, &mut rumours);
        self.news(&mut rumours, &mut first);
        rumours.into_iter().for_each(|rumour| writer.rumour(rumour));
        writer.begin_entries();
        let others = self.config.window - 1;
        first.iter().for_each(|&place| writer.entry(self.entry(place)));
        self.table.put_in_order();
        let newest = self.table.newest().filter(|place| *place != to && !first.contains(place));
        newest.take(others - first.len()).for_each(|place| writer.entry(self.entry(place)));
        writer.finish()
    }

    /// The questions about nodes that this one cannot reach.
    fn ask(&mut self, target: NodeId, rumours: &mut Vec<Rumour>) {
        let now = self.clock.now();
        for doubt in self.pending.doubts.iter_mut().filter(|doubt| doubt.asks > 0 && doubt.node != target) {
            // Half the room is for deaths.
            if rumours.len() >= MOST_RUMOURS / 2 {
                break;
            }
            let Some(place) = self.table.find(doubt.node) else { continue };
            (doubt.asks, doubt.asked) = (doubt.asks - 1, now);
            let (incarnation, age) = (self.table.row(place).incarnation, age(now, doubt.since));
            rumours.push(Rumour { node: doubt.node, kind: Kind::Suspect, incarnation, age });
        }
    }

    /// Deaths and returns, those first that have been told least often. Returns take half the window at most: when a
    /// split heals there are many.
    fn news(&mut self, rumours: &mut Vec<Rumour>, first: &mut Vec<Place>) {
        let most_entries = self.config.window / 2;
        self.pending.news.sort_by_key(|news| std::cmp::Reverse(news.sendings));
        let news = self.pending.news.clone();
        for node in news.iter().map(|news| news.node) {
            let Some(place) = self.table.find(node) else { continue };
            if self.table.row(place).status == Status::Dead {
                let death = self.death(place);
                if rumours.len() < MOST_RUMOURS && !rumours.contains(&death) {
                    rumours.push(death);
                    self.pending.told(node);
                }
            } else if first.len() < most_entries && !first.contains(&place) {
                first.push(place);
                self.pending.told(node);
            }
        }
        self.pending.news.retain(|news| news.sendings > 0);
    }

    fn death(&self, place: Place) -> Rumour {
        let row = self.table.row(place);
        let age = age(self.clock.now(), row.born);
        Rumour { node: row.node, kind: Kind::Dead, incarnation: row.incarnation, age }
    }

    fn entry(&self, place: Place) -> Entry<'_> {
        let row = self.table.row(place);
        Entry {
            node: row.node,
            incarnation: row.incarnation,
            sequence: row.sequence,
            age: age(self.clock.now(), row.born),
            payload: self.table.payload(place),
        }
    }
}

/// An age as it travels; more than 49 days is 49 days.
fn age(now: i64, born: i64) -> u32 {
    u32::try_from(now.saturating_sub(born).max(0)).unwrap_or(u32::MAX)
}
