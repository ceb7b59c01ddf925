//! How many commands run here at a time, and whose turn it is.
//!
//! Nobody is turned away: who finds no room waits for it. It is given to the user of whom the fewest commands run, here and (as their
//! homes say) elsewhere; of several such, to the one who had least in the last ten minutes; of several such, to the one who was given some longest
//! ago; of his, to who has waited longest. So users share a node equally, however many commands each of them has and whoever came
//! first, also if there are more users than room.

use crate::lock;
use crate::turns::Turns;
use crate::words::Share;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// How long room is kept for who has been told of it.
const KEPT: Duration = Duration::from_secs(2);

/// All room of this node.
#[derive(Debug)]
pub(super) struct Slots {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    most: usize,
    /// The most of one user.
    each: usize,
    /// There is none for now, however few run.
    closed: bool,
    /// Of each user, how many have room or were told of it.
    taken: HashMap<u32, usize>,
    turns: Turns,
    waiting: Vec<Waiting>,
    next: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    uid: u32,
    /// What his home says that he has elsewhere.
    has: Share,
    /// Since when it has been told that there is room.
    told: Option<Instant>,
}

impl State {
    fn count(&self) -> usize {
        self.taken.values().sum()
    }

    /// Tells those whose turn it is; room that was kept too long is given to others.
    fn settle(&mut self, now: Instant) {
        for at in (0..self.waiting.len()).rev() {
            if self.waiting[at].told.is_some_and(|told| now.duration_since(told) > KEPT) {
                let over = self.waiting.remove(at);
                self.give_back(over.uid);
            }
        }
        while !self.closed && self.count() < self.most {
            let of = |uid| self.taken.get(&uid).copied().unwrap_or(0);
            let may = |one: &Waiting| one.told.is_none() && of(one.uid) < self.each;
            let next = self.waiting.iter().enumerate().filter(|(_, one)| may(one));
            let claim = |one: &Waiting| {
                let running = of(one.uid) as u64 + u64::from(one.has.running);
                (running, one.has.lately, self.turns.last(one.uid), one.number)
            };
            let next = next.min_by_key(|(_, one)| claim(one));
            let Some((at, uid)) = next.map(|(at, one)| (at, one.uid)) else { break };
            self.give(uid);
            self.waiting[at].told = Some(now);
        }
    }

    /// What was heard last is true of all of his.
    fn hear(&mut self, uid: u32, has: Share) {
        self.waiting.iter_mut().filter(|one| one.uid == uid).for_each(|one| one.has = has);
    }

    fn give(&mut self, uid: u32) {
        self.turns.give(uid);
        *self.taken.entry(uid).or_default() += 1;
    }

    fn give_back(&mut self, uid: u32) {
        if let Some(count) = self.taken.get_mut(&uid) {
            *count -= 1;
            if *count == 0 {
                self.taken.remove(&uid);
            }
        }
    }
}

