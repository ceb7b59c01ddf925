//! What the kernel here has of a file's content, and how it is made to forget that.
//!
//! It drops all pages when a file is opened without `FOPEN_KEEP_CACHE`, and when it takes attributes with another mtime or size than
//! it had (`FUSE_AUTO_INVAL_DATA`): so an answer has it forget before it goes on with what it asked for. To tell it to forget while
//! it waits for an answer would not do: it throws away what was asked before that, and goes by the old size.

use super::belief::Version;
use crate::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long an answer is on its way through the kernel, until what it has is dropped.
pub(crate) const ON_ITS_WAY: Duration = Duration::from_millis(20);

/// By how many ns mtimes are told wrong at most.
const MOST_NUDGED: u64 = 1000;

/// The content of one file, as the kernel may have it.
#[derive(Debug, Default)]
pub(crate) struct Content {
    /// None as long as nothing was opened so that the kernel may keep of it.
    had: Mutex<Option<Had>>,
    /// How many have it open.
    open: AtomicUsize,
    /// It throws away what it is told while somebody has it open; so it may not have dropped what it was to drop.
    is_shaken: AtomicBool,
    nudges: AtomicU64,
}

#[derive(Debug)]
struct Had {
    /// Which it is, if that is known.
    version: Option<Version>,
    /// From when on nothing of another one is left.
    from: Instant,
}

impl Content {
    /// What the kernel has of it is of no known version.
    pub(crate) fn doubt(&self) {
        if let Some(had) = &mut *lock(&self.had) {
            had.version = None;
        }
    }

    /// The kernel is told to forget what it is like, and throws away what it has asked for and not been told yet. As long as somebody has it
    /// open it is taken to have of it what it was to drop; who opens it as the only one has that dropped for sure.
    pub(crate) fn shakes(&self) {
        self.doubt();
        self.is_shaken.store(self.is_open(), Ordering::Release);
    }

    /// Somebody opens it, and the kernel drops all that it has.
    pub(crate) fn drops(&self) {
        if self.open.load(Ordering::Acquire) == 1 {
            self.is_shaken.store(false, Ordering::Release);
        }
    }

    /// Whether the kernel has of it what is of a known version.
    pub(crate) fn is_known(&self) -> bool {
        !self.is_shaken() && lock(&self.had).as_ref().is_some_and(|had| had.version.is_some())
    }

    fn is_shaken(&self) -> bool {
        self.is_shaken.load(Ordering::Acquire)
    }

    /// Whether all that the kernel may have of it is of this version.
    pub(crate) fn is_only(&self, version: Option<Version>) -> bool {
        match &*lock(&self.had) {
            None => true,
            _ if self.is_shaken() => false,
            Some(had) => had.version.is_some() && had.version == version && had.from <= Instant::now(),
        }
    }

    /// The kernel may have of it from now on, and drops what it has of other versions when it sees the answer; not before: who sees
    /// the version until then must have it forget again.
    ///
    /// What an answer tells is never older than what the kernel reads after it has forgotten. So nothing that it has is older
    /// than the version here, even if two do this at once, or it was written meanwhile.
    pub(crate) fn becomes(&self, version: Option<Version>) {
        let now = Instant::now();
        match &mut *lock(&self.had) {
            // It has nothing yet.
            had @ None => *had = Some(Had { version, from: now }),
            Some(had) if had.version.is_some() && had.version == version => {}
            Some(had) => *had = Had { version, from: now + ON_ITS_WAY },
        }
    }

    /// Whether somebody here has it open. If not, nobody can look at what the kernel has of it.
    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0
    }

    pub(crate) fn opened(&self) {
        self.open.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn closed(&self) {
        self.open.fetch_sub(1, Ordering::AcqRel);
    }

    /// What is added to an mtime that the kernel must not know yet: another one than the last time, and never nothing.
    pub(crate) fn nudge(&self) -> Duration {
        Duration::from_nanos(1 + self.nudges.fetch_add(1, Ordering::Relaxed) % MOST_NUDGED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Moment;

    fn version(seconds: i64) -> Option<Version> {
        Some(Version::at(Moment { seconds, nanos: 0 }))
    }

    #[test]
    fn a_version_is_had_when_the_last_one_is_forgotten_and_not_before() {
        let content = Content::default();
        assert!(content.is_only(version(1)), "it has nothing yet");
        content.becomes(version(1));
        assert!(content.is_only(version(1)) && !content.is_only(version(2)));
        content.becomes(version(2));
        assert!(!content.is_only(version(2)), "what another one sees meanwhile");
        std::thread::sleep(ON_ITS_WAY);
        assert!(content.is_only(version(2)) && !content.is_only(version(1)));
        content.doubt();
        assert!(!content.is_only(version(2)));
        content.becomes(None);
        std::thread::sleep(ON_ITS_WAY);
        assert!(!content.is_only(None), "no version is like no other");
    }

    #[test]
    fn what_may_not_have_been_dropped_is_doubted_until_one_opens_it_alone() {
        let content = Content::default();
        content.opened();
        content.becomes(version(1));
        content.shakes();
        content.becomes(version(2));
        std::thread::sleep(ON_ITS_WAY);
        assert!(!content.is_only(version(2)) && !content.is_known());
        content.opened();
        content.drops();
        assert!(!content.is_only(version(2)), "the other one's ask may be on its way");
        content.closed();
        content.drops();
        assert!(content.is_only(version(2)));
        content.closed();
        content.shakes();
        content.becomes(version(3));
        std::thread::sleep(ON_ITS_WAY);
        assert!(content.is_only(version(3)), "nobody reads it");
    }

    #[test]
    fn each_nudge_is_another_one() {
        let content = Content::default();
        let mut last = Duration::ZERO;
        for _ in 0..2 * MOST_NUDGED {
            let nudge = content.nudge();
            assert!(nudge != last && nudge > Duration::ZERO);
            last = nudge;
        }
    }
}
