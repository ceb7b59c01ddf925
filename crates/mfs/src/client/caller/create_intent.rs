//! Detects exclusive creates, to save the lookup's round trip.
//!
//! The kernel looks a name up before it creates a file, so the server gets two requests.
//! FUSE_LOOKUP does not say what it is for. But the thread is blocked in its system call
//! (`/proc/TID/syscall`), and if that is an open with `O_CREAT | O_EXCL` whose path ends in this
//! name, then the reply "no such file" is followed by FUSE_CREATE. The server performs FUSE_CREATE
//! atomically, with its dentry checks. If the file exists, it fails with EEXIST, which the caller
//! would also get after a successful lookup. Without `O_EXCL` an existing file, even a link or a
//! pipe, would be opened as if it had been created.
//!
//! Three cases would give a caller a wrong result, and are excluded first:
//! - The name is not the last component of the path. So the path must contain the name only once,
//!   must not contain `.`, `..` or an empty component, and must match the names by which this
//!   directory and its parents are known; a symbolic link in between would not match.
//! - The kernel denies the create without a request, although the file exists: EACCES instead of
//!   EEXIST. So the caller must have created a file in this directory within the lease time, and
//!   permissions must not have changed since.
//! - The kernel has a dentry of the name: the reply would make it drop the dentry, and unmount what
//!   is mounted there. So no name that was reported to the kernel as existing is treated as absent.
//!
//! A thread that walks its path again after ESTALE ([`crate::client::cache::path_retry`]) always
//! gets the server's reply.

use crate::client::cache::validity::ValidityStamp;
use crate::client::fuse::inode::Inode;
use crate::lock;
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
use tern_ids::Credentials;

/// Upper bound of a line in /proc/TID/syscall, which has nine numbers.
const MAX_SYSCALL_LINE: usize = 256;

/// Threads that may inspect a caller at a time. Reading another process's memory blocks while its
/// mappings change, and such a change may wait for one of our replies (to unmap a file). So some
/// threads must remain to send replies.
const MAX_INSPECTIONS: usize = 8;

/// Longest path of a system call (PATH_MAX).
const MAX_PATH: usize = 4096;

/// Maximum number of names recorded as reported to the kernel, per directory. Once the maximum is
/// reached, every name counts as reported.
const MAX_KNOWN_NAMES: usize = 1 << 16;

/// The last create in one directory, and the names in it that the kernel may have.
#[derive(Debug, Default)]
pub(crate) struct CreateHistory {
    last: Mutex<Option<LastCreate>>,
    /// Counts changes of permissions by this client.
    permission_count: AtomicU64,
    /// Hashes of the names. A collision only costs a lookup.
    known_names: Mutex<HashSet<u64>>,
}

#[derive(Debug)]
struct LastCreate {
    tid: u32,
    caller: Credentials,
    stamp: ValidityStamp,
    lease: u32,
    permission_count: u64,
}

impl CreateHistory {
    /// The permission count, to be read before a create.
    pub(crate) fn permission_count(&self) -> u64 {
        self.permission_count.load(Ordering::Acquire)
    }

    /// Permissions change; to be called before and after the operation.
    pub(crate) fn note_permission_change(&self) {
        self.permission_count.fetch_add(1, Ordering::AcqRel);
    }

    /// This caller has created a file under this lease; `permission_count` is the permission count
    /// before that.
    pub(crate) fn note_create(
        &self,
        tid: u32,
        caller: Credentials,
        stamp: ValidityStamp,
        lease: u32,
        permission_count: u64,
    ) {
        *lock(&self.last) = (lease > 0).then_some(LastCreate { tid, caller, stamp, lease, permission_count });
    }

    /// The name is reported to the kernel.
    pub(crate) fn note_name(&self, name: &OsStr) {
        let mut known_names = lock(&self.known_names);
        if known_names.len() < MAX_KNOWN_NAMES {
            known_names.insert(hash(name));
        }
    }

    /// The kernel itself has removed or renamed this name.
    pub(crate) fn note_removal(&self, name: &OsStr) {
        let mut known_names = lock(&self.known_names);
        // A full set must stay full, since names are missing from it.
        if known_names.len() < MAX_KNOWN_NAMES {
            known_names.remove(&hash(name));
        }
    }

    /// Whether the kernel is known to have no dentry of this name.
    fn is_unknown_name(&self, name: &OsStr) -> bool {
        let known_names = lock(&self.known_names);
        known_names.len() < MAX_KNOWN_NAMES && !known_names.contains(&hash(name))
    }

    /// Whether the caller is known to have permission to create files here.
    pub(crate) fn may_create(&self, tid: u32, caller: &Credentials) -> bool {
        lock(&self.last).as_ref().is_some_and(|last| {
            // Root's permission may come from capabilities, which differ between threads.
            let is_same = last.caller == *caller && (caller.uid != 0 || last.tid == tid);
            is_same
                && last.permission_count == self.permission_count()
                && last.stamp.is_lease_valid(last.lease)
        })
    }
}

