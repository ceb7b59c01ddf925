//! The daemon as a whole: what it takes hold of when it starts, and the threads that it then is.

use crate::config::Config;
use crate::eligible::{ASK_AGAIN, Who};
use crate::listen::{Port, forever};
use crate::state::Node;
use crate::{admin, balancing, cluster, control, gatekeeper, leave, peers, shims};
use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Runs the daemon of a node; returns only if it cannot start.
///
/// # Errors
/// With one sentence about what is in the way. Nothing is left behind then that would be in a next one's.
pub fn run(config: Config) -> Result<()> {
    make_directory(&config.run_dir)?;
    let _only_one = only_one(&config.run_dir)?;
    shims::sweep(&config.run_dir).with_context(|| format!("cannot use {}", config.run_dir.display()))?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&config.cache_dir)
        .with_context(|| format!("cannot make {}", config.cache_dir.display()))?;
    let node = Arc::new(Node::open(config)?);
    leave::on_signals(&node)?;
    let port = Port::bind(&node)?;
    let control = control::bind(&node)?;
    tracing::info!(
        node = %node.me(),
        cluster = node.identity.cluster(),
        address = %port.address()?,
        run_dir = %node.config.run_dir.display(),
        shims = shims::all(&node.config.run_dir).len(),
        "ternd is up"
    );
    let own = node.clone();
    forever("listen", move || port.run(own))?;
    for (name, run) in [
        ("load", cluster::sample as fn(&Arc<Node>) -> !),
        ("gossip", cluster::gossip),
        ("balance", balancing::run),
    ] {
        let own = node.clone();
        forever(name, move || run(&own))?;
    }
    if !node.config.balance_users.is_empty() {
        let own = node.clone();
        std::thread::Builder::new()
            .name("users".into())
            .spawn(move || find_users(&own))
            .context("cannot start a thread")?;
    }
    admin::keep(&node)?;
    gatekeeper::keep(&node)?;
    // What was changed while this node was down.
    let own = node.clone();
    std::thread::Builder::new()
        .name("map".into())
        .spawn(move || drop(peers::ping_all(&own, Duration::from_secs(2))))
        .context("cannot start a thread")?;
    control::run(&control, &node)
}

/// Finds out whose processes are eligible; asks again until all are known.
fn find_users(node: &Node) {
    let mut told = Vec::new();
    loop {
        let (who, unknown) = Who::of(&node.config.balance_users);
        node.balancing.eligible.are(who);
        if unknown.is_empty() {
            return;
        }
        if unknown != told {
            tracing::warn!(?unknown, "balance_users in ternd.toml names somebody whom nobody knows yet");
            told = unknown;
        }
        std::thread::sleep(ASK_AGAIN);
    }
}

fn make_directory(run_dir: &Path) -> Result<()> {
    let failed = || format!("cannot make {}", run_dir.display());
    DirBuilder::new().recursive(true).mode(0o755).create(run_dir).with_context(failed)?;
    std::fs::set_permissions(run_dir, Permissions::from_mode(0o755)).with_context(failed)
}

/// Holds the run directory; the kernel lets go of it however this process ends.
fn only_one(run_dir: &Path) -> Result<File> {
    let path = run_dir.join("ternd.lock");
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)
        .with_context(|| format!("another ternd runs with {}", run_dir.display()))?;
    Ok(file)
}
