//! How ternd ends. The signal that it receives selects one of two ways:
//!
//! - SIGTERM (`systemctl stop`, a shutdown of the machine): the node leaves the cluster. Guests are
//!   sent away and own processes are fetched home, within `stop_within`. If that is 0, no process
//!   moves.
//! - SIGINT (`systemctl restart`, by the unit's RestartKillSignal; Ctrl-C): only ternd ends.
//!   Migrated processes continue without it, as after a `kill -9`.
//!
//! A second signal of either kind ends ternd at once.

use crate::migrate::evacuation;
use crate::node::Node;
use crate::os::spawn::spawn_critical;
use crate::programs::admin_tree;
use crate::programs::gatekeeper;
use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::process::exit;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Starts the thread that waits for these signals.
///
/// # Errors
/// If the thread cannot be started or the signals cannot be caught.
pub(crate) fn on_signals(node: &Arc<Node>) -> Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot wait for signals")?;
    let node = node.clone();
    let wait = move || {
        let first = signals.forever().next();
        let within = Duration::from_secs(node.config.stop_within.into());
        if first == Some(SIGINT) || within.is_zero() {
            if first == Some(SIGTERM) {
                admin_tree::stop(&node.config);
                gatekeeper::stop(&node.config);
            }
            tracing::info!("ternd ends; migrated processes and guests continue");
            exit(0);
        }
        let begin = thread::Builder::new().name("leave".into()).spawn(move || {
            evacuation::leave_cluster(&node, within);
            admin_tree::stop(&node.config);
            gatekeeper::stop(&node.config);
            exit(0);
        });
        if let Err(error) = begin {
            tracing::error!(%error, "ternd ends without emptying the node");
            exit(1);
        }
        let _second = signals.forever().next();
        tracing::warn!("ternd ends before the node is empty");
        exit(1);
    };
    spawn_critical("signals", wait)
}
