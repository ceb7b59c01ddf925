//! Who is about to make a file: his look at the name need be no trip.
//!
//! The kernel looks a name up before it makes a file of it, and the server is told twice. It does not say what it looks for; but the
//! thread waits for the answer inside its call (`/proc/TID/syscall`), and if that is an open with `O_CREAT | O_EXCL` whose path ends
//! in this name, then "there is nothing" is followed by the deed itself. That is done by the server as one, with all its steps: the
//! file is made, or the name was taken, which the caller is told in the same words either way. Without `O_EXCL` that would not be so:
//! what is there would be opened as if it had been made, a link or a pipe among them.
//!
//! Three things would have a caller told something wrong, and are seen to first:
//! - That the name is a step on the way and not its end. So the path has no step twice and goes down only, and is the very way by which
//!   this directory is known from where the path begins; with a link in between it would be known by another one.
//! - That the kernel refuses to make it, without asking: what is there would be denied, instead of said to be there. So he has made
//!   something in this directory less than a lease ago, and nobody has changed since who may.
//! - That the kernel knows the name: it would drop what it knows, with all that is mounted there. So no name is taken for one that is
//!   not there of which it was told that it is.
//!
//! Who was refused a step just now and goes his path again (`super::ways`) is answered by the server.

use super::belief::Before;
use super::inode::Inode;
use crate::lock;
use crate::message::Caller;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use std::collections::HashSet;
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// Longer than any call as the kernel shows it: nine numbers.
const MOST_CALL: usize = 256;

/// How many threads may look at a time: who reads another one's memory waits while that is being changed, which may wait for an answer of
/// ours to unmap a file. So some are always left to give it.
const MOST_LOOKING: usize = 8;

/// The longest path of a call.
const MOST_PATH: usize = 4096;

/// The names of one directory of which it is noted that the kernel was told; with more than that none is taken for a new one.
const MOST_TOLD: usize = 1 << 16;

/// Who has made something in one directory last, and which names the kernel may know in it.
#[derive(Debug, Default)]
pub(crate) struct Maker {
    last: Mutex<Option<Last>>,
    /// How often it was changed from here who may.
    rights: AtomicU64,
    /// Their hashes: one of two that have the same is asked for in vain.
    told: Mutex<HashSet<u64>>,
}

#[derive(Debug)]
struct Last {
    tid: u32,
    who: Caller,
    before: Before,
    lease: u32,
    rights: u64,
}

impl Maker {
    /// To be asked for before something is made.
    pub(crate) fn rights(&self) -> u64 {
        self.rights.load(Ordering::Acquire)
    }

    /// It is changed who may: to be said before it is, and after.
    pub(crate) fn rights_change(&self) {
        self.rights.fetch_add(1, Ordering::AcqRel);
    }

    /// He has made something in it, which has a lease since then; `rights` were as many before.
    pub(crate) fn made(&self, tid: u32, who: Caller, before: Before, lease: u32, rights: u64) {
        *lock(&self.last) = (lease > 0).then_some(Last { tid, who, before, lease, rights });
    }

    /// The kernel is told of this name.
    pub(crate) fn tells(&self, name: &OsStr) {
        let mut told = lock(&self.told);
        if told.len() < MOST_TOLD {
            told.insert(hash(name));
        }
    }

    /// The kernel itself has taken it away.
    pub(crate) fn took(&self, name: &OsStr) {
        let mut told = lock(&self.told);
        // Of those that were not noted it is not known either.
        if told.len() < MOST_TOLD {
            told.remove(&hash(name));
        }
    }

    /// Whether the kernel knows nothing of this name, for sure.
    fn is_new(&self, name: &OsStr) -> bool {
        let told = lock(&self.told);
        told.len() < MOST_TOLD && !told.contains(&hash(name))
    }

    /// Whether he may make something in it now, for sure.
    pub(crate) fn may(&self, tid: u32, who: &Caller) -> bool {
        lock(&self.last).as_ref().is_some_and(|last| {
            // Root may by his capabilities, which another one of his threads need not have.
            let is_he = last.who == *who && (who.uid != 0 || last.tid == tid);
            is_he && last.rights == self.rights() && last.before.holds(last.lease)
        })
    }
}

fn hash(name: &OsStr) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// Which device the tree is, as programs see it, and how many threads of ours look at one of these just now.
#[derive(Debug, Default)]
pub(crate) struct Device {
    number: OnceLock<(u32, u32)>,
    looking: AtomicUsize,
}

impl Device {
    /// It is this one.
    pub(crate) fn is(&self, major: u32, minor: u32) {
        let _once = self.number.set((major, minor));
    }

    /// Leave for one more thread to look, until it is dropped; none if there are many.
    fn look(&self) -> Option<Looking<'_>> {
        let looking = Looking(&self.looking);
        (self.looking.fetch_add(1, Ordering::AcqRel) < MOST_LOOKING).then_some(looking)
    }
}

