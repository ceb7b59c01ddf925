//! Slots: the number of commands that run here at a time, and the fair queue for them.
//!
//! No command is refused for lack of a slot; it waits. A free slot goes to the user with the fewest
//! running commands, here and (as reported by the homes) elsewhere. Among equals it goes to the one
//! with the least CPU use in the last ten minutes, then to the one whose last slot is the longest
//! ago. The oldest of one user's requests is served first. So users share a node equally, however
//! many commands each of them has and whichever came first, also if there are more users than
//! slots.

use crate::fairness::LastServed;
use crate::lock;
use crate::messages::UserUsage;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// How long a slot is reserved for a request to which it was offered.
const OFFER_TIMEOUT: Duration = Duration::from_secs(2);

/// All slots of this node.
#[derive(Debug)]
pub(super) struct Slots {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    max: usize,
    /// The maximum number of slots of one user.
    max_per_user: usize,
    /// No further slots are assigned, however few are taken.
    is_closed: bool,
    /// Number of slots of each user that are taken or offered.
    taken: HashMap<u32, usize>,
    last_served: LastServed,
    queue: Vec<QueueEntry>,
    next: u64,
}

#[derive(Debug)]
struct QueueEntry {
    number: u64,
    uid: u32,
    /// The user's usage of other nodes, as reported by the home.
    usage: UserUsage,
    /// When a slot was offered to it.
    offered: Option<Instant>,
}

impl State {
    fn count(&self) -> usize {
        self.taken.values().sum()
    }

    /// Offers free slots to the next requests in the queue, after withdrawing offers that have
    /// expired.
    fn schedule(&mut self, now: Instant) {
        for at in (0..self.queue.len()).rev() {
            if self.queue[at].offered.is_some_and(|offered| now.duration_since(offered) > OFFER_TIMEOUT) {
                let expired = self.queue.remove(at);
                self.release(expired.uid);
            }
        }
        while !self.is_closed && self.count() < self.max {
            let taken = |uid| self.taken.get(&uid).copied().unwrap_or(0);
            let is_eligible =
                |entry: &QueueEntry| entry.offered.is_none() && taken(entry.uid) < self.max_per_user;
            let eligible = self.queue.iter().enumerate().filter(|(_, entry)| is_eligible(entry));
            let rank = |entry: &QueueEntry| {
                let running = taken(entry.uid) as u64 + u64::from(entry.usage.running);
                (running, entry.usage.recent_cpu, self.last_served.last(entry.uid), entry.number)
            };
            let next = eligible.min_by_key(|(_, entry)| rank(entry));
            let Some((at, uid)) = next.map(|(at, entry)| (at, entry.uid)) else { break };
            self.assign(uid);
            self.queue[at].offered = Some(now);
        }
    }

    /// The latest report about a user applies to all of the user's requests.
    fn update_usage(&mut self, uid: u32, usage: UserUsage) {
        self.queue.iter_mut().filter(|entry| entry.uid == uid).for_each(|entry| entry.usage = usage);
    }

    fn assign(&mut self, uid: u32) {
        self.last_served.record(uid);
        *self.taken.entry(uid).or_default() += 1;
    }

    fn release(&mut self, uid: u32) {
        if let Some(count) = self.taken.get_mut(&uid) {
            *count -= 1;
            if *count == 0 {
                self.taken.remove(&uid);
            }
        }
    }
}

