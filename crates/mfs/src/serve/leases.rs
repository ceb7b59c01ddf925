//! Leases: for how long a client may rely on cached attributes and content of a file.
//!
//! A lease is a promise to one session: until its term ends, or the session returns it, no other
//! session changes the file (its attributes, and the content of a regular file). No lease is
//! granted while another session is changing the file or has it open for writing (the session that
//! opens it for writing gets a lease with the open). So a change first recalls the leases of all
//! other sessions, and waits until they are returned, at most for the term. A session that has the
//! file open for writing writes without further recalls, since no other session can get a lease
//! meanwhile.
//!
//! The client counts the term from before its request, the server from the grant, so the client's
//! term ends first. A server that replaces an earlier one does not know the leases that the earlier
//! one granted, and makes all changes wait until these leases have ended (NFS's grace period).
//!
//! Programs on this node take no leases. Without renewable leases, an open always reaches the
//! server, and so sees their changes. For files that are already open, and under renewable leases,
//! fanotify reports the change and the leases are recalled ([`super::fanotify`]). Changes that
//! fanotify cannot report are seen when the term has ended (docs/design/files.md).

use super::fanotify::{self, ChangeWatcher};
use super::session::Session;
use super::stat;
use crate::lock;
use crate::message::{FileKey, Lease};
use rustix::fs::FileType;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Term of a lease (docs/design/files.md).
pub(crate) const TERM: Duration = Duration::from_secs(1);

/// The term in milliseconds.
pub(crate) const TERM_MS: u32 = 1000;

#[derive(Debug)]
struct Holder {
    session: Weak<Session>,
    /// Number of the lease.
    number: u64,
    end: Instant,
    /// It holds for as long as the session renews it, and is recalled for changes even after its
    /// term.
    is_renewable: bool,
    /// A recall was queued.
    is_recalled: bool,
}

impl Holder {
    /// Until when the session may rely on the lease, if it does not return it earlier.
    fn valid_until(&self) -> Instant {
        let session = self.session.upgrade().filter(|_| self.is_renewable);
        let renewed_at = session.and_then(|session| session.renewed_at());
        renewed_at.map_or(self.end, |renewed_at| self.end.max(renewed_at + TERM))
    }

    /// Whether the session must be notified of a change.
    fn must_be_notified(&self, now: Instant) -> bool {
        !self.is_recalled && (self.is_renewable || self.end > now)
    }

    /// Recalls the lease and ends its renewal, so that a change never waits longer than one term.
    fn recall(&mut self, file: FileKey, is_after_change: bool) {
        (self.end, self.is_renewable, self.is_recalled) = (self.valid_until(), false, true);
        if let Some(session) = self.session.upgrade() {
            session.recall(Lease { file, number: self.number, is_after_change });
        }
    }
}

#[derive(Debug, Default)]
struct FileLeases {
    /// By session number.
    holders: HashMap<u64, Holder>,
    /// How many times each session has the file open for writing.
    writers: HashMap<u64, usize>,
    /// Number of changes in progress, by session.
    changing: HashMap<u64, usize>,
}

/// The leases of all files of this node.
#[derive(Debug)]
pub(crate) struct LeaseTable {
    /// Until when leases of an earlier server may hold.
    grace_end: Instant,
    files: Mutex<HashMap<FileKey, FileLeases>>,
    returned: Condvar,
    next_number: AtomicU64,
    /// Reports changes by programs of this node, where the kernel supports that.
    watcher: OnceLock<Arc<ChangeWatcher>>,
    /// Number of leases recalled for such changes.
    recalled_for_local_changes: AtomicU64,
}

impl LeaseTable {
    /// Creates the table of a server that has just started. `is_first`: no earlier server can have
    /// granted leases.
    pub(crate) fn new(is_first: bool) -> Self {
        let grace_end = if is_first { Instant::now() } else { Instant::now() + TERM };
        Self {
            grace_end,
            files: Mutex::default(),
            returned: Condvar::new(),
            next_number: AtomicU64::new(0),
            watcher: OnceLock::new(),
            recalled_for_local_changes: AtomicU64::new(0),
        }
    }

