//! How many commands of this node run where, and ran lately.

use crate::lock;
use crate::words::Share;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_ids::NodeId;

/// With what the load of a node forgets (docs/design/load.md).
const FORGETS: Duration = Duration::from_millis(1250);

/// With what it is forgotten how much a user had: longer than most builds take. Of users who wait and have nothing the one with least is next, so
/// that builds of the same size end together where there are more users than room, whichever commands of theirs take long and when.
const LATELY: Duration = Duration::from_secs(600);

/// How much of what it is believed that a command of now uses each one that ends says anew.
const LEARNS: f64 = 0.1;

/// All of them.
#[derive(Debug)]
pub(super) struct Running {
    me: NodeId,
    now: Mutex<Now>,
}

#[derive(Debug)]
struct Now {
    /// By node and user.
    counts: HashMap<(NodeId, u32), u32>,
    /// How many run here, as the load sees it, and when that was so.
    seen: f32,
    /// What of a standard CPU each user had, lately: time is not what he has, since a command on a crowded node has less of it.
    lately: HashMap<u32, f64>,
    /// What of a standard CPU a command has, as those that have ended say; and what one that ran all the time would have been charged, seconds.
    rate: f64,
    charged: f64,
    since: Instant,
}

impl Now {
    fn on(&self, node: NodeId) -> u32 {
        self.counts.iter().filter(|((on, _), _)| *on == node).map(|(_, count)| count).sum()
    }

    /// How many of a user's run, but for those on this node.
    fn of(&self, uid: u32, but: Option<NodeId>) -> u32 {
        let his = self.counts.iter().filter(|((on, of), _)| *of == uid && Some(*on) != but);
        his.map(|(_, count)| count).sum()
    }

    /// The time until now goes into what the load sees of these, and into what users had.
    fn pass(&mut self, me: NodeId, now: Instant) {
        let passed = (now - self.since).as_secs_f64();
        let kept = |forgets: Duration| (-passed / forgets.as_secs_f64()).exp();
        let seen = kept(FORGETS) as f32;
        self.seen = self.seen * seen + self.on(me) as f32 * (1.0 - seen);
        let kept = kept(LATELY);
        self.lately.values_mut().for_each(|lately| *lately *= kept);
        for ((_, uid), count) in &self.counts {
            *self.lately.entry(*uid).or_default() += f64::from(*count) * self.rate * (1.0 - kept);
        }
        self.charged += self.rate * passed;
        // Of hours ago. What has just begun, and is looked at each millisecond by all who wait, is more.
        self.lately.retain(|_, lately| *lately > 1e-9);
        self.since = now;
    }

    /// A user's command that has run for so long, and was charged so many seconds, has used that much, which he had instead. A node that says it
    /// was more than a large machine's CPUs together is not believed.
    fn learn(&mut self, uid: u32, wall: Duration, charged: f64, used: Duration) {
        let wall = wall.as_secs_f64().max(1e-3);
        let used = used.as_secs_f64().min(wall * 64.0);
        let lately = self.lately.entry(uid).or_default();
        *lately = (*lately + (used - charged) / LATELY.as_secs_f64()).max(0.0);
        // What takes but a moment says little.
        let learns = LEARNS * wall.min(1.0);
        self.rate = self.rate * (1.0 - learns) + (used / wall).min(1.0) * learns;
    }
}

impl Running {
    pub(super) fn new(me: NodeId) -> Self {
        let (counts, lately, since) = (HashMap::new(), HashMap::new(), Instant::now());
        Self { me, now: Mutex::new(Now { counts, seen: 0.0, lately, rate: 1.0, charged: 0.0, since }) }
    }

    /// How many run there, and, of this node, how many its load has in it.
    pub(super) fn on(&self, node: NodeId) -> (u32, f32) {
        let mut now = lock(&self.now);
        now.pass(self.me, Instant::now());
        (now.on(node), if node == self.me { now.seen } else { 0.0 })
    }

    /// What this user has, but for what runs on this node.
    pub(super) fn share(&self, uid: u32, but: Option<NodeId>) -> Share {
        let mut now = lock(&self.now);
        now.pass(self.me, Instant::now());
        let lately = now.lately.get(&uid).map_or(0, |lately| (lately * 1e6) as u32);
        Share { running: now.of(uid, but), lately }
    }

