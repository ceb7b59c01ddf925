//! Links between this node and other nodes for guests that migrate onward, and departures that have
//! not begun.

use std::collections::HashMap;
use std::time::{Duration, Instant};
use tern_ids::{Epoch, HomePid};
use tern_migrate::message::{Departure, Reassembler};
use tern_wire::{Link, LinkError};

/// The link from the previous node of a guest that migrates onward to this one.
#[derive(Debug)]
pub(super) struct SourceLink {
    pub(super) link: Link,
    pub(super) inbox: Reassembler,
    /// The guest that it sends, with its new epoch.
    pub(super) incoming: Option<(HomePid, Epoch)>,
}

impl SourceLink {
    /// A new link, on which nothing has been received.
    pub(super) fn new(link: Link) -> Self {
        Self { link, inbox: Reassembler::default(), incoming: None }
    }
}

/// Departures that cannot begin yet, and links of guests that have been sent.
#[derive(Debug, Default)]
pub(super) struct Departures {
    /// Guests that are to migrate onward, while the next node is being connected to.
    connecting: HashMap<HomePid, Departure>,
    /// Guests that depart as soon as home has confirmed their pending writes, with the link to the
    /// next node, if any.
    returning: HashMap<HomePid, (Departure, Option<Link>)>,
    /// Links to the next nodes of guests that were sent onward, until home has decided.
    draining: Vec<DrainingLink>,
}

impl Departures {
    /// Postpones a departure until its next node is connected.
    pub(super) fn await_connection(&mut self, pid: HomePid, departure: Departure) {
        self.connecting.insert(pid, departure);
    }

    /// Takes the departure whose next node is connected. None if it was cancelled, or replaced by
    /// one with another epoch.
    pub(super) fn take_connected(&mut self, pid: HomePid, epoch: Epoch) -> Option<Departure> {
        let is_current =
            |d: &Departure| matches!(d, Departure::Onward { epoch: its_epoch, .. } if *its_epoch == epoch);
        if !self.connecting.get(&pid).is_some_and(is_current) {
            return None;
        }
        self.connecting.remove(&pid)
    }

    /// Postpones a departure until home has confirmed the guest's pending writes.
    pub(super) fn await_confirmation(&mut self, pid: HomePid, departure: Departure, link: Option<Link>) {
        self.returning.insert(pid, (departure, link));
    }

    /// Takes all departures that wait for home's confirmation, to try each again.
    pub(super) fn take_awaiting_confirmation(&mut self) -> Vec<(HomePid, Departure, Option<Link>)> {
        self.returning.drain().map(|(pid, (departure, link))| (pid, departure, link)).collect()
    }

    /// Cancels the departure of a guest if it has not begun. Returns whether the departure was
    /// waiting, and whether it was waiting for home's confirmation.
    pub(super) fn cancel(&mut self, pid: HomePid) -> (bool, bool) {
        let (connecting, returning) = (self.connecting.remove(&pid), self.returning.remove(&pid));
        (connecting.is_some() || returning.is_some(), returning.is_some())
    }

    /// Cancels all departures that have not begun. Returns the guests that waited for home's
    /// confirmation.
    pub(super) fn cancel_all(&mut self) -> Vec<HomePid> {
        self.connecting.clear();
        self.returning.drain().map(|(pid, _)| pid).collect()
    }

    /// Keeps the link to the next node of a guest that has been sent.
    pub(super) fn keep_link(&mut self, pid: HomePid, link: Link) {
        self.draining.push(DrainingLink { pid, link, last_progress: Instant::now(), unsent: 0 });
    }

    /// Drains the links of guests that have been sent. A drained link is kept while home has not
    /// decided (`is_undecided`). After the decision the next node has received everything, or needs
    /// nothing. Returns the guests whose link has failed, or has made no progress for `timeout`,
    /// and why.
    pub(super) fn drain(
        &mut self,
        timeout: Duration,
        is_undecided: impl Fn(HomePid) -> bool,
    ) -> Vec<(HomePid, String)> {
        let mut failed = Vec::new();
        self.draining.retain_mut(|draining| {
            if !is_undecided(draining.pid) {
                return false;
            }
            let why = match draining.drain() {
                Ok(()) if draining.last_progress.elapsed() <= timeout => return true,
                Ok(()) => "the next node does not receive".into(),
                Err(error) => error.to_string(),
            };
            failed.push((draining.pid, why));
            false
        });
        failed
    }

    /// The links that have something to send.
    pub(super) fn unsent_links(&self) -> impl Iterator<Item = &Link> {
        self.draining.iter().map(|draining| &draining.link).filter(|link| link.wants_write())
    }
}

/// The link to the next node of a guest that was sent onward, kept until home has decided.
#[derive(Debug)]
struct DrainingLink {
    pid: HomePid,
    link: Link,
    /// When data was last sent.
    last_progress: Instant,
    unsent: usize,
}

impl DrainingLink {
    /// Sends what can be sent. The link is also read: closing a socket with unread data resets the
    /// connection, and data that the next node has not read yet would be lost.
    fn drain(&mut self) -> Result<(), LinkError> {
        for _ in 0..64 {
            if self.link.receive()?.is_none() {
                break;
            }
        }
        self.link.flush()?;
        if std::mem::replace(&mut self.unsent, self.link.unsent()) != self.link.unsent() {
            self.last_progress = Instant::now();
        }
        Ok(())
    }
}
