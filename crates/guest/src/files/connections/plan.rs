//! Decides about calls: this node's kernel or home makes a call, at once or after a preparation.

use super::epoll_sets::{EpollSets, waits_for_set};
use super::waiting::sent_descriptors;
use super::{Connections, OtherCalls, RunningCall};
use crate::files::cache::Conflict;
use crate::process::space::MAPPED_FILE;
use std::collections::BTreeSet;
use tern_syscall::{Route, SplitCall, is_transfer, route};
use tern_tracee::listener::Notification;

/// The treatment of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Plan {
    /// It does not concern the connections.
    Other,
    /// It is let through, on these descriptors.
    LetThrough(BTreeSet<i32>),
    /// It waits until these descriptors are watched.
    Watch(BTreeSet<i32>),
    /// It waits until the guest's epoll set with this descriptor is up to date.
    Arrange(i32),
    /// Home makes the waits for this epoll set from now on.
    LeaveToHome(i32),
    /// It waits until this connection is taken.
    Take(i32),
    /// It waits until this connection is returned.
    Return(i32),
    /// It waits until no other thread is in a call that was let through.
    AwaitNativeCalls,
    /// It waits for a move in progress, or for another thread's call.
    Wait,
}

impl Plan {
    /// Whether this node's kernel makes the call next.
    pub(super) fn is_made_here(&self) -> bool {
        matches!(self, Self::LetThrough(_))
    }
}

impl Connections {
    /// Decides about a call. `is_fresh`: home has not made it, or a part of it, already.
    pub(super) fn plan(&self, nr: u32, args: &[u64; 6], is_fresh: bool, is_departing: bool) -> Plan {
        if self.is_busy() || self.awaits_native_calls {
            return Plan::Wait;
        }
        if self.keeps_descriptors(nr, args) {
            return Plan::Other;
        }
        let fd = args[0] as i32;
        if let Some(connection) = self.by_fd.get(&fd)
            && is_fresh
            && !is_departing
        {
            match &connection.socket {
                Some(local) if is_local_call(nr, args) && !local.is_broken => {
                    return Plan::LetThrough([fd].into());
                }
                None if is_transfer(nr) && self.may_take() && !self.others.may_use(fd, &self.sets) => {
                    // A thread that waits here for the descriptor at home must wait for the connection.
                    let is_waited_for = self.watched.has(fd) || self.sets.has_member_in_guest(fd);
                    let must_await = is_waited_for && self.others.may_wait_here();
                    return if must_await { Plan::AwaitNativeCalls } else { Plan::Take(fd) };
                }
                _ => {}
            }
        }
        let returns = |fd: i32| match Conflict::of(nr, args) {
            _ if names_descriptors(nr) => true,
            Conflict::All => true,
            // Home's set shows nothing of a connection that is here.
            Conflict::File(conflicting) => {
                conflicting == fd || !uses_epoll_set(nr) && self.sets.has_member(conflicting, fd)
            }
            Conflict::None => args[0] as i32 == fd && !is_about_descriptor(nr, args),
        };
        if i64::from(nr) == libc::SYS_epoll_ctl
            && let Some(plan) = self.plan_epoll_ctl(args[0] as i32, args[2] as i32)
        {
            return plan;
        }
        self.local_fds().find(|fd| returns(*fd)).map_or(Plan::Other, Plan::Return)
    }

    /// Decides about a change of this member of a set; none if home may make it now.
    fn plan_epoll_ctl(&self, set: i32, member: i32) -> Option<Plan> {
        let is_known = self.sets.has(set);
        let waits = |call: &RunningCall| waits_for_set(call.0) && call.1[0] as i32 == set;
        let may_wait = self.others.may_be_inside && self.sets.is_in_guest(set);
        if is_known && (may_wait || self.others.native.iter().any(waits)) {
            // The change must take effect before the call returns.
            return Some(Plan::AwaitNativeCalls);
        }
        // Home's set shows nothing of a connection that is here: of the member itself in a set that is
        // not known here, or of one in a set that is the member.
        let is_affected = |fd: &i32| !is_known && *fd == member || self.sets.has_member(member, *fd);
        self.local_fds().find(is_affected).map(Plan::Return)
    }

