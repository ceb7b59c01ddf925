//! What a node still has to do for others and for itself: doubts, probes, answers, urgent news. All are bounded, and
//! hold node numbers, because places change with the map.

use std::collections::VecDeque;
use tern_ids::NodeId;

/// The most probes, and the most answers, that wait for their turn. Who asks when there are more asks again later.
const MOST_WAITING: usize = 32;

/// How many others are asked about a node that this one cannot reach.
pub(crate) const ASKED: u8 = 3;

/// A node that this one could not reach, or got no answer from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Doubt {
    pub(crate) node: NodeId,
    /// Since when. Any later sign of life ends it.
    pub(crate) since: i64,
    /// Messages to it that could not be sent, or questions that were not answered.
    pub(crate) failures: u8,
    /// How many more are to be asked.
    pub(crate) asks: u8,
    /// When somebody was last asked.
    pub(crate) asked: i64,
}

/// A node that is to be reached, and its answer awaited.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Probe {
    pub(crate) node: NodeId,
    /// Who doubts that it lives; this node itself if `None`.
    pub(crate) asker: Option<NodeId>,
    /// A sign of life that is later than this answers the question.
    pub(crate) since: i64,
    pub(crate) sent: Option<i64>,
    pub(crate) tries: u8,
}

/// A message that is owed to somebody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) to: NodeId,
    /// Whose entry or death it must have in it, besides the own entry.
    pub(crate) about: Option<NodeId>,
}

/// A death or a return that all are to know soon.
#[derive(Debug, Clone, Copy)]
pub(crate) struct News {
    pub(crate) node: NodeId,
    /// In how many more messages.
    pub(crate) sendings: u8,
}

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    pub(crate) doubts: Vec<Doubt>,
    pub(crate) probes: VecDeque<Probe>,
    pub(crate) answers: VecDeque<Answer>,
    pub(crate) news: Vec<News>,
}

impl Pending {
    pub(crate) fn doubt(&mut self, node: NodeId) -> Option<&mut Doubt> {
        self.doubts.iter_mut().find(|doubt| doubt.node == node)
    }

    pub(crate) fn probe(&mut self, probe: Probe) {
        let same = |other: &Probe| (other.node, other.asker) == (probe.node, probe.asker);
        if self.probes.len() < MOST_WAITING && !self.probes.iter().any(same) {
            self.probes.push_back(probe);
        }
    }

    /// Whether others doubt that it lives, and have been promised an answer.
    pub(crate) fn doubted_by_others(&self, node: NodeId) -> bool {
        self.probes.iter().any(|probe| probe.node == node && probe.asker.is_some())
    }

    pub(crate) fn answer(&mut self, to: NodeId, about: Option<NodeId>) {
        let answer = Answer { to, about };
        if self.answers.len() < MOST_WAITING && !self.answers.contains(&answer) {
            self.answers.push_back(answer);
        }
    }

    /// It was alive at that time: doubts and probes from before are settled, and who asked is told.
    /// True if this node had doubts and has none now.
    pub(crate) fn alive_at(&mut self, node: NodeId, born: i64) -> bool {
        let mut asked = Vec::new();
        self.probes.retain(|probe| {
            let settled = probe.node == node && probe.since < born;
            asked.extend(probe.asker.filter(|_| settled));
            !settled
        });
        asked.into_iter().for_each(|asker| self.answer(asker, Some(node)));
        let before = self.doubts.len();
        self.doubts.retain(|doubt| doubt.node != node || doubt.since >= born);
        self.doubts.len() < before
    }

    /// It is dead, or in the map no more: there is nothing to find out.
    pub(crate) fn forget(&mut self, node: NodeId) {
        self.probes.retain(|probe| probe.node != node);
        self.doubts.retain(|doubt| doubt.node != node);
    }

    /// Something has become known of it that all are to know.
    pub(crate) fn urgent(&mut self, node: NodeId, sendings: u8) {
        self.news.retain(|news| news.node != node);
        self.news.push(News { node, sendings });
    }

    /// This piece of news has been put into a message.
    pub(crate) fn told(&mut self, node: NodeId) {
        if let Some(news) = self.news.iter_mut().find(|news| news.node == node) {
            news.sendings = news.sendings.saturating_sub(1);
        }
    }
}
