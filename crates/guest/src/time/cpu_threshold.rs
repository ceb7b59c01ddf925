//! CPU thresholds: home's CPU timers are due when a guest, or a thread of it, has used a given
//! time.
//!
//! An alarm on the guest's own CPU clock wakes the shim, so an idle guest costs nothing. Timers on
//! a thread's clock cannot be set from outside its process. But a thread uses no more CPU time than
//! its process: the alarm is set on the process's clock for the thread's remaining time, and the
//! thread is checked when it expires. In the same way, home requests a threshold on user time as
//! one on all CPU time.

use crate::process::Guest;
use std::collections::BTreeMap;
use tern_ids::HomePid;
use tern_migrate::CpuTime;
use tern_migrate::message::Message;
use tern_tracee::timers::Alarm;

/// The shortest alarm, in nanoseconds of the guest's CPU time; the kernel checks less often.
const MIN_ALARM_NS: u64 = 1_000_000;

/// The CPU usage at which home wants a report.
#[derive(Debug, Default)]
pub(crate) struct CpuThresholds {
    /// The threshold of the process, in nanoseconds.
    process: Option<u64>,
    /// The thresholds of threads.
    threads: BTreeMap<HomePid, u64>,
    /// Until it expires no threshold is reached.
    alarm: Option<Alarm>,
}

impl Guest {
    /// Sets the CPU usage of the process, or of a thread, at which home wants a report; or removes
    /// it.
    pub(crate) fn set_cpu_threshold(&mut self, thread: Option<HomePid>, at: Option<u64>) {
        let cpu_thresholds = &mut self.process.cpu_thresholds;
        match (thread, at) {
            (None, at) => cpu_thresholds.process = at,
            (Some(tid), Some(at)) if self.threads.contains_key(&tid) => {
                let _previous = cpu_thresholds.threads.insert(tid, at);
            }
            (Some(tid), _) => drop(cpu_thresholds.threads.remove(&tid)),
        }
        // It is set again at the end of this iteration of the main loop.
        cpu_thresholds.alarm = None;
    }

    /// Removes the thresholds that were reached and returns the reports; sets the alarm for others.
    pub(crate) fn take_reached(&mut self) -> Vec<(HomePid, Message)> {
        let Self { process, threads } = self;
        let cpu_thresholds = &mut process.cpu_thresholds;
        if cpu_thresholds.process.is_none() && cpu_thresholds.threads.is_empty() {
            cpu_thresholds.alarm = None;
            return Vec::new();
        }
        if cpu_thresholds.alarm.as_ref().is_some_and(|alarm| !alarm.has_expired()) {
            return Vec::new();
        }
        let (mut reports, mut min_remaining_ns) = (Vec::new(), u64::MAX);
        let mut is_reached = |used: CpuTime, at: u64| {
            if used.total() < at {
                min_remaining_ns = min_remaining_ns.min(at - used.total());
            }
            used.total() >= at
        };
        cpu_thresholds.threads.retain(|tid, at| {
            let Some(used) = threads.get_mut(tid).map(|thread| thread.cpu_meter.used()) else { return false };
            let reached = is_reached(used, *at);
            reports.extend(reached.then_some((*tid, Message::ThreadUsage(used))));
            !reached
        });
        if let Some(at) = cpu_thresholds.process {
            let used = process.cpu_meter.used();
            if is_reached(used, at) {
                cpu_thresholds.process = None;
                reports.push((process.pid, Message::Usage(used, process.demand)));
            }
        }
        if min_remaining_ns < u64::MAX {
            let alarm = cpu_thresholds.alarm.take().map_or_else(|| Alarm::new(process.host_pid), Ok);
            // A guest that is gone uses nothing. Without an alarm it is checked in each iteration.
            let set = alarm.and_then(|alarm| alarm.set(min_remaining_ns.max(MIN_ALARM_NS)).map(|()| alarm));
            cpu_thresholds.alarm =
                set.inspect_err(|error| tracing::debug!(%error, "no CPU alarm could be set")).ok();
        }
        reports
    }
}
