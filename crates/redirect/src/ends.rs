//! A TCP connection as its packets name it, and the way on which its packets are forwarded.

use crate::error::{RedirectError, Result};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The two ends of a TCP connection. The home's end is the one whose socket may be on another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ends {
    client: SocketAddr,
    home: SocketAddr,
}

impl Ends {
    /// The connection between these two ends. An IPv4-mapped IPv6 address (`::ffff:a.b.c.d`, which a
    /// dual-stack socket reports) is converted to IPv4, since its packets are IPv4 packets. Scope and
    /// flow of IPv6 addresses are ignored.
    ///
    /// # Errors
    /// [`RedirectError::MixedFamilies`] if one end is IPv4 and the other is IPv6.
    pub fn new(client: SocketAddr, home: SocketAddr) -> Result<Self> {
        let plain = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
        let (client, home) = (plain(client), plain(home));
        if client.is_ipv4() != home.is_ipv4() {
            return Err(RedirectError::MixedFamilies { first: client, second: home });
        }
        Ok(Self { client, home })
    }

    /// The connection between two ends of one IP version.
    pub(crate) fn of_one_family(client: SocketAddr, home: SocketAddr) -> Self {
        Self { client, home }
    }

    /// The connection as its packets in the other direction name it: from home's end to the client.
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self { client: self.home, home: self.client }
    }

    /// The end that stays where it is.
    #[must_use]
    pub fn client(&self) -> SocketAddr {
        self.client
    }

    /// The end with home's address.
    #[must_use]
    pub fn home(&self) -> SocketAddr {
        self.home
    }

    /// The IP version of both ends.
    #[must_use]
    pub fn family(&self) -> Family {
        Family::of(self.client.ip())
    }
}

impl fmt::Display for Ends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.client, self.home)
    }
}

/// The next step of a packet: an interface, and the neighbour on it that receives the frame.
///
/// The kernel finds the neighbour's link address when it forwards, so that this value stays right if
/// a network card is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Way {
    /// Index of the interface through which the packet leaves.
    pub interface: u32,
    /// Address of the neighbour: the destination itself or a router. Its IP version is that of the
    /// packets.
    pub next_hop: IpAddr,
}

/// An IP version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub(crate) const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub(crate) fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Length of an address in bytes.
    pub(crate) fn address_len(self) -> usize {
        match self {
            Self::V4 => 4,
            Self::V6 => 16,
        }
    }

    /// Reads an address in network byte order.
    pub(crate) fn read(self, bytes: &[u8]) -> Option<IpAddr> {
        match self {
            Self::V4 => <[u8; 4]>::try_from(bytes).ok().map(|b| Ipv4Addr::from(b).into()),
            Self::V6 => <[u8; 16]>::try_from(bytes).ok().map(|b| Ipv6Addr::from(b).into()),
        }
    }
}

/// The address in network byte order: 4 or 16 bytes.
pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_addresses_are_ipv4() {
        let connection =
            Ends::new("[::ffff:10.0.0.1]:4000".parse().unwrap(), "10.0.0.2:80".parse().unwrap()).unwrap();
        assert_eq!(connection.family(), Family::V4);
        assert_eq!(connection.to_string(), "10.0.0.1:4000 to 10.0.0.2:80");
    }

    #[test]
    fn ends_of_different_versions_are_refused() {
        let mixed = Ends::new("[fd00::1]:4000".parse().unwrap(), "10.0.0.2:80".parse().unwrap());
        assert!(mixed.unwrap_err().to_string().contains("use two addresses of one version"));
    }

    #[test]
    fn addresses_survive_bytes() {
        for text in ["10.1.2.3", "fd00::7:1"] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(Family::of(address).read(&octets(address)), Some(address));
            assert_eq!(Family::of(address).read(&[1, 2, 3]), None);
        }
    }
}
