//! The order of signals that a guest's call sends to processes of its own shim.
//!
//! The kernel makes a signal pending before the call that sends it returns, so a process that
//! learns of the call from its sender, in whatever way, has handled the signal first. To keep that
//! order, home forwards these signals before it sends the call's result: messages to a guest's node
//! arrive in order. Signals that are pending when a process leaves home are at its guest before the
//! guest runs.

use crate::process::Process;
use crate::process::state::State;
use crate::shim::Shim;
use crate::signals::verdict::{Verdict, is_one_shot, judge};
use crate::stops::quiesce::POLL_INTERVAL;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_image::Reserve;
use tern_image::process::Action;
use tern_migrate::message::Message;
use tern_syscall::{Arg, Call};
use tern_tracee::inject::{self, Injection};
use tern_tracee::siginfo::{Siginfo, is_queued, signal_of, timer_of};
use tern_tracee::stop::Stopped;
use tern_tracee::{Memory, Result, procfs};

/// How long to wait for the stop of a pending signal. In a frozen control group it does not come.
const SIGNAL_STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the main loop itself waits for such a stop. A deputy that gets a CPU stops within
/// microseconds.
const INLINE_STOP_TIMEOUT: Duration = Duration::from_millis(1);

/// The target of a call that sends signals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SignalTarget {
    /// One thread, if this shim has one with this tid.
    Thread(HomePid),
    /// Any other target.
    Any,
}

pub(super) fn signal_target(call: &Call) -> Option<SignalTarget> {
    let thread = |arg: usize| match call.args[arg] {
        Arg::Value(tid) => SignalTarget::Thread(HomePid(tid as i32)),
        _ => SignalTarget::Any,
    };
    match i64::from(call.nr) {
        libc::SYS_tkill => Some(thread(0)),
        libc::SYS_tgkill | libc::SYS_rt_tgsigqueueinfo => Some(thread(1)),
        libc::SYS_kill | libc::SYS_rt_sigqueueinfo | libc::SYS_pidfd_send_signal => Some(SignalTarget::Any),
        _ => None,
    }
}

impl Shim {
    /// Handles the stops for the signals that the finished call of this thread has sent to
    /// deputies; this forwards the signals. Returns whether a stop is still to come: then the
    /// call's result must wait, and the main loop goes on.
    ///
    /// The kernel dequeues a signal and stops the thread for its tracer in one step. So once a
    /// signal is not pending any more, its stop is available or was handled. And after each stop
    /// that is handled there may be another signal.
    pub(crate) fn must_await_sent_signals(&mut self, tid: HomePid) -> bool {
        let thread = self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid));
        let Some(current) =
            thread.filter(|thread| thread.draining.is_none()).and_then(|t| t.current.as_mut())
        else {
            return false;
        };
        let Some(target) = signal_target(&current.request.call) else { return false };
        let begun = Instant::now();
        let since = *current.awaits_signals_since.get_or_insert(begun);
        loop {
            let is_pending = since.elapsed() < SIGNAL_STOP_TIMEOUT && self.has_pending_signal(target);
            match (is_pending, self.handle_all_stops()) {
                (false, false) => return false,
                (true, _) if begun.elapsed() > INLINE_STOP_TIMEOUT => return true,
                (true, false) => tern_tracee::stop::pause(POLL_INTERVAL),
                (_, true) => {}
            }
        }
    }

    fn has_pending_signal(&mut self, to: SignalTarget) -> bool {
        if let SignalTarget::Thread(tid) = to
            && let Some(process) = self.process_of_thread(tid)
        {
            return process.is_away() && will_take_signal(&[tid]);
        }
        self.processes.values().any(|process| process.is_away() && will_take_signal(&process.live_tids()))
    }
}

impl Process {
    fn live_tids(&self) -> Vec<HomePid> {
        self.live_threads().map(|thread| thread.tid).collect()
    }

    /// Takes the pending signals that handlers are to see from the kernel, for the threads of a
    /// captured process, which is stopped. Returns the messages to send to the guest before it
    /// starts. Otherwise the deputy would forward these signals only when the guest already runs,
    /// and the guest may by then have learned of them from their sender. If the process stays at
    /// home, the signals are raised again ([`Self::raise_unacked`]).
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn take_pending_signals(&mut self) -> Result<Vec<(HomePid, Message)>> {
        let (State::Outgoing(outgoing), Some(reserve)) = (&self.state, self.reserve) else {
            return Ok(Vec::new());
        };
        let Some(actions) = outgoing.image.as_ref().map(|image| image.0.actions.clone()) else {
            return Ok(Vec::new());
        };
        let mut messages = Vec::new();
        for tid in self.live_tids() {
            let thread = self.thread(tid)?;
            // If the shim has cut a transfer short, a signal must interrupt the rest, which the
            // deputy makes. Likewise it must interrupt the call of a draining thread.
            let is_taken_here = thread.partial.is_none() && thread.draining.is_none();
            let Some(stopped) = thread.stopped.as_ref().filter(|_| is_taken_here) else {
                continue;
            };
            let signals = pending_for_handlers(stopped, &actions)?;
            if signals.is_empty() {
                continue;
            }
            let (mut injection, memory) = inject::through_vdso(self.take_stopped(tid)?)?;
            let taken = dequeue(&mut injection, &memory, reserve, signals);
            self.set_stopped(injection.finish()?)?;
            let thread = self.thread(tid)?;
            messages.extend(taken?.into_iter().map(|info| (tid, thread.signal_message(info))));
        }
        Ok(messages)
    }

