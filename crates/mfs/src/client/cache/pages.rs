//! The pages that the kernel caches of a file, and how replies invalidate them.
//!
//! The kernel drops a file's pages when it is opened without `FOPEN_KEEP_CACHE`, and when a reply
//! carries an mtime or size that differs from the cached one (`FUSE_AUTO_INVAL_DATA`). So replies
//! invalidate pages before the kernel continues. A notification (`FUSE_NOTIFY_INVAL_INODE`) sent
//! while the kernel waits for a reply would not work: the kernel then ignores the attributes in
//! that reply as outdated, and continues with the old size.

use crate::client::cache::validity::FileVersion;
use crate::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long the kernel may take to process a reply and drop the old pages.
pub(crate) const REPLY_SETTLE_TIME: Duration = Duration::from_millis(20);

/// Upper bound (ns) of the offset added to an mtime to make it differ.
const MAX_MTIME_OFFSET: u64 = 1000;

/// The state of one file's pages in the kernel.
#[derive(Debug, Default)]
pub(crate) struct CachedPages {
    /// `None` until an open of the file allows the kernel to cache pages.
    current: Mutex<Option<PageVersion>>,
    /// Number of open files here.
    open_count: AtomicUsize,
    /// An attribute invalidation was sent while the file was open. The kernel may have ignored a
    /// reply that was to invalidate pages, so pages of an old version may be left.
    is_suspect: AtomicBool,
    mtime_offsets: AtomicU64,
}

#[derive(Debug)]
struct PageVersion {
    /// The version of the pages, if known.
    version: Option<FileVersion>,
    /// From this moment on no page of another version is left.
    valid_from: Instant,
}

impl CachedPages {
    /// The version of the kernel's pages is unknown from now on.
    pub(crate) fn forget_version(&self) {
        if let Some(current) = &mut *lock(&self.current) {
            current.version = None;
        }
    }

    /// The kernel's attributes are being invalidated, so the kernel ignores replies in flight. If
    /// the file is open, its pages are taken to be outdated from now on. Each read drops them,
    /// until the file is opened while no other open of it exists.
    pub(crate) fn note_attribute_invalidation(&self) {
        self.forget_version();
        self.is_suspect.store(self.is_open(), Ordering::Release);
    }

    /// The file is being opened, and the kernel drops all of its pages.
    pub(crate) fn note_drop(&self) {
        if self.open_count.load(Ordering::Acquire) == 1 {
            self.is_suspect.store(false, Ordering::Release);
        }
    }

    /// Whether the version of the kernel's pages is known.
    pub(crate) fn is_version_known(&self) -> bool {
        !self.is_suspect() && lock(&self.current).as_ref().is_some_and(|current| current.version.is_some())
    }

    fn is_suspect(&self) -> bool {
        self.is_suspect.load(Ordering::Acquire)
    }

    /// Whether all pages that the kernel may have are of this version.
    pub(crate) fn has_only(&self, version: Option<FileVersion>) -> bool {
        match &*lock(&self.current) {
            None => true,
            _ if self.is_suspect() => false,
            Some(current) => {
                current.version.is_some()
                    && current.version == version
                    && current.valid_from <= Instant::now()
            }
        }
    }

    /// The kernel may cache pages of this version from now on. It drops pages of other versions
    /// when it processes the reply; until then other replies must invalidate them as well.
    ///
    /// Data that the kernel reads after it has dropped its pages is never older than the reply. So
    /// no page is older than this version, even if two replies race or the file is written
    /// meanwhile.
    pub(crate) fn set_version(&self, version: Option<FileVersion>) {
        let now = Instant::now();
        match &mut *lock(&self.current) {
            // The kernel has no pages yet.
            current @ None => *current = Some(PageVersion { version, valid_from: now }),
            Some(current) if current.version.is_some() && current.version == version => {}
            Some(current) => *current = PageVersion { version, valid_from: now + REPLY_SETTLE_TIME },
        }
    }

    /// Whether the file is open here. If not, no process can read the cached pages.
    pub(crate) fn is_open(&self) -> bool {
        self.open_count.load(Ordering::Acquire) > 0
    }

    pub(crate) fn note_open(&self) {
        self.open_count.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn note_close(&self) {
        self.open_count.fetch_sub(1, Ordering::AcqRel);
    }

    /// An offset for an mtime that must differ from the one the kernel has: never zero, and never
    /// the same twice in a row.
    pub(crate) fn next_mtime_offset(&self) -> Duration {
        Duration::from_nanos(1 + self.mtime_offsets.fetch_add(1, Ordering::Relaxed) % MAX_MTIME_OFFSET)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Timespec;

    fn version(seconds: i64) -> Option<FileVersion> {
        Some(FileVersion::at_time(Timespec { seconds, nanos: 0 }))
    }

    #[test]
    fn new_version_is_valid_only_after_the_old_pages_are_dropped() {
        let pages = CachedPages::default();
        assert!(pages.has_only(version(1)), "the kernel has no pages yet");
        pages.set_version(version(1));
        assert!(pages.has_only(version(1)) && !pages.has_only(version(2)));
        pages.set_version(version(2));
        assert!(!pages.has_only(version(2)), "old pages may be left");
        std::thread::sleep(REPLY_SETTLE_TIME);
        assert!(pages.has_only(version(2)) && !pages.has_only(version(1)));
        pages.forget_version();
        assert!(!pages.has_only(version(2)));
        pages.set_version(None);
        std::thread::sleep(REPLY_SETTLE_TIME);
        assert!(!pages.has_only(None), "an unknown version equals no version");
    }

    #[test]
    fn pages_stay_suspect_until_an_exclusive_open() {
        let pages = CachedPages::default();
        pages.note_open();
        pages.set_version(version(1));
        pages.note_attribute_invalidation();
        pages.set_version(version(2));
        std::thread::sleep(REPLY_SETTLE_TIME);
        assert!(!pages.has_only(version(2)) && !pages.is_version_known());
        pages.note_open();
        pages.note_drop();
        assert!(!pages.has_only(version(2)), "another open file may have a request in flight");
        pages.note_close();
        pages.note_drop();
        assert!(pages.has_only(version(2)));
        pages.note_close();
        pages.note_attribute_invalidation();
        pages.set_version(version(3));
        std::thread::sleep(REPLY_SETTLE_TIME);
        assert!(pages.has_only(version(3)), "the file is not open");
    }

    #[test]
    fn mtime_offsets_never_repeat_in_a_row() {
        let pages = CachedPages::default();
        let mut last = Duration::ZERO;
        for _ in 0..2 * MAX_MTIME_OFFSET {
            let offset = pages.next_mtime_offset();
            assert!(offset != last && offset > Duration::ZERO);
            last = offset;
        }
    }
}
