//! An authenticated, encrypted connection that carries frames.
//!
//! One thread uses it, in one of two ways, which may be mixed:
//! * waiting: [`Link::send`] and [`Link::recv`], each with a deadline;
//! * from a poll loop: [`Link::queue`], [`Link::flush`] and [`Link::receive`] never wait. Call `receive` until
//!   it says `None` before polling for readability, since frames may be here already; poll for writability
//!   while [`Link::wants_write`]; and go on reading while writing, as the peer does the same.
//!
//! The socket's own blocking mode does not matter, and is left as it is.

use crate::frame::{Frame, FrameError};
use crate::identity::named_in;
use crate::limits::{FIRST_READ, MOST_PAYLOAD, MOST_READ, MOST_READ_AHEAD, MOST_UNSENT};
use crate::outgoing::Stretch;
use crate::pin::fingerprint_of;
use crate::preamble::Preamble;
use crate::session::{Inbox, Outbound, Session, Step, Wish};
use crate::tls::{ClientTls, ServerTls, Trust};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};
use tern_ids::{Fingerprint, NodeId};

/// Why a link failed. Except after `Timeout`, `Full` and `Frame(TooLong)` of a frame of our own, it is of no
/// further use but to receive what had come before.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer ended it, or is gone.
    #[error("the link was closed")]
    Closed,
    /// The deadline has passed. What was queued stays queued.
    #[error("the peer did not answer in time")]
    Timeout,
    /// Too much is waiting to be sent; the frame was not queued.
    #[error("the peer takes nothing; {MOST_UNSENT} bytes are waiting for it")]
    Full,
    /// No connection could be made.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// Where to.
        address: String,
        /// Why not.
        source: io::Error,
    },
    /// The peer is not who it should be, or says that we are not.
    #[error("the peer is not trusted, or does not trust this node: {0}")]
    Tls(#[from] rustls::Error),
    /// The peer's certificate names no node of the cluster.
    #[error("the peer's certificate names no node of this cluster")]
    Stranger,
    /// The stream holds something else than frames.
    #[error("malformed stream: {0}")]
    Frame(#[from] FrameError),
    /// The socket failed.
    #[error("the link failed: {0}")]
    Io(io::Error),
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
        match error.kind() {
            BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | UnexpectedEof => Self::Closed,
            _ => Self::Io(error),
        }
    }
}

/// A link; see the module.
#[derive(Debug)]
pub struct Link {
    socket: TcpStream,
    session: Session,
    trust: Trust,
    peer: Option<(Fingerprint, Option<(NodeId, String)>)>,
    incoming: Stretch,
    outgoing: Stretch,
    inbox: Inbox,
    /// How much is read at once; grows while reads come back full.
    read_size: usize,
    /// The last read came back short, so that the socket was empty then.
    drained: bool,
    /// What has been read holds no whole record any more.
    starved: bool,
    /// The session has failed, and must not be asked again.
    broken: bool,
}

impl Link {
    /// Connects to `HOST:PORT`, writes the preamble, and authenticates.
    ///
    /// # Errors
    /// If there is no connection by the deadline, or the peer is not the expected one. (A peer that does not
    /// accept *us* says so only later: the first `recv` fails then.)
    pub fn connect(
        address: &str,
        preamble: Preamble,
        tls: &ClientTls,
        deadline: Instant,
    ) -> Result<Self, LinkError> {
        let failed = |source| LinkError::Connect { address: address.into(), source };
        let socket = connect(address, deadline).map_err(failed)?;
        let session = UnbufferedClientConnection::new(tls.config.clone(), tls.name.clone())?;
        let mut link = Self::new(socket, Session::Client(session), tls.trust.clone())?;
        let bytes = preamble.to_bytes();
        link.outgoing.room(bytes.len())[..bytes.len()].copy_from_slice(&bytes);
        link.outgoing.grown(bytes.len());
        link.handshake(deadline)?;
        Ok(link)
    }

    /// Authenticates whoever connected; the preamble has been read already.
    ///
    /// # Errors
    /// If the peer is not one of the expected, or not by the deadline.
    pub fn accept(socket: TcpStream, tls: &ServerTls, deadline: Instant) -> Result<Self, LinkError> {
        let session = UnbufferedServerConnection::new(tls.config.clone())?;
        let mut link = Self::new(socket, Session::Server(session), tls.trust.clone())?;
        link.handshake(deadline)?;
        Ok(link)
    }

    fn new(socket: TcpStream, session: Session, trust: Trust) -> Result<Self, LinkError> {
        socket.set_nodelay(true)?;
        Ok(Self {
            socket,
            session,
            trust,
            peer: None,
            incoming: Stretch::default(),
            outgoing: Stretch::default(),
            inbox: Inbox::default(),
            read_size: FIRST_READ,
            drained: false,
            starved: false,
            broken: false,
        })
    }

