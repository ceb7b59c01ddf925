//! Timers that count CPU time, between home's kernel and the table ([`crate::timers`]).
//!
//! When a process becomes a deputy its timers are taken out of the kernel. They are put back into it whenever the process is to run at home: home again, taken back, or with a new
//! program. While it is away, one that is due is fired by the deputy: it sets a timer of timer_create to a time that is
//! over, which raises the right signal in the right thread with the timer's own siginfo, or sends itself what the kernel
//! sends for interval timers and limits, as only it can. For either it is stopped as for any injected call, and the call
//! that it was in goes on, or ends as by any signal.
//!
//! A signal of a timer that waits (blocked) when the timer is taken or put back is lost on kernels that forget it when
//! the timer is set (6.13 and later); so such a one is fired again, which changes nothing where it is still there.

use crate::member::Member;
use crate::timers::{Form, Timer, Which};
use rustix::time::{ClockId, clock_getres};
use std::collections::BTreeMap;
use tern_ids::HomePid;
use tern_image::Reserve;
use tern_tracee::inject::Injection;
use tern_tracee::siginfo::{Siginfo, by_the_kernel, set_overrun, timer_of};
use tern_tracee::stop::Stopped;
use tern_tracee::{Memory, Result, procfs, timers};

/// What is to be raised.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Firing {
    Timer(i32),
    Signal(i32),
}

