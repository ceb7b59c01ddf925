//! What a node's gatekeeper is asked at its socket, by the tools of who owns the node and by ternd. The socket is theirs only.
//!
//! The gatekeeper takes commands of machines that are not in the cluster (docs/design/placing.md).

use crate::stream;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long the gatekeeper may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// What it is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OutsideAsk {
    /// The jobs that run.
    Jobs,
    /// To look at its clients' keys again, and to end the jobs of those that are not good any more.
    Look,
    /// Where it listens.
    Address,
    /// To end, and all jobs with it.
    End,
}

/// What it answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OutsideReply {
    /// To `Jobs`.
    Jobs(Vec<OutsideJob>),
    /// To `Look`: so many were ended.
    Ended(usize),
    /// To `Address`, as ternd.toml has it.
    Address(String),
    /// To `End`.
    Done,
}

/// A job of a machine outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutsideJob {
    /// Its number, of this gatekeeper's life.
    pub job: u64,
    /// Whose key.
    pub client: String,
    /// As which user it runs.
    pub user: String,
    /// The command, shortened.
    pub command: String,
    /// When it came, in seconds since 1970.
    pub since: u64,
    /// The address from which it came.
    pub from: String,
}

/// Where the gatekeeper of a run directory is asked.
#[must_use]
pub fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join("outside.sock")
}

/// Asks the gatekeeper of this run directory.
///
/// # Errors
/// `NotFound` or `ConnectionRefused` if there is none; else those of the socket.
pub fn ask(run_dir: &Path, what: &OutsideAsk) -> io::Result<OutsideReply> {
    let mut connection = UnixStream::connect(socket(run_dir))?;
    connection.set_read_timeout(Some(PATIENCE))?;
    stream::write(&mut connection, what)?;
    stream::read(&mut connection)
}
