//! Directories that several nodes mount from one server (`shared` in `ternd.toml`). Placed commands
//! use them directly. This module lists those of this node, and finds those that another node has
//! too.

use crate::lock;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tern_control::shared::{SharedDirId, coherent_dirs};
use tern_node::Config;

/// Maximum age of the cached list.
const MAX_AGE: Duration = Duration::from_secs(30);

/// How long the file servers may take. If one does not respond in time, commands use all shared
/// directories through home instead of waiting.
const SERVER_TIMEOUT: Duration = Duration::from_millis(500);

/// The shared directories of this node.
#[derive(Debug)]
pub(crate) struct SharedDirs {
    declared: Vec<PathBuf>,
    cache: Arc<(Mutex<Cache>, Condvar)>,
}

#[derive(Debug, Default)]
struct Cache {
    updated: Option<Instant>,
    /// A thread is examining the directories. It may block on a server indefinitely.
    updating: bool,
    dirs: Vec<SharedDirId>,
}

impl SharedDirs {
    pub(crate) fn new(config: &Config) -> Self {
        Self { declared: config.file.shared.clone().unwrap_or_default(), cache: Arc::default() }
    }

    /// The directories in which several nodes can work at once. Empty if their servers do not
    /// respond in time.
    pub(crate) fn all(&self) -> Vec<SharedDirId> {
        if self.declared.is_empty() {
            return Vec::new();
        }
        let mut cache = lock(&self.cache.0);
        if !cache.updating && cache.updated.is_none_or(|updated| updated.elapsed() > MAX_AGE) {
            let (declared, shared) = (self.declared.clone(), self.cache.clone());
            let update = move || {
                let dirs = coherent_dirs(&declared);
                *lock(&shared.0) = Cache { updated: Some(Instant::now()), updating: false, dirs };
                shared.1.notify_all();
            };
            cache.updating = std::thread::Builder::new().name("shared".into()).spawn(update).is_ok();
        }
        let waited = self.cache.1.wait_timeout_while(cache, SERVER_TIMEOUT, |cache| cache.updating);
        let (cache, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if cache.updating { Vec::new() } else { cache.dirs.clone() }
    }

    /// The directories in `theirs`, another node's, that are the same here.
    pub(crate) fn common_with(&self, theirs: &[SharedDirId]) -> Vec<PathBuf> {
        let mut own = self.all();
        own.retain(|own| theirs.iter().any(|their| own.is_same(their)));
        own.iter().map(|own| OsStr::from_bytes(&own.path).into()).collect()
    }
}
