//! Worker threads for operations that may take seconds: TLS handshakes, and requests to the node's
//! daemon. A peer that never replies blocks only its own worker.

pub(crate) mod daemon;
mod readiness;

use crate::files::connections::{MoveRequest, Moved};
use crate::files::local::{LocalFile, LocalNode, OpenRequest};
use daemon::request_daemon;
use readiness::ReadinessSource;
use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use tern_control::{Reply, Request};
use tern_ids::{ContentHash, Epoch, Fingerprint, HomePid, NodeId, ShimId};
use tern_image::FileRef;
use tern_image::content::ContentReader;
use tern_image::content::{KeptContent, OpenedFile};
use tern_image::object::{ObjectId, seal_unmapped};
use tern_readiness::ReadinessFile;
use tern_tracee::{procfs, threads};
use tern_wire::{Ephemeral, Link};

/// How long the handshake of an incoming connection may take, on a busy machine too.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit for concurrent workers of a kind. It bounds the threads that incoming connections start.
const MAX_WORKERS: usize = 16;

/// How often the content of mapped files is compared with the mappings of the guests. Reading 65,000
/// mappings takes a worker some 40 ms.
const CONTENT_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The result of a worker.
#[derive(Debug)]
pub(crate) enum WorkerEvent {
    /// The incoming connection with this number has completed its handshake.
    Accepted(u64, Box<Link>),
    /// The connection to the next node of a departing guest, or why it failed.
    Connected(HomePid, Epoch, Result<Box<Link>, String>),
    /// This node's file server has opened a file for a guest, or has failed to. Includes the number
    /// of the opening.
    Opened(HomePid, u64, io::Result<LocalFile>),
    /// This node's tern-net has moved a connection of a guest, or has failed to. Includes the number
    /// of the move.
    ConnectionMoved(HomePid, u64, Moved),
    /// Readiness files for a guest, with the number of its request.
    ReadinessFilesOpened(HomePid, u64, io::Result<Vec<ReadinessFile>>),
    /// The mapped files that this node could open itself.
    MappedFilesOpened(MappingUser, Vec<OpenedFile>),
    /// No process maps these pieces of shared memory.
    Unmapped(Vec<ObjectId>),
    /// None of these guests (their host pids) maps this content.
    UnmappedContent(KeptContent, Vec<i32>),
    /// Home's daemon reports that home no longer waits for guests of these epochs.
    NotAwaited(Vec<(HomePid, Epoch)>),
}

/// The arrival or the call that waits for mapped files to be opened.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MappingUser {
    /// An arriving guest.
    Arrival {
        pid: HomePid,
        epoch: Epoch,
        /// The number of its layout: the guest may have received another layout meanwhile.
        layout: u64,
        /// Whether another node than home sends it.
        has_source: bool,
    },
    /// A thread's mmap of a file with this hash.
    Call(HomePid, ContentHash),
}

/// The worker threads of one shim.
#[derive(Debug)]
pub(crate) struct Workers {
    key: Arc<Ephemeral>,
    accepted_keys: Vec<Fingerprint>,
    events: (Sender<WorkerEvent>, Receiver<WorkerEvent>),
    waker: Arc<OwnedFd>,
    connections: u64,
    readiness: Arc<ReadinessSource>,
    handshakes: Arc<AtomicUsize>,
    daemon_requests: Arc<AtomicUsize>,
    openings: Arc<AtomicUsize>,
    mapped_openings: Arc<AtomicUsize>,
    memory_checks: Arc<AtomicUsize>,
    content_checks: Arc<AtomicUsize>,
    content_checked_at: Instant,
}

