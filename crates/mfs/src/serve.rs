//! The half that has the files: a process of its own beside ternd, which passes connections on to it.
//!
//! ```text
//!  ternd ──socket──▶ door ──▶ one thread a lane: hear an ask, become the caller, do it, answer
//! ```
//! It outlives ternd. Sessions outlive their connections for [`Serving::patience`], so that a client whose link broke finds its
//! files open and its locks held; after that they go, and all locks with them.

mod acting;
mod budget;
mod export;
#[doc(hidden)]
pub mod hostile;
mod leases;
mod locks;
mod near;
mod notice;
mod passthrough;
mod perform;
mod release;
mod session;
mod shared;
mod stat;

use crate::message::{ANSWER, ASK, Answer, Ask, Beside, Caller, Purpose, VERSION};
use crate::{keep_alive, lock, packing, send};
use acting::Acting;
use anyhow::{Context, Result};
use budget::Budget;
use leases::Leases;
use near::Guests;
use perform::{Fault, Performance};
use rustix::io::Errno;
use session::{Lane, MOST_LANES, Session, SharedLane};
use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tern_control::door::{Door, not_here};
use tern_control::shim::{ShimReply, ShimRequest};
use tern_ids::NodeId;
use tern_node::Config;
use tern_node::map::Map;
use tern_wire::{Identity, Link, LinkError, ServerTls};

pub(crate) use export::Export;

/// How long nothing of an answer may leave, and how long a handshake may take to be made.
const SOON: Duration = Duration::from_secs(10);

/// How long who listens for leases that are asked back is left without a word.
const QUIET: Duration = Duration::from_millis(500);

/// The most lanes in all; each has a thread.
const MOST_CONNECTIONS: usize = 2048;

/// The most mounted trees of one node: its namespaces may have one each.
const MOST_SESSIONS: usize = 64;

/// How far apart it is looked for files that have been removed, at least: the second look lets go of those that nobody has open.
const LOOK: Duration = Duration::from_secs(4);

/// To look for them takes one part in so many of a processor at most.
const REST: u32 = 500;

type Key = (NodeId, [u8; 16]);

/// The whole server.
#[derive(Debug)]
struct Serving {
    node: NodeId,
    config: Config,
    export: Export,
    leases: Arc<Leases>,
    tls: ServerTls,
    budget: Arc<Budget>,
    /// This boot of the machine.
    boot: String,
    /// How long a session may be without a connection.
    patience: Duration,
    sessions: Mutex<HashMap<Key, Arc<Session>>>,
    /// Others may reach this node's files (`mosctl nomfs`, `mfs`).
    open: AtomicBool,
    connections: AtomicUsize,
    /// Open for guests of this node.
    guests: Guests,
}

/// Serves this node's files for ever. The first server since the node was started has nobody's promises to hold.
///
/// # Errors
/// If it cannot begin; nothing is left then.
pub fn run(config: Config, door: &Door, is_first: bool) -> Result<()> {
    rustix::process::umask(rustix::fs::Mode::empty());
    let identity = Identity::load(&config.config_dir).context("this node has no usable identity")?;
    let serving = Arc::new(Serving {
        node: identity.node(),
        export: Export {
            read_only: config.file.mfs_read_only.unwrap_or(false),
            squash_root: config.file.mfs_squash_root.unwrap_or(false),
            paths: config.file.mfs_paths.clone().unwrap_or_default(),
        },
        leases: Arc::new(Leases::new(is_first)),
        tls: identity.cluster_server()?,
        // The rest is for connections, and for what is open during a call.
        budget: Budget::new(crate::descriptors() / 4 * 3),
        boot: boot(),
        patience: Duration::from_secs(config.give_up_after.into()),
        sessions: Mutex::default(),
        // What is changed from now on is said at the door.
        open: AtomicBool::new(!tern_node::settings(&config.run_dir).no_mfs),
        connections: AtomicUsize::new(0),
        guests: Guests::default(),
        config,
    });
    if serving.config.file.mfs_notices.unwrap_or(true) {
        serving.leases.listen();
    }
    serving.leases.look_after_mapped().context("no thread")?;
    let mut look = Instant::now();
    loop {
        door.wait(&[], Duration::from_secs(5))?;
        while let Some(caller) = door.next() {
            match caller.request() {
                ShimRequest::Connection => {
                    if let Some(socket) = caller.connection() {
                        serving.take(socket);
                    }
                }
                ShimRequest::OpenFile { .. } | ShimRequest::OpenShared { .. } => {
                    serving.open_for_guest(caller);
                }
                ShimRequest::FileBehind { .. } => serving.give_behind(caller),
                ShimRequest::Files { open } => {
                    serving.open.store(*open, Ordering::Release);
                    if !*open {
                        serving.guests.send_home();
                        // What others believe they would read for their term.
                        serving.leases.recall_all();
                    }
                    caller.answer(&ShimReply::Done);
                }
                _ => caller.answer(&not_here()),
            }
        }
        serving.tidy();
        if Instant::now() >= look {
            look = Instant::now() + serving.let_go_of_removed();
        }
    }
}

