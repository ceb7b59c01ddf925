//! The list of a process's network sockets for `mps -n`: where each is, and why it stays at home.

use super::{ConnectionOffers, MAX_OFFERS, StayReason, TRANSFERS_BEFORE_OFFER, address, socket};
use rustix::net::{AddressFamily, SocketType, getpeername, getsockname, sockopt};
use std::net::SocketAddr;

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
            Self::Kind => "not plain TCP, its peer is on this node, or SO_LINGER was set",
            Self::EpollSet => "in an epoll set that only this node can make",
            Self::Unknowable => "this node cannot find out whether other processes use it",
            Self::Shared => "another process uses it",
            Self::Lost => "tern-net has given it up",
        }
    }
}

/// A network socket, as the kernel shows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Socket {
    fd: i32,
    local: SocketAddr,
    peer: Option<SocketAddr>,
    is_stream: bool,
    listens: bool,
}

/// The network sockets of a process, in the order of their descriptors. Waits while the process
/// executes a program.
pub(crate) fn sockets(pid: i32) -> Vec<Socket> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let mut fds: Vec<i32> = entries.filter_map(number).take(MAX_DESCRIPTORS).collect();
    fds.sort_unstable();
    fds.into_iter().filter_map(|fd| Socket::of(pid, fd)).take(MAX_SOCKETS).collect()
}

impl Socket {
    /// A socket of the internet protocols; none if it is another file.
    fn of(pid: i32, fd: i32) -> Option<Self> {
        let socket = socket(pid, fd)?;
        if !matches!(sockopt::socket_domain(&socket).ok()?, AddressFamily::INET | AddressFamily::INET6) {
            return None;
        }
        Some(Self {
            fd,
            local: address(getsockname(&socket).ok()?)?,
            peer: getpeername(&socket).ok().flatten().and_then(address),
            is_stream: sockopt::socket_type(&socket).is_ok_and(|kind| kind == SocketType::STREAM),
            listens: sockopt::socket_acceptconn(&socket).unwrap_or(false),
        })
    }
}

impl ConnectionOffers {
    /// Describes a socket of the process, which is away.
    pub(crate) fn describe(&self, socket: Socket) -> ListedSocket {
        let Socket { fd, local, peer, is_stream, listens } = socket;
        let offer = self.offered.get(&fd);
        if let (Some(offer), None) = (offer, peer) {
            // The descriptor refers to the placeholder.
            let (local, peer) = offer.ends;
            return ListedSocket { fd, local, peer: Some(peer), stays: None };
        }
        let is_ripe = self.transfers.get(&fd).is_some_and(|count| *count >= TRANSFERS_BEFORE_OFFER);
        let stays = match self.refused.get(&fd) {
            _ if listens => "listens",
            _ if !is_stream => "not TCP",
            _ if peer.is_none() => "not connected",
            _ if offer.is_some() => "its node does not take it (yet)",
            Some(reason) => reason.text(),
            None if is_ripe && self.offered.len() >= MAX_OFFERS => "the process has too many that may move",
            None if is_ripe => StayReason::Unexamined.text(),
            None => "few transfers so far",
        };
        ListedSocket { fd, local, peer, stays: Some(stays) }
    }
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
        let list: Vec<_> = sockets(me).into_iter().map(|socket| offers.describe(socket)).collect();
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
