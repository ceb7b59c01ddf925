//! How ternd ends. It is told which of two ends is meant by the signal that it gets:
//!
//! - SIGTERM (`systemctl stop`, a shutdown of the machine): the node leaves the cluster. Guests go, own processes come
//!   home, and what is not done in time is not done.
//! - SIGINT (`systemctl restart`, by the unit's RestartKillSignal; Ctrl-C): ternd alone ends. All goes on without it,
//!   as after a `kill -9`.
//!
//! A second signal of either kind ends it at once.

use crate::listen::forever;
use crate::state::Node;
use crate::{admin, evacuation, gatekeeper};
use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::process::exit;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Waits for the signals from now on.
///
/// # Errors
/// If the system gives no thread, or no signals.
pub(crate) fn on_signals(node: &Arc<Node>) -> Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot wait for signals")?;
    let node = node.clone();
    let wait = move || {
        let first = signals.forever().next();
        let within = Duration::from_secs(node.config.stop_within.into());
        if first == Some(SIGINT) || within.is_zero() {
            if first == Some(SIGTERM) {
                admin::stop(&node.config);
                gatekeeper::stop(&node.config);
            }
            tracing::info!("ternd ends; what is away, and what is here, goes on");
            exit(0);
        }
        let begin = thread::Builder::new().name("leave".into()).spawn(move || {
            evacuation::leave_cluster(&node, within);
            admin::stop(&node.config);
            gatekeeper::stop(&node.config);
            exit(0);
        });
        if let Err(error) = begin {
            tracing::error!(%error, "ternd ends without having emptied the node");
            exit(1);
        }
        let _second = signals.forever().next();
        tracing::warn!("ternd ends before the node is empty");
        exit(1);
    };
    forever("signals", wait)
}
