//! What is believed of a node's files for longer than a term: under leases that last ([`Attributes::lasts`]).
//!
//! A tree that goes by them (`tern-mfs mount --lasting`: the room of a home's commands) does not ask at each open and for each name that is
//! not there, as others do. It asks once whether its leases still hold, when a term is over, or when it is told to ([`Peer::catches_up`]:
//! before a command begins, before it hears something from home). The server has heard by then of all that was done there, and its answer
//! says how many leases were asked back until then, as each of its answers does: who has not heard of all these yet waits for them. So
//! whatever is seen here, nothing is believed any more that was over before that; docs/design/files.md.

use super::belief::Before;
use super::inode::{Inode, LONGER};
use super::peer::Peer;
use super::unsaved::Boot;
use crate::lock;
use crate::message::{Attributes, Caller, Name, Opened, Release};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long what was renewed is gone by: somewhat less than the term.
const HOLDS: Duration = Duration::from_millis(800);

/// How long it is waited for what was asked back, and is known to be on its way.
const ON_ITS_WAY: Duration = Duration::from_secs(1);

/// How long after something was asked back others are taken to be at work there. The kernel believes no name in it meanwhile: each change
/// would have it forget all names.
const AT_WORK: Duration = Duration::from_secs(2);

/// The most names that are kept of one directory.
const MOST_NAMES: usize = 4096;

/// The most files of a node that are left open, to be opened again without asking.
const MOST_KEPT: usize = 2048;

/// How things stand between us and a node.
#[derive(Debug, Default)]
pub(crate) struct Term {
    ear: Mutex<Ear>,
    heard: Condvar,
    /// When the leases were renewed last: from before that was asked.
    renewed: Mutex<Option<Instant>>,
    /// One at a time renews them because a term is over.
    renewing: Mutex<()>,
    /// How often all that was believed was void.
    voids: AtomicU64,
    kept: AtomicUsize,
}

#[derive(Debug, Default)]
struct Ear {
    /// It hears what is asked back.
    listens: bool,
    /// How many leases were asked back so far.
    told: u64,
}

impl Term {
    /// The ear has heard of all leases that were asked back until this one, and nothing is believed by them any more.
    pub(crate) fn hears(&self, told: u64) {
        *lock(&self.ear) = Ear { listens: true, told };
        self.heard.notify_all();
    }

    /// Nothing is believed any more, and nothing more until the ear hears again.
    pub(crate) fn is_void(&self) {
        self.voids.fetch_add(1, Ordering::AcqRel);
        lock(&self.ear).listens = false;
        self.heard.notify_all();
    }

    /// Waits until so many were heard of; false if that takes too long.
    fn wait(&self, told: u64) -> bool {
        let behind = |ear: &mut Ear| ear.listens && ear.told < told;
        let ear = lock(&self.ear);
        let waited = self.heard.wait_timeout_while(ear, ON_ITS_WAY, behind);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn is_current(&self) -> Option<Instant> {
        lock(&self.renewed).filter(|renewed| renewed.elapsed() < HOLDS)
    }
}

impl Peer {
    /// An answer has come by which so many leases had been asked back: nothing is believed of what was before.
    pub(crate) fn comes_after(&self, told: u64) {
        if self.is_lasting() && !self.term.wait(told) {
            tracing::info!(node = %self.node(), "what it asks back does not come");
            self.is_void();
        }
    }

    /// Nothing is believed of its files any more.
    pub(crate) fn is_void(&self) {
        self.term.is_void();
        self.forgetting().forget_names();
    }

    /// All that was done on the node until now is seen from now on.
    ///
    /// # Errors
    /// `EIO` if it does not answer; nothing is believed then for longer than a term.
    pub(crate) fn catches_up(&self) -> Result<(), Errno> {
        let asked = Instant::now();
        self.renew()?;
        *lock(&self.term.renewed) = Some(asked);
        Ok(())
    }

    /// How things stand for what is believed of these by leases that last, if that is so now. To be asked before that is looked up.
    pub(crate) fn believes(self: &Arc<Self>, of: &[&Arc<Inode>]) -> Option<Before> {
        if !self.is_lasting() || !lock(&self.term.ear).listens {
            return None;
        }
        if self.term.is_current().is_none() {
            let _one = lock(&self.term.renewing);
            if self.term.is_current().is_none() {
                self.catches_up().ok()?;
            }
        }
        Some(Before::asking(self).known(self.term.is_current()?, of))
    }

