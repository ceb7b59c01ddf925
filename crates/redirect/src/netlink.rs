//! Netlink: requests to the kernel, and its answers.
//!
//! The kernel processes a request while it is sent, so all answers except the later parts of a dump
//! are in the socket's queue when the send call returns.

pub(crate) mod message;

use message::{Message, Reply, read_u32, split};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use std::io;
use std::os::fd::OwnedFd;

/// Size of the send and receive buffers of a socket, in bytes. One batch with 10,000 elements needs
/// about 2 MB.
const SOCKET_BUFFER_SIZE: usize = 16 << 20;

/// Size of the buffer for one receive call; the kernel's dumps use at most 32 KiB (netlink(7)).
const RECEIVE_BUFFER_SIZE: usize = 64 << 10;

/// Number of times that an interrupted dump is repeated.
const MAX_DUMP_TRIES: usize = 16;

/// A netlink socket. It belongs to the network namespace in which it was opened, on whichever thread
/// it is used.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    sequence: u32,
}

impl Socket {
    /// Opens a socket for a netlink protocol, `None` for `NETLINK_ROUTE`, in the calling thread's network namespace.
    pub(crate) fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
        let fd = rustix::net::socket_with(family, SocketType::RAW, flags, protocol)?;
        // Without CAP_NET_ADMIN the default sizes stay, which suffice for one connection.
        let _ = sockopt::set_socket_recv_buffer_size_force(&fd, SOCKET_BUFFER_SIZE);
        let _ = sockopt::set_socket_send_buffer_size(&fd, SOCKET_BUFFER_SIZE);
        rustix::net::bind(&fd, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { fd, sequence: 0 })
    }

    /// Sends one request that the kernel only acknowledges.
    pub(crate) fn change(&mut self, mut message: Message) -> io::Result<()> {
        message.set_flag(libc::NLM_F_ACK);
        let sequence = self.next_sequence();
        self.send(&message.finish(sequence))?;
        self.receive_pending()?
            .iter()
            .filter(|reply| reply.sequence == sequence)
            .find_map(acknowledged)
            .unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))
    }

    /// Sends one request that the kernel answers with one message.
    pub(crate) fn get(&mut self, message: Message) -> io::Result<Reply> {
        let sequence = self.next_sequence();
        self.send(&message.finish(sequence))?;
        let replies = self.receive_pending()?;
        let reply = replies.into_iter().find(|reply| reply.sequence == sequence);
        let reply = reply.ok_or(io::ErrorKind::UnexpectedEof)?;
        match acknowledged(&reply) {
            Some(Err(error)) => Err(error),
            _ => Ok(reply),
        }
    }

    /// Sends messages between a first and a last one, as nfnetlink's batches need it, and returns the
    /// first error. The kernel applies all messages or none.
    pub(crate) fn batch(&mut self, first: Message, messages: Vec<Message>, last: Message) -> io::Result<()> {
        let begin = self.next_sequence();
        let mut bytes = first.finish(begin);
        let expected = messages.len();
        for mut message in messages {
            message.set_flag(libc::NLM_F_ACK);
            bytes.extend(message.finish(self.next_sequence()));
        }
        bytes.extend(last.finish(self.next_sequence()));
        self.send(&bytes)?;
        let mut acknowledgements = 0;
        // An error of the batch as a whole has the first message's number.
        for reply in
            self.receive_pending()?.iter().filter(|r| r.sequence.wrapping_sub(begin) <= expected as u32)
        {
            match acknowledged(reply) {
                Some(Ok(())) => acknowledgements += 1,
                Some(Err(error)) => return Err(error),
                None => {}
            }
        }
        if acknowledgements == expected { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// All objects that match a request. Repeats the request if objects changed meanwhile.
    pub(crate) fn dump(&mut self, mut message: Message) -> io::Result<Vec<Reply>> {
        message.set_flag(libc::NLM_F_DUMP);
        for _ in 0..MAX_DUMP_TRIES {
            let sequence = self.next_sequence();
            self.send(&message.clone().finish(sequence))?;
            if let Some(replies) = self.receive_dump(sequence)? {
                return Ok(replies);
            }
        }
        Err(io::ErrorKind::Interrupted.into())
    }

    /// One dump; `None` if it is inconsistent.
    fn receive_dump(&self, sequence: u32) -> io::Result<Option<Vec<Reply>>> {
        let mut replies = Vec::new();
        let mut consistent = true;
        loop {
            for reply in self.receive(RecvFlags::empty())? {
                if reply.sequence != sequence {
                    continue;
                }
                consistent &= reply.flags & libc::NLM_F_DUMP_INTR as u16 == 0;
                if libc::c_int::from(reply.kind) == libc::NLMSG_DONE {
                    return match error_code(&reply) {
                        0 => Ok(consistent.then_some(replies)),
                        // EINTR: a change of the rules interrupted the dump.
                        code if -code == libc::EINTR => Ok(None),
                        code => Err(io::Error::from_raw_os_error(-code)),
                    };
                }
                if let Some(Err(error)) = acknowledged(&reply) {
                    return Err(error);
                }
                replies.push(reply);
            }
        }
    }

    fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let kernel = SocketAddrNetlink::new(0, 0);
        let sent = rustix::net::sendto(&self.fd, bytes, SendFlags::empty(), &kernel)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// All that is in the queue.
    fn receive_pending(&self) -> io::Result<Vec<Reply>> {
        let mut replies = Vec::new();
        loop {
            match self.receive(RecvFlags::DONTWAIT) {
                Ok(more) => replies.extend(more),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(replies),
                Err(error) => return Err(error),
            }
        }
    }

    fn receive(&self, flags: RecvFlags) -> io::Result<Vec<Reply>> {
        let mut buffer = vec![0; RECEIVE_BUFFER_SIZE];
        loop {
            match rustix::net::recv(&self.fd, &mut buffer[..], flags) {
                Ok((length, _)) => return Ok(split(&buffer[..length])),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The result in an acknowledgement; `None` for any other message.
fn acknowledged(reply: &Reply) -> Option<io::Result<()>> {
    (libc::c_int::from(reply.kind) == libc::NLMSG_ERROR).then(|| match error_code(reply) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code)),
    })
}

/// A negative errno, or 0; the first field of the messages `NLMSG_ERROR` and `NLMSG_DONE`.
fn error_code(reply: &Reply) -> i32 {
    read_u32(&reply.body).cast_signed()
}
