//! What a home shim asks of its node's daemon. Asked from threads of their own: the daemon may take seconds.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use tern_control::{Refusal, RefusalKind, Reply, Request, stream};

/// How long the daemon may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Asks one thing.
///
/// # Errors
/// As a refusal: what the daemon said, or that it cannot be reached.
pub(crate) fn ask(run_dir: &Path, request: &Request) -> Result<Reply, Refusal> {
    let talk = || -> io::Result<Reply> {
        let mut daemon = UnixStream::connect(run_dir.join("control"))?;
        daemon.set_read_timeout(Some(PATIENCE))?;
        stream::write(&mut daemon, request)?;
        stream::read(&mut daemon)
    };
    match talk() {
        Ok(Reply::Refused(refusal)) => Err(refusal),
        Ok(reply) => Ok(reply),
        Err(error) => Err(Refusal::new(RefusalKind::Unavailable, format!("ternd does not answer: {error}"))),
    }
}