impl Slots {
    /// `max` slots, by default one per CPU and one more: while one command waits for its files,
    /// another one computes. One user gets at most `max_per_user` of them, by default all.
    pub(super) fn new(max: Option<u32>, max_per_user: Option<u32>, cpus: Option<f64>) -> Self {
        let all = std::thread::available_parallelism().map_or(1, |all| all.get() as u32);
        let cpus = cpus.map_or(all, |cpus| all.min(cpus.ceil() as u32));
        let max = max.unwrap_or(cpus + 1).max(1) as usize;
        let max_per_user = max_per_user.map_or(max, |max| max.max(1) as usize);
        let (taken, last_served) = (HashMap::new(), LastServed::default());
        let state =
            State { max, max_per_user, is_closed: false, taken, last_served, queue: Vec::new(), next: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Takes a slot at once, if one is free and no request is queued for it.
    pub(super) fn try_acquire(self: &Arc<Self>, uid: u32) -> Option<Slot> {
        let mut state = lock(&self.state);
        state.schedule(Instant::now());
        let taken = |uid| state.taken.get(&uid).copied().unwrap_or(0);
        // Requests of users who have reached their maximum do not count.
        let is_waiting =
            |entry: &QueueEntry| entry.offered.is_none() && taken(entry.uid) < state.max_per_user;
        if state.is_closed
            || state.count() >= state.max
            || taken(uid) >= state.max_per_user
            || state.queue.iter().any(is_waiting)
        {
            return None;
        }
        state.assign(uid);
        Some(Slot { slots: self.clone(), uid })
    }

    /// Queues a request of a user. `usage` is the user's usage of other nodes.
    pub(super) fn enqueue(self: &Arc<Self>, uid: u32, usage: UserUsage) -> QueuedSlot {
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        state.update_usage(uid, usage);
        state.queue.push(QueueEntry { number, uid, usage, offered: None });
        state.schedule(Instant::now());
        QueuedSlot { slots: self.clone(), number, uid }
    }

    /// Updates a waiting user's usage of other nodes.
    pub(super) fn update_usage(&self, uid: u32, usage: UserUsage) {
        self.change(|state| state.update_usage(uid, usage));
    }

    /// Stops or resumes assigning slots. Slots that are taken or offered stay so.
    pub(super) fn set_closed(&self, is_closed: bool) {
        if lock(&self.state).is_closed != is_closed {
            self.change(|state| state.is_closed = is_closed);
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        change(&mut state);
        state.schedule(Instant::now());
        drop(state);
        self.changed.notify_all();
    }
}

/// A slot for one command, until it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Arc<Slots>,
    uid: u32,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.change(|state| state.release(self.uid));
    }
}

/// A queued request, until it is dropped.
#[derive(Debug)]
pub(super) struct QueuedSlot {
    slots: Arc<Slots>,
    number: u64,
    uid: u32,
}

impl QueuedSlot {
    /// Waits up to `timeout` for an offer. Returns whether there is one.
    pub(super) fn wait_for_offer(&self, timeout: Duration) -> bool {
        let is_offered = |state: &State| {
            state.queue.iter().any(|entry| entry.number == self.number && entry.offered.is_some())
        };
        let mut state = lock(&self.slots.state);
        state.schedule(Instant::now());
        if is_offered(&state) {
            return true;
        }
        let waited = self.slots.changed.wait_timeout(state, timeout);
        waited.is_ok_and(|(state, _)| is_offered(&state))
    }

