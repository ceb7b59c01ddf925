//! Tracks where this node's commands run, and the recent CPU usage of each user.

use crate::lock;
use crate::messages::UserUsage;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_ids::NodeId;

/// Time constant with which a node's load decays (docs/design/load.md).
const LOAD_DECAY: Duration = Duration::from_millis(1250);

/// Time constant with which a user's usage decays: longer than most builds take. Among users
/// without a running command the one with the least usage is next, so that builds of equal size end
/// together even if there are more users than slots, in whatever order their long commands run.
const USAGE_DECAY: Duration = Duration::from_secs(600);

/// The weight of an ended command in the expected CPU rate of a running one.
const RATE_WEIGHT: f64 = 0.1;

/// The usage of all users.
#[derive(Debug)]
pub(super) struct UsageTracker {
    me: NodeId,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Number of running commands, by node and user.
    counts: HashMap<(NodeId, u32), u32>,
    /// How many busy CPUs of this node's load are due to commands here, as of `since`: their
    /// number, averaged as the load is.
    in_load: f32,
    /// Standard CPUs that each user's commands used, as a decaying average. CPU time is counted,
    /// not elapsed time, since a command on a crowded node gets less than a CPU.
    recent_cpu: HashMap<u32, f64>,
    /// The expected CPU rate of a running command in standard CPUs, learned from ended ones.
    expected_rate: f64,
    /// The CPU seconds that would have been charged for a command that has run since the tracker
    /// was created.
    charged_s: f64,
    /// When the state was last advanced.
    since: Instant,
}

impl State {
    fn running_on(&self, node: NodeId) -> u32 {
        self.counts.iter().filter(|((on, _), _)| *on == node).map(|(_, count)| count).sum()
    }

    /// The number of a user's running commands, except those on the node `except`.
    fn running_of_user(&self, uid: u32, except: Option<NodeId>) -> u32 {
        let counts = self.counts.iter().filter(|((on, of), _)| *of == uid && Some(*on) != except);
        counts.map(|(_, count)| count).sum()
    }

    /// Advances to `now`: updates the part of the load that is due to commands here, and charges
    /// users for their running commands.
    fn advance(&mut self, me: NodeId, now: Instant) {
        let passed = (now - self.since).as_secs_f64();
        let kept = |time: Duration| (-passed / time.as_secs_f64()).exp();
        let kept_load = kept(LOAD_DECAY) as f32;
        self.in_load = self.in_load * kept_load + self.running_on(me) as f32 * (1.0 - kept_load);
        let kept = kept(USAGE_DECAY);
        self.recent_cpu.values_mut().for_each(|recent_cpu| *recent_cpu *= kept);
        for ((_, uid), count) in &self.counts {
            *self.recent_cpu.entry(*uid).or_default() +=
                f64::from(*count) * self.expected_rate * (1.0 - kept);
        }
        self.charged_s += self.expected_rate * passed;
        // Drops users whose usage is hours ago. A command that has just started adds more than this
        // limit at its first update, even if all waiters update every millisecond.
        self.recent_cpu.retain(|_, recent_cpu| *recent_cpu > 1e-9);
        self.since = now;
    }

    /// Replaces the charge of an ended command by the usage that its node reports, at most that of
    /// 64 CPUs.
    fn settle(&mut self, uid: u32, wall: Duration, charged: f64, used: Duration) {
        let wall = wall.as_secs_f64().max(1e-3);
        let used = used.as_secs_f64().min(wall * 64.0);
        let recent_cpu = self.recent_cpu.entry(uid).or_default();
        *recent_cpu = (*recent_cpu + (used - charged) / USAGE_DECAY.as_secs_f64()).max(0.0);
        // A very short command says little about the rate.
        let weight = RATE_WEIGHT * wall.min(1.0);
        self.expected_rate = self.expected_rate * (1.0 - weight) + (used / wall).min(1.0) * weight;
    }
}

impl UsageTracker {
    pub(super) fn new(me: NodeId) -> Self {
        let (counts, recent_cpu, since) = (HashMap::new(), HashMap::new(), Instant::now());
        Self {
            me,
            state: Mutex::new(State {
                counts,
                in_load: 0.0,
                recent_cpu,
                expected_rate: 1.0,
                charged_s: 0.0,
                since,
            }),
        }
    }

    /// The number of commands that run on a node, and, for this node, how many busy CPUs of its
    /// load are due to commands.
    pub(super) fn on_node(&self, node: NodeId) -> (u32, f32) {
        let mut state = lock(&self.state);
        state.advance(self.me, Instant::now());
        (state.running_on(node), if node == self.me { state.in_load } else { 0.0 })
    }

