//! The epoll sets of a process that have a connection as a member. A guest's node that takes the
//! connection makes these sets as well (docs/design/connections.md).

use super::watches::is_watchable;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use std::fs::{read_dir, read_link, read_to_string};
use tern_migrate::message::EpollMember;

/// Maximum number of members of a set that another node makes.
const MAX_MEMBERS: usize = 256;

/// Maximum number of sets with a connection that another node makes.
const MAX_SETS: usize = 4;

/// An epoll set: its descriptor, and its members with their inodes.
struct EpollSet {
    fd: i32,
    members: Vec<(EpollMember, u64)>,
}

/// The epoll sets of a process with this inode as a member, by descriptor. None if another node
/// cannot make one of them as it is.
pub(super) fn sets_with(pid: i32, inode: u64) -> Option<Vec<(i32, Vec<EpollMember>)>> {
    let sets = epoll_sets(pid)?;
    let is_epoll_set = |fd: i32| sets.iter().any(|set| set.fd == fd);
    let members = || sets.iter().flat_map(|set| &set.members);
    if !members().any(|(_, member)| *member == inode) {
        return Some(Vec::new());
    }
    // A set within a set would have to be made where the outer one is.
    if members().any(|(member, _)| is_epoll_set(member.fd)) {
        return None;
    }
    let has_it = |set: &EpollSet| set.members.iter().any(|(_, member)| *member == inode);
    let with_it: Vec<EpollSet> = sets.into_iter().filter(has_it).collect();
    if with_it.len() > MAX_SETS {
        return None;
    }
    with_it.into_iter().map(|set| portable(pid, set)).collect()
}

/// The set, if each member is still open under the descriptor under which it was added, and home can
/// report its readiness.
fn portable(pid: i32, set: EpollSet) -> Option<(i32, Vec<EpollMember>)> {
    if set.members.len() > MAX_MEMBERS {
        return None;
    }
    let is_portable = |(member, inode): &(EpollMember, u64)| {
        // Whether a one-shot member has reported its event cannot be passed on.
        member.events & libc::EPOLLONESHOT as u32 == 0 && is_watchable(pid, member.fd) && {
            // Without DONT_SYNC this might ask a file server.
            let at = format!("/proc/{pid}/fd/{}", member.fd);
            let found = statx(CWD, at, AtFlags::STATX_DONT_SYNC, StatxFlags::INO);
            found.is_ok_and(|found| found.stx_ino == *inode)
        }
    };
    if !set.members.iter().all(is_portable) {
        return None;
    }
    let mut members: Vec<EpollMember> = set.members.into_iter().map(|(member, _)| member).collect();
    members.sort_by_key(|member| member.fd);
    let has_twins = members.windows(2).any(|pair| pair[0].fd == pair[1].fd);
    (!has_twins).then_some((set.fd, members))
}

/// All epoll sets of a process. None if they cannot be found out.
fn epoll_sets(pid: i32) -> Option<Vec<EpollSet>> {
    let mut sets = Vec::new();
    for descriptor in read_dir(format!("/proc/{pid}/fd")).ok()?.flatten() {
        if read_link(descriptor.path()).is_ok_and(|target| target.as_os_str() == "anon_inode:[eventpoll]") {
            let fd = descriptor.file_name().to_str()?.parse().ok()?;
            let info = read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
            sets.push(EpollSet { fd, members: members(&info)? });
        }
    }
    Some(sets)
}

/// The members in proc_pid_fdinfo(5): `tfd: 5 events: 19 data: 5 pos:0 ino:61af sdev:7`.
fn members(info: &str) -> Option<Vec<(EpollMember, u64)>> {
    let lines = info.lines().filter(|line| line.starts_with("tfd:"));
    let member = |line: &str| {
        let line = line.replace(':', ": ");
        let mut words = line.split_whitespace();
        let mut value = |name: &str| words.find(|word| *word == name).and_then(|_| words.next());
        let fd = value("tfd:")?.parse().ok()?;
        let events = u32::from_str_radix(value("events:")?, 16).ok()?;
        let data = u64::from_str_radix(value("data:")?, 16).ok()?;
        let inode = u64::from_str_radix(value("ino:")?, 16).ok()?;
        Some((EpollMember { fd, events, data }, inode))
    };
    lines.map(member).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
    use rustix::fd::{AsRawFd, OwnedFd};
    use std::os::unix::net::UnixStream;

    fn inode(file: &UnixStream) -> u64 {
        rustix::fs::fstat(file).unwrap().st_ino
    }

    fn me() -> i32 {
        std::process::id() as i32
    }

    fn add(set: &OwnedFd, file: &impl std::os::fd::AsFd, data: u64, flags: EventFlags) {
        epoll::add(set, file, EventData::new_u64(data), flags).unwrap();
    }

    #[test]
    fn sets_with_a_member_are_found_with_all_their_members() {
        let (one, other) = UnixStream::pair().unwrap();
        let (unrelated, _end) = UnixStream::pair().unwrap();
        let set = epoll::create(CreateFlags::CLOEXEC).unwrap();
        add(&set, &one, u64::MAX, EventFlags::IN | EventFlags::ET);
        add(&set, &other, 7, EventFlags::OUT);
        let [(fd, members)] = &sets_with(me(), inode(&one)).unwrap()[..] else { panic!("one set") };
        assert_eq!(*fd, set.as_raw_fd());
        let implied = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
        let flags = (libc::EPOLLIN | libc::EPOLLET) as u32 | implied;
        let first = EpollMember { fd: one.as_raw_fd(), events: flags, data: u64::MAX };
        let second = EpollMember { fd: other.as_raw_fd(), events: libc::EPOLLOUT as u32 | implied, data: 7 };
        assert!(members.len() == 2 && members.contains(&first) && members.contains(&second), "{members:?}");
        assert_eq!(sets_with(me(), inode(&unrelated)), Some(Vec::new()));
    }

    #[test]
    fn sets_that_cannot_be_made_elsewhere_are_refused() {
        let (one, other) = UnixStream::pair().unwrap();
        let set = epoll::create(CreateFlags::CLOEXEC).unwrap();
        add(&set, &one, 1, EventFlags::IN);
        assert!(sets_with(me(), inode(&one)).is_some());
        add(&set, &other, 1, EventFlags::IN | EventFlags::ONESHOT);
        assert!(sets_with(me(), inode(&one)).is_none(), "one-shot");
        epoll::delete(&set, &other).unwrap();
        let copy = other.try_clone().unwrap();
        add(&set, &copy, 1, EventFlags::IN);
        drop(copy);
        assert!(sets_with(me(), inode(&one)).is_none(), "a member without a descriptor");
        drop(other);
        let outer = epoll::create(CreateFlags::CLOEXEC).unwrap();
        add(&outer, &set, 1, EventFlags::IN);
        assert!(sets_with(me(), inode(&one)).is_none(), "a set in a set");
    }
}
