//! The client's own name cache, for kernels whose dentries cannot be invalidated (before Linux
//! 6.16).
//!
//! On these kernels dentries get no TTL, so the kernel revalidates each one. The revalidation is
//! answered from this cache, without a request to the server, as long as the leases of the
//! directory and of the file hold and this client has changed nothing on the node. Operations at
//! the end of a path carry dentry checks as usual ([`crate::client::cache::dentries`]).
//!
//! FUSE_LOOKUP does not say whether the name is to be created. For a name that is to be created, a
//! cached but outdated entry would make the kernel fail the call with EEXIST without asking the
//! server. So the cache is used only if the thread's system call (proc_pid_syscall(5)) creates
//! nothing.

use crate::client::cache::validity::ValidityStamp;
use crate::client::fuse::inode::Inode;
use crate::lock;
use crate::message::Attributes;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::sync::{Arc, Mutex, Weak};

/// Number of names cached of one directory.
const MAX_NAMES: usize = 4096;

#[derive(Debug)]
struct CachedName {
    inode: Weak<Inode>,
    attributes: Attributes,
    stamp: ValidityStamp,
    /// The dentry epoch.
    epoch: u64,
}

impl CachedName {
    fn is_valid(&self, epoch: u64) -> bool {
        self.epoch == epoch && self.stamp.is_current(self.attributes.lease)
    }
}

/// The cached names of one directory.
#[derive(Debug, Default)]
pub(crate) struct NameCache(Mutex<HashMap<OsString, CachedName>>);

impl NameCache {
    /// Caches a lookup's result for as long as the lease in `attributes` holds.
    pub(crate) fn insert(
        &self,
        name: &OsStr,
        inode: &Arc<Inode>,
        attributes: Attributes,
        stamp: &ValidityStamp,
        epoch: u64,
    ) {
        let cached = CachedName { inode: Arc::downgrade(inode), attributes, stamp: stamp.clone(), epoch };
        let mut all = lock(&self.0);
        if all.len() >= MAX_NAMES {
            all.retain(|_, cached| cached.is_valid(epoch));
        }
        if attributes.lease > 0 && (all.len() < MAX_NAMES || all.contains_key(name)) {
            all.insert(name.to_owned(), cached);
        }
    }

    /// The result of a lookup, if it is cached and still valid.
    pub(crate) fn get(&self, name: &OsStr, epoch: u64) -> Option<(Arc<Inode>, Attributes, ValidityStamp)> {
        let mut all = lock(&self.0);
        let cached = all.get(name)?;
        if cached.is_valid(epoch)
            && let Some(inode) = cached.inode.upgrade()
        {
            return Some((inode, cached.attributes, cached.stamp.clone()));
        }
        all.remove(name);
        None
    }
}

/// Whether this thread is blocked in a system call that is known to create nothing.
pub(crate) fn is_in_non_creating_call(tid: u32) -> bool {
    // A thread that still runs is about to block; it is not worth waiting for.
    tid != 0 && fs::read_to_string(format!("/proc/{tid}/syscall")).is_ok_and(|call| creates_nothing(&call))
}

/// Whether a system call, as the kernel shows it, creates nothing. In the 32-bit ABI none of these
/// numbers is a call that creates a file.
fn creates_nothing(call: &str) -> bool {
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
    fn creating_calls_are_recognised() {
        for (call, expected) in [
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
            assert_eq!(creates_nothing(call), expected, "{call}");
        }
        assert!(!is_in_non_creating_call(0) && !is_in_non_creating_call(u32::MAX));
    }
}
