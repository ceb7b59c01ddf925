//! What processes have used away, for when nobody holds them.
//!
//! Home's kernel knows nothing of that time. While a family holds a process it keeps it in memory; when it lets one go
//! that is home, it writes it down in `RUN/spent/PID`. Whichever shim takes the process into its hand again reads it there;
//! and if the process ends at home, the deputy that waits for it, as its parent, finds there what is to be added.
//!
//! An entry is of a process, which its pid and its start time name. Nobody waits for those whose parents run at home by
//! themselves: what is left of them is swept out when a family ends.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tern_ids::HomePid;
use tern_migrate::CpuTime;
use tern_tracee::procfs;

/// CPU time used away.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Spent {
    /// By the process.
    pub(crate) own: CpuTime,
    /// By its descendants that have ended and been waited for: home's kernel counts the same of what they used there.
    pub(crate) children: CpuTime,
    /// By its threads, as far as it is known.
    pub(crate) threads: BTreeMap<HomePid, CpuTime>,
}

impl Spent {
    /// What who waits for this process is told of it.
    pub(crate) fn sum(&self) -> CpuTime {
        self.own.and(self.children)
    }
}

/// The folder of the entries.
#[derive(Debug)]
pub(crate) struct Ledger {
    folder: PathBuf,
}

/// What is younger may still be looked for: its process may have been waited for just now.
const FRESH: Duration = Duration::from_secs(10);

impl Ledger {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { folder: run_dir.join("spent") }
    }

    fn path(&self, pid: HomePid) -> PathBuf {
        self.folder.join(pid.to_string())
    }

    /// Writes down what a process, which began at `started`, has used. If that cannot be, it is lost, as it would be
    /// without us.
    pub(crate) fn put(&self, pid: HomePid, started: u64, spent: &Spent) {
        if spent.sum() == CpuTime::default() {
            return;
        }
        let text = write(started, spent);
        // Whole or not at all.
        let half = self.folder.join(format!("{pid}.new"));
        let done = fs::create_dir_all(&self.folder)
            .and_then(|()| fs::write(&half, text))
            .and_then(|()| fs::rename(&half, self.path(pid)));
        if let Err(error) = done {
            tracing::warn!(%pid, %error, "what it used away cannot be written down");
        }
    }

    /// What a process has used that is alive or was just now; it stays written down.
    pub(crate) fn look(&self, pid: HomePid) -> Option<Spent> {
        self.entry(pid).ok().map(|(_, spent)| spent)
    }

    /// What this process has used, and an end to its entry.
    pub(crate) fn take(&self, pid: HomePid, started: u64) -> Option<Spent> {
        let entry = self.entry(pid).ok();
        self.strike(pid);
        entry.filter(|(of, _)| *of == started).map(|(_, spent)| spent)
    }

    /// Puts an end to an entry.
    pub(crate) fn strike(&self, pid: HomePid) {
        let _was_none = fs::remove_file(self.path(pid));
    }

    fn entry(&self, pid: HomePid) -> io::Result<(u64, Spent)> {
        let text = fs::read_to_string(self.path(pid))?;
        read(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Removes the entries of processes that have been gone for a while.
    pub(crate) fn sweep(&self) {
        for file in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let pid = file.file_name().to_str().and_then(|name| name.parse().ok()).map(HomePid);
            let entry = pid.and_then(|pid| Some((pid, self.entry(pid).ok()?.0)));
            let lives = entry.is_some_and(|(pid, started)| {
                procfs::stat(pid.0).is_ok_and(|stat| stat.start_time() == started)
            });
            let age = file.metadata().and_then(|data| data.modified()).map(|time| time.elapsed());
            if !lives && matches!(age, Ok(Ok(age)) if age > FRESH) {
                let _gone_already = fs::remove_file(file.path());
            }
        }
    }
}

/// A line of the process: when it began, its own time and its children's; and one of each thread.
fn write(started: u64, spent: &Spent) -> String {
    let (own, children) = (spent.own, spent.children);
    let mut text = format!("{started} {} {} {} {}\n", own.user, own.system, children.user, children.system);
    for (tid, used) in &spent.threads {
        text += &format!("{tid} {} {}\n", used.user, used.system);
    }
    text
}

fn read(text: &str) -> Option<(u64, Spent)> {
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
    Some((started, Spent { own, children, threads }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spent() -> Spent {
        let time = |user, system| CpuTime { user, system };
        let threads = [(HomePid(7), time(1, 2)), (HomePid(9), time(3, 4))].into();
        Spent { own: time(50, 6), children: time(70, 8), threads }
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(read(&write(4711, &spent())), Some((4711, spent())));
        let bare = Spent { threads: BTreeMap::new(), ..spent() };
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
    fn an_entry_is_of_one_process_and_is_swept_out_when_that_is_gone() {
        let dir = std::env::temp_dir().join(format!("tern-ledger-{}", std::process::id()));
        let ledger = Ledger::new(&dir);
        let me = HomePid(std::process::id() as i32);
        let started = procfs::stat(me.0).unwrap().start_time();
        ledger.put(me, started, &Spent::default());
        assert_eq!(ledger.look(me), None, "nothing is not worth a file");
        ledger.put(me, started, &spent());
        ledger.sweep();
        assert_eq!(ledger.look(me), Some(spent()));
        assert_eq!(ledger.take(me, started), Some(spent()));
        assert_eq!(ledger.take(me, started), None);
        ledger.put(me, started + 1, &spent());
        assert_eq!(ledger.take(me, started), None, "another process had that number");
        ledger.put(me, started + 1, &spent());
        ledger.sweep();
        assert!(ledger.look(me).is_some(), "it may have been waited for just now");
        let old = std::time::SystemTime::now() - 2 * FRESH;
        fs::File::options().write(true).open(ledger.path(me)).unwrap().set_modified(old).unwrap();
        ledger.sweep();
        assert_eq!(ledger.look(me), None);
        fs::remove_dir_all(dir).unwrap();
    }
}
