//! Offers of connections. A TCP connection that only one process uses, and on which it has made some
//! transfers through home, is offered to the node of the guest, which may take it from home
//! (docs/design/connections.md). This module decides what only home can know: whether a connection
//! qualifies.
//!
//! An offer is a connection to this node's tern-net, which gets a descriptor of the socket. While
//! the guest's node has the connection, the deputy's descriptor is a placeholder. The offer ends when
//! the descriptor is closed, and with the epoch.

use super::epoll_sets::sets_with;
use super::watches::copy;
use rustix::net::{AddressFamily, SocketType, ipproto, sockopt};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use tern_control::control_socket;
use tern_control::shim::{ShimRequest, net_socket};
use tern_ids::{ConnectionToken, NodeId};
use tern_migrate::message::EpollMember;

/// Number of transfers of a process through home before its connection is offered. To take and to
/// return a connection costs as much as some ten calls through home.
const TRANSFERS_BEFORE_OFFER: u32 = 16;

/// A connection whose examination did not end in time is examined again after at most so many
/// transfers.
const MAX_TRANSFERS_BEFORE_OFFER: u32 = 1 << 14;

/// Maximum number of connections that a process offers at a time.
const MAX_OFFERS: usize = 64;

/// How long tern-net may take to read a request. It fits into the socket's buffer, so this is only
/// waited for if many shims send requests at once.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(20);

/// The connections that a process offers in one epoch.
#[derive(Debug, Default)]
pub(crate) struct ConnectionOffers {
    /// Number of transfers on sockets, by descriptor, and after how many it is examined.
    transfers: BTreeMap<i32, (u32, u32)>,
    /// The offers, by descriptor: each lasts until its connection to tern-net is closed.
    offered: BTreeMap<i32, UnixStream>,
    /// Descriptors that do not qualify. They are not examined again.
    refused: BTreeSet<i32>,
}

impl ConnectionOffers {
    /// The descriptor that is worth examining after this call.
    pub(crate) fn candidate(&mut self, nr: i64, args: &[u64; 6], ret: i64) -> Option<i32> {
        let fd = args[0] as i32;
        if nr == libc::SYS_setsockopt && args[1..3] == [libc::SOL_SOCKET as u64, libc::SO_LINGER as u64] {
            // tern-net's descriptor would keep the program's close from waiting.
            self.forget(fd);
            self.refuse(fd);
        }
        if !tern_syscall::is_transfer(nr as u32)
            || ret <= 0
            || self.refused.contains(&fd)
            || self.offered.contains_key(&fd)
        {
            return None;
        }
        let (transfers, needed) = self.transfers.entry(fd).or_insert((0, TRANSFERS_BEFORE_OFFER));
        *transfers += 1;
        (*transfers >= *needed && self.offered.len() < MAX_OFFERS).then_some(fd)
    }

    /// The offers: each is a connection to tern-net, which closes it to end the offer.
    pub(crate) fn offers(&self) -> impl Iterator<Item = &UnixStream> {
        self.offered.values()
    }

    /// Removes the offers that tern-net has ended, and returns their descriptors.
    pub(crate) fn take_ended(&mut self) -> Vec<i32> {
        let has_ended = |(_, offer): &(&i32, &UnixStream)| control_socket::is_closed(offer);
        let ended: Vec<i32> = self.offered.iter().filter(has_ended).map(|(fd, _)| *fd).collect();
        self.offered.retain(|fd, _| !ended.contains(fd));
        self.refused.extend(&ended);
        ended
    }

    /// Forgets a descriptor that was closed or replaced.
    pub(crate) fn forget(&mut self, fd: i32) {
        self.transfers.remove(&fd);
        self.offered.remove(&fd);
        self.refused.remove(&fd);
    }

    /// Records that a descriptor does not qualify, until it is offered or closed.
    pub(crate) fn refuse(&mut self, fd: i32) {
        self.refused.insert(fd);
    }

    /// Records that the examination of a descriptor did not end in time, or that tern-net did not
    /// accept it: that is repeated, each time after four times as many transfers, since the main loop
    /// waits for it.
    pub(crate) fn postpone(&mut self, fd: i32) {
        self.refused.remove(&fd);
        if let Some((transfers, needed)) = self.transfers.get_mut(&fd) {
            (*transfers, *needed) = (0, MAX_TRANSFERS_BEFORE_OFFER.min(*needed * 4));
        }
    }