    /// A connection of this node that is a member of this epoll set.
    fn local_member(&self, set: i32) -> Option<i32> {
        self.local_fds().find(|fd| self.sets.has_member(set, *fd))
    }

    /// Whether a call only creates a thread, or ends one of several.
    fn keeps_descriptors(&self, nr: u32, args: &[u64; 6]) -> bool {
        creates_thread(nr, args) || self.others.exist && i64::from(nr) == libc::SYS_exit
    }

    /// Decides about a call that waits for these descriptors. `may_let_through`: it has not begun at
    /// home, and the process does not depart. `is_open_here`: a file of this node, open in the guest.
    pub(super) fn plan_wait(
        &mut self,
        fds: BTreeSet<i32>,
        may_let_through: bool,
        is_open_here: impl Fn(i32) -> bool,
    ) -> Plan {
        if self.is_busy() || self.awaits_native_calls {
            return Plan::Wait;
        }
        if let Some(member) = fds.iter().find_map(|fd| self.local_member(*fd)) {
            return Plan::Return(member);
        }
        let was_refused = self.watched.take_refused();
        let Some(local) = self.local_fds().find(|fd| fds.contains(fd)) else { return Plan::Other };
        let is_known = |fd: &i32| self.is_here(*fd) || self.watched.has(*fd) || is_open_here(*fd);
        let unknown: BTreeSet<i32> = fds.iter().filter(|fd| !is_known(fd)).copied().collect();
        let is_possible = may_let_through
            && !was_refused
            && !fds.contains(&MAPPED_FILE)
            && self.watched.has_room_for(unknown.len());
        match unknown.is_empty() {
            _ if !is_possible => Plan::Return(local),
            true => Plan::LetThrough(fds),
            false => Plan::Watch(unknown),
        }
    }

    /// Decides about a call that waits for an epoll set. The arguments are those of
    /// [`Self::plan_wait`].
    pub(super) fn plan_epoll_wait(
        &mut self,
        trap: &Notification,
        may_let_through: bool,
        is_open_here: impl Fn(i32) -> bool,
    ) -> Plan {
        let changes_it = |(call, _): &(RunningCall, _)| {
            i64::from(call.0) == libc::SYS_epoll_ctl && call.1[0] as i32 == trap.args[0] as i32
        };
        if self.is_busy() || self.awaits_native_calls || self.others.at_home.iter().any(changes_it) {
            return Plan::Wait;
        }
        if self.watched.take_refused() {
            self.sets.refuse(trap.args[0] as i32);
        }
        let is_known = |fd| self.is_here(fd) || self.watched.has(fd) || is_open_here(fd);
        let plan = self.sets.plan_wait(trap, may_let_through, |fd| self.is_here(fd), is_known);
        match &plan {
            Plan::Watch(unknown) if !self.watched.has_room_for(unknown.len()) => {
                self.sets.refuse(trap.args[0] as i32);
                self.sets.plan_wait(trap, may_let_through, |fd| self.is_here(fd), |_| true)
            }
            _ => plan,
        }
    }

    /// Forgets what a call that home makes may share, close or replace. None of its connections is
    /// here any more. Returns the descriptors of forgotten epoll sets that the guest has open.
    pub(super) fn forget_used_at_home(&mut self, nr: u32, args: &[u64; 6]) -> Vec<i32> {
        if self.keeps_descriptors(nr, args) {
            return Vec::new();
        }
        self.forget_shared(nr, args);
        if copies_descriptor(nr, args) {
            // A set keeps a member that is closed while a copy is open.
            self.sets.refuse_with_member(args[0] as i32);
        }
        match Conflict::of(nr, args) {
            _ if i64::from(nr) == libc::SYS_epoll_ctl => {
                let (set, member) = (args[0] as i32, args[2] as i32);
                if !self.sets.has(set) {
                    // A connection in a set that is not known here must not be taken.
                    self.by_fd.remove(&member);
                }
                self.forget_set(member)
            }
            Conflict::All => self.sets.forget_all(),
            Conflict::File(set) if !uses_epoll_set(nr) => self.forget_set(set),
            _ => Vec::new(),
        }
    }

