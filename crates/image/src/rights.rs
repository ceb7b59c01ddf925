//! The rights of a process, compared with those of its user.

use std::os::unix::fs::MetadataExt;
use tern_tracee::procfs::{Status, thread_statuses};

/// The rights of a process. A node that runs a process can make system calls with them at home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rights {
    /// No more than its user has. The user is not root.
    User,
    /// Its real user is root.
    Root,
    /// More than its user has, or such as another user has: its program is set-user-ID, set-group-ID
    /// or has capabilities, or it has got them otherwise. Also those of a process that the kernel
    /// protects from its user (PR_GET_DUMPABLE): it has had such rights and may still hold what it
    /// opened with them, or its program may not be read.
    MoreThanUser,
}

impl Rights {
    /// The rights that a process has now. None of its threads need be stopped.
    #[must_use]
    pub fn of(pid: i32) -> Self {
        let threads = thread_statuses(pid);
        rights(pid, &threads.iter().filter(|thread| !thread.has_exited()).collect::<Vec<_>>())
    }
}

/// The rights of a process of which `threads` are the live threads: the kernel keeps credentials for
/// each thread.
pub(crate) fn rights(pid: i32, threads: &[&Status]) -> Rights {
    if threads.iter().any(|thread| thread.uid[0] == 0) {
        return Rights::Root;
    }
    let is_protected = || {
        let owner = std::fs::metadata(format!("/proc/{pid}/status")).map(|about| about.uid());
        // The owner of a process's files in /proc is root, or root of its user namespace, if the
        // process is protected.
        owner.is_ok_and(|owner| threads.iter().all(|thread| thread.uid[1] != owner))
    };
    let has_capabilities = threads.iter().any(|thread| thread.permitted != 0) && !has_own_user_namespace(pid);
    if has_capabilities || !all_equal(threads) || is_protected() {
        Rights::MoreThanUser
    } else {
        Rights::User
    }
}

/// Whether all threads have one user and one group, in each of the kernel's four roles.
fn all_equal(threads: &[&Status]) -> bool {
    let mut ids = threads.iter().map(|thread| (thread.uid, thread.gid));
    let Some((uids, gids)) = ids.next() else { return true };
    ids.all(|other| other == (uids, gids))
        && uids.iter().all(|uid| *uid == uids[0])
        && gids.iter().all(|gid| *gid == gids[0])
}

/// Whether a process is in another user namespace than the caller. Its capabilities then give no
/// rights outside of that namespace. If this cannot be found out, they count.
fn has_own_user_namespace(pid: i32) -> bool {
    let space = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/user"));
    match (space(&pid.to_string()), space("self")) {
        (Ok(its), Ok(own)) => its != own,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pid that no process has, so that nothing is found out about it in /proc.
    const NO_PID: i32 = i32::MAX;

    fn status(uid: [u32; 4], gid: [u32; 4], permitted: u64) -> Status {
        Status { uid, gid, permitted, ..Status::default() }
    }

    fn rights_of(uid: [u32; 4], gid: [u32; 4], permitted: u64) -> Rights {
        rights(NO_PID, &[&status(uid, gid, permitted)])
    }

    #[test]
    fn user_has_its_own_rights_only() {
        assert_eq!(rights_of([5; 4], [6; 4], 0), Rights::User);
        assert_eq!(rights_of([5; 4], [6; 4], 1 << 13), Rights::MoreThanUser, "file capabilities");
        assert_eq!(rights_of([5, 0, 0, 0], [6; 4], u64::MAX), Rights::MoreThanUser, "set-user-ID root");
        assert_eq!(rights_of([5, 7, 7, 7], [6; 4], 0), Rights::MoreThanUser, "set-user-ID");
        assert_eq!(rights_of([5, 5, 0, 5], [6; 4], 0), Rights::MoreThanUser, "it can become root");
        assert_eq!(rights_of([5; 4], [6, 8, 8, 8], 0), Rights::MoreThanUser, "set-group-ID");
    }

    #[test]
    fn process_of_root_may_be_another_user_for_a_while() {
        assert_eq!(rights_of([0; 4], [0; 4], u64::MAX), Rights::Root);
        assert_eq!(rights_of([0, 5, 0, 5], [6; 4], 0), Rights::Root);
    }

    #[test]
    fn every_thread_counts() {
        let (user, other) = (status([5; 4], [6; 4], 0), status([7; 4], [6; 4], 0));
        assert_eq!(rights(NO_PID, &[&user, &user]), Rights::User);
        assert_eq!(rights(NO_PID, &[&user, &other]), Rights::MoreThanUser);
        assert_eq!(rights(NO_PID, &[&user, &status([0; 4], [6; 4], 0)]), Rights::Root);
        assert_eq!(rights(NO_PID, &[&user, &status([5; 4], [6; 4], 1)]), Rights::MoreThanUser);
    }
}
