//! Which node a command is begun on: pure functions of what is known of all.
//!
//! What was sent somewhere in the last second no load tells of yet; so a node counts as busy with what was sent there from here, or by
//! its load, whichever is more. A command gets the share of a CPU that is left for one more; the node where it is over soonest is first,
//! by what such commands need, if that is known, and by what it costs to begin one elsewhere.
//! Home is first while it has nothing to do: what is run there needs no link, and no file from anywhere. After that it takes one more
//! than it has CPUs, as other nodes do, and comes last of those that are as fast: it has everybody's files to serve.

use crate::words::Why;
use std::time::Duration;
use tern_ids::NodeId;

/// What it costs to begin a command on another node, with its files: 24 ms on nodes of half a CPU (docs/benchmarks.md, "Placed commands").
const AWAY: f32 = 0.02;

/// Of what needs less, and is the only one, its caller is taken to be what makes home busy: a script that waits for it now. If that is wrong
/// it is over soon all the same.
const SOON: f32 = 0.2;

/// How long a command waits for others to have room while home is busy with something else. They may have none for weeks either.
const HOPES: Duration = Duration::from_secs(30);

/// What is known of a node.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Known {
    /// Which.
    pub(super) node: NodeId,
    /// Of one of its CPUs; 10,000 is the standard.
    pub(super) speed: u32,
    /// How many it has; a quota makes it a fraction.
    pub(super) cpus: f32,
    /// 100 is one standard CPU kept busy, of a node that has one: threads that run or wait, by speed and CPUs (docs/design/load.md).
    pub(super) load: f32,
    /// Commands of this node that run there.
    pub(super) ours: u32,
    /// How many of these the load has in it by now; of other nodes nothing is known of that.
    pub(super) seen: f32,
    /// It is heard of, and takes work.
    pub(super) open: bool,
    /// Nobody has found it dead: who names it has it asked, also if nothing was heard of it yet.
    pub(super) there: bool,
}

/// Where a command may run.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Wish {
    /// Anywhere. Short ones only here: to send them costs more than it gains.
    Any {
        /// Such commands take less than they would gain.
        short: bool,
        /// What they need of a standard CPU, in seconds, if that is known.
        need: Option<f32>,
    },
    /// On one of these.
    Among(Vec<NodeId>),
}

impl Wish {
    /// Whether it runs here, whatever the load and whoever waits: a short one, or of who names home alone.
    pub(super) fn stays(&self, me: NodeId) -> bool {
        match self {
            Self::Any { short, .. } => *short,
            Self::Among(named) => named.iter().all(|node| *node == me),
        }
    }

    /// The node that it is for, if that is one alone.
    pub(super) fn only(&self) -> Option<NodeId> {
        match self {
            Self::Among(named) if named.len() == 1 => named.first().copied(),
            _ => None,
        }
    }

    /// Why a command runs here, or on another node.
    pub(super) fn why(&self, here: bool) -> Why {
        match self {
            Self::Among(_) => Why::Named,
            Self::Any { short: true, .. } => Why::Short,
            Self::Any { .. } if here => Why::Idle,
            Self::Any { .. } => Why::Best,
        }
    }
}

impl Known {
    /// How many of its CPUs are in use.
    fn busy(&self) -> f32 {
        let threads = self.load / 100.0 * (self.speed as f32 / 10_000.0) * self.cpus;
        ((threads - self.seen).max(0.0) + self.ours as f32).min(threads.max(self.ours as f32))
    }

    /// How fast one more command would be there, if so many CPUs were in use.
    fn pace(&self, busy: f32) -> f32 {
        self.speed as f32 * (self.cpus / (busy + 1.0)).min(1.0)
    }

    /// How long one that needs so much of a standard CPU would take there; `only` if it is home, and none of its commands runs anywhere.
    fn takes(&self, need: Option<f32>, home: bool, only: bool) -> f32 {
        let caller = if only && need.is_some_and(|need| need < SOON) { 1.0 } else { 0.0 };
        let pace = self.pace((self.busy() - caller).max(0.0)).max(1.0);
        let away = if home || need.is_none() { 0.0 } else { AWAY };
        need.unwrap_or(1.0) * 10_000.0 / pace + away
    }

    /// Whether one more has a CPU of its own, as far as there is one.
    fn is_idle(&self) -> bool {
        self.busy() + 1.0 <= self.cpus.max(1.0) + 0.5
    }

