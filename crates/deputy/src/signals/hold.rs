//! Signals that a deputy leaves in its kernel although its program does not block them.
//!
//! Natively a signal is blocked while its handler runs, and the kernel merges the timer's further
//! expiries with the pending one. The handler of a deputy's program runs at the guest, so without
//! this module home's kernel would deliver each expiry at once. If a timer expired faster than a
//! signal reaches the guest and its handler returns,
//!
//! * the deputy would be stopped for one expiry after the other. It would neither begin a call nor
//!   take a signal of a higher number, such as SIGTERM.
//! * a signal would cross each call of the guest on its way, so that the call would be refused each
//!   time.
//!
//! So when the timers of a thread expire in quick succession, its deputy blocks the number of the
//! signal that it forwards. The kernel merges further expiries: those of a POSIX timer count as
//! overruns, and those of an interval timer (setitimer) are lost, as always while its signal is
//! pending. The guest sends [`SignalAck`](tern_migrate::message::Message::SignalAck) when the handler
//! has returned, and the deputy then unblocks the signal. So few of each number are on their way.
//! If the handler has interrupted a call that is made again, the guest sends that call first. So the
//! deputy has begun the call before the next expiry can refuse it.
//!
//! Natively a pending signal is delivered before a call returns. This matters for a call that stops
//! a timer, and for one by which a program sends itself a signal: before the result of such a call
//! is sent, held signals that are pending are forwarded. It is not done for other calls. A handler
//! that makes calls would otherwise always be followed by itself.
//!
//! Signals that have a sender are held only if very many are unacknowledged. They must be at the
//! guest before their sender continues ([`crate::signals::order`]).

use crate::calls::current::CurrentCall;
use crate::process::Process;
use crate::process::thread::Thread;
use crate::shim::Shim;
use crate::signals::order::{dequeue, signal_target};
use crate::signals::verdict::is_one_shot;
use crate::stops::quiesce::interrupt_thread;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_syscall::{Arg, Call, Outcome};
use tern_tracee::registers::Registers;
use tern_tracee::siginfo::{Siginfo, is_expiry, signal_of};
use tern_tracee::stop::Stopped;
use tern_tracee::{Result, procfs};

/// A thread with this many unacknowledged signals leaves further ones in the kernel. A guest
/// acknowledges at least every sixty-fourth signal.
const MAX_UNACKED_SIGNALS: usize = 1024;

/// An expiry is held if it follows another one of its number within this time. Slower timers whose
/// handler returns before the next expiry cause no stop of the deputy beyond those for the signal.
const HOLD_INTERVAL: Duration = Duration::from_millis(5);

/// A signal is held for this long at most, or for twice the time that its guest's reports have taken
/// lately: the guest sends no report if a handler is left by a jump, or if a cut link has lost it.
const MIN_HOLD_TIMEOUT: Duration = Duration::from_millis(50);

/// No signal is held for longer, whatever the reports have taken.
const MAX_HOLD_TIMEOUT: Duration = Duration::from_secs(1);

/// The signals that a deputy thread blocks although its program does not.
#[derive(Debug, Default)]
pub(crate) struct HeldSignals {
    /// When each was blocked, by number.
    since: BTreeMap<i32, Instant>,
    /// Those of them that are to be unblocked as soon as that is possible.
    to_release: u64,
    /// The last expiry of a timer that was forwarded, by number.
    expiries: BTreeMap<i32, LastExpiry>,
    /// The time from the forwarding of an expiry to the report that it is handled: the longest of the
    /// last ones.
    round_trip: Duration,
}

/// The last expiry of one number.
#[derive(Debug)]
struct LastExpiry {
    /// Its count among the thread's signals.
    count: u64,
    /// When it was forwarded, or when the number was released after that.
    at: Instant,
    /// The first expiry of which the guest has not reported that its handler has returned: its count,
    /// and when it was forwarded.
    unreported: Option<(u64, Instant)>,
}

impl HeldSignals {
    /// The set of their numbers.
    pub(crate) fn set(&self) -> u64 {
        self.since.keys().fold(0, |set, signal| set | bit(*signal))
    }

    /// Those of them that are to be unblocked as soon as that is possible.
    pub(crate) fn to_release(&self) -> u64 {
        self.to_release
    }

