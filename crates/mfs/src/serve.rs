//! The server half: a process beside ternd, which passes connections on to it.
//!
//! ```text
//!  ternd ──control socket──▶ a thread per connection: receive, impersonate, perform, reply
//! ```
//! The server outlives ternd. A session outlives its connections for [`Server::session_timeout`],
//! so that a client whose link broke finds its files open and its locks held. After that the
//! session and all its locks are released.

mod budget;
mod export;
mod fanotify;
mod guest_files;
#[doc(hidden)]
pub mod hostile;
mod impersonate;
mod leases;
mod locks;
mod perform;
mod release;
mod session;
mod shared_fs;
mod stat;

use crate::message::{FileReply, FileRequest, Piggyback, Purpose, REPLY_FRAME, REQUEST_FRAME, VERSION};
use crate::{lock, packing, send, set_keepalive};
use anyhow::{Context, Result};
use budget::FdBudget;
use guest_files::GuestFiles;
use impersonate::Impersonation;
use leases::LeaseTable;
use perform::{OpContext, OpError};
use rustix::io::Errno;
use session::parked::{self, Mounts};
use session::{MAX_CONNECTIONS_PER_SESSION, ReplyCache, Session, SharedReplyCache};
use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tern_control::control_socket::{ControlSocket, not_held};
use tern_control::shim::{ShimReply, ShimRequest};
use tern_ids::{Credentials, NodeId};
use tern_node::{Config, follow_map};
use tern_wire::{Identity, Link, LinkError, Members, ServerTls};

pub(crate) use export::Export;

/// How long sending a reply may make no progress, and how long a handshake may take.
const IO_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a request on the callback channel waits for a recall before an empty reply is sent.
const RECALL_POLL_TIMEOUT: Duration = Duration::from_millis(500);

/// Maximum number of connections in all; each has a thread.
const MAX_CONNECTIONS: usize = 2048;

/// Maximum number of mounted trees per node: each of its namespaces may have one.
const MAX_SESSIONS_PER_NODE: usize = 64;

/// Minimum interval between checks for removed files. The second check that finds a file removed
/// forgets it, unless it is open.
const REMOVED_CHECK_INTERVAL: Duration = Duration::from_secs(4);

/// A check for removed files is followed by a pause of at least this many times its CPU time.
const REMOVED_CHECK_PAUSE: u32 = 500;

type SessionKey = (NodeId, [u8; 16]);

/// The server.
#[derive(Debug)]
struct Server {
    node: NodeId,
    config: Config,
    export: Export,
    leases: Arc<LeaseTable>,
    members: Arc<Members>,
    tls: ServerTls,
    budget: Arc<FdBudget>,
    /// Boot ID of this machine.
    boot_id: String,
    /// How long a session may be without a connection.
    session_timeout: Duration,
    sessions: Mutex<HashMap<SessionKey, Arc<Session>>>,
    /// Other nodes may access this node's files (`mosctl nomfs`, `mfs`).
    is_exporting: AtomicBool,
    connection_count: AtomicUsize,
    /// Files open for guests of this node.
    guests: GuestFiles,
}

/// Serves this node's files for ever. `is_first`: no server ran before since the node was started,
/// so no earlier lease can be valid.
///
/// # Errors
/// If the server cannot start.
pub fn run(config: Config, control: &ControlSocket, is_first: bool) -> Result<()> {
    rustix::process::umask(rustix::fs::Mode::empty());
    let identity = Identity::load(&config.config_dir).context("this node has no usable identity")?;
    follow_map(&config.map, &identity).context("the map is not usable")?;
    let server = Arc::new(Server {
        members: identity.members().clone(),
        node: identity.node(),
        export: Export {
            is_read_only: config.file.mfs_read_only.unwrap_or(false),
            squashes_root: config.file.mfs_squash_root.unwrap_or(false),
            paths: config.file.mfs_paths.clone().unwrap_or_default(),
        },
        leases: Arc::new(LeaseTable::new(is_first)),
        tls: identity.cluster_server()?,
        // The other descriptors are for connections, and for files opened during a request.
        budget: FdBudget::new(crate::raise_descriptor_limit() / 4 * 3),
        boot_id: boot_id(),
        session_timeout: Duration::from_secs(config.give_up_after.into()),
        sessions: Mutex::default(),
        // Later changes are sent by ternd.
        is_exporting: AtomicBool::new(!tern_node::read_settings(&config.run_dir).no_mfs),
        connection_count: AtomicUsize::new(0),
        guests: GuestFiles::default(),
        config,
    });
    if server.config.file.mfs_notices.unwrap_or(true) {
        server.leases.watch_local_changes();
    }
    let parking = server.clone();
    std::thread::Builder::new().name("parking".into()).spawn(move || parking.park_idle_objects())?;
    let mut next_check = Instant::now();
    loop {
        control.wait(&[], Duration::from_secs(5))?;
        while let Some(caller) = control.accept() {
            match caller.request() {
                ShimRequest::Connection => {
                    if let Some(socket) = caller.receive_connection() {
                        server.accept(socket);
                    }
                }
                ShimRequest::OpenFile { .. } | ShimRequest::OpenShared { .. } => {
                    server.open_for_guest(caller);
                }
                ShimRequest::ServeFiles { open } => {
                    server.is_exporting.store(*open, Ordering::Release);
                    if !*open {
                        server.guests.revoke_all();
                        // Otherwise clients would rely on their leases until the terms end.
                        server.leases.recall_all();
                    }
                    caller.reply(&ShimReply::Done);
                }
                _ => caller.reply(&not_held()),
            }
        }
        server.expire_sessions();
        if Instant::now() >= next_check {
            next_check = Instant::now() + server.forget_removed();
        }
    }
}