    /// What a command that has taken so long there would take on a standard CPU of its own.
    pub(super) fn alone(&self, took: Duration) -> Duration {
        Self::standard(self.speed, took.mul_f32((self.cpus / self.busy().max(1.0)).clamp(0.0, 1.0)))
    }

    /// What so much of its CPU time is on a standard CPU.
    pub(super) fn standard(speed: u32, used: Duration) -> Duration {
        used.mul_f32(speed as f32 / 10_000.0)
    }

    /// Whether it takes one more, if it is home: others know that of themselves. What else home does may go on for weeks: it keeps from it only
    /// who may soon have room elsewhere.
    fn has_room(&self, elsewhere: bool) -> bool {
        let busy = if elsewhere { self.busy() } else { self.ours as f32 };
        busy <= self.cpus.max(1.0) + 0.5
    }
}

/// The nodes that a command may run on, now or later.
pub(super) fn fit(nodes: &[Known], wish: &Wish) -> Vec<NodeId> {
    fitting(nodes, wish).map(|known| known.node).collect()
}

fn fitting<'a>(nodes: &'a [Known], wish: &'a Wish) -> impl Iterator<Item = &'a Known> {
    nodes.iter().filter(move |known| match wish {
        Wish::Any { .. } => known.open,
        Wish::Among(named) => known.there && named.contains(&known.node),
    })
}

