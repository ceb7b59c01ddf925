//! The nodes that processes have chosen for their files: `/mfs/selected` and `/mfs/magic`.
//!
//! A process uses its own choice, or the choice that its parent had at the time of the fork. To
//! find the latter, each choice is kept with the time at which it was made, which is compared with
//! the start time of the child; the resolution is one clock tick, 10 ms. The inherited choice of a
//! process whose parent has ended is taken from the last scan of all processes, made once a second.
//!
//! A restarted ternd reads the choices from files: one per process that has chosen, and one with
//! all inherited choices.

use crate::os::clock::boot_ticks;
use crate::os::sync::lock;
use crate::os::text_file;
use crate::process::procfs::{is_same_process, read_stat};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{fs, io};
use tern_ids::NodeId;

/// Maximum number of choices that are kept of one process. Children that are older than all of
/// these have the choice that a scan has recorded for them.
const MAX_CHOICES: usize = 32;

/// Maximum number of processes with a choice, and of processes with an inherited one.
const MAX_PROCESSES: usize = 65_536;

/// The file with all inherited choices.
const INHERITED_FILE: &str = "inherited";

/// Maximum size in bytes of the file with the choices of one process.
const MAX_FILE_LEN: usize = 4096;

/// Maximum number of ancestors that are followed. A process that changes its parent during the walk
/// could make a cycle.
const MAX_ANCESTORS: usize = 1000;

/// The choices of one process, as pairs of the time, in clock ticks since boot, and the node; node
/// 0 is its home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ChoiceHistory {
    /// The start time of the process, which distinguishes it from a later one with the same pid.
    start: u64,
    made: Vec<(u64, u16)>,
}

impl ChoiceHistory {
    /// The choice in effect at that time.
    fn at(&self, tick: u64) -> Option<u16> {
        self.made.iter().rev().find(|(since, _)| *since <= tick).map(|(_, node)| *node)
    }
}

/// The choices of all processes for one name below `/mfs`.
#[derive(Debug)]
pub(crate) struct NodeChoices {
    directory: PathBuf,
    state: Mutex<Choices>,
}

#[derive(Debug, Default)]
struct Choices {
    chosen: HashMap<i32, ChoiceHistory>,
    /// Inherited choices by pid and start time, as of the last scan.
    inherited: HashMap<(i32, u64), u16>,
}

/// The fields of a process that the walk to its ancestors needs.
#[derive(Debug, Clone, Copy)]
struct Lineage {
    parent: i32,
    start: u64,
}

impl Choices {
    /// The choice in effect for a process at that time: its own, or that of its nearest ancestor.
    /// The process itself is the first of `ancestors`.
    fn find_choice(&self, ancestors: impl IntoIterator<Item = (i32, u64)>, tick: u64) -> Option<u16> {
        let mut then = tick;
        for (pid, start) in ancestors {
            let own = self.chosen.get(&pid).filter(|choices| choices.start == start);
            if let Some(node) = own.and_then(|choices| choices.at(then)) {
                return Some(node);
            }
            if let Some(node) = self.inherited.get(&(pid, start)) {
                return Some(*node);
            }
            // The process was forked when it started.
            then = then.min(start);
        }
        None
    }
}

impl NodeChoices {
    /// Loads the choices that an earlier ternd stored.
    pub(crate) fn open(run_dir: &Path, name: &str) -> io::Result<Self> {
        let directory = run_dir.join(name);
        fs::create_dir_all(&directory)?;
        let mut state = Choices::default();
        let text =
            text_file::read_bounded(&directory.join(INHERITED_FILE), MAX_PROCESSES * 64).unwrap_or_default();
        let rows: Vec<(i32, u64, u16)> = serde_json::from_str(&text).unwrap_or_default();
        let living = rows.into_iter().filter(|(pid, start, _)| is_same_process(*pid, *start));
        state.inherited = living.map(|(pid, start, node)| ((pid, start), node)).collect();
        for file in fs::read_dir(&directory)?.flatten().filter(|file| file.file_name() != INHERITED_FILE) {
            let read = file.file_name().to_str().and_then(|name| name.parse().ok()).and_then(|pid| {
                let text = text_file::read_bounded(&file.path(), MAX_FILE_LEN).ok()?;
                let choices: ChoiceHistory = serde_json::from_str(&text).ok()?;
                is_same_process(pid, choices.start).then_some((pid, choices))
            });
            match read {
                Some((pid, choices)) => drop(state.chosen.insert(pid, choices)),
                None => drop(fs::remove_file(file.path())),
            }
        }
        Ok(Self { directory, state: Mutex::new(state) })
    }

