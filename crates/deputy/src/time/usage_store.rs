//! Stores the CPU time that processes have used away, while no shim holds them.
//!
//! Home's kernel does not know that time. While a shim holds a process it keeps the time in memory.
//! When it detaches from a process at home, it saves the time in a file ([`used_away`]), where `mps`
//! finds it. The next shim that seizes the process reads it there. If the process ends at home while
//! its parent is away, the parent's shim adds the saved time to the result of the parent's wait.
//!
//! An entry belongs to a process identified by pid and start time. Parents that run untraced at
//! home never collect their children's entries; those left over are removed when a shim ends.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tern_control::{ReadError, read_process, used_away};
use tern_ids::HomePid;
use tern_migrate::CpuTime;
use tern_tracee::procfs;

/// CPU time used away.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SavedUsage {
    /// By the process.
    pub(crate) own: CpuTime,
    /// By its descendants that have ended and been waited for, as home's kernel counts
    /// RUSAGE_CHILDREN.
    pub(crate) children: CpuTime,
    /// By its threads, as far as known.
    pub(crate) threads: BTreeMap<HomePid, CpuTime>,
}

impl SavedUsage {
    /// The total that a wait for this process reports.
    pub(crate) fn sum(&self) -> CpuTime {
        self.own.and(self.children)
    }
}

/// The directory of the entries.
#[derive(Debug)]
pub(crate) struct UsageStore {
    folder: PathBuf,
}

/// A younger entry is kept: its process may have been waited for just now.
const MIN_SWEEP_AGE: Duration = Duration::from_secs(10);

impl UsageStore {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { folder: used_away::folder(run_dir) }
    }

    fn path(&self, pid: HomePid) -> PathBuf {
        self.folder.join(pid.to_string())
    }

    /// Saves the CPU time of a process with this start time. If that fails the time is lost, as it
    /// would be without Tern.
    pub(crate) fn save(&self, pid: HomePid, started: u64, saved_usage: &SavedUsage) {
        if saved_usage.sum() == CpuTime::default() {
            return;
        }
        let text = write(started, saved_usage);
        // Written to a temporary file and renamed, so that it is complete or absent.
        let half = self.folder.join(format!("{pid}.new"));
        let done = fs::create_dir_all(&self.folder)
            .and_then(|()| fs::write(&half, text))
            .and_then(|()| fs::rename(&half, self.path(pid)));
        if let Err(error) = done {
            tracing::warn!(%pid, %error, "the CPU time that it used away cannot be saved");
        }
    }

    /// The CPU time of a process that is alive, or was just now. The entry stays. If the process is
    /// gone, its start time is unknown, and the entry counts as its own.
    pub(crate) fn peek(&self, pid: HomePid) -> Option<SavedUsage> {
        let (started, saved_usage) = self.entry(pid).ok()?;
        let is_another = start_time(pid).is_ok_and(|start| start != started);
        (!is_another).then_some(saved_usage)
    }

    /// Returns the CPU time of this process and removes its entry.
    pub(crate) fn take(&self, pid: HomePid, started: u64) -> Option<SavedUsage> {
        let entry = self.entry(pid).ok();
        self.remove(pid);
        entry.filter(|(of, _)| *of == started).map(|(_, saved_usage)| saved_usage)
    }

    /// Removes an entry.
    pub(crate) fn remove(&self, pid: HomePid) {
        let _was_none = fs::remove_file(self.path(pid));
    }

    fn entry(&self, pid: HomePid) -> io::Result<(u64, SavedUsage)> {
        let text = fs::read_to_string(self.path(pid))?;
        read(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Removes the entries of processes that have been gone for a while.
    pub(crate) fn sweep(&self) {
        for file in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let pid = file.file_name().to_str().and_then(|name| name.parse().ok()).map(HomePid);
            let entry = pid.and_then(|pid| Some((pid, self.entry(pid).ok()?.0)));
            let is_alive = entry.is_some_and(|(pid, started)| match start_time(pid) {
                Ok(start) => start == started,
                Err(error) => error == ReadError::Overdue,
            });
            let age = file.metadata().and_then(|data| data.modified()).map(|time| time.elapsed());
            if !is_alive && matches!(age, Ok(Ok(age)) if age > MIN_SWEEP_AGE) {
                let _gone_already = fs::remove_file(file.path());
            }
        }
    }
}