impl Workers {
    /// For a shim with this key, which accepts peers with these fingerprints.
    ///
    /// # Errors
    /// If there are too many descriptors.
    pub(crate) fn new(key: Ephemeral, accepted_keys: Vec<Fingerprint>) -> io::Result<Self> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let waker = Arc::new(rustix::event::eventfd(0, flags)?);
        let (handshakes, daemon_requests, openings, mapped_openings, memory_checks, content_checks) =
            Default::default();
        Ok(Self {
            key: Arc::new(key),
            accepted_keys,
            events: channel(),
            waker,
            connections: 0,
            readiness: Arc::default(),
            handshakes,
            daemon_requests,
            openings,
            mapped_openings,
            memory_checks,
            content_checks,
            content_checked_at: Instant::now(),
        })
    }

    /// Takes the results that are available.
    pub(crate) fn events(&self) -> Vec<WorkerEvent> {
        // The eventfd is cleared first, so that no result is missed.
        let mut count = [0; 8];
        let _was_not_rung = rustix::io::read(&self.waker, &mut count);
        self.events.1.try_iter().collect()
    }

    /// Starts the handshake of an incoming connection.
    pub(crate) fn accept(&mut self, socket: TcpStream) {
        let tls = match tern_wire::pinned_server(&self.key, &self.accepted_keys) {
            Ok(tls) => tls,
            Err(error) => return tracing::error!(%error, "no connection can be accepted"),
        };
        self.connections += 1;
        let connection = self.connections;
        let started = self.spawn(Some(&self.handshakes), move || {
            match Link::accept(socket, &tls, Instant::now() + HANDSHAKE_TIMEOUT) {
                Ok(link) => Some(WorkerEvent::Accepted(connection, Box::new(link))),
                Err(error) => {
                    tracing::warn!(%error, "a connection was refused");
                    None
                }
            }
        });
        if !started {
            tracing::warn!("a connection was refused: too many handshakes are in progress");
        }
    }

    /// Connects to the next node of a departing guest.
    pub(crate) fn connect(
        &self,
        pid: HomePid,
        epoch: Epoch,
        address: String,
        shim: ShimId,
        peer: Fingerprint,
    ) {
        let key = Arc::clone(&self.key);
        let connect = move || {
            let link = tern_wire::pinned_client(&key, peer)
                .map_err(|e| e.to_string())
                .and_then(|tls| Link::connect_to_shim(&address, shim, &tls).map_err(|e| e.to_string()));
            Some(WorkerEvent::Connected(pid, epoch, link.map(Box::new)))
        };
        if !self.spawn(None, connect) {
            let none = Err("this node could not start a thread to connect; try again".into());
            self.report(WorkerEvent::Connected(pid, epoch, none));
        }
    }

    /// Has this node's file server open a file for a guest. If there are too many such requests the
    /// file is not opened.
    pub(crate) fn open_file(&self, pid: HomePid, number: u64, request: OpenRequest) {
        let open = move || Some(WorkerEvent::Opened(pid, number, request.open()));
        if !self.spawn(Some(&self.openings), open) {
            self.report(WorkerEvent::Opened(pid, number, Err(io::ErrorKind::WouldBlock.into())));
        }
    }

    /// Has this node's tern-net move a connection of a guest.
    pub(crate) fn move_connection(
        &self,
        pid: HomePid,
        number: u64,
        request: MoveRequest,
        (run_dir, home): (PathBuf, NodeId),
    ) {
        let is_take = matches!(request, MoveRequest::Take(_));
        let run = move || Some(WorkerEvent::ConnectionMoved(pid, number, request.run(&run_dir, home)));
        if !self.spawn(None, run) {
            let error = io::ErrorKind::WouldBlock.into();
            let failed = if is_take { Moved::Taken(Err(error)) } else { Moved::Returned(Err(error)) };
            self.report(WorkerEvent::ConnectionMoved(pid, number, failed));
        }
    }

    /// Opens readiness files for a guest.
    pub(crate) fn open_readiness_files(&self, pid: HomePid, number: u64, count: usize, run_dir: PathBuf) {
        let readiness = Arc::clone(&self.readiness);
        let open =
            move || Some(WorkerEvent::ReadinessFilesOpened(pid, number, readiness.open(count, &run_dir)));
        if !self.spawn(None, open) {
            let error = io::ErrorKind::WouldBlock.into();
            self.report(WorkerEvent::ReadinessFilesOpened(pid, number, Err(error)));
        }
    }

    /// Opens mapped files whose content need not be sent. If there are too many such requests, none
    /// is opened.
    pub(crate) fn open_mapped_files(
        &self,
        user: MappingUser,
        (local_node, home): (LocalNode, NodeId),
        files: Vec<FileRef>,
    ) {
        let open = move || {
            let opened = local_node.open_mapped_files(home, &files);
            Some(WorkerEvent::MappedFilesOpened(user, opened))
        };
        if !self.spawn(Some(&self.mapped_openings), open) {
            self.report(WorkerEvent::MappedFilesOpened(user, Vec::new()));
        }
    }

    /// Checks which of these pieces of shared memory no process maps. One check at a time.
    pub(crate) fn find_unmapped(&self, objects: Vec<(ObjectId, Arc<File>)>) {
        if self.memory_checks.load(Ordering::Acquire) > 0 {
            return;
        }
        self.spawn(Some(&self.memory_checks), move || {
            let unmapped = objects.iter().filter(|(_, object)| seal_unmapped(object));
            let unmapped: Vec<ObjectId> = unmapped.map(|(id, _)| *id).collect();
            (!unmapped.is_empty()).then(|| WorkerEvent::Unmapped(unmapped))
        });
    }

    /// Whether content is to be checked again: checks are [`CONTENT_CHECK_INTERVAL`] apart.
    pub(crate) fn is_content_check_due(&self) -> bool {
        self.content_checks.load(Ordering::Acquire) == 0
            && self.content_checked_at.elapsed() >= CONTENT_CHECK_INTERVAL
    }

    /// Checks which content is mapped by none of these guests (given by their host pids).
    pub(crate) fn find_unmapped_content(&mut self, mut kept: KeptContent, guests: Vec<i32>) {
        self.content_checked_at = Instant::now();
        self.spawn(Some(&self.content_checks), move || {
            for pid in &guests {
                // The mappings of a guest that is gone are unknown, so there is no result.
                let maps = procfs::maps(procfs::live_thread(*pid)).ok()?;
                kept.retain_unmapped(&maps.iter().map(|m| (m.device, m.inode)).collect());
            }
            (!kept.is_empty()).then_some(WorkerEvent::UnmappedContent(kept, guests))
        });
    }

    /// Closes files, which takes the kernel long if they have much memory.
    pub(crate) fn close<T: Send + 'static>(&self, files: Vec<T>) {
        self.spawn(None, move || {
            drop(files);
            None
        });
    }

    /// Asks home's daemon, through this node's, for which of these epochs home no longer waits.
    /// Only one such request runs at a time. An epoch counts as awaited if there is no answer.
    pub(crate) fn ask_home_daemon(
        &self,
        run_dir: PathBuf,
        node: NodeId,
        shim: ShimId,
        epochs: Vec<(HomePid, Epoch)>,
    ) {
        if self.daemon_requests.load(Ordering::Acquire) > 0 {
            return;
        }
        self.spawn(Some(&self.daemon_requests), move || {
            let over = |&(pid, epoch): &(HomePid, Epoch)| {
                let answer = request_daemon(&run_dir, &Request::IsGuestAwaited { node, shim, pid, epoch });
                matches!(answer, Ok(Reply::Located { alive: Some(false), .. }))
            };
            Some(WorkerEvent::NotAwaited(epochs.into_iter().filter(over).collect()))
        });
    }

    /// Delivers an event without a worker.
    fn report(&self, event: WorkerEvent) {
        let _we_hold_the_other_end = self.events.0.send(event);
        let _full_is_rung = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    /// Starts a thread that reads files which are sent to another node.
    ///
    /// # Errors
    /// If there can be no more threads.
    pub(crate) fn start_reader(&self) -> io::Result<ContentReader> {
        let waker = Arc::clone(&self.waker);
        ContentReader::start(move || wake(&waker))
    }

    /// Runs `work` in a thread, unless [`MAX_WORKERS`] of its kind are running.
    fn spawn(
        &self,
        kind: Option<&Arc<AtomicUsize>>,
        work: impl FnOnce() -> Option<WorkerEvent> + Send + 'static,
    ) -> bool {
        let permit = match kind.map(Permit::acquire) {
            Some(None) => return false,
            permit => permit.flatten(),
        };
        let (events, waker) = (self.events.0.clone(), Arc::clone(&self.waker));
        let thread = threads::spawn("worker", 256 << 10, move || {
            let event = work();
            drop(permit);
            if let Some(event) = event {
                let _loop_is_gone = events.send(event);
                wake(&waker);
            }
        });
        thread.is_ok()
    }
}

/// Wakes the main loop, which polls this eventfd.
fn wake(waker: &OwnedFd) {
    let _overflow_is_awake = rustix::io::write(waker, &1u64.to_ne_bytes());
}

impl AsFd for Workers {
    /// Readable when results are available.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }
}

/// One of [`MAX_WORKERS`] permits.
struct Permit(Arc<AtomicUsize>);

impl Permit {
    fn acquire(of: &Arc<AtomicUsize>) -> Option<Self> {
        // Only the main loop acquires permits, so the check and the increment do not race.
        if of.load(Ordering::Acquire) >= MAX_WORKERS {
            return None;
        }
        of.fetch_add(1, Ordering::AcqRel);
        Some(Self(Arc::clone(of)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