fn hash(name: &OsStr) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// The tree's device as programs see it, and how many of our threads are inspecting callers.
#[derive(Debug, Default)]
pub(crate) struct TreeDevice {
    number: OnceLock<(u32, u32)>,
    inspecting: AtomicUsize,
}

impl TreeDevice {
    /// Sets the device.
    pub(crate) fn set(&self, major: u32, minor: u32) {
        let _once = self.number.set((major, minor));
    }

    /// Permission for one more thread to inspect a caller, until dropped; none if too many do.
    fn begin_inspection(&self) -> Option<Inspection<'_>> {
        let inspection = Inspection(&self.inspecting);
        (self.inspecting.fetch_add(1, Ordering::AcqRel) < MAX_INSPECTIONS).then_some(inspection)
    }
}

/// A thread that inspects a caller.
struct Inspection<'a>(&'a AtomicUsize);

impl Drop for Inspection<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whether this thread is blocked in an exclusive create of this name in this directory, which the
/// kernel will request next.
pub(crate) fn is_exclusive_create(
    tid: u32,
    caller: &Credentials,
    device: &TreeDevice,
    dir: &Arc<Inode>,
    name: &OsStr,
) -> bool {
    if tid == 0 || !dir.creates.may_create(tid, caller) || !dir.creates.is_unknown_name(name) {
        return false;
    }
    let (Some(number), Some(_inspection)) = (device.number.get(), device.begin_inspection()) else {
        return false;
    };
    // A thread that still runs is about to block; it is not worth waiting for.
    let mut buffer = [0; MAX_SYSCALL_LINE];
    let read = File::open(format!("/proc/{tid}/syscall")).and_then(|file| file.read_at(&mut buffer, 0));
    let call = read.ok().and_then(|count| std::str::from_utf8(buffer.get(..count)?).ok());
    let Some((from, path)) = call.and_then(parse_exclusive_create) else { return false };
    let Some(path) = read_string(tid, path) else { return false };
    let Some(start) = path_start(&path, dir, name) else { return false };
    let from = from.map_or_else(|| format!("/proc/{tid}/cwd"), |fd| format!("/proc/{tid}/fd/{fd}"));
    // AT_STATX_DONT_SYNC avoids a request to this tree: all of its threads may be busy.
    let flags = AtFlags::from_bits_retain(libc::AT_STATX_DONT_SYNC.cast_unsigned());
    statx(CWD, from, flags, StatxFlags::INO)
        .is_ok_and(|dir| (dir.stx_dev_major, dir.stx_dev_minor, dir.stx_ino) == (number.0, number.1, start))
}

/// The start of a call's path (a descriptor; none for the working directory) and the address of the
/// path, if the call is an exclusive create.
///
/// In the 32-bit ABI none of these numbers is a call that takes a path.
fn parse_exclusive_create(call: &str) -> Option<(Option<i32>, u64)> {
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
    let is_exclusive =
        has(libc::O_CREAT) && has(libc::O_EXCL) && !has(libc::O_PATH) && !has(libc::O_DIRECTORY);
    is_exclusive.then_some(((from != libc::AT_FDCWD).then_some(from), path))
}

/// A string in a thread's memory.
fn read_string(tid: u32, at: u64) -> Option<Vec<u8>> {
    let mut buffer = vec![0; MAX_PATH];
    let count = File::open(format!("/proc/{tid}/mem")).ok()?.read_at(&mut buffer, at).ok()?;
    let text = CStr::from_bytes_until_nul(buffer.get(..count)?).ok()?;
    Some(text.to_bytes().to_vec())
}

