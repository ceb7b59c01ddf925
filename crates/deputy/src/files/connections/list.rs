//! The list of a process's network sockets for `mps -n`: where each is, and why it stays at home.

use super::{ConnectionOffers, StayReason, socket};
use rustix::net::{AddressFamily, SocketAddrAny, SocketType, getpeername, getsockname, sockopt};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

/// Maximum number of sockets that are listed of a process, and of descriptors that are looked at.
const MAX_SOCKETS: usize = 256;
const MAX_DESCRIPTORS: usize = 4096;

/// A network socket of a process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ListedSocket {
    pub(crate) fd: i32,
    pub(crate) local: SocketAddr,
    pub(crate) peer: Option<SocketAddr>,
    /// Why it is at home; none if it is on the node of the guest.
    pub(crate) stays: Option<&'static str>,
}

impl StayReason {
    /// The reason as `mps` shows it.
    fn text(self) -> &'static str {
        match self {
            Self::Unexamined => "not examined in time, tried again later",
            Self::NoTernNet => "this node moves no connections (connections in ternd.toml)",
            Self::Kind => "its peer is on this node, or its close waits (SO_LINGER)",
            Self::EpollSet => "in an epoll set that only this node can make",
            Self::Unprivileged => "this node's ternd does not run as root",
            Self::Shared => "another process uses it",
            Self::Lost => "tern-net has ended",
        }
    }
}

impl ConnectionOffers {
    /// The network sockets of a process that is away, in the order of their descriptors.
    pub(crate) fn list(&self, pid: i32) -> Vec<ListedSocket> {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        let mut fds: Vec<i32> = entries.filter_map(number).take(MAX_DESCRIPTORS).collect();
        fds.sort_unstable();
        fds.into_iter().filter_map(|fd| self.describe(fd, &socket(pid, fd)?)).take(MAX_SOCKETS).collect()
    }

    /// Describes a socket; none if it is not of the internet protocols.
    fn describe(&self, fd: i32, socket: &OwnedFd) -> Option<ListedSocket> {
        if !matches!(sockopt::socket_domain(socket).ok()?, AddressFamily::INET | AddressFamily::INET6) {
            return None;
        }
        let local = address(getsockname(socket).ok()?)?;
        let peer = getpeername(socket).ok().flatten().and_then(address);
        let offer = self.offered.get(&fd);
        if let (Some(offer), None) = (offer, peer) {
            // The descriptor refers to the placeholder.
            let (local, peer) = (canonical(offer.ends.0), Some(canonical(offer.ends.1)));
            return Some(ListedSocket { fd, local, peer, stays: None });
        }
        let is_stream = sockopt::socket_type(socket).is_ok_and(|kind| kind == SocketType::STREAM);
        let reason = self.refused.get(&fd);
        let stays = match reason {
            _ if sockopt::socket_acceptconn(socket).unwrap_or(false) => "listens",
            _ if !is_stream => "not TCP",
            _ if peer.is_none() => "not connected",
            _ if offer.is_some() => "its node has not taken it",
            Some(reason) => reason.text(),
            None => "few transfers so far",
        };
        Some(ListedSocket { fd, local, peer, stays: Some(stays) })
    }
}

fn address(name: SocketAddrAny) -> Option<SocketAddr> {
    SocketAddr::try_from(name).ok().map(canonical)
}

/// Shows an IPv4 address as such, also on a socket for IPv6.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn network_sockets_are_listed_with_their_reasons() {
        let me = std::process::id() as i32;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (other, _end) = UnixStream::pair().unwrap();
        let offers = ConnectionOffers {
            refused: [(client.as_raw_fd(), StayReason::Kind)].into(),
            ..ConnectionOffers::default()
        };
        let list = offers.list(me);
        let find = |fd: i32| list.iter().find(|listed| listed.fd == fd);
        let listens = find(listener.as_raw_fd()).unwrap();
        assert_eq!((listens.stays, listens.peer), (Some("listens"), None));
        let stays = find(client.as_raw_fd()).unwrap();
        assert_eq!(stays.stays, Some(StayReason::Kind.text()));
        assert_eq!(stays.peer, Some(listener.local_addr().unwrap()));
        assert_eq!(find(datagrams.as_raw_fd()).unwrap().stays, Some("not TCP"));
        assert_eq!(find(other.as_raw_fd()), None);
    }
}