    /// Raises again, in a thread under injection, the signals that its guest, which never ran, has
    /// not acknowledged.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn raise_unacked(
        &mut self,
        (injection, memory): (&mut Injection, &Memory),
        reserve: Reserve,
        tid: HomePid,
    ) -> Result<()> {
        let (own_pid, thread) = (self.own_pid, self.thread(tid)?);
        let unacked: Vec<Siginfo> = thread.unacked.drain(..).map(|(_, info)| info).collect();
        raise_natively(injection, memory, reserve, (own_pid, thread.own_tid), &unacked)
    }
}

/// Queues signals again to the thread from which they were taken, by calls of that thread, which is
/// under injection. A thread may send itself any siginfo, including the kernel's own. `own` is its
/// pid and tid in its own pid namespace. The kernel keeps one signal of a number for the thread and
/// one for the process, and dequeues that for the thread first. So a second one was for the process.
///
/// # Errors
/// If it is gone.
pub(crate) fn raise_natively(
    injection: &mut Injection,
    memory: &Memory,
    reserve: Reserve,
    own: (i32, i32),
    infos: &[Siginfo],
) -> Result<()> {
    let mut for_thread = 0u64;
    for info in infos {
        memory.write(reserve.scratch(), info)?;
        let (pid, tid, signal, at) = (own.0 as u64, own.1 as u64, signal_of(info), reserve.scratch());
        let number = signal as u64;
        let (nr, args) = if !is_queued(signal) && for_thread >> (number & 63) & 1 == 1 {
            (libc::SYS_rt_sigqueueinfo, [pid, number, at, 0, 0, 0])
        } else {
            (libc::SYS_rt_tgsigqueueinfo, [pid, tid, number, at, 0, 0])
        };
        for_thread |= 1 << (number & 63);
        let _full_queue_loses_it = injection.call(nr, args)?;
    }
    Ok(())
}

/// The signals that are pending for a stopped thread and that handlers are to see, and how many of
/// each number are to be taken: only one of those with a one-shot handler. Signals of timers are
/// left out: they have no sender, and the kernel must have them pending when its timers are taken.
fn pending_for_handlers(stopped: &Stopped, actions: &[Action]) -> Result<BTreeMap<i32, usize>> {
    let (own, shared) = stopped.pending()?;
    let (mut wanted, mut left) = (BTreeMap::new(), stopped.sigmask()?);
    for info in own.iter().chain(&shared) {
        let signal = signal_of(info);
        let Some(action) = usize::try_from(signal - 1).ok().and_then(|at| actions.get(at)) else { continue };
        if timer_of(info).is_some() || judge(action[0], signal) != Verdict::Forward {
            left |= 1 << (signal - 1);
        }
        let count = wanted.entry(signal).or_insert(0);
        *count = if is_one_shot(action) { 1 } else { *count + 1 };
    }
    wanted.retain(|signal, _| left >> (signal - 1) & 1 == 0);
    Ok(wanted)
}

/// Dequeues pending signals in a thread under injection, in the kernel's order: at most so many of
/// each number as `wanted` says, since a timer may expire faster than its signals are dequeued.
pub(crate) fn dequeue(
    injection: &mut Injection,
    memory: &Memory,
    reserve: Reserve,
    mut wanted: BTreeMap<i32, usize>,
) -> Result<Vec<Siginfo>> {
    let (set, now, at) = (reserve.scratch(), reserve.scratch() + 64, reserve.scratch() + 128);
    memory.write(now, &[0; 16])?;
    let mut taken = Vec::new();
    while !wanted.is_empty() {
        let numbers = wanted.keys().fold(0u64, |set, signal| set | 1 << (signal - 1));
        memory.write(set, &numbers.to_le_bytes())?;
        let signal = injection.call(libc::SYS_rt_sigtimedwait, [set, at, now, 8, 0, 0])?;
        let Some(left) = i32::try_from(signal).ok().and_then(|signal| wanted.get_mut(&signal)) else {
            break;
        };
        let mut info = [0; 128];
        memory.read(at, &mut info)?;
        taken.push(info);
        *left -= 1;
        wanted.retain(|_, left| *left > 0);
    }
    Ok(taken)
}

/// Whether one of these threads is about to take a signal. A thread that is stopped, or in a vfork,
/// takes none now. The kernel may have chosen such a thread for a signal that others could take
/// too, so then no thread of its process is waited for.
pub(crate) fn will_take_signal(threads: &[HomePid]) -> bool {
    let mut takes = false;
    for tid in threads {
        let Ok(status) = procfs::status(tid.0) else { continue };
        if !matches!(status.state, b'R' | b'S') {
            return false;
        }
        takes |= status.pending & !status.blocked != 0;
    }
    takes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_targets_of_calls() {
        let call =
            |nr: i64| Call { nr: nr as u32, args: std::array::from_fn(|at| Arg::Value(at as u64 + 7)) };
        assert_eq!(signal_target(&call(libc::SYS_tgkill)), Some(SignalTarget::Thread(HomePid(8))));
        assert_eq!(signal_target(&call(libc::SYS_tkill)), Some(SignalTarget::Thread(HomePid(7))));
        assert_eq!(signal_target(&call(libc::SYS_kill)), Some(SignalTarget::Any));
        assert_eq!(signal_target(&call(libc::SYS_write)), None);
    }
}
