//! Who is at the other end of a Unix socket.

use crate::permission::Caller;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// The credentials with which the peer connected (`SO_PEERCRED`). Not rustix's: its type holds no pid 0, and
/// that is what a peer in a foreign pid namespace has.
#[allow(unsafe_code, reason = "getsockopt has no safe form that knows of foreign pid namespaces")]
pub(crate) fn of_peer(socket: &UnixStream) -> io::Result<Caller> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointers are to a ucred and its length, both valid for the call and written by it alone.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if outcome != 0 || length as usize != size_of::<libc::ucred>() {
        return Err(io::Error::last_os_error());
    }
    Ok(Caller { pid: credentials.pid, uid: credentials.uid, gid: credentials.gid })
}

/// Who is at the other end: process, user, group, and his other groups as they were when he connected (`SO_PEERGROUPS`). The process
/// is 0 if it is of a pid namespace that is not seen from here.
///
/// # Errors
/// If the kernel does not say.
#[allow(unsafe_code, reason = "getsockopt has no safe form for groups")]
pub fn with_groups(socket: &UnixStream) -> io::Result<(i32, u32, u32, Vec<u32>)> {
    let caller = of_peer(socket)?;
    // As many as a user can have, and in one step: they cannot change once he has connected.
    let mut groups = vec![0u32; 65_536];
    let mut length = (groups.len() * size_of::<u32>()) as libc::socklen_t;
    // SAFETY: the pointers are to the list and its length in bytes, both valid for the call and written by it alone.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    groups.truncate(length as usize / size_of::<u32>());
    Ok((caller.pid, caller.uid, caller.gid, groups))
}

/// The user and group of whoever has no rights here.
const NOBODY: u32 = 65_534;

/// Who somebody of another node is on one where root of others is nobody (`mfs_squash_root`): user, group and other groups.
#[must_use]
pub fn without_root((uid, gid, mut groups): (u32, u32, Vec<u32>)) -> (u32, u32, Vec<u32>) {
    groups.retain(|group| *group != 0);
    let of = |id| if id == 0 { NOBODY } else { id };
    (of(uid), of(gid), groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_our_own() {
        let (a, _b) = UnixStream::pair().unwrap();
        let caller = of_peer(&a).unwrap();
        assert_eq!(caller.pid, std::process::id() as i32);
        assert_eq!(caller.uid, rustix::process::geteuid().as_raw());
        let own: Vec<u32> = rustix::process::getgroups().unwrap().iter().map(|g| g.as_raw()).collect();
        assert_eq!(with_groups(&a).unwrap(), (caller.pid, caller.uid, caller.gid, own));
    }
}
