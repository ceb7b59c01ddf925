//! Requests to ternd. They are sent from helper threads, since ternd may take seconds.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use tern_control::{Refusal, RefusalKind, Reply, Request, stream};

/// How long ternd may take to answer.
const TERND_TIMEOUT: Duration = Duration::from_secs(20);

/// Sends one request and waits for the reply.
///
/// # Errors
/// ternd's refusal, or one that says that ternd cannot be reached.
pub(crate) fn request(run_dir: &Path, message: &Request) -> Result<Reply, Refusal> {
    let exchange = || -> io::Result<Reply> {
        let mut daemon = UnixStream::connect(run_dir.join("control"))?;
        daemon.set_read_timeout(Some(TERND_TIMEOUT))?;
        stream::write(&mut daemon, message)?;
        stream::read(&mut daemon)
    };
    match exchange() {
        Ok(Reply::Refused(refusal)) => Err(refusal),
        Ok(reply) => Ok(reply),
        Err(error) => Err(Refusal::new(RefusalKind::Unavailable, format!("ternd does not answer: {error}"))),
    }
}
