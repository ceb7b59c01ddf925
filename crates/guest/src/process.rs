//! One guest: a process and its threads.

pub(crate) mod memory;
pub(crate) mod outbox;
mod publication;
mod queued_traps;
mod quiesce;
mod raised_signals;
pub(crate) mod shared;
pub(crate) mod space;
mod stop_reasons;
pub(crate) mod thread;
mod usage;

use crate::process::shared::{Process, State};
use crate::process::thread::Thread;
use std::collections::BTreeMap;
use tern_ids::HomePid;
use tern_migrate::GuestDemand;
use tern_migrate::message::Message;
use tern_tracee::{cpu, procfs};

/// A guest of this family on this node.
#[derive(Debug)]
pub(crate) struct Guest {
    /// The state that its threads share.
    pub(crate) process: Process,
    /// Its threads, by their ids at home; empty until it has arrived. The first thread, which has
    /// the process's pid, may end before others.
    pub(crate) threads: BTreeMap<HomePid, Thread>,
}

impl Guest {
    /// A guest without threads.
    pub(crate) fn new(process: Process) -> Self {
        Self { process, threads: BTreeMap::new() }
    }

    /// Whether the guest's program runs here. It still runs while the guest is being sent, until
    /// the guest is frozen.
    #[must_use]
    pub(crate) fn is_active(&self) -> bool {
        matches!(self.process.state, State::Running | State::Departing(_))
    }

    /// Why one of its threads must go home, if any must.
    #[must_use]
    pub(crate) fn homeward_reason(&self) -> Option<&str> {
        self.threads.values().find_map(|t| t.pending.as_ref()?.homeward_reason.as_deref())
    }

    /// Sets or removes the threshold of CPU usage, of the process or of a thread, at which home
    /// wants a report.
    pub(crate) fn set_cpu_threshold(&mut self, thread: Option<HomePid>, at: Option<u64>) {
        let exists = thread.is_none_or(|tid| self.threads.contains_key(&tid));
        self.process.usage.set_threshold(thread, at.filter(|_| exists));
    }

    /// Removes the thresholds of CPU usage that were reached, and returns the reports.
    pub(crate) fn take_reached_thresholds(&mut self) -> Vec<(HomePid, Message)> {
        let Self { process, threads } = self;
        let used_by = |tid| threads.get_mut(&tid).map(|thread| thread.cpu_meter.used());
        process.usage.take_reached((process.pid, process.host_pid), used_by)
    }

    /// Measures its demand on this node; zero if it is gone.
    pub(crate) fn measure_demand(&mut self) -> GuestDemand {
        let Self { process, threads } = self;
        let waited = threads.values().map(|t| cpu::run_queue_wait(t.host_tid).unwrap_or_default());
        process.usage.measure_demand(&process.memory, waited)
    }

    /// Measures its CPU time and its demand, and returns the report to home.
    pub(crate) fn measure_usage(&mut self) -> Message {
        self.measure_demand();
        self.process.usage.report()
    }

    /// Its command, for lists of processes.
    #[must_use]
    pub(crate) fn command(&self) -> String {
        match &self.process.state {
            State::Arriving(arriving) => arriving.offer.command.clone(),
            _ => {
                // The title that `ps` shows here, without the prefix that names its home.
                let title = procfs::command_line(self.process.memory.pid());
                title.split_once(' ').map_or(title.clone(), |(_, command)| command.to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests;
