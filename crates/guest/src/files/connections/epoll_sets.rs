//! Epoll sets with connections of this node as members. The guest has a set of its own under the
//! number of home's set. Its members are the connections, and for each member at home a file that
//! reports readiness ([`super::waiting`]).
//!
//! Home makes each epoll_ctl first, so its set always has the right members. The guest's set is
//! brought up to date before the next wait. The program cannot see a set between two waits.

use super::plan::Plan;
use crate::process::space::MAPPED_FILE;
use rustix::event::epoll;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tern_migrate::message::EpollMember;
use tern_tracee::listener::Notification;

/// Maximum number of members of a set: the shim makes a call for each.
const MAX_MEMBERS: usize = 256;

/// The epoll sets that home has described.
#[derive(Debug, Default)]
pub(crate) struct EpollSets(BTreeMap<i32, EpollSet>);

#[derive(Debug, Default)]
struct EpollSet {
    members: BTreeMap<i32, Member>,
    /// Members of the guest's set that are no members any more.
    to_delete: BTreeSet<i32>,
    /// The guest's set, if the guest has it open.
    in_guest: Option<OwnedFd>,
    /// This node cannot make it.
    is_unsuitable: bool,
}

#[derive(Debug, Clone, Copy)]
struct Member {
    events: u32,
    data: u64,
    state: MemberState,
}

/// The state of a member in the guest's set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemberState {
    Missing,
    /// The program has changed it since.
    Outdated,
    UpToDate,
}

/// A call of epoll_ctl to make for the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) operation: i32,
    pub(super) fd: i32,
    events: u32,
    data: u64,
}

impl Change {
    /// The struct epoll_event, which is packed.
    pub(super) fn event(&self) -> [u8; 12] {
        let mut event = [0; 12];
        event[..4].copy_from_slice(&self.events.to_ne_bytes());
        event[4..].copy_from_slice(&self.data.to_ne_bytes());
        event
    }
}

/// Whether this is a call that waits for an epoll set and could be made here.
pub(super) fn waits_for_set(nr: u32) -> bool {
    matches!(i64::from(nr), libc::SYS_epoll_wait | libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2)
}

impl EpollSet {
    /// Whether the guest has it, with the right members.
    fn is_current(&self) -> bool {
        self.in_guest.is_some()
            && self.to_delete.is_empty()
            && self.members.values().all(|member| member.state == MemberState::UpToDate)
    }
}

impl EpollSets {
    /// Whether none is known.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the guest has one.
    pub(super) fn has_any_in_guest(&self) -> bool {
        self.0.values().any(|set| set.in_guest.is_some())
    }

    /// Whether the guest has this set.
    pub(super) fn is_in_guest(&self, set: i32) -> bool {
        self.0.get(&set).is_some_and(|set| set.in_guest.is_some())
    }

    /// Whether the guest has a set with this descriptor as a member.
    pub(super) fn has_member_in_guest(&self, fd: i32) -> bool {
        self.0.values().any(|set| set.in_guest.is_some() && set.members.contains_key(&fd))
    }

    /// Whether this is the descriptor of a known set.
    pub(super) fn has(&self, set: i32) -> bool {
        self.0.contains_key(&set)
    }

    /// Whether a known set has this descriptor as a member.
    pub(super) fn has_member(&self, set: i32, fd: i32) -> bool {
        self.0.get(&set).is_some_and(|set| set.members.contains_key(&fd))
    }

    /// Records home's description of a set.
    pub(super) fn receive(&mut self, fd: i32, members: &[EpollMember]) {
        let set = self.0.entry(fd).or_default();
        if !set.members.is_empty() {
            // It was described before, and its changes were recorded.
            return;
        }
        for EpollMember { fd, events, data } in members {
            set.members.insert(*fd, Member { events: *events, data: *data, state: MemberState::Missing });
            set.is_unsuitable |= *fd == MAPPED_FILE;
        }
        set.is_unsuitable |= fd == MAPPED_FILE;
    }

