//! The connection on which a node asks its leases back.

use super::{EAR, LOOK, Peer};
use crate::message::{ASK, Answer, Ask};
use crate::packing;
use std::time::Instant;
use tern_wire::Link;

impl Peer {
    /// A connection on which to hear what is asked back.
    pub(crate) fn ear(&self) -> Option<Link> {
        Some(self.connect(EAR, 0, Instant::now() + LOOK).ok()?.0)
    }

    /// Asks on the ear, and waits for the answer, with how many leases were asked back by then.
    pub(crate) fn hear(&self, link: &mut Link, number: u64, ask: &Ask) -> Option<(u64, Answer)> {
        let head = tern_wire::encode(ask).ok()?;
        link.send(ASK, number, &[&head], Instant::now() + LOOK).ok()?;
        let frame = packing::unpack(link.recv(Instant::now() + LOOK).ok()?)?;
        (frame.tag == number).then_some(())?;
        tern_wire::decode(&frame.payload).ok()
    }

    /// Says on the ear what is owed, and connects the lanes again whose last answer was given up.
    pub(crate) fn settle(&self, ear: &mut Link, number: u64) -> Option<()> {
        loop {
            let part = self.owed.take();
            if part.is_empty() {
                break;
            }
            if self.hear(ear, number, &Ask::Release(part.beside.clone())).is_none() {
                self.owed.put_back(part);
                return None;
            }
        }
        loop {
            let mut state = self.state();
            let Some(at) = state.idle.iter().position(|lane| lane.untold) else { return Some(()) };
            let mut lane = state.idle.swap_remove(at);
            drop(state);
            lane.link = self.connect(lane.number, lane.given_up, Instant::now() + LOOK).ok();
            let told = lane.link.is_some();
            lane.untold = !told;
            self.give_back(lane);
            told.then_some(())?;
        }
    }
}
