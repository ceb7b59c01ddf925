//! The tree of files from which guests of this node map large files of their home: page by page as they look at them, by this node's cache, and not
//! sent whole before they go on (docs/design/direct.md).
//!
//! For each home it is a process of its own, so that one that does not answer holds up nobody else's guests. ternd starts it when the first shim asks for
//! it; it outlives ternd, and ends when no shim has had it for a while. Nobody sees the tree but who is given its root at our door: it is mounted nowhere.

use crate::client::{self, Options};
use crate::message::Purpose;
use anyhow::{Context, Result};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tern_control::door::{self, Door, not_here};
use tern_control::shim::{ShimRequest, homes_door};
use tern_ids::NodeId;
use tern_node::Config;

/// Seconds after a guest's shim has given its home up, which ends the guest: until then its pages are waited for.
const LONGER: u64 = 10;

/// How long a tree is kept that nobody has.
const UNUSED: Duration = Duration::from_secs(600);

/// Makes the tree for guests of this home, says that it is there, and serves it.
///
/// # Errors
/// If it cannot be made, for which one must be root; or when the kernel has ended it.
pub fn run(config: &Config, home: NodeId, ready: impl FnOnce()) -> Result<()> {
    // A guest waits for its home as long as that may be out of reach, and reads nothing wrong meanwhile.
    let patience = Duration::from_secs(u64::from(config.give_up_after) + LONGER);
    let source = format!("home{home}");
    let options = Options { source, read_only: true, dfsa: false, patience, purpose: Purpose::Guests };
    let (session, root) = client::detached(config, &options)?;
    let door = homes_door(&config.run_dir, home);
    let _of_one_before_us = std::fs::remove_file(&door);
    let door = Door::at(door).context("cannot listen")?;
    std::thread::Builder::new().name("door".into()).spawn(move || give(&root, door)).context("no thread")?;
    ready();
    session.serve()
}

/// Gives the root to whoever asks for it, and ends this process when nobody has had it for long.
fn give(root: &OwnedFd, at: Door) {
    let (mut shims, mut used): (Vec<UnixStream>, _) = (Vec::new(), Instant::now());
    while used.elapsed() < UNUSED {
        if let Err(error) = at.wait(&[], UNUSED / 10) {
            tracing::error!(%error, "nobody is given the tree any more");
            return;
        }
        while let Some(caller) = at.next() {
            match caller.request() {
                // Who has gone needs it no more.
                ShimRequest::Tree => shims.extend(caller.give(root.as_fd())),
                _ => caller.answer(&not_here()),
            }
        }
        // A shim keeps its end as long as it has guests.
        shims.retain(|shim| !door::has_closed(shim));
        if !shims.is_empty() {
            used = Instant::now();
        }
    }
    // Whoever comes now finds no door, and has another one begin.
    drop(at);
    std::process::exit(0);
}
