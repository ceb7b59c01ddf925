//! What the kernel here may believe of other nodes' files, and until when.
//!
//! A lease comes with an answer, and counts from before it was asked for. What is asked back meanwhile comes by another
//! connection, the ear, and could overtake the answer on its way to the kernel. So the ear counts first, and has the kernel
//! forget then; who passes an answer on looks at the count, and keeps the ear from counting until the kernel has it.

use super::content::ON_ITS_WAY;
use super::inode::{Inode, Inodes};
use super::peer::Peer;
use crate::lock;
use crate::message::{Answer, Ask, Attributes, Lease, Moment};
use fuser::{INodeNo, Notifier};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tern_wire::Link;

/// How long the ear rests when its connection has broken.
const REST: Duration = Duration::from_millis(200);

/// How things stood before something was asked.
#[derive(Debug, Clone)]
pub(crate) struct Before {
    peer: Arc<Peer>,
    asked: Instant,
    recalls: u64,
    changes: u64,
    given: u64,
    /// By leases that last: how things stand with what these are about.
    lasting: Vec<(Arc<Inode>, u64)>,
}

impl Before {
    pub(crate) fn asking(peer: &Arc<Peer>) -> Self {
        let (recalls, changes, given) = (peer.recalls(), peer.changes(), peer.given());
        Self { peer: peer.clone(), asked: Instant::now(), recalls, changes, given, lasting: Vec::new() }
    }

    /// The same, of something that is about this one alone: what else is asked back meanwhile makes no difference. Not to be kept in
    /// an inode.
    pub(crate) fn of(inode: &Arc<Inode>) -> Self {
        let before = Self::asking(&inode.peer);
        if inode.peer.is_lasting() { before.known(Instant::now(), &[inode]) } else { before }
    }

    /// The same, of what is known since then, and is about to be looked up of these.
    pub(crate) fn known(self, asked: Instant, of: &[&Arc<Inode>]) -> Self {
        let lasting = of.iter().map(|inode| ((*inode).clone(), inode.lasting.times())).collect();
        Self { asked, lasting, ..self }
    }

    /// Passes on to the kernel what the answer said; what is done for that is told how long each lease of it may be believed yet.
    pub(crate) fn pass<T>(&self, pass: impl FnOnce(&dyn Fn(u32) -> Duration) -> T) -> T {
        let gate = self.peer.gate.read().unwrap_or_else(PoisonError::into_inner);
        let passed = pass(&|lease| self.left(lease));
        drop(gate);
        passed
    }

    /// How long a lease holds yet that came with the answer.
    fn left(&self, lease: u32) -> Duration {
        let end = self.asked + Duration::from_millis(lease.into());
        let is_as_it_was = match &self.lasting[..] {
            [] => self.peer.recalls() == self.recalls,
            known => known.iter().all(|(inode, times)| inode.lasting.times() == *times),
        };
        let end = if is_as_it_was { end } else { self.asked };
        end.saturating_duration_since(Instant::now())
    }

    /// Whether a lease holds that came with the answer.
    pub(crate) fn holds(&self, lease: u32) -> bool {
        !self.left(lease).is_zero()
    }

    /// Whether all is as it was: the lease that came with the answer holds, and nothing was changed from here since it was asked for.
    ///
    /// For what is not passed on at once: the kernel takes it for as new as its next ask.
    pub(crate) fn stands(&self, lease: u32) -> bool {
        (!self.lasting.is_empty() || self.peer.changes() == self.changes) && self.holds(lease)
    }

    /// Whether no file has been given an extended attribute from here since then.
    pub(crate) fn is_of_all_given(&self) -> bool {
        self.peer.given() == self.given
    }

    /// How long ago it was asked for.
    pub(crate) fn age(&self) -> Duration {
        self.asked.elapsed()
    }
}

/// A state of a file: another one has another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version {
    changed: Moment,
    written: Moment,
    size: u64,
}

impl Version {
    #[cfg(test)]
    pub(crate) fn at(moment: Moment) -> Self {
        Self { changed: moment, written: moment, size: 0 }
    }

    /// Which it seems to be.
    pub(crate) fn seen(is: &Attributes) -> Self {
        Self { changed: is.changed, written: is.written, size: is.size }
    }

    /// Which it is; `None` if a change that came now could have the same.
    pub(crate) fn of(is: &Attributes) -> Option<Self> {
        is.settled.then_some(Self::seen(is))
    }
}

/// The way to have the kernel forget at once: the ear's. It would lose us the answers that the kernel waits for meanwhile, which
/// it takes for older than that; so who answers has it forget by what he answers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Forgetting {
    way: Arc<OnceLock<(Notifier, OwnedFd, bool)>>,
    epoch: Arc<AtomicU64>,
    /// The first epoch that somebody may still be on his way in, until then.
    asked_back: Arc<Mutex<Option<(u64, Instant)>>>,
    /// When names were listed last that it may believe.
    listed: Arc<Mutex<Option<Instant>>>,
}

/// How long somebody may be on his way to the end of a path, on a busy machine.
const UNDER_WAY: Duration = Duration::from_millis(300);