impl Slots {
    /// So many as are said, or one for each CPU and one more: while one waits for its files another computes. Of one user so many, or all.
    pub(super) fn new(most: Option<u32>, each: Option<u32>, cpus: Option<f64>) -> Self {
        let all = std::thread::available_parallelism().map_or(1, |all| all.get() as u32);
        let cpus = cpus.map_or(all, |cpus| all.min(cpus.ceil() as u32));
        let most = most.unwrap_or(cpus + 1).max(1) as usize;
        let each = each.map_or(most, |each| each.max(1) as usize);
        let (taken, turns) = (HashMap::new(), Turns::default());
        let state = State { most, each, closed: false, taken, turns, waiting: Vec::new(), next: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Room at once, if there is some and nobody waits.
    pub(super) fn take(self: &Arc<Self>, uid: u32) -> Option<Slot> {
        let mut state = lock(&self.state);
        state.settle(Instant::now());
        let of = |uid| state.taken.get(&uid).copied().unwrap_or(0);
        // Who has as many as he may have waits, and holds up nobody.
        let others = |one: &Waiting| one.told.is_none() && of(one.uid) < state.each;
        if state.closed
            || state.count() >= state.most
            || of(uid) >= state.each
            || state.waiting.iter().any(others)
        {
            return None;
        }
        state.give(uid);
        Some(Slot { slots: self.clone(), uid })
    }

    /// Waits in line, for a user who has so much elsewhere.
    pub(super) fn wait(self: &Arc<Self>, uid: u32, has: Share) -> Claim {
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        state.hear(uid, has);
        state.waiting.push(Waiting { number, uid, has, told: None });
        state.settle(Instant::now());
        Claim { slots: self.clone(), number, uid }
    }

    /// A user who waits has so much elsewhere now.
    pub(super) fn hear(&self, uid: u32, has: Share) {
        self.change(|state| state.hear(uid, has));
    }

    /// Whether nobody else gets room for now. Who has some, or was told of it, keeps it.
    pub(super) fn close(&self, closed: bool) {
        if lock(&self.state).closed != closed {
            self.change(|state| state.closed = closed);
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        change(&mut state);
        state.settle(Instant::now());
        drop(state);
        self.changed.notify_all();
    }
}

/// Room for one command, until it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Arc<Slots>,
    uid: u32,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.change(|state| state.give_back(self.uid));
    }
}

/// A place in the line, until it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    slots: Arc<Slots>,
    number: u64,
    uid: u32,
}

impl Claim {
    /// Waits so long for its turn; whether that has come.
    pub(super) fn has_come(&self, most: Duration) -> bool {
        let is_told =
            |state: &State| state.waiting.iter().any(|one| one.number == self.number && one.told.is_some());
        let mut state = lock(&self.slots.state);
        state.settle(Instant::now());
        if is_told(&state) {
            return true;
        }
        let waited = self.slots.changed.wait_timeout(state, most);
        waited.is_ok_and(|(state, _)| is_told(&state))
    }

