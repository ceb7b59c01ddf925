//! Connections that this node has taken from home (docs/design/connections.md). The guest has the
//! socket open itself, under the number that it has at home, and calls that transfer data on it are
//! let through.
//!
//! Home offers a connection ([`FileNotice::Connection`]). With the next transfer on it, this node's
//! tern-net takes it from home. It is returned before a call that could share the descriptor, that
//! needs home's network, or that names several descriptors, and before the process departs. Until
//! then home's descriptor of it is a placeholder.
//!
//! A call that waits for several descriptors, connections of this node and others, is let through
//! as well ([`waiting`]).
//!
//! Taking and returning is done by a worker, for one connection of a process at a time, while the
//! thread waits in its trap or is stopped. A connection that was taken for a call which is not made
//! any more is kept, and is returned like any other.
//!
//! If the process has several threads, all their traps wait meanwhile. A connection is not taken while
//! another thread's call at home may use it, and is returned when no thread is in a call that was let
//! through: such threads are interrupted, and make their calls again.

mod calls;
mod epoll_sets;
mod plan;
mod waiting;

use crate::fastpath::NativeDescriptors;
use crate::process::space::MAPPED_FILE;
use epoll_sets::EpollSets;
use plan::names_descriptors;
use rustix::net::{SocketAddrAny, getpeername, getsockname};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::control_socket;
use tern_control::shim::{ShimRequest, net_socket};
use tern_ids::{ConnectionToken, HomePid, NodeId};
use tern_migrate::message::{FileNotice, Message};
use tern_readiness::ReadinessFile;
use tern_syscall::Call;
use tern_tracee::listener::Notification;
pub(crate) use waiting::NativeWait;
use waiting::WatchedDescriptors;

/// How long tern-net may take to move a connection. If home is unreachable it waits until that is
/// decided, and the program with it.
const MOVE_TIMEOUT: Duration = Duration::from_secs(90);

/// How long a connection that tern-net cannot return is tried again, and how often. Its program waits.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);
const RETURN_INTERVAL: Duration = Duration::from_millis(100);

/// A connection that was returned so often is not taken any more.
const MAX_RETURNS: u32 = 4;

/// After a connection could not be taken, none of the process is tried for this time, then for four
/// times as long, and so on up to the maximum: all its traps wait for each try. After so many failures
/// a connection stays at home.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(64);
const MAX_FAILURES: u32 = 5;

/// The connections of a process that home has offered.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    by_fd: BTreeMap<i32, Connection>,
    /// The connection that is being moved.
    moving: Option<Moving>,
    /// Number of moves so far.
    moves: u64,
    /// No connection is taken before this time, and the length of this pause.
    pause: Option<(Instant, Duration)>,
    /// The descriptors at home that are waited for together with connections.
    watched: WatchedDescriptors,
    /// The epoll sets that have connections as members.
    sets: EpollSets,
    /// Whether there are other threads than the one whose trap is handled, and their calls. The calls are
    /// those at the time of this trap.
    others: OtherCalls,
    /// The epoll sets that threads may be changing at home.
    changed_sets: BTreeMap<HomePid, i32>,
    /// A trap waits until no thread is in a call that was let through.
    awaits_native_calls: bool,
}

/// The calls in which the other threads of a process are.
#[derive(Debug, Default)]
pub(crate) struct OtherCalls {
    /// Whether there are other threads.
    exist: bool,
    /// Home makes these. A call that names descriptors in memory comes as it was sent.
    at_home: Vec<(RunningCall, Option<Call>)>,
    /// The program may be inside these, which were let through.
    native: Vec<RunningCall>,
    /// One may be in a call that the fast path's code makes.
    may_be_inside: bool,
}

/// The number and arguments of a call.
pub(crate) type RunningCall = (u32, [u64; 6]);

/// A connection.
#[derive(Debug)]
struct Connection {
    token: ConnectionToken,
    /// The socket on this node, if the connection is here.
    socket: Option<LocalSocket>,
    /// How often it was returned.
    returns: u32,
    /// How often it could not be taken since it was offered.
    failures: u32,
    /// Home's tern-net has given it up while it was being taken.
    is_given_up: bool,
}