/// The nodes of these to ask now, the best first. Home is among them only if it is to run it at once.
/// Who has waited so long does not hope for others.
pub(super) fn order(nodes: &[Known], me: NodeId, wish: &Wish, waited: Duration) -> Vec<NodeId> {
    if wish.stays(me) {
        return vec![me];
    }
    let need = if let Wish::Any { need, .. } = wish { *need } else { None };
    let none_runs = nodes.iter().all(|known| known.ours == 0);
    let takes = |known: &Known| known.takes(need, known.node == me, known.node == me && none_runs);
    let elsewhere = waited < HOPES && fitting(nodes, wish).any(|known| known.node != me);
    let mut now: Vec<&Known> =
        fitting(nodes, wish).filter(|known| known.node != me || known.has_room(elsewhere)).collect();
    let first = |known: &Known| matches!(wish, Wish::Any { .. }) && known.node == me && known.is_idle();
    let last = |known: &Known| (known.node == me, known.node);
    now.sort_by(|a, b| {
        first(b).cmp(&first(a)).then(takes(a).total_cmp(&takes(b))).then(last(a).cmp(&last(b)))
    });
    now.into_iter().map(|known| known.node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = NodeId(1);
    const ANY: Wish = Wish::Any { short: false, need: None };

    fn known(node: u16, speed: u32, load: f32, ours: u32) -> Known {
        Known { node: NodeId(node), speed, cpus: 1.0, load, ours, seen: 0.0, open: true, there: true }
    }

    fn ids(nodes: &[Known], wish: &Wish) -> Vec<u16> {
        order(nodes, ME, wish, Duration::ZERO).iter().map(|node| node.0).collect()
    }

    #[test]
    fn home_is_first_while_it_is_idle_then_last_and_no_place_when_it_is_full() {
        let others = [known(2, 20_000, 0.0, 0), known(3, 10_000, 0.0, 0)];
        let with = |home| [&[home][..], &others].concat();
        assert_eq!(ids(&with(known(1, 10_000, 10.0, 0)), &ANY), [1, 2, 3]);
        assert_eq!(ids(&with(known(1, 10_000, 95.0, 0)), &ANY), [2, 3, 1]);
        assert_eq!(ids(&with(known(1, 10_000, 0.0, 1)), &ANY), [2, 3, 1]);
        assert_eq!(ids(&with(known(1, 10_000, 0.0, 2)), &ANY), [2, 3]);
        assert_eq!(ids(&with(known(1, 10_000, 190.0, 0)), &ANY), [2, 3]);
        // As fast as the others are now.
        let one_each = [known(1, 10_000, 0.0, 1), known(2, 10_000, 0.0, 1), known(3, 10_000, 0.0, 2)];
        assert_eq!(ids(&one_each, &ANY), [2, 1, 3]);
    }

    #[test]
    fn a_busy_home_takes_as_many_as_others_do_where_there_are_none() {
        let busy = |ours| known(1, 10_000, 900.0, ours);
        assert_eq!(ids(&[busy(1)], &ANY), [1]);
        assert_eq!(ids(&[busy(2)], &ANY), [0u16; 0]);
        let closed = Known { open: false, ..known(2, 10_000, 0.0, 0) };
        assert_eq!(ids(&[busy(1), closed], &ANY), [1]);
        let other = [busy(1), known(2, 10_000, 0.0, 9)];
        assert_eq!(ids(&other, &ANY), [2]);
        assert!(order(&other, ME, &ANY, HOPES).contains(&ME), "the other may have no room for weeks either");
    }

    #[test]
    fn a_slow_home_is_as_idle_as_its_threads_and_what_has_just_ended_there_is_no_load() {
        let others = [known(2, 5000, 0.0, 0)];
        let with = |home: Known| ids(&[&[home][..], &others].concat(), &ANY);
        // 0.3 threads on half a CPU.
        assert_eq!(with(known(1, 5000, 60.0, 0)), [1, 2]);
        let ended = Known { seen: 0.8, ..known(1, 5000, 200.0, 0) };
        assert_eq!(with(ended.clone()), [1, 2]);
        assert_eq!(with(Known { ours: 1, ..ended.clone() }), [2, 1]);
        assert_eq!(with(Known { ours: 2, ..ended.clone() }), [2]);
        // Somebody else works there.
        assert_eq!(with(Known { load: 800.0, ..ended }), [2]);
    }

    #[test]
    fn what_waits_for_others_takes_no_longer_alone() {
        let took = Duration::from_millis(100);
        let alone = |known: Known| known.alone(took).as_millis();
        assert_eq!(alone(known(1, 10_000, 0.0, 1)), 100);
        assert_eq!(alone(known(1, 10_000, 400.0, 1)), 25);
        assert_eq!(alone(known(1, 5_000, 0.0, 2)), 25);
        assert_eq!(alone(Known { cpus: 8.0, ..known(1, 20_000, 0.0, 4) }), 200);
    }

    #[test]
    fn what_needs_little_stays_unless_home_is_busy_with_others() {
        let others = [known(2, 10_000, 0.0, 0)];
        let with = |need, home: Known| {
            ids(&[&[home][..], &others].concat(), &Wish::Any { short: false, need: Some(need) })
        };
        // A script that calls compilers, one after the other.
        assert_eq!(with(0.05, known(1, 10_000, 100.0, 0)), [1, 2]);
        assert_eq!(with(0.5, known(1, 10_000, 100.0, 0)), [2, 1]);
        // Somebody else, or a build.
        assert_eq!(with(0.04, known(1, 10_000, 140.0, 0)), [1, 2]);
        assert_eq!(with(0.15, known(1, 10_000, 140.0, 0)), [2, 1]);
        assert_eq!(with(0.05, known(1, 10_000, 100.0, 1)), [2, 1]);
        assert_eq!(with(0.015, known(1, 10_000, 100.0, 1)), [1, 2]);
    }

    #[test]
    fn what_was_just_sent_counts_before_any_load_tells_of_it() {
        let nodes = [known(1, 10_000, 100.0, 1), known(2, 10_000, 0.0, 2), known(3, 10_000, 50.0, 0)];
        assert_eq!(ids(&nodes, &ANY), [3, 1, 2]);
    }

    #[test]
    fn a_fast_node_takes_more_before_a_slow_one_is_better() {
        let busy = |ours| [known(2, 25_000, 0.0, ours), known(3, 10_000, 0.0, 0)];
        assert_eq!(ids(&busy(1), &ANY), [2, 3]);
        assert_eq!(ids(&busy(2), &ANY), [3, 2]);
    }

    #[test]
    fn short_ones_stay_and_named_nodes_are_meant() {
        let nodes = [known(1, 10_000, 900.0, 9), known(2, 10_000, 0.0, 0), known(3, 10_000, 0.0, 0)];
        assert_eq!(ids(&nodes, &Wish::Any { short: true, need: Some(0.01) }), [1]);
        assert_eq!(ids(&nodes, &Wish::Among(vec![ME])), [1]);
        assert_eq!(ids(&nodes, &Wish::Among(vec![ME, NodeId(3)])), [3]);
        assert_eq!(ids(&nodes, &Wish::Among(vec![NodeId(9)])), [0u16; 0]);
    }

    #[test]
    fn who_is_closed_or_gone_is_not_asked() {
        let mut nodes = [known(2, 10_000, 0.0, 0), known(3, 10_000, 0.0, 0)];
        let named = Wish::Among(vec![NodeId(2)]);
        nodes[0].open = false;
        assert_eq!(ids(&nodes, &ANY), [3]);
        assert_eq!(ids(&nodes, &named), [2], "it says itself why not");
        nodes[0].there = false;
        assert_eq!(ids(&nodes, &named), [0u16; 0]);
    }
}
