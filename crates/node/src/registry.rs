//! The processes that were started with mosrun or nomig, and what was said of them.
//!
//! One small file each, named by the process, so that a restarted ternd knows them, and a start costs the
//! same however many there are.

use crate::procfs::{self, process};
use crate::slots::lock;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{fs, io};
use tern_control::{Advice, Lock, ProcessRow, StartedAs, Usage};
use tern_ids::{HomePid, NodeId};
use tern_load::{Processes, Which};

/// How many starts lie between two looks for processes that have ended.
const BETWEEN_SWEEPS: usize = 64;

/// What was said of one process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// When the process started, so that a later one with the same number is not taken for it.
    start: u64,
    /// The cluster does not move it by itself.
    pub(crate) locked: bool,
    /// Nobody moves it.
    pub(crate) never: bool,
    pub(crate) advice: Advice,
}

impl Entry {
    /// Of a process of which nothing was said.
    pub(crate) fn of_nobody(start: u64) -> Self {
        Self { start, locked: false, never: false, advice: Advice::default() }
    }
}

/// A process that was started with mosrun or nomig, or descends from one that was.
#[derive(Debug, Clone)]
pub(crate) struct Started {
    pub(crate) pid: i32,
    pub(crate) start: u64,
    pub(crate) said: Entry,
}

/// All registered processes.
#[derive(Debug)]
pub(crate) struct Registry {
    directory: PathBuf,
    entries: Mutex<HashMap<i32, Entry>>,
    /// What held for each process when it was looked at last.
    orphans: Mutex<HashMap<(i32, u64), Entry>>,
}

impl Registry {
    /// Reads what an earlier ternd left.
    pub(crate) fn open(run_dir: &Path) -> io::Result<Self> {
        let directory = run_dir.join("processes");
        fs::create_dir_all(&directory)?;
        let mut entries = HashMap::new();
        for file in fs::read_dir(&directory)?.flatten() {
            let read = file.file_name().to_str().and_then(|name| name.parse().ok()).and_then(|pid| {
                let entry: Entry = serde_json::from_str(&fs::read_to_string(file.path()).ok()?).ok()?;
                lives(pid, &entry).then_some((pid, entry))
            });
            match read {
                Some((pid, entry)) => drop(entries.insert(pid, entry)),
                None => drop(fs::remove_file(file.path())),
            }
        }
        Ok(Self { directory, entries: Mutex::new(entries), orphans: Mutex::default() })
    }

