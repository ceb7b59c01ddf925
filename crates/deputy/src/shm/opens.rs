//! Fetches processes home when another process opens, by name, memory that they share. The other
//! process would see the memory's content as of their departure.
//!
//! The kernel reports the open, not a read right after it, and some programs only open files and
//! close them again (a Java machine does so with the files of all others). So after a report the
//! shim checks, a moment later, whether a process still has the file open. Opens for writing are
//! blocked until the processes are home ([`super::open_blocker`]).

use super::openers::Opener;
use super::shared_memory::MapQuestion;
use super::sharers::Unopened;
use crate::process::Process;
use crate::process::state::State;
use crate::shim::Shim;
use std::collections::{BTreeSet, HashSet};
use tern_ids::HomePid;
use tern_image::object::ObjectId;

impl Shim {
    /// Fetches processes home whose shared memory another process has opened. For processes that
    /// are moving this is checked when they have arrived.
    pub(crate) fn handle_opens(&mut self) {
        for id in self.shared_memory.opened() {
            let sharers = || self.processes.values().filter(|process| process.files.objects.contains(&id));
            let moves =
                |process: &Process| !matches!(process.state, State::Resident | State::Draining | State::Away);
            if sharers().any(moves) {
                continue;
            }
            let these: BTreeSet<i32> = sharers().map(|process| process.pid.0).collect();
            let away =
                sharers().find(|process| matches!(process.state, State::Away)).map(|process| process.pid);
            let files: HashSet<(u64, u64)> = self.shared_memory.inode_of(id).into_iter().collect();
            let other = match away.map(|_pid| self.shared_memory.find_opener(files, these.clone())) {
                // Asked again when the scan has ended.
                Some(Opener::Pending) => continue,
                Some(Opener::Process(other)) => Some(format!("process {other} has")),
                Some(Opener::Unknown) => Some("a process may have".to_owned()),
                Some(Opener::None) => match self.shared_memory.shared_maps(MapQuestion::Opened(id)) {
                    Err(Unopened::ScanPending) => continue,
                    Err(Unopened::Refused(_)) => Some("a process may have".to_owned()),
                    Ok(all) => {
                        let maps = |(pid, maps): &(&i32, &HashSet<ObjectId>)| {
                            !these.contains(pid) && maps.contains(&id)
                        };
                        all.iter().find(maps).map(|(other, _)| format!("process {other} has"))
                    }
                },
                None => None,
            };
            self.shared_memory.opens_checked(id);
            if let (Some(pid), Some(other)) = (away, other) {
                self.fetch_home(pid, &format!("shared memory: {other} opened its shared memory"));
            }
        }
    }

    /// Fetches home the processes for which blocked opens wait, and lets each open pass when they
    /// are home.
    pub(crate) fn release_blocked_opens(&mut self) {
        for (inode, tid) in self.shared_memory.blocked_opens() {
            let same = |id: &ObjectId| self.shared_memory.inode_of(*id) == Some(inode);
            let sharers = || self.processes.values().filter(|process| process.files.objects.iter().any(same));
            let is_home =
                |process: &Process| !process.is_away() && !matches!(process.state, State::Outgoing(_));
            let is_own = self.belongs_to_group(tid, sharers().map(|process| process.pid));
            if is_own || sharers().all(is_home) {
                self.shared_memory.pass_open(inode, tid, is_own);
                continue;
            }
            // Processes that are moving are fetched when they have arrived.
            let there =
                sharers().find(|process| matches!(process.state, State::Away)).map(|process| process.pid);
            if let Some(pid) = there {
                self.fetch_home(pid, &format!("shared memory: thread {tid} is opening its shared memory"));
            }
        }
    }

    /// Whether a thread's process moves together with one of these sharers. The sharers can then
    /// not come home before the thread's open ends.
    fn belongs_to_group(&self, tid: HomePid, mut sharers: impl Iterator<Item = HomePid>) -> bool {
        let opener = self.processes.values().find(|process| process.threads.contains_key(&tid));
        let Some(pid) = opener.map(|opener| opener.pid) else { return false };
        let together = [self.sharers_away(pid), self.group_of(pid)].concat();
        sharers.any(|sharer| together.contains(&sharer))
    }
}
