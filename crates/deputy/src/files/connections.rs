//! Offers of connections. A TCP connection that only one process uses, and on which it has made some
//! transfers through home, is offered to the node of the guest, which may take it from home
//! (docs/design/connections.md). This module decides what only home can know: whether a connection
//! qualifies.
//!
//! An offer is a connection to this node's tern-net, which gets a descriptor of the socket. While
//! the guest's node has the connection, the deputy's descriptor is a placeholder. The offer ends when
//! the descriptor is closed, and with the epoch.

mod list;

use super::epoll_sets::sets_with;
use super::watches::copy;
pub(crate) use list::{ListedSocket, sockets};
use rustix::net::{AddressFamily, SocketAddrAny, SocketType, ipproto, sockopt};
use std::collections::BTreeMap;
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use tern_control::control_socket;
use tern_control::shim::{ShimRequest, net_socket};
use tern_ids::{ConnectionToken, NodeId};
use tern_migrate::message::EpollMember;

/// Number of transfers of a process through home before its connection is offered. To take and to
/// return a connection costs home as much as some hundred calls.
const TRANSFERS_BEFORE_OFFER: u32 = 16;

/// A transfer counts once for each of so many bytes. On a network of 100 Mbit/s they take longer than
/// a call through home.
const BYTES_OF_TRANSFER: u32 = 8192;

/// If an examination does not end in time, the process makes none for this time, then for twice as
/// long, and so on up to the maximum: the main loop waits for it.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(64);

/// Maximum number of connections that a process offers at a time.
const MAX_OFFERS: usize = 64;

/// How long tern-net may take to read a request. It fits into the socket's buffer, so this is only
/// waited for if many shims send requests at once.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(20);

/// The connections that a process offers in one epoch.
#[derive(Debug, Default)]
pub(crate) struct ConnectionOffers {
    /// Number of transfers on sockets, by descriptor.
    transfers: BTreeMap<i32, u32>,
    /// No connection is examined before this time, and the length of this pause.
    pause: Option<(Instant, Duration)>,
    offered: BTreeMap<i32, Offer>,
    /// Offers of earlier epochs that tern-net may not have ended yet. It has descriptors of the sockets
    /// until then, so that they would count as shared.
    ending: Vec<UnixStream>,
    /// Descriptors that do not qualify. They are not examined again.
    refused: BTreeMap<i32, StayReason>,
}

/// An offer.
#[derive(Debug)]
struct Offer {
    /// Lasts until this connection to tern-net is closed.
    tern_net: UnixStream,
    /// The ends of the connection: home's, and the peer's.
    ends: (SocketAddr, SocketAddr),
}

/// Why a connection stays at home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StayReason {
    /// It was not found out in time whether it qualifies, or tern-net did not answer. It is examined
    /// again.
    Unexamined,
    /// No tern-net runs on this node.
    NoTernNet,
    /// It is not plain TCP, its peer is on this node, or SO_LINGER was set.
    Kind,
    /// It is in an epoll set that the guest's node cannot make.
    EpollSet,
    /// This shim may not examine other processes, or the process uses its parent's memory.
    Unknowable,
    /// Another process uses its descriptor or has it open.
    Shared,
    /// tern-net has ended, or has given the offer up.
    Lost,
}

impl ConnectionOffers {
    /// The descriptor that is worth examining after this call.
    pub(crate) fn candidate(&mut self, nr: i64, args: &[u64; 6], ret: i64) -> Option<i32> {
        let fd = args[0] as i32;
        if nr == libc::SYS_setsockopt && args[1..3] == [libc::SOL_SOCKET as u64, libc::SO_LINGER as u64] {
            // tern-net's descriptor would keep the program's close from waiting.
            self.forget(fd);
            self.keep_home(fd, StayReason::Kind);
        }
        if !tern_syscall::is_transfer(nr as u32)
            || ret <= 0
            || self.refused.contains_key(&fd)
            || self.offered.contains_key(&fd)
        {
            return None;
        }
        let transfers = self.transfers.entry(fd).or_default();
        let length = u32::try_from(ret).unwrap_or(u32::MAX);
        *transfers = transfers.saturating_add(length.div_ceil(BYTES_OF_TRANSFER));
        let is_enough = *transfers >= TRANSFERS_BEFORE_OFFER && self.offered.len() < MAX_OFFERS;
        let is_due = is_enough && self.pause.is_none_or(|(until, _)| Instant::now() >= until);
        if is_due {
            self.ending.retain(|tern_net| !control_socket::is_closed(tern_net));
        }
        (is_due && self.ending.is_empty()).then_some(fd)
    }

