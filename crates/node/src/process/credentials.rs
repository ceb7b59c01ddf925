//! The credentials of the peer of a Unix socket.

use crate::process::permission::Caller;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use tern_ids::Credentials;

/// The credentials with which the peer connected (`SO_PEERCRED`). The function of rustix cannot be
/// used: its type cannot hold pid 0, which the kernel reports for a peer in a foreign pid
/// namespace.
#[allow(unsafe_code, reason = "getsockopt has no safe form that knows of foreign pid namespaces")]
pub(crate) fn peer_caller(socket: &UnixStream) -> io::Result<Caller> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointers are to a ucred and its length, both valid for the call and written by it
    // alone.
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

/// The pid and credentials of the peer at the time it connected (`SO_PEERCRED`, `SO_PEERGROUPS`).
/// The pid is 0 if the peer is in a pid namespace that is not visible here.
///
/// # Errors
/// Those of getsockopt.
#[allow(unsafe_code, reason = "getsockopt has no safe form for groups")]
pub fn peer_credentials(socket: &UnixStream) -> io::Result<(i32, Credentials)> {
    let caller = peer_caller(socket)?;
    // The maximum number of groups, so that one call suffices.
    let mut groups = vec![0u32; 65_536];
    let mut length = (groups.len() * size_of::<u32>()) as libc::socklen_t;
    // SAFETY: the pointers are to the list and its length in bytes, both valid for the call and
    // written by it alone.
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
    Ok((caller.pid, Credentials { uid: caller.uid, gid: caller.gid, groups }))
}

/// The user and group that root of another node is mapped to.
const NOBODY: u32 = 65_534;

/// Maps user and group 0 of another node to `NOBODY`, and drops supplementary group 0
/// (`mfs_squash_root`).
#[must_use]
pub fn squash_root(mut credentials: Credentials) -> Credentials {
    credentials.groups.retain(|group| *group != 0);
    for id in [&mut credentials.uid, &mut credentials.gid] {
        if *id == 0 {
            *id = NOBODY;
        }
    }
    credentials
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_of_own_socket_pair_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let caller = peer_caller(&a).unwrap();
        assert_eq!(caller.pid, std::process::id() as i32);
        assert_eq!(caller.uid, rustix::process::geteuid().as_raw());
        let groups = rustix::process::getgroups().unwrap().iter().map(|g| g.as_raw()).collect();
        let credentials = Credentials { uid: caller.uid, gid: caller.gid, groups };
        assert_eq!(peer_credentials(&a).unwrap(), (caller.pid, credentials));
    }
}