    /// Notes a process; what is `Keep` it takes from its nearest registered ancestor.
    pub(crate) fn register(&self, pid: i32, wish: Lock, never: bool, advice: Advice) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let start = process(pid).ok_or_else(gone)?.start;
        let inherited = self.nearest(pid);
        let locked = match wish {
            Lock::Locked => true,
            Lock::Unlocked => false,
            Lock::Keep => inherited.as_ref().is_some_and(|entry| entry.locked),
        };
        let never = never || inherited.as_ref().is_some_and(|entry| entry.never);
        let advice = inherited.map_or(advice.clone(), |entry| advice.or(&entry.advice));
        let entry = Entry { start, locked, never, advice };
        fs::write(self.directory.join(pid.to_string()), serde_json::to_string(&entry)?)?;
        let mut entries = lock(&self.entries);
        entries.insert(pid, entry);
        if entries.len().is_multiple_of(BETWEEN_SWEEPS) {
            let ended: Vec<_> = entries.iter().filter(|(pid, entry)| !lives(**pid, entry)).collect();
            let ended: Vec<_> = ended.into_iter().map(|(pid, _)| *pid).collect();
            for pid in ended {
                entries.remove(&pid);
                let _gone = fs::remove_file(self.directory.join(pid.to_string()));
            }
        }
        Ok(())
    }

    /// Whether the process, or one that it descends from, was started with nomig.
    pub(crate) fn never_moves(&self, pid: i32) -> bool {
        self.nearest(pid).is_some_and(|entry| entry.never)
    }

    /// How the process, or its nearest ancestor of which something was said, was started.
    pub(crate) fn started(&self, pid: i32) -> Option<StartedAs> {
        self.nearest(pid).map(|entry| entry.shown())
    }

    /// What was said of the process, or of its nearest ancestor of which something was.
    pub(crate) fn advice(&self, pid: i32) -> Advice {
        self.nearest(pid).map(|entry| entry.advice).unwrap_or_default()
    }

    /// Of these processes of the node, those that were started with mosrun or nomig, and their descendants, also those
    /// whose parents have ended since the last time that this was asked.
    pub(crate) fn descendants(&self, all: &[tern_load::Process]) -> Vec<Started> {
        let started = self.find(all);
        *lock(&self.orphans) = held_for(&started).collect();
        started
    }

    fn find(&self, all: &[tern_load::Process]) -> Vec<Started> {
        let entries = lock(&self.entries).clone();
        let orphans = lock(&self.orphans).clone();
        let found: HashMap<i32, &tern_load::Process> = all.iter().map(|one| (one.pid, one)).collect();
        let said_of = |one: &tern_load::Process| {
            entries
                .get(&one.pid)
                .filter(|entry| entry.start == one.start)
                .cloned()
                .or_else(|| orphans.get(&(one.pid, one.start)).cloned())
        };
        let climb = |one: &tern_load::Process| {
            let mut at = one;
            // No tree is deeper; a parent that was read later than its child could make a circle.
            for _ in 0..1000 {
                if let Some(said) = said_of(at) {
                    return Some(said);
                }
                // A group is named by the process that made it, and nobody else of that name can come while it lasts.
                if let Some(said) =
                    found.get(&at.group).filter(|_| at.group != at.pid).and_then(|leader| said_of(leader))
                {
                    return Some(said);
                }
                at = found.get(&at.parent)?;
            }
            None
        };
        all.iter()
            .filter_map(|one| Some(Started { pid: one.pid, start: one.start, said: climb(one)? }))
            .collect()
    }

    /// The entry of the process, or of its nearest ancestor that has one.
    fn nearest(&self, pid: i32) -> Option<Entry> {
        let entries = lock(&self.entries).clone();
        let mut at = pid;
        // A process can move to another parent while we climb, so there is an end to it.
        for _ in 0..10_000 {
            let found = process(at)?;
            if let Some(entry) = entries.get(&at).filter(|entry| entry.start == found.start) {
                return Some(entry.clone());
            }
            at = found.parent;
        }
        None
    }

    /// All that live of those that were started with mosrun or nomig, and their descendants.
    pub(crate) fn living(&self) -> Vec<Started> {
        let started = self.find(&Processes::default().scan(Which::All));
        // What the balancer has found meanwhile, and we have not, is not forgotten: it looks again, and forgets.
        lock(&self.orphans).extend(held_for(&started));
        started
    }

    /// A row for each of them, except those that a shim has told of.
    pub(crate) fn rows(living: &[Started], except: &[HomePid], node: NodeId) -> Vec<ProcessRow> {
        let row = |one: &Started| {
            let pid = one.pid;
            let found = process(pid).filter(|found| found.start == one.start && !found.zombie)?;
            let reason = match &one.said {
                Entry { never: true, .. } => "started with nomig",
                Entry { locked: true, .. } => "locked",
                _ => "",
            };
            Some(ProcessRow {
                pid: HomePid(pid),
                uid: procfs::users(pid)?.0,
                r#where: Some(node),
                from: None,
                state: "home".into(),
                cpu_seconds: found.cpu_seconds,
                migrations: 0,
                reason: reason.into(),
                command: procfs::command(pid),
                usage: Usage::default(),
                started: Some(one.said.shown()),
            })
        };
        living.iter().filter(|one| !except.contains(&HomePid(one.pid))).filter_map(row).collect()
    }
}

impl Entry {
    /// As tools show it.
    pub(crate) fn shown(&self) -> StartedAs {
        StartedAs { job: self.advice.job, locked: self.locked, never: self.never }
    }
}

/// What held for each of these.
fn held_for(started: &[Started]) -> impl Iterator<Item = ((i32, u64), Entry)> {
    started.iter().map(|one| ((one.pid, one.start), one.said.clone()))
}

