//! Guests that share memory depart together.
//!
//! Home names the members of the group. Each sends its own memory while it runs. A guest that is
//! ready to stop keeps running until all others are ready. Then all are stopped. Only after that is
//! each shared object read, once, by the first guest that gets to it. So no shared page is sent
//! before its last write. Home restores none of them before it has all images, so it never restores
//! a part of the group.

use crate::process::State;
use crate::shim::Shim;
use std::collections::HashSet;
use tern_ids::HomePid;
use tern_image::object::ObjectId;

/// The state of the other guests of a migration group, as seen from one of them.
#[derive(Debug)]
pub(crate) struct MigrationGroup {
    /// All others are ready to stop.
    pub(crate) are_ready: bool,
    /// All others are stopped.
    pub(crate) are_stopped: bool,
    /// Shared memory that others have sent, or are sending.
    pub(crate) carried: HashSet<ObjectId>,
}

impl MigrationGroup {
    /// For a guest that departs alone.
    #[must_use]
    pub(crate) fn none() -> Self {
        Self { are_ready: true, are_stopped: true, carried: HashSet::new() }
    }
}

impl Shim {
    /// How far the others of this guest's group are.
    pub(crate) fn migration_group(&self, pid: HomePid) -> MigrationGroup {
        let mut group = MigrationGroup::none();
        let Some(State::Departing(departing)) = self.guests.get(&pid).map(|m| &m.process.state) else {
            return group;
        };
        for other in departing.group.iter().filter(|other| **other != pid) {
            // A missing member has ended, here and at home. A child that is still being created
            // keeps its parent from being stopped.
            let Some(guest) = self.guests.get(other) else { continue };
            let (are_ready, are_stopped) = match &guest.process.state {
                State::Departing(other) => {
                    group.carried.extend(&other.carried);
                    (other.is_ready, other.sending.frozen.is_some() && guest.are_all_stopped())
                }
                State::Frozen => {
                    group.carried.extend(&guest.process.carried_objects);
                    (true, guest.are_all_stopped())
                }
                _ => (false, false),
            };
            group.are_ready &= are_ready;
            group.are_stopped &= are_stopped;
        }
        group
    }
}
