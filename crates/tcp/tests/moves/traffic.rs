//! Streams of bytes that each end checks, and the questions that tests ask a socket.

use crate::router::Net;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::time::Instant;
use tern_tcp::{Connection, capture, discard, restore, restore_into, resume};

/// The byte at a position of a stream.
fn byte(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// One direction of a connection: what was sent, or what was received.
#[derive(Default)]
pub(crate) struct Stream(pub(crate) u64);

impl Stream {
    /// Sends as much as the socket takes, up to `most` bytes. Returns the number.
    pub(crate) fn send_some(&mut self, socket: &impl AsFd, most: usize) -> usize {
        let bytes: Vec<u8> = (self.0..self.0 + most as u64).map(byte).collect();
        let mut done = 0;
        while done < most {
            match send(socket, &bytes[done..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => done += sent,
                Err(Errno::AGAIN) => break,
                Err(error) => panic!("send at {}: {error}", self.0 + done as u64),
            }
        }
        self.0 += done as u64;
        done
    }

    /// Receives and checks what there is, up to `most` bytes. `None` is the end of the stream.
    pub(crate) fn receive_some(&mut self, socket: &impl AsFd, most: usize) -> Option<usize> {
        let mut bytes = vec![0; most];
        match recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => None,
            Ok((length, _)) => {
                for (position, value) in (self.0..).zip(&bytes[..length]) {
                    assert_eq!(*value, byte(position), "byte {position}");
                }
                self.0 += length as u64;
                Some(length)
            }
            Err(Errno::AGAIN) => Some(0),
            Err(error) => panic!("receive at {}: {error}", self.0),
        }
    }
}

/// The result of an ioctl that stores an int.
pub(crate) fn queued(socket: &impl AsFd, request: libc::c_ulong) -> i32 {
    let mut value = 0;
    // SAFETY: the requests that tests use store one int.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), request as _, &raw mut value) };
    assert_eq!(result, 0, "ioctl: {}", std::io::Error::last_os_error());
    value
}

pub(crate) const SIOCINQ: libc::c_ulong = 0x541b;
pub(crate) const SIOCOUTQ: libc::c_ulong = 0x5411;
pub(crate) const SIOCOUTQNSD: libc::c_ulong = 0x894b;

pub(crate) fn option(socket: &impl AsFd, level: i32, option: i32) -> std::io::Result<i32> {
    let (mut value, mut length) = (0_i32, 4);
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most four bytes.
    let result = unsafe { libc::getsockopt(fd, level, option, (&raw mut value).cast(), &raw mut length) };
    if result == 0 { Ok(value) } else { Err(std::io::Error::last_os_error()) }
}

pub(crate) fn set_bytes(socket: &impl AsFd, level: i32, option: i32, value: &[u8]) -> std::io::Result<()> {
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel reads the bytes of `value`.
    let result = unsafe {
        libc::setsockopt(fd, level, option, value.as_ptr().cast(), value.len().try_into().unwrap())
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

pub(crate) fn set_option(socket: &impl AsFd, level: i32, option: i32, value: i32) -> std::io::Result<()> {
    set_bytes(socket, level, option, &value.to_ne_bytes())
}

/// The first bytes of `struct tcp_info`.
pub(crate) fn info(socket: &impl AsFd) -> [u32; 26] {
    let mut info = [0_u32; 26];
    let mut length = 104;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most 104 bytes.
    let result = unsafe {
        libc::getsockopt(fd, libc::SOL_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut length)
    };
    assert_eq!(result, 0);
    info
}

/// The state of the connection: a number of include/net/tcp_states.h.
pub(crate) fn state(socket: &impl AsFd) -> u32 {
    info(socket)[0] & 0xff
}

/// Through the form in which a connection is sent to another node.
pub(crate) fn over_the_wire(connection: &Connection) -> Connection {
    let bytes = postcard::to_stdvec(connection).unwrap();
    let received = postcard::from_bytes(&bytes).unwrap();
    assert_eq!(*connection, received);
    received
}

/// Moves a connection to a server, while the client's packets are held. Returns its new socket, and
/// the placeholder that it left.
pub(crate) fn migrate(net: &Net, socket: OwnedFd, to: usize) -> (OwnedFd, OwnedFd) {
    net.hold_to_server();
    let limit = info(&socket)[16];
    let begin = Instant::now();
    let connection = capture(&socket).unwrap();
    discard(&socket, &connection).unwrap();
    let captured = begin.elapsed();
    let connection = over_the_wire(&connection);
    let (restored, time) = net.servers[to].run(|| {
        let begin = Instant::now();
        let restored = restore(&connection).unwrap();
        resume(&restored, &connection).unwrap();
        (restored, begin.elapsed())
    });
    let bytes = connection.receive.bytes.len() + connection.send.sent.len() + connection.send.unsent.len();
    println!("{bytes} bytes queued: captured and discarded in {captured:?}, restored in {time:?}");
    assert_eq!(info(&restored)[16], limit, "rcv_ssthresh");
    net.release_to(to);
    (restored, socket)
}

/// Moves a connection into a placeholder of server `to`.
pub(crate) fn migrate_into(net: &Net, socket: OwnedFd, to: usize, placeholder: &OwnedFd) {
    net.hold_to_server();
    let connection = capture(&socket).unwrap();
    discard(&socket, &connection).unwrap();
    let connection = over_the_wire(&connection);
    net.servers[to].run(|| restore_into(placeholder, &connection).unwrap());
    net.release_to(to);
}