    /// Records an epoll_ctl that home has made.
    pub(super) fn record_change(&mut self, set: i32, operation: i32, fd: i32, event: Option<&[u8]>) {
        let Some(set) = self.0.get_mut(&set) else { return };
        if operation == libc::EPOLL_CTL_DEL {
            if set.members.remove(&fd).is_some_and(|member| member.state != MemberState::Missing) {
                set.to_delete.insert(fd);
            }
            return;
        }
        let Some((events, data)) = event.and_then(|event| event.split_first_chunk()) else { return };
        let (events, data) = (u32::from_ne_bytes(*events), data.try_into().map_or(0, u64::from_ne_bytes));
        set.is_unsuitable |= fd == MAPPED_FILE || events & libc::EPOLLONESHOT as u32 != 0;
        // A member that was deleted and added again is an old one in the guest's set.
        let was_deleted = set.to_delete.remove(&fd);
        let member = set.members.entry(fd).or_insert(Member { events, data, state: MemberState::Missing });
        (member.events, member.data) = (events, data);
        if member.state == MemberState::UpToDate || was_deleted {
            member.state = MemberState::Outdated;
        }
    }

    /// The guest has another file under this number now, or none.
    pub(super) fn replace(&mut self, fd: i32) {
        for set in self.0.values_mut() {
            set.to_delete.remove(&fd);
            if let Some(member) = set.members.get_mut(&fd) {
                member.state = MemberState::Missing;
            }
        }
    }

    /// Forgets a descriptor that is closed or replaced. Returns it if it is a set that the guest has
    /// open.
    pub(super) fn close(&mut self, fd: i32) -> Vec<i32> {
        for set in self.0.values_mut() {
            set.members.remove(&fd);
            set.to_delete.remove(&fd);
        }
        self.forget(fd)
    }

    /// Forgets all. Returns those that the guest has open.
    pub(super) fn forget_all(&mut self) -> Vec<i32> {
        let all = std::mem::take(&mut self.0).into_iter();
        all.filter(|(_, set)| set.in_guest.is_some()).map(|(fd, _)| fd).collect()
    }

    /// Forgets a set. Returns its descriptor if the guest has it open.
    pub(super) fn forget(&mut self, set: i32) -> Vec<i32> {
        let open = self.0.remove(&set).filter(|set| set.in_guest.is_some());
        open.map(|_| set).into_iter().collect()
    }

    /// Has home make the waits for a set until this node can make it again. Returns its descriptor if
    /// the guest has it open.
    pub(super) fn leave_to_home(&mut self, fd: i32) -> Vec<i32> {
        let Some(set) = self.0.get_mut(&fd) else { return Vec::new() };
        set.to_delete.clear();
        set.members.values_mut().for_each(|member| member.state = MemberState::Missing);
        set.in_guest.take().map(|_| fd).into_iter().collect()
    }

    /// This node cannot make the sets that have this member.
    pub(super) fn refuse_with_member(&mut self, fd: i32) {
        for set in self.0.values_mut().filter(|set| set.members.contains_key(&fd)) {
            set.is_unsuitable = true;
        }
    }

    /// This node cannot make a set.
    pub(super) fn refuse(&mut self, set: i32) {
        if let Some(set) = self.0.get_mut(&set) {
            set.is_unsuitable = true;
        }
    }

