//! A veth pair through which packets enter the node's network stack.
//!
//! ```text
//!  held frames ──▶ tern-tx ═══ tern-rx ─ chain ─ forwarded ──▶ guest's node, or a namespace here
//!  answers to a client on this node ──▶        └─ (none) ──▶ the node's own sockets
//! ```
//!
//! A held frame that is sent through the pair takes the same rule as the connection's next packets,
//! with the neighbour's link address found by the kernel. If the move was cancelled, the frame reaches
//! the socket at home.

use crate::ends::Way;
use crate::error::{NEEDS_NET_ADMIN, Result, WithRemedy};
use crate::link::{Links, NetworkInterface, VethPair};
use crate::packet_socket::{self, VNET_HEADER_LEN};
use crate::sysctl;
use crate::table::Table;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;

/// Names of the two ends.
const SENDING_END: &str = "tern-tx";
const RECEIVING_END: &str = "tern-rx";

/// The largest MTU of a veth interface: `ETH_MAX_MTU` of `linux/if_ether.h`.
const MTU: u32 = 65535;

/// The link address of both ends: locally administered, and never seen on another link.
const LINK_ADDRESS: [u8; 6] = [0x02, 0x7e, 0x72, 0x6e, 0x00, 0x02];

/// The receiving end's address: RFC 7600's dummy address. With a loose reverse path filter, the kernel
/// accepts packets on an interface only if that has some IPv4 address. The scope keeps it from being
/// the source of a packet.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);

/// Memory of frames that are being sent, in bytes.
const SEND_BUFFER_SIZE: usize = 4 << 20;

/// The veth pair of one node, and a socket that sends into it. Dropping the value deletes the pair.
#[derive(Debug)]
pub struct Injector {
    links: Links,
    sending: NetworkInterface,
    socket: OwnedFd,
}

impl Injector {
    /// Makes the pair in the calling thread's network namespace, which must be that of `table`.
    /// Replaces a pair that an earlier process left. Frames that pass through it are handled by
    /// `table`, except that held connections are not dropped.
    ///
    /// # Errors
    /// Without CAP_NET_ADMIN, or if this kernel has no veth. Nothing stays behind then.
    pub fn create(table: &mut Table) -> Result<Self> {
        let mut links = Links::open()?;
        links.delete(SENDING_END)?;
        let pair = VethPair {
            outer: SENDING_END,
            inner: RECEIVING_END,
            inner_namespace: None,
            mtu: MTU,
            address: LINK_ADDRESS,
        };
        links.create_veth(&pair)?;
        match configure(&mut links, table) {
            Ok((sending, socket)) => Ok(Self { links, sending, socket }),
            Err(error) => {
                // The first error says more than one of the cleanup.
                let _ = table.detach(RECEIVING_END).and(links.delete(SENDING_END));
                Err(error)
            }
        }
    }

    /// The way to a client that is on this node, for [`crate::Change::Answer`].
    #[must_use]
    pub fn way_to_local(&self, client: IpAddr) -> Way {
        Way { interface: self.sending.index, next_hop: client }
    }

    /// Deletes the pair and its chain, and all connections of the table that lead through it.
    ///
    /// # Errors
    /// If the table refuses it. The pair is deleted nevertheless.
    pub fn remove(self, table: &mut Table) -> Result<()> {
        let applied = table.apply(&table.elements().changes_without(self.sending.index));
        applied.and(table.detach(RECEIVING_END))
    }

    /// Sends a frame that a packet socket of this crate received, with its `virtio_net_hdr`.
    pub(crate) fn send(&self, frame: &mut [u8]) -> io::Result<()> {
        // The destination link address is the first field of an Ethernet frame. The IP stack ignores
        // frames for other addresses.
        let destination = frame.get_mut(VNET_HEADER_LEN..VNET_HEADER_LEN + LINK_ADDRESS.len());
        destination.ok_or(io::ErrorKind::InvalidData)?.copy_from_slice(&LINK_ADDRESS);
        rustix::net::send(&self.socket, frame, rustix::net::SendFlags::empty())?;
        Ok(())
    }
}

impl Drop for Injector {
    fn drop(&mut self) {
        // A destructor cannot report it; the next Injector::create deletes what is left.
        let _ = self.links.delete(SENDING_END);
    }
}

fn configure(links: &mut Links, table: &mut Table) -> Result<(NetworkInterface, OwnedFd)> {
    let (sending, receiving) = (links.find(SENDING_END)?, links.find(RECEIVING_END)?);
    table.attach_injector(RECEIVING_END)?;
    // Loose: a client is reached through another interface. This also overrides a strict value for all
    // interfaces (ip-sysctl.rst of the kernel: the larger value applies).
    sysctl::write(&format!("ipv4/conf/{RECEIVING_END}/rp_filter"), 2)?;
    sysctl::write(&format!("ipv4/conf/{SENDING_END}/rp_filter"), 1)?;
    links.add_address(receiving.index, ADDRESS.into(), libc::RT_SCOPE_HOST)?;
    for link in [&sending, &receiving] {
        links.set_silent(link.index)?;
        links.set_up(link.index)?;
    }
    for end in [SENDING_END, RECEIVING_END] {
        links.wait_operational(end)?;
    }
    let socket = packet_socket::open_sender(sending.index, SEND_BUFFER_SIZE)
        .with_remedy(|| format!("open a packet socket on {SENDING_END}"), NEEDS_NET_ADMIN)?;
    Ok((sending, socket))
}
