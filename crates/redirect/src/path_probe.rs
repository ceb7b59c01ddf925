//! A packet that examines whether a network carries packets of moved connections.
//!
//! Such packets have an address of home, but the link address of another machine. Some networks drop
//! them: those that check the source addresses of each port, and most clouds. So a packet of this kind
//! is sent before any connection depends on it, in the same way as those of a connection: through the
//! table. It is a TCP segment without flags, from or to an address that no machine has.

use crate::ends::{Ends, octets};
use crate::error::{NEEDS_NET_ADMIN, Result, WithRemedy};
use crate::filter::Filter;
use crate::injector::Injector;
use crate::link::NetworkInterface;
use crate::packet_socket::{self, Receiver, VNET_HEADER_LEN};
use std::io;
use std::net::{IpAddr, SocketAddr};

/// The content by which a packet is recognized. With it, an IPv4 packet needs no padding to the minimum
/// length of an Ethernet frame.
pub type ProbeToken = [u8; 16];

/// Kernel memory for packets that have arrived.
const MAX_RECEIVED: usize = 64 << 10;

/// RFC 5737 and RFC 3849: addresses for documentation.
const NOBODY_IPV4: [u8; 4] = [192, 0, 2, 1];
const NOBODY_IPV6: [u16; 8] = [0x2001, 0xdb8, 0, 0, 0, 0, 0, 1];

/// Waits for one packet.
#[derive(Debug)]
pub struct PathProbe {
    socket: Receiver,
    token: ProbeToken,
}

impl PathProbe {
    /// Begins to look for the packet of this connection with this content on an interface. Apply
    /// [`crate::Change::Hold`] as well, so that the packet does not reach this machine's IP stack.
    ///
    /// # Errors
    /// Without CAP_NET_RAW and CAP_NET_ADMIN.
    pub fn listen(interface: &NetworkInterface, connection: &Ends, token: ProbeToken) -> Result<Self> {
        let filter = Filter::connections(&[*connection])?;
        let socket = packet_socket::open_receiver(interface.index, &filter, MAX_RECEIVED)
            .with_remedy(|| format!("open a packet socket on {}", interface.name), NEEDS_NET_ADMIN)?;
        Ok(Self { socket, token })
    }

    /// Whether the packet has arrived. A packet with another content is ignored.
    #[must_use]
    pub fn has_arrived(&self) -> bool {
        let mut frame = [0; 256];
        while let Ok((length, _)) =
            rustix::net::recv(&self.socket, &mut frame[..], rustix::net::RecvFlags::empty())
        {
            if frame[..length].ends_with(&self.token) {
                return true;
            }
        }
        false
    }

    /// The connection of a packet to this address of home. It differs with the token.
    #[must_use]
    pub fn connection(home: IpAddr, token: ProbeToken) -> Ends {
        let port = u16::from_ne_bytes([token[0], token[1]]) | 0x8000;
        let home = SocketAddr::new(home.to_canonical(), port);
        let nobody: IpAddr = if home.is_ipv4() { NOBODY_IPV4.into() } else { NOBODY_IPV6.into() };
        Ends::of_one_family(SocketAddr::new(nobody, port), home)
    }
}

impl Injector {
    /// Sends the packet of a connection with this content, from its client's end, on the way that the
    /// table has for the connection ([`crate::Change::Forward`]).
    ///
    /// # Errors
    /// Those of the packet socket.
    pub fn send_probe(&self, connection: &Ends, token: &ProbeToken) -> io::Result<()> {
        self.send(&mut probe_frame(connection, token))
    }
}

/// The frame with the packet of a connection from its client's end, after a `struct virtio_net_hdr` that
/// requires no work. Its link addresses are zero.
#[must_use]
pub fn probe_frame(connection: &Ends, token: &ProbeToken) -> Vec<u8> {
    let (from, to) = (connection.client(), connection.home());
    let addresses = [octets(from.ip()), octets(to.ip())].concat();
    // Ports, sequence and acknowledgement, a header of five words, no flags, window, checksum, urgent
    // pointer (RFC 9293).
    let mut segment = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    segment.extend([0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0, 0, 0, 0, 0, 0, 0]);
    segment.extend(token);
    let length = segment.len() as u16;
    let pseudo_header = [&addresses[..], &[0, libc::IPPROTO_TCP as u8], &length.to_be_bytes()].concat();
    let sum = checksum(&[&pseudo_header[..], &segment].concat());
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    let mut frame = vec![0; VNET_HEADER_LEN + 12];
    if from.is_ipv4() {
        let [high, low] = (length + 20).to_be_bytes();
        let mut header = vec![0x45, 0, high, low, 0, 0, 0x40, 0, 64, libc::IPPROTO_TCP as u8, 0, 0];
        header.extend(&addresses);
        let sum = checksum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        frame.extend((libc::ETH_P_IP as u16).to_be_bytes());
        frame.extend(header);
    } else {
        let [high, low] = length.to_be_bytes();
        frame.extend((libc::ETH_P_IPV6 as u16).to_be_bytes());
        frame.extend([0x60, 0, 0, 0, high, low, libc::IPPROTO_TCP as u8, 64]);
        frame.extend(&addresses);
    }
    frame.extend(segment);
    frame
}

/// The Internet checksum (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.as_chunks::<2>().0.iter();
    let sum: u32 = words.map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_segment_have_their_checksums() {
        for (home, header) in [("10.0.0.1", 20), ("fd00::1", 40)] {
            let token = [7; 16];
            let connection = PathProbe::connection(home.parse().unwrap(), token);
            let frame = probe_frame(&connection, &token);
            let packet = &frame[VNET_HEADER_LEN + 14..];
            let (ip, segment) = packet.split_at(header);
            if header == 20 {
                // The sum over a header with its checksum is zero (RFC 1071).
                assert_eq!(checksum(ip), 0);
            }
            let addresses = if header == 20 { &ip[12..] } else { &ip[8..] };
            let pseudo_header = [addresses, &[0, 6, 0, segment.len() as u8]].concat();
            assert_eq!(checksum(&[&pseudo_header[..], segment].concat()), 0);
            assert!(frame.len() - VNET_HEADER_LEN >= 60, "an Ethernet frame without padding");
        }
    }
}