#[derive(Debug)]
struct LocalSocket {
    socket: Arc<OwnedFd>,
    /// Its connection to tern-net. It is in use until this is closed. If tern-net closes it, the
    /// connection is lost.
    in_use: UnixStream,
    /// tern-net has ended, and with it the way of its packets. It is reset.
    is_lost: bool,
    /// The guest has a descriptor of it.
    in_guest: bool,
    /// Home is to make the calls, since one has failed.
    is_broken: bool,
}

#[derive(Debug)]
struct Moving {
    number: u64,
    fd: i32,
    /// The request, until a worker has it.
    request: Option<MoveRequest>,
}

/// A request to move a connection.
#[derive(Debug)]
pub(crate) enum MoveRequest {
    /// From home to this node.
    Take(ConnectionToken),
    /// From this node to home.
    Return(ConnectionToken, Arc<OwnedFd>),
}

/// The outcome of a request.
#[derive(Debug)]
pub(crate) enum Moved {
    /// The connection is on this node, or the reason why not.
    Taken(io::Result<(OwnedFd, UnixStream)>),
    /// The connection is at home, or the reason why not.
    Returned(io::Result<()>),
}

impl Connection {
    /// A connection that home has offered.
    fn offered(token: ConnectionToken) -> Self {
        Self { token, socket: None, returns: 0, failures: 0, is_given_up: false }
    }

    /// Whether it is here and not lost.
    fn is_usable(&self) -> bool {
        self.socket.as_ref().is_some_and(|local| !local.is_lost)
    }
}

impl LocalSocket {
    /// Has the program see a reset: ECONNRESET, or EPIPE if it waits in a call.
    fn reset(&mut self) {
        if !std::mem::replace(&mut self.is_lost, true) {
            tracing::warn!("a connection is reset, since tern-net has ended");
            // Sets the error, wakes the threads that wait, and sends RST.
            let _is_closed = rustix::net::connect_unspec(&self.socket);
        }
    }
}

impl OtherCalls {
    /// Adds a thread, with its call at home and the one that was let through, and whether it may be in
    /// one that the fast path's code makes. The call at home comes with the form in which it was
    /// sent, if it was.
    pub(crate) fn add(
        &mut self,
        at_home: Option<(RunningCall, Option<&Call>)>,
        native: Option<RunningCall>,
        may_be_inside: bool,
    ) {
        (self.exist, self.may_be_inside) = (true, self.may_be_inside || may_be_inside);
        let named = |nr, sent: Option<&Call>| sent.filter(|_| names_descriptors(nr)).cloned();
        self.at_home.extend(at_home.map(|(call, sent)| (call, named(call.0, sent))));
        self.native.extend(native);
    }
}

impl MoveRequest {
    /// Has this node's tern-net move it, which may take [`MOVE_TIMEOUT`]. For a worker.
    pub(crate) fn run(self, run_dir: &Path, home: NodeId) -> Moved {
        let path = net_socket(run_dir);
        match self {
            Self::Take(token) => {
                let request = ShimRequest::TakeConnection { home, token };
                Moved::Taken(control_socket::request_fd(&path, &request, MOVE_TIMEOUT))
            }
            Self::Return(token, socket) => {
                let request = ShimRequest::ReturnConnection { home, token };
                let run = || control_socket::request_with_fd(&path, &request, socket.as_fd(), MOVE_TIMEOUT);
                let until = Instant::now() + RETURN_TIMEOUT;
                loop {
                    match run() {
                        // tern-net may be starting, or home be busy.
                        Err(_) if Instant::now() < until => std::thread::sleep(RETURN_INTERVAL),
                        done => break Moved::Returned(done),
                    }
                }
            }
        }
    }
}

impl Connections {
    /// Handles home's notices about connections. Offers are accepted only if `accepts`: the process
    /// shares its descriptors with no other, and stays here.
    pub(crate) fn receive_notices(&mut self, notices: &[(i32, FileNotice)], accepts: bool) {
        for (fd, notice) in notices {
            if let FileNotice::EpollSet(members) = notice
                && accepts
            {
                self.sets.receive(*fd, members);
            }
            let FileNotice::Connection(token) = notice else { continue };
            let accepts = accepts && *fd != MAPPED_FILE;
            let is_new = self.by_fd.get(fd).is_none_or(|known| known.socket.is_none());
            let is_moving = self.moving.as_ref().is_some_and(|moving| moving.fd == *fd);
            if accepts && is_new && !is_moving {
                self.by_fd.insert(*fd, Connection::offered(*token));
            }
        }
    }