    /// The room that it was told of, if that has been kept.
    pub(super) fn slot(self) -> Option<Slot> {
        let mut state = lock(&self.slots.state);
        let at = state.waiting.iter().position(|one| one.number == self.number && one.told.is_some())?;
        state.waiting.remove(at);
        drop(state);
        Some(Slot { slots: self.slots.clone(), uid: self.uid })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.slots.change(|state| {
            if let Some(at) = state.waiting.iter().position(|one| one.number == self.number) {
                let one = state.waiting.remove(at);
                if one.told.is_some() {
                    state.give_back(one.uid);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(most: u32) -> Arc<Slots> {
        Arc::new(Slots::new(Some(most), None, None))
    }

    fn runs(running: u32) -> Share {
        Share { running, lately: 0 }
    }

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn there_is_so_much_room_and_no_more() {
        let slots = slots(2);
        let (one, two) = (slots.take(1).unwrap(), slots.take(1).unwrap());
        assert!(slots.take(2).is_none());
        drop(one);
        assert!(slots.take(2).is_some());
        drop(two);
        assert_eq!(lock(&slots.state).count(), 0);
    }

    #[test]
    fn who_has_least_is_next_whoever_came_first() {
        let slots = slots(2);
        let first = (slots.take(1).unwrap(), slots.take(1).unwrap());
        let greedy: Vec<_> = (0..5).map(|_| slots.wait(1, runs(0))).collect();
        let late = slots.wait(2, runs(0));
        assert!(!greedy[0].has_come(NOW) && !late.has_come(NOW));
        drop(first.0);
        assert!(late.has_come(NOW) && greedy.iter().all(|claim| !claim.has_come(NOW)));
        let room = late.slot().unwrap();
        assert!(slots.take(3).is_none(), "nobody overtakes who waits");
        drop(first.1);
        // Now each has one, or none: the oldest claim of the one who waits.
        assert!(greedy[0].has_come(NOW) && !greedy[1].has_come(NOW));
        drop(room);
        assert!(greedy[1].has_come(NOW));
    }

    #[test]
    fn more_users_than_room_take_turns() {
        let slots = slots(1);
        let mut held = slots.take(9);
        let mut claims: Vec<_> = [1, 1, 1, 2, 2, 3].map(|uid| (uid, slots.wait(uid, runs(0)))).into();
        let mut order = Vec::new();
        while !claims.is_empty() {
            drop(held.take());
            let at = claims.iter().position(|(_, claim)| claim.has_come(NOW)).unwrap();
            let (uid, claim) = claims.remove(at);
            held = claim.slot();
            order.push(uid);
        }
        assert_eq!(order, [1, 2, 3, 1, 2, 1]);
    }

    #[test]
    fn what_is_heard_of_a_user_last_is_true_of_all_who_wait_for_him() {
        let slots = slots(1);
        let held = slots.take(9).unwrap();
        let (first, other, _last) = (slots.wait(1, runs(0)), slots.wait(2, runs(2)), slots.wait(1, runs(5)));
        drop(held);
        assert!(other.has_come(NOW) && !first.has_come(NOW));
    }

    #[test]
    fn who_has_as_many_as_he_may_holds_up_nobody() {
        let slots = Arc::new(Slots::new(Some(3), Some(1), None));
        let held = slots.take(1).unwrap();
        assert!(slots.take(1).is_none());
        let waits = slots.wait(1, runs(0));
        assert!(!waits.has_come(NOW));
        let other = slots.take(2).unwrap();
        assert!(slots.wait(3, runs(9)).has_come(NOW) && slots.take(2).is_none());
        drop(held);
        assert!(waits.has_come(NOW));
        drop(other);
    }

    #[test]
    fn what_is_closed_has_no_room_until_it_is_open_again() {
        let slots = slots(2);
        let held = slots.take(1).unwrap();
        slots.close(true);
        assert!(slots.take(2).is_none());
        let waits = slots.wait(2, runs(0));
        drop(held);
        assert!(!waits.has_come(NOW));
        slots.close(false);
        assert!(waits.has_come(NOW));
    }

    #[test]
    fn of_a_part_of_the_cpus_there_is_as_much_room_and_one_more() {
        let most = |said, cpus| lock(&Slots::new(said, None, Some(cpus)).state).most;
        assert_eq!((most(None, 0.1), most(Some(7), 0.1)), (2, 7));
    }

    #[test]
    fn who_runs_much_elsewhere_waits() {
        let slots = slots(1);
        let held = slots.take(9).unwrap();
        let (rich, poor) = (slots.wait(1, runs(7)), slots.wait(2, runs(1)));
        drop(held);
        assert!(poor.has_come(NOW) && !rich.has_come(NOW));
    }

    #[test]
    fn who_had_less_lately_is_first_and_what_is_heard_meanwhile_counts() {
        let slots = slots(1);
        let held = slots.take(9).unwrap();
        let (more, less) = (
            slots.wait(1, Share { running: 1, lately: 900 }),
            slots.wait(2, Share { running: 1, lately: 800 }),
        );
        drop(held);
        assert!(less.has_come(NOW) && !more.has_come(NOW));
        let third = slots.wait(3, runs(1));
        let held = less.slot().unwrap();
        slots.hear(1, runs(0));
        drop(held);
        assert!(more.has_come(NOW) && !third.has_come(NOW));
    }

    #[test]
    fn who_gives_up_leaves_no_gap() {
        let slots = slots(1);
        let held = slots.take(9).unwrap();
        let (gone, next) = (slots.wait(1, runs(0)), slots.wait(2, runs(0)));
        drop(held);
        assert!(gone.has_come(NOW));
        drop(gone);
        assert!(next.has_come(NOW));
        drop(next);
        assert!(slots.take(3).is_some());
        assert!(lock(&slots.state).waiting.is_empty());
    }
}