    /// Forgets a set, and the offers of its members: a connection in a set that is not known here must
    /// not be taken. Returns its descriptor if the guest has it open.
    fn forget_set(&mut self, set: i32) -> Vec<i32> {
        self.sets.members(set).iter().for_each(|fd| drop(self.by_fd.remove(fd)));
        self.sets.forget(set)
    }

    /// Forgets the offers of descriptors that this call may share, close or replace. None of their
    /// connections is here any more.
    fn forget_shared(&mut self, nr: u32, args: &[u64; 6]) {
        let closed = closed_descriptor(nr, args);
        let conflict = Conflict::of(nr, args);
        let is_shared = |fd: i32| match conflict {
            Conflict::All => true,
            Conflict::File(conflicting) => conflicting == fd && !keeps_offer(nr, args),
            Conflict::None => false,
        };
        self.by_fd.retain(|fd, offered| offered.socket.is_some() || !is_shared(*fd) && closed != Some(*fd));
    }
}

impl OtherCalls {
    /// Whether a thread may wait for several descriptors in a call that this node's kernel makes.
    fn may_wait_here(&self) -> bool {
        self.may_be_inside || self.native.iter().any(|(nr, _)| names_descriptors(*nr) || waits_for_set(*nr))
    }

    /// Whether a call at home may use this descriptor, which home has offered. Home has described all
    /// sets that contain it.
    fn may_use(&self, fd: i32, sets: &EpollSets) -> bool {
        let waits_for_it = |named: i32| named == fd || sets.has_member(named, fd);
        self.at_home.iter().any(|((nr, args), sent)| match sent.as_ref().and_then(sent_descriptors) {
            Some(waited) => waited.iter().any(|named| waits_for_it(*named)),
            None => {
                args[..3].iter().any(|arg| *arg as i32 == fd)
                    || names_descriptors(*nr)
                    || waits_for_set(*nr) && sets.has_member(args[0] as i32, fd)
                    || Conflict::of(*nr, args) == Conflict::All
            }
        })
    }
}

/// Whether a call creates a thread, which uses the descriptors of its process.
fn creates_thread(nr: u32, args: &[u64; 6]) -> bool {
    route(nr, args) == Route::Both(SplitCall::Thread)
}

/// The descriptor that a call closes, perhaps to open another file under its number.
pub(super) fn closed_descriptor(nr: u32, args: &[u64; 6]) -> Option<i32> {
    match i64::from(nr) {
        libc::SYS_close => Some(args[0] as i32),
        libc::SYS_dup2 | libc::SYS_dup3 => Some(args[1] as i32),
        _ => None,
    }
}

/// Whether a call may close all descriptors, or pass them on to a child.
pub(super) fn changes_all_descriptors(nr: u32, args: &[u64; 6]) -> bool {
    matches!(route(nr, args), Route::Both(SplitCall::Fork | SplitCall::Exec))
        || [libc::SYS_close_range, libc::SYS_unshare].contains(&i64::from(nr))
}

/// Whether this node's kernel makes the call on a connection as home's would.
fn is_local_call(nr: u32, args: &[u64; 6]) -> bool {
    const TIOCOUTQ: u64 = 0x5411;
    match i64::from(nr) {
        libc::SYS_sendmmsg
        | libc::SYS_recvmmsg
        | libc::SYS_shutdown
        | libc::SYS_getsockname
        | libc::SYS_getpeername
        | libc::SYS_getsockopt => true,
        libc::SYS_setsockopt => is_unprivileged_option(args[1] as i32, args[2] as i32),
        libc::SYS_ioctl => [libc::FIONREAD, TIOCOUTQ, libc::FIONBIO].contains(&args[1]),
        libc::SYS_fcntl => args[1] as i32 == libc::F_GETFL,
        _ => is_transfer(nr),
    }
}

/// Whether every process may set this option of a connection, and the option moves with it. A guest
/// has no capabilities on its node, but its process may have some at home.
fn is_unprivileged_option(level: i32, option: i32) -> bool {
    match level {
        libc::SOL_SOCKET => {
            matches!(option, libc::SO_KEEPALIVE | libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | libc::SO_RCVLOWAT)
        }
        libc::IPPROTO_TCP => matches!(
            option,
            libc::TCP_NODELAY
                | libc::TCP_CORK
                | libc::TCP_QUICKACK
                | libc::TCP_KEEPIDLE
                | libc::TCP_KEEPINTVL
                | libc::TCP_KEEPCNT
                | libc::TCP_USER_TIMEOUT
        ),
        _ => false,
    }
}