    /// Starts to watch for changes by programs of this node, if the kernel supports it.
    pub(crate) fn watch_local_changes(self: &Arc<Self>) {
        match fanotify::start(&Arc::downgrade(self)) {
            Ok(watcher) => drop(self.watcher.set(watcher)),
            Err(error) => {
                tracing::info!(%error, "no fanotify: local changes are seen elsewhere when leases end");
            }
        }
    }

    /// Watches a file for changes by programs of this node. Returns whether the session's lease is
    /// renewable. Must be called after the lease was granted, and before the file's attributes are
    /// read.
    pub(crate) fn watch(&self, session: &Session, fd: impl AsFd, key: FileKey, kind: FileType) -> bool {
        let is_watched = self.watcher.get().is_some_and(|watcher| watcher.watch(fd, key, kind));
        if !is_watched || !session.uses_renewable_leases() {
            return false;
        }
        let mut files = lock(&self.files);
        let holder = files.get_mut(&key).and_then(|file| file.holders.get_mut(&session.number));
        let renewable = holder.filter(|holder| !holder.is_recalled).map(|holder| holder.is_renewable = true);
        renewable.is_some()
    }

    #[cfg(test)]
    pub(crate) fn watcher(&self) -> &ChangeWatcher {
        self.watcher.get().unwrap()
    }

    /// When this returns, leases have been recalled for everything that was done on this node
    /// before the call.
    pub(crate) fn drain_events(&self) {
        if let Some(watcher) = self.watcher.get() {
            watcher.drain_events(self);
        }
    }

    /// Renews the renewable leases of a session, except those that were recalled.
    pub(crate) fn renew(&self, session: &Session) {
        // Under the lock: a later change waits for the new term, and an earlier one has already
        // recalled its leases.
        let _files = lock(&self.files);
        session.renew();
    }

    /// Marks again those of these files that have renewable leases, since their old marks are about
    /// to be removed. If a file cannot be marked, recalls its renewable leases.
    pub(crate) fn rewatch(&self, keys: &[FileKey]) {
        for key in keys {
            let session = {
                let files = lock(&self.files);
                let holders = files.get(key).into_iter().flat_map(|file| file.holders.values());
                holders.filter(|holder| holder.is_renewable).find_map(|holder| holder.session.upgrade())
            };
            let Some(session) = session else { continue };
            let is_watched = session.object_with_key(*key).is_some_and(|held| {
                let kind =
                    stat::attributes(&held.fd).map(|attributes| FileType::from_raw_mode(attributes.mode));
                let watcher = self.watcher.get();
                kind.is_ok_and(|kind| watcher.is_some_and(|watcher| watcher.watch(&held.fd, *key, kind)))
            });
            if !is_watched {
                self.recall_renewable(&[*key]);
            }
        }
    }

    /// Recalls the renewable leases of files that are no longer watched.
    fn recall_renewable(&self, keys: &[FileKey]) {
        let mut files = lock(&self.files);
        for key in keys {
            let Some(file) = files.get_mut(key) else { continue };
            file.holders
                .values_mut()
                .filter(|holder| holder.is_renewable)
                .for_each(|holder| holder.recall(*key, true));
        }
    }

    /// Stops watching a file that a session without leases is about to keep open for writing: no
    /// other session gets a lease until it is closed. Must be called before the first write.
    pub(crate) fn unwatch(&self, fd: impl AsFd, key: FileKey) {
        if let Some(watcher) = self.watcher.get() {
            watcher.unwatch(fd, key);
        }
    }

    /// Recalls all leases of a file that a program of this node has changed, without waiting for
    /// their return.
    pub(crate) fn recall_changed(&self, key: FileKey) {
        if let Some(file) = lock(&self.files).get_mut(&key) {
            self.recall_after_change(key, file);
        }
    }

