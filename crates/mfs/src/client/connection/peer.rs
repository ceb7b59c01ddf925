//! Connections to one node, and whether it responds.
//!
//! A calling thread takes an idle connection, opens another, or waits for one. It sends the request
//! and waits for the reply itself: so no thread is between the program and the other node's thread,
//! and there are as many requests in flight as connections. If the connection breaks, the thread
//! reconnects and sends the request under the same number until its timeout. After that the node
//! counts as lost, and calls fail at once until it responds again. One call a second probes it, and
//! so does each renewal that another service of the node has asked for.

pub(crate) mod callback;
mod exchange;

use crate::client::cache::invalidator::Invalidator;
use crate::client::cache::renewable_lease::LeaseRenewal;
use crate::client::cache::unsynced::Boot;
use crate::client::connection::pending_release::{PendingReleases, ReleaseBatch};
use crate::client::connection::validate::{Expected, references_in};
use crate::lock;
use crate::message::{DentryCheck, FileReply, FileRequest, Object, Op, Purpose, Release};
use exchange::{ExchangeError, if_open};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tern_ids::{Credentials, NodeId};
use tern_wire::{Identity, Link};

/// Connections to one node for requests.
const MAX_CONNECTIONS: u16 = 16;

/// Numbers of the connections on which to probe the node, and on which it recalls leases.
const PROBE: u16 = MAX_CONNECTIONS;
const CALLBACK: u16 = MAX_CONNECTIONS + 1;

/// How often a thread that waits for a reply probes whether the node is alive.
pub(crate) const PROBE_INTERVAL: Duration = Duration::from_secs(2);

/// How long requests to a lost node fail at once, before one of them probes the node again.
const LOST_INTERVAL: Duration = Duration::from_secs(1);

/// The behaviour of a call while its node counts as lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhenLost {
    /// It fails at once, unless it is the call that probes the node.
    Fail,
    /// It tries to reach the node until its timeout: there is other evidence that the node is up.
    Probe,
}

/// A reply as received.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) reply: FileReply,
    /// The boot of the node's machine in which it was sent.
    pub(crate) boot: Boot,
    /// How many leases the server had recalled when it sent the reply.
    recalls: u64,
    frame: Vec<u8>,
    data_offset: usize,
}

impl Response {
    /// The data after the reply's header.
    pub(crate) fn data(&self) -> &[u8] {
        self.frame.get(self.data_offset..).unwrap_or_default()
    }
}

/// Why a call has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallError {
    /// The error the server has returned.
    Errno(Errno),
    /// The server no longer holds the object or the open file.
    Expired,
    /// A dentry on the path is stale.
    StalePath,
}

