//! By which names the kernel here may come to a file without asking.
//!
//! It believes a name for as long as the lease of its directory lasts, and forgets all names when one is asked back
//! (`FUSE_NOTIFY_INC_EPOCH`; for kernels that have it not [`super::names`] does). A program on the server's own node knows nothing
//! of leases. So what opens or changes something says all steps by which the kernel may have come to it, and the server looks at them
//! in the same trip ([`crate::message::Step`]): if one of them leads elsewhere the call fails with `ESTALE`, upon which the kernel
//! goes the whole path again, asking at each step (`LOOKUP_REVAL`).
//!
//! A step too many does no harm but that: a path may have begun at a directory whose own name has changed. One too few would let
//! something old be opened. So a way is kept for longer than the kernel believes it, and noted before it is told; and who was on his
//! way when a lease was asked back says it for a while after that ([`super::belief::Forgetting::said_from`]): a local program
//! of the server has made its change by then, and the notice of that must not take away the step by which it is found.

use super::inode::Inode;
use crate::lock;
use crate::message::{MOST_STEPS, Name, Step};
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How much longer than the kernel may believe it: it counts from when it takes the answer.
const LONGER: Duration = Duration::from_millis(500);

/// Instead of the epoch of names that were listed: the kernel reckons them as of when it takes the list, and not of when it asked.
pub(crate) const LISTED: u64 = u64::MAX - LAST;

/// How often it may have been told to forget all names while somebody was on his way.
const LAST: u64 = 16;

/// The most ways to one inode. Others the kernel does not believe.
const MOST: usize = 8;

/// How many steps may lead to a directory whose names are believed.
const DEEPEST: usize = 64;

/// How long who was told that a step leads elsewhere takes to go the path again; and what comes behind a name that is not there,
/// when it is to be made. Not shorter than a wrong step may be said yet ([`super::belief`]): who took longer would say it at the end,
/// and that is final.
const AGAIN: Duration = Duration::from_millis(400);
const SOON: Duration = Duration::from_millis(300);

#[derive(Debug)]
struct Way {
    dir: Arc<Inode>,
    name: OsString,
    until: Instant,
    /// How often the kernel had been told to forget all names: it believes none of before.
    epoch: u64,
}

/// The names that the kernel may believe of one inode.
#[derive(Debug, Default)]
pub(crate) struct Ways(Mutex<Vec<Way>>);

impl Ways {
    /// The kernel may believe this name for so long; false if it must not, there being too many.
    pub(crate) fn add(&self, dir: &Arc<Inode>, name: &OsStr, left: Duration, epoch: u64) -> bool {
        let now = Instant::now();
        let until = now + left + LONGER;
        let mut ways = lock(&self.0);
        if let Some(way) = ways.iter_mut().find(|way| way.is(dir, name)) {
            (way.until, way.epoch) = (way.until.max(until), epoch);
            return true;
        }
        let over: Vec<Way> = ways.extract_if(.., |way| way.until < now || way.epoch + LAST < epoch).collect();
        let room = ways.len() < MOST;
        if room {
            ways.push(Way { dir: dir.clone(), name: name.to_owned(), until, epoch });
        }
        // They may be the last to hold their directories, whose end wants locks of its own.
        drop(ways);
        drop(over);
        room
    }

    /// It has this name no more, by the kernel's own doing.
    pub(crate) fn remove(&self, dir: &Arc<Inode>, name: &OsStr) {
        let gone: Vec<Way> = lock(&self.0).extract_if(.., |way| way.is(dir, name)).collect();
        drop(gone);
    }

    /// The kernel does not know the inode any more.
    pub(crate) fn clear(&self) {
        let gone = std::mem::take(&mut *lock(&self.0));
        drop(gone);
    }

    fn now(&self, from: u64) -> Vec<(Arc<Inode>, Name)> {
        let now = Instant::now();
        let ways = lock(&self.0);
        let still = ways.iter().filter(|way| way.until >= now && way.epoch >= from);
        still.map(|way| (way.dir.clone(), Name::from(&*way.name))).collect()
    }
}

impl Way {
    fn is(&self, dir: &Arc<Inode>, name: &OsStr) -> bool {
        Arc::ptr_eq(&self.dir, dir) && self.name == name
    }
}

/// All steps by which the kernel may have come to these that it was told since then; `None` if they are too many to be said.
pub(crate) fn steps(inodes: &[&Arc<Inode>], from: u64) -> Option<Vec<Step>> {
    let mut seen: HashSet<u64> = inodes.iter().map(|inode| inode.number).collect();
    let mut left: Vec<Arc<Inode>> = inodes.iter().map(|inode| (*inode).clone()).collect();
    let mut steps = Vec::new();
    while let Some(inode) = left.pop() {
        for (dir, name) in inode.ways.now(from) {
            if steps.len() >= MOST_STEPS {
                return None;
            }
            steps.push(Step { dir: dir.object(), name, is: inode.object() });
            if seen.insert(dir.number) {
                left.push(dir);
            }
        }
    }
    Some(steps)
}

