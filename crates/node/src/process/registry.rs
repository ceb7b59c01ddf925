//! The processes that were started with mosrun or nomig, and the options that they were started
//! with.
//!
//! There is one small file per process, named by its pid. So a restarted ternd has the same
//! registrations, and the cost of adding one does not depend on their number.

use crate::os::sync::lock;
use crate::process::procfs::{self, is_same_process, read_stat};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{fs, io};
use tern_control::{Advice, Lock, ProcessRow, ReadError, StartedAs, Usage};
use tern_ids::{HomePid, NodeId};
use tern_load::{ProcessScanner, ScanScope};

/// Registrations of ended processes are dropped when the number of registrations is a multiple of
/// this.
const SWEEP_INTERVAL: usize = 64;

/// The registration of one process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Registration {
    /// The start time of the process, which distinguishes it from a later one with the same pid.
    start: u64,
    /// The balancer does not move it.
    pub(crate) locked: bool,
    /// It is never moved, not even on request.
    pub(crate) never: bool,
    pub(crate) advice: Advice,
    /// Root has registered it, so the balancer may move it and its descendants if they are root's.
    #[serde(default)]
    by_root: bool,
}

impl Registration {
    /// The registration of a process that has none: all defaults.
    pub(crate) fn unregistered(start: u64) -> Self {
        Self { start, locked: false, never: false, advice: Advice::default(), by_root: false }
    }
}

/// A process that was started with mosrun or nomig, a descendant of one, or one whose user or group
/// is in `balance_users`.
#[derive(Debug, Clone)]
pub(crate) struct RegisteredProcess {
    pub(crate) pid: i32,
    pub(crate) start: u64,
    pub(crate) registration: Registration,
}

/// All registrations.
#[derive(Debug)]
pub(crate) struct Registry {
    directory: PathBuf,
    entries: Mutex<HashMap<i32, Registration>>,
    /// The registration in effect for each process at the last scan, by pid and start time. `find`
    /// uses it before it looks at ancestors, which may have ended since.
    inherited_registrations: Mutex<HashMap<(i32, u64), Registration>>,
}

impl Registry {
    /// Loads the registrations that an earlier ternd stored.
    pub(crate) fn open(run_dir: &Path) -> io::Result<Self> {
        let directory = run_dir.join("processes");
        fs::create_dir_all(&directory)?;
        let mut entries = HashMap::new();
        for file in fs::read_dir(&directory)?.flatten() {
            let read = file.file_name().to_str().and_then(|name| name.parse().ok()).and_then(|pid| {
                let entry: Registration =
                    serde_json::from_str(&fs::read_to_string(file.path()).ok()?).ok()?;
                is_same_process(pid, entry.start).then_some((pid, entry))
            });
            match read {
                Some((pid, entry)) => drop(entries.insert(pid, entry)),
                None => drop(fs::remove_file(file.path())),
            }
        }
        Ok(Self { directory, entries: Mutex::new(entries), inherited_registrations: Mutex::default() })
    }

    /// Registers a process. Values that the request leaves open come from its earlier registration,
    /// or from that of its nearest registered ancestor.
    pub(crate) fn register(
        &self,
        pid: i32,
        lock_request: Lock,
        never: bool,
        advice: Advice,
        by_root: bool,
    ) -> io::Result<()> {
        let start = read_stat(pid).map_err(io::Error::other)?.start;
        let inherited = self.nearest_registration(pid);
        let locked = match lock_request {
            Lock::Locked => true,
            Lock::Unlocked => false,
            Lock::Keep => inherited.as_ref().is_some_and(|entry| entry.locked),
        };
        let never = never || inherited.as_ref().is_some_and(|entry| entry.never);
        let advice = inherited.map_or(advice.clone(), |entry| advice.or(&entry.advice));
        let entry = Registration { start, locked, never, advice, by_root };
        fs::write(self.directory.join(pid.to_string()), serde_json::to_string(&entry)?)?;
        let mut entries = lock(&self.entries);
        entries.insert(pid, entry);
        let is_due = entries.len().is_multiple_of(SWEEP_INTERVAL);
        drop(entries);
        if is_due {
            self.drop_ended();
        }
        Ok(())
    }

