//! A classic BPF program that accepts the packets of given connections (`linux/filter.h`, and
//! Documentation/networking/filter.rst of the kernel).
//!
//! Offsets count from the start of an Ethernet frame. The kernel has removed a VLAN tag before.

use crate::ends::{Ends, Family, octets};
use crate::error::{RedirectError, Result};
use std::net::SocketAddr;

/// Longest program: `BPF_MAXINSNS` of `linux/bpf_common.h`.
const MAX_INSTRUCTIONS: usize = 4096;

/// Number of connections for which a program always fits: 21 instructions each.
const MAX_CONNECTIONS: usize = 190;

/// Length of an Ethernet header, and where it has the type.
const ETHERNET_LEN: u32 = 14;
const ETHERNET_TYPE: u32 = 12;

/// Operations, as combinations of the `BPF_*` of `linux/bpf_common.h`.
const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const LOAD_HALF: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
const LOAD_HALF_INDEXED: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_IND;
/// Loads X with four times the low half of a byte: the length of an IPv4 header.
const LOAD_HEADER_LEN: u32 = libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH;
const LOAD_X: u32 = libc::BPF_LDX | libc::BPF_W | libc::BPF_IMM;
const JUMP_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
const JUMP_ANY_BIT: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
const JUMP: u32 = libc::BPF_JMP | libc::BPF_JA;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

/// The result of a program that accepts the whole packet.
const WHOLE_PACKET: u32 = u32::MAX;

/// A program for `SO_ATTACH_FILTER`.
#[derive(Debug, Clone)]
pub(crate) struct Filter {
    pub(crate) instructions: Vec<libc::sock_filter>,
}

impl Filter {
    /// Accepts TCP packets from the client's to home's end of any of these connections.
    pub(crate) fn connections(connections: &[Ends]) -> Result<Self> {
        let mut instructions = Vec::new();
        for family in Family::ALL {
            let section = section(family, connections.iter().filter(|c| c.family() == family));
            let ether_type = match family {
                Family::V4 => libc::ETH_P_IP,
                Family::V6 => libc::ETH_P_IPV6,
            };
            instructions.push(plain(LOAD_HALF, ETHERNET_TYPE));
            // Conditional jumps reach 255 instructions only.
            instructions.push(jump(JUMP_EQUAL, ether_type as u32, 1, 0));
            instructions.push(plain(JUMP, section.len() as u32));
            instructions.extend(section);
        }
        instructions.extend(Self::nothing().instructions);
        if instructions.len() > MAX_INSTRUCTIONS {
            return Err(RedirectError::TooManyConnections {
                number: connections.len(),
                max: MAX_CONNECTIONS,
            });
        }
        Ok(Self { instructions })
    }

    /// Accepts no packet.
    pub(crate) fn nothing() -> Self {
        Self { instructions: vec![plain(RETURN, 0)] }
    }
}

/// The program for packets of one IP version.
fn section<'a>(family: Family, connections: impl Iterator<Item = &'a Ends>) -> Vec<libc::sock_filter> {
    // RFC 791 and RFC 8200: the protocol or next header, and the source address.
    let (protocol, source) = match family {
        Family::V4 => (ETHERNET_LEN + 9, ETHERNET_LEN + 12),
        Family::V6 => (ETHERNET_LEN + 6, ETHERNET_LEN + 8),
    };
    let mut section =
        vec![plain(LOAD_BYTE, protocol), jump(JUMP_EQUAL, libc::IPPROTO_TCP as u32, 1, 0), plain(RETURN, 0)];
    match family {
        Family::V4 => section.extend([
            // Later fragments have no TCP header. 0x1fff masks the fragment's offset.
            plain(LOAD_HALF, ETHERNET_LEN + 6),
            jump(JUMP_ANY_BIT, 0x1fff, 0, 1),
            plain(RETURN, 0),
            plain(LOAD_HEADER_LEN, ETHERNET_LEN),
        ]),
        Family::V6 => section.push(plain(LOAD_X, 40)),
    }
    for connection in connections {
        section.extend(block(source, connection));
    }
    section.push(plain(RETURN, 0));
    section
}

/// Accepts the packet if it is of this connection, else continues after the block.
fn block(source: u32, connection: &Ends) -> Vec<libc::sock_filter> {
    let mut tests = Vec::new();
    let words = |at: u32, end: SocketAddr, tests: &mut Vec<_>| {
        let octets = octets(end.ip());
        for (word, offset) in octets.as_chunks::<4>().0.iter().zip((at..).step_by(4)) {
            tests.push((plain(LOAD_WORD, offset), u32::from_be_bytes(*word)));
        }
        at + octets.len() as u32
    };
    let destination = words(source, connection.client(), &mut tests);
    words(destination, connection.home(), &mut tests);
    for (offset, end) in [(0, connection.client()), (2, connection.home())] {
        tests.push((plain(LOAD_HALF_INDEXED, ETHERNET_LEN + offset), end.port().into()));
    }
    // Two instructions a test, and the return.
    let end = tests.len() * 2 + 1;
    let mut block = Vec::with_capacity(end);
    for (load, value) in tests {
        block.push(load);
        // Jumps count from the next instruction.
        let to_end = end - block.len() - 1;
        block.push(jump(JUMP_EQUAL, value, 0, to_end as u8));
    }
    block.push(plain(RETURN, WHOLE_PACKET));
    block
}

