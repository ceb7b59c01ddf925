//! Eligibility of processes that mosrun has not started: the balancer also moves those of the users
//! and groups that the administrator lists in `balance_users`, as MOSIX did for all users.
//!
//! Daemons and the shells of sessions stay, unless they were started with mosrun. The kernel does
//! not mark them. These processes count as such:
//!
//! - each session leader: a login shell, a daemon, or the first program of a terminal;
//! - each process in the session of a daemon. The leader of such a session has no terminal and is a
//!   child of init or of systemd; or the leader is gone and the process is in the leader's own
//!   process group, like a daemon that has forked twice. (If a process outlives a login because of
//!   `nohup`, its shell has put it into a process group of its own, so it does not count.)

use crate::os::sync::lock;
use crate::process::registry::{RegisteredProcess, Registration};
use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::Duration;
use tern_control::read_process;
use tern_load::ProcessSample;

/// Interval of looking up unknown names. A directory service may start after ternd.
pub(crate) const LOOKUP_INTERVAL: Duration = Duration::from_secs(60);

/// The eligible users and groups.
#[derive(Debug, Default)]
pub(crate) struct EligibleUsers {
    listed: Mutex<UserSet>,
    /// Whether each process of the last scan is in one of the groups, by pid and start time.
    members: Mutex<HashMap<(i32, u64), bool>>,
}

/// A set of users and groups, by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct UserSet {
    users: HashSet<u32>,
    groups: HashSet<u32>,
}

impl UserSet {
    /// Resolves names or numbers; groups have an @ in front. Also returns the unknown names.
    pub(crate) fn resolve(names: &[String]) -> (Self, Vec<String>) {
        let mut listed = Self::default();
        let mut unknown = Vec::new();
        for name in names {
            let (set, number) = match name.strip_prefix('@') {
                Some(group) => {
                    let known = || uzers::get_group_by_name(group).map(|group| group.gid());
                    (&mut listed.groups, group.parse().ok().or_else(known))
                }
                None => {
                    let known = || uzers::get_user_by_name(name).map(|user| user.uid());
                    (&mut listed.users, name.parse().ok().or_else(known))
                }
            };
            match number {
                Some(number) => drop(set.insert(number)),
                None => unknown.push(name.clone()),
            }
        }
        (listed, unknown)
    }
}

impl EligibleUsers {
    /// Replaces the eligible users and groups.
    pub(crate) fn set(&self, listed: UserSet) {
        *lock(&self.listed) = listed;
        lock(&self.members).clear();
    }

    /// The eligible processes among all processes of the node. Those of root are included only if
    /// `root`.
    pub(crate) fn filter_eligible(&self, all: &[ProcessSample], root: bool) -> Vec<RegisteredProcess> {
        let listed = lock(&self.listed).clone();
        if listed == UserSet::default() {
            return Vec::new();
        }
        let found: HashMap<i32, &ProcessSample> = all.iter().map(|one| (one.pid, one)).collect();
        let mut before = lock(&self.members);
        let mut members = HashMap::new();
        let mut is_eligible = |one: &ProcessSample| {
            if listed.users.contains(&one.user) || listed.groups.is_empty() {
                return listed.users.contains(&one.user);
            }
            let key = (one.pid, one.start);
            let member = before.get(&key).copied().unwrap_or_else(|| is_in_groups(one.pid, &listed.groups));
            members.insert(key, member);
            member
        };
        let eligible = all
            .iter()
            .filter(|one| (root || one.user != 0) && !is_shell_or_daemon(one, &found) && is_eligible(one))
            .map(|one| RegisteredProcess {
                pid: one.pid,
                start: one.start,
                registration: Registration::unregistered(one.start),
            })
            .collect();
        *before = members;
        eligible
    }
}

/// Whether the process is a session leader, or in the session of a daemon.
fn is_shell_or_daemon(one: &ProcessSample, all: &HashMap<i32, &ProcessSample>) -> bool {
    // In a container the session may belong to a process outside.
    if one.session == 0 {
        return false;
    }
    if one.session == one.pid {
        return true;
    }
    let Some(leader) = all.get(&one.session) else { return one.group == one.session };
    let by_manager = leader.parent <= 1 || all.get(&leader.parent).is_some_and(|p| p.command == "systemd");
    !leader.terminal && by_manager
}