    fn handshake(&mut self, deadline: Instant) -> Result<(), LinkError> {
        while self.session.is_handshaking() || self.wants_write() {
            match self.step(&Wish::Receive)? {
                Step::NeedsInput => {
                    let flushed = self.flush()?;
                    if self.session.is_handshaking() {
                        self.wait(deadline, !flushed)?;
                        self.read()?;
                    } else if !flushed {
                        self.wait_for(PollFlags::OUT, deadline)?;
                    }
                }
                Step::Closed => return Err(LinkError::Closed),
                Step::Progress | Step::Sealed => {}
            }
        }
        let certificate = self.session.peer_certificate();
        self.peer = certificate.map(|c| (fingerprint_of(&c), named_in(&c)));
        if let Trust::Cluster(own) = &self.trust {
            match &self.peer {
                Some((_, Some((_, cluster)))) if cluster == own => {}
                _ => return Err(LinkError::Stranger),
            }
        }
        Ok(())
    }

    /// The fingerprint of the peer's certificate; `None` if it showed none (a machine that joins).
    pub fn peer_fingerprint(&self) -> Option<Fingerprint> {
        self.peer.as_ref().map(|(fingerprint, _)| *fingerprint)
    }

    /// Which member of the cluster the peer is; `None` on links that are not between members as such.
    pub fn peer_node(&self) -> Option<NodeId> {
        match (&self.trust, &self.peer) {
            (Trust::Cluster(_), Some((_, Some((node, _))))) => Some(*node),
            _ => None,
        }
    }

    /// The peer's address.
    ///
    /// # Errors
    /// If the connection is gone.
    pub fn peer_address(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    /// This end's address.
    ///
    /// # Errors
    /// If the connection is gone.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Queues a frame whose payload is these parts one after the other, and sends what the socket takes.
    ///
    /// # Errors
    /// `Full` or `Frame(TooLong)`: it was not queued, and nothing else has changed. Otherwise the link has
    /// failed.
    pub fn queue(&mut self, kind: u8, tag: u64, parts: &[&[u8]]) -> Result<(), LinkError> {
        self.queue_flagged(kind, 0, tag, parts)
    }

    /// [`Self::queue`] with flags.
    ///
    /// # Errors
    /// As `queue`.
    pub fn queue_flagged(
        &mut self,
        kind: u8,
        flags: u16,
        tag: u64,
        parts: &[&[u8]],
    ) -> Result<(), LinkError> {
        let length: usize = parts.iter().map(|p| p.len()).sum();
        if length > MOST_PAYLOAD {
            return Err(FrameError::TooLong(length).into());
        }
        if self.outgoing.len() + length > MOST_UNSENT {
            return Err(LinkError::Full);
        }
        let wish = Wish::Seal(&Outbound { kind, flags, tag, parts });
        loop {
            match self.step(&wish)? {
                Step::Sealed => break,
                Step::Progress => {}
                Step::NeedsInput | Step::Closed => return Err(LinkError::Closed),
            }
        }
        self.flush()?;
        Ok(())
    }

    /// Sends what the socket takes of what is queued; true if nothing is left.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn flush(&mut self) -> io::Result<bool> {
        self.outgoing.send(&self.socket)
    }

    /// Encrypted bytes that the socket has not taken yet.
    pub fn unsent(&self) -> usize {
        self.outgoing.len()
    }

    /// Whether to poll for writability, and then `flush`.
    pub fn wants_write(&self) -> bool {
        self.unsent() > 0
    }

    /// The next frame, if it has come; never waits. Reads a bounded amount, so that one busy link does not
    /// starve the others of a loop.
    ///
    /// # Errors
    /// `Closed` when the peer has ended the link, after all its frames; else the link has failed.
    pub fn receive(&mut self) -> Result<Option<Frame>, LinkError> {
        let mut budget = 2 * MOST_PAYLOAD;
        loop {
            if let Some(frame) = self.inbox.pop() {
                return Ok(Some(frame));
            }
            match self.step(&Wish::Receive)? {
                Step::Progress => continue,
                Step::Closed => return Err(LinkError::Closed),
                Step::NeedsInput | Step::Sealed => self.starved = true,
            }
            if std::mem::take(&mut self.drained) || budget == 0 {
                break;
            }
            match self.read()? {
                Some(count) => {
                    self.starved = false;
                    budget = budget.saturating_sub(count);
                }
                None => break,
            }
        }
        // Answers of TLS itself, which are rare.
        if self.wants_write() {
            self.flush()?;
        }
        Ok(None)
    }

    /// From now on no frame with a longer payload is taken: of a peer who has still to prove who he is.
    pub fn limit(&mut self, most: usize) {
        self.inbox.decoder.limit(most);
    }

    /// Whether a frame is here, or may be in what has been read, so that `receive` needs no socket.
    pub fn has_frame(&self) -> bool {
        !self.inbox.is_empty() || (!self.starved && self.incoming.len() > 0)
    }

