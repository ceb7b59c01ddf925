//! Keeps the program that moves connections (tern-net) running, if `connections` says so. Shims
//! connect to it directly, and leave connections at home if it does not run.

use crate::node::Node;
use crate::programs::HelperProgram;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::time::Duration;

/// Interval of checking that it runs.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Keeps it running.
///
/// # Errors
/// If no thread can be started.
pub(crate) fn supervise(node: &Arc<Node>) -> Result<()> {
    if !node.config.file.connections.unwrap_or(false) {
        return Ok(());
    }
    let own = node.clone();
    let keep = move || {
        let mut last_error = None;
        loop {
            let error_now = HelperProgram::connection_mover(&own.config)
                .ensure_running()
                .err()
                .map(|error| format!("{error:#}"));
            if error_now != last_error
                && let Some(error) = &error_now
            {
                tracing::warn!("connections stay at home: {error}");
            }
            last_error = error_now;
            std::thread::sleep(CHECK_INTERVAL);
        }
    };
    std::thread::Builder::new().name("connections".into()).spawn(keep).context("cannot start a thread")?;
    Ok(())
}
