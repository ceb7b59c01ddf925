//! CPU thresholds: home's CPU timers are due when a guest, or a thread of it, has used a given
//! time.
//!
//! An alarm on the guest's own CPU clock wakes the shim, so an idle guest costs nothing. Timers on
//! a thread's clock cannot be set from outside its process. But a thread uses no more CPU time than
//! its process, so the alarm is set on the process's clock for the thread's remaining time, and the
//! thread is checked when the alarm expires. In the same way, home requests a threshold on user
//! time as one on all CPU time.

use crate::time::cpu::CpuMeter;
use std::collections::BTreeMap;
use tern_ids::HomePid;
use tern_migrate::CpuTime;
use tern_tracee::timers::Alarm;

/// The shortest alarm, in nanoseconds of the guest's CPU time; the kernel does not check more
/// often.
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

impl CpuThresholds {
    /// Sets or removes the threshold of CPU usage, of the process or of a thread, at which home
    /// wants a report.
    pub(crate) fn set(&mut self, thread: Option<HomePid>, at: Option<u64>) {
        match (thread, at) {
            (None, at) => self.process = at,
            (Some(tid), Some(at)) => {
                let _previous = self.threads.insert(tid, at);
            }
            (Some(tid), None) => drop(self.threads.remove(&tid)),
        }
        // It is set again at the end of this iteration of the main loop.
        self.alarm = None;
    }

    /// Removes the thresholds that were reached by the process `host`, or by a thread of it, and
    /// returns what each has used; sets the alarm for others. `used_by` returns the usage of a
    /// thread, if that exists.
    pub(crate) fn take_reached(
        &mut self,
        host: i32,
        process: &mut CpuMeter,
        mut used_by: impl FnMut(HomePid) -> Option<CpuTime>,
    ) -> Vec<(Option<HomePid>, CpuTime)> {
        if self.process.is_none() && self.threads.is_empty() {
            self.alarm = None;
            return Vec::new();
        }
        if self.alarm.as_ref().is_some_and(|alarm| !alarm.has_expired()) {
            return Vec::new();
        }
        let (mut reached, mut min_remaining_ns) = (Vec::new(), u64::MAX);
        let mut is_reached = |used: CpuTime, at: u64| {
            if used.total() < at {
                min_remaining_ns = min_remaining_ns.min(at - used.total());
            }
            used.total() >= at
        };
        self.threads.retain(|tid, at| {
            let Some(used) = used_by(*tid) else { return false };
            let is_reached = is_reached(used, *at);
            reached.extend(is_reached.then_some((Some(*tid), used)));
            !is_reached
        });
        if let Some(at) = self.process {
            let used = process.used();
            if is_reached(used, at) {
                self.process = None;
                reached.push((None, used));
            }
        }
        if min_remaining_ns < u64::MAX {
            let alarm = self.alarm.take().map_or_else(|| Alarm::new(host), Ok);
            // A guest that is gone needs no alarm. If the alarm of a live guest cannot be set, its
            // thresholds are checked in each iteration of the main loop.
            let set = alarm.and_then(|alarm| alarm.set(min_remaining_ns.max(MIN_ALARM_NS)).map(|()| alarm));
            self.alarm = set.inspect_err(|error| tracing::debug!(%error, "no CPU alarm could be set")).ok();
        }
        reached
    }
}