    /// Decides about a wait for a set. `is_connection`: of this node. `is_known`: such a connection, or
    /// a descriptor whose readiness is known here. `may_let_through`: it has not begun at home, the
    /// process does not depart, and all members can be watched.
    pub(super) fn plan_wait(
        &self,
        trap: &Notification,
        may_let_through: bool,
        is_connection: impl Fn(i32) -> bool,
        is_known: impl Fn(i32) -> bool,
    ) -> Plan {
        let fd = trap.args[0] as i32;
        let Some(set) = self.0.get(&fd) else { return Plan::Other };
        let local = set.members.keys().copied().find(|fd| is_connection(*fd));
        if local.is_none() && set.in_guest.is_none() {
            return Plan::Other;
        }
        let has_mask = trap.args[4] != 0 && i64::from(trap.nr) != libc::SYS_epoll_wait;
        let is_possible = may_let_through
            && !set.is_unsuitable
            && set.members.len() <= MAX_MEMBERS
            && !has_mask
            && i64::from(trap.nr) != libc::SYS_epoll_pwait2;
        if !is_possible {
            return local.map_or(Plan::LeaveToHome(fd), Plan::Return);
        }
        let unknown: BTreeSet<i32> = set.members.keys().copied().filter(|fd| !is_known(*fd)).collect();
        if !unknown.is_empty() {
            return Plan::Watch(unknown);
        }
        if set.is_current() { Plan::LetThrough([fd].into()) } else { Plan::Arrange(fd) }
    }

    /// The sets that are up to date in the guest, and have known members only.
    pub(super) fn current(&self, is_known: impl Fn(i32) -> bool) -> impl Iterator<Item = i32> {
        let is_ready = move |set: &EpollSet| {
            !set.is_unsuitable && set.is_current() && set.members.keys().all(|fd| is_known(*fd))
        };
        self.0.iter().filter(move |(_, set)| is_ready(set)).map(|(fd, _)| *fd)
    }

    /// The members of a set that the guest must have open.
    pub(super) fn members(&self, set: i32) -> Vec<i32> {
        self.0.get(&set).map_or_else(Vec::new, |set| set.members.keys().copied().collect())
    }

    /// Creates the guest's set if there is none, and has `open` open it in the guest.
    pub(super) fn open(
        &mut self,
        set: i32,
        open: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(set) = self.0.get_mut(&set).filter(|set| set.in_guest.is_none()) else { return Ok(()) };
        let created = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        open(created.as_fd())?;
        set.in_guest = Some(created);
        Ok(())
    }

    /// The calls that bring the guest's set up to date.
    pub(super) fn changes(&self, set: i32) -> Vec<Change> {
        let Some(set) = self.0.get(&set) else { return Vec::new() };
        let delete = |fd: &i32| Change { operation: libc::EPOLL_CTL_DEL, fd: *fd, events: 0, data: 0 };
        let update = |(fd, member): (&i32, &Member)| {
            let operation = match member.state {
                MemberState::Missing => libc::EPOLL_CTL_ADD,
                MemberState::Outdated => libc::EPOLL_CTL_MOD,
                MemberState::UpToDate => return None,
            };
            Some(Change { operation, fd: *fd, events: member.events, data: member.data })
        };
        set.to_delete.iter().map(delete).chain(set.members.iter().filter_map(update)).collect()
    }

