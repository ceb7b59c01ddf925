//! Named places where a test may break a migration.
//!
//! `TERN_FAULT=SIDE:PHASE:ACTION` in a shim's environment, where SIDE is `home` or `guest`, PHASE one of
//! [`Phase`]'s names and ACTION `die` (the shim kills itself there) or `wait` (it stands still there until the
//! file named by `TERN_FAULT_FILE` is gone, having made it), so that the test can cut a link or kill a node.

use crate::journey::Phase;
use std::path::PathBuf;
use std::time::Duration;

/// Breaks this process here if a test has asked for it.
pub fn point(side: &str, phase: Phase) {
    let Ok(wish) = std::env::var("TERN_FAULT") else { return };
    let Some(action) = wish.strip_prefix(&format!("{side}:{phase}:")) else { return };
    tracing::warn!(%phase, action, "a fault that a test asked for");
    match action {
        "die" => std::process::abort(),
        "wait" => {
            let Some(file) = std::env::var_os("TERN_FAULT_FILE").map(PathBuf::from) else { return };
            if std::fs::write(&file, phase.to_string()).is_ok() {
                while file.exists() {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        _ => {}
    }
}
