//! The tree of all nodes' files from which guests of this node map large files of their homes: page by page as they look at them, by this node's
//! cache, and not sent whole before they go on (docs/design/direct.md).
//!
//! It is a process of its own, which ternd starts when the first shim asks for it, and which outlives that. Nobody sees the tree but who is
//! given its root at our door: it is mounted in a namespace that no other process is in, and goes with this one.

use crate::client::{self, Options};
use crate::message::Purpose;
use anyhow::{Context, Result};
use nix::sched::CloneFlags;
use rustix::fs::{Mode, OFlags};
use rustix::mount::MountPropagationFlags;
use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::time::Duration;
use tern_control::door::{Door, not_here};
use tern_control::shim::{ShimRequest, homes_door};
use tern_node::Config;

/// Seconds after a guest's shim has given its home up, which ends the guest: until then its pages are waited for.
const LONGER: u64 = 30;

/// Mounts the tree, says that it is there, and serves it.
///
/// # Errors
/// If it cannot be mounted, for which one must be root; or when the kernel has ended it.
pub fn run(config: &Config, ready: impl FnOnce()) -> Result<()> {
    nix::sched::unshare(CloneFlags::CLONE_NEWNS).context("cannot have mounts of its own")?;
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .context("cannot keep mounts to itself")?;
    let at = config.run_dir.join("homes");
    match DirBuilder::new().mode(0o700).create(&at) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| format!("cannot make {}", at.display()));
        }
        _ => {}
    }
    // A guest waits for its home as long as that may be out of reach, and reads nothing wrong meanwhile.
    let patience = Duration::from_secs(u64::from(config.give_up_after) + LONGER);
    let source = "homes".to_owned();
    let options = Options { source, read_only: true, dfsa: false, patience, purpose: Purpose::Guests };
    let session = client::mount(config, &at, &options)?;
    let how = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(&at, how, Mode::empty()).context("cannot open the tree")?;
    let door = homes_door(&config.run_dir);
    let _of_one_before_us = std::fs::remove_file(&door);
    let door = Door::at(door).context("cannot listen")?;
    std::thread::Builder::new().name("door".into()).spawn(move || give(&root, &door)).context("no thread")?;
    ready();
    session.serve()
}

/// Gives the root to whoever asks for it.
fn give(root: &OwnedFd, door: &Door) {
    loop {
        if let Err(error) = door.wait(&[], Duration::from_secs(3600)) {
            tracing::error!(%error, "nobody is given the tree any more");
            return;
        }
        while let Some(caller) = door.next() {
            match caller.request() {
                ShimRequest::Tree => {
                    // Who has gone needs it no more.
                    let _gone = caller.give(root.as_fd());
                }
                _ => caller.answer(&not_here()),
            }
        }
    }
}
