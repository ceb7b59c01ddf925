//! Who may believe for a while what he was told of a file.
//!
//! A lease is a promise to one session: until its term is over, or the session has given it back, no other session changes
//! the file (its attributes; its content too, if it is one). It is never given while another session changes the file or
//! has it open for writing (who opens it himself gets one with that). So a change takes back the leases of all others first, and waits: for them, at most for
//! the term. Who has it open for writing writes without asking any more, since nobody else can get a lease meanwhile.
//!
//! The term of who was told is counted from before he asked, ours from when we answer: his ends first. A server that begins
//! after another one does not know what that has promised, and lets nothing be changed until its term is over.
//!
//! Programs on this node know nothing of it. What they change is seen at the next open or look-up, which always ask. Where a
//! file is open already the kernel tells us of it, and the leases are asked back ([`super::notice`]), or it is seen at the
//! latest after the term (docs/design/files.md).

use super::notice::{self, Notices};
use super::passthrough::{MAPPED, Stays};
use super::session::{OpenFile, Session};
use super::stat;
use crate::lock;
use crate::mapped::Mapped;
use crate::message::{FileKey, Lease};
use rustix::fs::FileType;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long a lease lasts (DESIGN, section 5).
pub(crate) const TERM: Duration = Duration::from_secs(1);

/// The same, in milliseconds.
pub(crate) const MILLIS: u32 = 1000;

#[derive(Debug)]
struct Holder {
    session: Weak<Session>,
    /// The lease's.
    number: u64,
    end: Instant,
    /// It holds as long as the session renews it, and is asked back for changes after that too.
    lasts: bool,
    /// It was asked back.
    asked_back: bool,
}

impl Holder {
    /// Until when the session believes what it was told, if nothing is asked back.
    fn until(&self) -> Instant {
        let renewed = self.session.upgrade().filter(|_| self.lasts).and_then(|session| session.renewed());
        renewed.map_or(self.end, |renewed| self.end.max(renewed + TERM))
    }

    /// Whether the session is to hear of a change.
    fn is_to_hear(&self, now: Instant) -> bool {
        !self.asked_back && (self.lasts || self.end > now)
    }

    /// Asks for it. It is not renewed any more: who does not answer is not waited for for ever.
    fn ask_back(&mut self, of: FileKey, is_late: bool) {
        (self.end, self.lasts, self.asked_back) = (self.until(), false, true);
        if let Some(session) = self.session.upgrade() {
            session.recall(Lease { of, number: self.number, is_late });
        }
    }
}

#[derive(Debug, Default)]
struct Leased {
    /// By the number of the session.
    holders: HashMap<u64, Holder>,
    /// How often each session has it open for writing.
    writers: HashMap<u64, usize>,
    /// Changes under way, of each session.
    changing: HashMap<u64, usize>,
}

/// All leases of a node's files.
#[derive(Debug)]
pub(crate) struct Leases {
    /// Until when the promises of a server before this one may hold.
    inherited: Instant,
    files: Mutex<HashMap<FileKey, Leased>>,
    given_back: Condvar,
    count: AtomicU64,
    /// What programs of this node change, where the kernel tells.
    notices: OnceLock<Arc<Notices>>,
    /// How many leases were asked back for that.
    noticed: AtomicU64,
    /// What may be mapped by this node's own programs, and is closed.
    mapped: OnceLock<(Mapped<Stays>, Weak<Self>)>,
}

impl Leases {
    /// Those of a server that has just begun, and is the first or not.
    pub(crate) fn new(is_first: bool) -> Self {
        let inherited = if is_first { Instant::now() } else { Instant::now() + TERM };
        Self {
            inherited,
            files: Mutex::default(),
            given_back: Condvar::new(),
            count: AtomicU64::new(0),
            notices: OnceLock::new(),
            noticed: AtomicU64::new(0),
            mapped: OnceLock::new(),
        }
    }

