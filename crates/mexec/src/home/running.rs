//! How many commands of this node run where.

use crate::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_ids::NodeId;

/// With what the load of a node forgets (docs/design/load.md).
const FORGETS: Duration = Duration::from_millis(1250);

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
    since: Instant,
}

impl Now {
    fn on(&self, node: NodeId) -> u32 {
        self.counts.iter().filter(|((on, _), _)| *on == node).map(|(_, count)| count).sum()
    }

    /// The time until now goes into what the load sees of these.
    fn pass(&mut self, me: NodeId, now: Instant) {
        let kept = (-(now - self.since).as_secs_f32() / FORGETS.as_secs_f32()).exp();
        (self.seen, self.since) = (self.seen * kept + self.on(me) as f32 * (1.0 - kept), now);
    }
}

impl Running {
    pub(super) fn new(me: NodeId) -> Self {
        let now = Now { counts: HashMap::new(), seen: 0.0, since: Instant::now() };
        Self { me, now: Mutex::new(now) }
    }

    /// How many run there, and, of this node, how many its load has in it.
    pub(super) fn on(&self, node: NodeId) -> (u32, f32) {
        let mut now = lock(&self.now);
        now.pass(self.me, Instant::now());
        (now.on(node), if node == self.me { now.seen } else { 0.0 })
    }

    /// How many of this user run, anywhere.
    pub(super) fn of(&self, uid: u32) -> u32 {
        lock(&self.now).counts.iter().filter(|((_, of), _)| *of == uid).map(|(_, count)| count).sum()
    }

    /// One more of this user's runs there until what is given back is dropped.
    pub(super) fn count(&self, node: NodeId, uid: u32) -> Counted<'_> {
        let mut now = lock(&self.now);
        now.pass(self.me, Instant::now());
        *now.counts.entry((node, uid)).or_default() += 1;
        Counted(self, (node, uid))
    }
}

/// A command that runs.
#[derive(Debug)]
pub(super) struct Counted<'a>(&'a Running, (NodeId, u32));

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let mut now = lock(&self.0.now);
        now.pass(self.0.me, Instant::now());
        if let Some(count) = now.counts.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                now.counts.remove(&self.1);
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
        assert_eq!((running.on(NodeId(2)), running.of(7), running.of(8)), ((1, 0.0), 2, 0));
        let mut now = lock(&running.now);
        let begun = now.since;
        now.pass(NodeId(1), begun + FORGETS);
        assert!((0.62..0.64).contains(&now.seen), "{}", now.seen);
        drop(now);
        lock(&running.now).since = Instant::now();
        drop(counted);
        let (count, seen) = running.on(NodeId(1));
        assert!(count == 0 && (0.5..0.64).contains(&seen), "{seen}");
    }
}