impl From<Errno> for CallError {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// Settings and state shared by all peers of a mounted tree.
#[derive(Debug)]
pub(crate) struct MountContext {
    pub(crate) identity: Identity,
    pub(crate) map: std::path::PathBuf,
    /// Identifies this mount for as long as it exists.
    pub(crate) session: [u8; 16],
    /// How long a call waits for a node that does not respond.
    pub(crate) timeout: Duration,
    /// The use of the tree: a container's tree caches under renewable leases
    /// ([`crate::client::cache::renewable_lease`]).
    pub(crate) purpose: Purpose,
    /// Invalidates the kernel's caches.
    pub(crate) invalidator: Invalidator,
}

#[derive(Debug)]
struct Connection {
    number: u16,
    /// Number of requests sent.
    requests: u64,
    /// The last request that was abandoned without a reply, and whether the server has still to be
    /// notified of that.
    last_abandoned: u64,
    is_abandon_pending: bool,
    /// With the boot of the machine at the other end.
    link: Option<(Link, Boot)>,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Connection>,
    /// Number of threads that wait for an idle connection. If there are none, the wake-up, a system
    /// call, is omitted.
    waiting: usize,
    /// Number of connections in use or idle.
    open: u16,
    /// When the node last responded, and until when requests to it fail at once.
    last_response: Option<Instant>,
    lost_until: Option<Instant>,
    /// How often the session was new to the server, which then holds nothing from before.
    server_epoch: u64,
    /// The current boot of its machine: the boot ID, and this client's number for it.
    boot: (String, Boot),
}

/// A request until it has its reply.
#[allow(clippy::large_enum_variant, reason = "short-lived, on its thread's stack")]
enum Outgoing<'a> {
    /// An operation, with the releases sent along.
    Call(Credentials, Vec<DentryCheck>, Op, ReleaseBatch),
    Control(&'a FileRequest),
}

/// One node.
#[derive(Debug)]
pub(crate) struct Peer {
    node: NodeId,
    pub(crate) context: std::sync::Arc<MountContext>,
    state: Mutex<State>,
    idle: Condvar,
    recalls: AtomicU64,
    /// Counts changes made by this client.
    local_changes: AtomicU64,
    /// Counts extended attributes set by this client.
    xattr_changes: AtomicU64,
    pub(crate) pending_releases: PendingReleases,
    /// Counts lock owners.
    lock_owners: AtomicU64,
    /// Read-locked while a reply is delivered to the kernel.
    pub(crate) delivery_lock: RwLock<()>,
    pub(crate) renewal: LeaseRenewal,
}

impl Peer {
    pub(crate) fn new(node: NodeId, context: std::sync::Arc<MountContext>) -> Self {
        Self {
            node,
            context,
            state: Mutex::default(),
            idle: Condvar::new(),
            recalls: AtomicU64::new(0),
            local_changes: AtomicU64::new(0),
            xattr_changes: AtomicU64::new(0),
            pending_releases: PendingReleases::default(),
            lock_owners: AtomicU64::new(0),
            delivery_lock: RwLock::default(),
            renewal: LeaseRenewal::default(),
        }
    }

    pub(crate) fn node(&self) -> NodeId {
        self.node
    }

    /// Whether its files are cached under renewable leases.
    pub(crate) fn uses_renewable_leases(&self) -> bool {
        self.context.purpose == Purpose::Container
    }

    pub(crate) fn invalidator(&self) -> &Invalidator {
        &self.context.invalidator
    }

    /// Number of replies with recalls that the callback channel has received.
    pub(crate) fn recalls(&self) -> u64 {
        self.recalls.load(Ordering::Acquire)
    }

    /// Counts a reply with recalls, and runs `invalidate` to drop what they cover. When this
    /// returns, no earlier reply is still being delivered to the kernel.
    pub(crate) fn count_recall(&self, invalidate: impl FnOnce()) {
        self.with_deliveries_paused(|| {
            self.recalls.fetch_add(1, Ordering::AcqRel);
            invalidate();
        });
    }

    /// Runs `change` while no reply is being delivered to the kernel.
    pub(crate) fn with_deliveries_paused<T>(&self, change: impl FnOnce() -> T) -> T {
        let _exclusive = self.delivery_lock.write().unwrap_or_else(PoisonError::into_inner);
        change()
    }

    /// Number of changes made by this client.
    pub(crate) fn local_changes(&self) -> u64 {
        self.local_changes.load(Ordering::Acquire)
    }

