//! An authenticated, encrypted connection that carries frames.
//!
//! One thread uses it, in one of two ways, which may be mixed:
//! * blocking: [`Link::send`] and [`Link::recv`], each with a deadline;
//! * from a poll loop: [`Link::queue`], [`Link::flush`] and [`Link::receive`] never block. Call
//!   `receive` until it returns `None` before polling for readability, since frames may be buffered
//!   already; poll for writability while [`Link::wants_write`] is true; and continue to read while
//!   writing, as the peer does the same.
//!
//! The blocking mode of the socket does not matter, and is not changed.

use crate::byte_queue::ByteQueue;
use crate::frame::{Frame, FrameError};
use crate::identity::{key_in_certificate, node_in_certificate};
use crate::limits::{
    FIRST_READ_SIZE, HANDSHAKE_TIMEOUT, MAX_PAYLOAD, MAX_READ_AHEAD, MAX_READ_SIZE, MAX_UNSENT,
    SLOW_SHIM_TIMEOUT,
};
use crate::liveness::{AckWatch, is_all_acknowledged};
use crate::pin::fingerprint_of;
use crate::preamble::Preamble;
use crate::session::{Action, FrameQueue, OutgoingFrame, Session, StepResult};
use crate::tls::{ClientTls, ServerTls, Trust};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_ids::{Fingerprint, NodeId, ShimId};