    /// If this descriptor of a process is a connection that may move: the epoll sets that have it as
    /// a member, by descriptor. No descriptor of the socket is kept, since a comparison with all
    /// processes would find it.
    pub(crate) fn epoll_sets_of_movable(pid: i32, fd: i32) -> Option<Vec<(i32, Vec<EpollMember>)>> {
        let socket = movable_socket(pid, fd)?;
        let inode = rustix::fs::fstat(&socket).ok()?.st_ino;
        let sets = sets_with(pid, inode);
        if sets.is_none() {
            tracing::debug!(fd, "a connection stays at home: it is in an epoll set that cannot be made away");
        }
        sets
    }

    /// Offers a connection of a process to the node of its guest. None if it does not qualify, or
    /// this node has no tern-net.
    pub(crate) fn offer(
        &mut self,
        (pid, fd): (i32, i32),
        node: NodeId,
        run_dir: &Path,
    ) -> Option<ConnectionToken> {
        let socket = movable_socket(pid, fd)?;
        let token = token()?;
        let request = ShimRequest::OfferConnection { token, node };
        let offer = control_socket::send_request_with_fd(
            &net_socket(run_dir),
            &request,
            socket.as_fd(),
            REQUEST_TIMEOUT,
        );
        match offer {
            Ok(offer) => {
                self.refused.remove(&fd);
                self.offered.insert(fd, offer);
                Some(token)
            }
            Err(error) => {
                tracing::debug!(%error, "tern-net does not accept a connection");
                self.postpone(fd);
                None
            }
        }
    }
}

/// A token that another node cannot guess. None if the kernel has no random numbers.
fn token() -> Option<ConnectionToken> {
    tern_wire::nonce().ok()?.first_chunk().copied().map(ConnectionToken)
}

/// The socket of a process, if it is a connection that may move: TCP, to another machine, and its
/// close does not wait (SO_LINGER). Whether its state can be captured is found out when
/// it is taken.
fn movable_socket(pid: i32, fd: i32) -> Option<OwnedFd> {
    // The close of a copy of another file may ask a file server.
    let target = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
    if !target.to_str()?.starts_with("socket:") {
        return None;
    }
    let socket = copy(pid, fd)?;
    let is_tcp = matches!(sockopt::socket_domain(&socket).ok()?, AddressFamily::INET | AddressFamily::INET6)
        && sockopt::socket_type(&socket).ok()? == SocketType::STREAM
        && sockopt::socket_protocol(&socket).ok()? == Some(ipproto::TCP);
    if !is_tcp || sockopt::socket_linger(&socket).ok()?.is_some() {
        return None;
    }
    let address = |name: rustix::net::SocketAddrAny| SocketAddr::try_from(name).ok();
    let own = address(rustix::net::getsockname(&socket).ok()?)?;
    let peer = address(rustix::net::getpeername(&socket).ok()??)?;
    let is_local = peer.ip().to_canonical() == own.ip().to_canonical() || is_loopback(peer.ip());
    (!is_local).then_some(socket)
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
        offers.refuse(5);
        assert_eq!(offers.offer((0, 5), NodeId(2), Path::new("/nonexistent")), None);
        let mut read = || offers.candidate(libc::SYS_read, &[5, 0, 0, 0, 0, 0], 1);
        assert!((0..100).all(|_| read().is_none()), "it did not qualify");
        offers.postpone(5);
        let mut read = || offers.candidate(libc::SYS_read, &[5, 0, 0, 0, 0, 0], 1);
        let again = (1..).find(|_| read().is_some());
        assert_eq!(again, Some(4 * TRANSFERS_BEFORE_OFFER), "it could not be examined in time");
        (0..20).for_each(|_| offers.postpone(5));
        let mut read = || offers.candidate(libc::SYS_read, &[5, 0, 0, 0, 0, 0], 1);
        let again = (1..).find(|_| read().is_some());
        assert_eq!(again, Some(MAX_TRANSFERS_BEFORE_OFFER), "however often that was so");
        offers.forget(5);
        let found = (0..TRANSFERS_BEFORE_OFFER)
            .filter_map(|_| offers.candidate(libc::SYS_read, &[5, 0, 0, 0, 0, 0], 1));
        assert_eq!(found.count(), 1, "another file has the number");
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
