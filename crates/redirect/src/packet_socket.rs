//! Packet sockets (packet(7)) that receive or send whole Ethernet frames of one interface.
//!
//! Before each frame is a `struct virtio_net_hdr` (`linux/virtio_net.h`): it says which work is not
//! done yet, such as computing the checksum or splitting a large frame into segments. A frame that is
//! sent with the header that it was received with gets this work done by the network card, or by the
//! kernel. So this crate computes no checksum and splits no frame.
#![allow(unsafe_code, reason = "packet sockets and socket filters have no safe form")]

use crate::filter::Filter;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Length of the `struct virtio_net_hdr` before each frame.
pub(crate) const VNET_HEADER_LEN: usize = 10;

/// Threads that close sockets at the same time.
const MAX_CLOSING: usize = 64;

/// Bytes of stack of such a thread.
const CLOSING_STACK_SIZE: usize = 64 << 10;

/// A socket that receives. Dropping it does not wait.
///
/// The close(2) of such a socket waits for an RCU grace period, 5 to 20 ms (`packet_release`,
/// net/packet/af_packet.c), so another thread makes it. Threads that wait at the same time share the
/// grace period.
#[derive(Debug)]
pub(crate) struct Receiver(ManuallyDrop<OwnedFd>);

impl AsFd for Receiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        static CLOSING: AtomicUsize = AtomicUsize::new(0);
        // SAFETY: the field is not used again.
        let socket = unsafe { ManuallyDrop::take(&mut self.0) };
        if CLOSING.fetch_add(1, Ordering::Relaxed) < MAX_CLOSING {
            let close = move || {
                drop(socket);
                CLOSING.fetch_sub(1, Ordering::Relaxed);
            };
            let builder = thread::Builder::new().name("close".to_owned()).stack_size(CLOSING_STACK_SIZE);
            if builder.spawn(close).is_ok() {
                return;
            }
        } else {
            drop(socket);
        }
        CLOSING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Opens a non-blocking socket that receives what the interface receives and the filter accepts.
/// `max_bytes` limits the kernel memory of frames that are not read yet; more are dropped.
///
/// Only sockets for all protocols (`ETH_P_ALL`) see a frame before nftables' ingress hook does.
pub(crate) fn open_receiver(index: u32, filter: &Filter, max_bytes: usize) -> io::Result<Receiver> {
    let socket = open()?;
    set_filter(&socket, filter)?;
    set_option(&socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
    // The kernel doubles the value: socket(7).
    let half = libc::c_int::try_from(max_bytes / 2).unwrap_or(libc::c_int::MAX / 2);
    set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, half)?;
    bind(&socket, index, libc::ETH_P_ALL)?;
    Ok(Receiver(ManuallyDrop::new(socket)))
}

/// Opens a socket that sends frames out of the interface and receives none.
pub(crate) fn open_sender(index: u32, buffer_size: usize) -> io::Result<OwnedFd> {
    let socket = open()?;
    let half = libc::c_int::try_from(buffer_size / 2).unwrap_or(libc::c_int::MAX / 2);
    set_option(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, half)?;
    bind(&socket, index, 0)?;
    Ok(socket)
}

/// Replaces the filter. Frames that are in the queue stay there.
pub(crate) fn set_filter(socket: &impl AsFd, filter: &Filter) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: filter.instructions.len() as u16,
        filter: filter.instructions.as_ptr().cast_mut(),
    };
    set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

/// Number of frames that the filter accepted and that were dropped since the memory was used up.
pub(crate) fn dropped(socket: &Receiver) -> io::Result<u32> {
    let mut stats = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
    let mut length = size_of::<libc::tpacket_stats>() as libc::socklen_t;
    // SAFETY: both pointers are to locals that live for the call, and the length is the struct's.
    check(unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            (&raw mut stats).cast(),
            &raw mut length,
        )
    })?;
    Ok(stats.tp_drops)
}

/// With protocol 0 nothing is received before `bind` sets protocol and interface.
fn open() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers.
    let fd = check(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
    // SAFETY: a new descriptor that has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    set_option(&socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
    Ok(socket)
}

fn bind(socket: &OwnedFd, index: u32, protocol: libc::c_int) -> io::Result<()> {
    // SAFETY: all zero is a valid sockaddr_ll.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (protocol as u16).to_be();
    address.sll_ifindex = index.cast_signed();
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address lives for the call, and the length is its own.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(())
}

fn set_option(
    socket: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    set(socket, level, option, &value)
}

/// `value` is the struct that the option expects; the program of a filter lives as long as the filter.
fn set<T>(socket: &impl AsFd, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    let length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the value lives for the call, and the length is its own. The kernel copies a filter's
    // program, which set_filter keeps borrowed until this call returns.
    check(unsafe {
        libc::setsockopt(socket.as_fd().as_raw_fd(), level, option, std::ptr::from_ref(value).cast(), length)
    })?;
    Ok(())
}

fn check(returned: libc::c_int) -> io::Result<libc::c_int> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}
