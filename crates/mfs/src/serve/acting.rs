//! Being the caller: a thread that serves him has his user and groups, and no capability, while it works for him.
//!
//! Only the effective ids change (the raw system calls change the calling thread's alone): with them all effective
//! capabilities go, also those that `setfsuid` would leave, as that to use what is reserved for root on a disk. The real ids
//! stay root's, so that he can neither signal nor trace us, and so that we can come back.

use crate::message::{Caller, MOST_GROUPS};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::marker::PhantomData;

/// Whom this thread acts for.
#[derive(Debug)]
pub(crate) struct Acting {
    /// Whether this process may become others.
    root: bool,
    own: Uid,
    now: Option<Caller>,
    /// Of one thread.
    _thread: PhantomData<*const ()>,
}

impl Acting {
    /// The calling thread, which acts for nobody yet.
    pub(crate) fn new() -> Self {
        let own = geteuid();
        Self { root: own.is_root(), own, now: None, _thread: PhantomData }
    }

    /// Acts for this caller from now on.
    ///
    /// # Errors
    /// `EPERM` if it cannot be; nothing must be done for him then.
    pub(crate) fn for_caller(&mut self, caller: &Caller) -> Result<(), Errno> {
        if self.now.as_ref() == Some(caller) {
            return Ok(());
        }
        if !self.root {
            // A plain user's node has his files only.
            return if caller.uid == self.own.as_raw() { Ok(()) } else { Err(Errno::PERM) };
        }
        if caller.uid == u32::MAX || caller.gid == u32::MAX || caller.groups.len() > MOST_GROUPS {
            return Err(Errno::PERM);
        }
        // What fails half-way leaves somebody whom nobody is taken for.
        self.now = None;
        let groups: Vec<Gid> =
            caller.groups.iter().filter(|g| **g != u32::MAX).map(|g| Gid::from_raw(*g)).collect();
        let (uid, gid) = (Uid::from_raw(caller.uid), Gid::from_raw(caller.gid));
        let switch = || {
            set_thread_res_uid(None, Some(Uid::ROOT), None)?;
            set_thread_groups(&groups)?;
            set_thread_res_gid(None, Some(gid), None)?;
            set_thread_res_uid(None, Some(uid), None)
        };
        switch().map_err(|_refused: Errno| Errno::PERM)?;
        self.now = Some(caller.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    /// The four capability sets do not matter but the effective one.
    fn effective() -> u64 {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    }

    #[test]
    fn a_thread_becomes_its_caller_and_comes_back() {
        if !geteuid().is_root() {
            return;
        }
        let place = std::env::temp_dir().join(format!("tern-acting-{}", std::process::id()));
        fs::create_dir(&place).unwrap();
        fs::set_permissions(&place, fs::Permissions::from_mode(0o770)).unwrap();
        std::os::unix::fs::chown(&place, Some(0), Some(4321)).unwrap();
        let mut acting = Acting::new();
        let all = effective();
        let stranger = Caller { uid: 1234, gid: 1234, groups: vec![] };
        acting.for_caller(&stranger).unwrap();
        assert_eq!(effective(), 0);
        assert!(fs::write(place.join("his"), "").is_err());
        let member = Caller { groups: vec![4321], ..stranger };
        acting.for_caller(&member).unwrap();
        fs::write(place.join("his"), "").unwrap();
        assert_eq!(fs::metadata(place.join("his")).unwrap().uid(), 1234);
        acting.for_caller(&Caller { uid: 0, gid: 0, groups: vec![] }).unwrap();
        assert_eq!(effective(), all);
        // Another thread has not changed with it.
        acting.for_caller(&member).unwrap();
        assert!(std::thread::spawn(|| geteuid().as_raw()).join().unwrap() == 1234, "a new thread inherits");
        acting.for_caller(&Caller { uid: 0, gid: 0, groups: vec![] }).unwrap();
        fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn nobody_becomes_minus_one() {
        if geteuid().is_root() {
            let nobody = Caller { uid: u32::MAX, gid: 0, groups: vec![] };
            assert_eq!(Acting::new().for_caller(&nobody), Err(Errno::PERM));
        }
    }
}