    fn drop_ended(&self) {
        let all: Vec<(i32, u64)> = lock(&self.entries).iter().map(|(pid, one)| (*pid, one.start)).collect();
        for (pid, start) in all.into_iter().filter(|(pid, start)| !is_same_process(*pid, *start)) {
            let mut entries = lock(&self.entries);
            // Another process with this pid may have been registered since.
            if entries.get(&pid).is_some_and(|one| one.start == start) {
                entries.remove(&pid);
                let _gone = fs::remove_file(self.directory.join(pid.to_string()));
            }
        }
    }

    /// Whether the process or an ancestor was started with nomig.
    pub(crate) fn never_moves(&self, pid: i32) -> bool {
        self.nearest_registration(pid).is_some_and(|entry| entry.never)
    }

    /// Whether root has started the process, or its nearest registered ancestor, with mosrun.
    pub(crate) fn is_by_root(&self, pid: i32) -> bool {
        self.nearest_registration(pid).is_some_and(|entry| entry.by_root)
    }

    /// How the process, or its nearest registered ancestor, was started.
    pub(crate) fn started_as(&self, pid: i32) -> Option<StartedAs> {
        self.nearest_registration(pid).map(|entry| entry.started_as())
    }

    /// The advice for the process: its own, or that of its nearest registered ancestor.
    pub(crate) fn advice(&self, pid: i32) -> Advice {
        self.nearest_registration(pid).map(|entry| entry.advice).unwrap_or_default()
    }

    /// The registered processes among all processes of the node, and their descendants, including
    /// those whose parents have ended since the last call.
    pub(crate) fn descendants(&self, all: &[tern_load::ProcessSample]) -> Vec<RegisteredProcess> {
        let started = self.find(all);
        *lock(&self.inherited_registrations) = keyed(&started).collect();
        started
    }

    fn find(&self, all: &[tern_load::ProcessSample]) -> Vec<RegisteredProcess> {
        let entries = lock(&self.entries).clone();
        let inherited_registrations = lock(&self.inherited_registrations).clone();
        let found: HashMap<i32, &tern_load::ProcessSample> = all.iter().map(|one| (one.pid, one)).collect();
        let registration_of = |one: &tern_load::ProcessSample| {
            entries
                .get(&one.pid)
                .filter(|entry| entry.start == one.start)
                .cloned()
                .or_else(|| inherited_registrations.get(&(one.pid, one.start)).cloned())
        };
        let climb = |one: &tern_load::ProcessSample| {
            let mut at = one;
            // Bounded, since a parent that was read later than its child could make a cycle.
            for _ in 0..1000 {
                if let Some(registration) = registration_of(at) {
                    return Some(registration);
                }
                // A process group has the pid of the process that created it. The pid is not reused
                // while the group exists.
                if let Some(registration) = found
                    .get(&at.group)
                    .filter(|_| at.group != at.pid)
                    .and_then(|leader| registration_of(leader))
                {
                    return Some(registration);
                }
                at = found.get(&at.parent)?;
            }
            None
        };
        all.iter()
            .filter_map(|one| {
                Some(RegisteredProcess { pid: one.pid, start: one.start, registration: climb(one)? })
            })
            .collect()
    }

    /// The registration of the process, or of its nearest registered ancestor. An ancestor that has
    /// ended is found if it lived at the last scan of all processes. The ancestors of one that cannot
    /// be read in time are not found.
    fn nearest_registration(&self, pid: i32) -> Option<Registration> {
        let entries = lock(&self.entries).clone();
        let inherited_registrations = lock(&self.inherited_registrations).clone();
        let mut at = pid;
        // A process can change its parent during the walk, so the walk is bounded.
        for _ in 0..10_000 {
            let found = match read_stat(at) {
                Ok(found) => found,
                Err(ReadError::Overdue) => return entries.get(&at).cloned(),
                Err(ReadError::Gone) => return None,
            };
            if let Some(entry) = entries.get(&at).filter(|entry| entry.start == found.start) {
                return Some(entry.clone());
            }
            if let Some(inherited) = inherited_registrations.get(&(at, found.start)) {
                return Some(inherited.clone());
            }
            at = found.parent;
        }
        None
    }

