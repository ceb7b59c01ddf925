//! Fault injection for tests: named points of a migration at which a shim stops or dies.
//!
//! `TERN_FAULT=SIDE:PHASE:ACTION` in a shim's environment. SIDE is `home` or `guest`, PHASE one of
//! [`Phase`]'s names. The ACTION `die` aborts the shim there. `wait` creates the file named by
//! `TERN_FAULT_FILE` and waits until it is removed, so that the test can cut a link or kill a node.
//! With `home:prepare:repeat`, a home shim repeats each request to come home until it is fulfilled.
//!
//! `TERN_FREEZE_FILE` names a file that a home shim reads when it starts. If the file has `N asked`
//! or `N made`, the shim fetches a process home at its N-th call away: with `asked` after the
//! request has arrived and before the call is made, with `made` after the call is made and before
//! its result is sent. The shim empties the file when it does so.

use crate::journey::Phase;
use std::path::PathBuf;
use std::time::Duration;

/// The call at which a test has a process fetched home.
#[derive(Debug)]
pub struct FreezeRequest {
    /// The call's number.
    pub number: u64,
    /// Whether to fetch it after the call is made, not before.
    pub made: bool,
    file: PathBuf,
}

impl FreezeRequest {
    /// The test's request, if there is one.
    #[must_use]
    pub fn from_env() -> Option<Self> {
        let file = PathBuf::from(std::env::var_os("TERN_FREEZE_FILE")?);
        let text = std::fs::read_to_string(&file).ok()?;
        let (number, when) = text.trim().split_once(' ')?;
        Some(Self { number: number.parse().ok()?, made: when == "made", file })
    }

    /// Reports to the test that the call was reached.
    pub fn mark_reached(&self) {
        let _test_sees_it_fail = std::fs::write(&self.file, "");
    }
}

/// Whether a test requested this fault.
#[must_use]
pub fn is_requested(side: &str, phase: Phase, action: &str) -> bool {
    std::env::var("TERN_FAULT").is_ok_and(|request| request == format!("{side}:{phase}:{action}"))
}

/// Executes the fault that a test requested for this point, if any.
pub fn point(side: &str, phase: Phase) {
    let Ok(request) = std::env::var("TERN_FAULT") else { return };
    let Some(action) = request.strip_prefix(&format!("{side}:{phase}:")) else { return };
    tracing::warn!(%phase, action, "fault injected by a test");
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
