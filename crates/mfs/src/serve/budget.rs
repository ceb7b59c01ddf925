//! How many descriptors all sessions may have together.
//!
//! Objects, open files and owners of locks take one each. When there are none left, objects are forgotten, which their clients look
//! up again: the oldest of the session that has most of them, so that one who walks a large tree pays for it himself.
//!
//! Locks: that of the sessions' list, then one session's objects. Who asks for a slot holds neither.

use super::session::Session;
use crate::lock;
use rustix::io::Errno;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The part of it that is made free at once, so that not each look-up must count what each session has.
const PART: usize = 1024;

/// So many descriptors.
#[derive(Debug)]
pub(crate) struct Budget {
    most: usize,
    used: AtomicUsize,
    sessions: Mutex<Vec<Weak<Session>>>,
}

/// One of them, as long as this is there.
#[derive(Debug)]
pub(crate) struct Slot(Arc<Budget>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Budget {
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, used: AtomicUsize::new(0), sessions: Mutex::default() })
    }

    /// This session's objects can be forgotten from now on.
    pub(crate) fn add(&self, session: &Arc<Session>) {
        let mut sessions = lock(&self.sessions);
        sessions.retain(|session| session.strong_count() > 0);
        sessions.push(Arc::downgrade(session));
    }

    /// One descriptor.
    ///
    /// # Errors
    /// `ENFILE` if all are taken by what is open.
    pub(crate) fn slot(self: &Arc<Self>) -> Result<Slot, Errno> {
        loop {
            let slot = Slot(self.clone());
            if self.used.fetch_add(1, Ordering::AcqRel) < self.most {
                return Ok(slot);
            }
            drop(slot);
            if !self.make_room() {
                return Err(Errno::NFILE);
            }
        }
    }

    fn make_room(&self) -> bool {
        let sessions = lock(&self.sessions);
        let mut sessions: Vec<_> = sessions.iter().filter_map(Weak::upgrade).collect();
        sessions.sort_by_cached_key(|session| std::cmp::Reverse(session.count()));
        // All that the first one has may be open.
        sessions.iter().any(|session| session.evict((self.most / PART).max(1)) > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::export::{Export, Place};
    use super::super::session::{Held, OpenFile};
    use super::*;
    use crate::message::{FileKey, Object, Opened, Purpose};
    use rustix::fs::{Mode, OFlags, open};
    use std::sync::OnceLock;

    fn key(inode: u64) -> FileKey {
        FileKey { volume: 1, device: 1, inode }
    }

    fn hold(session: &Session, inode: u64) -> Object {
        let fd = open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        session.hold(Held { fd, key: key(inode), place: Place::Inside }).unwrap()
    }

    fn keep(session: &Session, inode: u64) -> Result<Opened, Errno> {
        let fd = open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let flags = OFlags::RDONLY;
        session.keep(OpenFile {
            fd,
            key: key(inode),
            place: Place::Inside,
            flags,
            reading: Mutex::default(),
            behind: OnceLock::new(),
        })
    }

    #[test]
    fn who_has_most_gives_way() {
        let budget = Budget::new(20);
        let [large, small] =
            [(); 2].map(|()| Session::new(&Export::default(), &budget, Purpose::All).unwrap());
        let few: Vec<_> = (0..5).map(|n| hold(&small, n)).collect();
        let many: Vec<_> = (0..100).map(|n| hold(&large, n)).collect();
        assert_eq!((small.count(), large.count()), (5, 15));
        assert!(few.iter().all(|object| small.object(*object).is_some()));
        assert!(many[85..].iter().all(|object| large.object(*object).is_some()));
        // And who comes later has room at once.
        let more: Vec<_> = (5..10).map(|n| hold(&small, n)).collect();
        assert!(more.iter().all(|object| small.object(*object).is_some()));
        assert_eq!((small.count(), large.count()), (10, 10));
        drop(large);
        let late: Vec<_> = (10..20).map(|n| hold(&small, n)).collect();
        assert!(few.iter().chain(&late).all(|object| small.object(*object).is_some()));
    }

    #[test]
    fn what_is_worked_with_is_spared_once() {
        let budget = Budget::new(10);
        let session = Session::new(&Export::default(), &budget, Purpose::All).unwrap();
        let dir = hold(&session, 0);
        for inode in 1..100 {
            assert!(session.object(dir).is_some(), "a directory of whose files there are {inode}");
            hold(&session, inode);
        }
        // And nobody keeps others out by that for ever.
        let all: Vec<_> = (100..110).map(|inode| hold(&session, inode)).collect();
        assert!(all.iter().all(|object| session.object(*object).is_some()));
        assert!(session.object(hold(&session, 110)).is_some());
    }

    #[test]
    fn what_is_open_is_not_forgotten() {
        let budget = Budget::new(10);
        let session = Session::new(&Export::default(), &budget, Purpose::All).unwrap();
        let open = hold(&session, 0);
        let opened = keep(&session, 0).unwrap();
        for inode in 1..100 {
            hold(&session, inode);
        }
        assert!(session.object(open).is_some(), "its names may be gone");
        let all: Vec<_> = (0..8).map(|_| keep(&session, 0).unwrap()).collect();
        assert!(session.object(open).is_some());
        assert_eq!(session.count(), 1);
        assert_eq!(keep(&session, 0), Err(Errno::NFILE));
        for opened in all.into_iter().chain([opened]) {
            session.close(opened);
        }
        for inode in 1..21 {
            hold(&session, inode);
        }
        assert!(session.object(open).is_none());
    }
}