    /// Records that the guest's set is up to date.
    pub(super) fn finish_changes(&mut self, set: i32) {
        if let Some(set) = self.0.get_mut(&set) {
            set.to_delete.clear();
            set.members.values_mut().for_each(|member| member.state = MemberState::UpToDate);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SET: i32 = 9;
    const IN: u32 = libc::EPOLLIN as u32;

    /// A set with the connection 5 and the descriptor 6 of home.
    fn sets() -> EpollSets {
        let mut sets = EpollSets::default();
        let member = |fd, data| EpollMember { fd, events: IN, data };
        sets.receive(SET, &[member(5, 50), member(6, 60)]);
        sets
    }

    fn plan_with(sets: &EpollSets, nr: i64, args: [u64; 6], known: &[i32]) -> Plan {
        let trap = Notification { id: 0, pid: 0, nr: nr as u32, ip: 0, args };
        sets.plan_wait(&trap, true, |fd| fd == 5 && known.contains(&5), |fd| known.contains(&fd))
    }

    fn plan(sets: &EpollSets, known: &[i32]) -> Plan {
        plan_with(sets, libc::SYS_epoll_wait, [SET as u64, 0, 0, 0, 0, 0], known)
    }

    fn arrange(sets: &mut EpollSets) -> Vec<(i32, i32, u64)> {
        assert_eq!(plan(sets, &[5, 6, 7]), Plan::Arrange(SET));
        sets.open(SET, |_| Ok(())).unwrap();
        let changes = sets.changes(SET);
        sets.finish_changes(SET);
        assert_eq!(plan(sets, &[5, 6, 7]), Plan::LetThrough([SET].into()));
        changes.iter().map(|change| (change.operation, change.fd, change.data)).collect()
    }

    fn event(events: u32, data: u64) -> [u8; 12] {
        Change { operation: 0, fd: 0, events, data }.event()
    }

    #[test]
    fn set_is_made_here_once_a_connection_is_here() {
        let mut sets = sets();
        assert_eq!(plan(&sets, &[]), Plan::Other, "no connection is here");
        assert_eq!(plan(&sets, &[5]), Plan::Watch([6].into()));
        assert_eq!(arrange(&mut sets), [(libc::EPOLL_CTL_ADD, 5, 50), (libc::EPOLL_CTL_ADD, 6, 60)]);
        assert_eq!(plan(&sets, &[6]), Plan::Watch([5].into()), "it stays here when its connection has left");
    }

    #[test]
    fn changes_are_made_before_the_next_wait() {
        let mut sets = sets();
        arrange(&mut sets);
        let mut change = |operation, fd, event: Option<&[u8]>| sets.record_change(SET, operation, fd, event);
        change(libc::EPOLL_CTL_DEL, 6, None);
        change(libc::EPOLL_CTL_ADD, 7, Some(&event(IN, 70)));
        change(libc::EPOLL_CTL_MOD, 5, Some(&event(IN, 51)));
        let expected =
            [(libc::EPOLL_CTL_DEL, 6, 0), (libc::EPOLL_CTL_MOD, 5, 51), (libc::EPOLL_CTL_ADD, 7, 70)];
        assert_eq!(arrange(&mut sets), expected);
        sets.record_change(SET, libc::EPOLL_CTL_DEL, 7, None);
        sets.record_change(SET, libc::EPOLL_CTL_ADD, 7, Some(&event(IN, 71)));
        assert_eq!(arrange(&mut sets), [(libc::EPOLL_CTL_MOD, 7, 71)], "it is still in the guest's set");
        sets.replace(5);
        assert_eq!(arrange(&mut sets), [(libc::EPOLL_CTL_ADD, 5, 51)], "another file under this number");
    }

    #[test]
    fn waits_that_this_node_cannot_make_return_the_connections() {
        let mut sets = sets();
        arrange(&mut sets);
        let known = [5, 6];
        let with_mask = [SET as u64, 0, 0, 0, 8, 8];
        assert_eq!(plan_with(&sets, libc::SYS_epoll_pwait, with_mask, &known), Plan::Return(5));
        assert_eq!(
            plan_with(&sets, libc::SYS_epoll_pwait2, [SET as u64, 0, 0, 0, 0, 0], &known),
            Plan::Return(5)
        );
        sets.record_change(SET, libc::EPOLL_CTL_MOD, 6, Some(&event(IN | libc::EPOLLONESHOT as u32, 1)));
        assert_eq!(plan(&sets, &known), Plan::Return(5));
        assert_eq!(plan(&sets, &[6]), Plan::LeaveToHome(SET), "no connection is here");
        assert_eq!(sets.leave_to_home(SET), [SET]);
        assert_eq!(plan(&sets, &[6]), Plan::Other);
    }

    #[test]
    fn closed_descriptors_are_forgotten() {
        let mut sets = sets();
        arrange(&mut sets);
        assert!(sets.close(6).is_empty());
        assert_eq!(sets.members(SET), [5]);
        assert_eq!(sets.close(SET), [SET]);
        assert!(sets.is_empty());
    }
}