/// CPU time used by the calling thread.
fn cpu_time() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(used).unwrap_or_default()
}

/// A string that changes with each boot. If it cannot be read, each server is treated as if the
/// machine had booted anew.
fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.unwrap_or_else(|_unreadable| rand::random::<u64>().to_string())
}

impl Server {
    fn accept(self: &Arc<Self>, socket: TcpStream) {
        if self.connection_count.load(Ordering::Acquire) >= MAX_CONNECTIONS {
            tracing::warn!("too many connections: a new one was closed");
            return;
        }
        self.connection_count.fetch_add(1, Ordering::AcqRel);
        // The connection is counted until its thread has ended, or has failed to start.
        let guard = ConnectionGuard(self.clone());
        let serve = move || {
            if let Err(error) = guard.0.serve_connection(socket) {
                tracing::info!("a connection has ended: {error:#}");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("connection".into()).spawn(serve) {
            tracing::warn!(%error, "cannot start a thread for a connection");
        }
    }

    /// Serves one connection, from the handshake until it ends.
    fn serve_connection(&self, socket: TcpStream) -> Result<()> {
        set_keepalive(&socket)?;
        let duplicate = socket.try_clone()?;
        // The session keeps a duplicate of the socket, so dropping ours would not close the
        // connection.
        let _shutdown = ShutdownGuard(socket.try_clone()?);
        let mut link = Link::accept(socket, &self.tls, Instant::now() + IO_TIMEOUT)?;
        let node = link.peer_node().context("the peer is not a node")?;
        let Attached { session, reply_cache, abandoned, is_callback, is_new, tag } =
            match self.attach(&mut link, node, duplicate)? {
                Ok(attached) => attached,
                Err(reason) => {
                    send_reply(&mut link, 0, 0, &FileReply::Refused(reason), &[])?;
                    return Ok(());
                }
            };
        let session = &session.0;
        // Created before the reply is sent, so that requests which the client sends after the reply
        // get leases.
        let _callback = is_callback.then(|| CallbackGuard::new(session));
        send_reply(&mut link, tag, 0, &FileReply::Begun { is_new, boot_id: self.boot_id.clone() }, &[])?;
        // Only one connection at a time uses a reply cache: a new one waits until the old one's
        // request is done.
        let mut reply_cache = lock(&reply_cache);
        // Once the client has the reply to `Begin`, it regards the abandoned request as reported.
        // So the file that this request opened is released even if the connection is lost by now.
        if let Some(reply) = reply_cache.abandon(abandoned) {
            release::release_undelivered(session, &self.leases, &reply);
        }
        match self.serve_requests(&mut link, session, &mut reply_cache, is_callback) {
            Err(error) if matches!(error.downcast_ref(), Some(LinkError::Closed)) => Ok(()),
            done => done,
        }
    }

    /// Receives the first request and attaches the connection to its session.
    fn attach(&self, link: &mut Link, node: NodeId, socket: TcpStream) -> Result<Result<Attached, String>> {
        let frame = link.recv(Instant::now() + IO_TIMEOUT)?;
        let request: FileRequest = tern_wire::decode(&frame.payload)?;
        let FileRequest::Begin { version, session, connection, abandoned, is_callback, purpose } = request
        else {
            anyhow::bail!("the first request is not Begin")
        };
        if version != VERSION {
            return Ok(Err(format!(
                "this node uses version {VERSION} of the MFS protocol, the client version {version}"
            )));
        }
        if !self.config.file.mfs.unwrap_or(true) {
            return Ok(Err("this node does not export its files (mfs = false in its ternd.toml)".into()));
        }
        let mut is_new = false;
        let attached = {
            let mut sessions = lock(&self.sessions);
            let node_sessions = sessions.keys().filter(|(of, _)| *of == node).count();
            let session = match sessions.get(&(node, session)) {
                Some(session) => session.clone(),
                None if node_sessions >= MAX_SESSIONS_PER_NODE => {
                    return Ok(Err("the client's node has too many trees mounted".into()));
                }
                None => {
                    is_new = true;
                    let new = Session::new(&self.export, &self.budget, purpose)?;
                    sessions.insert((node, session), new.clone());
                    new
                }
            };
            // Under the lock, so that `expire_sessions` cannot remove the session first.
            SessionGuard::new(session)
        };
        let Some(reply_cache) = attached.0.attach(connection, socket) else {
            return Ok(Err(format!("a session has at most {MAX_CONNECTIONS_PER_SESSION} connections")));
        };
        let tag = frame.tag;
        Ok(Ok(Attached { session: attached, reply_cache, abandoned, is_callback, is_new, tag }))
    }

    fn serve_requests(
        &self,
        link: &mut Link,
        session: &Arc<Session>,
        cache: &mut ReplyCache,
        is_callback: bool,
    ) -> Result<()> {
        let mut impersonation = Impersonation::new();
        let context = OpContext { session, export: &self.export, leases: &self.leases };
        let mut out = Vec::new();
        loop {
            // A client may be silent for any time; keepalive reports when it is gone.
            let frame = match link.recv(Instant::now() + Duration::from_secs(3600)) {
                Err(LinkError::Timeout) => continue,
                frame => packing::unpack(frame?).context("a malformed packed frame")?,
            };
            anyhow::ensure!(frame.kind == REQUEST_FRAME, "a frame that is not a request");
            let (request, data): (FileRequest, &[u8]) = postcard::take_from_bytes(&frame.payload)?;
            match request {
                FileRequest::Begin { .. } => anyhow::bail!("a second Begin"),
                // A repeated request is recognised by its number, except on the callback channel:
                // there the numbers restart with each connection, and nothing is repeated.
                FileRequest::Release(piggyback) => {
                    if is_callback || frame.tag > cache.piggyback_applied {
                        if !is_callback {
                            cache.piggyback_applied = frame.tag;
                        }
                        self.apply_piggyback(session, piggyback);
                    }
                    send_reply(link, frame.tag, 0, &FileReply::Done, &[])?;
                }
                FileRequest::WaitForRecalls { returned } => {
                    self.leases.return_leases(session, &returned);
                    // The first request on a callback channel is answered at once: the client caches
                    // nothing until then.
                    let timeout = if frame.tag == 1 { Duration::ZERO } else { RECALL_POLL_TIMEOUT };
                    let recalls = session.next_recalls(timeout);
                    let (leases, count) = recalls.context("too many recalls are pending")?;
                    send_reply(link, frame.tag, count, &FileReply::Recalled(leases), &[])?;
                }
                FileRequest::Renew => {
                    self.leases.renew(session);
                    send_reply(link, frame.tag, self.recall_count(session), &FileReply::Done, &[])?;
                }
                FileRequest::Call { caller, checks, piggyback, op } => {
                    // A lower number comes from an old connection. A newer connection has replaced
                    // it, and has made later requests.
                    anyhow::ensure!(frame.tag >= cache.newest, "a request of an earlier connection");
                    cache.newest = frame.tag;
                    if frame.tag > cache.piggyback_applied {
                        cache.piggyback_applied = frame.tag;
                        self.apply_piggyback(session, piggyback);
                    }
                    let is_cached = !op.is_idempotent();
                    if is_cached && cache.number == Some(frame.tag) {
                        let count = tern_wire::encode(&self.recall_count(session))?;
                        send(link, REPLY_FRAME, frame.tag, &[&count, &cache.reply], IO_TIMEOUT)?;
                        continue;
                    }
                    out.clear();
                    // While access is denied, open files stay open, but operations on them fail,
                    // except reads for guests.
                    let is_exempt = session.purpose == Purpose::Guests && op.is_read();
                    let is_denied = !is_exempt && !self.is_exporting.load(Ordering::Acquire);
                    let assumed = if is_denied {
                        Err(Errno::ACCESS)
                    } else {
                        impersonation.assume(&self.map_credentials(caller))
                    };
                    let reply = match assumed {
                        Err(errno) => FileReply::Failed(errno.raw_os_error()),
                        Ok(()) => to_reply(context.perform(&checks, op, data, &mut out)),
                    };
                    if is_cached {
                        cache.number = Some(frame.tag);
                        cache.reply = tern_wire::encode(&reply)?;
                    }
                    send_reply(link, frame.tag, self.recall_count(session), &reply, &out)?;
                }
            }
            link.recycle(frame.payload);
        }
    }

    /// Number of leases recalled from a session so far. Under renewable leases it includes the
    /// recalls for all changes made on this node before this call: the client must not observe a
    /// change while it relies on older cached data.
    fn recall_count(&self, session: &Session) -> u64 {
        if session.uses_renewable_leases() {
            self.leases.drain_events();
        }
        session.recall_count()
    }

    /// Applies pending releases and forgets.
    fn apply_piggyback(&self, session: &Session, piggyback: Piggyback) {
        for (object, count) in piggyback.forgotten {
            session.forget(object, count);
        }
        for resource in piggyback.released {
            release::release(session, &self.leases, resource);
        }
    }

    /// The caller's credentials on this node: root is mapped to `nobody` if it is squashed.
    fn map_credentials(&self, caller: Credentials) -> Credentials {
        if self.export.squashes_root { tern_node::squash_root(caller) } else { caller }
    }

    /// Forgets removed files of all sessions. Returns the time until the next check.
    fn forget_removed(&self) -> Duration {
        // CPU time, not wall-clock time: otherwise the pause after a check on a busy node could be
        // a minute.
        let start = cpu_time();
        let sessions: Vec<_> = lock(&self.sessions).values().cloned().collect();
        let forgotten: Vec<_> = sessions.iter().flat_map(|session| session.forget_removed()).collect();
        let used = cpu_time().saturating_sub(start);
        // Dropping the last descriptor frees the blocks, which takes time. This thread serves the
        // control socket and must not wait for that.
        if !forgotten.is_empty() {
            let _dropped_here =
                std::thread::Builder::new().name("removed".into()).spawn(move || drop(forgotten));
        }
        REMOVED_CHECK_INTERVAL.max(used * REMOVED_CHECK_PAUSE)
    }

    /// Parks the objects that no client uses, for ever. In a thread of its own, since a disk may be
    /// slow.
    fn park_idle_objects(&self) {
        loop {
            std::thread::sleep(parked::CHECK_INTERVAL);
            let sessions: Vec<_> = lock(&self.sessions).values().cloned().collect();
            if sessions.iter().any(|session| session.may_keep_mounts()) {
                let mounts = Mounts::read();
                sessions.iter().for_each(|session| drop(session.park_idle(&mounts)));
            }
        }
    }

    /// Drops sessions without a connection for longer than the session timeout.
    fn expire_sessions(&self) {
        let mut sessions = lock(&self.sessions);
        sessions.retain(|(node, _), session| {
            if !self.members.contains(*node) {
                return false;
            }
            let (connections, since) = *lock(&session.connection_count);
            connections > 0 || since.elapsed() < self.session_timeout
        });
        let numbers: Vec<u64> = sessions.values().map(|session| session.number).collect();
        // Still under the lock, so that no session is added in between: its writers would be
        // removed.
        self.leases.expire(&numbers);
    }
}

/// Shuts a connection down when this is dropped.
struct ShutdownGuard(TcpStream);

impl Drop for ShutdownGuard {
    fn drop(&mut self) {
        let _already_closed = self.0.shutdown(Shutdown::Both);
    }
}

/// A connection attached to a session.
struct Attached {
    session: SessionGuard,
    reply_cache: SharedReplyCache,
    /// Number of the last request that the client has abandoned; 0 if none.
    abandoned: u64,
    is_callback: bool,
    /// The session is new.
    is_new: bool,
    tag: u64,
}

/// Counts one connection of the server, until this is dropped.
struct ConnectionGuard(Arc<Server>);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.connection_count.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Counts one connection of a session, until this is dropped.
struct SessionGuard(Arc<Session>);

impl SessionGuard {
    fn new(session: Arc<Session>) -> Self {
        lock(&session.connection_count).0 += 1;
        Self(session)
    }
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        let mut connections = lock(&self.0.connection_count);
        connections.0 -= 1;
        connections.1 = Instant::now();
    }
}

/// Marks a session as having a callback channel, until this is dropped.
struct CallbackGuard<'a>(&'a Session);

impl<'a> CallbackGuard<'a> {
    fn new(session: &'a Session) -> Self {
        session.set_callback(true);
        Self(session)
    }
}

impl Drop for CallbackGuard<'_> {
    fn drop(&mut self) {
        self.0.set_callback(false);
    }
}

fn to_reply(result: Result<FileReply, OpError>) -> FileReply {
    match result {
        Ok(reply) => reply,
        Err(OpError::Forgotten) => FileReply::Forgotten,
        Err(OpError::Errno(errno)) => FileReply::Failed(errno.raw_os_error()),
    }
}

fn send_reply(link: &mut Link, tag: u64, recall_count: u64, reply: &FileReply, data: &[u8]) -> Result<()> {
    let head = tern_wire::encode(&(recall_count, reply))?;
    Ok(send(link, REPLY_FRAME, tag, &[&head, data], IO_TIMEOUT)?)
}

#[cfg(test)]
mod tests;
