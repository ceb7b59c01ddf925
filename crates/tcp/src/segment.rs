//! TCP segments as bytes of an IP packet, for a raw socket (RFC 791, RFC 8200, RFC 9293).

use std::net::{IpAddr, SocketAddr};

/// Flags of the header.
pub(crate) const FIN: u8 = 0x01;
pub(crate) const ACK: u8 = 0x10;

const PROTOCOL_TCP: u8 = 6;

/// Hop limit. It passes `IP_MINTTL` and `IPV6_MINHOPCOUNT` of any value.
const HOPS: u8 = 255;

/// One segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment<'a> {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) sequence: u32,
    pub(crate) acknowledged: u32,
    pub(crate) flags: u8,
    /// The field as it is sent, shifted by the window scale.
    pub(crate) window: u16,
    /// Value of the timestamp option. The echoed value is 0, which is none.
    pub(crate) timestamp: Option<u32>,
    pub(crate) payload: &'a [u8],
}

impl Segment<'_> {
    /// The packet with its IP header. Mapped addresses give a packet of IPv4. `None` if one address
    /// is of IPv4 and the other of IPv6.
    pub(crate) fn packet(&self) -> Option<Vec<u8>> {
        let mut tcp = self.header();
        tcp.extend_from_slice(self.payload);
        let length = u16::try_from(tcp.len()).ok()?;
        let (mut packet, addresses) = match (self.from.ip().to_canonical(), self.to.ip().to_canonical()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let total = length.checked_add(20)?.to_be_bytes();
                // Don't Fragment. The kernel fills in the identification and the checksum (raw(7)).
                let mut header = vec![0x45, 0, total[0], total[1], 0, 0, 0x40, 0, HOPS, PROTOCOL_TCP, 0, 0];
                let addresses = [from.octets(), to.octets()].concat();
                header.extend_from_slice(&addresses);
                (header, addresses)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let length = length.to_be_bytes();
                let mut header = vec![0x60, 0, 0, 0, length[0], length[1], PROTOCOL_TCP, HOPS];
                let addresses = [from.octets(), to.octets()].concat();
                header.extend_from_slice(&addresses);
                (header, addresses)
            }
            _ => return None,
        };
        let pseudo_header = [addresses.as_slice(), &[0, PROTOCOL_TCP], &length.to_be_bytes()].concat();
        let checksum = checksum(&[&pseudo_header, &tcp]).to_be_bytes();
        tcp[16..18].copy_from_slice(&checksum);
        packet.extend_from_slice(&tcp);
        Some(packet)
    }

    /// The header with its options, without a checksum.
    fn header(&self) -> Vec<u8> {
        let options = match self.timestamp {
            // Two No-Operations align the option.
            Some(value) => [&[1, 1, 8, 10][..], &value.to_be_bytes(), &[0; 4]].concat(),
            None => Vec::new(),
        };
        let words = u8::try_from(5 + options.len() / 4).unwrap_or(15);
        let mut header = Vec::with_capacity(40);
        header.extend_from_slice(&self.from.port().to_be_bytes());
        header.extend_from_slice(&self.to.port().to_be_bytes());
        header.extend_from_slice(&self.sequence.to_be_bytes());
        header.extend_from_slice(&self.acknowledged.to_be_bytes());
        header.extend_from_slice(&[words << 4, self.flags]);
        header.extend_from_slice(&self.window.to_be_bytes());
        header.extend_from_slice(&[0; 4]);
        header.extend_from_slice(&options);
        header
    }
}

/// The Internet checksum (RFC 1071) of parts, each of which but the last has an even length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let value = |word: &[u8]| u32::from(word[0]) << 8 | word.get(1).map_or(0, |low| u32::from(*low));
    let sum: u64 = words.map(|word| u64::from(value(word))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    // Folded twice, the sum of at most 64 KiB fits.
    !u16::try_from(folded).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(from: &str, to: &str) -> Segment<'static> {
        let [from, to] = [from, to].map(|address| address.parse().unwrap());
        Segment {
            from,
            to,
            sequence: 1,
            acknowledged: 2,
            flags: ACK,
            window: 3,
            timestamp: Some(9),
            payload: b"odd",
        }
    }

    #[test]
    fn the_checksum_of_a_segment_with_its_checksum_is_zero() {
        for (from, to) in [("192.0.2.1:80", "192.0.2.2:9"), ("[2001:db8::1]:80", "[2001:db8::2]:9")] {
            let segment = segment(from, to);
            let packet = segment.packet().unwrap();
            let (start, addresses) = if segment.from.is_ipv4() { (20, 12..20) } else { (40, 8..40) };
            let tcp = &packet[start..];
            let pseudo = [&packet[addresses], &[0, PROTOCOL_TCP, 0, tcp.len().try_into().unwrap()]].concat();
            assert_eq!(checksum(&[&pseudo, tcp]), 0);
            assert_eq!(tcp.len(), 20 + 12 + 3);
        }
    }

    #[test]
    fn mapped_addresses_give_a_packet_of_ipv4() {
        let mapped = segment("[::ffff:192.0.2.1]:80", "[::ffff:192.0.2.2]:9").packet();
        assert_eq!(mapped, segment("192.0.2.1:80", "192.0.2.2:9").packet());
        assert_eq!(segment("[::ffff:192.0.2.1]:80", "[2001:db8::2]:9").packet(), None);
    }
}
