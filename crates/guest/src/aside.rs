//! What may take seconds is done aside of the loop, in threads: proving who somebody is, and asking our node's
//! daemon. A peer that never answers holds up nobody but itself.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use tern_control::{Reply, Request, stream};
use tern_ids::{Epoch, Fingerprint, HomePid, NodeId, ShimId};
use tern_wire::{Ephemeral, Link, Preamble};

/// How long a peer may take to prove who it is.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// How long our daemon may take to ask home's.
const ANSWER: Duration = Duration::from_secs(10);
/// So many who have come prove who they are at a time: they cannot make us start threads without a limit.
const MOST: usize = 16;

/// What a thread reports.
#[derive(Debug)]
pub enum Event {
    /// The caller of this number has proven who he is.
    Came(u64, Box<Link>),
    /// The next node of a guest that is to depart was reached, or not; why.
    Reached(HomePid, Epoch, Result<Box<Link>, String>),
    /// Home was asked, and these lives are over there.
    Over(Vec<(HomePid, Epoch)>),
}

/// The threads of one shim.
#[derive(Debug)]
pub struct Aside {
    key: Arc<Ephemeral>,
    accept: Vec<Fingerprint>,
    events: (Sender<Event>, Receiver<Event>),
    bell: Arc<OwnedFd>,
    callers: u64,
    proving: Arc<AtomicUsize>,
    asking: Arc<AtomicUsize>,
}

impl Aside {
    /// Of a shim with this key, which accepts these.
    ///
    /// # Errors
    /// If there are too many descriptors.
    pub fn new(key: Ephemeral, accept: Vec<Fingerprint>) -> io::Result<Self> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let bell = Arc::new(rustix::event::eventfd(0, flags)?);
        let (proving, asking) = Default::default();
        Ok(Self { key: Arc::new(key), accept, events: channel(), bell, callers: 0, proving, asking })
    }

    /// What has been reported since it was last asked.
    pub fn events(&self) -> Vec<Event> {
        // Before they are taken, so that none falls between.
        let mut count = [0; 8];
        let _was_not_rung = rustix::io::read(&self.bell, &mut count);
        self.events.1.try_iter().collect()
    }

    /// Has somebody who has connected prove who he is.
    pub fn came(&mut self, socket: TcpStream) {
        let tls = match tern_wire::pinned_server(&self.key, &self.accept) {
            Ok(tls) => tls,
            Err(error) => return tracing::error!(%error, "nobody can be let in"),
        };
        self.callers += 1;
        let caller = self.callers;
        let begun = self.begin(Some(&self.proving), move || {
            match Link::accept(socket, &tls, Instant::now() + HANDSHAKE) {
                Ok(link) => Some(Event::Came(caller, Box::new(link))),
                Err(error) => {
                    tracing::warn!(%error, "a connection was refused");
                    None
                }
            }
        });
        if !begun {
            tracing::warn!("a connection was refused: too many have come at once");
        }
    }

    /// Connects to the next node of a guest that is to depart.
    pub fn reach(&self, pid: HomePid, life: Epoch, address: String, shim: ShimId, peer: Fingerprint) {
        let key = Arc::clone(&self.key);
        let reach = move || {
            let link = tern_wire::pinned_client(&key, peer).map_err(|e| e.to_string()).and_then(|tls| {
                Link::connect(&address, Preamble::Shim(shim), &tls, Instant::now() + HANDSHAKE)
                    .map_err(|e| e.to_string())
            });
            Some(Event::Reached(pid, life, link.map(Box::new)))
        };
        if !self.begin(None, reach) {
            let none = Err("this node has no room for a thread".into());
            let _we_hold_the_other_end = self.events.0.send(Event::Reached(pid, life, none));
        }
    }

    /// Asks home's daemon, by way of our own, which of these lives are over there. One question at a time; what is
    /// not known is not over.
    pub fn ask(&self, run_dir: PathBuf, node: NodeId, shim: ShimId, lives: Vec<(HomePid, Epoch)>) {
        if self.asking.load(Ordering::Acquire) > 0 {
            return;
        }
        self.begin(Some(&self.asking), move || {
            let over = |&(pid, epoch): &(HomePid, Epoch)| {
                let answer = ask(&run_dir, &Request::Awaited { node, shim, pid, epoch });
                matches!(answer, Ok(Reply::Located { alive: Some(false), .. }))
            };
            Some(Event::Over(lives.into_iter().filter(over).collect()))
        });
    }

    /// Does something in a thread, unless [`MOST`] of its kind are under way.
    fn begin(
        &self,
        kind: Option<&Arc<AtomicUsize>>,
        work: impl FnOnce() -> Option<Event> + Send + 'static,
    ) -> bool {
        let place = match kind.map(Place::take) {
            Some(None) => return false,
            place => place.flatten(),
        };
        let (events, bell) = (self.events.0.clone(), Arc::clone(&self.bell));
        let thread = std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
            let event = work();
            drop(place);
            if let Some(event) = event {
                let _loop_is_gone = events.send(event);
                let _full_is_rung = rustix::io::write(&bell, &1u64.to_ne_bytes());
            }
        });
        thread.is_ok()
    }
}

impl AsFd for Aside {
    /// Readable when there are events.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// One of [`MOST`].
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(of: &Arc<AtomicUsize>) -> Option<Self> {
        // Only the loop takes places, so that none is taken between the look and the step.
        if of.load(Ordering::Acquire) >= MOST {
            return None;
        }
        of.fetch_add(1, Ordering::AcqRel);
        Some(Self(Arc::clone(of)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Asks this node's daemon.
pub(crate) fn ask(run_dir: &std::path::Path, request: &Request) -> io::Result<Reply> {
    let mut daemon = UnixStream::connect(run_dir.join("control"))?;
    daemon.set_read_timeout(Some(ANSWER))?;
    daemon.set_write_timeout(Some(ANSWER))?;
    stream::write(&mut daemon, request)?;
    stream::read(&mut daemon)
}