    /// All living processes that were started with mosrun or nomig, and their descendants.
    pub(crate) fn living(&self) -> Vec<RegisteredProcess> {
        let started = self.find(&ProcessScanner::without_io().scan(ScanScope::All));
        // Only adds: `descendants`, called by the balancer, replaces the whole set and so drops
        // ended ones.
        lock(&self.inherited_registrations).extend(keyed(&started));
        started
    }

    /// A row for each of these processes, except those that a shim has reported.
    pub(crate) fn rows(living: &[RegisteredProcess], except: &[HomePid], node: NodeId) -> Vec<ProcessRow> {
        let row = |one: &RegisteredProcess| {
            let pid = one.pid;
            let found = read_stat(pid).ok().filter(|found| found.start == one.start && !found.zombie)?;
            let reason = match &one.registration {
                Registration { never: true, .. } => "started with nomig",
                Registration { locked: true, .. } => "locked",
                _ => "",
            };
            Some(ProcessRow {
                pid: HomePid(pid),
                uid: procfs::uids(pid).ok()?.0,
                r#where: Some(node),
                from: None,
                state: "home".into(),
                cpu_seconds: found.cpu_seconds,
                migrations: 0,
                reason: reason.into(),
                command: procfs::command_line(pid),
                usage: Usage::default(),
                started: Some(one.registration.started_as()),
            })
        };
        living.iter().filter(|one| !except.contains(&HomePid(one.pid))).filter_map(row).collect()
    }
}

impl Registration {
    /// The registration as tools show it.
    pub(crate) fn started_as(&self) -> StartedAs {
        StartedAs { job: self.advice.job, locked: self.locked, never: self.never }
    }
}

