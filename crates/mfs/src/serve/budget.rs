//! Limits the number of descriptors that all sessions hold together.
//!
//! Objects, open files and lock owners take one each. When the limit is reached, the session with
//! the most objects forgets its oldest ones, and its client looks them up again. So a walk through
//! a large tree evicts its own objects.
//!
//! Lock order: the list of sessions, then the objects of one session. A caller of
//! [`FdBudget::acquire`] holds neither.

use super::session::Session;
use crate::lock;
use rustix::io::Errno;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The share of the budget that is freed at once (1/1024), so that not every lookup has to compare
/// all sessions.
const EVICTION_DIVISOR: usize = 1024;

/// The budget.
#[derive(Debug)]
pub(crate) struct FdBudget {
    limit: usize,
    used: AtomicUsize,
    sessions: Mutex<Vec<Weak<Session>>>,
}

/// Permission for one descriptor, until this is dropped.
#[derive(Debug)]
pub(crate) struct FdPermit(Arc<FdBudget>);

impl Drop for FdPermit {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::AcqRel);
    }
}

impl FdBudget {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0), sessions: Mutex::default() })
    }

    /// Allows objects of this session to be evicted.
    pub(crate) fn add(&self, session: &Arc<Session>) {
        let mut sessions = lock(&self.sessions);
        sessions.retain(|session| session.strong_count() > 0);
        sessions.push(Arc::downgrade(session));
    }

    /// Takes one descriptor from the budget, evicting objects if it is exhausted.
    ///
    /// # Errors
    /// `ENFILE` if open files and lock owners have taken all.
    pub(crate) fn acquire(self: &Arc<Self>) -> Result<FdPermit, Errno> {
        loop {
            let permit = FdPermit(self.clone());
            if self.used.fetch_add(1, Ordering::AcqRel) < self.limit {
                return Ok(permit);
            }
            drop(permit);
            if !self.evict() {
                return Err(Errno::NFILE);
            }
        }
    }

    fn evict(&self) -> bool {
        let sessions = lock(&self.sessions);
        let mut sessions: Vec<_> = sessions.iter().filter_map(Weak::upgrade).collect();
        sessions.sort_by_cached_key(|session| std::cmp::Reverse(session.object_count()));
        // The largest session may have only open objects.
        sessions.iter().any(|session| session.evict((self.limit / EVICTION_DIVISOR).max(1)) > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::export::{Export, ExportPosition};
    use super::super::session::{HeldObject, OpenFile};
    use super::*;
    use crate::message::{FileKey, Object, OpenId, Purpose};
    use rustix::fs::{Mode, OFlags, open};

    fn key(inode: u64) -> FileKey {
        FileKey { volume: 1, device: 1, inode }
    }

    fn hold(session: &Session, inode: u64) -> Object {
        let fd = open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        session.hold(HeldObject { fd, key: key(inode), position: ExportPosition::Exported }).unwrap()
    }

    fn open_file(session: &Session, inode: u64) -> Result<OpenId, Errno> {
        let fd = open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let flags = OFlags::RDONLY;
        session.insert_open(OpenFile {
            fd,
            key: key(inode),
            position: ExportPosition::Exported,
            flags,
            reading: Mutex::default(),
        })
    }

    #[test]
    fn largest_session_is_evicted_first() {
        let budget = FdBudget::new(20);
        let [large, small] =
            [(); 2].map(|()| Session::new(&Export::default(), &budget, Purpose::All).unwrap());
        let few: Vec<_> = (0..5).map(|n| hold(&small, n)).collect();
        let many: Vec<_> = (0..100).map(|n| hold(&large, n)).collect();
        assert_eq!((small.object_count(), large.object_count()), (5, 15));
        assert!(few.iter().all(|object| small.object(*object).is_some()));
        assert!(many[85..].iter().all(|object| large.object(*object).is_some()));
        // The smaller session gets room at once: objects of the larger one are evicted.
        let more: Vec<_> = (5..10).map(|n| hold(&small, n)).collect();
        assert!(more.iter().all(|object| small.object(*object).is_some()));
        assert_eq!((small.object_count(), large.object_count()), (10, 10));
        drop(large);
        let late: Vec<_> = (10..20).map(|n| hold(&small, n)).collect();
        assert!(few.iter().chain(&late).all(|object| small.object(*object).is_some()));
    }

    #[test]
    fn used_object_is_spared_once() {
        let budget = FdBudget::new(10);
        let session = Session::new(&Export::default(), &budget, Purpose::All).unwrap();
        let dir = hold(&session, 0);
        for inode in 1..100 {
            assert!(session.object(dir).is_some(), "directory forgotten after {inode} lookups in it");
            hold(&session, inode);
        }
        // But a used object is not kept for ever.
        let all: Vec<_> = (100..110).map(|inode| hold(&session, inode)).collect();
        assert!(all.iter().all(|object| session.object(*object).is_some()));
        assert!(session.object(hold(&session, 110)).is_some());
    }

    #[test]
    fn open_file_is_not_evicted() {
        let budget = FdBudget::new(10);
        let session = Session::new(&Export::default(), &budget, Purpose::All).unwrap();
        let open = hold(&session, 0);
        let opened = open_file(&session, 0).unwrap();
        for inode in 1..100 {
            hold(&session, inode);
        }
        assert!(session.object(open).is_some(), "an open file was forgotten");
        let all: Vec<_> = (0..8).map(|_| open_file(&session, 0).unwrap()).collect();
        assert!(session.object(open).is_some());
        assert_eq!(session.object_count(), 1);
        assert_eq!(open_file(&session, 0), Err(Errno::NFILE));
        for opened in all.into_iter().chain([opened]) {
            session.close(opened);
        }
        for inode in 1..21 {
            hold(&session, inode);
        }
        assert!(session.object(open).is_none());
    }
}
