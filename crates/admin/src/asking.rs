//! Asking ternd for somebody.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tern_control::{Refusal, RefusalKind, Reply, Request, stream};

/// How long ternd may take to answer what it knows.
pub(crate) const SOON: Duration = Duration::from_secs(3);

/// Who asks: who has opened the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asker {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// This node's ternd.
#[derive(Debug)]
pub(crate) struct Ternd {
    socket: PathBuf,
}

impl Ternd {
    pub(crate) fn of(run_dir: &Path) -> Self {
        Self { socket: run_dir.join("control") }
    }

    /// Asks what everybody may know.
    ///
    /// # Errors
    /// `ENOTCONN` if there is no ternd; else as [`errno`] has it.
    pub(crate) fn ask(&self, request: &Request) -> Result<Reply, Errno> {
        self.send(request)?.answer()
    }

    /// Asks for a user, with his rights and no more: ternd believes root who he is.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub(crate) fn ask_for(&self, who: Asker, request: Request) -> Result<Reply, Errno> {
        self.send_for(who, request)?.answer()
    }

    /// Has it begun for a user.
    ///
    /// # Errors
    /// `ENOTCONN` if there is no ternd.
    pub(crate) fn send_for(&self, who: Asker, request: Request) -> Result<Asked, Errno> {
        self.send(&Request::For { uid: who.uid, gid: who.gid, request: Box::new(request) })
    }

    fn send(&self, request: &Request) -> Result<Asked, Errno> {
        let send = || {
            // Without waiting: of a ternd that hangs the queue may be full.
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            connect(&socket, &SocketAddrUnix::new(&self.socket)?)?;
            let mut socket = UnixStream::from(socket);
            socket.set_nonblocking(false)?;
            socket.set_write_timeout(Some(SOON))?;
            socket.set_read_timeout(Some(SOON))?;
            stream::write(&mut socket, request)?;
            io::Result::Ok(socket)
        };
        send().map(Asked).map_err(|error| lost(&error))
    }
}

/// A request that ternd has.
#[derive(Debug)]
pub(crate) struct Asked(UnixStream);

impl Asked {
    /// Whether the answer comes within this time; an interruption is no answer.
    pub(crate) fn comes_within(&self, time: Duration) -> bool {
        let time = Timespec::try_from(time).unwrap_or_default();
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&time)).is_ok_and(|ready| ready > 0)
    }

    /// The answer, which comes soon.
    ///
    /// # Errors
    /// As [`errno`] has it.
    pub(crate) fn answer(mut self) -> Result<Reply, Errno> {
        match stream::read(&mut self.0) {
            Ok(Reply::Refused(refusal)) => {
                tracing::info!(?refusal, "refused");
                Err(errno(&refusal))
            }
            Ok(reply) => Ok(reply),
            Err(error) => Err(lost(&error)),
        }
    }
}

/// What a refusal is to somebody who reads and writes files.
fn errno(refusal: &Refusal) -> Errno {
    match refusal.kind {
        RefusalKind::NotFound => Errno::NXIO,
        RefusalKind::NotAllowed => Errno::PERM,
        RefusalKind::CannotMove | RefusalKind::Unsupported => Errno::OPNOTSUPP,
        RefusalKind::Unavailable => Errno::AGAIN,
        RefusalKind::BadRequest => Errno::INVAL,
        RefusalKind::Internal => Errno::IO,
    }
}

fn lost(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::NotFound
        | io::ErrorKind::ConnectionRefused
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::UnexpectedEof => Errno::NOTCONN,
        // The queue, or the time, is full.
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
    fn without_ternd_the_answer_comes_at_once() {
        let begun = Instant::now();
        let ternd = Ternd::of(Path::new("/nonexistent"));
        assert_eq!(ternd.ask(&Request::Cluster).unwrap_err(), Errno::NOTCONN);
        assert!(begun.elapsed() < SOON);
    }

    #[test]
    fn who_asks_is_named_and_a_refusal_is_an_error() {
        let dir = std::env::temp_dir().join(format!("tern-asking-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let listener = UnixListener::bind(dir.join("control")).unwrap();
        let serve = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let asked: Request = stream::read(&mut socket).unwrap();
            let refusal = Refusal::new(RefusalKind::NotAllowed, "no");
            stream::write(&mut socket, &Reply::Refused(refusal)).unwrap();
            asked
        });
        let who = Asker { uid: 7, gid: 8 };
        assert_eq!(Ternd::of(&dir).ask_for(who, Request::Rejoin).unwrap_err(), Errno::PERM);
        let request = Box::new(Request::Rejoin);
        assert_eq!(serve.join().unwrap(), Request::For { uid: 7, gid: 8, request });
        std::fs::remove_dir_all(dir).unwrap();
    }
}
