//! Files of the guest's own node. The guest gets descriptors of them, and this node's kernel makes
//! the calls on them.
//!
//! Home has such a file open through MFS, and reports that when it delegates the file
//! ([`FileNotice::LocalFile`](tern_migrate::message::FileNotice)). When the guest first reads or
//! writes it, this node's file server opens it with the credentials that home names, and verifies
//! that it is the file that home has open. The guest gets a descriptor for it, with the number that
//! the program uses, and calls on it are let through. The descriptor of a trapped call cannot
//! change meanwhile: it is in a register, and the process has one thread.
//!
//! With the fast path ([`crate::fastpath`]) frequent calls on it do not even trap.
//!
//! A call that was let through is over when the program makes its next one or is stopped; until
//! then the file offset is not known. So a process that is to depart during such a call is stopped
//! for a moment first.
//!
//! **A shared file** ([`FileNotice::Shared`](tern_migrate::message::FileNotice)) is on a file
//! system that both nodes mount. This node's file server opens it in the same way, but only for
//! reading, and only if this node also declares the directory of that file system as shared. This
//! kernel's view of it may be stale, as read-ahead may be. So it is read here only for a second
//! after home has reported that it is unchanged, and only until the next result or signal. Then
//! home is asked again.
//!
//! Files of the guest's own node need no read-ahead and no write-behind, and are never stale. The
//! offset of a local file is kept by this node's kernel, and is sent home in the prelude of each
//! call, like the offsets of other delegated files. After its delegation has ended, its descriptor
//! stays open in the guest, but calls on it are no longer let through. Before the guest's next call
//! is sent home, /dev/null replaces the descriptor, so that no child can inherit the file.

use crate::files::remote_map::RemoteMap;
use rustix::fs::{OFlags, SeekFrom, StatVfsMountFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tern_control::control_socket;
use tern_control::shim::ShimRequest;
use tern_ids::NodeId;
use tern_image::FileRef;
use tern_image::content::{OpenFileConnection, OpenedFile};
use tern_image::node_file::NodeFile;
use tern_migrate::message::{FileDelegation, SharedFileRef};

/// How long this node's server may take to open a file. Only the program that uses the file waits.
const OPEN_TIMEOUT: Duration = Duration::from_secs(1);

/// The node of a shim's guests, and the control socket of its file server.
#[derive(Debug, Clone)]
pub(crate) struct LocalNode {
    node: NodeId,
    socket: Arc<Path>,
    /// The directories that it declares to be shared with other nodes.
    shared: Arc<[PathBuf]>,
    remote_map: Arc<RemoteMap>,
}

impl LocalNode {
    /// For a shim on this node with this run directory.
    #[must_use]
    pub(crate) fn new(node: NodeId, run_dir: &Path, shared: &[PathBuf]) -> Self {
        let remote_map = Arc::new(RemoteMap::new(run_dir));
        Self {
            node,
            socket: PathBuf::from(run_dir).join("mfs.sock").into(),
            shared: shared.into(),
            remote_map,
        }
    }

    /// Opens mapped files whose content need not be sent: those of this node, and those of home by
    /// the remote map. Leaves out those that cannot be opened. Must be called by a worker, because
    /// it may wait for each of the two servers until one request has timed out.
    pub(crate) fn open_mapped_files(&self, home: NodeId, files: &[FileRef]) -> Vec<OpenedFile> {
        let mut is_slow = false;
        let mut open = |file: &FileRef| {
            let location = file.location.as_deref()?;
            let opened = match location.node {
                node if node == home => self.remote_map.open(location),
                node if node == self.node && !is_slow => self.open_mapped_file(location),
                _ => return None,
            };
            match opened {
                Ok((fd, connection)) => Some(OpenedFile { hash: file.hash, fd, connection }),
                Err(error) => {
                    tracing::info!(%error, "a file cannot be opened here; home sends its content");
                    is_slow |= location.node == self.node
                        && matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock);
                    None
                }
            }
        };
        files.iter().filter_map(&mut open).collect()
    }

    /// Opens a file of this node.
    fn open_mapped_file(&self, location: &NodeFile) -> io::Result<(OwnedFd, OpenFileConnection)> {
        let request = request_to_open(location, OFlags::RDONLY);
        let (file, server) = control_socket::request_fd(&self.socket, &request, OPEN_TIMEOUT)?;
        // Home may allow execution where this mount does not.
        if rustix::fs::fstatvfs(&file)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok((file, OpenFileConnection::Server(server)))
    }
}

/// A delegated file that is local to this node.
#[derive(Debug)]
pub(crate) enum LocalFile {
    /// A file of this node that can be opened.
    Offered(Box<NodeFile>, Arc<Path>),
    /// A file on a shared file system that can be opened here.
    Shared(Box<SharedFileRef>, Arc<Path>),
    /// The guest has it open. For a file of this node, the file server keeps its state until the
    /// socket closes; a shared file has no socket.
    Open(OwnedFd, Option<UnixStream>),
}