/// When the process with this pid has started. The process may be executing a program, and then the
/// kernel may not answer for any time.
fn start_time(pid: HomePid) -> Result<u64, ReadError> {
    read_process(pid.0, move || Some(procfs::stat(pid.0).ok()?.start_time()))
}

/// A line for the process ([`used_away`]): its start time, its own time, its children's; then one line
/// per thread.
fn write(started: u64, saved_usage: &SavedUsage) -> String {
    let (own, children) = (saved_usage.own, saved_usage.children);
    let mut text = format!("{started} {} {} {} {}\n", own.user, own.system, children.user, children.system);
    for (tid, used) in &saved_usage.threads {
        text += &format!("{tid} {} {}\n", used.user, used.system);
    }
    text
}

fn read(text: &str) -> Option<(u64, SavedUsage)> {
    let mut lines = text.lines().map(|line| {
        let words = line.split(' ').map(|word| word.parse().ok());
        words.collect::<Option<Vec<u64>>>()
    });
    let [started, user, system, children_user, children_system] = *lines.next()?? else { return None };
    let mut threads = BTreeMap::new();
    for line in lines {
        let [tid, user, system] = *line? else { return None };
        threads.insert(HomePid(i32::try_from(tid).ok()?), CpuTime { user, system });
    }
    let own = CpuTime { user, system };
    let children = CpuTime { user: children_user, system: children_system };
    Some((started, SavedUsage { own, children, threads }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved_usage() -> SavedUsage {
        let time = |user, system| CpuTime { user, system };
        let threads = [(HomePid(7), time(1, 2)), (HomePid(9), time(3, 4))].into();
        SavedUsage { own: time(50, 6), children: time(70, 8), threads }
    }

    #[test]
    fn entries_round_trip() {
        assert_eq!(read(&write(4711, &saved_usage())), Some((4711, saved_usage())));
        let bare = SavedUsage { threads: BTreeMap::new(), ..saved_usage() };
        assert_eq!(read(&write(1, &bare)), Some((1, bare)));
        for text in [
            "",
            "1 2 3 4",
            "1 2 3 4 5 6",
            "1 2 3 4 5\nx",
            "1 2 3 4 5\n-7 1 1",
            "1 2 3 4 99999999999999999999",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn entry_belongs_to_one_process_and_is_swept_after_its_end() {
        let dir = std::env::temp_dir().join(format!("tern-ledger-{}", std::process::id()));
        let usage_store = UsageStore::new(&dir);
        let me = HomePid(std::process::id() as i32);
        let started = procfs::stat(me.0).unwrap().start_time();
        usage_store.save(me, started, &SavedUsage::default());
        assert_eq!(usage_store.peek(me), None, "no file for no CPU time");
        usage_store.save(me, started, &saved_usage());
        usage_store.sweep();
        assert_eq!(usage_store.peek(me), Some(saved_usage()));
        assert_eq!(usage_store.take(me, started), Some(saved_usage()));
        assert_eq!(usage_store.take(me, started), None);
        usage_store.save(me, started + 1, &saved_usage());
        assert_eq!(usage_store.take(me, started), None, "another process had that pid");
        usage_store.save(me, started + 1, &saved_usage());
        assert_eq!(usage_store.peek(me), None, "another process had that pid");
        usage_store.sweep();
        assert!(usage_store.entry(me).is_ok(), "it may have been waited for just now");
        let old = std::time::SystemTime::now() - 2 * MIN_SWEEP_AGE;
        fs::File::options().write(true).open(usage_store.path(me)).unwrap().set_modified(old).unwrap();
        usage_store.sweep();
        assert!(usage_store.entry(me).is_err());
        fs::remove_dir_all(dir).unwrap();
    }
}
