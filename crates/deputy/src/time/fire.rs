//! Moves CPU-time timers between home's kernel and the table ([`crate::time::timers`]), and fires
//! them.
//!
//! When a process becomes a deputy its timers are taken out of the kernel. They are put back
//! whenever the process is to run at home: after a return, a revoked move, or an exec. While the
//! process is away, its deputy fires an expired timer. The deputy arms a timer of timer_create with
//! a time in the past, which raises the right signal in the right thread with the timer's own
//! siginfo. For interval timers and limits the deputy sends itself the signal that the kernel would
//! send; no other process can send such a signal. For both the deputy is stopped as for any
//! injected call, and the call that it was in continues, or is interrupted as by any signal.
//!
//! Kernels from 6.13 on forget a pending signal of a timer when that timer is set, so the signal is
//! lost when the timer is taken or put back. Such a timer is fired again; if the signal is still
//! pending, that has no effect.

use crate::process::Process;
use crate::time::cpu_timers::DueSignal;
use crate::time::timers::{TimeFormat, Timer, TimerId};
use rustix::time::{ClockId, clock_getres};
use tern_ids::HomePid;
use tern_image::Reserve;
use tern_tracee::inject::Injection;
use tern_tracee::siginfo::{Siginfo, kernel_siginfo, set_overrun, timer_of};
use tern_tracee::stop::Stopped;
use tern_tracee::{Memory, Result, procfs, timers};

