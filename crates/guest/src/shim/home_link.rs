//! The link to home.

use crate::process::outbox::Outbox;
use std::time::{Duration, Instant};
use tern_ids::{Fingerprint, HomePid, NodeId, ShimId};
use tern_migrate::message::{Message, Reassembler, ReceivedMessage, send};
use tern_wire::{Link, LinkError};

/// Interval between the heartbeats that the shim sends home.
pub(super) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Interval between the questions to home's daemon whether home still waits for guests that have
/// lost their link.
const ASK_HOME_INTERVAL: Duration = Duration::from_secs(1);

/// The link to home: at most one connection at a time.
#[derive(Debug)]
pub(super) struct HomeLink {
    node: NodeId,
    fingerprint: Option<Fingerprint>,
    link: Option<Link>,
    /// The sequence number of the connection that became `link`. An older connection whose
    /// handshake completes later does not replace it.
    connection: u64,
    inbox: Reassembler,
    /// Home's shim, known from its first offer.
    shim: Option<ShimId>,
    /// When home's daemon was last asked whether home still waits for the guests.
    last_asked: Instant,
    /// When data last came from home, or home's kernel last acknowledged sent data.
    last_contact: Instant,
    last_heartbeat: Instant,
    /// Whether the last poll found the link readable.
    is_readable: bool,
}

impl HomeLink {
    /// Not connected yet. Home's shim proves its identity by this fingerprint.
    pub(super) fn new(node: NodeId, fingerprint: Option<Fingerprint>) -> Self {
        Self {
            node,
            fingerprint,
            link: None,
            connection: 0,
            inbox: Reassembler::default(),
            shim: None,
            last_asked: Instant::now(),
            last_contact: Instant::now(),
            last_heartbeat: Instant::now(),
            is_readable: true,
        }
    }

    /// Home's node.
    pub(super) fn node(&self) -> NodeId {
        self.node
    }

    pub(super) fn is_connected(&self) -> bool {
        self.link.is_some()
    }

    /// The link itself, for a guest that is sent home over it.
    pub(super) fn link(&mut self) -> Option<&mut Link> {
        self.link.as_mut()
    }

    /// Sends a message about a process or one of its threads. Without a link it is dropped.
    ///
    /// # Errors
    /// If the link is cut.
    pub(super) fn send(&mut self, tag: HomePid, message: &Message) -> Result<(), LinkError> {
        self.link.as_mut().map_or(Ok(()), |link| send(link, tag, message, &[]))
    }

    /// Sends a guest's messages.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub(super) fn send_all(&mut self, outbox: Outbox) -> Result<(), LinkError> {
        outbox.into_messages().try_for_each(|(tag, message)| self.send(tag, &message))
    }

    /// Receives the next part of a message, and the message if it is complete. None if there is
    /// nothing to receive.
    pub(super) fn receive(&mut self) -> Option<Result<Option<ReceivedMessage>, String>> {
        let link = self.link.as_mut().filter(|_| self.is_readable)?;
        let message = match link.receive() {
            Ok(Some(frame)) => {
                let message = self.inbox.take(frame).map_err(|error| error.to_string());
                link.recycle(self.inbox.spare());
                message
            }
            Ok(None) => return None,
            Err(error) => Err(error.to_string()),
        };
        self.last_contact = Instant::now();
        Some(message)
    }

    /// Whether home's shim is at the other end of this link.
    pub(super) fn is_from_home(&self, link: &Link) -> bool {
        link.peer_fingerprint() == self.fingerprint
    }

    /// Whether the connection with this number is older than the one that became the link.
    pub(super) fn is_outdated(&self, connection: u64) -> bool {
        connection < self.connection
    }

    /// Uses a new connection as the link.
    pub(super) fn connect(&mut self, connection: u64, link: Link) {
        self.connection = connection;
        self.link = Some(link);
        self.inbox = Reassembler::default();
        self.last_contact = Instant::now();
    }

    /// Drops the link. Returns whether there was one.
    pub(super) fn disconnect(&mut self) -> bool {
        self.link.take().is_some()
    }

    /// For how long there has been no contact with home, if the link is down.
    pub(super) fn time_unreachable(&self) -> Option<Duration> {
        self.link.is_none().then(|| self.last_contact.elapsed())
    }

    /// Whether a heartbeat is due. The caller sends it.
    pub(super) fn begin_heartbeat(&mut self) -> bool {
        let is_due = self.link.is_some() && self.last_heartbeat.elapsed() > HEARTBEAT_INTERVAL;
        if is_due {
            self.last_heartbeat = Instant::now();
        }
        is_due
    }

    /// For how long home's machine has not acknowledged what was sent to it. A home shim that is
    /// slow does not count as silent, since its kernel still acknowledges.
    pub(super) fn measure_silence(&mut self) -> Duration {
        let silence = self.link.as_mut().map_or(Duration::ZERO, Link::time_without_ack);
        if self.link.is_some() && silence.is_zero() {
            self.last_contact = Instant::now();
        }
        silence
    }

    /// Records home's shim.
    pub(super) fn set_shim(&mut self, shim: ShimId) {
        self.shim = Some(shim);
    }

    /// Home's shim, if a question to home's daemon is due; the caller then sends it. Questions are
    /// due at intervals while the link is down.
    pub(super) fn begin_question(&mut self) -> Option<ShimId> {
        let is_due = self.link.is_none() && self.last_asked.elapsed() > ASK_HOME_INTERVAL;
        let shim = self.shim.filter(|_| is_due)?;
        self.last_asked = Instant::now();
        Some(shim)
    }

    /// Sends what is still unsent, for as long as `timeout` at most.
    pub(super) fn drain(&mut self, timeout: Duration) {
        if let Some(link) = &mut self.link {
            let _best_effort = link.drain(Instant::now() + timeout);
        }
    }

    /// The link, as the main loop polls it.
    pub(super) fn polled(&self) -> Option<&Link> {
        self.link.as_ref()
    }

    /// Records whether the last poll found the link readable.
    pub(super) fn set_readable(&mut self, is_readable: bool) {
        self.is_readable = is_readable;
    }
}
