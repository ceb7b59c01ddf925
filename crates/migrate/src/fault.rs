//! Named places where a test may break a migration.
//!
//! `TERN_FAULT=SIDE:PHASE:ACTION` in a shim's environment, where SIDE is `home` or `guest`, PHASE one of
//! [`Phase`]'s names and ACTION `die` (the shim kills itself there) or `wait` (it stands still there until the
//! file named by `TERN_FAULT_FILE` is gone, having made it), so that the test can cut a link or kill a node.

//!
//! `TERN_FREEZE_FILE` names a file, read when a home shim starts: `N asked` or `N made` in it has a process fetched home
//! at its N-th call away, when that has been asked for and not been made, or has been made and its result is on no
//! way yet. Where that comes to pass the shim empties the file.

use crate::journey::Phase;
use std::path::PathBuf;
use std::time::Duration;

/// A call at which a process is to be stopped.
#[derive(Debug)]
pub struct Freeze {
    /// The call's number.
    pub number: u64,
    /// Whether the call is made first.
    pub made: bool,
    file: PathBuf,
}

impl Freeze {
    /// What a test has asked for.
    #[must_use]
    pub fn wished() -> Option<Self> {
        let file = PathBuf::from(std::env::var_os("TERN_FREEZE_FILE")?);
        let text = std::fs::read_to_string(&file).ok()?;
        let (number, when) = text.trim().split_once(' ')?;
        Some(Self { number: number.parse().ok()?, made: when == "made", file })
    }

    /// It has come to pass.
    pub fn reached(&self) {
        let _test_sees_it_fail = std::fs::write(&self.file, "");
    }
}

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