    /// Hears of what programs of this node change, from now on and if the kernel tells.
    pub(crate) fn listen(self: &Arc<Self>) {
        match notice::listen(&Arc::downgrade(self)) {
            Ok(notices) => drop(self.notices.set(notices)),
            Err(error) => {
                tracing::info!(%error, "what programs of this node change is seen elsewhere after the term only");
            }
        }
    }

    /// Looks after what programs of this node have mapped, from now on.
    ///
    /// # Errors
    /// If there is no thread for it.
    pub(crate) fn look_after_mapped(self: &Arc<Self>) -> std::io::Result<()> {
        let _once = self.mapped.set((Mapped::look_after()?, Arc::downgrade(self)));
        Ok(())
    }

    /// Has the leases of a file asked back when a program of this node changes it; whether this one lasts. To be called when it has been
    /// granted, and before it is looked at.
    pub(crate) fn watch(&self, session: &Session, fd: impl AsFd, key: FileKey, kind: FileType) -> bool {
        let is_watched = self.notices.get().is_some_and(|notices| notices.watch(fd, key, kind));
        if !is_watched || !session.is_lasting() {
            return false;
        }
        let mut files = lock(&self.files);
        let holder = files.get_mut(&key).and_then(|file| file.holders.get_mut(&session.number));
        let lasts = holder.filter(|holder| !holder.asked_back).map(|holder| holder.lasts = true);
        lasts.is_some()
    }

    #[cfg(test)]
    pub(crate) fn notices(&self) -> &Notices {
        self.notices.get().unwrap()
    }

    /// All that was done on this node until now has been asked back when this returns.
    pub(crate) fn catch_up(&self) {
        if let Some(notices) = self.notices.get() {
            notices.catch_up(self);
        }
    }

    /// Lets all lasting leases of a session hold for another term, if what they are about is as it was.
    pub(crate) fn renew(&self, session: &Session) {
        // Whoever changes something from now on waits for that term, and whoever has done so has asked.
        let _files = lock(&self.files);
        session.renews();
    }

    /// These files are going to have no mark any more: they get another one if leases of them last.
    pub(crate) fn watch_again(&self, keys: &[FileKey]) {
        for key in keys {
            let lasting = {
                let files = lock(&self.files);
                let holders = files.get(key).into_iter().flat_map(|file| file.holders.values());
                holders.filter(|holder| holder.lasts).find_map(|holder| holder.session.upgrade())
            };
            let Some(session) = lasting else { continue };
            let is_watched = session.held(*key).is_some_and(|held| {
                let kind = stat::attributes(&held.fd).map(|is| FileType::from_raw_mode(is.mode));
                let notices = self.notices.get();
                kind.is_ok_and(|kind| notices.is_some_and(|notices| notices.watch(&held.fd, *key, kind)))
            });
            if !is_watched {
                self.unwatched(&[*key]);
            }
        }
    }

    /// Nobody hears any more of what is done to these files here: what lasts of their leases is asked back.
    fn unwatched(&self, keys: &[FileKey]) {
        let mut files = lock(&self.files);
        for key in keys {
            let Some(file) = files.get_mut(key) else { continue };
            file.holders
                .values_mut()
                .filter(|holder| holder.lasts)
                .for_each(|holder| holder.ask_back(*key, true));
        }
    }

    /// A session that gets no leases itself has this file open for writing, and will for some time: nobody else gets one until it has closed it, so nobody is to
    /// be told of what is done to it. To be said before that.
    pub(crate) fn ignore(&self, fd: impl AsFd, key: FileKey) {
        if let Some(notices) = self.notices.get() {
            notices.ignore(fd, key);
        }
    }

    /// A program of this node has changed a file: asks all leases of it back, and waits for nobody.
    pub(crate) fn noticed(&self, key: FileKey) {
        if let Some(file) = lock(&self.files).get_mut(&key) {
            self.ask_back(key, file);
        }
    }

