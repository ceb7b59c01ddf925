//! The nodes that processes have chosen for their files: `/mfs/selected`, and `/mfs/magic`.
//!
//! A process has what it has chosen, or what its parent had when it forked. When that was is known from when it started, and
//! when a choice was made is kept with it, so that what a parent chooses later is not its child's: to a clock tick of 10 ms.
//! Who descends from one that has ended is remembered by what was seen at the last look, each second.
//!
//! One small file for each process that has chosen, and one for those who have it from others, so that a restarted ternd knows them.

use crate::files;
use crate::procfs::process;
use crate::slots::lock;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{fs, io};
use tern_ids::NodeId;

/// So many choices of one process are kept: its oldest children go by the oldest of these.
const MOST_CHOICES: usize = 32;

/// So many processes that have chosen, of each kind.
const MOST: usize = 65_536;

/// What processes have from their parents, in one file.
const INHERITED: &str = "inherited";

/// No other file is longer.
const MOST_TEXT: usize = 4096;

/// No tree of processes is deeper; one that moves to another parent while we climb must not lead us round for ever.
const DEEPEST: usize = 1000;

/// What one process has chosen, and when, in clock ticks since boot; 0 is its home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Choices {
    /// When it started, so that a later one with the same number is not taken for it.
    start: u64,
    made: Vec<(u64, u16)>,
}

impl Choices {
    /// What held then.
    fn at(&self, tick: u64) -> Option<u16> {
        self.made.iter().rev().find(|(since, _)| *since <= tick).map(|(_, node)| *node)
    }
}

/// What processes have chosen under one name.
#[derive(Debug)]
pub(crate) struct Places {
    directory: PathBuf,
    now: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    chosen: HashMap<i32, Choices>,
    /// What each process, by number and start, had from its parents when it was looked at last.
    inherited: HashMap<(i32, u64), u16>,
}

/// A process as far as it matters here.
#[derive(Debug, Clone, Copy)]
struct Relative {
    parent: i32,
    start: u64,
}

impl Known {
    /// What the process of this number, and those that it descends from, had chosen by then.
    fn climb(&self, pid: i32, tick: u64, find: impl Fn(i32) -> Option<Relative>) -> Option<u16> {
        let (mut at, mut then) = (pid, tick);
        for _ in 0..DEEPEST {
            let found = find(at)?;
            let own = self.chosen.get(&at).filter(|choices| choices.start == found.start);
            if let Some(node) = own.and_then(|choices| choices.at(then)) {
                return Some(node);
            }
            if let Some(node) = self.inherited.get(&(at, found.start)) {
                return Some(*node);
            }
            // It forked from its parent when it started.
            (at, then) = (found.parent, then.min(found.start));
        }
        None
    }
}

impl Places {
    /// Reads what an earlier ternd left.
    pub(crate) fn open(run_dir: &Path, name: &str) -> io::Result<Self> {
        let directory = run_dir.join(name);
        fs::create_dir_all(&directory)?;
        let mut known = Known::default();
        let text = files::read_bounded(&directory.join(INHERITED), MOST * 64).unwrap_or_default();
        let rows: Vec<(i32, u64, u16)> = serde_json::from_str(&text).unwrap_or_default();
        let lives = |(pid, start, _): &(i32, u64, u16)| process(*pid).is_some_and(|now| now.start == *start);
        let living = rows.into_iter().filter(lives);
        known.inherited = living.map(|(pid, start, node)| ((pid, start), node)).collect();
        for file in fs::read_dir(&directory)?.flatten().filter(|file| file.file_name() != INHERITED) {
            let read = file.file_name().to_str().and_then(|name| name.parse().ok()).and_then(|pid| {
                let text = files::read_bounded(&file.path(), MOST_TEXT).ok()?;
                let choices: Choices = serde_json::from_str(&text).ok()?;
                has_chosen(pid, &choices).then_some((pid, choices))
            });
            match read {
                Some((pid, choices)) => drop(known.chosen.insert(pid, choices)),
                None => drop(fs::remove_file(file.path())),
            }
        }
        Ok(Self { directory, now: Mutex::new(known) })
    }

    /// What a process means by the name; nothing if neither it nor those that it descends from have chosen.
    pub(crate) fn of(&self, pid: i32) -> Option<NodeId> {
        let known = lock(&self.now);
        known.climb(pid, u64::MAX, relative).filter(|node| *node > 0).map(NodeId)
    }

