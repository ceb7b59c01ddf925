//! Who has ordered a command, and what he is told of it until it runs.

use super::gate::{Entered, Gate};
use super::line::Turn;
use crate::board::Entry;
use crate::pieces;
use crate::words::{Said, Wait, Who, Why, kind};
use anyhow::{Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tern_ids::NodeId;

/// How often who waits at the gate looks whether his caller is there.
const PATIENCE: Duration = Duration::from_millis(200);

/// One caller, as long as his command is served.
#[derive(Debug)]
pub(super) struct Caller<'a> {
    pub(super) socket: UnixStream,
    pub(super) pid: i32,
    pub(super) who: Who,
    /// Whether he wants to hear where it runs and what it waits for, before it says anything itself.
    pub(super) told: bool,
    pub(super) entry: Entry,
    /// While a node is looked for.
    pub(super) entered: Option<Entered<'a>>,
    /// While it waits for room, here too.
    pub(super) turn: Option<Turn<'a>>,
}

impl<'a> Caller<'a> {
    pub(super) fn say(&mut self, said: &Said) -> Result<()> {
        Ok(pieces::say(&mut self.socket, kind::SAID, said)?)
    }

    /// It runs, or will at once.
    pub(super) fn chosen(&mut self, node: NodeId, why: Why) -> Result<()> {
        self.entry.runs(node);
        (self.entered, self.turn) = (None, None);
        if self.told { self.say(&Said::Chosen(node, why)) } else { Ok(()) }
    }

    pub(super) fn waits(&mut self, what: Wait) -> Result<()> {
        self.entry.waits();
        if self.told { self.say(&Said::Waits(what)) } else { Ok(()) }
    }

    /// Waits at the gate as long as he does.
    pub(super) fn enter(&mut self, gate: &'a Gate, only: Option<NodeId>) -> Result<()> {
        let who = (self.who.uid, only);
        self.entered = gate.enter(who, Duration::ZERO);
        if self.entered.is_none() {
            self.waits(Wait::Turn)?;
        }
        while self.entered.is_none() {
            self.entered = gate.enter(who, PATIENCE);
            if self.entered.is_none() && self.has_gone() {
                bail!("its caller has gone");
            }
        }
        Ok(())
    }

    fn has_gone(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }
}
