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
use crate::table::Table;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// The device that creates interfaces.
const DEVICE: &str = "/dev/net/tun";

/// The largest MTU of a TAP device: `MAX_MTU` of the kernel's `drivers/net/tun.c`, 65535 less the
/// length of an Ethernet header.
const MTU: u32 = 65521;

/// Link address of all ends: locally administered. An interface without ARP addresses frames to its own
/// link address, which is thus also that of the other end.
const LINK_ADDRESS: [u8; 6] = [0x02, 0x7e, 0x72, 0x6e, 0x00, 0x03];

/// `TUN_F_CSUM`, `TUN_F_TSO4`, `TUN_F_TSO6` and `TUN_F_TSO_ECN` of `linux/if_tun.h`: the reader accepts
/// frames without a checksum, and such that carry several segments.
const OFFLOADS: libc::c_ulong = 0x01 | 0x02 | 0x04 | 0x08;

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
        configured.map(|()| Self { tap, interface })
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

    /// Lets a frame enter this machine that was read at the other end.
    ///
    /// # Errors
    /// If the kernel drops it: for lack of memory, or since it is malformed.
    pub fn write(&self, frame: &[u8]) -> io::Result<()> {
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

/// The chain comes first: no frame enters before it is there.
fn configure(
    links: &mut Links,
    table: &mut Table,
    interface: &NetworkInterface,
    end: TunnelEnd,
) -> Result<()> {
    table.attach_tunnel(&interface.name, end)?;
    links.set_silent(interface.index)?;
    links.set_link(interface.index, MTU, LINK_ADDRESS)?;
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