    /// Programs of this node may have changed anything.
    pub(crate) fn noticed_all(&self) {
        for (key, file) in lock(&self.files).iter_mut() {
            self.ask_back(*key, file);
        }
    }

    fn ask_back(&self, key: FileKey, file: &mut Leased) {
        let now = Instant::now();
        for holder in file.holders.values_mut().filter(|holder| holder.is_to_hear(now)) {
            holder.ask_back(key, true);
            // The first one says that it works at all.
            if self.noticed.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::info!(
                    "a program of this node has changed what another one believes, which is told so"
                );
            }
        }
    }

    /// Promises a session that a file stays as it is; whether it did. To be asked for before the file is looked at.
    pub(crate) fn grant(&self, session: &Arc<Session>, key: FileKey) -> bool {
        if !session.listens() {
            return false;
        }
        let mut files = lock(&self.files);
        let file = files.entry(key).or_default();
        if file.changing.keys().chain(file.writers.keys()).any(|other| *other != session.number) {
            return false;
        }
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let end = Instant::now() + TERM;
        // What it has been told already is not told again.
        let lasts = file.holders.get(&session.number).is_some_and(|had| had.lasts);
        let holder = Holder { session: Arc::downgrade(session), number, end, lasts, asked_back: false };
        file.holders.insert(session.number, holder);
        true
    }

    /// Does what changes these files, when no other session believes anything of them any more. It is told whether that had to
    /// be waited for.
    pub(crate) fn change<T>(&self, session: &Session, keys: &[FileKey], act: impl FnOnce(bool) -> T) -> T {
        if keys.is_empty() {
            return act(false);
        }
        let mut files = lock(&self.files);
        for key in keys {
            *files.entry(*key).or_default().changing.entry(session.number).or_default() += 1;
        }
        let (mut asked, mut waited) = (false, false);
        loop {
            let now = Instant::now();
            let mut until = self.inherited;
            for key in keys {
                let Some(file) = files.get_mut(key) else { continue };
                for (_, mut holder) in file.holders.extract_if(|number, holder| {
                    holder.until() <= now && (!holder.lasts || *number != session.number)
                }) {
                    // It believes nothing now, but would again when it has renewed that.
                    if holder.lasts {
                        holder.ask_back(*key, true);
                    }
                }
                for (_, holder) in file.holders.iter_mut().filter(|(number, _)| **number != session.number) {
                    until = until.max(holder.until());
                    if !asked {
                        holder.ask_back(*key, false);
                    }
                }
            }
            asked = true;
            let left = until.saturating_duration_since(now);
            if left.is_zero() {
                break;
            }
            waited = true;
            files = self.given_back.wait_timeout(files, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(files);
        let _changing = Changing { leases: self, session: session.number, keys };
        act(waited)
    }

    /// Asks all leases back; nobody waits for them.
    pub(crate) fn recall_all(&self) {
        for (key, file) in &mut *lock(&self.files) {
            file.holders.values_mut().for_each(|holder| holder.ask_back(*key, false));
        }
    }

    /// A session has opened the file for writing; to be said while it is changing it.
    pub(crate) fn opened(&self, session: &Session, key: FileKey) {
        *lock(&self.files).entry(key).or_default().writers.entry(session.number).or_default() += 1;
    }

    /// It closes it again.
    pub(crate) fn closes(&self, session: &Session, file: &OpenFile) {
        if let Some((mapped, leases)) = self.mapped.get()
            && let Some(behind) = file.may_be_mapped()
        {
            *lock(&self.files).entry(file.key).or_default().writers.entry(MAPPED).or_default() += 1;
            mapped.take(behind, Stays(leases.clone(), file.key));
        }
        self.closed(session.number, file.key);
    }

    /// The session of this number has closed it.
    pub(super) fn closed(&self, session: u64, key: FileKey) {
        let mut files = lock(&self.files);
        let Some(file) = files.get_mut(&key) else { return };
        if let Some(count) = file.writers.get_mut(&session) {
            *count -= 1;
            if *count == 0 {
                file.writers.remove(&session);
            }
        }
    }

    /// A session believes nothing any more of what it believed under these. Under others of the same files it does: they may have
    /// been granted since these were asked back.
    pub(crate) fn given_back(&self, session: &Session, leases: &[Lease]) {
        let mut files = lock(&self.files);
        for lease in leases {
            if let Some(file) = files.get_mut(&lease.of) {
                file.holders.retain(|holder, held| *holder != session.number || held.number != lease.number);
            }
        }
        self.given_back.notify_all();
    }

    /// Forgets what is over, and the sessions that are not in this list any more.
    pub(crate) fn tidy(&self, there: &[u64]) {
        let now = Instant::now();
        lock(&self.files).retain(|_, file| {
            file.holders
                .retain(|session, holder| holder.end > now || holder.lasts && there.contains(session));
            file.writers.retain(|session, _| *session == MAPPED || there.contains(session));
            !file.changing.is_empty() || !file.holders.is_empty() || !file.writers.is_empty()
        });
    }
}

/// Files that are being changed, until that is over, in whatever way.
struct Changing<'a> {
    leases: &'a Leases,
    session: u64,
    keys: &'a [FileKey],
}