    /// Whether home has offered any, or has described an epoll set, or a descriptor is watched.
    pub(crate) fn is_used(&self) -> bool {
        !self.by_fd.is_empty() || !self.watched.is_empty() || !self.sets.is_empty()
    }

    /// The connections that are here, by descriptor, with their own and their peer's address.
    pub(crate) fn here(&self) -> impl Iterator<Item = (i32, SocketAddr, SocketAddr)> {
        let address = |name: SocketAddrAny| SocketAddr::try_from(name).ok();
        let ends = move |(fd, known): (&i32, &Connection)| {
            let socket = &known.socket.as_ref()?.socket;
            Some((*fd, address(getsockname(socket).ok()?)?, address(getpeername(socket).ok()??)?))
        };
        self.by_fd.iter().filter_map(ends)
    }

    /// Whether this descriptor's connection is here.
    fn is_here(&self, fd: i32) -> bool {
        self.by_fd.get(&fd).is_some_and(|known| known.socket.is_some())
    }

    /// Forgets what is known of descriptors that this call may close, replace or pass on to a child.
    /// Returns those that the guest has open.
    fn forget_changed(&mut self, nr: u32, args: &[u64; 6]) -> Vec<i32> {
        if plan::changes_all_descriptors(nr, args) {
            let open = self.watched.forget_all();
            // They are about to be closed.
            open.iter().for_each(|fd| self.sets.replace(*fd));
            return open;
        }
        let Some(closed) = plan::closed_descriptor(nr, args) else { return Vec::new() };
        let mut open = self.sets.close(closed);
        let is_lost = self.is_here(closed) && self.by_fd.get(&closed).is_some_and(|known| !known.is_usable());
        if is_lost {
            self.by_fd.remove(&closed);
        }
        if self.watched.replace(closed) || is_lost {
            open.push(closed);
        }
        open
    }

    /// Records an epoll_ctl that home has made.
    pub(crate) fn record_epoll_ctl(&mut self, args: &[u64; 6], event: Option<&[u8]>) {
        self.sets.record_change(args[0] as i32, args[1] as i32, args[2] as i32, event);
    }

    /// Whether a connection is being moved, or a call to wait is prepared: traps wait until that is
    /// over.
    pub(crate) fn is_busy(&self) -> bool {
        self.moving.is_some() || self.watched.is_beginning()
    }

    /// The number of a request for readiness files, and how many are needed. Each request is
    /// returned only once.
    pub(crate) fn start_opening(&mut self) -> Option<(u64, usize)> {
        self.watched.start_opening()
    }

    /// Stores the readiness files of a request. Returns whether waiting traps can continue.
    pub(crate) fn finish_opening(&mut self, number: u64, files: io::Result<Vec<ReadinessFile>>) -> bool {
        self.watched.finish_opening(number, files)
    }

    /// Handles home's report of readiness. Returns whether waiting traps can continue.
    pub(crate) fn receive_readiness(&mut self, report: &[(i32, Option<u32>)]) -> bool {
        let ended = report.iter().filter(|(_, readiness)| readiness.is_none());
        ended.for_each(|(fd, _)| self.sets.replace(*fd));
        self.watched.receive(report)
    }

    /// The request to home to report readiness, to be sent on a new link.
    pub(crate) fn readiness_request(&self) -> Option<Message> {
        self.watched.request_all()
    }

    /// Records the number of threads, and forgets their calls.
    pub(crate) fn set_thread_count(&mut self, count: usize) {
        self.others = OtherCalls { exist: count > 1, ..OtherCalls::default() };
    }

    /// Records the calls in which the other threads are.
    pub(crate) fn set_others(&mut self, others: OtherCalls) {
        self.others = others;
    }

    /// Records that this thread makes this call at home, which may change an epoll set.
    fn begin_set_change(&mut self, tid: HomePid, trap: &Notification) {
        if i64::from(trap.nr) == libc::SYS_epoll_ctl {
            self.changed_sets.insert(tid, trap.args[0] as i32);
        }
    }

