//! Mapping large files of a guest's home page by page. They are opened in a FUSE tree of home's
//! files that this node mounts for home's guests (`tern-mfs homes`). So the guest continues at
//! once, and its kernel fetches the pages that are used; other guests of that home share them.
//!
//! Home checks permissions, as for any open through MFS, and the file that is opened is the one
//! that home has mapped. An access to a missing page blocks while home is unreachable. The content
//! of a file that cannot be opened is sent as a whole, as that of smaller files is, but then has no
//! hash and cannot be cached. So after a failure that concerns more than one file, this node
//! reports for a while that it has no remote map.

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, openat2};
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};
use tern_control::Request;
use tern_control::control_socket;
use tern_control::shim::{ShimRequest, remote_map_socket};
use tern_ids::{Credentials, NodeId};
use tern_image::content::OpenFileConnection;
use tern_image::node_file::NodeFile;
use tern_tracee::threads;

/// How long home's server may take to open a file.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the opening may take if the tree may have to be mounted first.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(3);
/// For how long no file is tried after a timeout.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// For how long the node reports that there is no remote map, after a failure.
const FAILURE_TERM: Duration = Duration::from_secs(600);

/// Whether the node with this run directory can map files of a home, as far as is known. Only root
/// can mount the tree, and assume the identity that opens a file.
pub(crate) fn is_available(run_dir: &Path, home: NodeId) -> bool {
    let has_fuse = || rustix::fs::access("/dev/fuse", rustix::fs::Access::WRITE_OK).is_ok();
    let failed = || failure_mark(run_dir, home).metadata().and_then(|is| is.modified());
    let has_failed_recently =
        || failed().is_ok_and(|when| when.elapsed().is_ok_and(|since| since < FAILURE_TERM));
    geteuid().is_root() && has_fuse() && !has_failed_recently()
}

/// The file whose modification time is that of the last failure.
fn failure_mark(run_dir: &Path, home: NodeId) -> PathBuf {
    run_dir.join(format!("home{home}.failed"))
}

/// Access to the files of one home. The tree is mounted when it is first needed.
#[derive(Debug)]
pub(crate) struct RemoteMap {
    run_dir: Arc<Path>,
    state: Mutex<TreeState>,
}

#[derive(Debug, Default)]
struct TreeState {
    tree: Option<Arc<MountedTree>>,
    /// The time of the last timeout.
    timed_out_at: Option<Instant>,
}

/// The root of the tree, and the connection to its server, which keeps the tree mounted.
#[derive(Debug)]
struct MountedTree {
    root: OwnedFd,
    server: UnixStream,
}

impl RemoteMap {
    /// For the node with this run directory.
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { run_dir: run_dir.into(), state: Mutex::default() }
    }

    /// Opens a file of home for reading, with the credentials that home names. Returns it with the
    /// connection to its server, which closes when the server ends. For a worker.
    pub(crate) fn open(&self, location: &NodeFile) -> io::Result<(OwnedFd, OpenFileConnection)> {
        if self.state().timed_out_at.is_some_and(|timed_out_at| timed_out_at.elapsed() < RETRY_INTERVAL) {
            return Err(ErrorKind::TimedOut.into());
        }
        let opened = self.try_to_open(location);
        if let Err(error) = &opened {
            if error.kind() == ErrorKind::TimedOut {
                self.state().timed_out_at = Some(Instant::now());
            }
            // An error about this file alone does not concern others.
            let of_the_file = [ErrorKind::PermissionDenied, ErrorKind::NotFound, ErrorKind::InvalidInput];
            if !of_the_file.contains(&error.kind()) {
                // If this fails, each shim detects the problem by itself.
                let _unwritable = File::create(failure_mark(&self.run_dir, location.node));
            }
        }
        opened
    }

    fn state(&self) -> MutexGuard<'_, TreeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_to_open(&self, location: &NodeFile) -> io::Result<(OwnedFd, OpenFileConnection)> {
        let (run_dir, connected, location) =
            (self.run_dir.clone(), self.state().tree.clone(), location.clone());
        let connected = connected.filter(|tree| !control_socket::is_closed(&tree.server));
        let timeout = if connected.is_some() { OPEN_TIMEOUT } else { MOUNT_TIMEOUT };
        let (sender, receiver) = mpsc::sync_channel(1);
        // In a thread, which changes its credentials for good and may be left blocked.
        let work = move || {
            let tree =
                connected.map_or_else(|| MountedTree::connect(&run_dir, location.node).map(Arc::new), Ok);
            let opened = tree.and_then(|tree| Ok((open_as(&tree.root, &location)?, tree)));
            let _timed_out = sender.send(opened);
        };
        threads::spawn("homes", 256 << 10, work)?;
        let (file, tree) = receiver.recv_timeout(timeout).map_err(|_late| ErrorKind::TimedOut)??;
        let server = tree.server.try_clone()?;
        self.state().tree = Some(tree);
        Ok((file, OpenFileConnection::Tree(server)))
    }
}

impl MountedTree {
    /// Connects to the tree, and has it mounted if it does not exist.
    fn connect(run_dir: &Path, home: NodeId) -> io::Result<Self> {
        let request = || {
            control_socket::request_fd(&remote_map_socket(run_dir, home), &ShimRequest::MapRoot, OPEN_TIMEOUT)
        };
        let (root, server) = match request() {
            // It does not exist, or is just being unmounted.
            Err(error) if !matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
                crate::workers::daemon::request_daemon(run_dir, &Request::StartRemoteMaps { home })?;
                request()
            }
            result => result,
        }?;
        Ok(Self { root, server })
    }
}

/// Sets this thread's credentials to those that home names, and opens the file.
fn open_as(root: &OwnedFd, location: &NodeFile) -> io::Result<OwnedFd> {
    let Credentials { uid, gid, groups } = &location.credentials;
    let is_valid = groups.iter().chain([uid, gid]).all(|number| *number != u32::MAX);
    // The path must stay within that node's part of the tree.
    if !is_valid || location.path.split(|byte| *byte == b'/').any(|name| name == b"..") {
        return Err(ErrorKind::InvalidInput.into());
    }
    let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
    set_thread_groups(&groups)?;
    set_thread_res_gid(None, Some(Gid::from_raw(*gid)), None)?;
    set_thread_res_uid(None, Some(Uid::from_raw(*uid)), None)?;
    let path = [location.node.to_string().as_bytes(), b"/", &location.path].concat();
    let how = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let file = openat2(root, path, how, Mode::empty(), resolve)?;
    let is = fstat(&file)?;
    if is.st_ino != location.number || FileType::from_raw_mode(is.st_mode) != FileType::RegularFile {
        return Err(ErrorKind::NotFound.into());
    }
    Ok(file)
}
