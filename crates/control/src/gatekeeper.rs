//! Requests to a node's gatekeeper, from the tools of the node's owner and from ternd. Only the
//! owner can open its socket.
//!
//! The gatekeeper accepts commands from machines that are not in the cluster
//! (docs/design/placing.md).

use crate::stream;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time limit for the gatekeeper's reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// A request to the gatekeeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GatekeeperRequest {
    /// List the running jobs.
    Jobs,
    /// Read the clients' keys again, and end the jobs of clients whose key is not valid any more.
    #[serde(rename = "Look")]
    CheckKeys,
    /// The address that the gatekeeper listens on.
    Address,
    /// Exit, and end all jobs.
    End,
}

/// The gatekeeper's reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GatekeeperReply {
    /// To `Jobs`.
    Jobs(Vec<GatekeeperJob>),
    /// To `CheckKeys`: the number of jobs that were ended.
    Ended(usize),
    /// To `Address`: the address as written in ternd.toml.
    Address(String),
    /// To `End`.
    Done,
}

/// A job of an outside machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatekeeperJob {
    /// Its number, unique until the gatekeeper restarts.
    pub job: u64,
    /// The name of the client's key.
    pub client: String,
    /// The local user that it runs as.
    pub user: String,
    /// The beginning of its command line.
    pub command: String,
    /// When it was submitted, in seconds since 1970.
    pub since: u64,
    /// The client's address.
    pub from: String,
}

/// The gatekeeper's socket in a run directory.
#[must_use]
pub fn socket_path(run_dir: &Path) -> PathBuf {
    run_dir.join("outside.sock")
}

/// Sends a request to the gatekeeper of this run directory.
///
/// # Errors
/// `NotFound` or `ConnectionRefused` if no gatekeeper runs; else those of the socket.
pub fn call(run_dir: &Path, request: &GatekeeperRequest) -> io::Result<GatekeeperReply> {
    let mut connection = UnixStream::connect(socket_path(run_dir))?;
    connection.set_read_timeout(Some(REPLY_TIMEOUT))?;
    stream::write(&mut connection, request)?;
    stream::read(&mut connection)
}