/// Whether a process is in one of these groups; false if that cannot be read, or not in time.
fn is_in_groups(pid: i32, groups: &HashSet<u32>) -> bool {
    let read = move || tern_control::procfs::read_text(format!("/proc/{pid}/status")).ok();
    let status = read_process(pid, read).unwrap_or_default();
    let lines = status.lines().filter_map(|l| l.strip_prefix("Gid:").or_else(|| l.strip_prefix("Groups:")));
    lines.flat_map(str::split_whitespace).any(|word| word.parse().is_ok_and(|gid| groups.contains(&gid)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(
        pid: i32,
        parent: i32,
        group: i32,
        session: i32,
        terminal: bool,
        command: &str,
    ) -> ProcessSample {
        ProcessSample {
            pid,
            start: 7,
            parent,
            group,
            session,
            terminal,
            user: 1000,
            command: command.into(),
            state: 'S',
            threads: 1,
            used: Duration::ZERO,
            resident: 0,
            io: None,
            rates: None,
        }
    }

    fn pids(eligible: &EligibleUsers, all: &[ProcessSample], root: bool) -> Vec<i32> {
        eligible.filter_eligible(all, root).iter().map(|one| one.pid).collect()
    }

    #[test]
    fn jobs_are_eligible_and_shells_and_daemons_are_not() {
        let all = [
            process(1, 0, 1, 1, false, "systemd"),
            // A login: its shell, and a job of the shell.
            process(10, 1, 10, 10, false, "sshd"),
            process(11, 10, 11, 11, true, "bash"),
            process(12, 11, 12, 11, true, "flac"),
            // A command over ssh without a terminal.
            process(13, 10, 13, 13, false, "sh"),
            process(14, 13, 13, 13, false, "make"),
            // A service of the user, and its worker.
            process(20, 1, 20, 20, false, "systemd"),
            process(21, 20, 21, 21, false, "dbus-daemon"),
            process(22, 21, 21, 21, false, "worker"),
            // A daemon after two forks and setsid; and a process that nohup has kept.
            process(31, 1, 30, 30, false, "daemon"),
            process(32, 1, 32, 30, false, "nohupped"),
            // A process that has entered the container from outside.
            process(33, 1, 0, 0, false, "entered"),
        ];
        let eligible = EligibleUsers::default();
        assert_eq!(pids(&eligible, &all, false), [0; 0]);
        eligible.set(UserSet::resolve(&["1000".into()]).0);
        assert_eq!(pids(&eligible, &all, false), [12, 14, 32, 33]);
        eligible.set(UserSet::resolve(&["1001".into()]).0);
        assert_eq!(pids(&eligible, &all, false), [0; 0]);
    }

    #[test]
    fn group_members_are_eligible_and_root_only_on_request() {
        let me = std::process::id() as i32;
        let gid = rustix::process::getegid().as_raw();
        let all = [ProcessSample { user: 0, ..process(me, 1, 5, 4, true, "x") }];
        let eligible = EligibleUsers::default();
        eligible.set(UserSet::resolve(&[format!("@{gid}")]).0);
        assert_eq!(pids(&eligible, &all, true), [me]);
        assert_eq!(pids(&eligible, &all, true), [me], "also with cached group membership");
        assert_eq!(pids(&eligible, &all, false), [0; 0]);
        eligible.set(UserSet::resolve(&[format!("@{}", gid + 1)]).0);
        assert_eq!(pids(&eligible, &all, true), [0; 0]);
    }

    #[test]
    fn names_are_resolved() {
        let (listed, unknown) =
            UserSet::resolve(&["root".into(), "@root".into(), "nobody-of-this-name".into()]);
        assert_eq!((listed.users, listed.groups), (HashSet::from([0]), HashSet::from([0])));
        assert_eq!(unknown, ["nobody-of-this-name"]);
    }
}