    fn voids(&self) -> u64 {
        self.term.voids.load(Ordering::Acquire)
    }
}

/// A file that is left open at its node, for who has opened it so.
#[derive(Debug)]
pub(crate) struct Kept {
    peer: Arc<Peer>,
    who: Caller,
    flags: u32,
    pub(crate) opened: Opened,
    pub(crate) boot: Boot,
}

impl Kept {
    /// Leaves it open as long as somebody has this; none if there are too many.
    pub(crate) fn new(
        peer: &Arc<Peer>,
        who: &Caller,
        flags: u32,
        opened: Opened,
        boot: Boot,
    ) -> Option<Arc<Self>> {
        if peer.term.kept.fetch_add(1, Ordering::AcqRel) >= MOST_KEPT {
            peer.term.kept.fetch_sub(1, Ordering::AcqRel);
            return None;
        }
        Some(Arc::new(Self { peer: peer.clone(), who: who.clone(), flags, opened, boot }))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.peer.term.kept.fetch_sub(1, Ordering::AcqRel);
        self.peer.owed.release(Release::File(self.opened), false);
    }
}

/// What is believed of one inode.
#[derive(Debug, Default)]
pub(crate) struct Lasting {
    now: Mutex<Believed>,
    /// How often that was over.
    times: AtomicU64,
    /// When it was asked back last.
    asked_back: Mutex<Option<Instant>>,
    /// Until when the kernel may believe a name in it.
    told: Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct Believed {
    /// All was void so often when it began.
    voids: u64,
    is: Option<Attributes>,
    /// The names in it, if they may be believed: what has them, or that there is nothing.
    names: Option<HashMap<OsString, Option<Weak<Inode>>>>,
    /// Where a link leads.
    target: Option<Vec<u8>>,
    open: Option<Arc<Kept>>,
}

impl Lasting {
    /// How often it was over what was believed of it.
    pub(crate) fn times(&self) -> u64 {
        self.times.load(Ordering::Acquire)
    }

    /// It was asked back.
    pub(crate) fn is_void(&self) {
        self.times.fetch_add(1, Ordering::AcqRel);
        *lock(&self.asked_back) = Some(Instant::now());
        let gone = std::mem::take(&mut *lock(&self.now));
        // What it has open is told to its node, which wants locks of its own.
        drop(gone);
    }

    /// Whether others are at work there, so that what is believed of it is believed here only.
    fn is_restless(&self) -> bool {
        lock(&self.asked_back).is_some_and(|at| at.elapsed() < AT_WORK)
    }

    /// How long the kernel may believe a name in it, of which so much is left. That it does is noted.
    pub(crate) fn believable(&self, left: Duration) -> Duration {
        let left = if self.is_restless() { Duration::ZERO } else { left };
        self.tells(left);
        left
    }

    /// The kernel is told a name in it, which it may believe for so long.
    fn tells(&self, left: Duration) {
        if !left.is_zero() {
            let mut told = lock(&self.told);
            *told = (*told).max(Some(Instant::now() + left + LONGER));
        }
    }

    /// Whether the kernel may believe a name in it.
    pub(crate) fn is_believed(&self) -> bool {
        lock(&self.told).is_some_and(|until| Instant::now() < until)
    }

    /// Something is done to it from here. What names mean in it is said by [`forget`](Self::forget).
    pub(crate) fn changes(&self) {
        self.times.fetch_add(1, Ordering::AcqRel);
        let mut now = lock(&self.now);
        (now.is, now.target) = (None, None);
        let open = now.open.take();
        drop(now);
        drop(open);
    }

    /// These names mean something else in it, or may.
    pub(crate) fn forget(&self, names: &[Name]) {
        if names.is_empty() {
            return;
        }
        self.times.fetch_add(1, Ordering::AcqRel);
        if let Some(known) = &mut lock(&self.now).names {
            names.iter().for_each(|name| drop(known.remove(name.as_os())));
        }
    }