/// How often to check, during the handshake with a slow shim, whether its machine acknowledges.
const ACK_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Why a link failed. After `Timeout`, `Full`, and `Frame(TooLong)` for a frame to be sent, the
/// link is still usable. After all others it can only return frames received before.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer closed it, or is gone.
    #[error("the link was closed")]
    Closed,
    /// The deadline has passed. Queued frames stay queued.
    #[error("the peer did not answer in time")]
    Timeout,
    /// Too many bytes are unsent. The frame was not queued.
    #[error("the peer does not receive; {MAX_UNSENT} bytes are unsent")]
    Full,
    /// No connection could be made.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// The address.
        address: String,
        /// The cause.
        source: io::Error,
    },
    /// The peer's identity is not the expected one, or the peer does not accept this side's.
    #[error("the peer is not trusted, or does not trust this node: {0}")]
    Tls(#[from] rustls::Error),
    /// The peer's certificate does not name a node of the cluster.
    #[error("the peer's certificate does not name a node of this cluster")]
    NotAMember,
    /// The peer has a certificate for this node's number, but the map binds the number to no key or to
    /// another.
    #[error("the peer was node {0}, and is not in this node's map now")]
    NotInMap(NodeId),
    /// The stream contains something other than frames.
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

/// A link; see the module's description.
#[derive(Debug)]
pub struct Link {
    /// Shared with [`Members`](crate::Members) only.
    socket: Arc<TcpStream>,
    session: Session,
    trust: Trust,
    peer: Option<(Fingerprint, Option<(NodeId, String)>)>,
    member: Option<(NodeId, Fingerprint)>,
    incoming: ByteQueue,
    outgoing: ByteQueue,
    inbox: FrameQueue,
    /// Size of the next read. Grows while reads return as much as requested.
    read_size: usize,
    ack_watch: AckWatch,
    /// The last read returned less than requested, so the socket was empty then. `receive` then
    /// skips its next read, which would find no bytes.
    drained: bool,
    /// The bytes that were read contain no further complete record.
    starved: bool,
    /// The session failed and must not be used again.
    broken: bool,
}

impl Link {
    /// Connects to `HOST:PORT`, writes the preamble, and authenticates.
    ///
    /// # Errors
    /// If there is no connection by the deadline, or the peer is not the expected one. A peer that
    /// does not accept *this* side reports it later: then the first `recv` fails.
    pub fn connect(
        address: &str,
        preamble: Preamble,
        tls: &ClientTls,
        deadline: Instant,
    ) -> Result<Self, LinkError> {
        Self::connect_patiently(address, preamble, tls, (deadline, deadline))
    }

    /// Connects to a shim, which may be slow on a busy machine.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect); `Timeout` if the machine does not answer within
    /// [`HANDSHAKE_TIMEOUT`], or the shim within [`SLOW_SHIM_TIMEOUT`] after that.
    pub fn connect_to_shim(address: &str, shim: ShimId, tls: &ClientTls) -> Result<Self, LinkError> {
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        Self::connect_patiently(address, Preamble::Shim(shim), tls, (deadline, deadline + SLOW_SHIM_TIMEOUT))
    }

    /// Connects. Fails at the first deadline if the peer's machine does not acknowledge what was
    /// sent, otherwise at the second.
    fn connect_patiently(
        address: &str,
        preamble: Preamble,
        tls: &ClientTls,
        (deadline, last_deadline): (Instant, Instant),
    ) -> Result<Self, LinkError> {
        let failed = |source| LinkError::Connect { address: address.into(), source };
        let socket = connect(address, deadline).map_err(failed)?;
        let session = UnbufferedClientConnection::new(tls.config.clone(), tls.name.clone())?;
        let mut link = Self::new(socket, Session::Client(session), tls.trust.clone())?;
        let bytes = preamble.to_bytes();
        link.outgoing.free_space(bytes.len())[..bytes.len()].copy_from_slice(&bytes);
        link.outgoing.commit(bytes.len());
        link.handshake(deadline, last_deadline)?;
        Ok(link)
    }

    /// Authenticates the client of an accepted connection after its preamble has been read.
    ///
    /// # Errors
    /// If the client is not an expected one, or does not answer by the deadline.
    pub fn accept(socket: TcpStream, tls: &ServerTls, deadline: Instant) -> Result<Self, LinkError> {
        let session = UnbufferedServerConnection::new(tls.config.clone())?;
        let mut link = Self::new(socket, Session::Server(session), tls.trust.clone())?;
        link.handshake(deadline, deadline)?;
        Ok(link)
    }

    fn new(socket: TcpStream, session: Session, trust: Trust) -> Result<Self, LinkError> {
        socket.set_nodelay(true)?;
        Ok(Self {
            socket: Arc::new(socket),
            session,
            trust,
            peer: None,
            member: None,
            incoming: ByteQueue::default(),
            outgoing: ByteQueue::default(),
            inbox: FrameQueue::default(),
            read_size: FIRST_READ_SIZE,
            ack_watch: AckWatch::default(),
            drained: false,
            starved: false,
            broken: false,
        })
    }

    fn handshake(&mut self, deadline: Instant, last_deadline: Instant) -> Result<(), LinkError> {
        while self.session.is_handshaking() || self.wants_write() {
            match self.step(&Action::Receive)? {
                StepResult::NeedsInput => {
                    let flushed = self.flush()?;
                    if self.session.is_handshaking() {
                        self.wait_patiently((deadline, last_deadline), !flushed)?;
                        self.read()?;
                    } else if !flushed {
                        self.wait_for(PollFlags::OUT, last_deadline)?;
                    }
                }
                StepResult::Closed => return Err(LinkError::Closed),
                StepResult::Progress | StepResult::Encrypted => {}
            }
        }
        let certificate = self.session.peer_certificate();
        self.peer = certificate.as_ref().map(|c| (fingerprint_of(c), node_in_certificate(c)));
        let Trust::Cluster(own, members) = &self.trust else { return Ok(()) };
        let (Some((_, Some((node, cluster)))), Some(key)) =
            (&self.peer, certificate.as_ref().and_then(key_in_certificate))
        else {
            return Err(LinkError::NotAMember);
        };
        match cluster == own {
            false => Err(LinkError::NotAMember),
            true if members.admit(*node, key, &self.socket) => {
                self.member = Some((*node, key));
                Ok(())
            }
            true => Err(LinkError::NotInMap(*node)),
        }
    }

    /// The fingerprint of the peer's certificate; `None` if the peer has no certificate (a joining
    /// machine).
    pub fn peer_fingerprint(&self) -> Option<Fingerprint> {
        self.peer.as_ref().map(|(fingerprint, _)| *fingerprint)
    }

    /// The node that the peer is; `None` on links that do not authenticate members.
    pub fn peer_node(&self) -> Option<NodeId> {
        self.member.map(|(node, _)| node)
    }

    /// The member that the peer is, with its key; `None` on links that do not authenticate members.
    pub fn peer_member(&self) -> Option<(NodeId, Fingerprint)> {
        self.member
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

    /// Queues a frame whose payload is the concatenation of `parts`, and sends what the socket
    /// accepts.
    ///
    /// # Errors
    /// After `Full` or `Frame(TooLong)` the frame is not queued, and nothing has changed. After any
    /// other error the link has failed.
    pub fn queue(&mut self, kind: u8, tag: u64, parts: &[&[u8]]) -> Result<(), LinkError> {
        self.queue_flagged(kind, 0, tag, parts)
    }

    /// [`Self::queue`] with flags.
    ///
    /// # Errors
    /// Those of `queue`.
    pub fn queue_flagged(
        &mut self,
        kind: u8,
        flags: u16,
        tag: u64,
        parts: &[&[u8]],
    ) -> Result<(), LinkError> {
        let length: usize = parts.iter().map(|p| p.len()).sum();
        if length > MAX_PAYLOAD {
            return Err(FrameError::TooLong(length).into());
        }
        if self.outgoing.len() + length > MAX_UNSENT {
            return Err(LinkError::Full);
        }
        let action = Action::Encrypt(&OutgoingFrame { kind, flags, tag, parts });
        loop {
            match self.step(&action)? {
                StepResult::Encrypted => break,
                StepResult::Progress => {}
                StepResult::NeedsInput | StepResult::Closed => return Err(LinkError::Closed),
            }
        }
        self.flush()?;
        Ok(())
    }

    /// Sends queued bytes as far as the socket accepts them. Returns true if none are left.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn flush(&mut self) -> io::Result<bool> {
        self.outgoing.send(&self.socket)
    }

    /// How long the peer's machine has acknowledged nothing, although something was sent to it. A
    /// slow or stopped peer process does not count: its kernel still acknowledges. The caller must
    /// call this regularly, each time after it has queued a frame.
    pub fn time_without_ack(&mut self) -> Duration {
        // The caller's next frame reports an error of the socket.
        let _sent_or_failed = self.flush();
        self.ack_watch.time_without_ack(&self.socket)
    }

    /// Number of encrypted bytes that the socket has not accepted yet.
    pub fn unsent(&self) -> usize {
        self.outgoing.len()
    }

    /// Whether to poll for writability and then call `flush`.
    pub fn wants_write(&self) -> bool {
        self.unsent() > 0
    }

    /// The next frame, if one has arrived; never blocks. Reads a limited amount, so that a busy
    /// link does not starve the other links of a loop.
    ///
    /// # Errors
    /// `Closed` when the peer has closed the link and all its frames were returned. After any other
    /// error the link has failed.
    pub fn receive(&mut self) -> Result<Option<Frame>, LinkError> {
        let mut budget = 2 * MAX_PAYLOAD;
        loop {
            if let Some(frame) = self.inbox.pop() {
                return Ok(Some(frame));
            }
            match self.step(&Action::Receive)? {
                StepResult::Progress => continue,
                StepResult::Closed => return Err(LinkError::Closed),
                StepResult::NeedsInput | StepResult::Encrypted => self.starved = true,
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
        // TLS may have queued a reply of its own, which is rare.
        if self.wants_write() {
            self.flush()?;
        }
        Ok(None)
    }

    /// Limits the payload of frames received from now on, for a peer that is not authenticated yet.
    pub fn limit_payload(&mut self, max: usize) {
        self.inbox.decoder.limit_payload(max);
    }

    /// Whether a frame is buffered, or may be. If so, call `receive` before polling the socket.
    pub fn has_frame(&self) -> bool {
        !self.inbox.is_empty() || (!self.starved && self.incoming.len() > 0)
    }

    /// Returns the payload buffer of a frame for reuse.
    pub fn recycle(&mut self, payload: Vec<u8>) {
        self.inbox.decoder.recycle(payload);
    }

    /// Queues a frame and waits until all queued frames are sent. Meanwhile reads ahead, up to a
    /// limit, so that two peers that send to each other at once do not deadlock.
    ///
    /// # Errors
    /// After `Timeout` the frame is queued and partly sent. Otherwise those of `queue`.
    pub fn send(&mut self, kind: u8, tag: u64, parts: &[&[u8]], deadline: Instant) -> Result<(), LinkError> {
        self.queue(kind, tag, parts)?;
        self.drain(deadline)
    }

    /// Waits until all queued frames are sent. Reads ahead like `send`.
    ///
    /// # Errors
    /// `Timeout`, or those of the link.
    pub fn drain(&mut self, deadline: Instant) -> Result<(), LinkError> {
        while !self.flush()? {
            let read_ahead = self.inbox.bytes() < MAX_READ_AHEAD;
            let interest = if read_ahead { PollFlags::OUT | PollFlags::IN } else { PollFlags::OUT };
            let events = self.wait_for(interest, deadline)?;
            if read_ahead && events.intersects(PollFlags::IN | PollFlags::HUP) {
                self.read()?;
                while self.step(&Action::Receive)? == StepResult::Progress {}
            }
        }
        Ok(())
    }

    /// Waits for the next frame. Meanwhile sends queued frames.
    ///
    /// # Errors
    /// `Timeout`, `Closed`, or the link has failed.
    pub fn recv(&mut self, deadline: Instant) -> Result<Frame, LinkError> {
        loop {
            if let Some(frame) = self.receive()? {
                // The next call may come much later, when the socket may have bytes again.
                self.drained = false;
                return Ok(frame);
            }
            let unsent = self.wants_write();
            self.wait(deadline, unsent)?;
            if unsent {
                self.flush()?;
            }
        }
    }

    /// Closes the link in order: sends all queued frames, then waits for the peer to close its end,
    /// so that a reset does not lose sent data. Frames still received are dropped.
    ///
    /// # Errors
    /// `Timeout` if the peer does not close by the deadline. A close does not prove that the peer
    /// has processed everything; where that matters the peer must reply with a frame.
    pub fn finish(mut self, deadline: Instant) -> Result<(), LinkError> {
        match self.close(deadline) {
            Ok(()) | Err(LinkError::Closed) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn close(&mut self, deadline: Instant) -> Result<(), LinkError> {
        while self.step(&Action::Close)? == StepResult::Progress {}
        self.drain(deadline)?;
        self.socket.shutdown(Shutdown::Write)?;
        loop {
            let frame = self.recv(deadline)?;
            self.recycle(frame.payload);
        }
    }

    fn step(&mut self, action: &Action<'_>) -> Result<StepResult, LinkError> {
        if self.broken {
            return Err(LinkError::Closed);
        }
        let outcome = self.session.step(action, &mut self.incoming, &mut self.outgoing, &mut self.inbox);
        if let Err(e) = &outcome {
            self.broken = true;
            if matches!(e, LinkError::Tls(_)) {
                // One more step produces the alert that tells the peer the reason. A further step
                // would make rustls process the same bytes again, which violates its assertions.
                let (incoming, outgoing) = (&mut self.incoming, &mut self.outgoing);
                let _alert = self.session.step(&Action::Receive, incoming, outgoing, &mut self.inbox);
                let _best_effort = self.outgoing.send(&self.socket);
            }
        }
        outcome
    }

    /// Reads once from the socket. `None` if no bytes are available.
    fn read(&mut self) -> Result<Option<usize>, LinkError> {
        // Each read requests more than a record, so it can complete the record whose first part is
        // already buffered.
        let Some(count) = self.incoming.receive(&self.socket, self.read_size)? else {
            self.drained = false;
            return Ok(None);
        };
        if count == 0 {
            return Err(LinkError::Closed);
        }
        self.drained = count < self.read_size;
        if !self.drained && !self.session.is_handshaking() {
            self.read_size = (self.read_size * 4).min(MAX_READ_SIZE);
        }
        Ok(Some(count))
    }

    fn wait(&self, deadline: Instant, also_write: bool) -> Result<(), LinkError> {
        let write = if also_write { PollFlags::OUT } else { PollFlags::empty() };
        self.wait_for(PollFlags::IN | write, deadline).map(|_events| ())
    }

    /// Waits until the first deadline, and until the second while the peer's machine acknowledges.
    /// The peer's machine has a moment to acknowledge the last segment.
    fn wait_patiently(
        &self,
        (deadline, last_deadline): (Instant, Instant),
        also_write: bool,
    ) -> Result<(), LinkError> {
        let next_check = || last_deadline.min(Instant::now() + ACK_CHECK_INTERVAL);
        let mut until = deadline.max(next_check().min(last_deadline));
        loop {
            match self.wait(until, also_write) {
                Err(LinkError::Timeout) if until < last_deadline && is_all_acknowledged(&self.socket) => {
                    until = next_check();
                }
                waited => return waited,
            }
        }
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

/// Tries the addresses of a name one after the other.
fn connect(address: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name does not resolve to an address");
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
