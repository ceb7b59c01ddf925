//! Requests to ternd on behalf of a user.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tern_control::{Refusal, RefusalKind, Reply, Request, stream};

/// How long ternd may take to accept a request, and to reply to one that needs no waiting.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(3);

/// The user on whose behalf a request is made: the one that opened the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Opener {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// This node's ternd.
#[derive(Debug)]
pub(crate) struct Ternd {
    socket: PathBuf,
}

impl Ternd {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { socket: run_dir.join("control") }
    }

    /// Makes a request that every user may make.
    ///
    /// # Errors
    /// `ENOTCONN` if ternd is not running; otherwise as defined by [`errno`].
    pub(crate) fn request(&self, request: &Request) -> Result<Reply, Errno> {
        self.send(request)?.receive()
    }

    /// Makes a request on behalf of a user, with that user's rights only. ternd accepts the user ID
    /// since this process runs as root.
    ///
    /// # Errors
    /// As [`request`](Self::request).
    pub(crate) fn request_for(&self, opener: Opener, request: Request) -> Result<Reply, Errno> {
        self.send_for(opener, request)?.receive()
    }

    /// Sends a request on behalf of a user, without waiting for the reply.
    ///
    /// # Errors
    /// `ENOTCONN` if ternd is not running.
    pub(crate) fn send_for(&self, opener: Opener, request: Request) -> Result<PendingReply, Errno> {
        self.send(&Request::For { uid: opener.uid, gid: opener.gid, request: Box::new(request) })
    }

    fn send(&self, request: &Request) -> Result<PendingReply, Errno> {
        let send = || {
            // Do not block in connect: if ternd hangs, its backlog may be full.
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            connect(&socket, &SocketAddrUnix::new(&self.socket)?)?;
            let mut socket = UnixStream::from(socket);
            socket.set_nonblocking(false)?;
            socket.set_write_timeout(Some(REPLY_TIMEOUT))?;
            socket.set_read_timeout(Some(REPLY_TIMEOUT))?;
            stream::write(&mut socket, request)?;
            io::Result::Ok(socket)
        };
        send().map(PendingReply).map_err(|error| connection_errno(&error))
    }
}

/// A request that was sent to ternd.
#[derive(Debug)]
pub(crate) struct PendingReply(UnixStream);

impl PendingReply {
    /// Whether the reply arrives within this time; false if a signal interrupts the wait.
    pub(crate) fn is_ready_within(&self, time: Duration) -> bool {
        let time = Timespec::try_from(time).unwrap_or_default();
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&time)).is_ok_and(|ready| ready > 0)
    }

    /// Receives the reply; times out after [`REPLY_TIMEOUT`].
    ///
    /// # Errors
    /// As defined by [`errno`].
    pub(crate) fn receive(mut self) -> Result<Reply, Errno> {
        match stream::read(&mut self.0) {
            Ok(Reply::Refused(refusal)) => {
                tracing::info!(?refusal, "ternd refuses a request");
                Err(errno(&refusal))
            }
            Ok(reply) => Ok(reply),
            Err(error) => Err(connection_errno(&error)),
        }
    }
}

/// The errno for a refusal.
fn errno(refusal: &Refusal) -> Errno {
    match refusal.kind {
        RefusalKind::NotFound => Errno::NXIO,
        RefusalKind::NotAllowed => Errno::PERM,
        RefusalKind::CannotMove | RefusalKind::Unsupported => Errno::OPNOTSUPP,
        RefusalKind::Unavailable => Errno::AGAIN,
        RefusalKind::BadRequest | RefusalKind::AlreadyDone => Errno::INVAL,
        RefusalKind::Internal => Errno::IO,
    }
}

fn connection_errno(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::NotFound
        | io::ErrorKind::ConnectionRefused
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::UnexpectedEof => Errno::NOTCONN,
        // The backlog is full, or the reply is late.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Errno::TIMEDOUT,
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::time::Instant;

    #[test]
    fn request_fails_at_once_without_ternd() {
        let start = Instant::now();
        let ternd = Ternd::new(Path::new("/nonexistent"));
        assert_eq!(ternd.request(&Request::Cluster).unwrap_err(), Errno::NOTCONN);
        assert!(start.elapsed() < REPLY_TIMEOUT);
    }

    #[test]
    fn request_carries_the_opener_and_a_refusal_is_an_error() {
        let dir = std::env::temp_dir().join(format!("tern-admin-ternd-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let listener = UnixListener::bind(dir.join("control")).unwrap();
        let serve = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let request: Request = stream::read(&mut socket).unwrap();
            let refusal = Refusal::new(RefusalKind::NotAllowed, "no");
            stream::write(&mut socket, &Reply::Refused(refusal)).unwrap();
            request
        });
        let opener = Opener { uid: 7, gid: 8 };
        assert_eq!(Ternd::new(&dir).request_for(opener, Request::Rejoin).unwrap_err(), Errno::PERM);
        let request = Box::new(Request::Rejoin);
        assert_eq!(serve.join().unwrap(), Request::For { uid: 7, gid: 8, request });
        std::fs::remove_dir_all(dir).unwrap();
    }
}
