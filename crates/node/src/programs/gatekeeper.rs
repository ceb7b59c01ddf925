//! Starts and stops the gatekeeper of this node, which accepts commands of machines outside the
//! cluster, according to `mexec_outside`.

use crate::config::Config;
use crate::node::Node;
use crate::programs::HelperProgram;
use anyhow::{Context, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tern_control::gatekeeper::call;
use tern_control::{GatekeeperReply, GatekeeperRequest};

/// Interval of checking that it runs.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// How long it may take to end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Set when this node stops; the gatekeeper is not started again after that.
static IS_STOPPING: AtomicBool = AtomicBool::new(false);

/// Ends a gatekeeper whose address is not configured any more, and keeps one running if an address
/// is configured.
///
/// # Errors
/// If no thread can be started, or a gatekeeper does not end: a node must not listen for machines
/// outside the cluster after its owner has forbidden it.
pub(crate) fn supervise(node: &Arc<Node>) -> Result<()> {
    let run_dir = &node.config.run_dir;
    let wanted = node.config.file.mexec_outside.map(|address| address.to_string());
    let listens = match call(run_dir, &GatekeeperRequest::Address) {
        Ok(GatekeeperReply::Address(address)) => Some(address),
        _ => None,
    };
    if listens.is_some() && listens != wanted {
        terminate(run_dir)?;
    }
    let Some(address) = wanted else { return Ok(()) };
    let own = node.clone();
    let keep = move || {
        let mut last_error = None;
        while !IS_STOPPING.load(Ordering::Acquire) {
            let error_now = HelperProgram::gatekeeper(&own.config)
                .ensure_running()
                .err()
                .map(|error| format!("{error:#}"));
            if error_now != last_error {
                match &error_now {
                    Some(error) => tracing::warn!(address, "the gatekeeper does not run: {error}"),
                    None => tracing::info!(address, "the gatekeeper runs"),
                }
                last_error = error_now;
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
    };
    std::thread::Builder::new().name("gatekeeper".into()).spawn(keep).context("cannot start a thread")?;
    Ok(())
}

/// Ends the gatekeeper when the node stops. It continues to run while ternd is only restarted.
pub(crate) fn stop(config: &Config) {
    IS_STOPPING.store(true, Ordering::Release);
    if call(&config.run_dir, &GatekeeperRequest::Address).is_ok()
        && let Err(error) = terminate(&config.run_dir)
    {
        tracing::error!("{error:#}");
    }
}

fn terminate(run_dir: &Path) -> Result<()> {
    let asked = call(run_dir, &GatekeeperRequest::End);
    let end_by = Instant::now() + EXIT_TIMEOUT;
    while call(run_dir, &GatekeeperRequest::Address).is_ok() {
        if Instant::now() > end_by {
            anyhow::bail!("the gatekeeper does not end ({asked:?}); kill the process tern-exec outside");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    tracing::info!("the gatekeeper was ended");
    Ok(())
}