    /// The choice of a process; `None` if neither it nor an ancestor has chosen a node.
    pub(crate) fn get(&self, pid: i32) -> Option<NodeId> {
        let lineage =
            |at| read_stat(at).ok().map(|found| Lineage { parent: found.parent, start: found.start });
        // Read before the lock is taken, since a read may be slow.
        let ancestors: Vec<_> = ancestors(pid, lineage).collect();
        lock(&self.state).find_choice(ancestors, u64::MAX).filter(|node| *node > 0).map(NodeId)
    }

    /// Sets the choice of a process and of its future children.
    ///
    /// # Errors
    /// If the process is gone, or the file cannot be written; nothing has changed then.
    pub(crate) fn choose(&self, pid: i32, node: Option<NodeId>) -> io::Result<()> {
        let start = read_stat(pid).map_err(io::Error::other)?.start;
        let node = node.map_or(0, |node| node.0);
        if lock(&self.state).chosen.len() >= MAX_PROCESSES {
            self.drop_ended();
        }
        let mut state = lock(&self.state);
        let mut choices = state
            .chosen
            .get(&pid)
            .filter(|choices| choices.start == start)
            .cloned()
            .unwrap_or(ChoiceHistory { start, made: Vec::new() });
        if choices.made.last().is_some_and(|(_, last)| *last == node) {
            return Ok(());
        }
        choices.made.push((boot_ticks(), node));
        if choices.made.len() > MAX_CHOICES {
            choices.made.remove(0);
        }
        if state.chosen.len() >= MAX_PROCESSES {
            return Err(io::Error::other("too many processes have chosen a node"));
        }
        text_file::replace(&self.directory.join(pid.to_string()), &serde_json::to_string(&choices)?, 0o600)?;
        state.chosen.insert(pid, choices);
        Ok(())
    }

    /// Records the inherited choice of each process, since its parents may end. `all` lists the
    /// processes of this node, without guests.
    pub(crate) fn record_inherited(&self, all: &[tern_load::ProcessSample]) {
        let state = lock(&self.state);
        if state.chosen.is_empty() && state.inherited.is_empty() {
            return;
        }
        drop(state);
        self.drop_ended();
        let mut state = lock(&self.state);
        let found: HashMap<i32, Lineage> =
            all.iter().map(|one| (one.pid, Lineage { parent: one.parent, start: one.start })).collect();
        let inherits = |one: &tern_load::ProcessSample| {
            let key = (one.pid, one.start);
            // Its own choice is not inherited, so the walk starts at the parent.
            let from_parents = || {
                let ancestors = ancestors(one.parent, |at| found.get(&at).copied());
                state.find_choice(ancestors, one.start)
            };
            Some((key, state.inherited.get(&key).copied().or_else(from_parents)?))
        };
        let inherited: HashMap<_, _> = all.iter().filter_map(inherits).take(MAX_PROCESSES).collect();
        if inherited == state.inherited {
            return;
        }
        let rows: Vec<(i32, u64, u16)> =
            inherited.iter().map(|((pid, start), node)| (*pid, *start, *node)).collect();
        let text = serde_json::to_string(&rows).unwrap_or_default();
        if let Err(error) = text_file::replace(&self.directory.join(INHERITED_FILE), &text, 0o600) {
            tracing::warn!(%error, "cannot store the inherited choices");
        }
        state.inherited = inherited;
    }

    /// Drops the choices of processes that have ended.
    fn drop_ended(&self) {
        let chosen: Vec<(i32, u64)> =
            lock(&self.state).chosen.iter().map(|(pid, choices)| (*pid, choices.start)).collect();
        for (pid, start) in chosen.into_iter().filter(|(pid, start)| !is_same_process(*pid, *start)) {
            let mut state = lock(&self.state);
            // Another process with this pid may have chosen since.
            if state.chosen.get(&pid).is_some_and(|choices| choices.start == start) {
                state.chosen.remove(&pid);
                let _gone = fs::remove_file(self.directory.join(pid.to_string()));
            }
        }
    }
}

