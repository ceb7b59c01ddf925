//! The tree from which guests on this node map large files of their home
//! (docs/design/delegation.md). A file is not transferred whole first: a page is fetched when it is
//! touched, and this node's kernel caches it.
//!
//! There is one process for each home, so that an unresponsive home delays only its own guests.
//! ternd starts the process when the first shim asks for it. The process outlives ternd, and exits
//! when no shim has used it for a while. The tree is not mounted anywhere: only a process that
//! receives its root directory over the control socket can access it.

use crate::client::{self, MountOptions};
use crate::message::Purpose;
use anyhow::{Context, Result};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tern_control::control_socket::{self, ControlSocket, not_held};
use tern_control::shim::{ShimRequest, remote_map_socket};
use tern_ids::NodeId;
use tern_node::Config;

/// How many seconds longer a page fault waits for the home than the guest's shim does. When the
/// shim's wait times out, the shim ends the guest; no page fault must fail before that.
const PAGE_WAIT_MARGIN: u64 = 10;

/// How long an unused tree is kept.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(600);

/// Creates the tree for guests of this home, calls `ready`, and serves the tree.
///
/// # Errors
/// If the tree cannot be created (this needs root), or when the kernel has ended the session.
pub fn run(config: &Config, home: NodeId, ready: impl FnOnce()) -> Result<()> {
    // A guest waits for an unreachable home, and its page faults must wait at least as long.
    let timeout = Duration::from_secs(u64::from(config.give_up_after) + PAGE_WAIT_MARGIN);
    let source = format!("home{home}");
    let options = MountOptions { source, read_only: true, dfsa: false, timeout, purpose: Purpose::Guests };
    let (session, root) = client::mount_detached(config, &options)?;
    let control = remote_map_socket(&config.run_dir, home);
    let _stale = std::fs::remove_file(&control);
    let control = ControlSocket::bind(control).context("cannot listen")?;
    std::thread::Builder::new()
        .name("door".into())
        .spawn(move || serve_root(&root, control))
        .context("cannot start a thread")?;
    ready();
    session.serve()
}

/// Passes the root directory to each shim that asks, and exits when the tree was unused for
/// [`UNUSED_TIMEOUT`].
fn serve_root(root: &OwnedFd, control: ControlSocket) {
    let (mut shims, mut last_used): (Vec<UnixStream>, _) = (Vec::new(), Instant::now());
    while last_used.elapsed() < UNUSED_TIMEOUT {
        if let Err(error) = control.wait(&[], UNUSED_TIMEOUT / 10) {
            tracing::error!(%error, "the control socket has failed; no shim can get the tree any more");
            return;
        }
        while let Some(caller) = control.accept() {
            match caller.request() {
                // The reply fails if the shim has exited; then it needs the tree no more.
                ShimRequest::MapRoot => shims.extend(caller.reply_with_fd(root.as_fd())),
                _ => caller.reply(&not_held()),
            }
        }
        // A shim keeps its end of the socket open as long as it has guests.
        shims.retain(|shim| !control_socket::is_closed(shim));
        if !shims.is_empty() {
            last_used = Instant::now();
        }
    }
    // This removes the socket, so ternd starts another process for the next shim.
    drop(control);
    std::process::exit(0);
}