/// Matches a path against this name in this directory, and against the names by which the directory
/// and its parents are known. Returns the inode number of the directory where the path begins.
/// `None` if a component does not match, or if another component has the same name.
fn path_start(path: &[u8], dir: &Arc<Inode>, name: &OsStr) -> Option<u64> {
    let mut components = path.rsplit(|byte| *byte == b'/');
    if components.next()? != name.as_bytes() {
        return None;
    }
    let mut at = dir.clone();
    for component in components {
        // Consecutive slashes, or a leading one, give an empty component.
        if matches!(component, b"" | b"." | b"..") || component == name.as_bytes() {
            return None;
        }
        let (parent, known) = at.last_name()?;
        if known.as_bytes() != component {
            return None;
        }
        at = parent;
    }
    Some(at.number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::connection::peer::{MountContext, Peer};
    use crate::client::fuse::inode::InodeTable;
    use crate::client::fuse::inode::tests::found;
    use std::time::Duration;
    use tern_ids::NodeId;

    fn peer() -> Arc<Peer> {
        let authority = tern_wire::Authority::create("test").unwrap();
        let identity = tern_wire::Identity::issued_by_authority(&authority, NodeId(1)).unwrap();
        let timeout = Duration::from_secs(1);
        let peer = Arc::new(Peer::new(
            NodeId(2),
            MountContext {
                identity,
                map: "/dev/null".into(),
                session: [0; 16],
                timeout,
                purpose: crate::message::Purpose::Container,
                invalidator: crate::client::cache::invalidator::Invalidator::default(),
            }
            .into(),
        ));
        // As from the end of its mount: the callback channel works.
        peer.renewal.set_processed_recalls(0);
        peer
    }

    #[test]
    fn exclusive_creates_are_recognised() {
        let here = Some((None, 0x7f01));
        for (call, expected) in [
            ("257 0xffffff9c 0x7f01 0xc1 0x1b6 0x0 0x0 0x7ffd 0x7f01", here),
            ("257 0xffffffffffffff9c 0x7f01 0xc1 0x1b6 0x0 0x0 0x7ffd 0x7f01", here),
            ("2 0x7f01 0xc1 0x1b6 0x0 0x0 0x0 0x7ffd 0x7f01", here),
            ("257 0x5 0x7f01 0xc1 0x1b6 0x0 0x0 0x7ffd 0x7f01", Some((Some(5), 0x7f01))),
            // Without O_EXCL, without O_CREAT; O_PATH and O_DIRECTORY; no openat, a cut line, and
            // others.
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
            assert_eq!(parse_exclusive_create(call), expected, "{call}");
        }
        assert_eq!(read_string(u32::MAX, 0), None);
        let own = c"a/b";
        assert_eq!(read_string(std::process::id(), own.as_ptr() as u64).as_deref(), Some(&b"a/b"[..]));
    }

    #[test]
    fn path_start_follows_known_parents() {
        let (inodes, peer) = (InodeTable::default(), peer());
        let add = |number, at: Option<(&Arc<Inode>, &OsStr)>| {
            inodes.add_lookup(NodeId(2), &peer, &found(number, 0), at)
        };
        let root = add(2, None);
        let upper = add(3, Some((&root, "upper".as_ref())));
        let lower = add(4, Some((&upper, "lower".as_ref())));
        let from = |path: &str| path_start(path.as_bytes(), &lower, "new".as_ref());
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
        assert_eq!(path_start(b"lower/lower", &lower, "lower".as_ref()), None);
        inodes.rename(
            Some(found(4, 0).attributes.key),
            (&upper, "lower".as_ref()),
            (&root, "moved".as_ref()),
        );
        assert_eq!((from("lower/new"), from("moved/new")), (None, Some(root.number)));
    }

    #[test]
    fn permission_to_create_lasts_until_it_may_have_changed() {
        let (history, peer) = (CreateHistory::default(), peer());
        let [root, other] = [0, 1000].map(|uid| Credentials { uid, gid: uid, groups: vec![] });
        let note_create = |caller: &Credentials, lease| {
            history.note_create(
                7,
                caller.clone(),
                ValidityStamp::now(&peer),
                lease,
                history.permission_count(),
            );
        };
        assert!(!history.may_create(7, &other));
        note_create(&other, 60_000);
        assert!(
            history.may_create(7, &other) && history.may_create(8, &other) && !history.may_create(7, &root)
        );
        note_create(&root, 60_000);
        assert!(
            history.may_create(7, &root) && !history.may_create(8, &root),
            "root's permission may depend on capabilities"
        );
        history.note_permission_change();
        assert!(!history.may_create(7, &root));
        note_create(&root, 60_000);
        peer.count_recall(|| ());
        assert!(!history.may_create(7, &root), "another node may have changed permissions");
        note_create(&root, 0);
        assert!(!history.may_create(7, &root), "there is no lease");
    }

    #[test]
    fn inspections_are_limited() {
        let device = TreeDevice::default();
        let inspecting: Vec<_> = (0..MAX_INSPECTIONS).filter_map(|_| device.begin_inspection()).collect();
        assert_eq!((inspecting.len(), device.begin_inspection().is_some()), (MAX_INSPECTIONS, false));
        drop(inspecting);
        assert!(device.begin_inspection().is_some());
    }

    #[test]
    fn name_is_unknown_until_it_is_reported() {
        let history = CreateHistory::default();
        assert!(history.is_unknown_name("a".as_ref()));
        history.note_name("a".as_ref());
        assert!(!history.is_unknown_name("a".as_ref()) && history.is_unknown_name("b".as_ref()));
        history.note_removal("a".as_ref());
        assert!(history.is_unknown_name("a".as_ref()));
        for number in 0..MAX_KNOWN_NAMES {
            history.note_name(number.to_string().as_ref());
        }
        history.note_removal("0".as_ref());
        assert!(
            !history.is_unknown_name("0".as_ref()) && !history.is_unknown_name("b".as_ref()),
            "the set is full"
        );
    }
}
