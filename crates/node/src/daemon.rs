//! Start-up of the daemon: the resources that it acquires and the threads that it starts.

mod cache_limit;
mod shutdown;

use crate::balance::eligible::{LOOKUP_INTERVAL, UserSet};
use crate::cluster::{gossip, membership};
use crate::config::Config;
use crate::node::Node;
use crate::os::spawn::spawn_critical;
use crate::peer::client;
use crate::peer::listener::Listener;
use crate::programs::{admin_tree, connection_mover, gatekeeper};
use crate::{balance, control, shim};
use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Raises this process's soft limit on descriptors to the hard one; shims and helper programs
/// inherit it. Each connection takes a descriptor. The soft limit is often 1,024 only because of
/// select(2), which is not used here.
fn raise_descriptor_limit() {
    let now = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: now.maximum, maximum: now.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit on descriptors stays at {:?}", now.current);
    }
}

/// Runs the daemon of a node. Returns only if it cannot start.
///
/// # Errors
/// One sentence with the reason. A failed start leaves nothing behind that prevents the next one.
pub fn run(config: Config) -> Result<()> {
    raise_descriptor_limit();
    make_run_dir(&config.run_dir)?;
    let _lock = lock_run_dir(&config.run_dir)?;
    shim::sweep(&config.run_dir).with_context(|| format!("cannot use {}", config.run_dir.display()))?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&config.cache_dir)
        .with_context(|| format!("cannot create {}", config.cache_dir.display()))?;
    let node = Arc::new(Node::open(config)?);
    shutdown::on_signals(&node)?;
    let listener = Listener::bind(&node)?;
    let control = control::bind(&node)?;
    tracing::info!(
        node = %node.me(),
        cluster = node.identity.cluster(),
        address = %listener.address()?,
        run_dir = %node.config.run_dir.display(),
        shims = shim::all(&node.config.run_dir).len(),
        "ternd is up"
    );
    let own = node.clone();
    spawn_critical("listen", move || listener.run(own))?;
    for (name, run) in
        [("load", gossip::sample as fn(&Arc<Node>) -> !), ("gossip", gossip::run), ("balance", balance::run)]
    {
        let own = node.clone();
        spawn_critical(name, move || run(&own))?;
    }
    if !node.config.balance_users.is_empty() {
        let own = node.clone();
        std::thread::Builder::new()
            .name("users".into())
            .spawn(move || resolve_balance_users(&own))
            .context("cannot start a thread")?;
    }
    cache_limit::start(&node.config.cache_dir).context("cannot start a thread")?;
    admin_tree::supervise(&node)?;
    gatekeeper::supervise(&node)?;
    connection_mover::supervise(&node)?;
    // Fetches changes of the map that were made while this node was down.
    let own = node.clone();
    std::thread::Builder::new()
        .name("map".into())
        .spawn(move || {
            membership::settle(&own);
            client::ping_all(&own, Duration::from_secs(2));
        })
        .context("cannot start a thread")?;
    control::run(&control, &node)
}

/// Resolves `balance_users` to numbers; repeats until every name is known.
fn resolve_balance_users(node: &Node) {
    let mut logged = Vec::new();
    loop {
        let (users, unknown) = UserSet::resolve(&node.config.balance_users);
        node.balancing.eligible.set(users);
        if unknown.is_empty() {
            return;
        }
        if unknown != logged {
            tracing::warn!(?unknown, "unknown names in balance_users in ternd.toml");
            logged = unknown;
        }
        std::thread::sleep(LOOKUP_INTERVAL);
    }
}

fn make_run_dir(run_dir: &Path) -> Result<()> {
    let failed = || format!("cannot create {}", run_dir.display());
    DirBuilder::new().recursive(true).mode(0o755).create(run_dir).with_context(failed)?;
    std::fs::set_permissions(run_dir, Permissions::from_mode(0o755)).with_context(failed)
}

/// Takes the lock of the run directory. The kernel releases it when this process ends.
fn lock_run_dir(run_dir: &Path) -> Result<File> {
    let path = run_dir.join("ternd.lock");
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)
        .with_context(|| format!("another ternd runs with {}", run_dir.display()))?;
    Ok(file)
}