    /// Records that this thread is in no call at home.
    fn end_set_change(&mut self, tid: HomePid) {
        self.changed_sets.remove(&tid);
    }

    /// Whether threads that are in calls which were let through must be interrupted, because a
    /// connection is to be returned, or a trap waits for that.
    pub(crate) fn must_interrupt(&self) -> bool {
        let is_return = |moving: &Moving| matches!(moving.request, Some(MoveRequest::Return(..)));
        self.awaits_native_calls || self.moving.as_ref().is_some_and(is_return)
    }

    /// Records that no thread is in a call that was let through. Returns whether a trap has waited
    /// for that.
    pub(crate) fn take_awaited(&mut self) -> bool {
        std::mem::take(&mut self.awaits_native_calls)
    }

    /// The number of the move, and the request. Each request is returned only once. Not while
    /// [`Self::must_interrupt`] applies to a thread.
    pub(crate) fn start_move(&mut self) -> Option<(u64, MoveRequest)> {
        let moving = self.moving.as_mut()?;
        Some((moving.number, moving.request.take()?))
    }

    /// Stores the outcome of a move. Returns the descriptor under which the guest still has a
    /// connection that is not here any more.
    pub(crate) fn finish_move(&mut self, number: u64, moved: Moved) -> Option<i32> {
        self.store_move(number, moved).inspect(|fd| self.sets.replace(*fd))
    }

    fn store_move(&mut self, number: u64, moved: Moved) -> Option<i32> {
        let fd = self.moving.take_if(|moving| moving.number == number)?.fd;
        let connection = self.by_fd.get_mut(&fd)?;
        match moved {
            Moved::Taken(Ok((socket, stream))) => {
                let socket = Arc::new(socket);
                let mut local =
                    LocalSocket { socket, in_use: stream, is_lost: false, in_guest: false, is_broken: false };
                if connection.is_given_up {
                    local.reset();
                }
                connection.socket = Some(local);
                self.pause = None;
                // Its readiness is not home's any more.
                self.watched.replace(fd).then_some(fd)
            }
            Moved::Taken(Err(error)) => {
                tracing::info!(%error, fd, failures = connection.failures, "a connection stays at home");
                // Home, or a tern-net, may only have been slow.
                connection.failures += 1;
                if connection.failures >= MAX_FAILURES || connection.is_given_up {
                    self.by_fd.remove(&fd);
                }
                let length = self.pause.map_or(FIRST_PAUSE, |(_, length)| MAX_PAUSE.min(length * 4));
                self.pause = Some((Instant::now() + length, length));
                None
            }
            Moved::Returned(Ok(())) => {
                connection.returns += 1;
                let stale = connection.socket.take().is_some_and(|socket| socket.in_guest);
                if connection.returns >= MAX_RETURNS {
                    self.by_fd.remove(&fd);
                }
                stale.then_some(fd)
            }
            Moved::Returned(Err(error)) => {
                // It ends here, as if the network had reset it.
                tracing::warn!(%error, fd, "a connection could not be returned home, and is lost");
                self.by_fd
                    .remove(&fd)
                    .and_then(|lost| lost.socket)
                    .filter(|socket| socket.in_guest)
                    .map(|_| fd)
            }
        }
    }

    /// Starts to return a connection that is here, unless one is being moved. Returns whether all
    /// are at home. Offers that were not used are dropped.
    pub(crate) fn return_all(&mut self) -> bool {
        if self.watched.is_beginning() {
            return false;
        }
        let moving = self.moving.as_ref().map(|moving| moving.fd);
        self.by_fd.retain(|fd, connection| connection.is_usable() || moving == Some(*fd));
        let next = if moving.is_none() { self.local_fds().next() } else { None };
        if let Some(fd) = next {
            self.begin_return(fd);
        }
        self.by_fd.is_empty()
    }

    /// Whether calls may be let through. While one is in progress, the process cannot depart.
    pub(crate) fn may_let_through(&self) -> bool {
        self.local_fds().next().is_some() || self.sets.has_any_in_guest()
    }

