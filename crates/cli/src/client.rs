//! Sends one request to the node's daemon over its control socket.
//!
//! `mosrun` sends a request before each program that it starts, so a request has no handshake: the
//! tool connects, sends one document and reads one. The descriptor is close-on-exec and is closed
//! before the reply is examined.

use crate::Failure;
use rustix::net::SendFlags;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tern_control::{RefusalKind, Reply, Request, stream};

/// The directory of the daemon's sockets: `TERN_RUN_DIR` if set; else, for a user other than root,
/// `$XDG_RUNTIME_DIR/tern` or `~/.local/run/tern` if one of them exists (the user runs a node of
/// their own); otherwise `/run/tern`.
pub(crate) fn run_dir() -> PathBuf {
    if let Some(set) = std::env::var_os("TERN_RUN_DIR") {
        return set.into();
    }
    let below = |variable, name| Some(PathBuf::from(std::env::var_os(variable)?).join(name));
    let users_own = || {
        let dirs = [below("XDG_RUNTIME_DIR", "tern"), below("HOME", ".local/run/tern")];
        dirs.into_iter().flatten().find(|name| name.is_dir())
    };
    let is_root = rustix::process::geteuid().is_root();
    (!is_root).then(users_own).flatten().unwrap_or_else(|| "/run/tern".into())
}

/// Sends a request and waits for the reply without a time limit (the reply to a migration arrives
/// when the process runs on its new node).
///
/// # Errors
/// The daemon's refusal; exit code 5 if the daemon does not run. After any failure other than a
/// refusal it is unknown whether a request that was sent has been carried out.
pub(crate) fn request(request: &Request) -> Result<Reply, Failure> {
    request_at(&run_dir(), request)
}

/// Like [`request`], for the daemon that owns `run_dir`.
///
/// # Errors
/// As [`request`].
pub(crate) fn request_at(run_dir: &Path, request: &Request) -> Result<Reply, Failure> {
    let socket = run_dir.join("control");
    let connection = connect(&socket).map_err(|error| connect_failure(&socket, &error))?;
    match exchange(connection, request) {
        Ok(Reply::Refused(refusal)) => Err(refusal.into()),
        Ok(reply) => Ok(reply),
        Err(error) => Err(Failure::new(
            RefusalKind::Internal,
            format!("ternd closed the connection without a reply: {error}"),
        )
        .hint("journalctl -u ternd, for the reason")),
    }
}

/// Connects on a descriptor above 2, so that standard descriptors which the caller closed stay
/// closed and nothing printed to them can reach the socket.
fn connect(socket: &Path) -> io::Result<UnixStream> {
    let connection = UnixStream::connect(socket)?;
    if connection.as_raw_fd() > 2 {
        return Ok(connection);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&connection, 3)?.into())
}

fn exchange(mut connection: UnixStream, request: &Request) -> io::Result<Reply> {
    stream::write(&mut NoSigpipe(connection.try_clone()?.into()), request)?;
    stream::read(&mut connection)
}

fn connect_failure(socket: &Path, error: &io::Error) -> Failure {
    let at = socket.display();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Failure::new(
            RefusalKind::Unavailable,
            format!("ternd is not running on this node (nothing answers at {at})"),
        )
        .hint("systemctl start ternd; or tern init, if this node is in no cluster yet"),
        io::ErrorKind::PermissionDenied => {
            Failure::new(RefusalKind::NotAllowed, format!("permission denied for {at}"))
                .hint(format!("ls -l {at}, for its owner; TERN_RUN_DIR selects another node's directory"))
        }
        _ => Failure::new(RefusalKind::Unavailable, format!("cannot reach ternd at {at}: {error}")),
    }
}

/// A stream on which a write to a closed peer fails with EPIPE and raises no SIGPIPE. `mosrun` must
/// pass the disposition of SIGPIPE on to the program unchanged.
struct NoSigpipe(OwnedFd);

impl Write for NoSigpipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The failure for a reply that does not belong to the request: ternd has another version.
pub(crate) fn unexpected_reply(reply: &Reply) -> Failure {
    // Only the variant's name: the content may be long.
    let name = format!("{reply:?}");
    let name = name.split([' ', '(', '{']).next().unwrap_or_default();
    Failure::new(RefusalKind::Internal, format!("ternd sent an unexpected reply: {name}"))
        .hint("tern status, to compare the versions of ternd and of this tool")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_daemon_is_reported() {
        let failure = request_at(Path::new("/nonexistent"), &Request::Status).unwrap_err();
        assert_eq!(failure.code, 5);
        assert!(failure.message.starts_with("ternd is not running"), "{}", failure.message);
    }

    #[test]
    fn unexpected_reply_is_named_without_its_content() {
        let failure = unexpected_reply(&Reply::Map("secret".into()));
        assert_eq!(failure.message, "ternd sent an unexpected reply: Map");
    }
}