    /// One more of this user's runs there until what is given back is dropped.
    pub(super) fn count(&self, node: NodeId, uid: u32) -> Counted<'_> {
        let mut now = lock(&self.now);
        now.pass(self.me, Instant::now());
        *now.counts.entry((node, uid)).or_default() += 1;
        Counted { running: self, of: (node, uid), begun: now.since, charged: now.charged }
    }
}

/// A command that runs.
#[derive(Debug)]
pub(super) struct Counted<'a> {
    running: &'a Running,
    of: (NodeId, u32),
    begun: Instant,
    /// What had been charged by then.
    charged: f64,
}

impl Counted<'_> {
    /// It has ended, and has used so much of a standard CPU.
    pub(super) fn used(self, used: Duration) {
        let mut now = lock(&self.running.now);
        now.pass(self.running.me, Instant::now());
        let (wall, charged) = (now.since - self.begun, now.charged - self.charged);
        now.learn(self.of.1, wall, charged, used);
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let mut now = lock(&self.running.now);
        now.pass(self.running.me, Instant::now());
        if let Some(count) = now.counts.get_mut(&self.of) {
            *count -= 1;
            if *count == 0 {
                now.counts.remove(&self.of);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_run_is_in_the_load_for_a_while() {
        let running = Running::new(NodeId(1));
        let counted = [running.count(NodeId(1), 7), running.count(NodeId(2), 7)];
        let of = |uid, but| running.share(uid, but).running;
        assert_eq!((running.on(NodeId(2)), of(7, None), of(8, None)), ((1, 0.0), 2, 0));
        assert_eq!(of(7, Some(NodeId(2))), 1);
        let mut now = lock(&running.now);
        now.lately.clear();
        let begun = now.since;
        now.pass(NodeId(1), begun + FORGETS);
        assert!((0.62..0.64).contains(&now.seen), "{}", now.seen);
        now.pass(NodeId(1), begun + LATELY);
        assert!((1.2..1.3).contains(&now.lately[&7]), "{:?}", now.lately);
        now.since = Instant::now();
        drop(now);
        drop(counted);
        let (count, seen) = running.on(NodeId(1));
        assert!(count == 0 && (0.5..=1.0).contains(&seen), "{seen}");
        let mut now = lock(&running.now);
        let later = now.since + 30 * LATELY;
        now.pass(NodeId(1), later);
        assert!(now.lately.is_empty());
    }

    #[test]
    fn who_was_on_a_crowded_node_had_less() {
        let running = Running::new(NodeId(1));
        let mut now = lock(&running.now);
        now.counts.extend([((NodeId(2), 7), 1), ((NodeId(3), 8), 1)]);
        let later = now.since + Duration::from_secs(6);
        now.pass(NodeId(1), later);
        let charged = now.charged;
        assert!((5.9..6.1).contains(&charged), "{charged}");
        now.learn(7, Duration::from_secs(6), charged, Duration::from_secs(3));
        now.learn(8, Duration::from_secs(6), charged, Duration::from_secs(1));
        let seconds = |uid| now.lately[&uid] * LATELY.as_secs_f64();
        assert!((2.9..3.1).contains(&seconds(7)) && (0.9..1.1).contains(&seconds(8)), "{:?}", now.lately);
        // The next ones are expected to have less from the beginning on.
        assert!((0.8..0.95).contains(&now.rate), "{}", now.rate);
        // A lie costs at most what a large machine could have done.
        now.learn(8, Duration::from_secs(1), 1.0, Duration::MAX);
        assert!(now.lately[&8] < 0.2 && now.rate <= 1.0);
    }

    #[test]
    fn what_a_user_has_adds_up_however_often_that_is_looked_at() {
        let running = Running::new(NodeId(1));
        let counted = running.count(NodeId(2), 7);
        let mut now = lock(&running.now);
        for _ in 0..60_000 {
            let later = now.since + Duration::from_millis(1);
            now.pass(NodeId(1), later);
        }
        assert!((0.09..0.1).contains(&now.lately[&7]), "{:?}", now.lately);
        now.since = Instant::now();
        drop(now);
        drop(counted);
    }
}