impl Member {
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
        let made = timers::posix(self.pid.0)?;
        let waiting = if made.is_empty() { Vec::new() } else { waiting(all)? };
        let Some(injection) = all.first_mut() else { return Ok(()) };
        let (new, old) = (reserve.scratch(), reserve.scratch() + 64);
        memory.write(new, &[0; 32])?;
        let mut was = [0; 32];
        for (number, which) in [(libc::ITIMER_VIRTUAL, Which::Virtual), (libc::ITIMER_PROF, Which::Prof)] {
            injection.must("unset a timer", libc::SYS_setitimer, [number as u64, new, old, 0, 0, 0])?;
            memory.read(old, &mut was)?;
            self.took(which, which.unset(), Form::Timeval, &was);
        }
        for timer in made {
            // The kernel does not tell of which thread a timer is whose clock is the caller's own; it mostly is that which it
            // raises its signal in. One of which it cannot be known stays in the kernel and counts home's part.
            let only = (self.threads.len() == 1).then_some(self.pid);
            let caller = timer.thread.map(HomePid).filter(|tid| self.threads.contains_key(tid)).or(only);
            let Some(clock) = self.own_clock(timer.clock, caller) else { continue };
            let (id, which) = (timer.id, Which::Posix(timer.id));
            let done = injection.call(libc::SYS_timer_settime, [timer.id as u64, 0, new, old, 0, 0])?;
            if done == 0 {
                memory.read(old, &mut was)?;
                let signal = (!timer.silent).then_some(timer.signal);
                self.took(which, Timer::new(clock, signal), Form::Timespec, &was);
            }
            if waiting.contains(&timer.id)
                && let Some(timer) = self.timers.all.get_mut(&which)
            {
                timer.fired = 1;
                self.refire.push(id);
            }
        }
        Ok(())
    }

    fn took(&mut self, which: Which, timer: Timer, form: Form, was: &[u8]) {
        let (interval, left) = form.parse(was).unwrap_or_default();
        let expires = Some(self.clock(timer.clock).saturating_add(left)).filter(|_| left > 0);
        if expires.is_some() || matches!(which, Which::Posix(_)) {
            self.timers.all.insert(which, Timer { interval, expires, ..timer });
        }
    }

    /// Whether a signal waits for it, or for a thread of it.
    fn waits(&self, signal: i32) -> bool {
        let pending = |tid: HomePid| procfs::status(tid.0).map_or(0, |status| status.pending);
        self.threads.keys().any(|tid| pending(*tid) >> (signal - 1) & 1 == 1)
    }

    /// Puts its timers back into the kernel, by a thread of it under injection: it is to run at home.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn give_timers(
        &mut self,
        injection: &mut Injection,
        memory: &Memory,
        reserve: Reserve,
    ) -> Result<()> {
        let new = reserve.scratch();
        let tick = clock_getres(ClockId::MonotonicCoarse).tv_nsec.cast_unsigned();
        for (which, timer) in std::mem::take(&mut self.timers).all {
            let left = timer.left(self.clock(timer.clock));
            let again = timer.fired > 0 && timer.signal.is_some_and(|signal| self.waits(signal));
            match which {
                _ if left == 0 && !again => {}
                Which::Virtual | Which::Prof if left == 0 => {}
                Which::Posix(id) => {
                    // A time that is over, or what is left.
                    let (flags, value) = if again { (libc::TIMER_ABSTIME as u64, 1) } else { (0, left) };
                    memory.write(new, &Form::Timespec.write(timer.interval, value))?;
                    let _deleted =
                        injection.call(libc::SYS_timer_settime, [id as u64, flags, new, 0, 0, 0])?;
                }
                Which::Virtual | Which::Prof => {
                    let number = if which == Which::Prof { libc::ITIMER_PROF } else { libc::ITIMER_VIRTUAL };
                    // The kernel adds a tick to what it is told, which was in what was left already.
                    let told = left.saturating_sub(tick).max(1);
                    memory.write(new, &Form::Timeval.write(timer.interval, told))?;
                    injection.must("set a timer", libc::SYS_setitimer, [number as u64, new, 0, 0, 0, 0])?;
                }
            }
        }
        (self.watched, self.refire) = (BTreeMap::new(), Vec::new());
        Ok(())
    }

    /// Has a standing deputy thread raise what is due; it goes on afterwards.
    pub(crate) fn fire(&mut self, stopped: Stopped, due: &[Firing]) -> Result<()> {
        let own_tid = self.thread(HomePid(stopped.pid()))?.own_tid;
        let (mut injection, reserve) = self.injection(stopped)?;
        let at = reserve.scratch();
        for firing in due {
            // What cannot be raised any more needs not be: a timer that was deleted, a full queue.
            let _none = match *firing {
                Firing::Timer(id) => {
                    self.memory.write(at, &Form::Timespec.write(0, 1))?;
                    let flags = libc::TIMER_ABSTIME as u64;
                    injection.call(libc::SYS_timer_settime, [id as u64, flags, at, 0, 0, 0])?
                }
                Firing::Signal(libc::SIGKILL) => {
                    tern_tracee::pidfd::kill(self.pid.0);
                    break;
                }
                Firing::Signal(signal) => {
                    self.memory.write(at, &by_the_kernel(signal))?;
                    let (pid, tid, signal) = (self.own_pid as u64, own_tid as u64, signal as u64);
                    // For the process as its first thread, the only one that may say so; else for the thread.
                    match own_tid == self.own_pid {
                        true => injection.call(libc::SYS_rt_sigqueueinfo, [pid, signal, at, 0, 0, 0])?,
                        false => injection.call(libc::SYS_rt_tgsigqueueinfo, [pid, tid, signal, at, 0, 0])?,
                    }
                }
            };
        }
        let stopped = injection.finish()?;
        self.go_on(stopped)
    }

    /// A signal of it is on its way to the program: the siginfo that it is to see.
    pub(crate) fn timed(&mut self, info: &mut Siginfo) {
        if let Some(overrun) = timer_of(info).and_then(|timer| self.timers.delivered(timer)) {
            set_overrun(info, overrun);
        }
    }
}

/// The timers whose signals wait for one of these threads, or for their process.
fn waiting(threads: &[Injection]) -> Result<Vec<i32>> {
    let mut all = Vec::new();
    for thread in threads {
        let (own, shared) = thread.stopped()?.pending()?;
        all.extend(own.iter().chain(&shared).filter_map(timer_of));
    }
    Ok(all)
}
