//! Directories that several nodes have from one server (`shared` in `ternd.toml`), which placed commands use directly: what home tells of its own,
//! and which of these are here the same.

use crate::lock;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tern_control::shared::{SharedRoot, for_several};
use tern_node::Config;

/// How old what is known of them may be.
const FRESH: Duration = Duration::from_secs(30);

/// How long their servers may take. One that does not answer holds no command up: what is there is used through home.
const PATIENCE: Duration = Duration::from_millis(500);

/// Those of this node.
#[derive(Debug)]
pub(crate) struct Shared {
    declared: Vec<PathBuf>,
    known: Arc<(Mutex<Known>, Condvar)>,
}

#[derive(Debug, Default)]
struct Known {
    looked: Option<Instant>,
    /// A thread looks, and may wait for a server for as long as that likes.
    looking: bool,
    roots: Vec<SharedRoot>,
}

impl Shared {
    pub(crate) fn new(config: &Config) -> Self {
        Self { declared: config.file.shared.clone().unwrap_or_default(), known: Arc::default() }
    }

    /// Those in which several nodes can work at once.
    pub(crate) fn roots(&self) -> Vec<SharedRoot> {
        if self.declared.is_empty() {
            return Vec::new();
        }
        let mut known = lock(&self.known.0);
        if !known.looking && known.looked.is_none_or(|looked| looked.elapsed() > FRESH) {
            let (declared, shared) = (self.declared.clone(), self.known.clone());
            let look = move || {
                let roots = for_several(&declared);
                *lock(&shared.0) = Known { looked: Some(Instant::now()), looking: false, roots };
                shared.1.notify_all();
            };
            known.looking = std::thread::Builder::new().name("shared".into()).spawn(look).is_ok();
        }
        let waited = self.known.1.wait_timeout_while(known, PATIENCE, |known| known.looking);
        let (known, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if known.looking { Vec::new() } else { known.roots.clone() }
    }

    /// Of those that another node has told of, those that are here the same.
    pub(crate) fn same(&self, theirs: &[SharedRoot]) -> Vec<PathBuf> {
        let mut own = self.roots();
        own.retain(|own| theirs.iter().any(|their| own.is(their)));
        own.iter().map(|own| OsStr::from_bytes(&own.path).into()).collect()
    }
}
