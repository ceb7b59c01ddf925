//! Checks the CPU-time timers and RLIMIT_CPU of a process that is away, and reacts to their expiry.
//!
//! Home can measure the deputy's CPU time, and has the guest's CPU time as of its last report. Home
//! asks the guest shim to report as soon as the time that is left until the next expiry has been
//! used there (`WatchUsage`). It updates that threshold with each report, since the deputy uses CPU
//! time as well. It also checks when a call of the deputy finishes: a program that mostly makes
//! calls uses its time at home.

use crate::process::Process;
use crate::shim::Shim;
use crate::time::cpu_timers::ClockScope;
use crate::time::timers::{CpuClock, Timer, TimerId};
use tern_ids::HomePid;
use tern_migrate::CpuTime;
use tern_migrate::message::Message;
use tern_syscall::{Arg, Call, Outcome};
use tern_tracee::cpu;

impl Process {
    /// The CPU-time clock of this process, or of one of its threads, that a clock id denotes; none
    /// for other clocks.
    pub(crate) fn resolve_clock(&self, number: i32, caller: Option<HomePid>) -> Option<CpuClock> {
        const THREAD: i32 = 4;
        let whole = CpuClock { thread: None, user: number < 0 && number & 3 == 1 };
        match number {
            libc::CLOCK_PROCESS_CPUTIME_ID => Some(whole),
            libc::CLOCK_THREAD_CPUTIME_ID => caller.map(|tid| CpuClock { thread: Some(tid), ..whole }),
            _ if !cpu::is_cpu_clock(number) => None,
            // The pid or tid, inverted, followed by three bits.
            _ if number & THREAD == 0 => Some(whole).filter(|_| [0, self.own_pid].contains(&!(number >> 3))),
            _ => {
                let own_tid = !(number >> 3);
                let named = self.threads.values().find(|thread| thread.own_tid == own_tid);
                let thread = if own_tid == 0 { caller } else { named.map(|thread| thread.tid) };
                thread.map(|tid| CpuClock { thread: Some(tid), ..whole })
            }
        }
    }
}

impl Shim {
    /// Answers a call about timers that home's kernel does not have. The guest has sent the CPU
    /// time of the calling thread and of the process right before it.
    pub(crate) fn answer_timer_call(&mut self, pid: HomePid, tid: HomePid, call: &Call) -> Option<Outcome> {
        let process = self.processes.get_mut(&pid)?;
        process.timers.answer(call, (pid, tid), &process.usage)
    }

    /// A call of the deputy has finished. Returns whether the timers must be checked: the call may
    /// have changed them, and every call uses CPU time at home.
    pub(crate) fn note_timer_call(
        &mut self,
        pid: HomePid,
        tid: HomePid,
        call: &Call,
        outcome: &Outcome,
    ) -> bool {
        let Some(process) = self.processes.get_mut(&pid) else { return false };
        let need_check = process.timers.need_check();
        match (i64::from(call.nr), &call.args[0]) {
            (libc::SYS_timer_create, Arg::Value(clock)) if outcome.ret == 0 => {
                let Some(clock) = process.resolve_clock(*clock as i32, Some(tid)) else { return false };
                let number =
                    |bytes: &[u8], at: usize| Some(i32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
                let (notify, signal) = match &call.args[1] {
                    Arg::Bytes(event) => (number(event, 12), number(event, 8).unwrap_or_default()),
                    _ => (None, libc::SIGALRM),
                };
                let signal = Some(signal).filter(|_| notify != Some(libc::SIGEV_NONE));
                if let Some(id) = outcome.outs.first().and_then(|out| number(out, 0)) {
                    process.timers.add(TimerId::Posix(id), Timer::new(clock, signal));
                }
            }
            (libc::SYS_timer_delete, Arg::Value(id)) if outcome.ret == 0 => {
                process.timers.remove(TimerId::Posix(*id as i32));
            }
            (libc::SYS_setrlimit | libc::SYS_prlimit64, _) => process.timers.forget_limits(),
            _ => return need_check,
        }
        true
    }

    /// Fires expired timers and limits and sends the next thresholds. Does nothing while job
    /// control has stopped the process, which then uses no CPU time.
    pub(crate) fn check_timers(&mut self, pid: HomePid, of: ClockScope) {
        let Some(process) =
            self.processes.get_mut(&pid).filter(|process| process.is_away() && !process.job_stopped)
        else {
            return;
        };
        if process.timers.are_unused(pid) {
            return;
        }
        process.timers.check(pid, &process.usage, of);
        self.fire_expired(pid);
        self.send_thresholds(pid, of);
    }

    /// Fires the timers and limits of a process that have expired. If all its threads are in calls
    /// that cannot be interrupted, that is done when the first of these calls has ended.
    fn fire_expired(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let due = process.timers.take_unfired();
        if due.is_empty() {
            return;
        }
        // The first thread if possible: only it can signal the whole process.
        let fired = self.with_any_thread(pid, Some(pid), |process, stopped| process.fire(stopped, &due));
        match (fired, self.processes.get_mut(&pid)) {
            (Ok(None), Some(process)) => process.timers.not_fired(due),
            (Err(error), _) => self.handle_error(pid, &error),
            _ => {}
        }
    }

    /// Fires what could not be fired before.
    pub(crate) fn fire_late(&mut self) {
        let is_late = |process: &&Process| process.timers.has_unfired();
        let late: Vec<HomePid> = self.processes.values().filter(is_late).map(|process| process.pid).collect();
        late.into_iter().for_each(|pid| self.fire_expired(pid));
    }

    /// A new guest holds a process, or its link is back: sends all thresholds again.
    pub(crate) fn resend_thresholds(&mut self, pid: HomePid) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.timers.forget_thresholds();
        }
        self.check_timers(pid, ClockScope::All);
    }

    /// Sends the guest of a process the thresholds that have changed.
    fn send_thresholds(&mut self, pid: HomePid, of: ClockScope) {
        let Some(process) = self.processes.get_mut(&pid).filter(|process| process.is_away()) else { return };
        for (thread, at) in process.timers.update_thresholds(pid, &process.usage, of) {
            match thread {
                Some(tid) => self.send(tid, &Message::WatchThreadUsage(at)),
                None => self.send(pid, &Message::WatchUsage(at)),
            }
        }
    }

    /// The guest has reported the CPU time used by a process, or by a thread.
    pub(crate) fn usage_reported(&mut self, pid: HomePid, thread: Option<HomePid>, used: CpuTime) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.usage.reported(thread, used);
        process.timers.usage_reported(pid, &process.usage, thread);
        self.check_timers(pid, thread.map_or(ClockScope::All, ClockScope::Thread));
    }
}