fn lives(pid: i32, entry: &Entry) -> bool {
    process(pid).is_some_and(|found| found.start == entry.start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::process::{Child, Command};

    struct Sleeper(Child);

    impl Sleeper {
        fn new() -> Self {
            let child = Command::new("sleep").arg("100").spawn().unwrap();
            // The new program's words come a moment after its spawn is reported.
            while procfs::command(child.id() as i32) != "sleep 100" {
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
    fn what_was_said_is_inherited_and_survives_a_restart() {
        let dir = Scratch::new("registry");
        let registry = Registry::open(&dir.0).unwrap();
        let (child, own) = (Sleeper::new(), std::process::id() as i32);
        assert!(!registry.never_moves(child.pid()));
        registry.register(own, Lock::Locked, true, Advice::default()).unwrap();
        assert!(registry.never_moves(child.pid()), "a child of a process started with nomig");
        registry.register(child.pid(), Lock::Keep, false, Advice::default()).unwrap();
        drop(registry);
        let registry = Registry::open(&dir.0).unwrap();
        assert!(registry.never_moves(child.pid()));
        let rows = Registry::rows(&registry.living(), &[HomePid(own)], NodeId(1));
        // Other tests' children descend from this process as well.
        let row = rows.iter().find(|row| row.pid == HomePid(child.pid())).unwrap();
        assert_eq!((&*row.state, &*row.reason), ("home", "started with nomig"));
        assert_eq!(row.command, "sleep 100");
        assert_eq!(row.started, Some(StartedAs { job: None, locked: true, never: true }));
        assert!(rows.iter().all(|row| row.pid != HomePid(own)), "a shim has told of it");
    }

    #[test]
    fn the_ended_are_forgotten() {
        let dir = Scratch::new("ended");
        let registry = Registry::open(&dir.0).unwrap();
        let child = Sleeper::new();
        let pid = child.pid();
        registry.register(pid, Lock::Unlocked, false, Advice::default()).unwrap();
        drop(child);
        assert!(Registry::rows(&registry.living(), &[], NodeId(1)).is_empty());
        Registry::open(&dir.0).unwrap();
        assert!(!dir.0.join("processes").join(pid.to_string()).exists());
        assert!(registry.register(pid, Lock::Unlocked, false, Advice::default()).is_err());
        // A file that is none of ours is no reason to fail.
        fs::write(dir.0.join("processes/x"), "y").unwrap();
        assert!(Registry::open(&dir.0).is_ok());
    }

    fn process_of(pid: i32, start: u64, parent: i32, group: i32) -> tern_load::Process {
        tern_load::Process {
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
    fn descendants_are_found_also_when_their_parents_are_gone() {
        let dir = Scratch::new("descendants");
        let registry = Registry::open(&dir.0).unwrap();
        let child = Sleeper::new();
        let start = process(child.pid()).unwrap().start;
        let advice = Advice { job: Some(7), ..Advice::default() };
        registry.register(child.pid(), Lock::Unlocked, false, advice).unwrap();
        // Numbers that no process of this machine has.
        let (own, kid, grandkid, member, other) = (child.pid(), 5_000_001, 5_000_002, 5_000_003, 5_000_004);
        let all = |kids_parent, with_kid: bool| {
            let mut all = vec![process_of(own, start, 1, own), process_of(grandkid, 2, kids_parent, 1)];
            all.extend(with_kid.then(|| process_of(kid, 1, own, 1)));
            // Its parent has ended before anybody looked, but it is of the group that was made for the first.
            all.push(process_of(member, 3, 1, own));
            all.push(process_of(other, 4, 1, 1));
            all
        };
        let found = |all: &[tern_load::Process]| {
            let mut pids: Vec<_> = registry.descendants(all).iter().map(|one| one.pid).collect();
            pids.sort_unstable();
            pids
        };
        assert_eq!(found(&all(kid, true)), [own, kid, grandkid, member]);
        assert_eq!(registry.descendants(&all(kid, true))[1].said.advice.job, Some(7));
        assert_eq!(found(&all(1, false)), [own, grandkid, member], "it is init's child now");
        // Another process of the same number is another process.
        let reborn: Vec<_> =
            all(1, false).into_iter().map(|one| process_of(one.pid, one.start + 1, 1, 1)).collect();
        assert_eq!(found(&reborn), [0; 0]);
    }
}