    /// The deputy blocks these signals from now on.
    fn add(&mut self, signals: u64, now: Instant) {
        self.since.extend((1..=64).filter(|signal| signals & bit(*signal) != 0).map(|signal| (signal, now)));
    }

    /// These signals are not held any more: the program itself blocks them, or nothing does.
    pub(crate) fn remove(&mut self, signals: u64) {
        self.since.retain(|signal, _| signals & bit(*signal) == 0);
        self.to_release &= !signals;
    }

    /// How long a signal is held at most.
    fn timeout(&self) -> Duration {
        (self.round_trip * 2).clamp(MIN_HOLD_TIMEOUT, MAX_HOLD_TIMEOUT)
    }

    /// Those that are held for too long. Each is returned again if the thread does not stop before
    /// long.
    fn overdue(&mut self, now: Instant) -> u64 {
        let timeout = self.timeout();
        let overdue = self.since.iter_mut().filter(|(_, since)| now.duration_since(**since) > timeout);
        overdue.fold(0, |set, (signal, since)| {
            *since = now;
            set | bit(*signal)
        })
    }

    /// Whether a signal that is forwarded at this time is held. While the last expiry is on its way
    /// to a handler, that does not depend on the interval: each call could cross one. A handler that
    /// does not block its signal (`nodefer`) may have been left by a jump, which is not reported.
    fn is_repeated(&self, info: &Siginfo, nodefer: bool, now: Instant) -> bool {
        let last = self.expiries.get(&signal_of(info)).filter(|_| is_expiry(info));
        last.is_some_and(|last| {
            let limit = if last.unreported.is_none() || nodefer { HOLD_INTERVAL } else { self.timeout() };
            now.duration_since(last.at) < limit
        })
    }

    /// A signal is forwarded, as the one of this count.
    fn note_forwarded(&mut self, info: &Siginfo, count: u64, at: Instant) {
        if is_expiry(info) {
            let before = self.expiries.get(&signal_of(info)).and_then(|last| last.unreported);
            let unreported = before.or(Some((count, at)));
            self.expiries.insert(signal_of(info), LastExpiry { count, at, unreported });
        }
    }

    /// The `handled` ones among the first `count` signals are handled. Returns those of them of which
    /// no further expiry was forwarded.
    fn note_handled(&mut self, count: u64, handled: u64, now: Instant) -> u64 {
        let mut all_handled = handled;
        for (signal, last) in self.expiries.iter_mut().filter(|(signal, _)| handled & bit(**signal) != 0) {
            if let Some((_, since)) = last.unreported.take_if(|(first, _)| *first <= count) {
                self.round_trip = now.duration_since(since).max(self.round_trip * 7 / 8);
            }
            if last.count > count {
                all_handled &= !bit(*signal);
                last.unreported = last.unreported.or(Some((last.count, last.at)));
            }
        }
        all_handled
    }

    /// These signals are unblocked. One that is pending is delivered at once. That is a repeated
    /// expiry, however long ago the last one was forwarded.
    fn note_released(&mut self, signals: u64, now: Instant) {
        self.remove(signals);
        let released = self.expiries.iter_mut().filter(|(signal, _)| signals & bit(**signal) != 0);
        released.for_each(|(_, last)| last.at = now);
    }
}

fn bit(signal: i32) -> u64 {
    1 << ((signal - 1) & 63)
}

impl Thread {
    /// Counts a signal that is forwarded to the guest, and returns the message.
    pub(crate) fn signal_message(&mut self, info: Siginfo) -> Message {
        self.signals_sent += 1;
        self.held.note_forwarded(&info, self.signals_sent, Instant::now());
        self.unacked.push_back((self.signals_sent, info));
        Message::Signal(self.signals_sent, info.to_vec())
    }

