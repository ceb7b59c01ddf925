//! Names that are believed here in the kernel's place, where that could not be told to forget them (before Linux 6.16).
//!
//! The kernel asks for each name each time then, and is answered from here, without a trip, as long as the leases of the directory and of what
//! was found in it hold, and nothing was changed from here. As where the kernel believes names itself, what is at the end of a path says by
//! which steps it came there ([`super::ways`]).
//!
//! One thing the kernel does not say: that it asks since something is to be made. If the name is taken then, the call ends with that, and
//! the server is not heard. So it is looked at which call it is; the thread waits in it (proc_pid_syscall(5)).

use super::belief::Before;
use super::inode::Inode;
use crate::lock;
use crate::message::Attributes;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::sync::{Arc, Mutex, Weak};

/// The most names that are kept of one directory.
const MOST: usize = 4096;

#[derive(Debug)]
struct Kept {
    is: Weak<Inode>,
    like: Attributes,
    before: Before,
    /// How often all names had been forgotten.
    epoch: u64,
}

impl Kept {
    fn stands(&self, epoch: u64) -> bool {
        self.epoch == epoch && self.before.stands(self.like.lease)
    }
}

/// The names of one directory.
#[derive(Debug, Default)]
pub(crate) struct Names(Mutex<HashMap<OsString, Kept>>);

impl Names {
    /// This was found under a name, and may be believed as long as its lease in `like` holds.
    pub(crate) fn keep(&self, name: &OsStr, is: &Arc<Inode>, like: Attributes, before: &Before, epoch: u64) {
        let kept = Kept { is: Arc::downgrade(is), like, before: before.clone(), epoch };
        let mut all = lock(&self.0);
        if all.len() >= MOST {
            all.retain(|_, kept| kept.stands(epoch));
        }
        if like.lease > 0 && (all.len() < MOST || all.contains_key(name)) {
            all.insert(name.to_owned(), kept);
        }
    }

    /// What has a name, if that is known for sure.
    pub(crate) fn get(&self, name: &OsStr, epoch: u64) -> Option<(Arc<Inode>, Attributes, Before)> {
        let mut all = lock(&self.0);
        let kept = all.get(name)?;
        if kept.stands(epoch)
            && let Some(is) = kept.is.upgrade()
        {
            return Some((is, kept.like, kept.before.clone()));
        }
        all.remove(name);
        None
    }
}

/// Whether this thread is in a call that makes nothing, and can be seen to be.
pub(crate) fn makes_nothing(tid: u32) -> bool {
    // One that is still running has just asked, and is about to wait. It is worth no waiting for.
    tid != 0 && fs::read_to_string(format!("/proc/{tid}/syscall")).is_ok_and(|call| only_finds(&call))
}

/// Whether a call, as the kernel shows it, makes nothing. No call of a 32-bit program that makes something has one of these numbers.
fn only_finds(call: &str) -> bool {
    let mut words = call.split_whitespace();
    let Some(number) = words.next().and_then(|number| number.parse::<i64>().ok()) else { return false };
    let flags = |at: usize| {
        let word = words.clone().nth(at)?;
        u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()
    };
    let creates = u64::from((libc::O_CREAT | libc::O_EXCL).cast_unsigned());
    match number {
        libc::SYS_open => flags(1).is_some_and(|flags| flags & creates == 0),
        libc::SYS_openat => flags(2).is_some_and(|flags| flags & creates == 0),
        libc::SYS_stat
        | libc::SYS_lstat
        | libc::SYS_newfstatat
        | libc::SYS_statx
        | libc::SYS_access
        | libc::SYS_faccessat
        | libc::SYS_faccessat2
        | libc::SYS_chdir
        | libc::SYS_readlink
        | libc::SYS_readlinkat
        | libc::SYS_execve => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_something_is_told_from_what_does_not() {
        for (call, finds) in [
            ("262 0xffffff9c 0x7f01 0x7f02 0x0 0x0 0x0 0x7ffd 0x7f01", true),
            ("257 0xffffff9c 0x7f01 0x80000 0x0 0x0 0x0 0x7ffd 0x7f01", true),
            ("257 0xffffff9c 0x7f01 0xc1 0x1b6 0x0 0x0 0x7ffd 0x7f01", false),
            ("2 0x7f01 0x41 0x1b6 0x0 0x0 0x0 0x7ffd 0x7f01", false),
            ("83 0x7f01 0x1ff 0x0 0x0 0x0 0x0 0x7ffd 0x7f01", false),
            ("257 0xffffff9c", false),
            ("running", false),
            ("-1 0x7ffd 0x7f01", false),
            ("", false),
        ] {
            assert_eq!(only_finds(call), finds, "{call}");
        }
        assert!(!makes_nothing(0) && !makes_nothing(u32::MAX));
    }
}
