//! The guests of a shim, and the ids by which they and their threads are found.

use crate::process::Guest;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_tracee::procfs;
use tern_tracee::stop::{self, WaitEvent};

/// The members of the family that are on this node.
#[derive(Debug)]
pub(super) struct Members {
    guests: HashMap<HomePid, Guest>,
    /// Maps the tid of a thread on this node to its process and the thread, by their ids at home.
    /// Also contains arriving processes, and processes whose first thread has ended.
    by_host_tid: HashMap<i32, (HomePid, HomePid)>,
    /// The process of each thread, both by their ids at home.
    by_home_tid: HashMap<HomePid, HomePid>,
    /// Since when there has been no guest.
    empty_since: Instant,
    /// Whether there has been a guest, or the first one was declined.
    has_had_any: bool,
}

impl Members {
    /// No guest yet.
    pub(super) fn new() -> Self {
        Self {
            guests: HashMap::new(),
            by_host_tid: HashMap::new(),
            by_home_tid: HashMap::new(),
            empty_since: Instant::now(),
            has_had_any: false,
        }
    }

    pub(super) fn get(&self, pid: HomePid) -> Option<&Guest> {
        self.guests.get(&pid)
    }

    pub(super) fn get_mut(&mut self, pid: HomePid) -> Option<&mut Guest> {
        self.guests.get_mut(&pid)
    }

    pub(super) fn contains(&self, pid: HomePid) -> bool {
        self.guests.contains_key(&pid)
    }

    /// Their pids, for a loop that may remove some of them.
    pub(super) fn pids(&self) -> Vec<HomePid> {
        self.guests.keys().copied().collect()
    }

    /// Their pids on this node, in order.
    pub(super) fn host_pids(&self) -> Vec<i32> {
        let mut all: Vec<i32> = self.iter().map(|guest| guest.process.host_pid).collect();
        all.sort_unstable();
        all
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Guest> {
        self.guests.values()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Guest> {
        self.guests.values_mut()
    }

    /// Adds a guest, and registers its first thread.
    pub(super) fn insert(&mut self, guest: Guest) {
        let pid = guest.process.pid;
        self.register_thread(pid, pid, guest.process.host_pid);
        self.guests.insert(pid, guest);
        self.has_had_any = true;
    }

    /// Removes a guest and the ids of its threads.
    pub(super) fn remove(&mut self, pid: HomePid) {
        if let Some(guest) = self.guests.remove(&pid) {
            for thread in guest.threads.values() {
                self.unregister_thread(thread.tid, thread.host_tid);
            }
            self.unregister_thread(pid, guest.process.host_pid);
        }
    }

    /// Kills a guest, waits until its pids are free, and removes it.
    pub(super) fn kill(&mut self, pid: HomePid) {
        if let Some(guest) = self.guests.get(&pid) {
            let host = guest.process.host_pid;
            tern_tracee::pidfd::kill(host);
            // The kernel reports the end of the first thread only when all others have ended and
            // have been waited for, including those that were created and never registered.
            while let Ok(threads) = procfs::threads(host) {
                let others: Vec<i32> = threads.into_iter().filter(|thread| *thread != host).collect();
                if others.is_empty() {
                    break;
                }
                others.into_iter().for_each(await_exit);
            }
            await_exit(host);
        }
        self.remove(pid);
    }

    /// Registers a thread by its ids at home and on this node.
    pub(super) fn register_thread(&mut self, pid: HomePid, tid: HomePid, host: i32) {
        self.by_host_tid.insert(host, (pid, tid));
        self.by_home_tid.insert(tid, pid);
    }

    /// Removes what [`register_thread`](Self::register_thread) has registered.
    pub(super) fn unregister_thread(&mut self, tid: HomePid, host: i32) {
        if let Some((pid, _)) = self.by_host_tid.remove(&host)
            && self.by_home_tid.get(&tid) == Some(&pid)
        {
            self.by_home_tid.remove(&tid);
        }
    }

    /// The process and the thread with this tid on this node, by their ids at home.
    pub(super) fn find_thread(&self, host: i32) -> Option<(HomePid, HomePid)> {
        self.by_host_tid.get(&host).copied()
    }

    /// The guest that has this thread, given by its tid at home.
    pub(super) fn process_of_thread(&self, tid: HomePid) -> Option<HomePid> {
        self.by_home_tid.get(&tid).copied()
    }

    /// Records that an offer was declined: if it was the first one, no guest is to be expected.
    pub(super) fn record_declined(&mut self) {
        self.has_had_any |= self.guests.is_empty();
    }

    /// Restarts the time without a guest while there is one.
    pub(super) fn update_empty_since(&mut self) {
        if !self.guests.is_empty() {
            self.empty_since = Instant::now();
        }
    }

    /// For how long there has been no guest; none if there is one.
    pub(super) fn empty_time(&self) -> Option<Duration> {
        self.guests.is_empty().then(|| self.empty_since.elapsed())
    }

    /// Whether there has been a guest, or the first one was declined. In both cases the shim ends
    /// when it has no guest any more.
    pub(super) fn has_had_any(&self) -> bool {
        self.has_had_any
    }
}

/// Waits for the end of a killed thread.
fn await_exit(thread: i32) {
    loop {
        match stop::wait(thread, true) {
            Ok(Some((_, WaitEvent::Stopped(stopped)))) => drop(stopped.resume(0)),
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => break,
        }
    }
}