fn plain(code: u32, k: u32) -> libc::sock_filter {
    jump(code, k, 0, 0)
}

fn jump(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program as the kernel does, for the instructions of this module.
    fn run(filter: &Filter, frame: &[u8]) -> u32 {
        let (mut a, mut x, mut at) = (0, 0, 0);
        let load = |offset: u32, len: usize| -> Option<u32> {
            let bytes = frame.get(offset as usize..offset as usize + len)?;
            Some(bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte)))
        };
        loop {
            let libc::sock_filter { code, jt, jf, k } = filter.instructions[at];
            at += 1;
            let loaded = match u32::from(code) {
                LOAD_WORD => load(k, 4),
                LOAD_HALF => load(k, 2),
                LOAD_BYTE => load(k, 1),
                LOAD_HALF_INDEXED => load(x + k, 2),
                LOAD_HEADER_LEN => {
                    x = load(k, 1).unwrap() % 16 * 4;
                    Some(a)
                }
                LOAD_X => {
                    x = k;
                    Some(a)
                }
                JUMP_EQUAL => {
                    at += usize::from(if a == k { jt } else { jf });
                    Some(a)
                }
                JUMP_ANY_BIT => {
                    at += usize::from(if a & k == 0 { jf } else { jt });
                    Some(a)
                }
                JUMP => {
                    at += k as usize;
                    Some(a)
                }
                RETURN => return k,
                other => panic!("unknown code {other}"),
            };
            // The kernel rejects a packet that is too short for a load.
            let Some(value) = loaded else { return 0 };
            a = value;
        }
    }

    fn frame(connection: &Ends, protocol: i32) -> Vec<u8> {
        let (client, home) = (connection.client(), connection.home());
        let mut frame = vec![0; 12];
        match connection.family() {
            Family::V4 => {
                frame.extend([8, 0, 0x46, 0, 0, 44, 0, 0, 0x40, 0, 64, protocol as u8, 0, 0]);
                frame.extend(octets(client.ip()));
                frame.extend(octets(home.ip()));
                frame.extend([0; 4]); // One word of options.
            }
            Family::V6 => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, protocol as u8, 64]);
                frame.extend(octets(client.ip()));
                frame.extend(octets(home.ip()));
            }
        }
        frame.extend(client.port().to_be_bytes());
        frame.extend(home.port().to_be_bytes());
        frame
    }

    fn connection(client: &str, home: &str) -> Ends {
        Ends::new(client.parse().unwrap(), home.parse().unwrap()).unwrap()
    }

    #[test]
    fn packets_of_the_connections_are_accepted_and_no_others() {
        let own = [
            connection("10.0.0.1:4000", "10.0.0.2:80"),
            connection("10.0.0.1:4001", "10.0.0.2:80"),
            connection("[fd00::1]:4000", "[fd00::2]:80"),
        ];
        let filter = Filter::connections(&own).unwrap();
        for connection in &own {
            let tcp = frame(connection, libc::IPPROTO_TCP);
            assert_eq!(run(&filter, &tcp), WHOLE_PACKET, "{connection}");
            assert_eq!(run(&filter, &tcp[..tcp.len() - 1]), 0, "{connection} without its last byte");
            assert_eq!(run(&filter, &frame(connection, libc::IPPROTO_UDP)), 0, "{connection} by UDP");
            assert_eq!(run(&Filter::nothing(), &tcp), 0);
        }
        for other in [
            connection("10.0.0.3:4000", "10.0.0.2:80"),
            connection("10.0.0.1:4000", "10.0.0.3:80"),
            connection("10.0.0.1:4002", "10.0.0.2:80"),
            connection("10.0.0.1:4000", "10.0.0.2:81"),
            connection("[fd00::3]:4000", "[fd00::2]:80"),
        ] {
            assert_eq!(run(&filter, &frame(&other, libc::IPPROTO_TCP)), 0, "{other}");
        }
    }

    #[test]
    fn later_fragments_are_not_accepted() {
        let own = connection("10.0.0.1:4000", "10.0.0.2:80");
        let mut fragment = frame(&own, libc::IPPROTO_TCP);
        fragment[21] = 1;
        assert_eq!(run(&Filter::connections(&[own]).unwrap(), &fragment), 0);
    }

    #[test]
    fn largest_number_of_connections_fits() {
        let many = |number| vec![connection("[fd00::1]:4000", "[fd00::2]:80"); number];
        assert!(Filter::connections(&many(MAX_CONNECTIONS)).is_ok());
        assert!(Filter::connections(&many(MAX_CONNECTIONS + 10)).is_err());
    }
}