    /// Gives back the payload of a frame that is done with, so that the next one needs no new memory.
    pub fn recycle(&mut self, payload: Vec<u8>) {
        self.inbox.decoder.recycle(payload);
    }

    /// Queues a frame and waits until all that is queued has left. Reads ahead meanwhile, within a limit, so
    /// that two peers which send to each other at once do not wait for each other.
    ///
    /// # Errors
    /// `Timeout`: the frame is queued and partly sent. Others as `queue`.
    pub fn send(&mut self, kind: u8, tag: u64, parts: &[&[u8]], deadline: Instant) -> Result<(), LinkError> {
        self.queue(kind, tag, parts)?;
        self.drain(deadline)
    }

    /// Waits until all that is queued has left; reads ahead as `send` does.
    ///
    /// # Errors
    /// `Timeout`, or those of the link.
    pub fn drain(&mut self, deadline: Instant) -> Result<(), LinkError> {
        while !self.flush()? {
            let read_ahead = self.inbox.bytes() < MOST_READ_AHEAD;
            let interest = if read_ahead { PollFlags::OUT | PollFlags::IN } else { PollFlags::OUT };
            let events = self.wait_for(interest, deadline)?;
            if read_ahead && events.intersects(PollFlags::IN | PollFlags::HUP) {
                self.read()?;
                while self.step(&Wish::Receive)? == Step::Progress {}
            }
        }
        Ok(())
    }

    /// Waits for the next frame; sends meanwhile what is queued.
    ///
    /// # Errors
    /// `Timeout`, `Closed`, or the link has failed.
    pub fn recv(&mut self, deadline: Instant) -> Result<Frame, LinkError> {
        loop {
            if let Some(frame) = self.receive()? {
                return Ok(frame);
            }
            let unsent = self.wants_write();
            self.wait(deadline, unsent)?;
            if unsent {
                self.flush()?;
            }
        }
    }

    /// Says goodbye: sends what is queued, then waits for the peer to close its end, so that nothing sent is
    /// lost to a reset of ours. Frames that still come are dropped.
    ///
    /// # Errors
    /// `Timeout` if the peer does not close by the deadline. That it has closed is no proof that it has read
    /// everything; what needs proof is answered by a frame.
    pub fn finish(mut self, deadline: Instant) -> Result<(), LinkError> {
        match self.say_goodbye(deadline) {
            Ok(()) | Err(LinkError::Closed) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn say_goodbye(&mut self, deadline: Instant) -> Result<(), LinkError> {
        while self.step(&Wish::Goodbye)? == Step::Progress {}
        self.drain(deadline)?;
        self.socket.shutdown(Shutdown::Write)?;
        loop {
            let frame = self.recv(deadline)?;
            self.recycle(frame.payload);
        }
    }

    fn step(&mut self, wish: &Wish<'_>) -> Result<Step, LinkError> {
        if self.broken {
            return Err(LinkError::Closed);
        }
        let outcome = self.session.step(wish, &mut self.incoming, &mut self.outgoing, &mut self.inbox);
        if let Err(e) = &outcome {
            self.broken = true;
            if matches!(e, LinkError::Tls(_)) {
                // One more step hands out the alert that tells the peer why. A second one would make
                // rustls look at the same bytes again, which it asserts that nobody does.
                let (incoming, outgoing) = (&mut self.incoming, &mut self.outgoing);
                let _alert = self.session.step(&Wish::Receive, incoming, outgoing, &mut self.inbox);
                let _best_effort = self.outgoing.send(&self.socket);
            }
        }
        outcome
    }

    /// One read from the socket. `None` if nothing was there.
    fn read(&mut self) -> Result<Option<usize>, LinkError> {
        // A record and a bit always fit, so that what is left unused here is never a whole record.
        let Some(count) = self.incoming.receive(&self.socket, self.read_size)? else {
            self.drained = false;
            return Ok(None);
        };
        if count == 0 {
            return Err(LinkError::Closed);
        }
        self.drained = count < self.read_size;
        if !self.drained && !self.session.is_handshaking() {
            self.read_size = (self.read_size * 4).min(MOST_READ);
        }
        Ok(Some(count))
    }

    fn wait(&self, deadline: Instant, also_write: bool) -> Result<(), LinkError> {
        let write = if also_write { PollFlags::OUT } else { PollFlags::empty() };
        self.wait_for(PollFlags::IN | write, deadline).map(|_events| ())
    }

    fn wait_for(&self, interest: PollFlags, deadline: Instant) -> Result<PollFlags, LinkError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 });
            let mut fds = [PollFd::new(&self.socket, interest)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) if left == Duration::ZERO => return Err(LinkError::Timeout),
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(fds[0].revents()),
                Err(e) => return Err(LinkError::Io(e.into())),
            }
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for Link {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Tries each address of a name in turn.
fn connect(address: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for target in address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left == Duration::ZERO {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match TcpStream::connect_timeout(&target, left) {
            Ok(socket) => return Ok(socket),
            Err(e) => last = e,
        }
    }
    Err(last)
}