    /// Ends all offers. The caller goes on with the returned value, which has none.
    pub(crate) fn end_all(&mut self) -> Self {
        let Self { offered, mut ending, .. } = std::mem::take(self);
        ending.extend(offered.into_values().map(|offer| offer.tern_net));
        // tern-net closes the connection when it has closed its descriptor of the socket.
        ending.retain(|tern_net| {
            tern_net.shutdown(Shutdown::Write).is_ok() && !control_socket::is_closed(tern_net)
        });
        Self { ending, ..Self::default() }
    }

    /// The offers: each is a connection to tern-net, which closes it to end the offer.
    pub(crate) fn offers(&self) -> impl Iterator<Item = &UnixStream> {
        self.offered.values().map(|offer| &offer.tern_net)
    }

    /// Removes the offers that tern-net has ended, and returns their descriptors.
    pub(crate) fn take_ended(&mut self) -> Vec<i32> {
        let has_ended = |(_, offer): &(&i32, &Offer)| control_socket::is_closed(&offer.tern_net);
        let ended: Vec<i32> = self.offered.iter().filter(has_ended).map(|(fd, _)| *fd).collect();
        self.offered.retain(|fd, _| !ended.contains(fd));
        self.refused.extend(ended.iter().map(|fd| (*fd, StayReason::Lost)));
        ended
    }

    /// Forgets a descriptor that was closed or replaced.
    pub(crate) fn forget(&mut self, fd: i32) {
        self.transfers.remove(&fd);
        self.offered.remove(&fd);
        self.refused.remove(&fd);
    }

    /// Records that a descriptor does not qualify, until it is closed.
    pub(crate) fn keep_home(&mut self, fd: i32, reason: StayReason) {
        if reason == StayReason::Unexamined {
            let length = self.pause.map_or(FIRST_PAUSE, |(_, length)| MAX_PAUSE.min(length * 2));
            self.pause = Some((Instant::now() + length, length));
        } else {
            self.refused.insert(fd, reason);
        }
    }

    /// If this descriptor of a process is a connection that may move: the epoll sets that have it as
    /// a member, by descriptor. No descriptor of the socket is kept, since a comparison with all
    /// processes would find it.
    pub(crate) fn epoll_sets_of_movable(
        pid: i32,
        fd: i32,
    ) -> Result<Vec<(i32, Vec<EpollMember>)>, StayReason> {
        let (socket, _) = movable_socket(pid, fd).ok_or(StayReason::Kind)?;
        let inode = rustix::fs::fstat(&socket).map_err(|_gone| StayReason::Kind)?.st_ino;
        sets_with(pid, inode).ok_or(StayReason::EpollSet)
    }

    /// Offers a connection of a process to the node of its guest.
    pub(crate) fn offer(
        &mut self,
        (pid, fd): (i32, i32),
        node: NodeId,
        run_dir: &Path,
    ) -> Result<ConnectionToken, StayReason> {
        let (socket, ends) = movable_socket(pid, fd).ok_or(StayReason::Kind)?;
        let token = token().ok_or(StayReason::Unexamined)?;
        let request = ShimRequest::OfferConnection { token, node };
        let offer = control_socket::send_request_with_fd(
            &net_socket(run_dir),
            &request,
            socket.as_fd(),
            REQUEST_TIMEOUT,
        );
        match offer {
            Ok(tern_net) => {
                self.offered.insert(fd, Offer { tern_net, ends });
                self.pause = None;
                Ok(token)
            }
            Err(error) => {
                tracing::debug!(%error, "tern-net does not accept a connection");
                Err(StayReason::Unexamined)
            }
        }
    }
}

/// A token that another node cannot guess. None if the kernel has no random numbers.
fn token() -> Option<ConnectionToken> {
    tern_wire::nonce().ok()?.first_chunk().copied().map(ConnectionToken)
}

