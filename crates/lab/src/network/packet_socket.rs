//! A raw packet socket on one network interface.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Length of the `virtio_net_hdr` before each frame, read or written. It tells the receiver's
/// kernel which work (checksums, segmentation) the sender left to the hardware.
pub(crate) const VNET_HEADER_LEN: usize = 10;

/// Socket buffer in bytes, for each direction: about 50 ms at 1 Gbit/s, with the kernel's overhead
/// per frame.
const SOCKET_BUFFER_SIZE: libc::c_int = 32 << 20;

/// The index of an interface in this network namespace; `None` if no interface has that name.
pub(crate) fn interface_index(interface: &str) -> Option<i32> {
    let name = CString::new(interface).ok()?;
    // SAFETY: the name is a C string that lives for the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    i32::try_from(index).ok().filter(|i| *i > 0)
}

/// Opens a non-blocking socket that reads and writes whole frames, each after a
/// [`VNET_HEADER_LEN`], on the interface with this index. The socket does not receive the frames
/// that it sent.
pub(crate) fn open(index: i32) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers. With protocol 0 nothing is received before bind sets the interface.
    let fd = check(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
    // SAFETY: a new descriptor that has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    set_option(&socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
    set_option(&socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
    set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, SOCKET_BUFFER_SIZE)?;
    set_option(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, SOCKET_BUFFER_SIZE)?;
    // SAFETY: all zero is a valid sockaddr_ll.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = index;
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address lives for the call, and the length is its own.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(socket)
}

fn set_option(
    socket: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the value lives for the call, and the length is its own.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), length) })?;
    Ok(())
}

fn check(returned: libc::c_int) -> io::Result<libc::c_int> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}