impl Process {
    /// Takes its timers out of the kernel. All its threads are under injection.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn take_timers(
        &mut self,
        all: &mut [Injection],
        memory: &Memory,
        reserve: Reserve,
    ) -> Result<()> {
        let made = timers::posix_timers(self.pid.0)?;
        let waiting = if made.is_empty() { Vec::new() } else { pending_timers(all)? };
        let Some(injection) = all.first_mut() else { return Ok(()) };
        let (new, old) = (reserve.scratch(), reserve.scratch() + 64);
        memory.write(new, &[0; 32])?;
        let mut was = [0; 32];
        for (number, timer_id) in
            [(libc::ITIMER_VIRTUAL, TimerId::Virtual), (libc::ITIMER_PROF, TimerId::Prof)]
        {
            injection.must("disarm a timer", libc::SYS_setitimer, [number as u64, new, old, 0, 0, 0])?;
            memory.read(old, &mut was)?;
            self.record_timer(timer_id, timer_id.disarmed(), TimeFormat::Timeval, &was);
        }
        for timer in made {
            // If a timer's clock is the CPU clock of the thread that created it, the kernel does
            // not report that thread, which is mostly the one that the timer signals. If the thread
            // cannot be determined the timer stays in the kernel and counts home's part only.
            let only = (self.threads.len() == 1).then_some(self.pid);
            let caller = timer.thread.map(HomePid).filter(|tid| self.threads.contains_key(tid)).or(only);
            let Some(clock) = self.resolve_clock(timer.clock, caller) else { continue };
            let done = injection.call(libc::SYS_timer_settime, [timer.id as u64, 0, new, old, 0, 0])?;
            if done == 0 {
                memory.read(old, &mut was)?;
                let signal = (!timer.silent).then_some(timer.signal);
                let timer_id = TimerId::Posix(timer.id);
                self.record_timer(timer_id, Timer::new(clock, signal), TimeFormat::Timespec, &was);
            }
            if waiting.contains(&timer.id) {
                self.timers.was_pending(timer.id);
            }
        }
        Ok(())
    }

    fn record_timer(&mut self, timer_id: TimerId, timer: Timer, format: TimeFormat, was: &[u8]) {
        let (interval, left) = format.parse(was).unwrap_or_default();
        let expires =
            Some(self.usage.read_clock(self.pid, timer.clock).saturating_add(left)).filter(|_| left > 0);
        if expires.is_some() || matches!(timer_id, TimerId::Posix(_)) {
            self.timers.add(timer_id, Timer { interval, expires, ..timer });
        }
    }

    /// Whether a signal is pending for the process or one of its threads.
    fn is_pending(&self, signal: i32) -> bool {
        let pending = |tid: HomePid| procfs::status(tid.0).map_or(0, |status| status.pending);
        self.threads.keys().any(|tid| pending(*tid) >> (signal - 1) & 1 == 1)
    }

    /// Puts its timers back into the kernel, by a thread under injection: the process is to run at
    /// home. Also fires what has expired and could not be fired.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn restore_timers(
        &mut self,
        injection: &mut Injection,
        memory: &Memory,
        reserve: Reserve,
    ) -> Result<()> {
        let new = reserve.scratch();
        let tick = clock_getres(ClockId::MonotonicCoarse).tv_nsec.cast_unsigned();
        let (unfired, signals): (Vec<_>, Vec<_>) =
            self.timers.take_unfired().into_iter().partition(|due| matches!(due, DueSignal::Timer(_)));
        for (timer_id, timer) in self.timers.take() {
            let left = timer.time_left(self.usage.read_clock(self.pid, timer.clock));
            let is_unfired =
                |id| unfired.iter().any(|due| matches!(due, DueSignal::Timer(timer) if *timer == id));
            let again = matches!(timer_id, TimerId::Posix(id) if is_unfired(id))
                || timer.expirations > 0 && timer.signal.is_some_and(|signal| self.is_pending(signal));
            match timer_id {
                _ if left == 0 && !again => {}
                TimerId::Virtual | TimerId::Prof if left == 0 => {}
                TimerId::Posix(id) => {
                    // A time in the past, or the time left.
                    let (flags, value) = if again { (libc::TIMER_ABSTIME as u64, 1) } else { (0, left) };
                    memory.write(new, &TimeFormat::Timespec.write(timer.interval, value))?;
                    let _deleted =
                        injection.call(libc::SYS_timer_settime, [id as u64, flags, new, 0, 0, 0])?;
                }
                TimerId::Virtual | TimerId::Prof => {
                    let number =
                        if timer_id == TimerId::Prof { libc::ITIMER_PROF } else { libc::ITIMER_VIRTUAL };
                    // The kernel adds a tick to the value set, which the time left already
                    // includes.
                    let value = left.saturating_sub(tick).max(1);
                    memory.write(new, &TimeFormat::Timeval.write(timer.interval, value))?;
                    injection.must("set a timer", libc::SYS_setitimer, [number as u64, new, 0, 0, 0, 0])?;
                }
            }
        }
        self.raise(injection, memory, reserve, &signals)
    }

    /// Raises these signals in a stopped deputy thread, and resumes the thread.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn fire(&mut self, stopped: Stopped, due: &[DueSignal]) -> Result<()> {
        let (mut injection, reserve) = self.injection(stopped)?;
        self.raise(&mut injection, &self.memory, reserve, due)?;
        let stopped = injection.finish()?;
        self.resume_unnoticed(stopped)
    }

    fn raise(
        &self,
        injection: &mut Injection,
        memory: &Memory,
        reserve: Reserve,
        due: &[DueSignal],
    ) -> Result<()> {
        let at = reserve.scratch();
        for signal_due in due {
            // Failures are harmless: a timer that was deleted, a full signal queue.
            let _none = match *signal_due {
                DueSignal::Timer(id) => {
                    memory.write(at, &TimeFormat::Timespec.write(0, 1))?;
                    let flags = libc::TIMER_ABSTIME as u64;
                    injection.call(libc::SYS_timer_settime, [id as u64, flags, at, 0, 0, 0])?
                }
                DueSignal::Signal(libc::SIGKILL) => {
                    tern_tracee::pidfd::kill(self.pid.0);
                    break;
                }
                DueSignal::Signal(signal) => {
                    memory.write(at, &kernel_siginfo(signal))?;
                    let thread = self.threads.get(&HomePid(injection.pid()));
                    let own_tid = thread.map_or(self.own_pid, |thread| thread.own_tid);
                    let (pid, tid, signal) = (self.own_pid as u64, own_tid as u64, signal as u64);
                    // Only the first thread may send it to the process; others send it to
                    // themselves.
                    match own_tid == self.own_pid {
                        true => injection.call(libc::SYS_rt_sigqueueinfo, [pid, signal, at, 0, 0, 0])?,
                        false => injection.call(libc::SYS_rt_tgsigqueueinfo, [pid, tid, signal, at, 0, 0])?,
                    }
                }
            };
        }
        Ok(())
    }

    /// Sets the timer overrun in the siginfo of a signal that is forwarded to the program.
    pub(crate) fn set_overrun_of(&mut self, info: &mut Siginfo) {
        if let Some(overrun) = timer_of(info).and_then(|timer| self.timers.delivered(timer)) {
            set_overrun(info, overrun);
        }
    }
}

/// The timers whose signals are pending for one of these threads or for their process.
fn pending_timers(threads: &[Injection]) -> Result<Vec<i32>> {
    let mut all = Vec::new();
    for thread in threads {
        let (own, shared) = thread.stopped()?.pending()?;
        all.extend(own.iter().chain(&shared).filter_map(timer_of));
    }
    Ok(all)
}