    /// Has a deputy that is stopped for this signal, which is forwarded next, block further ones if
    /// that is needed. `registers` are those at the stop, and `handled` is the set of signals that
    /// have handlers; that of this signal does not block it if `nodefer`.
    ///
    /// # Errors
    /// If it is gone.
    pub(super) fn hold_signals(
        &mut self,
        stopped: &Stopped,
        registers: &Registers,
        info: &Siginfo,
        (handled, nodefer): (u64, bool),
    ) -> Result<()> {
        let is_repeated = self.held.is_repeated(info, nodefer, Instant::now());
        let repeated = if is_repeated { bit(signal_of(info)) } else { 0 };
        let excess = if self.unacked.len() >= MAX_UNACKED_SIGNALS { handled } else { 0 };
        let wanted = repeated | excess;
        // A call with a mask of its own ends by this signal.
        if wanted == 0 || self.is_in_masked_call(registers) {
            return Ok(());
        }
        let mask = stopped.sigmask()?;
        stopped.set_sigmask(mask | wanted)?;
        // The program may have blocked some by a mask that the deputy has yet to set.
        let next = self.pending_mask.or_else(|| self.current.as_ref().and_then(CurrentCall::mask_being_set));
        self.held.add(wanted & !mask & !next.unwrap_or_default(), Instant::now());
        Ok(())
    }

    /// Whether the deputy is inside a call that has a signal mask of its own. The kernel would drop
    /// that mask if the thread's mask were set.
    fn is_in_masked_call(&self, registers: &Registers) -> bool {
        registers.call().is_some() && self.has_masked_call()
    }

    fn has_masked_call(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.request.call.mask().is_some())
    }

    /// Whether the main loop must release held signals when they are overdue. A thread that exits
    /// takes none any more; the record of a first thread lasts until all others have exited.
    pub(crate) fn awaits_release(&self) -> bool {
        !self.held.since.is_empty()
            && !self.is_exiting
            && !self.has_excess_signals()
            && !self.has_masked_call()
    }

    fn has_excess_signals(&self) -> bool {
        self.unacked.len() > MAX_UNACKED_SIGNALS / 2
    }

    /// Has those of these signals unblocked that are held: at the next stop of the deputy, which is
    /// interrupted for that, or after a call that has a signal mask of its own.
    fn request_release(&mut self, signals: u64) -> Result<()> {
        let released = self.held.set() & signals;
        if released == 0 || self.has_excess_signals() {
            return Ok(());
        }
        self.held.to_release |= released;
        if self.has_masked_call() {
            return Ok(());
        }
        match self.stopped.take() {
            Some(stopped) => {
                let done = self.release_at_stop(&stopped);
                self.stopped = Some(stopped);
                done
            }
            // A thread that is not found may be executing a program under another tid: what is held
            // is needed at that stop.
            None => interrupt_thread(self.tid).map(drop),
        }
    }

    /// Unblocks the held signals in a stopped deputy if that was requested and is possible now.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn release_at_stop(&mut self, stopped: &Stopped) -> Result<()> {
        if self.held.to_release == 0 || self.must_keep_mask() || self.is_in_masked_call(&stopped.registers()?)
        {
            return Ok(());
        }
        self.release(stopped)
    }

    /// Unblocks all held signals in a stopped deputy whose call outlasts its return home. If the call
    /// has a signal mask of its own, only that counts until it has ended.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn release_for_draining(&mut self, stopped: &Stopped) -> Result<()> {
        if self.is_in_masked_call(&stopped.registers()?) {
            return Ok(());
        }
        self.held.to_release = self.held.set();
        self.release(stopped)
    }

    fn release(&mut self, stopped: &Stopped) -> Result<()> {
        let released = self.held.to_release;
        self.held.note_released(released, Instant::now());
        if released == 0 { Ok(()) } else { stopped.set_sigmask(stopped.sigmask()? & !released) }
    }

    /// Whether held signals must wait until the result of a call was taken. The call may have set
    /// the mask already. Held signals that are pending after the call must be forwarded before its
    /// result.
    fn must_keep_mask(&self) -> bool {
        let Some(current) = &self.current else { return false };
        i64::from(current.request.call.nr) == libc::SYS_rt_sigprocmask
            || current.guest_number().is_some() && self.has_finished_call()
    }

    /// A call of the guest, which has received `call_signals` signals before it, has ended. A mask that
    /// the program has set or read is its own: held signals are not part of it.
    pub(crate) fn adapt_mask_call(&mut self, call: &Call, call_signals: u64, outcome: &mut Outcome) {
        match (i64::from(call.nr), &call.args) {
            (libc::SYS_rt_sigprocmask, [Arg::Value(how), Arg::Bytes(set), ..]) if outcome.ret == 0 => {
                let set = set.as_slice().try_into().map_or(0, u64::from_le_bytes);
                let (blocked, unblocked) = match *how as i32 {
                    libc::SIG_BLOCK => (set, 0),
                    libc::SIG_UNBLOCK => (0, set),
                    _ => (set, !set),
                };
                self.held.remove(blocked);
                // As at the return of a handler, which may have been left by a jump.
                self.held.note_handled(call_signals, unblocked, Instant::now());
            }
            (libc::SYS_rt_sigpending, _) => {
                let bytes = outcome.outs.first_mut().into_iter().flat_map(|set| set.iter_mut());
                bytes.zip(self.held.set().to_le_bytes()).for_each(|(byte, held)| *byte &= !held);
            }
            _ => {}
        }
    }
}