    /// Accepts the offered slot. `None` if the offer has expired.
    pub(super) fn accept(self) -> Option<Slot> {
        let mut state = lock(&self.slots.state);
        let is_own = |entry: &QueueEntry| entry.number == self.number && entry.offered.is_some();
        let at = state.queue.iter().position(is_own)?;
        state.queue.remove(at);
        drop(state);
        Some(Slot { slots: self.slots.clone(), uid: self.uid })
    }
}

impl Drop for QueuedSlot {
    fn drop(&mut self) {
        self.slots.change(|state| {
            if let Some(at) = state.queue.iter().position(|entry| entry.number == self.number) {
                let entry = state.queue.remove(at);
                if entry.offered.is_some() {
                    state.release(entry.uid);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(max: u32) -> Arc<Slots> {
        Arc::new(Slots::new(Some(max), None, None))
    }

    fn running(running: u32) -> UserUsage {
        UserUsage { running, recent_cpu: 0 }
    }

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn at_most_the_maximum_number_of_slots_is_taken() {
        let slots = slots(2);
        let (one, two) = (slots.try_acquire(1).unwrap(), slots.try_acquire(1).unwrap());
        assert!(slots.try_acquire(2).is_none());
        drop(one);
        assert!(slots.try_acquire(2).is_some());
        drop(two);
        assert_eq!(lock(&slots.state).count(), 0);
    }

    #[test]
    fn user_with_least_usage_is_next_whichever_came_first() {
        let slots = slots(2);
        let first = (slots.try_acquire(1).unwrap(), slots.try_acquire(1).unwrap());
        let greedy: Vec<_> = (0..5).map(|_| slots.enqueue(1, running(0))).collect();
        let late = slots.enqueue(2, running(0));
        assert!(!greedy[0].wait_for_offer(NOW) && !late.wait_for_offer(NOW));
        drop(first.0);
        assert!(late.wait_for_offer(NOW) && greedy.iter().all(|entry| !entry.wait_for_offer(NOW)));
        let slot = late.accept().unwrap();
        assert!(slots.try_acquire(3).is_none(), "a queued request is not overtaken");
        drop(first.1);
        // Now each user has at most one slot: the oldest request of the waiting user gets the free
        // one.
        assert!(greedy[0].wait_for_offer(NOW) && !greedy[1].wait_for_offer(NOW));
        drop(slot);
        assert!(greedy[1].wait_for_offer(NOW));
    }

    #[test]
    fn more_users_than_slots_alternate() {
        let slots = slots(1);
        let mut held = slots.try_acquire(9);
        let mut queued: Vec<_> = [1, 1, 1, 2, 2, 3].map(|uid| (uid, slots.enqueue(uid, running(0)))).into();
        let mut order = Vec::new();
        while !queued.is_empty() {
            drop(held.take());
            let at = queued.iter().position(|(_, entry)| entry.wait_for_offer(NOW)).unwrap();
            let (uid, entry) = queued.remove(at);
            held = entry.accept();
            order.push(uid);
        }
        assert_eq!(order, [1, 2, 3, 1, 2, 1]);
    }

    #[test]
    fn latest_usage_report_applies_to_all_requests_of_the_user() {
        let slots = slots(1);
        let held = slots.try_acquire(9).unwrap();
        let (first, other, _last) =
            (slots.enqueue(1, running(0)), slots.enqueue(2, running(2)), slots.enqueue(1, running(5)));
        drop(held);
        assert!(other.wait_for_offer(NOW) && !first.wait_for_offer(NOW));
    }

    #[test]
    fn user_at_the_maximum_does_not_block_others() {
        let slots = Arc::new(Slots::new(Some(3), Some(1), None));
        let held = slots.try_acquire(1).unwrap();
        assert!(slots.try_acquire(1).is_none());
        let waits = slots.enqueue(1, running(0));
        assert!(!waits.wait_for_offer(NOW));
        let other = slots.try_acquire(2).unwrap();
        assert!(slots.enqueue(3, running(9)).wait_for_offer(NOW) && slots.try_acquire(2).is_none());
        drop(held);
        assert!(waits.wait_for_offer(NOW));
        drop(other);
    }

    #[test]
    fn closed_node_assigns_no_slots_until_reopened() {
        let slots = slots(2);
        let held = slots.try_acquire(1).unwrap();
        slots.set_closed(true);
        assert!(slots.try_acquire(2).is_none());
        let waits = slots.enqueue(2, running(0));
        drop(held);
        assert!(!waits.wait_for_offer(NOW));
        slots.set_closed(false);
        assert!(waits.wait_for_offer(NOW));
    }

    #[test]
    fn default_is_one_slot_more_than_cpus() {
        let max = |configured, cpus| lock(&Slots::new(configured, None, Some(cpus)).state).max;
        assert_eq!((max(None, 0.1), max(Some(7), 0.1)), (2, 7));
    }

    #[test]
    fn usage_of_other_nodes_counts() {
        let slots = slots(1);
        let held = slots.try_acquire(9).unwrap();
        let (more, less) = (slots.enqueue(1, running(7)), slots.enqueue(2, running(1)));
        drop(held);
        assert!(less.wait_for_offer(NOW) && !more.wait_for_offer(NOW));
    }

    #[test]
    fn less_recent_cpu_goes_first_and_updates_count() {
        let slots = slots(1);
        let held = slots.try_acquire(9).unwrap();
        let (more, less) = (
            slots.enqueue(1, UserUsage { running: 1, recent_cpu: 900 }),
            slots.enqueue(2, UserUsage { running: 1, recent_cpu: 800 }),
        );
        drop(held);
        assert!(less.wait_for_offer(NOW) && !more.wait_for_offer(NOW));
        let third = slots.enqueue(3, running(1));
        let held = less.accept().unwrap();
        slots.update_usage(1, running(0));
        drop(held);
        assert!(more.wait_for_offer(NOW) && !third.wait_for_offer(NOW));
    }

    #[test]
    fn dropped_request_passes_its_slot_on() {
        let slots = slots(1);
        let held = slots.try_acquire(9).unwrap();
        let (gone, next) = (slots.enqueue(1, running(0)), slots.enqueue(2, running(0)));
        drop(held);
        assert!(gone.wait_for_offer(NOW));
        drop(gone);
        assert!(next.wait_for_offer(NOW));
        drop(next);
        assert!(slots.try_acquire(3).is_some());
        assert!(lock(&slots.state).queue.is_empty());
    }
}
