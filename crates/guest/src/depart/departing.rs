//! The state of a departure.

use std::collections::HashSet;
use std::time::{Duration, Instant};
use tern_ids::{HomePid, MigrationId};
use tern_image::object::ObjectId;
use tern_migrate::source::ProcessSender;
use tern_wire::Link;

/// A guest that is being sent.
#[derive(Debug)]
pub(crate) struct Departing {
    /// The pids of its migration group, including its own; empty if it departs alone.
    pub(crate) group: Vec<HomePid>,
    /// Whether it is ready to stop.
    pub(crate) is_ready: bool,
    /// The shared memory whose content is sent with it.
    pub(crate) carried_objects: HashSet<ObjectId>,
    /// The migration on which it goes home; none if it goes to another node.
    pub(crate) homeward: Option<MigrationId>,
    /// The link to the next node; none if it goes home, over home's link.
    pub(crate) link: Option<Link>,
    /// The state of the transfer.
    pub(crate) sending: ProcessSender,
    /// The last change of the transfer's counters, and their values then.
    pub(crate) last_progress: (Instant, (u64, usize, bool)),
}

/// A guest that has sent its image.
#[derive(Debug)]
pub(crate) struct Frozen {
    /// The shared memory whose content was sent with it.
    pub(crate) carried_objects: HashSet<ObjectId>,
    /// The migration on which it goes home; none if it goes to another node.
    pub(crate) homeward: Option<MigrationId>,
}

impl Departing {
    /// For how long the next node has neither received pending data nor sent an awaited reply. The
    /// link home has its own heartbeats.
    pub(crate) fn time_without_progress(&mut self) -> Duration {
        let Some(link) = &self.link else { return Duration::ZERO };
        let now = (self.sending.bytes(), link.unsent(), self.sending.awaits_answer());
        if now != self.last_progress.1 || (now.1 == 0 && !now.2) {
            self.last_progress = (Instant::now(), now);
        }
        self.last_progress.0.elapsed()
    }
}