/// The registration of each of these, by pid and start time.
fn keyed(started: &[RegisteredProcess]) -> impl Iterator<Item = ((i32, u64), Registration)> {
    started.iter().map(|one| ((one.pid, one.start), one.registration.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::scratch::Scratch;
    use std::process::{Child, Command};

    struct Sleeper(Child);

    impl Sleeper {
        fn new() -> Self {
            let child = Command::new("sleep").arg("100").spawn().unwrap();
            // The command line of the new program appears shortly after spawn returns.
            while procfs::command_line(child.id() as i32) != "sleep 100" {
                std::thread::yield_now();
            }
            Self(child)
        }

        fn pid(&self) -> i32 {
            self.0.id() as i32
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ended = self.0.kill();
            let _status = self.0.wait();
        }
    }

    #[test]
    fn registration_is_inherited_and_survives_a_restart() {
        let dir = Scratch::new("registry");
        let registry = Registry::open(&dir.0).unwrap();
        let (child, own) = (Sleeper::new(), std::process::id() as i32);
        assert!(!registry.never_moves(child.pid()));
        registry.register(own, Lock::Locked, true, Advice::default(), false).unwrap();
        assert!(registry.never_moves(child.pid()), "a child of a process started with nomig");
        registry.register(child.pid(), Lock::Keep, false, Advice::default(), false).unwrap();
        drop(registry);
        let registry = Registry::open(&dir.0).unwrap();
        assert!(registry.never_moves(child.pid()));
        let rows = Registry::rows(&registry.living(), &[HomePid(own)], NodeId(1));
        // Children of other tests descend from this process as well.
        let row = rows.iter().find(|row| row.pid == HomePid(child.pid())).unwrap();
        assert_eq!((&*row.state, &*row.reason), ("home", "started with nomig"));
        assert_eq!(row.command, "sleep 100");
        assert_eq!(row.started, Some(StartedAs { job: None, locked: true, never: true }));
        assert!(rows.iter().all(|row| row.pid != HomePid(own)), "a shim has reported it");
    }

    #[test]
    fn orphan_keeps_the_registration_of_its_parent() {
        use std::io::{BufRead, BufReader};
        let dir = Scratch::new("orphan");
        let registry = Registry::open(&dir.0).unwrap();
        let mut parent = Command::new("sh");
        let parent = parent.args(["-c", "sleep 100 & echo $!; wait"]).stdout(std::process::Stdio::piped());
        let mut parent = parent.spawn().unwrap();
        let mut child = String::new();
        BufReader::new(parent.stdout.take().unwrap()).read_line(&mut child).unwrap();
        let child: i32 = child.trim().parse().unwrap();
        registry.register(parent.id() as i32, Lock::Unlocked, true, Advice::default(), false).unwrap();
        registry.living();
        parent.kill().unwrap();
        parent.wait().unwrap();
        let (never_moves, started_as) = (registry.never_moves(child), registry.started_as(child));
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(child).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        assert!(never_moves && started_as.is_some_and(|started| started.never));
    }

    #[test]
    fn ended_processes_are_dropped() {
        let dir = Scratch::new("ended");
        let registry = Registry::open(&dir.0).unwrap();
        let child = Sleeper::new();
        let pid = child.pid();
        registry.register(pid, Lock::Unlocked, false, Advice::default(), false).unwrap();
        drop(child);
        assert!(Registry::rows(&registry.living(), &[], NodeId(1)).is_empty());
        Registry::open(&dir.0).unwrap();
        assert!(!dir.0.join("processes").join(pid.to_string()).exists());
        assert!(registry.register(pid, Lock::Unlocked, false, Advice::default(), false).is_err());
        // A foreign file is not an error.
        fs::write(dir.0.join("processes/x"), "y").unwrap();
        assert!(Registry::open(&dir.0).is_ok());
    }

    fn process_of(pid: i32, start: u64, parent: i32, group: i32) -> tern_load::ProcessSample {
        tern_load::ProcessSample {
            pid,
            start,
            parent,
            group,
            session: 1,
            terminal: false,
            user: 0,
            command: String::new(),
            state: 'S',
            threads: 1,
            used: std::time::Duration::ZERO,
            resident: 0,
            io: None,
            rates: None,
        }
    }

    #[test]
    fn descendants_are_found_after_their_parents_have_ended() {
        let dir = Scratch::new("descendants");
        let registry = Registry::open(&dir.0).unwrap();
        let child = Sleeper::new();
        let start = read_stat(child.pid()).unwrap().start;
        let advice = Advice { job: Some(7), ..Advice::default() };
        registry.register(child.pid(), Lock::Unlocked, false, advice, false).unwrap();
        // Pids that no process of this machine has.
        let (own, kid, grandkid, member, other) = (child.pid(), 5_000_001, 5_000_002, 5_000_003, 5_000_004);
        let all = |kids_parent, with_kid: bool| {
            let mut all = vec![process_of(own, start, 1, own), process_of(grandkid, 2, kids_parent, 1)];
            all.extend(with_kid.then(|| process_of(kid, 1, own, 1)));
            // Its parent ended before the first scan, but it is in the group of the first process.
            all.push(process_of(member, 3, 1, own));
            all.push(process_of(other, 4, 1, 1));
            all
        };
        let found = |all: &[tern_load::ProcessSample]| {
            let mut pids: Vec<_> = registry.descendants(all).iter().map(|one| one.pid).collect();
            pids.sort_unstable();
            pids
        };
        assert_eq!(found(&all(kid, true)), [own, kid, grandkid, member]);
        assert_eq!(registry.descendants(&all(kid, true))[1].registration.advice.job, Some(7));
        assert_eq!(found(&all(1, false)), [own, grandkid, member], "it is init's child now");
        // Another process with the same pid does not match.
        let reborn: Vec<_> =
            all(1, false).into_iter().map(|one| process_of(one.pid, one.start + 1, 1, 1)).collect();
        assert_eq!(found(&reborn), [0; 0]);
    }
}