/// The socket of a process, and its ends, if it is a connection that may move: TCP, to another
/// machine, and its close does not wait (SO_LINGER). Whether its state can be captured is found out
/// when it is taken.
fn movable_socket(pid: i32, fd: i32) -> Option<(OwnedFd, (SocketAddr, SocketAddr))> {
    let socket = socket(pid, fd)?;
    let is_tcp = matches!(sockopt::socket_domain(&socket).ok()?, AddressFamily::INET | AddressFamily::INET6)
        && sockopt::socket_type(&socket).ok()? == SocketType::STREAM
        && sockopt::socket_protocol(&socket).ok()? == Some(ipproto::TCP);
    if !is_tcp || sockopt::socket_linger(&socket).ok()?.is_some() {
        return None;
    }
    let own = address(rustix::net::getsockname(&socket).ok()?)?;
    let peer = address(rustix::net::getpeername(&socket).ok()??)?;
    let is_local = peer.ip().to_canonical() == own.ip().to_canonical() || is_loopback(peer.ip());
    (!is_local).then_some((socket, (own, peer)))
}

fn address(name: SocketAddrAny) -> Option<SocketAddr> {
    SocketAddr::try_from(name).ok()
}

/// A copy of a process's descriptor, if it is a socket. It is to be closed soon: a comparison with all
/// processes would find it.
fn socket(pid: i32, fd: i32) -> Option<OwnedFd> {
    // The close of a copy of another file may ask a file server.
    let target = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
    if target.to_str()?.starts_with("socket:") { copy(pid, fd) } else { None }
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    #[test]
    fn connection_is_examined_after_some_transfers_and_only_once() {
        let mut offers = ConnectionOffers::default();
        let mut read = |fd: u64| offers.candidate(libc::SYS_read, &[fd, 0, 0, 0, 0, 0], 1);
        assert!((1..TRANSFERS_BEFORE_OFFER).all(|_| read(5).is_none()));
        assert_eq!((read(6), read(5)), (None, Some(5)));
        let large = i64::from(TRANSFERS_BEFORE_OFFER * BYTES_OF_TRANSFER);
        assert_eq!(offers.candidate(libc::SYS_read, &[7, 0, 0, 0, 0, 0], large), Some(7));
        offers.keep_home(5, StayReason::Shared);
        let offer = offers.offer((0, 5), NodeId(2), Path::new("/nonexistent"));
        assert_eq!(offer, Err(StayReason::Kind));
        let mut read = || offers.candidate(libc::SYS_read, &[5, 0, 0, 0, 0, 0], 1);
        assert!((0..100).all(|_| read().is_none()), "it did not qualify");
        offers.refused.clear();
        offers.keep_home(5, StayReason::Unexamined);
        let mut read = |fd: u64| offers.candidate(libc::SYS_read, &[fd, 0, 0, 0, 0, 0], large);
        assert_eq!((read(5), read(8)), (None, None), "an examination did not end in time");
        offers.pause = offers.pause.map(|(_, length)| (Instant::now(), length));
        assert_eq!(offers.candidate(libc::SYS_read, &[5, 0, 0, 0, 0, 0], 1), Some(5));
        (0..20).for_each(|_| offers.keep_home(5, StayReason::Unexamined));
        assert_eq!(offers.pause.map(|(_, length)| length), Some(MAX_PAUSE));
        offers.pause = None;
        offers.forget(5);
        let found = (0..TRANSFERS_BEFORE_OFFER)
            .filter_map(|_| offers.candidate(libc::SYS_read, &[5, 0, 0, 0, 0, 0], 1));
        assert_eq!(found.count(), 1, "another file has the number");
    }

    #[test]
    fn offer_is_not_repeated_before_tern_net_has_ended_the_last_one() {
        let (tern_net, mut peer) = UnixStream::pair().unwrap();
        let address: SocketAddr = "10.0.0.1:80".parse().unwrap();
        let offer = Offer { tern_net, ends: (address, address) };
        let mut offers = ConnectionOffers { offered: [(5, offer)].into(), ..ConnectionOffers::default() };
        let mut offers = offers.end_all();
        let mut read = || offers.candidate(libc::SYS_read, &[5, 0, 0, 0, 0, 0], 1 << 20);
        assert_eq!(read(), None);
        assert_eq!(std::io::Read::read(&mut peer, &mut [0]).unwrap(), 0, "tern-net is told");
        assert_eq!(read(), None);
        drop(peer);
        assert_eq!(read(), Some(5));
    }

    #[test]
    fn local_connections_and_other_files_stay_at_home() {
        let me = std::process::id() as i32;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        for fd in [listener.as_raw_fd(), client.as_raw_fd(), pipe.as_raw_fd(), 9999] {
            assert!(movable_socket(me, fd).is_none(), "{fd}");
        }
    }
}
