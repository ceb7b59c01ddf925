//! What who owns this node leaves for commands of other nodes: ternd, which sees what its own processes need, is asked now and then.

use crate::lock;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_control::{RefusalKind, Reply, Request, stream};
use tern_node::Config;

/// How old an answer may be; ternd itself looks once a second.
const FRESH: Duration = Duration::from_millis(300);

/// How long ternd may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// What it has left, as ternd said last.
#[derive(Debug)]
pub(super) struct Owner {
    control: PathBuf,
    last: Mutex<Last>,
}

#[derive(Debug)]
struct Last {
    asked: Option<Instant>,
    spares: bool,
}

impl Owner {
    pub(super) fn new(config: &Config) -> Self {
        let last = Mutex::new(Last { asked: None, spares: true });
        Self { control: config.run_dir.join("control"), last }
    }

    /// Whether one more command may begin. Without an answer it is as it was: ternd is restarted, say, and builds go on.
    pub(super) fn spares(&self) -> bool {
        let mut last = lock(&self.last);
        if last.asked.is_none_or(|asked| asked.elapsed() > FRESH) {
            let spares = match self.ask() {
                Ok(Reply::Refused(why)) if why.kind == RefusalKind::Unavailable => {
                    if last.spares {
                        tracing::info!("{}", why.message);
                    }
                    false
                }
                Ok(_) => true,
                Err(_) => last.spares,
            };
            *last = Last { asked: Some(Instant::now()), spares };
        }
        last.spares
    }

    fn ask(&self) -> io::Result<Reply> {
        let mut socket = UnixStream::connect(&self.control)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        stream::write(&mut socket, &Request::Spares)?;
        stream::read(&mut socket)
    }
}
