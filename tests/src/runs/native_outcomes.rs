//! Outcomes of programs that did not migrate, shared by all test programs of one nextest run.
//!
//! nextest runs each test in a process of its own, and names the run in `NEXTEST_RUN_ID`. Outcomes
//! are stored on disk for that run only, so that none outlives a change of the program, the kernel
//! or the environment.

use crate::programs::build_directory;
use crate::runs::outcome::Outcome;
use anyhow::Result;
use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Outcomes cached in this process.
static CACHE: OnceLock<Mutex<HashMap<String, Outcome>>> = OnceLock::new();

/// How many outcomes this process has stored.
static DRAFTS: AtomicU64 = AtomicU64::new(0);

/// The outcome under this key; if there is none, runs `run` and stores its outcome. Two callers
/// that both find none both run it.
///
/// # Errors
/// Those of `run`; also if the outcome cannot be stored.
pub(crate) fn get_or_run(key: &str, run: impl FnOnce() -> Result<Outcome>) -> Result<Outcome> {
    let cache = CACHE.get_or_init(Mutex::default);
    let lock = || cache.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(outcome) = lock().get(key) {
        return Ok(outcome.clone());
    }
    let file = file(key)?;
    let stored = file.as_ref().and_then(|file| serde_json::from_slice(&fs::read(file).ok()?).ok());
    let outcome = match stored {
        Some(outcome) => outcome,
        None => {
            let outcome = run()?;
            if let Some(file) = file {
                // The rename makes it appear complete or not at all. Each run has its own draft:
                // threads of one process may store the same outcome at the same time.
                let number = DRAFTS.fetch_add(1, Ordering::Relaxed);
                let draft = file.with_extension(format!("{}-{number}", std::process::id()));
                fs::write(&draft, serde_json::to_vec(&outcome)?)?;
                fs::rename(&draft, &file)?;
            }
            outcome
        }
    };
    lock().insert(key.to_owned(), outcome.clone());
    Ok(outcome)
}

/// The file of a key in this run's folder; `None` outside of nextest.
fn file(key: &str) -> Result<Option<PathBuf>> {
    let Some(run) = std::env::var_os("NEXTEST_RUN_ID") else { return Ok(None) };
    let all = build_directory()?.join("natives");
    let own = all.join(&run);
    if !own.exists() {
        let old = fs::read_dir(&all).into_iter().flatten().flatten().filter(|old| old.file_name() != run);
        for old in old {
            // Another process may be removing the same folder.
            let _ = fs::remove_dir_all(old.path());
        }
        fs::create_dir_all(&own)?;
    }
    let name = key.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    Ok(Some(own.join(format!("{name}.json"))))
}
