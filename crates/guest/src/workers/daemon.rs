//! Requests to this node's daemon.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use tern_control::{Reply, Request, stream};

/// How long the node's daemon may take to reply. It may have to ask home's daemon.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends a request to this node's daemon.
pub(crate) fn request_daemon(run_dir: &Path, request: &Request) -> io::Result<Reply> {
    let mut daemon = UnixStream::connect(run_dir.join("control"))?;
    daemon.set_read_timeout(Some(DAEMON_TIMEOUT))?;
    daemon.set_write_timeout(Some(DAEMON_TIMEOUT))?;
    stream::write(&mut daemon, request)?;
    stream::read(&mut daemon)
}