    /// Takes down what an answer said, if nothing has come between; as things stood before it was asked for.
    fn learn(&self, peer: &Peer, lease: u32, before: &Before, learn: impl FnOnce(&mut Believed)) {
        if !peer.is_lasting() {
            return;
        }
        // The ear counts before it makes anything void, and not while this goes on.
        before.pass(|_| {
            if before.stands(lease) {
                let voids = peer.voids();
                let mut now = lock(&self.now);
                let old = (now.voids != voids).then(|| std::mem::take(&mut *now));
                now.voids = voids;
                learn(&mut now);
                drop(now);
                drop(old);
            }
        });
    }

    /// It is like this.
    pub(crate) fn is(&self, peer: &Peer, is: &Attributes, before: &Before) {
        // One that a change could come to that does not show would not be known by its version.
        if is.lasts && is.settled {
            self.learn(peer, is.lease, before, |now| now.is = Some(*is));
        }
    }

    /// It is like this, and this is what has a name in it.
    pub(crate) fn has(
        &self,
        peer: &Peer,
        is: &Attributes,
        before: &Before,
        name: &OsStr,
        found: Option<&Arc<Inode>>,
    ) {
        self.is(peer, is, before);
        if is.lasts {
            self.learn(peer, is.lease, before, |now| {
                let names = now.names.get_or_insert_default();
                if names.len() < MOST_NAMES {
                    names.insert(name.to_owned(), found.map(Arc::downgrade));
                }
            });
        }
    }

    /// It is a link that leads there, or was opened.
    pub(crate) fn leads(&self, peer: &Peer, before: &Before, target: &[u8]) {
        self.learn_more(peer, before, |now| now.target = Some(target.to_vec()));
    }

    pub(crate) fn opens(&self, peer: &Peer, before: &Before, kept: &Arc<Kept>) {
        let mut last = None;
        self.learn_more(peer, before, |now| last = now.open.replace(kept.clone()));
        drop(last);
    }

    /// What is known beside attributes that are known.
    fn learn_more(&self, peer: &Peer, before: &Before, learn: impl FnOnce(&mut Believed)) {
        let Some(is) = lock(&self.now).is else { return };
        self.learn(peer, is.lease, before, |now| {
            if now.is.is_some() {
                learn(now);
            }
        });
    }

    fn get<T>(&self, peer: &Peer, get: impl FnOnce(&Believed) -> Option<T>) -> Option<T> {
        let now = lock(&self.now);
        if now.voids == peer.voids() { get(&now) } else { None }
    }

    /// What it is like.
    pub(crate) fn attributes(&self, peer: &Peer) -> Option<Attributes> {
        self.get(peer, |now| now.is)
    }

    /// What has a name in it: nothing, or this, if it is still known here.
    pub(crate) fn named(&self, peer: &Peer, name: &OsStr) -> Option<Option<Arc<Inode>>> {
        self.get(peer, |now| match now.names.as_ref()?.get(name)? {
            Some(found) => found.upgrade().map(Some),
            None => Some(None),
        })
    }

    /// Where it leads.
    pub(crate) fn target(&self, peer: &Peer) -> Option<Vec<u8>> {
        self.get(peer, |now| now.target.clone())
    }

    /// It, as somebody has it open who opened it like this.
    pub(crate) fn opened(&self, peer: &Peer, who: &Caller, flags: u32) -> Option<(Attributes, Arc<Kept>)> {
        self.get(peer, |now| {
            let kept = now.open.as_ref().filter(|kept| kept.who == *who && kept.flags == flags)?;
            Some((now.is?, kept.clone()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_taken_to_believe_for_longer_than_it_was_told_and_is_told_nothing_where_others_work() {
        let lasting = Lasting::default();
        lasting.tells(Duration::ZERO);
        assert!(!lasting.is_believed() && !lasting.is_restless());
        lasting.tells(Duration::from_secs(3600));
        lasting.tells(Duration::from_millis(1));
        assert!(lasting.is_believed(), "an answer that overtook another takes nothing of it back");
        let times = lasting.times();
        lasting.is_void();
        assert!(lasting.is_restless() && lasting.times() > times);
        assert_eq!(lasting.believable(AT_WORK), Duration::ZERO);
        *lock(&lasting.asked_back) = Instant::now().checked_sub(AT_WORK);
        assert!(!lasting.is_restless());
        assert_eq!(lasting.believable(AT_WORK), AT_WORK);
    }
}