impl Drop for Changing<'_> {
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
    use super::super::budget::Budget;
    use super::super::export::Export;
    use super::*;
    use crate::message::Purpose;

    const KEY: FileKey = FileKey { volume: 1, device: 2, inode: 3 };

    fn session() -> Arc<Session> {
        let session = Session::new(&Export::default(), &Budget::new(10), Purpose::All).unwrap();
        session.hears(true);
        session
    }

    #[test]
    fn a_change_waits_for_the_others_to_give_back() {
        let (leases, reader, writer) = (Leases::new(true), session(), session());
        assert!(leases.grant(&reader, KEY));
        std::thread::scope(|scope| {
            let changing = scope.spawn(|| leases.change(&writer, &[KEY], |_| Instant::now()));
            let recalled = reader.recalled(TERM).unwrap().0;
            let given_back = Instant::now();
            assert_eq!(recalled, [Lease { of: KEY, number: 0, is_late: false }]);
            assert!(!leases.grant(&reader, KEY), "none while it is changed");
            leases.given_back(&reader, &recalled);
            assert!(changing.join().unwrap() >= given_back);
        });
        assert!(leases.grant(&reader, KEY));
    }

    #[test]
    fn who_does_not_answer_is_waited_for_until_his_term_is_over() {
        let (leases, reader, writer) = (Leases::new(true), session(), session());
        let begun = Instant::now();
        assert!(leases.grant(&reader, KEY));
        leases.change(&writer, &[KEY], |_| ());
        assert!(begun.elapsed() >= TERM);
    }

    #[test]
    fn what_was_granted_since_is_not_given_back() {
        let (leases, reader, writer) = (Leases::new(true), session(), session());
        assert!(leases.grant(&reader, KEY));
        // Its term is over before it is given back.
        leases.change(&writer, &[KEY], |_| ());
        assert!(leases.grant(&reader, KEY));
        leases.given_back(&reader, &reader.recalled(TERM).unwrap().0);
        let begun = Instant::now();
        leases.change(&writer, &[KEY], |_| ());
        assert!(begun.elapsed() >= TERM / 2, "it holds");
    }

    #[test]
    fn a_session_does_not_wait_for_itself_nor_for_a_server_that_has_just_begun() {
        let (leases, session) = (Leases::new(true), session());
        assert!(leases.grant(&session, KEY));
        let begun = Instant::now();
        leases.change(&session, &[KEY], |_| ());
        assert!(begun.elapsed() < TERM);
        let begun = Instant::now();
        Leases::new(false).change(&session, &[KEY], |_| ());
        assert!(begun.elapsed() >= TERM / 2, "the last server's promises hold");
    }

    #[test]
    fn nobody_believes_anything_of_what_another_has_open_for_writing() {
        let (leases, reader, writer) = (Leases::new(true), session(), session());
        leases.change(&writer, &[KEY], |_| {
            leases.opened(&writer, KEY);
            assert!(leases.grant(&writer, KEY), "he keeps what he opens");
            assert!(!leases.grant(&reader, KEY));
        });
        assert!(!leases.grant(&reader, KEY));
        assert!(leases.grant(&writer, KEY), "but he himself");
        leases.closed(writer.number, KEY);
        assert!(leases.grant(&reader, KEY));
        leases.change(&writer, &[FileKey { inode: 4, ..KEY }], |_| {
            leases.opened(&writer, FileKey { inode: 4, ..KEY });
        });
        leases.tidy(&[reader.number]);
        assert!(leases.grant(&reader, FileKey { inode: 4, ..KEY }), "nor of one whose session has gone");
    }

    /// Somebody who has a lease of that file which lasts.
    fn lasting(leases: &Leases) -> Arc<Session> {
        let session = Session::new(&Export::default(), &Budget::new(10), Purpose::Room).unwrap();
        session.hears(true);
        assert!(leases.grant(&session, KEY));
        let mut files = lock(&leases.files);
        let holder = files.get_mut(&KEY).unwrap().holders.get_mut(&session.number).unwrap();
        // Its term is over.
        (holder.lasts, holder.end) = (true, Instant::now());
        session
    }

    #[test]
    fn what_lasts_is_told_of_changes_when_its_term_is_over_and_waited_for_when_that_was_renewed() {
        let (leases, writer) = (Leases::new(true), session());
        let reader = lasting(&leases);
        leases.tidy(&[reader.number]);
        let begun = Instant::now();
        leases.change(&writer, &[KEY], |waited| assert!(!waited));
        assert!(begun.elapsed() < TERM / 2);
        assert_eq!(reader.recalled(Duration::ZERO).unwrap().0.len(), 1);
        // Once.
        leases.change(&writer, &[KEY], |_| ());
        assert_eq!((reader.recalled(Duration::ZERO).unwrap(), reader.told()), ((Vec::new(), 1), 1));

        let reader = lasting(&leases);
        leases.renew(&reader);
        let begun = Instant::now();
        leases.change(&writer, &[KEY], |_| ());
        assert!(begun.elapsed() >= TERM / 2, "it does not answer");
        // What it renews meanwhile is not that: nobody is waited for for ever.
        let reader = lasting(&leases);
        leases.renew(&reader);
        std::thread::scope(|scope| {
            let changing = scope.spawn(|| leases.change(&writer, &[KEY], |_| Instant::now()));
            let asked = reader.recalled(TERM).unwrap().0;
            assert_eq!(asked.len(), 1);
            let begun = Instant::now();
            while !changing.is_finished() {
                leases.renew(&reader);
                std::thread::sleep(TERM / 20);
                assert!(begun.elapsed() < 10 * TERM);
            }
        });
    }

    #[test]
    fn what_lasts_ends_with_its_mark_and_with_its_session() {
        let leases = Leases::new(true);
        let reader = lasting(&leases);
        leases.unwatched(&[KEY]);
        leases.noticed(KEY);
        assert_eq!(reader.recalled(Duration::ZERO).unwrap().0.len(), 1);
        let gone = lasting(&leases);
        leases.tidy(&[]);
        assert!(lock(&leases.files).get(&KEY).is_none_or(|file| file.holders.is_empty()));
        drop(gone);
    }

    #[test]
    fn who_does_not_listen_is_promised_nothing() {
        let (leases, session) = (Leases::new(true), session());
        session.hears(false);
        assert!(!leases.grant(&session, KEY));
    }
}