    /// Whether the process has several threads.
    pub(crate) fn has_other_threads(&self) -> bool {
        self.others.exist
    }

    /// Whether a thread other than the one whose trap is handled may be in a call that the fast path's
    /// code makes.
    pub(crate) fn others_may_be_inside(&self) -> bool {
        self.others.may_be_inside
    }

    /// The connections on which the program may make calls without a trap, the epoll sets for which
    /// it may wait, and the descriptors that it may poll, among them these local files.
    pub(crate) fn native_descriptors(&self, local_files: impl Iterator<Item = i32>) -> NativeDescriptors {
        let mut native = NativeDescriptors::default();
        if self.is_busy() || self.awaits_native_calls {
            return native;
        }
        let known = |(fd, known): (&i32, &Connection)| {
            let local = known.socket.as_ref().filter(|local| local.in_guest)?;
            Some((*fd, local.is_broken))
        };
        for (fd, is_broken) in self.by_fd.iter().filter_map(known) {
            if !is_broken {
                native.add_file(fd);
            }
            native.add_polled_connection(fd);
        }
        if native.is_empty() {
            return native;
        }
        self.watched.in_guest().chain(local_files).for_each(|fd| native.add_polled(fd));
        let is_known = |fd: i32| self.is_here(fd) || self.watched.has(fd);
        let is_changed = |fd: &i32| self.changed_sets.values().any(|changed| changed == fd);
        let current = self.sets.current(is_known).filter(|fd| !is_changed(fd));
        current.for_each(|fd| native.add_epoll_set(fd));
        native
    }

    /// Has home make the calls on a connection from now on.
    fn stop_local_calls(&mut self, fd: i32) {
        if let Some(local) = self.by_fd.get_mut(&fd).and_then(|known| known.socket.as_mut()) {
            local.is_broken = true;
        }
    }

    /// The descriptors whose connections are here.
    fn local_fds(&self) -> impl Iterator<Item = i32> {
        self.by_fd.iter().filter(|(_, connection)| connection.is_usable()).map(|(fd, _)| *fd)
    }

    /// The connections to tern-net of those in use. If one is closed, [`Self::reset_lost`] is to be
    /// called.
    pub(crate) fn uses(&self) -> impl Iterator<Item = &UnixStream> {
        let sockets = self.by_fd.values().filter_map(|connection| connection.socket.as_ref());
        sockets.filter(|local| !local.is_lost).map(|local| &local.in_use)
    }

    /// Resets the connections that this node's tern-net has given up.
    pub(crate) fn reset_lost(&mut self) {
        let sockets = self.by_fd.values_mut().filter_map(|connection| connection.socket.as_mut());
        for local in sockets.filter(|local| control_socket::is_closed(&local.in_use)) {
            local.reset();
        }
    }

    /// Resets a connection that home's tern-net has given up, or forgets its offer.
    pub(crate) fn lose(&mut self, fd: i32) {
        let is_moving = self.moving.as_ref().is_some_and(|moving| moving.fd == fd);
        let Some(known) = self.by_fd.get_mut(&fd) else { return };
        match &mut known.socket {
            Some(local) => local.reset(),
            None if is_moving => known.is_given_up = true,
            None => drop(self.by_fd.remove(&fd)),
        }
    }

    /// Whether it is time to take a connection.
    fn may_take(&self) -> bool {
        self.pause.is_none_or(|(until, _)| Instant::now() >= until)
    }

    fn begin_take(&mut self, fd: i32) {
        if let Some(connection) = self.by_fd.get(&fd) {
            let request = MoveRequest::Take(connection.token);
            self.begin_move(fd, request);
        }
    }

    fn begin_return(&mut self, fd: i32) {
        if let Some(Connection { token, socket: Some(local), .. }) = self.by_fd.get(&fd) {
            let request = MoveRequest::Return(*token, Arc::clone(&local.socket));
            self.begin_move(fd, request);
        }
    }

    /// Starts to return a connection of this call, after the guest could not be given this descriptor.
    fn begin_return_for(&mut self, failed: i32, fds: &BTreeSet<i32>) {
        if let Some(fd) = [failed].iter().chain(fds).copied().find(|fd| self.is_here(*fd)) {
            self.begin_return(fd);
        }
    }