    /// Recalls all leases after events were lost: programs of this node may have changed any file.
    pub(crate) fn recall_all_changed(&self) {
        for (key, file) in lock(&self.files).iter_mut() {
            self.recall_after_change(*key, file);
        }
    }

    fn recall_after_change(&self, key: FileKey, file: &mut FileLeases) {
        let now = Instant::now();
        for holder in file.holders.values_mut().filter(|holder| holder.must_be_notified(now)) {
            holder.recall(key, true);
            // Logged once, to show that recalls work.
            if self.recalled_for_local_changes.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::info!("a local program has changed a leased file; its leases are recalled");
            }
        }
    }

    /// Grants a session a lease of a file; false if it cannot have one. Must be called before the
    /// file's attributes are read.
    pub(crate) fn grant(&self, session: &Arc<Session>, key: FileKey) -> bool {
        if !session.has_callback() {
            return false;
        }
        let mut files = lock(&self.files);
        let file = files.entry(key).or_default();
        if file.changing.keys().chain(file.writers.keys()).any(|other| *other != session.number) {
            return false;
        }
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let end = Instant::now() + TERM;
        // A lease that is already renewable stays so.
        let is_renewable = file.holders.get(&session.number).is_some_and(|earlier| earlier.is_renewable);
        let session_ref = Arc::downgrade(session);
        let holder = Holder { session: session_ref, number, end, is_renewable, is_recalled: false };
        file.holders.insert(session.number, holder);
        true
    }

    /// Runs `act`, which changes these files, after all other sessions have returned their leases.
    /// `act` receives whether that took any waiting.
    pub(crate) fn change<T>(&self, session: &Session, keys: &[FileKey], act: impl FnOnce(bool) -> T) -> T {
        if keys.is_empty() {
            return act(false);
        }
        let mut files = lock(&self.files);
        for key in keys {
            *files.entry(*key).or_default().changing.entry(session.number).or_default() += 1;
        }
        let (mut has_recalled, mut has_waited) = (false, false);
        loop {
            let now = Instant::now();
            let mut wait_until = self.grace_end;
            for key in keys {
                let Some(file) = files.get_mut(key) else { continue };
                for (_, mut holder) in file.holders.extract_if(|number, holder| {
                    holder.valid_until() <= now && (!holder.is_renewable || *number != session.number)
                }) {
                    // The lease has ended, but the session's next renewal would revive it.
                    if holder.is_renewable {
                        holder.recall(*key, true);
                    }
                }
                for (_, holder) in file.holders.iter_mut().filter(|(number, _)| **number != session.number) {
                    wait_until = wait_until.max(holder.valid_until());
                    if !has_recalled {
                        holder.recall(*key, false);
                    }
                }
            }
            has_recalled = true;
            let left = wait_until.saturating_duration_since(now);
            if left.is_zero() {
                break;
            }
            has_waited = true;
            files = self.returned.wait_timeout(files, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(files);
        let _guard = ChangeGuard { leases: self, session: session.number, keys };
        act(has_waited)
    }

    /// Recalls all leases, without waiting.
    pub(crate) fn recall_all(&self) {
        for (key, file) in &mut *lock(&self.files) {
            file.holders.values_mut().for_each(|holder| holder.recall(*key, false));
        }
    }

    /// Counts a session that opens the file for writing. Must be called during a
    /// [`change`](Self::change) of the file.
    pub(crate) fn add_writer(&self, session: &Session, key: FileKey) {
        *lock(&self.files).entry(key).or_default().writers.entry(session.number).or_default() += 1;
    }

    /// A session closes a file that it had open for writing.
    pub(crate) fn close_writer(&self, session: &Session, key: FileKey) {
        let mut files = lock(&self.files);
        let Some(file) = files.get_mut(&key) else { return };
        if let Some(count) = file.writers.get_mut(&session.number) {
            *count -= 1;
            if *count == 0 {
                file.writers.remove(&session.number);
            }
        }
    }

    /// A session returns these leases. Later leases of the same files stay: they may have been
    /// granted since the recall.
    pub(crate) fn return_leases(&self, session: &Session, leases: &[Lease]) {
        let mut files = lock(&self.files);
        for lease in leases {
            if let Some(file) = files.get_mut(&lease.file) {
                file.holders.retain(|holder, held| *holder != session.number || held.number != lease.number);
            }
        }
        self.returned.notify_all();
    }

    /// Removes leases whose term has ended, unless they are renewable and belong to one of these
    /// sessions; also removes the writers of all other sessions.
    pub(crate) fn expire(&self, sessions: &[u64]) {
        let now = Instant::now();
        lock(&self.files).retain(|_, file| {
            file.holders.retain(|session, holder| {
                holder.end > now || holder.is_renewable && sessions.contains(session)
            });
            file.writers.retain(|session, _| sessions.contains(session));
            !file.changing.is_empty() || !file.holders.is_empty() || !file.writers.is_empty()
        });
    }
}

/// Marks files as being changed, until this is dropped.
struct ChangeGuard<'a> {
    leases: &'a LeaseTable,
    session: u64,
    keys: &'a [FileKey],
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        let mut files = lock(&self.leases.files);
        for key in self.keys {
            let Some(file) = files.get_mut(key) else { continue };
            if let Some(count) = file.changing.get_mut(&self.session) {
                *count -= 1;
                if *count == 0 {
                    file.changing.remove(&self.session);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::budget::FdBudget;
    use super::super::export::Export;
    use super::*;
    use crate::message::Purpose;

    const KEY: FileKey = FileKey { volume: 1, device: 2, inode: 3 };

    fn session() -> Arc<Session> {
        let session = Session::new(&Export::default(), &FdBudget::new(10), Purpose::All).unwrap();
        session.set_callback(true);
        session
    }

    #[test]
    fn change_waits_until_other_sessions_return_their_leases() {
        let (leases, reader, writer) = (LeaseTable::new(true), session(), session());
        assert!(leases.grant(&reader, KEY));
        std::thread::scope(|scope| {
            let changing = scope.spawn(|| leases.change(&writer, &[KEY], |_| Instant::now()));
            let recalled = reader.next_recalls(TERM).unwrap().0;
            let returned = Instant::now();
            assert_eq!(recalled, [Lease { file: KEY, number: 0, is_after_change: false }]);
            assert!(!leases.grant(&reader, KEY), "granted during a change");
            leases.return_leases(&reader, &recalled);
            assert!(changing.join().unwrap() >= returned);
        });
        assert!(leases.grant(&reader, KEY));
    }

    #[test]
    fn change_waits_at_most_a_term_for_an_unreturned_lease() {
        let (leases, reader, writer) = (LeaseTable::new(true), session(), session());
        let begun = Instant::now();
        assert!(leases.grant(&reader, KEY));
        leases.change(&writer, &[KEY], |_| ());
        assert!(begun.elapsed() >= TERM);
    }

    #[test]
    fn returning_an_old_lease_keeps_a_newer_one() {
        let (leases, reader, writer) = (LeaseTable::new(true), session(), session());
        assert!(leases.grant(&reader, KEY));
        // The term ends before it is returned.
        leases.change(&writer, &[KEY], |_| ());
        assert!(leases.grant(&reader, KEY));
        leases.return_leases(&reader, &reader.next_recalls(TERM).unwrap().0);
        let begun = Instant::now();
        leases.change(&writer, &[KEY], |_| ());
        assert!(begun.elapsed() >= TERM / 2, "the newer lease holds");
    }

    #[test]
    fn change_waits_for_an_earlier_servers_leases_but_not_for_its_own() {
        let (leases, session) = (LeaseTable::new(true), session());
        assert!(leases.grant(&session, KEY));
        let begun = Instant::now();
        leases.change(&session, &[KEY], |_| ());
        assert!(begun.elapsed() < TERM);
        let begun = Instant::now();
        LeaseTable::new(false).change(&session, &[KEY], |_| ());
        assert!(begun.elapsed() >= TERM / 2, "an earlier server's leases may hold");
    }

    #[test]
    fn no_lease_of_a_file_that_another_session_has_open_for_writing() {
        let (leases, reader, writer) = (LeaseTable::new(true), session(), session());
        leases.change(&writer, &[KEY], |_| {
            leases.add_writer(&writer, KEY);
            assert!(leases.grant(&writer, KEY), "the writer gets a lease");
            assert!(!leases.grant(&reader, KEY));
        });
        assert!(!leases.grant(&reader, KEY));
        assert!(leases.grant(&writer, KEY), "the writer gets a lease");
        leases.close_writer(&writer, KEY);
        assert!(leases.grant(&reader, KEY));
        leases.change(&writer, &[FileKey { inode: 4, ..KEY }], |_| {
            leases.add_writer(&writer, FileKey { inode: 4, ..KEY });
        });
        leases.expire(&[reader.number]);
        assert!(leases.grant(&reader, FileKey { inode: 4, ..KEY }), "the writer's session is gone");
    }

    /// A session with a renewable lease whose term has ended.
    fn session_with_renewable_lease(leases: &LeaseTable) -> Arc<Session> {
        let session = Session::new(&Export::default(), &FdBudget::new(10), Purpose::Container).unwrap();
        session.set_callback(true);
        assert!(leases.grant(&session, KEY));
        let mut files = lock(&leases.files);
        let holder = files.get_mut(&KEY).unwrap().holders.get_mut(&session.number).unwrap();
        (holder.is_renewable, holder.end) = (true, Instant::now());
        session
    }

    #[test]
    fn renewable_lease_is_recalled_after_its_term_and_waited_for_if_renewed() {
        let (leases, writer) = (LeaseTable::new(true), session());
        let reader = session_with_renewable_lease(&leases);
        leases.expire(&[reader.number]);
        let begun = Instant::now();
        leases.change(&writer, &[KEY], |has_waited| assert!(!has_waited));
        assert!(begun.elapsed() < TERM / 2);
        assert_eq!(reader.next_recalls(Duration::ZERO).unwrap().0.len(), 1);
        // A lease is recalled only once.
        leases.change(&writer, &[KEY], |_| ());
        assert_eq!(
            (reader.next_recalls(Duration::ZERO).unwrap(), reader.recall_count()),
            ((Vec::new(), 1), 1)
        );

        let reader = session_with_renewable_lease(&leases);
        leases.renew(&reader);
        let begun = Instant::now();
        leases.change(&writer, &[KEY], |_| ());
        assert!(begun.elapsed() >= TERM / 2, "did not wait for the renewed lease");
        // Renewals after the recall are ignored: a change does not wait for ever.
        let reader = session_with_renewable_lease(&leases);
        leases.renew(&reader);
        std::thread::scope(|scope| {
            let changing = scope.spawn(|| leases.change(&writer, &[KEY], |_| Instant::now()));
            let recalls = reader.next_recalls(TERM).unwrap().0;
            assert_eq!(recalls.len(), 1);
            let begun = Instant::now();
            while !changing.is_finished() {
                leases.renew(&reader);
                std::thread::sleep(TERM / 20);
                assert!(begun.elapsed() < 10 * TERM);
            }
        });
    }

    #[test]
    fn renewable_lease_ends_with_its_mark_and_its_session() {
        let leases = LeaseTable::new(true);
        let reader = session_with_renewable_lease(&leases);
        leases.recall_renewable(&[KEY]);
        leases.recall_changed(KEY);
        assert_eq!(reader.next_recalls(Duration::ZERO).unwrap().0.len(), 1);
        let closed = session_with_renewable_lease(&leases);
        leases.expire(&[]);
        assert!(lock(&leases.files).get(&KEY).is_none_or(|file| file.holders.is_empty()));
        drop(closed);
    }

    #[test]
    fn no_lease_without_a_callback_channel() {
        let (leases, session) = (LeaseTable::new(true), session());
        session.set_callback(false);
        assert!(!leases.grant(&session, KEY));
    }
}