impl Shim {
    /// The guest of a thread has received the first `count` signals, and the handlers of the
    /// `handled` ones among them have returned.
    pub(crate) fn signals_handled(&mut self, tid: HomePid, count: u64, handled: u64) {
        let thread = self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid));
        if let Some(thread) = thread {
            thread.acknowledge_signals(count);
            let handled = thread.held.note_handled(count, handled, Instant::now());
            self.release_signals(tid, handled);
        }
    }

    /// Releases those of these signals that are held in a thread.
    pub(crate) fn release_signals(&mut self, tid: HomePid, signals: u64) {
        let thread = self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid));
        if let Some(Err(error)) = thread.map(|thread| thread.request_release(signals)) {
            self.handle_error(tid, &error);
        }
    }

    /// Releases signals that were held for too long.
    pub(crate) fn release_overdue_signals(&mut self) {
        let threads = self.processes.values_mut().flat_map(|process| process.threads.values_mut());
        let waiting = threads.filter(|thread| thread.awaits_release());
        let overdue: Vec<(HomePid, u64)> =
            waiting.map(|thread| (thread.tid, thread.held.overdue(Instant::now()))).collect();
        overdue.into_iter().for_each(|(tid, signals)| self.release_signals(tid, signals));
    }

    /// A call of a guest's thread has ended, and its result is to be sent. Forwards the held signals
    /// that are pending if this call must not return before them. Requests releases again that had
    /// to wait for the end of the call.
    pub(crate) fn forward_held_signals(&mut self, tid: HomePid, call: &Call) {
        let Some(thread) = self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid))
        else {
            return;
        };
        let held = thread.held.set();
        if held == 0 {
            return;
        }
        // The release must not overtake this.
        let to_release = std::mem::take(&mut thread.held.to_release);
        if returns_after_pending_signals(call)
            && procfs::status(tid.0).is_ok_and(|status| status.pending & held != 0)
        {
            match self.with_deputy(tid, Process::take_held_signals) {
                Ok(messages) => messages.iter().for_each(|message| self.send(tid, message)),
                Err(error) => self.handle_error(tid, &error),
            }
        }
        self.release_signals(tid, to_release);
    }
}

/// Whether a program could tell that a signal which was pending during this call comes after it: the
/// call stops a timer, or sends a signal.
fn returns_after_pending_signals(call: &Call) -> bool {
    let stops = [libc::SYS_setitimer, libc::SYS_alarm, libc::SYS_timer_settime, libc::SYS_timer_delete];
    signal_target(call).is_some() || stops.contains(&i64::from(call.nr))
}

