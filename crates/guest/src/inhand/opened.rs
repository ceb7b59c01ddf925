//! What came along with files in hand when they were opened, and their end.
//!
//! What home's kernel has said of a file, and read of it, while it opened it, is the answer to what the program asks right behind that, as
//! long as it has heard of nothing else: no result of a call, no signal.
//!
//! The end of a file that was only read goes home with the next call that does, whatever that is, before it: so the number is free
//! again for it. Nobody can tell, unless he waits for it: so not if there is a lock, and soon by itself.

use super::{Ahead, Files, TERM};
use std::time::{Duration, Instant};
use tern_migrate::opened::{About, Beginning, MOST_BROUGHT};

/// How long the end of a file may wait for an occasion to go home.
const ENDED: Duration = Duration::from_millis(20);
/// How long what is written may.
const WRITTEN: Duration = Duration::from_secs(1);

/// Descriptors that the program has closed, and home has not; since when.
#[derive(Debug, Default)]
pub(super) struct Closing {
    pub(super) fds: Vec<i32>,
    since: Option<Instant>,
}

impl Closing {
    /// Home has closed it.
    pub(super) fn is_closed(&mut self, fd: i32) {
        self.fds.retain(|closing| *closing != fd);
        self.since = self.since.filter(|_| !self.fds.is_empty());
    }

    pub(super) fn wait_on(&mut self) {
        self.since = self.since.map(|_| Instant::now());
    }
}

impl Files {
    /// So many bytes of a file that this call opens may come along with it.
    pub(crate) fn wants_with(&self, nr: u32) -> u32 {
        let opens = [libc::SYS_open, libc::SYS_openat, libc::SYS_openat2, libc::SYS_creat];
        let wanted = opens.contains(&i64::from(nr)) && !self.shared && !self.putting_down && !self.skips;
        if wanted { MOST_BROUGHT as u32 } else { 0 }
    }

    /// Takes what has come along with a file, asked for then.
    pub(super) fn begin(&mut self, fd: i32, begins: &Beginning, asked: Instant) {
        // A signal may have told of what came after it.
        let in_time = self.asked == self.doubts;
        let fresh = |file: &&mut super::OpenFile| !file.leaves && file.ahead.is_none() && file.offset() == 0;
        let Some(file) = self.open.get_mut(&fd).filter(fresh).filter(|_| in_time) else { return };
        file.about = Some((begins.about, asked));
        let content = begins.content.as_ref().filter(|content| content.bytes.len() as u64 <= MOST_BROUGHT);
        if let Some(content) = content.filter(|_| file.known.reads && !file.known.writes) {
            self.fills += 1;
            file.ahead = Some(Ahead {
                start: 0,
                bytes: content.bytes.clone(),
                end: content.ends,
                told_end: false,
                steady: true,
                since: asked,
                used: true,
                number: self.fills,
            });
            file.unread = true;
            file.window = (0, MOST_BROUGHT);
        }
    }

    /// What home's kernel says of a file, if nothing has been heard since it has said so.
    pub(crate) fn about(&self, fd: i32) -> Option<About> {
        let file = self.open.get(&fd).filter(|file| !file.leaves)?;
        file.about.filter(|(_, since)| since.elapsed() < TERM).map(|(about, _)| about)
    }

    /// Whether it is a file of home's own kernel that has been opened here.
    pub(crate) fn is_local(&self, fd: i32) -> bool {
        self.open.get(&fd).is_some_and(|file| file.known.local && !file.leaves)
    }

    /// Closes a file, if nobody can tell when that is done at home; whether it is closed.
    pub(crate) fn close(&mut self, fd: i32) -> bool {
        let Some(file) = self.open.get(&fd) else { return false };
        let id = file.known.id;
        let simple = file.known.local && !file.known.writes && !file.leaves && !file.lent;
        // Whoever closes one of them gives up his locks on the file by all others.
        let held = self.open.values().any(|other| other.known.id == id && other.holds);
        if !simple || held || file.near.is_some() {
            return false;
        }
        self.skips |= file.unread;
        self.open.remove(&fd);
        self.closing.fds.push(fd);
        self.closing.since.get_or_insert_with(Instant::now);
        true
    }

    /// When something is to go home without an occasion, if anything waits.
    pub(crate) fn due(&self) -> Option<Instant> {
        let (written, ended) =
            (self.waits.map(|since| since + WRITTEN), self.closing.since.map(|s| s + ENDED));
        written.into_iter().chain(ended).min()
    }
}
