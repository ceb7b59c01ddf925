//! Whose processes the cluster moves besides what mosrun has started: all of the users and groups that the
//! administrator names (`balance_users`), as MOSIX did with everybody's.
//!
//! Shells of sessions and daemons stay, unless somebody has started them with mosrun. What those are the kernel does
//! not say; here they are:
//!
//! - every leader of a session: a login's shell, a daemon, a terminal's first program;
//! - everybody in the session of a daemon: its leader has no terminal and is a child of init or of systemd, or it is gone
//!   and the process is in the leader's own group, as one that has made itself a daemon by two forks. (What `nohup` has
//!   kept over the end of a login has been given a group of its own by the shell.)

use crate::registry::{Entry, Started};
use crate::slots::lock;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::Mutex;
use std::time::Duration;
use tern_load::Process;

/// How often a name is looked up that is not known yet: a directory service may come later than ternd.
pub(crate) const ASK_AGAIN: Duration = Duration::from_secs(60);

/// Who is eligible.
#[derive(Debug, Default)]
pub(crate) struct Eligible {
    who: Mutex<Who>,
    /// Which of the processes that were looked at last are of one of the groups.
    members: Mutex<HashMap<(i32, u64), bool>>,
}

/// Numbers of users and groups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Who {
    users: HashSet<u32>,
    groups: HashSet<u32>,
}

impl Who {
    /// Of names or numbers, groups with an @ before; and those that nobody knows.
    pub(crate) fn of(names: &[String]) -> (Self, Vec<String>) {
        let mut who = Self::default();
        let mut unknown = Vec::new();
        for name in names {
            let (set, number) = match name.strip_prefix('@') {
                Some(group) => {
                    let known = || uzers::get_group_by_name(group).map(|group| group.gid());
                    (&mut who.groups, group.parse().ok().or_else(known))
                }
                None => {
                    let known = || uzers::get_user_by_name(name).map(|user| user.uid());
                    (&mut who.users, name.parse().ok().or_else(known))
                }
            };
            match number {
                Some(number) => drop(set.insert(number)),
                None => unknown.push(name.clone()),
            }
        }
        (who, unknown)
    }
}

impl Eligible {
    /// From now on these.
    pub(crate) fn are(&self, who: Who) {
        *lock(&self.who) = who;
        lock(&self.members).clear();
    }

    /// Of these processes of the node, those that are theirs; `root` says whether root's may be among them.
    pub(crate) fn among(&self, all: &[Process], root: bool) -> Vec<Started> {
        let who = lock(&self.who).clone();
        if who == Who::default() {
            return Vec::new();
        }
        let found: HashMap<i32, &Process> = all.iter().map(|one| (one.pid, one)).collect();
        let mut before = lock(&self.members);
        let mut members = HashMap::new();
        let mut theirs = |one: &Process| {
            if who.users.contains(&one.user) || who.groups.is_empty() {
                return who.users.contains(&one.user);
            }
            let key = (one.pid, one.start);
            let member = before.get(&key).copied().unwrap_or_else(|| is_in(one.pid, &who.groups));
            members.insert(key, member);
            member
        };
        let eligible = all
            .iter()
            .filter(|one| (root || one.user != 0) && !stays(one, &found) && theirs(one))
            .map(|one| Started { pid: one.pid, start: one.start, said: Entry::of_nobody(one.start) })
            .collect();
        *before = members;
        eligible
    }
}

/// Whether it is a session's leader, or of a daemon's session.
fn stays(one: &Process, all: &HashMap<i32, &Process>) -> bool {
    // In a container the session may be one of outside.
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

/// Whether a process is of one of these groups; no, if that cannot be known.
fn is_in(pid: i32, groups: &HashSet<u32>) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let lines = status.lines().filter_map(|l| l.strip_prefix("Gid:").or_else(|| l.strip_prefix("Groups:")));
    lines.flat_map(str::split_whitespace).any(|word| word.parse().is_ok_and(|gid| groups.contains(&gid)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32, group: i32, session: i32, terminal: bool, command: &str) -> Process {
        Process {
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

    fn pids(eligible: &Eligible, all: &[Process], root: bool) -> Vec<i32> {
        eligible.among(all, root).iter().map(|one| one.pid).collect()
    }

    #[test]
    fn jobs_may_go_and_shells_and_daemons_stay() {
        let all = [
            process(1, 0, 1, 1, false, "systemd"),
            // A login: its shell, and a job of that.
            process(10, 1, 10, 10, false, "sshd"),
            process(11, 10, 11, 11, true, "bash"),
            process(12, 11, 12, 11, true, "flac"),
            // A command over ssh without a terminal.
            process(13, 10, 13, 13, false, "sh"),
            process(14, 13, 13, 13, false, "make"),
            // A service of the user's and its worker.
            process(20, 1, 20, 20, false, "systemd"),
            process(21, 20, 21, 21, false, "dbus-daemon"),
            process(22, 21, 21, 21, false, "worker"),
            // Two forks and a setsid; and one that nohup has kept.
            process(31, 1, 30, 30, false, "daemon"),
            process(32, 1, 32, 30, false, "nohupped"),
            // From outside of the container.
            process(33, 1, 0, 0, false, "entered"),
        ];
        let eligible = Eligible::default();
        assert_eq!(pids(&eligible, &all, false), [0; 0]);
        eligible.are(Who::of(&["1000".into()]).0);
        assert_eq!(pids(&eligible, &all, false), [12, 14, 32, 33]);
        eligible.are(Who::of(&["1001".into()]).0);
        assert_eq!(pids(&eligible, &all, false), [0; 0]);
    }

    #[test]
    fn groups_are_those_of_the_process_and_root_is_asked_for() {
        let me = std::process::id() as i32;
        let gid = rustix::process::getegid().as_raw();
        let all = [Process { user: 0, ..process(me, 1, 5, 4, true, "x") }];
        let eligible = Eligible::default();
        eligible.are(Who::of(&[format!("@{gid}")]).0);
        assert_eq!(pids(&eligible, &all, true), [me]);
        assert_eq!(pids(&eligible, &all, true), [me], "also by what is remembered");
        assert_eq!(pids(&eligible, &all, false), [0; 0]);
        eligible.are(Who::of(&[format!("@{}", gid + 1)]).0);
        assert_eq!(pids(&eligible, &all, true), [0; 0]);
    }

    #[test]
    fn names_are_looked_up() {
        let (who, unknown) = Who::of(&["root".into(), "@root".into(), "nobody-of-this-name".into()]);
        assert_eq!((who.users, who.groups), (HashSet::from([0]), HashSet::from([0])));
        assert_eq!(unknown, ["nobody-of-this-name"]);
    }
}