    /// A process chooses, for itself and what it forks from now on.
    ///
    /// # Errors
    /// If it is gone, or that cannot be written down; nothing has changed then.
    pub(crate) fn choose(&self, pid: i32, node: Option<NodeId>) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let start = process(pid).ok_or_else(gone)?.start;
        let node = node.map_or(0, |node| node.0);
        let mut known = lock(&self.now);
        let mut choices = known
            .chosen
            .get(&pid)
            .filter(|choices| choices.start == start)
            .cloned()
            .unwrap_or(Choices { start, made: Vec::new() });
        if choices.made.last().is_some_and(|(_, last)| *last == node) {
            return Ok(());
        }
        choices.made.push((now(), node));
        if choices.made.len() > MOST_CHOICES {
            choices.made.remove(0);
        }
        if known.chosen.len() >= MOST {
            self.sweep(&mut known);
            if known.chosen.len() >= MOST {
                return Err(io::Error::other("too many processes have chosen a node"));
            }
        }
        files::replace(&self.directory.join(pid.to_string()), &serde_json::to_string(&choices)?, 0o600)?;
        known.chosen.insert(pid, choices);
        Ok(())
    }

    /// Remembers what each of these processes, all of the node, has from its parents, which may end.
    pub(crate) fn look(&self, all: &[tern_load::Process]) {
        let mut known = lock(&self.now);
        if known.chosen.is_empty() && known.inherited.is_empty() {
            return;
        }
        self.sweep(&mut known);
        let found: HashMap<i32, Relative> =
            all.iter().map(|one| (one.pid, Relative { parent: one.parent, start: one.start })).collect();
        let inherits = |one: &tern_load::Process| {
            let key = (one.pid, one.start);
            // What it has chosen itself is not from its parents.
            let from_parents = || known.climb(one.parent, one.start, |at| found.get(&at).copied());
            Some((key, known.inherited.get(&key).copied().or_else(from_parents)?))
        };
        let inherited: HashMap<_, _> = all.iter().filter_map(inherits).take(MOST).collect();
        if inherited == known.inherited {
            return;
        }
        let rows: Vec<(i32, u64, u16)> =
            inherited.iter().map(|((pid, start), node)| (*pid, *start, *node)).collect();
        let text = serde_json::to_string(&rows).unwrap_or_default();
        if let Err(error) = files::replace(&self.directory.join(INHERITED), &text, 0o600) {
            tracing::warn!(%error, "what processes have from their parents is not written down");
        }
        known.inherited = inherited;
    }

    /// Forgets processes that have ended.
    fn sweep(&self, known: &mut Known) {
        let ended = known.chosen.iter().filter(|(pid, choices)| !has_chosen(**pid, choices));
        let ended: Vec<i32> = ended.map(|(pid, _)| *pid).collect();
        for pid in ended {
            known.chosen.remove(&pid);
            let _gone = fs::remove_file(self.directory.join(pid.to_string()));
        }
    }
}

fn relative(pid: i32) -> Option<Relative> {
    process(pid).map(|found| Relative { parent: found.parent, start: found.start })
}

fn has_chosen(pid: i32, choices: &Choices) -> bool {
    process(pid).is_some_and(|found| found.start == choices.start)
}

/// In the clock ticks in which `/proc` says when a process started.
fn now() -> u64 {
    crate::cluster::now_ms() / 10
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
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

    fn of(pid: i32, start: u64, parent: i32) -> tern_load::Process {
        tern_load::Process {
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
    fn a_child_has_what_its_parent_had_when_it_forked() {
        let dir = Scratch::new("places");
        let places = Places::open(&dir.0, "selected").unwrap();
        let own = std::process::id() as i32;
        let early = Sleeper::new();
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(places.of(own), None);
        places.choose(own, Some(NodeId(3))).unwrap();
        std::thread::sleep(Duration::from_millis(30));
        let late = Sleeper::new();
        std::thread::sleep(Duration::from_millis(30));
        places.choose(own, Some(NodeId(4))).unwrap();
        assert_eq!(places.of(own), Some(NodeId(4)));
        assert_eq!(places.of(late.pid()), Some(NodeId(3)));
        assert_eq!(places.of(early.pid()), None, "it has forked before");
        places.choose(late.pid(), Some(NodeId(7))).unwrap();
        assert_eq!(places.of(late.pid()), Some(NodeId(7)));
        places.choose(own, None).unwrap();
        assert_eq!(places.of(own), None, "back to its home");
        // A restarted ternd knows the same.
        let again = Places::open(&dir.0, "selected").unwrap();
        assert_eq!((again.of(late.pid()), again.of(own)), (Some(NodeId(7)), None));
        assert!(places.choose(0, Some(NodeId(1))).is_err());
    }

    #[test]
    fn who_has_lost_his_parent_keeps_what_he_had_of_it() {
        let dir = Scratch::new("orphans");
        let places = Places::open(&dir.0, "selected").unwrap();
        let parent = Sleeper::new();
        places.choose(parent.pid(), Some(NodeId(5))).unwrap();
        let start = process(parent.pid()).unwrap().start;
        // This process stands for a child of it that has started later.
        let (pid, kid) = (parent.pid(), std::process::id() as i32);
        let kid_start = process(kid).unwrap().start;
        lock(&places.now).chosen.get_mut(&pid).unwrap().made[0].0 = kid_start;
        places.look(&[of(pid, start, 1), of(kid, kid_start, pid)]);
        drop(parent);
        places.look(&[of(kid, kid_start, 1)]);
        assert_eq!(places.of(kid), Some(NodeId(5)));
        assert!(lock(&places.now).chosen.is_empty(), "it has ended");
        assert_eq!(fs::read_dir(dir.0.join("selected")).unwrap().count(), 1);
        assert_eq!(Places::open(&dir.0, "selected").unwrap().of(kid), Some(NodeId(5)));
        places.look(&[]);
        assert!(lock(&places.now).inherited.is_empty());
    }

    #[test]
    fn only_so_much_is_remembered() {
        let dir = Scratch::new("choices");
        let places = Places::open(&dir.0, "magic").unwrap();
        let own = std::process::id() as i32;
        for node in 1..=100 {
            places.choose(own, Some(NodeId(node))).unwrap();
        }
        assert_eq!(lock(&places.now).chosen[&own].made.len(), MOST_CHOICES);
        assert_eq!(places.of(own), Some(NodeId(100)));
        fs::write(dir.0.join("magic/x"), "y").unwrap();
        fs::write(dir.0.join("magic/1"), "{").unwrap();
        assert_eq!(Places::open(&dir.0, "magic").unwrap().of(own), Some(NodeId(100)));
    }
}