    /// A user's usage, except for commands that run on the node `except`.
    pub(super) fn of_user(&self, uid: u32, except: Option<NodeId>) -> UserUsage {
        let mut state = lock(&self.state);
        state.advance(self.me, Instant::now());
        let recent_cpu = state.recent_cpu.get(&uid).map_or(0, |recent_cpu| (recent_cpu * 1e6) as u32);
        UserUsage { running: state.running_of_user(uid, except), recent_cpu }
    }

    /// Counts one more command of a user on a node, until the returned guard is dropped.
    pub(super) fn start(&self, node: NodeId, uid: u32) -> RunningCommand<'_> {
        let mut state = lock(&self.state);
        state.advance(self.me, Instant::now());
        *state.counts.entry((node, uid)).or_default() += 1;
        RunningCommand {
            tracker: self,
            key: (node, uid),
            started: state.since,
            charged_at_start: state.charged_s,
        }
    }
}

/// A running command.
#[derive(Debug)]
pub(super) struct RunningCommand<'a> {
    tracker: &'a UsageTracker,
    key: (NodeId, u32),
    started: Instant,
    /// The value of `State::charged_s` when it started.
    charged_at_start: f64,
}

impl RunningCommand<'_> {
    /// It has ended, and has used this much time of a standard CPU.
    pub(super) fn finish(self, used: Duration) {
        let mut state = lock(&self.tracker.state);
        state.advance(self.tracker.me, Instant::now());
        let (wall, charged) = (state.since - self.started, state.charged_s - self.charged_at_start);
        state.settle(self.key.1, wall, charged, used);
    }
}

impl Drop for RunningCommand<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.tracker.state);
        state.advance(self.tracker.me, Instant::now());
        if let Some(count) = state.counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                state.counts.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_commands_stay_in_the_load_for_a_while() {
        let tracker = UsageTracker::new(NodeId(1));
        let counted = [tracker.start(NodeId(1), 7), tracker.start(NodeId(2), 7)];
        let of = |uid, except| tracker.of_user(uid, except).running;
        assert_eq!((tracker.on_node(NodeId(2)), of(7, None), of(8, None)), ((1, 0.0), 2, 0));
        assert_eq!(of(7, Some(NodeId(2))), 1);
        let mut state = lock(&tracker.state);
        state.recent_cpu.clear();
        let started = state.since;
        state.advance(NodeId(1), started + LOAD_DECAY);
        assert!((0.62..0.64).contains(&state.in_load), "{}", state.in_load);
        state.advance(NodeId(1), started + USAGE_DECAY);
        assert!((1.2..1.3).contains(&state.recent_cpu[&7]), "{:?}", state.recent_cpu);
        state.since = Instant::now();
        drop(state);
        drop(counted);
        let (count, in_load) = tracker.on_node(NodeId(1));
        assert!(count == 0 && (0.5..=1.0).contains(&in_load), "{in_load}");
        let mut state = lock(&tracker.state);
        let later = state.since + 30 * USAGE_DECAY;
        state.advance(NodeId(1), later);
        assert!(state.recent_cpu.is_empty());
    }

    #[test]
    fn usage_is_charged_by_cpu_time_not_elapsed_time() {
        let tracker = UsageTracker::new(NodeId(1));
        let mut state = lock(&tracker.state);
        state.counts.extend([((NodeId(2), 7), 1), ((NodeId(3), 8), 1)]);
        let later = state.since + Duration::from_secs(6);
        state.advance(NodeId(1), later);
        let charged = state.charged_s;
        assert!((5.9..6.1).contains(&charged), "{charged}");
        state.settle(7, Duration::from_secs(6), charged, Duration::from_secs(3));
        state.settle(8, Duration::from_secs(6), charged, Duration::from_secs(1));
        let seconds = |uid| state.recent_cpu[&uid] * USAGE_DECAY.as_secs_f64();
        assert!(
            (2.9..3.1).contains(&seconds(7)) && (0.9..1.1).contains(&seconds(8)),
            "{:?}",
            state.recent_cpu
        );
        // Later commands are expected to use less from the start.
        assert!((0.8..0.95).contains(&state.expected_rate), "{}", state.expected_rate);
        // A forged report costs at most what a large machine could have done.
        state.settle(8, Duration::from_secs(1), 1.0, Duration::MAX);
        assert!(state.recent_cpu[&8] < 0.2 && state.expected_rate <= 1.0);
    }

    #[test]
    fn usage_does_not_depend_on_the_update_interval() {
        let tracker = UsageTracker::new(NodeId(1));
        let counted = tracker.start(NodeId(2), 7);
        let mut state = lock(&tracker.state);
        for _ in 0..60_000 {
            let later = state.since + Duration::from_millis(1);
            state.advance(NodeId(1), later);
        }
        assert!((0.09..0.1).contains(&state.recent_cpu[&7]), "{:?}", state.recent_cpu);
        state.since = Instant::now();
        drop(state);
        drop(counted);
    }
}