impl LocalFile {
    /// The file at this location, if that is on this node.
    pub(crate) fn offered(location: &NodeFile, local_node: &LocalNode) -> Option<Self> {
        (location.node == local_node.node)
            .then(|| Self::Offered(Box::new(location.clone()), Arc::clone(&local_node.socket)))
    }

    /// The shared file at this location, if this node shares it.
    pub(crate) fn shared(location: &SharedFileRef, local_node: &LocalNode) -> Option<Self> {
        let is_ours = local_node.shared.iter().any(|root| root.as_os_str().as_bytes() == &**location.root);
        is_ours.then(|| Self::Shared(Box::new(location.clone()), Arc::clone(&local_node.socket)))
    }

    /// Whether it is on a shared file system.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self, Self::Shared(..) | Self::Open(_, None))
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::Open(..))
    }

    /// The guest's file offset.
    pub(crate) fn offset(&self) -> Option<u64> {
        match self {
            Self::Open(file, _) => rustix::fs::tell(file).ok(),
            Self::Offered(..) | Self::Shared(..) => None,
        }
    }

    pub(crate) fn seek(&self, to: u64) {
        if let Self::Open(file, _) = self {
            // Home's kernel has used this offset.
            let _same_file = rustix::fs::seek(file, SeekFrom::Start(to));
        }
    }

    /// Whether the server has dropped its state, as when it was killed.
    pub(crate) fn has_lost_server(&self) -> bool {
        let Self::Open(_, Some(server)) = self else { return false };
        control_socket::is_closed(server)
    }

    /// The request that opens it; none if it is open.
    pub(crate) fn open_request(&self, delegation: FileDelegation) -> Option<OpenRequest> {
        let flags = match (delegation.can_read, delegation.can_write) {
            (_, false) => OFlags::RDONLY,
            (false, true) => OFlags::WRONLY,
            (true, true) => OFlags::RDWR,
        };
        let (socket, request) = match self {
            Self::Offered(location, socket) => (socket, request_to_open(location, flags)),
            Self::Shared(location, socket) => {
                let SharedFileRef { root, path, file, credentials } = &**location;
                let (root, path, file, credentials) =
                    (root.to_vec(), path.to_vec(), file.clone(), credentials.clone());
                (socket, ShimRequest::OpenShared { root, path, file, credentials })
            }
            Self::Open(..) => return None,
        };
        Some(OpenRequest { socket: Arc::clone(socket), request, keeps_server: !self.is_shared() })
    }
}

/// A file that this node's server is to open.
#[derive(Debug)]
pub(crate) struct OpenRequest {
    socket: Arc<Path>,
    request: ShimRequest,
    /// Whether the server has state for the file as long as its socket is open.
    keeps_server: bool,
}

impl OpenRequest {
    /// Has the server open it, which may take [`OPEN_TIMEOUT`]. For a worker.
    ///
    /// # Errors
    /// As [`control_socket::request_fd`].
    pub(crate) fn open(self) -> io::Result<LocalFile> {
        let (file, server) = control_socket::request_fd(&self.socket, &self.request, OPEN_TIMEOUT)?;
        Ok(LocalFile::Open(file, self.keeps_server.then_some(server)))
    }
}

/// The opening of a local file that a thread waits for, in a trap in `Process::queued_traps`.
#[derive(Debug)]
pub(crate) struct Opening {
    fd: i32,
    /// The number of this opening. A worker may still open the file of an earlier one.
    pub(crate) number: u64,
    progress: OpenProgress,
}

#[derive(Debug)]
enum OpenProgress {
    Wanted(OpenRequest),
    Started,
    Done(io::Result<LocalFile>),
}

impl Opening {
    /// The opening of a file that the guest has under this descriptor, not begun yet.
    pub(crate) fn new(fd: i32, number: u64, request: OpenRequest) -> Self {
        Self { fd, number, progress: OpenProgress::Wanted(request) }
    }

    /// Whether it is over, and was for this descriptor.
    pub(crate) fn is_done_for(&self, fd: i32) -> bool {
        self.fd == fd && !self.is_waiting()
    }

    /// Whether it is not over yet.
    pub(crate) fn is_waiting(&self) -> bool {
        !matches!(self.progress, OpenProgress::Done(_))
    }

    /// Returns the request for a worker when called for the first time.
    pub(crate) fn start(&mut self) -> Option<OpenRequest> {
        match std::mem::replace(&mut self.progress, OpenProgress::Started) {
            OpenProgress::Wanted(request) => Some(request),
            progress => {
                self.progress = progress;
                None
            }
        }
    }

    pub(crate) fn finish(&mut self, result: io::Result<LocalFile>) {
        self.progress = OpenProgress::Done(result);
    }

    pub(crate) fn into_result(self) -> io::Result<LocalFile> {
        match self.progress {
            OpenProgress::Done(result) => result,
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

fn request_to_open(location: &NodeFile, flags: OFlags) -> ShimRequest {
    let (path, number, credentials) = (location.path.clone(), location.number, location.credentials.clone());
    ShimRequest::OpenFile { path, number, credentials, flags: flags.bits() }
}
