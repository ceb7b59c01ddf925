//! Impersonation: a server thread takes the caller's user and groups while it performs the caller's
//! request. It has no capabilities then, unless the caller is root.
//!
//! Only the effective IDs change; the raw system calls change those of the calling thread alone.
//! The change drops all effective capabilities, including those that `setfsuid` would keep, such as
//! the one to use a disk's reserved blocks. The real IDs stay root's: the caller can neither signal
//! nor trace the thread, and the thread can switch back.

use crate::message::MAX_GROUPS;
use rustix::io::Errno;
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};
use std::marker::PhantomData;
use tern_ids::Credentials;

/// The credentials that this thread has.
#[derive(Debug)]
pub(crate) struct Impersonation {
    /// Whether this process may change its credentials.
    is_root: bool,
    own: Uid,
    current: Option<Credentials>,
    /// The credentials belong to one thread, so this is not `Send`.
    _thread: PhantomData<*const ()>,
}

impl Impersonation {
    /// The calling thread, with the process' own credentials.
    pub(crate) fn new() -> Self {
        let own = geteuid();
        Self { is_root: own.is_root(), own, current: None, _thread: PhantomData }
    }

    /// Takes these credentials.
    ///
    /// # Errors
    /// `EPERM` if that is not possible; the request must not be performed then.
    pub(crate) fn assume(&mut self, credentials: &Credentials) -> Result<(), Errno> {
        if self.current.as_ref() == Some(credentials) {
            return Ok(());
        }
        if !self.is_root {
            // A plain user's node serves this user only.
            return if credentials.uid == self.own.as_raw() { Ok(()) } else { Err(Errno::PERM) };
        }
        if credentials.uid == u32::MAX || credentials.gid == u32::MAX || credentials.groups.len() > MAX_GROUPS
        {
            return Err(Errno::PERM);
        }
        // After a failure half-way the thread's credentials match no caller.
        self.current = None;
        let groups: Vec<Gid> =
            credentials.groups.iter().filter(|g| **g != u32::MAX).map(|g| Gid::from_raw(*g)).collect();
        let (uid, gid) = (Uid::from_raw(credentials.uid), Gid::from_raw(credentials.gid));
        let switch = || {
            set_thread_res_uid(None, Some(Uid::ROOT), None)?;
            set_thread_groups(&groups)?;
            set_thread_res_gid(None, Some(gid), None)?;
            set_thread_res_uid(None, Some(uid), None)
        };
        switch().map_err(|_refused: Errno| Errno::PERM)?;
        self.current = Some(credentials.clone());
        Ok(())
    }
}

/// Runs an action with the right to search all directories and to open files by their handles, if
/// this process has that right.
pub(crate) fn with_search_right<T>(action: impl FnOnce() -> T) -> T {
    let Ok(before) = capabilities(None) else { return action() };
    let right = CapabilitySet::DAC_READ_SEARCH & before.permitted;
    if before.effective.contains(right) {
        return action();
    }
    let _refused = set_capabilities(None, CapabilitySets { effective: before.effective | right, ..before });
    let result = action();
    if set_capabilities(None, before).is_err() {
        // Not possible. The thread must not serve a caller with this right; ternd starts a new
        // server.
        std::process::abort();
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    /// The thread's effective capabilities.
    fn effective_capabilities() -> u64 {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    }

    #[test]
    fn thread_takes_credentials_and_gets_its_own_back() {
        if !geteuid().is_root() {
            return;
        }
        let dir = std::env::temp_dir().join(format!("tern-impersonate-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o770)).unwrap();
        std::os::unix::fs::chown(&dir, Some(0), Some(4321)).unwrap();
        let mut impersonation = Impersonation::new();
        let all = effective_capabilities();
        let stranger = Credentials { uid: 1234, gid: 1234, groups: vec![] };
        impersonation.assume(&stranger).unwrap();
        assert_eq!(effective_capabilities(), 0);
        assert_eq!(with_search_right(effective_capabilities), CapabilitySet::DAC_READ_SEARCH.bits());
        assert_eq!(effective_capabilities(), 0);
        assert!(fs::write(dir.join("file"), "").is_err());
        let member = Credentials { groups: vec![4321], ..stranger };
        impersonation.assume(&member).unwrap();
        fs::write(dir.join("file"), "").unwrap();
        assert_eq!(fs::metadata(dir.join("file")).unwrap().uid(), 1234);
        impersonation.assume(&Credentials { uid: 0, gid: 0, groups: vec![] }).unwrap();
        assert_eq!(effective_capabilities(), all);
        // Other threads have not changed.
        impersonation.assume(&member).unwrap();
        assert!(std::thread::spawn(|| geteuid().as_raw()).join().unwrap() == 1234, "a new thread inherits");
        impersonation.assume(&Credentials { uid: 0, gid: 0, groups: vec![] }).unwrap();
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn an_id_of_minus_one_is_refused() {
        if geteuid().is_root() {
            let nobody = Credentials { uid: u32::MAX, gid: 0, groups: vec![] };
            assert_eq!(Impersonation::new().assume(&nobody), Err(Errno::PERM));
        }
    }
}
