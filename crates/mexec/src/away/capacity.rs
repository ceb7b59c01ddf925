//! The capacity that this node's owner leaves for commands of other nodes. ternd, which measures
//! the demand of the node's own processes, is queried and the answer cached.

use crate::lock;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_control::{RefusalKind, Reply, Request, stream};
use tern_node::Config;

/// Maximum age of the cache. ternd itself measures once a second.
const MAX_AGE: Duration = Duration::from_millis(300);

/// Time limit for ternd's reply.
const TERND_TIMEOUT: Duration = Duration::from_secs(1);

/// The cached answer of ternd.
#[derive(Debug)]
pub(super) struct OwnerCapacity {
    control: PathBuf,
    cache: Mutex<Cache>,
}

#[derive(Debug)]
struct Cache {
    queried: Option<Instant>,
    is_available: bool,
}

impl OwnerCapacity {
    pub(super) fn new(config: &Config) -> Self {
        let cache = Mutex::new(Cache { queried: None, is_available: true });
        Self { control: config.run_dir.join("control"), cache }
    }

    /// Whether one more command may start. Without a reply the last answer holds: builds continue
    /// while ternd is restarted.
    pub(super) fn is_available(&self) -> bool {
        let mut cache = lock(&self.cache);
        if cache.queried.is_none_or(|queried| queried.elapsed() > MAX_AGE) {
            let is_available = match self.query() {
                Ok(Reply::Refused(refusal)) if refusal.kind == RefusalKind::Unavailable => {
                    if cache.is_available {
                        tracing::info!("{}", refusal.message);
                    }
                    false
                }
                Ok(_) => true,
                Err(_) => cache.is_available,
            };
            *cache = Cache { queried: Some(Instant::now()), is_available };
        }
        cache.is_available
    }

    fn query(&self) -> io::Result<Reply> {
        let mut socket = UnixStream::connect(&self.control)?;
        socket.set_read_timeout(Some(TERND_TIMEOUT))?;
        socket.set_write_timeout(Some(TERND_TIMEOUT))?;
        stream::write(&mut socket, &Request::HasCapacity)?;
        stream::read(&mut socket)
    }
}