/// Tells the kernel to believe none of the names any more that it has (`linux/fuse.h`, since 6.16), those neither that are
/// on their way to it. fuser has no word for it, so this is a `fuse_out_header`: length, what it is, and of no ask.
const NO_NAMES: [u8; 16] = [16, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

impl Forgetting {
    /// It can be told from now on.
    pub(crate) fn through(&self, notifier: Notifier, device: OwnedFd) {
        // Older ones answer EINVAL. Tests want to see what is done then.
        let is_old = std::env::var_os("TERN_NO_EPOCH").is_some();
        let forgets_names = !is_old && rustix::io::write(&device, &NO_NAMES).is_ok();
        let _once = self.way.set((notifier, device, forgets_names));
    }

    /// Whether the kernel may believe names: it can be told to forget them.
    pub(crate) fn forgets_names(&self) -> bool {
        self.way.get().is_some_and(|(.., forgets_names)| *forgets_names)
    }

    /// Names were listed that the kernel may believe.
    ///
    /// It reckons them as of when it takes the answer, and not of when it asked; so they must not be on their way to it when it is to
    /// forget all.
    pub(crate) fn listed(&self) {
        *lock(&self.listed) = Some(Instant::now());
    }

    /// Has the kernel forget all names before they are given back, and what was listed just now when it has taken that.
    fn forget_all_names(&self) {
        self.forget_names();
        let listed = *lock(&self.listed);
        let left = listed.map(|listed| ON_ITS_WAY.saturating_sub(listed.elapsed()));
        if let Some(left) = left.filter(|left| !left.is_zero()) {
            std::thread::sleep(left);
            self.forget_names();
        }
    }

    /// How often the kernel was told to forget all names.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// The names are to be said that the kernel was told since this epoch: who was on his way when it was to forget them may have gone by
    /// one.
    pub(crate) fn said_from(&self) -> u64 {
        let asked_back = *lock(&self.asked_back);
        asked_back.filter(|(_, until)| *until > Instant::now()).map_or_else(|| self.epoch(), |(from, _)| from)
    }

    /// Has the kernel ask for each name anew. It waits for nothing: to forget a single one would wait for whoever does
    /// something in that directory, who may wait for another node, which waits for us.
    pub(crate) fn forget_names(&self) {
        let now = Instant::now();
        let mut asked_back = lock(&self.asked_back);
        let from =
            asked_back.filter(|(_, until)| *until > now).map_or_else(|| self.epoch(), |(from, _)| from);
        *asked_back = Some((from, now + UNDER_WAY));
        drop(asked_back);
        // Before the kernel: what is told to it in between is of no use to it, and noted in vain.
        self.epoch.fetch_add(1, Ordering::AcqRel);
        if let Some((_, device, true)) = self.way.get() {
            let _unmounted = rustix::io::write(device, &NO_NAMES);
        }
    }

    /// Has the kernel forget attributes and content of a file, if it knows it. Waits for reads and writes of it that are
    /// under way: no call of the kernel may wait for who does this.
    fn forget(&self, number: u64) {
        if let Some((notifier, ..)) = self.way.get() {
            let _unknown = notifier.inval_inode(INodeNo(number), 0, 0);
        }
    }

    /// Has the kernel forget what a file is like, but for its content, and what it was told of that and has not taken yet. Waits for
    /// nothing.
    pub(crate) fn forget_attributes(&self, number: u64) {
        if let Some((notifier, ..)) = self.way.get() {
            let _unknown = notifier.inval_inode(INodeNo(number), -1, 0);
        }
    }
}

/// Listens to a node for what it asks back, for as long as the tree is mounted.
///
/// `tried` is told when that has been tried once.
pub(crate) fn listen(peer: &Peer, inodes: &Inodes, forgetting: &Forgetting, tried: &Sender<()>) -> ! {
    loop {
        let ear = peer.ear();
        let _nobody_waits = tried.send(());
        let _broken = ear.and_then(|link| hear(link, peer, inodes, forgetting));
        if peer.is_lasting() {
            peer.is_void();
        }
        std::thread::sleep(REST);
    }
}

fn hear(mut link: Link, peer: &Peer, inodes: &Inodes, forgetting: &Forgetting) -> Option<()> {
    let mut given_back: Vec<Lease> = Vec::new();
    for number in 1.. {
        peer.settle(&mut link, number)?;
        let ask = Ask::Hear { given_back: std::mem::take(&mut given_back) };
        let (told, Answer::Recalled(leases)) = peer.hear(&mut link, number, &ask)? else { return None };
        // What the ear before this one was told last may have been lost with its connection, and counts as told: whatever has been learned since
        // is not believed. By now the server's thread of that ear is over, so nothing later can be lost so. What names the kernel has been told of it
        // forgets in a moment by itself: to have it do so now would take away what is mounted below them (a room that is just being made).
        if number == 1 {
            peer.term.is_void();
        }
        if !leases.is_empty() {
            // Only by leases that last is anything believed here, and noted what the kernel believes.
            let mut is_believed = !peer.is_lasting();
            let lasting = if peer.is_lasting() { &leases[..] } else { &[] };
            peer.count_recall(|| {
                for inode in lasting.iter().flat_map(|lease| inodes.of(peer.node(), &lease.of)) {
                    inode.lasting.is_void();
                    is_believed |= inode.lasting.is_believed();
                }
            });
            // Which of them were directories is not known, nor which names the kernel has of those.
            if is_believed {
                forgetting.forget_all_names();
            }
            // Whoever asks for it just now, and goes by what he had, was told of nothing: that is not said before it is heard.
            let late = lasting.iter().filter(|lease| lease.is_late);
            for inode in late.flat_map(|lease| inodes.of(peer.node(), &lease.of)) {
                if inode.untell() {
                    inode.content.shakes();
                    forgetting.forget_attributes(inode.number);
                }
            }
        }
        // Before the kernel is to forget a file, which waits for who reads it; and he may wait for this.
        peer.term.hears(told);
        for lease in &leases {
            for inode in inodes.of(peer.node(), &lease.of) {
                inode.content.doubt();
                // What has been changed already may be asked for just now, and the kernel would throw that answer away, and go by what
                // it had. So, but for leases that last (above), it is left to ask: soon, if somebody has the file open, and else when its
                // names are looked up.
                if !lease.is_late {
                    forgetting.forget(inode.number);
                    inode.changes();
                }
            }
        }
        given_back = leases;
    }
    None
}