/// Whether a call on a connection neither shares nor closes its descriptor, and home keeps its offer.
fn keeps_offer(nr: u32, args: &[u64; 6]) -> bool {
    match i64::from(nr) {
        libc::SYS_setsockopt => args[1..3] != [libc::SOL_SOCKET as u64, libc::SO_LINGER as u64],
        libc::SYS_fcntl => ![libc::F_DUPFD, libc::F_DUPFD_CLOEXEC].contains(&(args[1] as i32)),
        libc::SYS_ioctl
        | libc::SYS_getsockopt
        | libc::SYS_getsockname
        | libc::SYS_getpeername
        | libc::SYS_shutdown => true,
        _ => is_transfer(nr),
    }
}

/// Whether the call's first argument is an epoll set, which it neither shares nor closes.
fn uses_epoll_set(nr: u32) -> bool {
    i64::from(nr) == libc::SYS_epoll_ctl || waits_for_set(nr)
}

/// Whether a call makes a copy of its first argument, a descriptor.
fn copies_descriptor(nr: u32, args: &[u64; 6]) -> bool {
    match i64::from(nr) {
        libc::SYS_dup => true,
        libc::SYS_fcntl => [libc::F_DUPFD, libc::F_DUPFD_CLOEXEC].contains(&(args[1] as i32)),
        _ => false,
    }
}

/// Whether a call names descriptors in memory.
pub(super) fn names_descriptors(nr: u32) -> bool {
    matches!(
        i64::from(nr),
        libc::SYS_poll | libc::SYS_ppoll | libc::SYS_select | libc::SYS_pselect6 | libc::SYS_io_submit
    )
}

