//! CPU time that home waits for: timers that count it are due when a guest, or a thread of it, has used so much.
//!
//! A timer of ours on the guest's own clock wakes us, so that one that uses nothing costs nothing. A thread's clock others
//! cannot set timers on, but no thread uses more than its process: when the process has used what the thread has left, it
//! is looked at again. The same holds for what is left of the time in user mode, which home asks for as if it were all.

use crate::family::Family;
use crate::member::Member;
use std::collections::BTreeMap;
use tern_ids::HomePid;
use tern_migrate::CpuTime;
use tern_migrate::message::Message;
use tern_tracee::timers::Alarm;

/// We are woken no more often than this, in nanoseconds of the guest's time; its kernel looks less often.
const LEAST: u64 = 1_000_000;

/// What is watched for in a guest.
#[derive(Debug, Default)]
pub struct Watch {
    /// When its process has used so much.
    process: Option<u64>,
    /// When these threads have.
    threads: BTreeMap<HomePid, u64>,
    /// Until it has rung nothing of that has been reached.
    alarm: Option<Alarm>,
}

impl Member {
    /// Home wants to be told when the process, or a thread, has used so much; or does not any more.
    pub fn watch_for(&mut self, thread: Option<HomePid>, at: Option<u64>) {
        let watch = &mut self.process.watch;
        match (thread, at) {
            (None, at) => watch.process = at,
            (Some(tid), Some(at)) if self.threads.contains_key(&tid) => drop(watch.threads.insert(tid, at)),
            (Some(tid), _) => drop(watch.threads.remove(&tid)),
        }
        // It is set when it is looked at next, at the end of this turn.
        watch.alarm = None;
    }

    /// What has been reached of that, to be told; what has not is waited for.
    fn reached(&mut self) -> Vec<(HomePid, Message)> {
        let Self { process, threads } = self;
        let watch = &mut process.watch;
        if watch.process.is_none() && watch.threads.is_empty() {
            watch.alarm = None;
            return Vec::new();
        }
        if watch.alarm.as_ref().is_some_and(|alarm| !alarm.has_rung()) {
            return Vec::new();
        }
        let (mut told, mut least) = (Vec::new(), u64::MAX);
        let mut is_reached = |used: CpuTime, at: u64| {
            if used.total() < at {
                least = least.min(at - used.total());
            }
            used.total() >= at
        };
        watch.threads.retain(|tid, at| {
            let Some(used) = threads.get_mut(tid).map(|thread| thread.meter.used()) else { return false };
            let reached = is_reached(used, *at);
            told.extend(reached.then_some((*tid, Message::ThreadUsed(used))));
            !reached
        });
        if let Some(at) = watch.process {
            let used = process.meter.used();
            if is_reached(used, at) {
                watch.process = None;
                told.push((process.pid, Message::Used(used, process.demand)));
            }
        }
        if least < u64::MAX {
            let alarm = watch.alarm.take().map_or_else(|| Alarm::of(process.host), Ok);
            // One that is gone uses nothing more. Without an alarm it is looked at each turn.
            let set = alarm.and_then(|alarm| alarm.set(least.max(LEAST)).map(|()| alarm));
            watch.alarm = set.inspect_err(|error| tracing::debug!(%error, "no alarm")).ok();
        }
        told
    }
}

impl Family {
    /// Tells home of what it waits for.
    pub(crate) fn report_the_used(&mut self) {
        let live = self.members.values_mut().filter(|member| member.is_live());
        let told: Vec<(HomePid, Message)> = live.flat_map(Member::reached).collect();
        for (tag, used) in told {
            self.tell(tag, &used);
        }
    }
}