/// One thread more that looks.
struct Looking<'a>(&'a AtomicUsize);

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whether this thread waits in a call that makes a file of this name in this directory, unless there is one, and the kernel is going to
/// ask for that next.
pub(crate) fn makes_only(tid: u32, who: &Caller, device: &Device, dir: &Arc<Inode>, name: &OsStr) -> bool {
    if tid == 0 || !dir.maker.may(tid, who) || !dir.maker.is_new(name) {
        return false;
    }
    let (Some(number), Some(_looking)) = (device.number.get(), device.look()) else { return false };
    // One that is still running is about to wait; it is worth no waiting for.
    let mut room = [0; MOST_CALL];
    let read = File::open(format!("/proc/{tid}/syscall")).and_then(|file| file.read_at(&mut room, 0));
    let call = read.ok().and_then(|count| std::str::from_utf8(room.get(..count)?).ok());
    let Some((from, path)) = call.and_then(creates) else { return false };
    let Some(path) = text(tid, path) else { return false };
    let Some(begins) = begins(&path, dir, name) else { return false };
    let from = from.map_or_else(|| format!("/proc/{tid}/cwd"), |fd| format!("/proc/{tid}/fd/{fd}"));
    // Without asking us, who may be all that could answer.
    let how = AtFlags::from_bits_retain(libc::AT_STATX_DONT_SYNC.cast_unsigned());
    statx(CWD, from, how, StatxFlags::INO)
        .is_ok_and(|is| (is.stx_dev_major, is.stx_dev_minor, is.stx_ino) == (number.0, number.1, begins))
}

/// Where a call begins (a descriptor, or the working directory) and where its path is, if it makes a file and opens none that is there.
///
/// No call of a 32-bit program that takes a path has one of these numbers.
fn creates(call: &str) -> Option<(Option<i32>, u64)> {
    let mut words = call.split_whitespace();
    let number: i64 = words.next()?.parse().ok()?;
    let words: Vec<u64> =
        words.map_while(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()).collect();
    let (from, path, flags) = match (number, &words[..]) {
        (libc::SYS_open, [path, flags, ..]) => (libc::AT_FDCWD, *path, *flags),
        #[allow(clippy::cast_possible_truncation, reason = "as the kernel does")]
        (libc::SYS_openat, [from, path, flags, ..]) => (*from as u32 as i32, *path, *flags),
        _ => return None,
    };
    let has = |flag: i32| flags & u64::from(flag.cast_unsigned()) != 0;
    let makes = has(libc::O_CREAT) && has(libc::O_EXCL) && !has(libc::O_PATH) && !has(libc::O_DIRECTORY);
    makes.then_some(((from != libc::AT_FDCWD).then_some(from), path))
}

/// A text in the memory of a thread.
fn text(tid: u32, at: u64) -> Option<Vec<u8>> {
    let mut room = vec![0; MOST_PATH];
    let count = File::open(format!("/proc/{tid}/mem")).ok()?.read_at(&mut room, at).ok()?;
    let text = CStr::from_bytes_until_nul(room.get(..count)?).ok()?;
    Some(text.to_bytes().to_vec())
}

/// The number of the directory where a path begins that leads to this name in this directory, if it is the way by which that is known, and
/// has no other step of this name.
fn begins(path: &[u8], dir: &Arc<Inode>, name: &OsStr) -> Option<u64> {
    let mut steps = path.rsplit(|byte| *byte == b'/');
    if steps.next()? != name.as_bytes() {
        return None;
    }
    let mut at = dir.clone();
    for step in steps {
        // Two slashes, or one at the beginning, are an empty step.
        if matches!(step, b"" | b"." | b"..") || step == name.as_bytes() {
            return None;
        }
        let (parent, known) = at.place()?;
        if known.as_bytes() != step {
            return None;
        }
        at = parent;
    }
    Some(at.number)
}

#[cfg(test)]
mod tests {
    use super::super::inode::Inodes;
    use super::super::inode::tests::found;
    use super::super::peer::{Common, Peer};
    use super::*;
    use std::time::Duration;
    use tern_ids::NodeId;

    fn peer() -> Arc<Peer> {
        let authority = tern_wire::Authority::create("test").unwrap();
        let identity = tern_wire::Identity::issued_by(&authority, NodeId(1)).unwrap();
        let patience = Duration::from_secs(1);
        Arc::new(Peer::new(
            NodeId(2),
            Common {
                identity,
                map: "/dev/null".into(),
                session: [0; 16],
                patience,
                purpose: crate::message::Purpose::Room,
                forgetting: crate::client::belief::Forgetting::default(),
            }
            .into(),
        ))
    }