/// Whether a call without effect on the open file concerns the descriptor or the inode only, which
/// home's placeholder has as well.
fn is_about_descriptor(nr: u32, args: &[u64; 6]) -> bool {
    match i64::from(nr) {
        libc::SYS_fcntl => [libc::F_GETFD, libc::F_SETFD].contains(&(args[1] as i32)),
        libc::SYS_fstat | libc::SYS_newfstatat | libc::SYS_statx | libc::SYS_fstatfs => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Connection, LocalSocket};
    use super::*;
    use std::collections::BTreeMap;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use tern_ids::ConnectionToken;
    use tern_migrate::message::EpollMember;
    use tern_syscall::{Arg, Call};

    /// Descriptor 5 is here, and 6 is offered.
    fn connections() -> Connections {
        let connection = |socket| Connection { socket, ..Connection::offered(ConnectionToken([0; 16])) };
        let (one, other) = UnixStream::pair().unwrap();
        let local = LocalSocket {
            socket: Arc::new(one.into()),
            in_use: other,
            is_lost: false,
            in_guest: true,
            is_broken: false,
        };
        let by_fd = BTreeMap::from([(5, connection(Some(local))), (6, connection(None))]);
        Connections { by_fd, ..Connections::default() }
    }

    fn plan(connections: &Connections, nr: i64, args: [u64; 3]) -> Plan {
        let [first, second, third] = args;
        connections.plan(nr as u32, &[first, second, third, 0, 0, 0], true, false)
    }

    #[test]
    fn transfers_are_let_through_or_take_the_connection() {
        let all = connections();
        for nr in [libc::SYS_read, libc::SYS_sendto, libc::SYS_recvmsg, libc::SYS_writev] {
            assert_eq!(plan(&all, nr, [5, 0, 0]), Plan::LetThrough([5].into()));
            assert_eq!(plan(&all, nr, [6, 0, 0]), Plan::Take(6));
            assert_eq!(plan(&all, nr, [7, 0, 0]), Plan::Other);
        }
        assert_eq!(plan(&all, libc::SYS_shutdown, [5, 0, 0]), Plan::LetThrough([5].into()));
        assert_eq!(plan(&all, libc::SYS_shutdown, [6, 0, 0]), Plan::Other, "home makes it");
        let departing = all.plan(libc::SYS_read as u32, &[5, 0, 0, 0, 0, 0], true, true);
        assert_eq!(departing, Plan::Return(5));
        let repeated = all.plan(libc::SYS_read as u32, &[6, 0, 0, 0, 0, 0], false, false);
        assert_eq!(repeated, Plan::Other, "home may have made it");
    }

    #[test]
    fn connection_is_returned_before_it_can_be_shared_or_closed() {
        let all = connections();
        let fcntl = |command: i32| [5, command as u64, 0];
        for (nr, args) in [
            (libc::SYS_close, [5, 0, 0]),
            (libc::SYS_dup, [5, 0, 0]),
            (libc::SYS_dup2, [1, 5, 0]),
            (libc::SYS_clone, [0, 0, 0]),
            (libc::SYS_fork, [0, 0, 0]),
            (libc::SYS_execve, [0, 0, 0]),
            (libc::SYS_exit_group, [0, 0, 0]),
            (libc::SYS_sendmsg, [9, 0, 0]),
            (libc::SYS_poll, [0, 1, 0]),
            (libc::SYS_select, [9, 0, 0]),
            (libc::SYS_epoll_ctl, [9, 1, 5]),
            (libc::SYS_sendfile, [5, 9, 0]),
            (libc::SYS_setsockopt, [5, libc::SOL_SOCKET as u64, libc::SO_MARK as u64]),
            (libc::SYS_setsockopt, [5, libc::IPPROTO_TCP as u64, libc::TCP_ULP as u64]),
            (libc::SYS_ioctl, [5, libc::FIOASYNC, 0]),
            (libc::SYS_connect, [5, 0, 0]),
            (libc::SYS_lseek, [5, 0, 0]),
            (libc::SYS_fcntl, fcntl(libc::F_DUPFD)),
            (libc::SYS_fcntl, fcntl(libc::F_SETFL)),
            (libc::SYS_fcntl, fcntl(libc::F_SETOWN)),
        ] {
            assert_eq!(plan(&all, nr, args), Plan::Return(5), "{nr} {args:?}");
        }
        for (nr, args) in [
            (libc::SYS_close, [9, 0, 0]),
            (libc::SYS_read, [9, 0, 0]),
            (libc::SYS_epoll_ctl, [9, 1, 8]),
            (libc::SYS_fstat, [5, 0, 0]),
            (libc::SYS_openat, [9, 0, 0]),
            (libc::SYS_fcntl, fcntl(libc::F_GETFD)),
        ] {
            assert_eq!(plan(&all, nr, args), Plan::Other, "{nr} {args:?}");
        }
        for nr in 0..500 {
            let plan = all.plan(nr, &[5, 0, 0, 0, 0, 0], true, true);
            assert!(!matches!(plan, Plan::LetThrough(_) | Plan::Take(_)), "{nr} while departing");
        }
    }

    #[test]
    fn offers_end_when_their_descriptor_may_be_shared() {
        let after = |nr: i64, args: [u64; 3]| {
            let mut all = connections();
            let [first, second, third] = args;
            all.forget_shared(nr as u32, &[first, second, third, 0, 0, 0]);
            plan(&all, libc::SYS_read, [6, 0, 0])
        };
        for (nr, args) in [
            (libc::SYS_close, [6, 0, 0]),
            (libc::SYS_dup, [6, 0, 0]),
            (libc::SYS_dup2, [9, 6, 0]),
            (libc::SYS_fork, [0; 3]),
            (libc::SYS_sendmsg, [9, 0, 0]),
            (libc::SYS_fcntl, [6, libc::F_DUPFD as u64, 0]),
            (libc::SYS_setsockopt, [6, libc::SOL_SOCKET as u64, libc::SO_LINGER as u64]),
        ] {
            assert_eq!(after(nr, args), Plan::Other, "{nr} {args:?}");
        }
        for (nr, args) in [
            (libc::SYS_close, [9, 0, 0]),
            (libc::SYS_fcntl, [6, libc::F_SETFL as u64, 0]),
            (libc::SYS_setsockopt, [6, 0, 0]),
            (libc::SYS_getpeername, [6, 0, 0]),
            (libc::SYS_poll, [6, 0, 0]),
        ] {
            assert_eq!(after(nr, args), Plan::Take(6), "{nr} {args:?}");
        }
    }

    /// As [`connections`], and 9 is an epoll set with 5 as a member.
    fn with_set() -> Connections {
        let mut all = connections();
        all.sets.receive(9, &[EpollMember { fd: 5, events: 1, data: 0 }]);
        all
    }

    #[test]
    fn connection_is_returned_before_home_uses_its_epoll_set() {
        let mut all = with_set();
        assert_eq!(all.plan_wait([9].into(), true, |_| false), Plan::Return(5), "poll on the set");
        assert_eq!(all.plan_wait([8].into(), true, |_| false), Plan::Other);
        for (nr, args) in [
            (libc::SYS_epoll_ctl, [8, libc::EPOLL_CTL_ADD as u64, 9]),
            (libc::SYS_dup, [9, 0, 0]),
            (libc::SYS_fcntl, [9, libc::F_DUPFD as u64, 0]),
        ] {
            assert_eq!(plan(&all, nr, args), Plan::Return(5), "{nr}");
        }
        assert_eq!(plan(&all, libc::SYS_epoll_ctl, [9, libc::EPOLL_CTL_MOD as u64, 5]), Plan::Other);
        all.forget_used_at_home(libc::SYS_dup as u32, &[9, 0, 0, 0, 0, 0]);
        assert!(!all.sets.has(9) && !all.by_fd.contains_key(&5), "it must not be taken without its set");
    }

    #[test]
    fn other_threads_are_considered() {
        let transfer = |others| {
            let mut all = with_set();
            all.set_others(others);
            plan(&all, libc::SYS_read, [6, 0, 0])
        };
        let others = |at_home: &[(i64, u64)], native: &[(i64, u64)]| {
            let call = |(nr, fd): &(i64, u64)| (*nr as u32, [*fd, 0, 0, 0, 0, 0]);
            let mut others = OtherCalls::default();
            others.add(at_home.first().map(|made| (call(made), None)), native.first().map(call), false);
            others
        };
        let polls = |fd: u8| {
            let mut args = [const { Arg::Value(0) }; 6];
            args[0] = Arg::Bytes(vec![fd, 0, 0, 0, 1, 0, 0, 0].into());
            let (nr, mut others) = (libc::SYS_poll as u32, OtherCalls::default());
            others.add(Some(((nr, [0x1000, 6, 0, 0, 0, 0]), Some(&Call { nr, args }))), None, false);
            others
        };
        for (fd, expected) in [(3, Plan::Take(6)), (6, Plan::Other)] {
            assert_eq!(transfer(polls(fd)), expected, "poll on {fd}");
        }
        assert_eq!(transfer(others(&[(libc::SYS_accept, 3)], &[])), Plan::Take(6));
        for call in [(libc::SYS_read, 6), (libc::SYS_poll, 3), (libc::SYS_fork, 3)] {
            assert_eq!(transfer(others(&[call], &[])), Plan::Other, "{call:?}");
        }
        let mut all = with_set();
        let offered_in_set = [EpollMember { fd: 6, events: 1, data: 6 }];
        all.sets.receive(8, &offered_in_set);
        for (set, expected) in [(3, Plan::Take(6)), (8, Plan::Other)] {
            all.set_others(polls(set as u8));
            assert_eq!(plan(&all, libc::SYS_read, [6, 0, 0]), expected, "poll on set {set}");
            all.set_others(others(&[(libc::SYS_epoll_wait, set)], &[]));
            assert_eq!(plan(&all, libc::SYS_read, [6, 0, 0]), expected, "a wait for set {set}");
        }
        let mut all = with_set();
        all.set_others(others(&[], &[(libc::SYS_epoll_wait, 9)]));
        let change = [9, libc::EPOLL_CTL_DEL as u64, 5];
        assert_eq!(plan(&all, libc::SYS_epoll_ctl, change), Plan::AwaitNativeCalls);
        assert_eq!(plan(&all, libc::SYS_exit, [0; 3]), Plan::Other, "another thread lives on");
        all.set_others(others(&[(libc::SYS_epoll_ctl, 9)], &[]));
        let wait =
            Notification { id: 0, pid: 0, nr: libc::SYS_epoll_wait as u32, ip: 0, args: [9, 0, 0, 0, 0, 0] };
        assert_eq!(all.plan_epoll_wait(&wait, true, |_| false), Plan::Wait);
    }
}