    /// Counts a change whose reply the kernel does not have yet.
    pub(crate) fn count_local_change(&self) {
        self.local_changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Number of extended attributes set by this client.
    pub(crate) fn xattr_changes(&self) -> u64 {
        self.xattr_changes.load(Ordering::Acquire)
    }

    /// An extended attribute is about to be set, or was.
    pub(crate) fn count_xattr_change(&self) {
        self.xattr_changes.fetch_add(1, Ordering::AcqRel);
    }

    /// A new number for a lock owner.
    pub(crate) fn new_lock_owner(&self) -> u64 {
        self.lock_owners.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Performs an operation, if the checked dentries are current.
    ///
    /// # Errors
    /// The server's; `EIO` if the node is lost, the reply is invalid, or the reply to an operation
    /// that must not be repeated is lost.
    pub(crate) fn call(
        &self,
        caller: &Credentials,
        checks: Vec<DentryCheck>,
        op: Op,
        data: &[u8],
    ) -> Result<Response, CallError> {
        let (can_repeat, expected) = (op.may_retry_after_restart(), Expected::of(&op));
        let (mut connection, end) = self.take_connection(WhenLost::Fail)?;
        // Data to be written may fill a frame, so no releases are sent with it.
        let batch = if data.is_empty() { self.pending_releases.take() } else { ReleaseBatch::default() };
        let outgoing = Outgoing::Call(caller.clone(), checks, op, batch);
        let response = self.send_until_answered(&mut connection, outgoing, data, can_repeat, end);
        self.return_connection(connection);
        let response = response?;
        self.wait_for_recalls(response.recalls);
        match response.reply {
            FileReply::Failed(errno) => Err(Errno::from_raw_os_error(errno.clamp(1, 4095)).into()),
            FileReply::Forgotten => Err(CallError::Expired),
            FileReply::StaleDentry => Err(CallError::StalePath),
            _ if !expected.accepts(&response.reply) => {
                let (objects, opened) = references_in(&response.reply);
                objects.into_iter().for_each(|object| self.queue_forget(object, 1));
                opened
                    .into_iter()
                    .for_each(|opened| self.pending_releases.release(Release::File(opened), false));
                Err(Errno::IO.into())
            }
            _ => Ok(response),
        }
    }

    /// Has the server renew all renewable leases, and waits for their pending recalls.
    ///
    /// # Errors
    /// `EIO` if the node is lost.
    pub(crate) fn send_renewal(&self, when_lost: WhenLost) -> Result<(), Errno> {
        let (mut connection, end) = self.take_connection(when_lost)?;
        let response =
            self.send_until_answered(&mut connection, Outgoing::Control(&FileRequest::Renew), &[], true, end);
        self.return_connection(connection);
        let response = response?;
        self.wait_for_recalls(response.recalls);
        if response.reply == FileReply::Done { Ok(()) } else { Err(Errno::IO) }
    }

    /// Queues the kernel's FUSE_FORGET, which is sent with another request.
    pub(crate) fn queue_forget(&self, object: Object, count: u64) {
        self.pending_releases.forget(object, count);
    }

    /// Sends this release, and all pending ones, before it returns. If the node cannot be reached,
    /// releases stay pending, and are sent when the callback channel has reconnected.
    pub(crate) fn release_now(&self, release: Release) {
        let mut batch = self.pending_releases.take();
        batch.piggyback.released.push(release);
        self.send_releases(batch);
    }

    /// Sends these releases. Returns whether that has succeeded.
    pub(crate) fn send_releases(&self, batch: ReleaseBatch) -> bool {
        let Ok((mut connection, end)) = self.take_connection(WhenLost::Fail) else {
            self.pending_releases.put_back(batch);
            return false;
        };
        let request = FileRequest::Release(batch.piggyback.clone());
        let sent = self.send_until_answered(&mut connection, Outgoing::Control(&request), &[], true, end);
        self.return_connection(connection);
        if sent.is_err() {
            self.pending_releases.put_back(batch);
        }
        sent.is_ok()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes a connection for exclusive use. Also returns the caller's deadline.
    fn take_connection(&self, when_lost: WhenLost) -> Result<(Connection, Instant), Errno> {
        let mut end = Instant::now() + self.context.timeout;
        let mut state = self.state();
        loop {
            let now = Instant::now();
            if let Some(until) = state.lost_until.filter(|_| when_lost == WhenLost::Fail) {
                if now < until {
                    return Err(Errno::IO);
                }
                // This thread probes the node; other calls fail until the probe has ended.
                state.lost_until = Some(now + PROBE_INTERVAL);
                end = end.min(now + PROBE_INTERVAL);
            }
            if let Some(connection) = state.idle.pop() {
                return Ok((connection, end));
            }
            if state.open < MAX_CONNECTIONS {
                state.open += 1;
                let connection = Connection {
                    number: state.open - 1,
                    requests: 0,
                    last_abandoned: 0,
                    is_abandon_pending: false,
                    link: None,
                };
                return Ok((connection, end));
            }
            let left = end.saturating_duration_since(now);
            if left.is_zero() {
                return Err(Errno::IO);
            }
            state.waiting += 1;
            state = self.idle.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
        }
    }

    fn return_connection(&self, connection: Connection) {
        let mut state = self.state();
        state.idle.push(connection);
        let has_waiter = state.waiting > 0;
        drop(state);
        if has_waiter {
            self.idle.notify_one();
        }
    }

    /// Sends a request until there is a reply, and reconnects as often as that takes.
    fn send_until_answered(
        &self,
        connection: &mut Connection,
        mut outgoing: Outgoing<'_>,
        data: &[u8],
        can_repeat: bool,
        end: Instant,
    ) -> Result<Response, Errno> {
        connection.requests += 1;
        let head = outgoing.encode()?;
        // The server instance to which the request was first sent.
        let mut sent_epoch = None;
        loop {
            let open_link = connection.link.take().and_then(|(link, boot)| Some((if_open(link)?, boot)));
            let link = match open_link {
                Some(link) => Ok(link),
                None => self
                    .connect(connection.number, connection.last_abandoned, end)
                    .inspect(|_| connection.is_abandon_pending = false),
            };
            // A restarted server does not know whether the previous one has performed the
            // operation.
            if !can_repeat && sent_epoch.is_some_and(|epoch| epoch != self.state().server_epoch) {
                connection.link = link.ok();
                return Err(Errno::IO);
            }
            let done = link.and_then(|(mut link, boot)| {
                sent_epoch.get_or_insert(self.state().server_epoch);
                let response = self.exchange(&mut link, boot, connection.requests, &[&head, data])?;
                Ok((link, response))
            });
            match done {
                Ok((link, response)) => {
                    connection.link = Some((link, response.boot));
                    let mut state = self.state();
                    (state.last_response, state.lost_until) = (Some(Instant::now()), None);
                    return Ok(response);
                }
                Err(ExchangeError::Broken) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(failure) => {
                    // The server must close what an abandoned request opens.
                    if sent_epoch.is_some() {
                        (connection.last_abandoned, connection.is_abandon_pending) =
                            (connection.requests, true);
                    }
                    if let Outgoing::Call(.., batch) = &mut outgoing {
                        self.pending_releases.put_back(std::mem::take(batch));
                    }
                    return Err(self.fail(&failure));
                }
            }
        }
    }

    /// The error for a failed request. If the node has not responded, requests of other threads
    /// fail at once for a while.
    fn fail(&self, failure: &ExchangeError) -> Errno {
        match failure {
            ExchangeError::Refused => Errno::ACCESS,
            ExchangeError::TooLong => Errno::TOOBIG,
            ExchangeError::Broken | ExchangeError::Lost => {
                tracing::info!(node = %self.node, "the node does not respond");
                self.state().lost_until = Some(Instant::now() + LOST_INTERVAL);
                self.idle.notify_all();
                Errno::IO
            }
        }
    }
}

impl Outgoing<'_> {
    fn encode(&mut self) -> Result<Vec<u8>, Errno> {
        let encoded = match self {
            Self::Control(request) => tern_wire::encode(request),
            Self::Call(caller, checks, op, batch) => {
                let (caller, op) = (caller.clone(), op.clone());
                let (checks, piggyback) = (std::mem::take(checks), batch.piggyback.clone());
                tern_wire::encode(&FileRequest::Call { caller, checks, piggyback, op })
            }
        };
        encoded.map_err(|_long| Errno::NAMETOOLONG)
    }
}

#[cfg(test)]
mod tests;
