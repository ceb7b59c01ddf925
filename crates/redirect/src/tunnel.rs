//! One end of a tunnel: a network interface whose frames a program reads and writes.
//!
//! ```text
//!  home's end     read:  packets of clients that the table forwards here
//!                 write: answers from the guest's node ─▶ chain ─ answers ──▶ client
//!                                                                └ all others: drop
//!  node's end     read:  answers that leave a home's namespace
//!                 write: packets of clients ─▶ chain ─ held ──▶ drop
//!                                                    ├ forwarded ──▶ home's namespace
//!                                                    └ all others: drop
//! ```
//!
//! The caller carries the frames from one end to the other. Neither IP stack sees them. The interface
//! is a TAP device (tuntap.rst of the kernel), so its frames have an Ethernet header, and a packet
//! socket sees them in the same form as those of a network card. Each is preceded by a `struct
//! virtio_net_hdr`: a frame may carry 64 KiB of segments whose checksum is not computed yet.
#![allow(unsafe_code, reason = "the ioctls of TAP devices have no safe form")]

use crate::ends::Way;
use crate::error::{Result, WithRemedy};
use crate::link::{Links, NetworkInterface, check_name};
use crate::packet_socket::VNET_HEADER_LEN;
use crate::sysctl;
use crate::table::Table;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

/// The device that creates interfaces.
const DEVICE: &str = "/dev/net/tun";

/// The largest MTU of a TAP device: `MAX_MTU` of the kernel's `drivers/net/tun.c`, 65535 less the
/// length of an Ethernet header.
const MTU: u32 = 65521;

/// `TUN_F_CSUM`, `TUN_F_TSO4`, `TUN_F_TSO6` and `TUN_F_TSO_ECN` of `linux/if_tun.h`: the reader accepts
/// frames without a checksum, and such that carry several segments.
const OFFLOADS: libc::c_ulong = 0x01 | 0x02 | 0x04 | 0x08;

/// Frames that wait to be read. More are dropped. A released hold sends as many in a row.
const QUEUE_LEN: u32 = 4096;

/// The same, for a reader that is to read all that waits now, and no more.
pub const MAX_TUNNEL_QUEUE: usize = QUEUE_LEN as usize;

/// `VIRTIO_NET_HDR_GSO_NONE`, `_TCPV4` and `_TCPV6` of `linux/virtio_net.h`, and the flag `_ECN` that
/// may come with the last two.
const GSO_NONE: u8 = 0;
const GSO_TCP: [u8; 2] = [1, 4];
const GSO_ECN: u8 = 0x80;

/// Length of an Ethernet header, and of the shortest headers of IP and TCP.
const ETHERNET_LEN: usize = 14;
const MIN_HEADERS_LEN: usize = 40;

/// Length in bytes of the longest frame with its `struct virtio_net_hdr`.
pub const MAX_TUNNEL_FRAME_LEN: usize = (64 << 10) + 256;

/// Which end of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TunnelEnd {
    /// At the home of the connections. Only answers of moved connections enter the machine here.
    Home,
    /// On the guest's node. Only packets of clients of moved connections enter the machine here.
    Guest,
}

/// One end of a tunnel. Dropping it deletes the interface.
#[derive(Debug)]
pub struct Tunnel {
    tap: OwnedFd,
    interface: NetworkInterface,
    /// Longest packet, in bytes, that may enter this machine.
    max_packet_len: AtomicU32,
}

impl Tunnel {
    /// Makes the interface in the calling thread's network namespace, which must be that of `table`.
    ///
    /// # Errors
    /// If there is an interface of this name, without CAP_NET_ADMIN, or without TUN in this kernel.
    /// Nothing stays behind then.
    pub fn create(table: &mut Table, name: &str, end: TunnelEnd) -> Result<Self> {
        let tap = create_tap(name)?;
        let mut links = Links::open()?;
        let interface = links.find(name)?;
        let configured = configure(&mut links, table, &interface, end);
        if configured.is_err() {
            // The first error says more than one of the cleanup.
            let _ = table.detach(name);
        }
        let max_packet_len = AtomicU32::new(0);
        configured.map(|()| Self { tap, interface, max_packet_len })
    }

    /// The interface.
    #[must_use]
    pub fn interface(&self) -> &NetworkInterface {
        &self.interface
    }

    /// The way through the tunnel for packets to this address.
    #[must_use]
    pub fn way_to(&self, address: IpAddr) -> Way {
        Way { interface: self.interface.index, next_hop: address }
    }

