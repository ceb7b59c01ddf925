//! The state of a process: at home, away, or at a stage of a move.

use crate::links::peers::PeerId;
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::time::Instant;
use tern_control::Destination;
use tern_control::control_socket::PendingRequest;
use tern_ids::{HomePid, MigrationId, NodeId};
use tern_image::ProcessImage;
use tern_image::layout::Layout;
use tern_image::object::ObjectId;
use tern_migrate::message::{Message, ProcessSync, ReceivedMessage};
use tern_migrate::source::{MemorySender, ProcessSender};

/// Where a process is.
#[derive(Debug)]
pub(crate) enum State {
    /// At home; about to leave if it has a `task`.
    Resident,
    /// At home, held until it has executed its program.
    AtExec,
    /// Leaving; it runs at home until it is frozen.
    Outgoing(Box<Outgoing>),
    /// Its guest was sent `Go`. Holds what is needed to revoke the hand-over until the guest is
    /// known to run.
    HandedOver(Box<Outgoing>),
    /// Away. The local process is its deputy.
    Away,
    /// Away, and moving to the node of this peer.
    Remigrating(PeerId),
    /// Away; its new guest (at the process's peer) was sent `Go`. The guest of the
    /// previous peer is kept frozen until the new one is known to run.
    Switching(PeerId),
    /// Its hand-over was revoked, for this reason: it becomes the process of this image again as soon
    /// as its deputy threads have stopped.
    Revoked(Box<(ProcessImage, ProcessSync)>, String),
    /// Away, coming home.
    Returning(Box<Returning>),
    /// At home, except that the deputies of some threads are still making their last calls. The
    /// other threads have been detached.
    Draining,
}

/// A move in progress.
#[derive(Debug)]
pub(crate) struct MigrationTask {
    pub(crate) migration: MigrationId,
    /// The caller that waits for it, and the destination it asked for; none for moves that the shim
    /// began by itself.
    pub(crate) caller: Option<(PendingRequest, Destination)>,
    pub(crate) from: NodeId,
    pub(crate) started_at: Instant,
    pub(crate) frozen_at: Option<Instant>,
    pub(crate) bytes: u64,
}

impl MigrationTask {
    pub(crate) fn new(caller: Option<(PendingRequest, Destination)>, from: NodeId) -> Self {
        let mut id = [0; 16];
        let flags = rustix::rand::GetRandomFlags::empty();
        let _always_enough = rustix::rand::getrandom(&mut id, flags);
        Self {
            migration: MigrationId(id),
            caller,
            from,
            started_at: Instant::now(),
            frozen_at: None,
            bytes: 0,
        }
    }
}

/// A process that is leaving home.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// The peer that will hold it.
    pub(crate) peer: PeerId,
    /// That peer has accepted it.
    pub(crate) is_accepted: bool,
    pub(crate) source: Option<MemorySender>,
    pub(crate) sending: Option<ProcessSender>,
    /// Address range of its vDSO. No thread may be stopped in it, since the destination may have
    /// another vDSO.
    pub(crate) vdso: std::ops::Range<u64>,
    /// The captured image, and the state of its calls and signals.
    pub(crate) image: Option<Box<(ProcessImage, ProcessSync)>>,
    /// It is ready to be frozen.
    pub(crate) ready: bool,
    /// From when it can be frozen, since the waits of its threads are measured then
    /// (`migrate::home_wait`). None until the measurement begins.
    pub(crate) measured_at: Option<Instant>,
    /// The shared memory whose content is sent with it.
    pub(crate) carried_objects: HashSet<ObjectId>,
    /// The memory that it shares, as described when it was stopped.
    pub(crate) live_objects: HashSet<ObjectId>,
    /// Everything has arrived at the destination.
    pub(crate) arrived: bool,
}

/// A process that is coming home.
#[derive(Debug, Default)]
pub(crate) struct Returning {
    /// Its guest has announced this departure, so the parts that arrive belong to this departure.
    pub(crate) has_departed: bool,
    /// The address space that was last built for it here.
    pub(crate) layout: Layout,
    pub(crate) bytes: u64,
    /// Pages of its arguments and environment that are to be dropped and were not sent again since.
    /// `ps` reads these pages, and so may a call that the deputy is still making. So they stay
    /// until the process is restored.
    pub(crate) dropped_pages: BTreeSet<u64>,
    /// Parts that wait until a thread of the deputy can be stopped.
    pub(crate) waiting: VecDeque<ReceivedMessage>,
    /// Its image, while others of its group are still on their way, or while a thread of the deputy
    /// has not stopped yet.
    pub(crate) arrived: Option<Box<(ProcessImage, ProcessSync)>>,
}

/// The progress of a freeze.
#[derive(Debug)]
pub(crate) enum Frozen {
    /// It is to be frozen as soon as it is home with no call pending.
    Requested,
    /// It is frozen. On continue, this thread is detached with this signal.
    Stopped(HomePid, i32),
}

/// A process whose group comes home, or has come home, without it.
#[derive(Debug)]
pub(crate) struct LeftBehind {
    /// The group's journey, while it lasts.
    journey: Option<MigrationId>,
    /// The result for each of its threads that was kept back.
    results: BTreeMap<HomePid, Message>,
}

impl LeftBehind {
    /// Its group comes home on this journey.
    pub(crate) fn on(journey: MigrationId) -> Self {
        Self { journey: Some(journey), results: BTreeMap::new() }
    }

    pub(crate) fn is_on(&self, journey: MigrationId) -> bool {
        self.journey == Some(journey)
    }

    pub(crate) fn is_group_home(&self) -> bool {
        self.journey.is_none()
    }

    pub(crate) fn group_is_home(&mut self) {
        self.journey = None;
    }

    /// Keeps the result for a thread until it is known whether the group comes home.
    pub(crate) fn keep_result(&mut self, tid: HomePid, result: Message) {
        self.results.insert(tid, result);
    }

    pub(crate) fn into_results(self) -> BTreeMap<HomePid, Message> {
        self.results
    }
}
