//! Whose turn it is to have this node's own room.
//!
//! As with the rooms of other nodes it is the turn of the user of whom the fewest commands run anywhere; of several such, of the one
//! who had least in the last ten minutes, and then of the one who was given room here longest ago. Who comes anew overtakes no one with a better claim: else a user whose command has just
//! ended would have that room again and again, since his next command asks before any who waits has looked.

use crate::lock;
use crate::turns::Turns;
use crate::words::Share;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// All who wait.
#[derive(Debug, Default)]
pub(super) struct Line(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    waiting: Vec<Waiting>,
    next: u64,
    turns: Turns,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    uid: u32,
    wake: Arc<OwnedFd>,
}

impl State {
    /// The one whose turn it is. What a user has is asked for once.
    fn first(&self, has: &dyn Fn(u32) -> Share) -> Option<&Waiting> {
        let mut known = HashMap::new();
        let claim = |one: &&Waiting| {
            let has = *known.entry(one.uid).or_insert_with(|| has(one.uid));
            (has, self.turns.last(one.uid), one.number)
        };
        self.waiting.iter().min_by_key(claim)
    }
}

impl Line {
    /// Whether a command of this user may have room that there is, with his place in the line or without; `has` says what a
    /// user has.
    pub(super) fn is_turn(&self, uid: u32, turn: Option<&Turn<'_>>, has: &dyn Fn(u32) -> Share) -> bool {
        let state = lock(&self.0);
        let Some(first) = state.first(has) else { return true };
        match turn {
            Some(turn) => first.number == turn.number,
            // One of his own is as good as this.
            None => {
                first.uid != uid
                    && (has(uid), state.turns.last(uid)) < (has(first.uid), state.turns.last(first.uid))
            }
        }
    }

    /// A place in the line.
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub(super) fn wait(&self, uid: u32) -> rustix::io::Result<Turn<'_>> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut state = lock(&self.0);
        let number = state.next;
        state.next += 1;
        state.waiting.push(Waiting { number, uid, wake: wake.clone() });
        Ok(Turn { line: self, number, wake })
    }

    /// Whether it is the first of its user's.
    pub(super) fn is_first_of(&self, uid: u32, turn: &Turn<'_>) -> bool {
        lock(&self.0).waiting.iter().find(|one| one.uid == uid).is_some_and(|one| one.number == turn.number)
    }

    /// This user has been given room here.
    pub(super) fn give(&self, uid: u32) {
        lock(&self.0).turns.give(uid);
    }

    /// There may be room: has the one look whose turn it is.
    pub(super) fn wake(&self, has: &dyn Fn(u32) -> Share) {
        if let Some(first) = lock(&self.0).first(has) {
            let _full = rustix::io::write(&first.wake, &1u64.to_ne_bytes());
        }
    }
}

/// A place in the line, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    line: &'a Line,
    number: u64,
    wake: Arc<OwnedFd>,
}

impl Turn<'_> {
    /// Readable when its holder is to look.
    pub(super) fn wake(&self) -> &OwnedFd {
        &self.wake
    }

    /// It has looked.
    pub(super) fn looked(&self) {
        let _none = rustix::io::read(&*self.wake, &mut [0; 8]);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.line.0).waiting.retain(|one| one.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOBODY: fn(u32) -> Share = |_| Share { running: 0, lately: 0 };

    #[test]
    fn users_take_turns_however_many_of_theirs_wait() {
        let line = Line::default();
        assert!(line.is_turn(1, None, &NOBODY), "nobody waits");
        line.give(1);
        let mut greedy: Vec<_> = (0..3).map(|_| line.wait(1).unwrap()).collect();
        let mut late: Vec<_> = (0..2).map(|_| line.wait(2).unwrap()).collect();
        let mut order = Vec::new();
        while !(greedy.is_empty() && late.is_empty()) {
            for (uid, turns) in [(1, &mut greedy), (2, &mut late)] {
                if turns.first().is_some_and(|turn| line.is_turn(uid, Some(turn), &NOBODY)) {
                    turns.remove(0);
                    line.give(uid);
                    order.push(uid);
                }
            }
        }
        assert_eq!(order, [2, 1, 2, 1, 1]);
        assert!(lock(&line.0).waiting.is_empty());
    }

    #[test]
    fn who_comes_anew_overtakes_only_who_has_more() {
        let line = Line::default();
        let waits = line.wait(1).unwrap();
        line.give(1);
        assert!(line.is_turn(2, None, &NOBODY), "who never had any");
        line.give(2);
        assert!(!line.is_turn(2, None, &NOBODY) && !line.is_turn(1, None, &NOBODY));
        let more = |uid| Share { running: u32::from(uid == 1), lately: 0 };
        assert!(line.is_turn(2, None, &more) && line.is_turn(1, Some(&waits), &more));
    }

    #[test]
    fn the_one_whose_turn_it_is_is_woken() {
        let line = Line::default();
        let (rich, poor) = (line.wait(1).unwrap(), line.wait(2).unwrap());
        let second = line.wait(1).unwrap();
        assert!(line.is_first_of(1, &rich) && !line.is_first_of(1, &second) && line.is_first_of(2, &poor));
        line.wake(&|uid| Share { running: 0, lately: u32::from(uid == 1) });
        let has_come = |turn: &Turn<'_>| rustix::io::read(turn.wake(), &mut [0; 8]).is_ok();
        assert!(has_come(&poor) && !has_come(&rich));
    }
}
