//! Whose turn it is to have this node's own room.
//!
//! As with the rooms of other nodes it is the turn of the user of whom the fewest commands run anywhere; of several such, of the one
//! who was given room here longest ago. Who comes anew overtakes no one with a better claim: else a user whose command has just
//! ended would have that room again and again, since his next command asks before any who waits has looked.

use crate::lock;
use crate::turns::Turns;
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
    /// The one whose turn it is. Users, of whom so many run, are asked for once each.
    fn first(&self, running: &dyn Fn(u32) -> u32) -> Option<&Waiting> {
        let mut known = HashMap::new();
        let claim = |one: &&Waiting| {
            let runs = *known.entry(one.uid).or_insert_with(|| running(one.uid));
            (runs, self.turns.last(one.uid), one.number)
        };
        self.waiting.iter().min_by_key(claim)
    }
}

impl Line {
    /// Whether a command of this user may have room that there is, with his place in the line or without; `running` says how many
    /// of a user's run.
    pub(super) fn is_turn(&self, uid: u32, turn: Option<&Turn<'_>>, running: &dyn Fn(u32) -> u32) -> bool {
        let state = lock(&self.0);
        let Some(first) = state.first(running) else { return true };
        match turn {
            Some(turn) => first.number == turn.number,
            // One of his own is as good as this.
            None => {
                first.uid != uid
                    && (running(uid), state.turns.last(uid))
                        < (running(first.uid), state.turns.last(first.uid))
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

    /// This user has been given room here.
    pub(super) fn give(&self, uid: u32) {
        lock(&self.0).turns.give(uid);
    }

    /// There may be room: has the one look whose turn it is.
    pub(super) fn wake(&self, running: &dyn Fn(u32) -> u32) {
        if let Some(first) = lock(&self.0).first(running) {
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

    const NOBODY: fn(u32) -> u32 = |_| 0;

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
        let more = |uid| u32::from(uid == 1);
        assert!(line.is_turn(2, None, &more) && line.is_turn(1, Some(&waits), &more));
    }

    #[test]
    fn the_one_whose_turn_it_is_is_woken() {
        let line = Line::default();
        let (rich, poor) = (line.wait(1).unwrap(), line.wait(2).unwrap());
        line.wake(&|uid| u32::from(uid == 1));
        let has_come = |turn: &Turn<'_>| rustix::io::read(turn.wake(), &mut [0; 8]).is_ok();
        assert!(has_come(&poor) && !has_come(&rich));
    }
}
