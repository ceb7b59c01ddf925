//! Files of shared file systems that are opened for guests of this node (docs/design/delegation.md,
//! "Files that nodes share"). They are not exported: no session has them open, and there are no
//! leases of them.

use super::Server;
use super::guest_files::refusal;
use super::impersonate::Impersonation;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tern_control::control_socket;
use tern_control::shared::SharedDir;
use tern_control::shim::ShimRequest;

impl Server {
    /// Sends a guest such a file. Runs in a thread of its own, since the file system's server may
    /// take long.
    pub(super) fn serve_shared(&self, caller: control_socket::PendingRequest) {
        match self.open_shared(caller.request()) {
            // The descriptor is the guest's from now on.
            Ok(file) => drop(caller.reply_with_fd(file.as_fd())),
            Err(error) => caller.reply(&refusal(&error.to_string())),
        }
    }

    fn open_shared(&self, request: &ShimRequest) -> io::Result<OwnedFd> {
        let ShimRequest::OpenShared { root, path, file, credentials } = request else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let [root, path] = [root, path].map(|bytes| Path::new(OsStr::from_bytes(bytes)));
        if !self.config.file.shared.iter().flatten().any(|declared| declared == root) {
            return Err(io::Error::other("this node does not declare that directory as shared"));
        }
        let mut impersonation = Impersonation::new();
        impersonation.assume(&self.map_credentials(credentials.clone()))?;
        let root = SharedDir::open(root)?;
        if root.is_nocto {
            return Err(io::Error::other(
                "it is mounted with nocto, so that an open does not see what others have written",
            ));
        }
        root.open_file(path, file)
    }
}
