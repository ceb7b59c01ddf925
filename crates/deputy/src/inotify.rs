//! inotify(7) instances, which the kernel limits for each user.
//!
//! The kernel counts an instance for the effective user of the thread that makes it. Home's shims
//! run as root for all users. If their instances were counted for root, 128 families would leave
//! none for root's own programs.

use rustix::fs::inotify::{self, CreateFlags};
use rustix::process::{Uid, dumpable_behavior, geteuid, set_dumpable_behavior};
use rustix::thread::set_thread_res_uid;
use std::io;
use std::os::fd::OwnedFd;

/// A non-blocking instance that counts for this user, if this process is root's; otherwise for the
/// user of this process.
///
/// # Errors
/// If the user has too many instances, or this process too many descriptors.
pub(crate) fn new_instance(uid: u32) -> io::Result<OwnedFd> {
    let flags = CreateFlags::NONBLOCK | CreateFlags::CLOEXEC;
    if uid == 0 || !geteuid().is_root() {
        return Ok(inotify::init(flags)?);
    }
    let root = Uid::ROOT;
    // A change of the effective user makes a process undumpable, as if it had executed a set-user-ID
    // program. Only this thread changes, and its real user stays root: no other user may trace it.
    let dumpable = dumpable_behavior()?;
    set_thread_res_uid(Some(root), Some(Uid::from_raw(uid)), Some(root))?;
    let made = inotify::init(flags);
    set_thread_res_uid(Some(root), Some(root), Some(root))?;
    set_dumpable_behavior(dumpable)?;
    Ok(made?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses a user that has no other instances, since the limit is that of the user.
    #[test]
    fn instances_count_for_the_user() {
        if !geteuid().is_root() {
            return;
        }
        const STRANGER: u32 = 3_999_999_999;
        let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_user_instances").unwrap();
        let limit: usize = limit.trim().parse().unwrap();
        let before = dumpable_behavior().unwrap();
        let made: Vec<OwnedFd> = (0..limit.min(200)).map_while(|_| new_instance(STRANGER).ok()).collect();
        assert_eq!(made.len(), limit.min(200));
        if limit <= 200 {
            assert_eq!(new_instance(STRANGER).unwrap_err().raw_os_error(), Some(libc::EMFILE));
        }
        assert!(new_instance(0).is_ok(), "root's own are not used up");
        assert!(geteuid().is_root() && dumpable_behavior().unwrap() == before);
    }
}