/// Whether the kernel may believe what is in this directory: not too far down, so that the steps can be said.
pub(crate) fn may_be_believed(dir: &Arc<Inode>, epoch: u64) -> bool {
    steps(&[dir], epoch).is_some_and(|steps| steps.len() < DEEPEST)
}

/// The threads that were told `ESTALE` for a step just now.
///
/// At the end of a path that is final: the thread goes the path again, asking at each step, so that no step need be said then;
/// one too many (of the directory where the path begins, say) would fail it, and so would another change meanwhile.
///
/// To a look-up on the way it need not be: when the kernel asks whether a name still means what it did, an error makes it ask
/// once more, on the same way. So the same look-up is refused again, unless the path may have begun there. Another one shows that
/// the path is gone again.
#[derive(Debug, Default)]
pub(crate) struct Refused(Mutex<HashMap<u32, Refusal>>);

#[derive(Debug)]
struct Refusal {
    until: Instant,
    at: At,
}

#[derive(Debug)]
enum At {
    /// The end of a path. Since then it has looked these up, and in these.
    End(Vec<u64>),
    /// A look-up in this directory, once or twice.
    Name(u64, OsString, bool),
}

/// How a look-up is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// With its steps.
    First,
    /// Without.
    Again,
    /// Not at all, if the path cannot have begun there.
    Perhaps,
}

impl Refused {
    /// This thread is told so at the end of its path.
    pub(crate) fn at_end(&self, tid: u32) {
        self.insert(tid, At::End(Vec::new()));
    }

    /// It looks up a name once more, in a directory where its path may have begun.
    pub(crate) fn begins(&self, tid: u32, dir: u64) {
        self.insert(tid, At::End(vec![dir]));
    }

    /// This thread is told so of a look-up.
    pub(crate) fn at_name(&self, tid: u32, dir: u64, name: &OsStr, twice: bool) {
        self.insert(tid, At::Name(dir, name.to_owned(), twice));
    }

    fn insert(&self, tid: u32, at: At) {
        let (mut all, now) = (lock(&self.0), Instant::now());
        all.retain(|_, refusal| refusal.until > now);
        all.insert(tid, Refusal { until: now + AGAIN, at });
    }

    /// This thread looks up a name.
    pub(crate) fn looks(&self, tid: u32, dir: u64, name: &OsStr) -> Look {
        let mut all = lock(&self.0);
        let Some(refusal) = all.get_mut(&tid).filter(|refusal| refusal.until > Instant::now()) else {
            return Look::First;
        };
        match &mut refusal.at {
            At::Name(at, of, twice) if *at == dir && of == name => {
                if *twice {
                    Look::Again
                } else {
                    Look::Perhaps
                }
            }
            At::Name(..) => {
                refusal.at = At::End(vec![dir]);
                Look::Again
            }
            At::End(seen) => {
                if seen.len() < MOST_STEPS {
                    seen.push(dir);
                }
                Look::Again
            }
        }
    }

    /// It has found this one, or nothing: then its path is at its end, unless something is to be made there.
    pub(crate) fn sees(&self, tid: u32, found: Option<u64>) {
        let mut all = lock(&self.0);
        let Some(refusal) = all.get_mut(&tid) else { return };
        match (&mut refusal.at, found) {
            (At::End(seen), Some(number)) => seen.push(number),
            (_, None) => refusal.until = refusal.until.min(Instant::now() + SOON),
            (At::Name(..), Some(_)) => {}
        }
    }

    /// Whether it goes its path again, and has come to these by that: it has looked them up, or the path has no names.
    pub(crate) fn goes_again(&self, tid: u32, inodes: &[&Arc<Inode>]) -> bool {
        match lock(&self.0).get(&tid) {
            Some(Refusal { until, at: At::End(seen) }) if *until > Instant::now() => {
                seen.is_empty() || inodes.iter().all(|inode| seen.contains(&inode.number))
            }
            _ => false,
        }
    }

    /// It is at the end of its path.
    pub(crate) fn remove(&self, tid: u32) {
        lock(&self.0).remove(&tid);
    }
}

/// Whether a path of this thread may begin in this directory: it is in there, or somebody has it open.
pub(crate) fn may_begin(tid: u32, dir: &Inode) -> bool {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    // Without asking us, who may be all that could answer.
    let how = AtFlags::from_bits_retain(libc::AT_STATX_DONT_SYNC.cast_unsigned());
    let is_there = || statx(CWD, format!("/proc/{tid}/cwd"), how, StatxFlags::INO);
    dir.content.is_open() || is_there().is_ok_and(|cwd| cwd.stx_ino == dir.number)
}