/// What the calling thread has used.
fn processor_time() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(used).unwrap_or_default()
}

/// What is another one after each boot. If that cannot be known, each server is taken for one of a boot of its own.
fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.unwrap_or_else(|_unreadable| rand::random::<u64>().to_string())
}

impl Serving {
    fn take(self: &Arc<Self>, socket: TcpStream) {
        if self.connections.load(Ordering::Acquire) >= MOST_CONNECTIONS {
            tracing::warn!("too many connections; one was closed");
            return;
        }
        self.connections.fetch_add(1, Ordering::AcqRel);
        // Counted until its thread has ended, in whatever way, or there is none.
        let counted = Counted(self.clone());
        let serve = move || {
            if let Err(error) = counted.0.serve(socket) {
                tracing::info!("a connection has ended: {error:#}");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("lane".into()).spawn(serve) {
            tracing::warn!(%error, "no thread for a connection");
        }
    }

    /// One connection, from its handshake to its end.
    fn serve(&self, socket: TcpStream) -> Result<()> {
        keep_alive(&socket)?;
        let own = socket.try_clone()?;
        // The session keeps a copy, which alone would not let the client see the end.
        let _ended = Ended(socket.try_clone()?);
        let mut link = Link::accept(socket, &self.tls, Instant::now() + SOON)?;
        let node = link.peer_node().context("the peer is no node")?;
        let Begun { session: connected, lane, given_up, ear, fresh, tag } =
            match self.begin(&mut link, node, own)? {
                Ok(begun) => begun,
                Err(why) => {
                    say(&mut link, 0, 0, &Answer::Refused(why), &[])?;
                    return Ok(());
                }
            };
        let session = &connected.0;
        // Before it is told so: what it asks from then on is answered with leases.
        let _listening = ear.then(|| Listening::new(session));
        say(&mut link, tag, 0, &Answer::Begun { fresh, boot: self.boot.clone() }, &[])?;
        // One connection at a time has the lane: a new one waits until the old one's call is over.
        let mut lane = lock(&lane);
        // Having said that it has begun we do that, whatever becomes of the connection.
        if let Some(answer) = lane.give_up(given_up) {
            release::unheard(session, &self.leases, &answer);
        }
        match self.converse(&mut link, session, &mut lane, ear) {
            Err(error) if matches!(error.downcast_ref(), Some(LinkError::Closed)) => Ok(()),
            done => done,
        }
    }

    /// Hears which lane of which session it is.
    fn begin(&self, link: &mut Link, node: NodeId, socket: TcpStream) -> Result<Result<Begun, String>> {
        let frame = link.recv(Instant::now() + SOON)?;
        let ask: Ask = tern_wire::decode(&frame.payload)?;
        let Ask::Begin { version, session, lane, given_up, ear, purpose } = ask else {
            anyhow::bail!("it does not begin")
        };
        if version != VERSION {
            return Ok(Err(format!("this node speaks version {VERSION} of MFS, the other one {version}")));
        }
        if !self.config.file.mfs.unwrap_or(true) {
            return Ok(Err("this node lets nobody at its files (mfs = false in its ternd.toml)".into()));
        }
        if !Map::read(&self.config.map).is_ok_and(|map| map.contains(node)) {
            return Ok(Err(format!("node {node} is not in this node's map")));
        }
        let mut fresh = false;
        let connected = {
            let mut sessions = lock(&self.sessions);
            let of_node = sessions.keys().filter(|(of, _)| *of == node).count();
            let session = match sessions.get(&(node, session)) {
                Some(session) => session.clone(),
                None if of_node >= MOST_SESSIONS => {
                    return Ok(Err("too many trees are mounted there".into()));
                }
                None => {
                    fresh = true;
                    let new = Session::new(&self.export, &self.budget, purpose)?;
                    sessions.insert((node, session), new.clone());
                    new
                }
            };
            // Before the sessions can be tidied.
            Connected::new(session)
        };
        let Some(lane) = connected.0.lane(lane, socket) else {
            return Ok(Err(format!("there are {MOST_LANES} lanes")));
        };
        Ok(Ok(Begun { session: connected, lane, given_up, ear, fresh, tag: frame.tag }))
    }

    fn converse(&self, link: &mut Link, session: &Arc<Session>, lane: &mut Lane, ear: bool) -> Result<()> {
        let mut acting = Acting::new();
        let performance = Performance { session, export: &self.export, leases: &self.leases };
        let mut out = Vec::new();
        loop {
            // A client may be silent for as long as it likes; the kernel tells when it is gone.
            let frame = match link.recv(Instant::now() + Duration::from_secs(3600)) {
                Err(LinkError::Timeout) => continue,
                frame => packing::unpack(frame?).context("a frame packed as nobody packs")?,
            };
            anyhow::ensure!(frame.kind == ASK, "a frame that does not ask");
            let (ask, data): (Ask, &[u8]) = postcard::take_from_bytes(&frame.payload)?;
            match ask {
                Ask::Begin { .. } => anyhow::bail!("it begins twice"),
                // Its asks are counted, but those of an ear, which begins anew with each connection, and asks nothing again.
                Ask::Release(beside) => {
                    if ear || frame.tag > lane.heard {
                        lane.heard = if ear { lane.heard } else { frame.tag };
                        self.let_go(session, beside);
                    }
                    say(link, frame.tag, 0, &Answer::Done, &[])?;
                }
                Ask::Hear { given_back } => {
                    self.leases.given_back(session, &given_back);
                    let (leases, told) = session.recalled(QUIET).context("it was asked for too much")?;
                    say(link, frame.tag, told, &Answer::Recalled(leases), &[])?;
                }
                Ask::Renew => {
                    self.leases.renew(session);
                    say(link, frame.tag, self.told(session), &Answer::Done, &[])?;
                }
                Ask::Do { caller, steps, beside, deed } => {
                    // Of a connection that was ended for a newer one, which has gone on since.
                    anyhow::ensure!(frame.tag >= lane.newest, "an ask of long ago");
                    lane.newest = frame.tag;
                    if frame.tag > lane.heard {
                        lane.heard = frame.tag;
                        self.let_go(session, beside);
                    }
                    let once = !deed.is_repeatable();
                    if once && lane.last == Some(frame.tag) {
                        let told = tern_wire::encode(&self.told(session))?;
                        send(link, ANSWER, frame.tag, &[&told, &lane.answer], SOON)?;
                        continue;
                    }
                    out.clear();
                    // What is open stays so, for when they may again; nothing can be done with it.
                    let goes_on = session.purpose == Purpose::Guests && deed.reads_what_is_open();
                    let closed = !goes_on && !self.open.load(Ordering::Acquire);
                    let may =
                        if closed { Err(Errno::ACCESS) } else { acting.for_caller(&self.as_here(caller)) };
                    let answer = match may {
                        Err(errno) => Answer::Failed(errno.raw_os_error()),
                        Ok(()) => answer(performance.perform(&steps, deed, data, &mut out)),
                    };
                    if once {
                        lane.last = Some(frame.tag);
                        lane.answer = tern_wire::encode(&answer)?;
                    }
                    say(link, frame.tag, self.told(session), &answer, &out)?;
                }
            }
            link.recycle(frame.payload);
        }
    }

    /// How many leases a session was asked for by now. Who goes by lasting ones hears of all that had been done on this node when something
    /// was done for him: so whatever he sees, he does not go on believing what was before that.
    fn told(&self, session: &Session) -> u64 {
        if session.is_lasting() {
            self.leases.catch_up();
        }
        session.told()
    }

    /// What a session lets go of, and its client knows no more.
    fn let_go(&self, session: &Session, beside: Beside) {
        for (object, count) in beside.forgotten {
            session.forget(object, count);
        }
        for what in beside.released {
            release::release(session, &self.leases, what);
        }
    }

    /// Who a caller of another node is on this one.
    fn as_here(&self, caller: Caller) -> Caller {
        if self.export.squash_root {
            let (uid, gid, groups) = tern_node::without_root((caller.uid, caller.gid, caller.groups));
            return Caller { uid, gid, groups };
        }
        caller
    }

    /// Forgets files that have been removed, of all sessions; after how long that is to be done again.
    fn let_go_of_removed(&self) -> Duration {
        // By the clock on the wall a busy node would come to it a minute later.
        let begun = processor_time();
        let sessions: Vec<_> = lock(&self.sessions).values().cloned().collect();
        let gone: Vec<_> = sessions.iter().flat_map(|session| session.let_go_of_removed()).collect();
        let used = processor_time().saturating_sub(begun);
        // Their room on the disk is given back in it; whoever comes to the door does not wait for that.
        if !gone.is_empty() {
            let _here_then = std::thread::Builder::new().name("removed".into()).spawn(move || drop(gone));
        }
        LOOK.max(used * REST)
    }

    /// Drops the sessions that nobody has come back to.
    fn tidy(&self) {
        let mut sessions = lock(&self.sessions);
        sessions.retain(|_, session| {
            let (connections, since) = *lock(&session.connections);
            connections > 0 || since.elapsed() < self.patience
        });
        let there: Vec<u64> = sessions.values().map(|session| session.number).collect();
        // No session may come and open something between the two.
        self.leases.tidy(&there);
    }
}

/// Ends a connection when its thread leaves it, in whatever way.
struct Ended(TcpStream);

impl Drop for Ended {
    fn drop(&mut self) {
        let _gone_already = self.0.shutdown(Shutdown::Both);
    }
}

/// A connection that has said what it is.
struct Begun {
    session: Connected,
    lane: SharedLane,
    /// The last ask of the lane whose answer is given up.
    given_up: u64,
    ear: bool,
    /// The session is new.
    fresh: bool,
    tag: u64,
}

/// A connection, among all.
struct Counted(Arc<Serving>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A session with one connection more, as long as that lasts.
struct Connected(Arc<Session>);

impl Connected {
    fn new(session: Arc<Session>) -> Self {
        lock(&session.connections).0 += 1;
        Self(session)
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        let mut connections = lock(&self.0.connections);
        connections.0 -= 1;
        connections.1 = Instant::now();
    }
}

/// A session's ear, as long as its connection lasts.
struct Listening<'a>(&'a Session);

impl<'a> Listening<'a> {
    fn new(session: &'a Session) -> Self {
        session.hears(true);
        Self(session)
    }
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        self.0.hears(false);
    }
}

fn answer(done: Result<Answer, Fault>) -> Answer {
    match done {
        Ok(answer) => answer,
        Err(Fault::Forgotten) => Answer::Forgotten,
        Err(Fault::Errno(errno)) => Answer::Failed(errno.raw_os_error()),
    }
}

fn say(link: &mut Link, tag: u64, told: u64, answer: &Answer, data: &[u8]) -> Result<()> {
    let head = tern_wire::encode(&(told, answer))?;
    Ok(send(link, ANSWER, tag, &[&head, data], SOON)?)
}

#[cfg(test)]
mod tests;
