//! Files that report readiness, of a file system that the shim has from this node's tern-net.

use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tern_control::control_socket;
use tern_control::shim::{ShimRequest, net_socket};
use tern_readiness::{ReadinessFile, ReadinessFiles};

/// How long tern-net may take to create the file system.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The file system, once it is needed. Its lock is held by workers only, for at most [`TIMEOUT`].
#[derive(Debug, Default)]
pub(super) struct ReadinessSource(Mutex<Option<ReadinessFiles>>);

impl ReadinessSource {
    /// Opens so many files, which are not ready. For a worker.
    ///
    /// # Errors
    /// If there is no tern-net, or there are too many open files.
    pub(super) fn open(&self, count: usize, run_dir: &Path) -> io::Result<Vec<ReadinessFile>> {
        let mut source = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if source.is_none() {
            *source = Some(create(run_dir)?);
        }
        let files = source.as_ref().ok_or(io::ErrorKind::NotFound)?;
        (0..count).map(|_| files.open(0)).collect()
    }
}

fn create(run_dir: &Path) -> io::Result<ReadinessFiles> {
    let request = ShimRequest::CreateReadinessFiles;
    let (device, stream) = control_socket::request_fd(&net_socket(run_dir), &request, TIMEOUT)?;
    ReadinessFiles::serve(device, control_socket::receive_fd(&stream)?)
}