    fn begin_move(&mut self, fd: i32, request: MoveRequest) {
        self.moves += 1;
        self.moving = Some(Moving { number: self.moves, fd, request: Some(request) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: ConnectionToken = ConnectionToken([7; 16]);

    fn offered(fd: i32) -> Connections {
        let mut connections = Connections::default();
        connections.receive_notices(&[(fd, FileNotice::Connection(TOKEN))], true);
        connections
    }

    fn local() -> io::Result<(OwnedFd, UnixStream)> {
        let (socket, _peer) = UnixStream::pair()?;
        Ok((rustix::io::dup(&socket)?, socket))
    }

    fn taken(fd: i32) -> Connections {
        let mut connections = offered(fd);
        connections.begin_take(fd);
        let (number, request) = connections.start_move().unwrap();
        assert!(matches!(request, MoveRequest::Take(TOKEN)) && connections.start_move().is_none());
        assert_eq!(connections.finish_move(number, Moved::Taken(local())), None);
        connections
    }

    #[test]
    fn connection_that_is_not_taken_stays_at_home() {
        let mut connections = offered(5);
        connections.begin_take(5);
        let (number, _request) = connections.start_move().unwrap();
        let failed = || Moved::Taken(Err(io::ErrorKind::NotFound.into()));
        assert!(connections.finish_move(number + 1, failed()).is_none() && connections.is_busy());
        assert_eq!(connections.finish_move(number, failed()), None);
        assert!(!connections.is_busy() && connections.return_all());
    }

    #[test]
    fn connection_that_could_not_be_taken_is_tried_again() {
        let mut connections = offered(5);
        for failures in 1..=MAX_FAILURES {
            assert!(connections.may_take() == (failures == 1), "after {failures} failures");
            connections.pause = connections.pause.map(|(_, length)| (Instant::now(), length));
            assert!(connections.may_take());
            connections.begin_take(5);
            let (number, _request) = connections.start_move().unwrap();
            connections.finish_move(number, Moved::Taken(Err(io::ErrorKind::TimedOut.into())));
        }
        assert!(!connections.is_used(), "it stays at home");
        assert_eq!(connections.pause.map(|(_, length)| length), Some(MAX_PAUSE));
    }

    #[test]
    fn connection_that_home_gives_up_while_it_is_taken_is_reset() {
        for is_taken in [true, false] {
            let mut connections = offered(5);
            connections.receive_notices(&[(6, FileNotice::Connection(TOKEN))], true);
            connections.begin_take(5);
            let (number, _request) = connections.start_move().unwrap();
            [5, 6].into_iter().for_each(|fd| connections.lose(fd));
            assert!(!connections.by_fd.contains_key(&6), "its offer has ended");
            let moved = if is_taken { local() } else { Err(io::ErrorKind::NotFound.into()) };
            connections.finish_move(number, Moved::Taken(moved));
            let is_usable = connections.by_fd.get(&5).map(Connection::is_usable);
            assert_eq!(is_usable, is_taken.then_some(false));
        }
    }

    #[test]
    fn all_connections_are_returned_one_after_the_other() {
        let mut connections = taken(5);
        connections.receive_notices(&[(6, FileNotice::Connection(TOKEN))], true);
        connections.begin_take(6);
        assert!(!connections.return_all(), "one is being moved");
        let (number, _request) = connections.start_move().unwrap();
        connections.finish_move(number, Moved::Taken(local()));
        for fd in [5, 6] {
            assert!(!connections.return_all());
            let (number, request) = connections.start_move().unwrap();
            assert!(matches!(request, MoveRequest::Return(..)));
            connections.by_fd.get_mut(&fd).unwrap().socket.as_mut().unwrap().in_guest = fd == 5;
            let stale = connections.finish_move(number, Moved::Returned(Ok(())));
            assert_eq!(stale, (fd == 5).then_some(5), "the guest has it open");
        }
        assert!(connections.return_all());
    }

    #[test]
    fn offers_are_declined_while_the_process_departs() {
        let mut connections = Connections::default();
        connections.receive_notices(&[(5, FileNotice::Connection(TOKEN))], false);
        assert!(connections.by_fd.is_empty());
    }
}
