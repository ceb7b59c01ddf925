//! The queue for this node's own slots.
//!
//! As on other nodes, the next slot goes to the user with the fewest running commands anywhere;
//! among equals to the one with the least CPU use in the last ten minutes, then to the one whose
//! last slot here is the longest ago. A new command does not overtake a queued one with a better
//! claim. Otherwise a user whose command has just ended would get that slot again and again, since
//! the user's next command asks before any queued one has woken up.

use crate::fairness::LastServed;
use crate::lock;
use crate::messages::UserUsage;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// The queue.
#[derive(Debug, Default)]
pub(super) struct LocalQueue(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    entries: Vec<QueueEntry>,
    next: u64,
    last_served: LastServed,
}

#[derive(Debug)]
struct QueueEntry {
    number: u64,
    uid: u32,
    event: Arc<OwnedFd>,
}

impl State {
    /// The next entry. `usage_of` is called once for each user.
    fn first(&self, usage_of: &dyn Fn(u32) -> UserUsage) -> Option<&QueueEntry> {
        let mut usages = HashMap::new();
        let rank = |entry: &&QueueEntry| {
            let usage = *usages.entry(entry.uid).or_insert_with(|| usage_of(entry.uid));
            (usage, self.last_served.last(entry.uid), entry.number)
        };
        self.entries.iter().min_by_key(rank)
    }
}

impl LocalQueue {
    /// Whether a command of this user may take a free slot, with its place in the queue or without
    /// one. `usage_of` returns the usage of a user.
    pub(super) fn is_next(
        &self,
        uid: u32,
        place: Option<&QueuePlace<'_>>,
        usage_of: &dyn Fn(u32) -> UserUsage,
    ) -> bool {
        let state = lock(&self.0);
        let Some(first) = state.first(usage_of) else { return true };
        match place {
            Some(place) => first.number == place.number,
            // A queued command of the same user goes first.
            None => {
                first.uid != uid
                    && (usage_of(uid), state.last_served.last(uid))
                        < (usage_of(first.uid), state.last_served.last(first.uid))
            }
        }
    }

    /// Enters the queue.
    ///
    /// # Errors
    /// If no file descriptors are left.
    pub(super) fn enqueue(&self, uid: u32) -> rustix::io::Result<QueuePlace<'_>> {
        let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut state = lock(&self.0);
        let number = state.next;
        state.next += 1;
        state.entries.push(QueueEntry { number, uid, event: event.clone() });
        Ok(QueuePlace { queue: self, number, event })
    }

    /// Whether it is the first entry of its user.
    pub(super) fn is_first_of_user(&self, uid: u32, place: &QueuePlace<'_>) -> bool {
        lock(&self.0)
            .entries
            .iter()
            .find(|entry| entry.uid == uid)
            .is_some_and(|entry| entry.number == place.number)
    }

    /// Records that this user has got a slot here.
    pub(super) fn record_served(&self, uid: u32) {
        lock(&self.0).last_served.record(uid);
    }

    /// A slot may be free: wakes the next entry's waiter.
    pub(super) fn wake_next(&self, usage_of: &dyn Fn(u32) -> UserUsage) {
        if let Some(first) = lock(&self.0).first(usage_of) {
            let _full = rustix::io::write(&first.event, &1u64.to_ne_bytes());
        }
    }
}

/// A place in the queue, until it is dropped.
#[derive(Debug)]
pub(super) struct QueuePlace<'a> {
    queue: &'a LocalQueue,
    number: u64,
    event: Arc<OwnedFd>,
}

impl QueuePlace<'_> {
    /// An eventfd that is readable when the waiter should check for a slot.
    pub(super) fn event(&self) -> &OwnedFd {
        &self.event
    }

    /// Resets the eventfd.
    pub(super) fn clear_event(&self) {
        let _none = rustix::io::read(&*self.event, &mut [0; 8]);
    }
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        lock(&self.queue.0).entries.retain(|entry| entry.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_USAGE: fn(u32) -> UserUsage = |_| UserUsage { running: 0, recent_cpu: 0 };

    #[test]
    fn users_alternate_however_many_commands_each_has_queued() {
        let queue = LocalQueue::default();
        assert!(queue.is_next(1, None, &NO_USAGE), "nothing is queued");
        queue.record_served(1);
        let mut greedy: Vec<_> = (0..3).map(|_| queue.enqueue(1).unwrap()).collect();
        let mut late: Vec<_> = (0..2).map(|_| queue.enqueue(2).unwrap()).collect();
        let mut order = Vec::new();
        while !(greedy.is_empty() && late.is_empty()) {
            for (uid, places) in [(1, &mut greedy), (2, &mut late)] {
                if places.first().is_some_and(|place| queue.is_next(uid, Some(place), &NO_USAGE)) {
                    places.remove(0);
                    queue.record_served(uid);
                    order.push(uid);
                }
            }
        }
        assert_eq!(order, [2, 1, 2, 1, 1]);
        assert!(lock(&queue.0).entries.is_empty());
    }

    #[test]
    fn new_command_overtakes_only_users_with_more_usage() {
        let queue = LocalQueue::default();
        let waits = queue.enqueue(1).unwrap();
        queue.record_served(1);
        assert!(queue.is_next(2, None, &NO_USAGE), "a user without a slot so far");
        queue.record_served(2);
        assert!(!queue.is_next(2, None, &NO_USAGE) && !queue.is_next(1, None, &NO_USAGE));
        let more = |uid| UserUsage { running: u32::from(uid == 1), recent_cpu: 0 };
        assert!(queue.is_next(2, None, &more) && queue.is_next(1, Some(&waits), &more));
    }

    #[test]
    fn next_in_the_queue_is_woken() {
        let queue = LocalQueue::default();
        let (more, less) = (queue.enqueue(1).unwrap(), queue.enqueue(2).unwrap());
        let second = queue.enqueue(1).unwrap();
        assert!(
            queue.is_first_of_user(1, &more)
                && !queue.is_first_of_user(1, &second)
                && queue.is_first_of_user(2, &less)
        );
        queue.wake_next(&|uid| UserUsage { running: 0, recent_cpu: u32::from(uid == 1) });
        let is_woken = |place: &QueuePlace<'_>| rustix::io::read(place.event(), &mut [0; 8]).is_ok();
        assert!(is_woken(&less) && !is_woken(&more));
    }
}