    #[test]
    fn a_call_that_makes_only_is_told_from_others() {
        let here = Some((None, 0x7f01));
        for (call, is) in [
            ("257 0xffffff9c 0x7f01 0xc1 0x1b6 0x0 0x0 0x7ffd 0x7f01", here),
            ("257 0xffffffffffffff9c 0x7f01 0xc1 0x1b6 0x0 0x0 0x7ffd 0x7f01", here),
            ("2 0x7f01 0xc1 0x1b6 0x0 0x0 0x0 0x7ffd 0x7f01", here),
            ("257 0x5 0x7f01 0xc1 0x1b6 0x0 0x0 0x7ffd 0x7f01", Some((Some(5), 0x7f01))),
            // Without O_EXCL, without O_CREAT; O_PATH and O_DIRECTORY; no openat, a cut line, and none at all.
            ("257 0xffffff9c 0x7f01 0x41 0x1b6 0x0 0x0 0x7ffd 0x7f01", None),
            ("257 0xffffff9c 0x7f01 0x81 0x1b6 0x0 0x0 0x7ffd 0x7f01", None),
            ("257 0xffffff9c 0x7f01 0x2000c1 0x1b6 0x0 0x0 0x7ffd 0x7f01", None),
            ("257 0xffffff9c 0x7f01 0x100c1 0x1b6 0x0 0x0 0x7ffd 0x7f01", None),
            ("83 0x7f01 0xc1 0xc1 0x0 0x0 0x0 0x7ffd 0x7f01", None),
            ("257 0xffffff9c 0x7f01", None),
            ("running", None),
            ("-1 0x7ffd 0x7f01", None),
            ("", None),
        ] {
            assert_eq!(creates(call), is, "{call}");
        }
        assert_eq!(text(u32::MAX, 0), None);
        let own = c"a/b";
        assert_eq!(text(std::process::id(), own.as_ptr() as u64).as_deref(), Some(&b"a/b"[..]));
    }

    #[test]
    fn a_path_begins_where_the_way_back_leads() {
        let (inodes, peer) = (Inodes::default(), peer());
        let tell =
            |number, at: Option<(&Arc<Inode>, &OsStr)>| inodes.tell(NodeId(2), &peer, &found(number, 0), at);
        let root = tell(2, None);
        let upper = tell(3, Some((&root, "upper".as_ref())));
        let lower = tell(4, Some((&upper, "lower".as_ref())));
        let from = |path: &str| begins(path.as_bytes(), &lower, "new".as_ref());
        assert_eq!(from("new"), Some(lower.number));
        assert_eq!(from("lower/new"), Some(upper.number));
        assert_eq!(from("upper/lower/new"), Some(root.number));
        for other in [
            "",
            "/",
            "new/",
            "other",
            "xnew",
            "./new",
            "/new",
            "lower//new",
            "lower/./new",
            "lower/../lower/new",
            "link/new",
            "upper/new",
            "new/new",
            "new/lower/new",
            "x/upper/lower/new",
            "/upper/lower/new",
        ] {
            assert_eq!(from(other), None, "{other}");
        }
        assert_eq!(begins(b"lower/lower", &lower, "lower".as_ref()), None);
        inodes.rename(
            Some(found(4, 0).attributes.key),
            (&upper, "lower".as_ref()),
            (&root, "moved".as_ref()),
        );
        assert_eq!((from("lower/new"), from("moved/new")), (None, Some(root.number)));
    }

    #[test]
    fn who_has_made_something_may_until_that_is_changed() {
        let (maker, peer) = (Maker::default(), peer());
        let [root, other] = [0, 1000].map(|uid| Caller { uid, gid: uid, groups: vec![] });
        let made =
            |who: &Caller, lease| maker.made(7, who.clone(), Before::asking(&peer), lease, maker.rights());
        assert!(!maker.may(7, &other));
        made(&other, 60_000);
        assert!(maker.may(7, &other) && maker.may(8, &other) && !maker.may(7, &root));
        made(&root, 60_000);
        assert!(maker.may(7, &root) && !maker.may(8, &root), "what it may by its capabilities");
        maker.rights_change();
        assert!(!maker.may(7, &root));
        made(&root, 60_000);
        peer.count_recall(|| ());
        assert!(!maker.may(7, &root), "another node may have changed it");
        made(&root, 0);
        assert!(!maker.may(7, &root), "nobody has promised anything");
    }

    #[test]
    fn some_threads_are_left() {
        let device = Device::default();
        let looking: Vec<_> = (0..MOST_LOOKING).filter_map(|_| device.look()).collect();
        assert_eq!((looking.len(), device.look().is_some()), (MOST_LOOKING, false));
        drop(looking);
        assert!(device.look().is_some());
    }

    #[test]
    fn a_name_is_new_until_the_kernel_is_told_of_it() {
        let maker = Maker::default();
        assert!(maker.is_new("a".as_ref()));
        maker.tells("a".as_ref());
        assert!(!maker.is_new("a".as_ref()) && maker.is_new("b".as_ref()));
        maker.took("a".as_ref());
        assert!(maker.is_new("a".as_ref()));
        for number in 0..MOST_TOLD {
            maker.tells(number.to_string().as_ref());
        }
        maker.took("0".as_ref());
        assert!(!maker.is_new("0".as_ref()) && !maker.is_new("b".as_ref()), "not all are noted any more");
    }
}
