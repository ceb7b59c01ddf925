//! The CPU time that a process has used away.

use crate::time::timers::CpuClock;
use crate::time::usage_store::SavedUsage;
use std::collections::{BTreeMap, HashMap};
use tern_ids::HomePid;
use tern_migrate::CpuTime;
use tern_tracee::{cpu, procfs};

const SECOND: u64 = 1_000_000_000;

/// The CPU time that a process, its threads and its children have used away.
#[derive(Debug, Default)]
pub(crate) struct AwayUsage {
    /// As last reported by its guests, and, for its children, as added by waits.
    known: SavedUsage,
    /// Children that have exited and may not have been waited for, by their pid in its namespace.
    ended_children: HashMap<i32, EndedChild>,
}

/// A child that has ended and has not been waited for.
#[derive(Debug)]
pub(super) struct EndedChild {
    pub(super) pid: HomePid,
    pub(super) used: CpuTime,
}

impl AwayUsage {
    /// The part that is saved when it is not traced any more.
    pub(crate) fn saved(&self) -> &SavedUsage {
        &self.known
    }

    /// Takes over the CPU time recorded before it was seized.
    pub(crate) fn restore(&mut self, saved_usage: SavedUsage) {
        self.known = saved_usage;
    }

    /// The CPU time used by a thread, or by the whole process.
    pub(crate) fn of(&self, thread: Option<HomePid>) -> CpuTime {
        match thread {
            Some(tid) => self.known.threads.get(&tid).copied().unwrap_or_default(),
            None => self.known.own,
        }
    }

    /// Its guest has reported the CPU time used by a thread, or by the whole process.
    pub(crate) fn reported(&mut self, thread: Option<HomePid>, used: CpuTime) {
        match thread {
            Some(tid) => drop(self.known.threads.insert(tid, used)),
            None => self.known.own = used,
        }
    }

    /// Its last guest has reported the CPU time used by the process and by all threads.
    pub(crate) fn all_reported(&mut self, own: CpuTime, threads: BTreeMap<HomePid, CpuTime>) {
        (self.known.own, self.known.threads) = (own, threads);
    }

    pub(crate) fn thread_exited(&mut self, tid: HomePid) {
        self.known.threads.remove(&tid);
    }

    /// It has executed a program: its threads are gone.
    pub(crate) fn forget_threads(&mut self) {
        self.known.threads.clear();
    }

    /// The reading of a clock of this process, as its program sees it, as of the guest's last
    /// report. If the thread or process is gone at home, the home part is zero.
    pub(super) fn read_clock(&self, pid: HomePid, clock: CpuClock) -> u64 {
        let away = self.of(clock.thread);
        let home = match (clock.thread, clock.user) {
            (Some(tid), user) => cpu::thread_cpu_counters(pid.0, tid.0)
                .map(|counted| if user { counted.user.saturating_mul(SECOND / 100) } else { counted.total }),
            (None, true) => cpu::user_cpu_ns(pid.0),
            (None, false) => cpu::cpu_counters(pid.0).map(|counted| counted.total),
        };
        home.unwrap_or_default().saturating_add(if clock.user { away.user } else { away.total() })
    }

    /// The CPU time of children that have been waited for.
    pub(super) fn children(&self) -> CpuTime {
        self.known.children
    }

    /// A child with this pid in its namespace has exited.
    pub(super) fn child_ended(&mut self, number: i32, ended: EndedChild) {
        self.ended_children.insert(number, ended);
    }

    /// The CPU time of a child that has exited and may not have been waited for.
    pub(super) fn of_ended_child(&self, number: i32) -> Option<CpuTime> {
        self.ended_children.get(&number).map(|ended| ended.used)
    }

    /// Forgets a child that has ended with this pid: a new child has it, so the earlier one was waited
    /// for while the process was at home, or the child was removed because it could not be created.
    pub(crate) fn forget_child(&mut self, number: i32) {
        self.ended_children.remove(&number);
    }

    /// A child that has used this CPU time was waited for.
    pub(super) fn child_reaped(&mut self, used: CpuTime) {
        self.known.children = self.known.children.and(used);
    }

    /// Adds the CPU time of children that have been reaped to that of the process: of this child
    /// only, if one is given. Returns the time if exactly one was reaped.
    pub(super) fn add_reaped(&mut self, child: Option<i32>) -> Option<CpuTime> {
        let mut reaped = Vec::new();
        let is_awaited = |number: &i32| child.is_none_or(|child| child == *number);
        self.ended_children.retain(|number, ended| {
            let keep =
                !is_awaited(number) || procfs::status(ended.pid.0).is_ok_and(|status| status.state == b'Z');
            if !keep {
                reaped.push(ended.used);
            }
            keep
        });
        reaped.iter().for_each(|used| self.child_reaped(*used));
        if let [only] = reaped[..] { Some(only) } else { None }
    }
}
