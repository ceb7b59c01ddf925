//! Guests that share memory depart together.
//!
//! Home says who they are. Each sends its own memory while it runs; the first that is ready to stand waits, running, until
//! all are. Then all are brought to a stand, and only when everybody stands is what they share read: by whoever comes
//! first, once. So no page of it is sent that somebody writes afterwards, and home, which takes none of them in before it
//! has the images of all, never has a part of them.

use crate::family::Family;
use crate::member::State;
use std::collections::HashSet;
use tern_ids::HomePid;
use tern_image::object::ObjectId;

/// Those with whom a guest departs, seen from that one.
#[derive(Debug)]
pub struct Company {
    /// All others are ready to stand.
    pub ready: bool,
    /// All others stand.
    pub stands: bool,
    /// What others of them have sent, or are sending.
    pub taken: HashSet<ObjectId>,
}

impl Company {
    /// Of a guest that departs alone.
    #[must_use]
    pub fn none() -> Self {
        Self { ready: true, stands: true, taken: HashSet::new() }
    }
}

impl Family {
    /// How far those are with whom this guest departs.
    pub(crate) fn company(&self, pid: HomePid) -> Company {
        let mut company = Company::none();
        let Some(State::Departing(departing)) = self.members.get(&pid).map(|m| &m.process.state) else {
            return company;
        };
        for other in departing.together.iter().filter(|other| **other != pid) {
            // It has ended, here and at home. One that is just being born keeps its parent from standing.
            let Some(member) = self.members.get(other) else { continue };
            let (ready, stands) = match &member.process.state {
                State::Departing(other) => {
                    company.taken.extend(&other.carries);
                    (other.ready, other.sending.frozen.is_some() && member.stands())
                }
                State::Frozen => {
                    company.taken.extend(&member.process.carried);
                    (true, member.stands())
                }
                _ => (false, false),
            };
            company.ready &= ready;
            company.stands &= stands;
        }
        company
    }
}
