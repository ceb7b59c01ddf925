//! The CPU time that a process uses, and its demand on this node.

use crate::time::cpu::{CpuMeter, HomeCpuTime, add_to_result};
use crate::time::cpu_threshold::CpuThresholds;
use std::time::Instant;
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_migrate::{CpuTime, GuestDemand};
use tern_syscall::Outcome;
use tern_tracee::{Memory, Result, procfs};

/// The CPU time that a process uses, and its demand on this node.
#[derive(Debug)]
pub(crate) struct Usage {
    /// CPU time of all its threads, including those that have ended.
    meter: CpuMeter,
    /// The CPU time that home has reported.
    home_time: HomeCpuTime,
    /// CPU usage, of it or its threads, at which home wants a report.
    thresholds: CpuThresholds,
    /// How long, in nanoseconds, its ended threads had waited for a CPU.
    waited_ns: u64,
    /// Its demand on this node, when last measured.
    demand: GuestDemand,
}

impl Usage {
    /// For the process `host` of this node.
    ///
    /// # Errors
    /// If it is gone.
    pub(super) fn new(host: i32) -> Result<Self> {
        Ok(Self {
            meter: CpuMeter::for_process(host, CpuTime::default())?,
            home_time: HomeCpuTime::default(),
            thresholds: CpuThresholds::default(),
            waited_ns: 0,
            demand: GuestDemand::default(),
        })
    }

    /// Begins to count for the process `host`, which used `earlier` while it was away in earlier
    /// epochs.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn begin_epoch(&mut self, host: i32, earlier: CpuTime) -> Result<()> {
        self.meter = CpuMeter::for_process(host, earlier)?;
        Ok(())
    }

    /// The CPU time used while away.
    pub(crate) fn cpu_time(&mut self) -> CpuTime {
        self.meter.used()
    }

    /// The report to home.
    pub(crate) fn report(&mut self) -> Message {
        Message::Usage(self.meter.used(), self.demand)
    }

    /// Replies to a call for CPU time if home's part is cached.
    pub(crate) fn reply(&mut self, nr: u32, args: &[u64; 6]) -> Option<Outcome> {
        let mut outcome = self.home_time.reply(nr, args)?;
        let used = if i64::from(nr) == libc::SYS_clock_gettime {
            self.meter.total_used()
        } else {
            self.meter.used()
        };
        add_to_result(nr, args, used, &mut outcome);
        Some(outcome)
    }

    /// The nanoseconds of CPU time that this node's kernel has not counted, and until when the value
    /// is valid. None if home's part is not cached.
    pub(super) fn cpu_time_not_counted_here(&mut self) -> Option<(i64, Instant)> {
        let (home, until) = self.home_time.nanoseconds()?;
        Some((self.meter.cpu_time_not_counted_here().saturating_add_unsigned(home), until))
    }

    /// Stores home's result for a call that was sent at `sent_at`, if it is about CPU time.
    pub(crate) fn store_home_time(&mut self, nr: u32, args: &[u64; 6], outcome: &Outcome, sent_at: Instant) {
        self.home_time.store(nr, args, outcome, sent_at);
    }

    /// Drops the CPU time that home has reported: home makes another call, which uses CPU time.
    pub(crate) fn invalidate_home_time(&mut self) {
        self.home_time.invalidate();
    }

    /// Sets or removes a threshold of CPU usage ([`CpuThresholds::set`]).
    pub(super) fn set_threshold(&mut self, thread: Option<HomePid>, at: Option<u64>) {
        self.thresholds.set(thread, at);
    }

    /// Removes the thresholds that were reached by the process `pid`, `host` on this node, or by a
    /// thread of it, and returns the reports. `used_by` returns the CPU time of a thread.
    pub(super) fn take_reached(
        &mut self,
        (pid, host): (HomePid, i32),
        used_by: impl FnMut(HomePid) -> Option<CpuTime>,
    ) -> Vec<(HomePid, Message)> {
        let reached = self.thresholds.take_reached(host, &mut self.meter, used_by);
        let report = |(thread, used)| match thread {
            Some(tid) => (tid, Message::ThreadUsage(used)),
            None => (pid, Message::Usage(used, self.demand)),
        };
        reached.into_iter().map(report).collect()
    }

    /// Adds how long a thread that ends has waited for a CPU.
    pub(crate) fn add_waited(&mut self, ns: u64) {
        self.waited_ns = self.waited_ns.saturating_add(ns);
    }

    /// Measures the demand, zero if the process is gone. Its live threads have waited `waited_ns`.
    pub(super) fn measure_demand(
        &mut self,
        memory: &Memory,
        waited_ns: impl Iterator<Item = u64>,
    ) -> GuestDemand {
        let resident = procfs::stat(memory.pid()).map_or(0, |stat| stat.resident());
        // Its own calls read and write only files that it has open on this node.
        let local_io = procfs::io_bytes(memory.pid()).unwrap_or_default();
        let cpu_wait_ns = waited_ns.fold(self.waited_ns, u64::saturating_add);
        self.demand = GuestDemand { cpu_wait_ns, memory: resident, local_io };
        self.demand
    }
}