    /// Reads a frame that leaves this machine, and returns its length. The buffer should have
    /// [`MAX_TUNNEL_FRAME_LEN`] bytes; the rest of a longer frame is lost.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is none.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| rustix::io::read(&self.tap, &mut *buffer))?)
    }

    /// Permits packets of this length in bytes, and shorter ones, to enter this machine: the MTU on the
    /// rest of their way, which the kernel does not check for forwarded packets.
    pub fn permit_packets(&self, mtu: u32) {
        self.max_packet_len.fetch_max(mtu, Ordering::Relaxed);
    }

    /// Lets a frame enter this machine that was read at the other end.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if its packets are longer than [`Self::permit_packets`] permits, or
    /// if it is no frame of TCP segments; else if the kernel drops it: for lack of memory, or since it is
    /// malformed.
    pub fn write(&self, frame: &[u8]) -> io::Result<()> {
        let max_packet_len = self.max_packet_len.load(Ordering::Relaxed) as usize;
        if !is_permitted(frame, max_packet_len) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        rustix::io::retry_on_intr(|| rustix::io::write(&self.tap, frame))?;
        Ok(())
    }

    /// Removes the interface, its chain, and all connections of the table that lead through it.
    ///
    /// # Errors
    /// If the table refuses the changes. The interface is deleted nevertheless.
    pub fn remove(self, table: &mut Table) -> Result<()> {
        let applied = table.apply(&table.elements().changes_without(self.interface.index));
        // Before the interface: afterwards, older kernels have deleted the chain.
        applied.and(table.detach(&self.interface.name))
    }
}

impl AsFd for Tunnel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tap.as_fd()
    }
}

/// Whether each packet of a frame, which comes from another machine, is short enough.
fn is_permitted(frame: &[u8], max_packet_len: usize) -> bool {
    // struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size.
    let [_, kind, _, _, low, high, ..] = *frame else { return false };
    let Some(packet_len) = frame.len().checked_sub(VNET_HEADER_LEN + ETHERNET_LEN) else { return false };
    if frame.len() > MAX_TUNNEL_FRAME_LEN {
        return false;
    }
    match kind {
        GSO_NONE => packet_len <= max_packet_len,
        kind if GSO_TCP.contains(&(kind & !GSO_ECN)) => {
            usize::from(u16::from_ne_bytes([low, high])) + MIN_HEADERS_LEN <= max_packet_len
        }
        _ => false,
    }
}

/// The chain comes first: no frame enters before it is there.
fn configure(
    links: &mut Links,
    table: &mut Table,
    interface: &NetworkInterface,
    end: TunnelEnd,
) -> Result<()> {
    table.attach_tunnel(&interface.name, end)?;
    // Frames that pass the chain never reach this machine's IP stack. Should another program remove the
    // table, these settings stop them.
    let name = &interface.name;
    sysctl::write(&format!("ipv4/conf/{name}/rp_filter"), 1)?;
    sysctl::write(&format!("ipv4/conf/{name}/forwarding"), 0)?;
    sysctl::write_ipv6(&format!("ipv6/conf/{name}/disable_ipv6"), 1)?;
    links.set_silent(interface.index)?;
    links.set_link(interface.index, MTU, QUEUE_LEN)?;
    links.set_up(interface.index)
}

/// Whether this machine can have a TAP device, for [`crate::probe()`].
pub(crate) fn try_tap(name: &str) -> Result<()> {
    create_tap(name).map(drop)
}

fn create_tap(name: &str) -> Result<OwnedFd> {
    check_name(name)?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let tap = rustix::fs::open(DEVICE, flags, Mode::empty()).with_remedy(
        || format!("open {DEVICE}"),
        "load the kernel's module tun (CONFIG_TUN), and allow this process to open the device",
    )?;
    // SAFETY: all zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags =
        (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_TUN_EXCL) as i16;
    // SAFETY: the request lives for the call, and has the form that TUNSETIFF expects.
    let created = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    check(created).with_remedy(
        || format!("create the interface {name}"),
        "remove an interface of that name with `ip link del`, and run it with CAP_NET_ADMIN",
    )?;
    // SAFETY: the argument is a number.
    let offloads = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD, OFFLOADS) };
    check(offloads).with_remedy(|| format!("configure the interface {name}"), "use Linux 5.15 or newer")?;
    Ok(tap)
}

fn check(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_with_packets_that_are_too_long_are_refused() {
        let frame = |kind: u8, segment: u16, len: usize| {
            let mut frame = vec![0; VNET_HEADER_LEN + ETHERNET_LEN + len];
            frame[1] = kind;
            frame[4..6].copy_from_slice(&segment.to_ne_bytes());
            frame
        };
        for (kind, segment, len, expected) in [
            (0, 0, 1500, true),
            (0, 0, 1501, false),
            (1, 1460, 60_000, true),
            (0x81, 1448, 60_000, true),
            (4, 1440, 60_000, true),
            (1, 1461, 60_000, false),
            (1, 1460, 70_000, false),
            (3, 1000, 5000, false),
            (5, 1000, 5000, false),
        ] {
            assert_eq!(is_permitted(&frame(kind, segment, len), 1500), expected, "{kind} {segment} {len}");
        }
        assert!(!is_permitted(&[0; 20], 1500) && !is_permitted(&[], 1500));
    }
}
