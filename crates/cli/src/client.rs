//! One request to the node's daemon, over its control socket.
//!
//! `mosrun` stands between a user and each of his programs, so this is one connect, one write and one read,
//! and leaves nothing behind: the descriptor is close-on-exec and closed before the answer is looked at.

use crate::Failure;
use rustix::net::SendFlags;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tern_control::{RefusalKind, Reply, Request, stream};

/// Where the node's daemon keeps its sockets: `TERN_RUN_DIR`; else for a plain user with a node of his own
/// where that puts them (`$XDG_RUNTIME_DIR/tern` or `~/.local/run/tern`); else `/run/tern`.
pub fn run_dir() -> PathBuf {
    if let Some(set) = std::env::var_os("TERN_RUN_DIR") {
        return set.into();
    }
    let below = |variable, place| Some(PathBuf::from(std::env::var_os(variable)?).join(place));
    let own = || {
        let places = [below("XDG_RUNTIME_DIR", "tern"), below("HOME", ".local/run/tern")];
        places.into_iter().flatten().find(|place| place.is_dir())
    };
    let root = rustix::process::geteuid().is_root();
    (!root).then(own).flatten().unwrap_or_else(|| "/run/tern".into())
}

/// Asks, and waits for the answer however long it takes (a migration's comes when the process runs there).
///
/// # Errors
/// A refusal, as it was given; exit code 5 if the daemon does not run. Unless the daemon refused, nothing
/// can be said about whether the request was carried out once it had been sent.
pub fn ask(request: &Request) -> Result<Reply, Failure> {
    ask_at(&run_dir(), request)
}

/// The same of the daemon that owns this run directory.
///
/// # Errors
/// As `ask`.
pub fn ask_at(run_dir: &Path, request: &Request) -> Result<Reply, Failure> {
    let socket = run_dir.join("control");
    let connection = connect(&socket).map_err(|error| unreachable(&socket, &error))?;
    match converse(connection, request) {
        Ok(Reply::Refused(refusal)) => Err(refusal.into()),
        Ok(reply) => Ok(reply),
        Err(error) => Err(Failure::new(
            RefusalKind::Internal,
            format!("ternd ended the conversation without an answer: {error}"),
        )
        .hint("journalctl -u ternd")),
    }
}

/// Connects on a descriptor above 2: a program whose standard descriptors are closed keeps them closed, and
/// nothing that we print must end up in the socket.
fn connect(socket: &Path) -> io::Result<UnixStream> {
    let connection = UnixStream::connect(socket)?;
    if connection.as_raw_fd() > 2 {
        return Ok(connection);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&connection, 3)?.into())
}

fn converse(mut connection: UnixStream, request: &Request) -> io::Result<Reply> {
    stream::write(&mut Quiet(connection.try_clone()?.into()), request)?;
    stream::read(&mut connection)
}

fn unreachable(socket: &Path, error: &io::Error) -> Failure {
    let at = socket.display();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Failure::new(
            RefusalKind::Unavailable,
            format!("ternd is not running on this node (nothing answers at {at})"),
        )
        .hint("systemctl start ternd; or tern init, if this node is in no cluster yet"),
        io::ErrorKind::PermissionDenied => {
            Failure::new(RefusalKind::NotAllowed, format!("{at} is not yours to use"))
                .hint("ls -l on it shows who may; TERN_RUN_DIR names another node's directory")
        }
        _ => Failure::new(RefusalKind::Unavailable, format!("cannot reach ternd at {at}: {error}")),
    }
}

/// A stream that answers a vanished peer with EPIPE, whatever the caller made of SIGPIPE, which `mosrun`
/// must pass on to the program as it found it.
struct Quiet(OwnedFd);

impl Write for Quiet {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The answer was of another kind than the question: ternd is of another version.
pub fn unexpected(reply: &Reply) -> Failure {
    // Only the variant's name; the content may be long.
    let name = format!("{reply:?}");
    let name = name.split([' ', '(', '{']).next().unwrap_or_default();
    Failure::new(RefusalKind::Internal, format!("ternd answered with {name}, which was not the question"))
        .hint("tern status, to compare the versions of ternd and of this tool")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_daemon_is_said_plainly() {
        let failure = ask_at(Path::new("/nonexistent"), &Request::Status).unwrap_err();
        assert_eq!(failure.code, 5);
        assert!(failure.message.starts_with("ternd is not running"), "{}", failure.message);
    }

    #[test]
    fn other_answers_are_named_without_their_content() {
        let failure = unexpected(&Reply::Map("secret".into()));
        assert_eq!(failure.message, "ternd answered with Map, which was not the question");
    }
}