impl Process {
    /// Takes the pending signals that are held from the kernel, and resumes the thread. Those that
    /// have no handler any more are unblocked. Returns the messages to send to the guest.
    fn take_held_signals(&mut self, stopped: Stopped) -> Result<Vec<Message>> {
        let tid = HomePid(stopped.pid());
        let handled = self.handled_signals();
        let thread = self.thread(tid)?;
        let unhandled = thread.held.set() & !handled;
        if unhandled != 0 {
            thread.held.remove(unhandled);
            stopped.set_sigmask(stopped.sigmask()? & !unhandled)?;
        }
        let held = thread.held.set();
        let (own, shared) = stopped.pending()?;
        let mut wanted = BTreeMap::new();
        for signal in own.iter().chain(&shared).map(signal_of).filter(|signal| held & bit(*signal) != 0) {
            let is_one_shot = self.actions.get(signal as usize - 1).is_some_and(is_one_shot);
            let count = wanted.entry(signal).or_insert(0);
            *count = if is_one_shot { 1 } else { *count + 1 };
        }
        let (mut injection, reserve) = self.injection(stopped)?;
        let taken = dequeue(&mut injection, &self.memory, reserve, wanted);
        let stopped = injection.finish()?;
        let taken = match taken {
            Ok(taken) => taken,
            Err(error) => return self.resume_unnoticed(stopped).and(Err(error)),
        };
        let mut messages = Vec::new();
        for mut info in taken {
            self.set_overrun_of(&mut info);
            self.handler_invoked(signal_of(&info));
            messages.push(self.thread(tid)?.signal_message(info));
        }
        self.resume_unnoticed(stopped).map(|()| messages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_syscall::ByteBuf;
    use tern_tracee::siginfo::kernel_siginfo;

    const ALARM: u64 = 1 << (libc::SIGALRM - 1);
    const PROF: u64 = 1 << (libc::SIGPROF - 1);

    /// A record of the thread that runs the test. No shim traces it, so an interrupt does not find it.
    fn thread() -> Thread {
        Thread::new_resident(HomePid(rustix::thread::gettid().as_raw_nonzero().get())).expect("its record")
    }

    fn mask_call(nr: i64, how: i32, set: u64) -> Call {
        let [how, set] = [Arg::Value(how as u64), Arg::Bytes(ByteBuf::from(set.to_le_bytes().to_vec()))];
        let rest = || Arg::Value(0);
        Call { nr: nr as u32, args: [how, set, rest(), rest(), rest(), rest()] }
    }

    #[test]
    fn expiries_are_repeated_that_are_frequent_or_not_handled() {
        let (mut held, now) = (HeldSignals::default(), Instant::now());
        let (expiry, other) = (kernel_siginfo(libc::SIGALRM), kernel_siginfo(libc::SIGPIPE));
        held.note_forwarded(&expiry, 1, now);
        held.note_forwarded(&other, 2, now);
        let (soon, later) = (now + HOLD_INTERVAL / 2, now + HOLD_INTERVAL * 2);
        assert!(!held.is_repeated(&other, false, soon));
        assert!(held.is_repeated(&expiry, true, soon) && !held.is_repeated(&expiry, true, later));
        assert!(held.is_repeated(&expiry, false, later));
        assert!(!held.is_repeated(&expiry, false, now + MIN_HOLD_TIMEOUT * 2));
        held.note_handled(2, ALARM, later);
        assert!(!held.is_repeated(&expiry, false, later));
        held.note_released(ALARM, later);
        assert!(held.is_repeated(&expiry, false, later + HOLD_INTERVAL / 2));
    }

    #[test]
    fn a_later_expiry_is_not_handled_yet() {
        let (mut held, now) = (HeldSignals::default(), Instant::now());
        held.note_forwarded(&kernel_siginfo(libc::SIGALRM), 3, now);
        held.note_forwarded(&kernel_siginfo(libc::SIGPROF), 5, now);
        assert_eq!(held.note_handled(4, ALARM | PROF, now), ALARM);
        assert_eq!(held.note_handled(5, ALARM | PROF, now), ALARM | PROF);
    }

    #[test]
    fn each_number_is_overdue_after_its_own_time() {
        let (mut held, now) = (HeldSignals::default(), Instant::now());
        held.add(ALARM, now);
        held.add(PROF, now + MIN_HOLD_TIMEOUT);
        assert_eq!(held.overdue(now + MIN_HOLD_TIMEOUT), 0);
        let later = now + MIN_HOLD_TIMEOUT * 3 / 2;
        assert_eq!((held.overdue(later), held.overdue(later)), (ALARM, 0));
        assert_eq!(held.overdue(now + MIN_HOLD_TIMEOUT * 3), ALARM | PROF);
        assert_eq!(held.set(), ALARM | PROF);
        held.remove(ALARM);
        assert_eq!((held.set(), held.overdue(now + MIN_HOLD_TIMEOUT * 6)), (PROF, PROF));
    }

    #[test]
    fn the_timeout_follows_the_time_of_the_reports() {
        let (mut held, begun) = (HeldSignals::default(), Instant::now());
        let at = |ms| begun + Duration::from_millis(ms);
        let expiry = kernel_siginfo(libc::SIGALRM);
        // The first report takes 80 ms, and comes when a later expiry was forwarded already.
        held.note_forwarded(&expiry, 1, at(0));
        held.note_forwarded(&expiry, 2, at(50));
        assert_eq!(held.note_handled(1, ALARM, at(80)), 0);
        assert_eq!(held.timeout(), Duration::from_millis(160));
        assert_eq!(held.note_handled(2, ALARM, at(130)), ALARM);
        assert_eq!(held.timeout(), Duration::from_millis(160));
        for count in 3..50 {
            held.note_forwarded(&expiry, count, at(130));
            held.note_handled(count, ALARM, at(131));
        }
        assert_eq!(held.timeout(), MIN_HOLD_TIMEOUT);
        held.note_forwarded(&expiry, 50, at(200));
        held.note_handled(50, ALARM, at(5000));
        assert_eq!(held.timeout(), MAX_HOLD_TIMEOUT);
    }

    #[test]
    fn an_exiting_thread_awaits_no_release() {
        let mut thread = thread();
        thread.held.add(ALARM, Instant::now());
        assert!(thread.needs_polling());
        thread.is_exiting = true;
        assert!(!thread.needs_polling());
    }

    #[test]
    fn a_thread_that_is_not_found_still_holds_its_signals() {
        let mut thread = thread();
        thread.held.add(ALARM | PROF, Instant::now());
        thread.request_release(ALARM).expect("no failure");
        assert_eq!((thread.held.set(), thread.held.to_release()), (ALARM | PROF, ALARM));
    }

    #[test]
    fn many_unacknowledged_signals_are_not_released() {
        let mut thread = thread();
        thread.held.add(ALARM, Instant::now());
        let info = kernel_siginfo(libc::SIGPIPE);
        thread.unacked = (1..=MAX_UNACKED_SIGNALS as u64).map(|count| (count, info)).collect();
        thread.request_release(ALARM).expect("no failure");
        assert_eq!((thread.held.set(), thread.needs_polling()), (ALARM, false));
        thread.acknowledge_signals(MAX_UNACKED_SIGNALS as u64 / 2);
        assert!(thread.needs_polling());
    }

    #[test]
    fn a_program_does_not_see_held_signals_as_pending() {
        let mut thread = thread();
        thread.held.add(ALARM, Instant::now());
        let call = mask_call(libc::SYS_rt_sigpending, 0, 0);
        let pending = ByteBuf::from((ALARM | PROF).to_le_bytes().to_vec());
        let mut outcome = Outcome { ret: 0, outs: vec![pending] };
        thread.adapt_mask_call(&call, 0, &mut outcome);
        assert_eq!(outcome.outs[0].as_slice(), PROF.to_le_bytes());
        assert_eq!(thread.held.set(), ALARM);
    }

    #[test]
    fn what_the_program_blocks_is_not_held() {
        let how = [(libc::SIG_BLOCK, PROF), (libc::SIG_SETMASK, PROF), (libc::SIG_UNBLOCK, ALARM | PROF)];
        for (how, left) in how {
            let mut thread = thread();
            thread.held.add(ALARM | PROF, Instant::now());
            thread.held.to_release = ALARM | PROF;
            let call = mask_call(libc::SYS_rt_sigprocmask, how, ALARM);
            let mut refused = Outcome { ret: -i64::from(libc::EINVAL), outs: Vec::new() };
            thread.adapt_mask_call(&call, 0, &mut refused);
            assert_eq!(thread.held.set(), ALARM | PROF);
            thread.adapt_mask_call(&call, 0, &mut Outcome { ret: 0, outs: Vec::new() });
            assert_eq!((thread.held.set(), thread.held.to_release()), (left, left));
        }
    }

    #[test]
    fn a_signal_that_the_program_unblocks_is_handled() {
        let (mut thread, expiry) = (thread(), kernel_siginfo(libc::SIGALRM));
        drop(thread.signal_message(expiry));
        let later = Instant::now() + HOLD_INTERVAL * 2;
        let call = mask_call(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, PROF);
        thread.adapt_mask_call(&call, 0, &mut Outcome { ret: 0, outs: Vec::new() });
        assert!(thread.held.is_repeated(&expiry, false, later), "the guest had not received it");
        thread.adapt_mask_call(&call, 1, &mut Outcome { ret: 0, outs: Vec::new() });
        assert!(!thread.held.is_repeated(&expiry, false, later));
    }
}