/// A process and its ancestors, by pid and start time.
fn ancestors(pid: i32, find: impl Fn(i32) -> Option<Lineage>) -> impl Iterator<Item = (i32, u64)> {
    let mut at = pid;
    let ancestor = move || {
        let found = find(at)?;
        Some((std::mem::replace(&mut at, found.parent), found.start))
    };
    std::iter::from_fn(ancestor).take(MAX_ANCESTORS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::scratch::Scratch;
    use std::process::{Child, Command};
    use std::time::Duration;

    struct Sleeper(Child);

    impl Sleeper {
        fn new() -> Self {
            Self(Command::new("sleep").arg("100").spawn().unwrap())
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

    fn of(pid: i32, start: u64, parent: i32) -> tern_load::ProcessSample {
        tern_load::ProcessSample {
            pid,
            start,
            parent,
            group: pid,
            session: 1,
            terminal: false,
            user: 0,
            command: String::new(),
            state: 'S',
            threads: 1,
            used: Duration::ZERO,
            resident: 0,
            io: None,
            rates: None,
        }
    }

    #[test]
    fn child_inherits_the_choice_in_effect_at_fork() {
        let dir = Scratch::new("choices");
        let choices = NodeChoices::open(&dir.0, "selected").unwrap();
        let own = std::process::id() as i32;
        let early = Sleeper::new();
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(choices.get(own), None);
        choices.choose(own, Some(NodeId(3))).unwrap();
        std::thread::sleep(Duration::from_millis(30));
        let late = Sleeper::new();
        std::thread::sleep(Duration::from_millis(30));
        choices.choose(own, Some(NodeId(4))).unwrap();
        assert_eq!(choices.get(own), Some(NodeId(4)));
        assert_eq!(choices.get(late.pid()), Some(NodeId(3)));
        assert_eq!(choices.get(early.pid()), None, "it was forked earlier");
        choices.choose(late.pid(), Some(NodeId(7))).unwrap();
        assert_eq!(choices.get(late.pid()), Some(NodeId(7)));
        choices.choose(own, None).unwrap();
        assert_eq!(choices.get(own), None, "back to its home");
        // A restarted ternd has the same choices.
        let again = NodeChoices::open(&dir.0, "selected").unwrap();
        assert_eq!((again.get(late.pid()), again.get(own)), (Some(NodeId(7)), None));
        assert!(choices.choose(0, Some(NodeId(1))).is_err());
    }

    #[test]
    fn orphan_keeps_its_inherited_choice() {
        let dir = Scratch::new("orphans");
        let choices = NodeChoices::open(&dir.0, "selected").unwrap();
        let parent = Sleeper::new();
        choices.choose(parent.pid(), Some(NodeId(5))).unwrap();
        let start = read_stat(parent.pid()).unwrap().start;
        // The test process acts as a child of the sleeper, forked just after the choice.
        let (pid, kid) = (parent.pid(), std::process::id() as i32);
        let kid_start = read_stat(kid).unwrap().start;
        lock(&choices.state).chosen.get_mut(&pid).unwrap().made[0].0 = kid_start;
        choices.record_inherited(&[of(pid, start, 1), of(kid, kid_start, pid)]);
        drop(parent);
        choices.record_inherited(&[of(kid, kid_start, 1)]);
        assert_eq!(choices.get(kid), Some(NodeId(5)));
        assert!(lock(&choices.state).chosen.is_empty(), "it has ended");
        assert_eq!(fs::read_dir(dir.0.join("selected")).unwrap().count(), 1);
        assert_eq!(NodeChoices::open(&dir.0, "selected").unwrap().get(kid), Some(NodeId(5)));
        choices.record_inherited(&[]);
        assert!(lock(&choices.state).inherited.is_empty());
    }

    #[test]
    fn old_choices_and_invalid_files_are_dropped() {
        let dir = Scratch::new("choices");
        let choices = NodeChoices::open(&dir.0, "magic").unwrap();
        let own = std::process::id() as i32;
        for node in 1..=100 {
            choices.choose(own, Some(NodeId(node))).unwrap();
        }
        assert_eq!(lock(&choices.state).chosen[&own].made.len(), MAX_CHOICES);
        assert_eq!(choices.get(own), Some(NodeId(100)));
        fs::write(dir.0.join("magic/x"), "y").unwrap();
        fs::write(dir.0.join("magic/1"), "{").unwrap();
        assert_eq!(NodeChoices::open(&dir.0, "magic").unwrap().get(own), Some(NodeId(100)));
    }
}
