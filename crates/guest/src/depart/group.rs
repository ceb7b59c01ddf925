//! Guests that share memory depart together.
//!
//! Home names the members of the group. Each sends its own memory while it runs. A guest that is
//! ready to stop keeps running until all others are ready. Then all are stopped. Only after that is
//! each shared object read, once, by the first guest that gets to it. So no shared page is sent
//! before its last write. Home restores none of them before it has all images, so it never restores
//! a part of the group.

use crate::process::Guest;
use crate::process::shared::State;
use std::collections::HashSet;
use tern_ids::HomePid;
use tern_image::object::ObjectId;

/// The progress of the other guests in the group that a guest departs with.
#[derive(Debug)]
pub(crate) struct GroupProgress {
    /// All others are ready to stop.
    pub(crate) others_ready: bool,
    /// All others are stopped.
    pub(crate) others_stopped: bool,
    /// The shared memory that others have sent, or are sending.
    pub(crate) carried_by_others: HashSet<ObjectId>,
}

impl GroupProgress {
    /// For a guest that departs alone.
    #[must_use]
    pub(crate) fn alone() -> Self {
        Self { others_ready: true, others_stopped: true, carried_by_others: HashSet::new() }
    }

    /// The progress of the group that this guest departs with, as seen from it. `member` finds the
    /// guests of this node.
    pub(crate) fn of<'a>(pid: HomePid, member: impl Fn(HomePid) -> Option<&'a Guest>) -> Self {
        let mut group = Self::alone();
        let Some(State::Departing(departing)) = member(pid).map(|guest| &guest.process.state) else {
            return group;
        };
        for other in departing.group.iter().filter(|other| **other != pid) {
            // A missing member has ended, here and at home. It cannot be a child that is still
            // being created, because the parent cannot be stopped until the child exists.
            let Some(guest) = member(*other) else { continue };
            let (ready, stopped) = match &guest.process.state {
                State::Departing(other) => {
                    group.carried_by_others.extend(&other.carried_objects);
                    (other.is_ready, other.sending.frozen.is_some() && guest.are_all_stopped())
                }
                State::Frozen(other) => {
                    group.carried_by_others.extend(&other.carried_objects);
                    (true, guest.are_all_stopped())
                }
                _ => (false, false),
            };
            group.others_ready &= ready;
            group.others_stopped &= stopped;
        }
        group
    }
}
