//! What a node is told that nobody waits for: files that are closed here, objects that the kernel knows no more.
//!
//! It goes with the next ask, whatever that is; or a moment later by itself, on a thread for it. If the node cannot be told it is
//! owed to it, and said on the ear as soon as that is there again.

use super::peer::Peer;
use crate::lock;
use crate::message::{Beside, Object, Release};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How much goes with one ask.
const MOST: usize = 256;

/// How long it waits for an ask to go with: what was written to may be run there next, which it cannot be while it is open.
const SOON: Duration = Duration::from_millis(1);
const LATER: Duration = Duration::from_millis(5);

/// How long a node is left in peace that could not be told.
const REST: Duration = Duration::from_millis(200);

/// All that one node is to be told.
#[derive(Debug, Default)]
pub(crate) struct Owed {
    all: Mutex<All>,
    some: Condvar,
}

#[derive(Debug, Default)]
struct All {
    /// Lives of the server: a new one knows nothing of what an old one had.
    epoch: u64,
    forgotten: Vec<(Object, u64)>,
    released: Vec<Release>,
    /// One of these was written to.
    soon: bool,
}

/// What is said of it, and to which life of the server.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pub(crate) beside: Beside,
    epoch: u64,
}

impl Part {
    pub(crate) fn is_empty(&self) -> bool {
        self.beside.forgotten.is_empty() && self.beside.released.is_empty()
    }
}

impl Owed {
    /// The kernel here knows an object no more. That has time.
    pub(crate) fn forget(&self, object: Object, count: u64) {
        self.all().forgotten.push((object, count));
    }

    /// The session lets go of this, which was written to or not.
    pub(crate) fn release(&self, what: Release, written: bool) {
        let mut all = self.all();
        all.released.push(what);
        all.soon |= written;
        drop(all);
        self.some.notify_one();
    }

    /// Some of it, for whoever says it. Taken out: two who say it at once would only say it twice.
    pub(crate) fn take(&self) -> Part {
        let mut all = self.all();
        all.soon = false;
        let (forgotten, released) = (all.forgotten.len().min(MOST), all.released.len().min(MOST));
        let forgotten = all.forgotten.drain(..forgotten).collect();
        let released = all.released.drain(..released).collect();
        Part { beside: Beside { forgotten, released }, epoch: all.epoch }
    }

    /// It could not be said. A server that has begun anew since knows nothing of it; what may have been heard of the counts must not be
    /// said again.
    pub(crate) fn put_back(&self, part: Part) {
        let mut all = self.all();
        if all.epoch == part.epoch {
            all.released.extend(part.beside.released);
        }
    }

    /// The server has begun anew, and holds nothing of us.
    pub(crate) fn begin_anew(&self) {
        let mut all = self.all();
        *all = All { epoch: all.epoch + 1, ..All::default() };
    }

    /// Says to a node what nobody has said, for as long as there is somebody who could be told.
    pub(crate) fn say(peer: &Peer) -> ! {
        let owed = &peer.owed;
        loop {
            let all = owed.all();
            let all = owed.some.wait_while(all, |all| all.released.is_empty());
            let soon = all.unwrap_or_else(PoisonError::into_inner).soon;
            std::thread::sleep(if soon { SOON } else { LATER });
            let part = owed.take();
            if !part.is_empty() && !peer.release_all(part) {
                std::thread::sleep(REST);
            }
        }
    }

    fn all(&self) -> MutexGuard<'_, All> {
        lock(&self.all)
    }
}
