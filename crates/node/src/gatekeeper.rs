//! Keeps this node's gatekeeper, which takes commands of machines outside of the cluster, as `mexec_outside` says: there if it is to be,
//! and not if not.

use crate::beside::Beside;
use crate::config::Config;
use crate::state::Node;
use anyhow::{Context, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tern_control::outside::ask;
use tern_control::{OutsideAsk, OutsideReply};

/// How often it is looked whether it is there.
const OFTEN: Duration = Duration::from_secs(2);

/// How long one that is to end may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// This node is about to end: nothing is started any more.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Ends one that listens where none is to listen any more, and has one from now on if there is to be one.
///
/// # Errors
/// If there can be no thread, or if one that is to end does not: a node must not listen for strangers when its owner has forbidden it.
pub(crate) fn keep(node: &Arc<Node>) -> Result<()> {
    let run_dir = &node.config.run_dir;
    let wanted = node.config.file.mexec_outside.map(|address| address.to_string());
    let listens = match ask(run_dir, &OutsideAsk::Address) {
        Ok(OutsideReply::Address(address)) => Some(address),
        _ => None,
    };
    if listens.is_some() && listens != wanted {
        end(run_dir)?;
    }
    let Some(address) = wanted else { return Ok(()) };
    let own = node.clone();
    let keep = move || {
        let mut told = None;
        while !ENDING.load(Ordering::Acquire) {
            let said = Beside::gatekeeper(&own.config).ensure().err().map(|error| format!("{error:#}"));
            if said != told {
                match &said {
                    Some(error) => tracing::warn!(address, "the gatekeeper does not run: {error}"),
                    None => tracing::info!(address, "the gatekeeper runs"),
                }
                told = said;
            }
            std::thread::sleep(OFTEN);
        }
    };
    std::thread::Builder::new().name("gatekeeper".into()).spawn(keep).context("cannot start a thread")?;
    Ok(())
}

/// Ends it with the node: who stops ternd has nothing listen for strangers. While ternd is only started anew it goes on.
pub(crate) fn stop(config: &Config) {
    ENDING.store(true, Ordering::Release);
    if ask(&config.run_dir, &OutsideAsk::Address).is_ok()
        && let Err(error) = end(&config.run_dir)
    {
        tracing::error!("{error:#}");
    }
}

fn end(run_dir: &Path) -> Result<()> {
    let asked = ask(run_dir, &OutsideAsk::End);
    let patience = Instant::now() + PATIENCE;
    while ask(run_dir, &OutsideAsk::Address).is_ok() {
        if Instant::now() > patience {
            anyhow::bail!("the gatekeeper does not end ({asked:?}); kill tern-exec outside");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    tracing::info!("the gatekeeper was ended");
    Ok(())
}
