//! Files of file systems that the nodes share, opened for guests of this node (docs/design/direct.md, "Files that nodes share"). They are not
//! ours: no session has them open, and what nodes believe of our files has nothing to do with them.

use super::Serving;
use super::acting::Acting;
use super::near::refusal;
use crate::message::Caller;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tern_control::door;
use tern_control::shared::Root;
use tern_control::shim::ShimRequest;

impl Serving {
    /// Gives a guest such a file. However long its server takes: this is a thread of its own.
    pub(super) fn serve_shared(&self, caller: door::Caller) {
        match self.open_shared(caller.request()) {
            // From now on it is the guest's alone.
            Ok(file) => drop(caller.give(file.as_fd())),
            Err(error) => caller.answer(&refusal(&error.to_string())),
        }
    }

    fn open_shared(&self, request: &ShimRequest) -> io::Result<OwnedFd> {
        let ShimRequest::OpenShared { root, path, file, who } = request else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let [root, path] = [root, path].map(|bytes| Path::new(OsStr::from_bytes(bytes)));
        if !self.config.file.shared.iter().flatten().any(|declared| declared == root) {
            return Err(io::Error::other("this node does not declare that directory as shared"));
        }
        let (uid, gid, groups) = who.clone();
        let mut acting = Acting::new();
        acting.for_caller(&self.as_here(Caller { uid, gid, groups }))?;
        let root = Root::open(root)?;
        if root.loose {
            return Err(io::Error::other(
                "it is mounted with nocto, so that an open does not see what others have written",
            ));
        }
        root.open_file(path, file)
    }
}
