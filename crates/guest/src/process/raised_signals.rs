//! Signals from home that a thread has not got yet.

use std::collections::{HashMap, VecDeque};
use tern_tracee::siginfo::{self, Siginfo, enqueue, is_queued, timer_of};

/// Signals from home that were accepted for a thread and are not delivered yet.
#[derive(Debug, Default)]
pub(crate) struct RaisedSignals {
    /// By number. This kernel has at most one of each number pending.
    waiting: HashMap<i32, VecDeque<Siginfo>>,
    /// Signals accepted while a call had to be sent again. They are raised once it has been sent.
    deferred: Vec<i32>,
    /// Signals that this kernel has refused, because the user has too many pending ones.
    refused: Vec<i32>,
}

impl RaisedSignals {
    /// Adds a signal. Returns its number if it is to be raised now.
    ///
    /// Home's kernel has already delivered the signal, so it did not merge the signal with later
    /// ones, as it does while a signal is pending. Here the signal waits for its handler, and is
    /// merged. If all signals were kept, and arrived faster than their handler runs, the program
    /// would run only the handler. But if the one before it only waits to be delivered
    /// (`handler_is_running` returns false), natively its handler would run, and this signal be
    /// pending: home delivers two of one number if one was sent to the thread and one to the
    /// process. Both are kept.
    pub(crate) fn add(&mut self, info: Siginfo, handler_is_running: impl FnOnce(i32) -> bool) -> Option<i32> {
        let signal = siginfo::signal_of(&info);
        let waiting = self.waiting.entry(signal).or_default();
        let before = waiting.len();
        if before == 1 && timer_of(&info).is_none() && !is_queued(signal) && !handler_is_running(signal) {
            waiting.push_back(info);
        } else {
            enqueue(waiting, info);
        }
        // A further signal of the same number is raised after the delivery of the one before it.
        (before == 0 && !waiting.is_empty()).then_some(signal)
    }

    /// Adds a signal that an earlier epoch has accepted. It is deferred.
    pub(crate) fn add_carried(&mut self, info: Siginfo) {
        let signal = siginfo::signal_of(&info);
        if !(1..=64).contains(&signal) {
            return;
        }
        let waiting = self.waiting.entry(signal).or_default();
        waiting.push_back(info);
        if waiting.len() == 1 {
            self.deferred.push(signal);
        }
    }

    /// Defers a signal until the pending call was sent again.
    pub(crate) fn defer(&mut self, signal: i32) {
        self.deferred.push(signal);
    }

    /// Takes the deferred signals, which are to be raised now.
    pub(crate) fn take_deferred(&mut self) -> Vec<i32> {
        std::mem::take(&mut self.deferred)
    }

    /// Records that this kernel has refused a signal.
    pub(crate) fn record_refused(&mut self, signal: i32) {
        self.refused.push(signal);
    }

    /// Whether this kernel has refused a signal.
    pub(crate) fn has_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    /// Takes the refused signals, which are to be raised again.
    pub(crate) fn take_refused(&mut self) -> Vec<i32> {
        std::mem::take(&mut self.refused)
    }

    /// Whether any signal waits.
    pub(crate) fn has_any(&self) -> bool {
        self.waiting.values().any(|infos| !infos.is_empty())
    }

    /// The set of the numbers of the signals that wait.
    pub(crate) fn numbers(&self) -> u64 {
        let waiting = self.waiting.iter().filter(|(_, infos)| !infos.is_empty());
        waiting.fold(0, |set, (signal, _)| set | 1 << ((signal - 1) & 63))
    }

    /// Whether a signal of this number waits.
    pub(crate) fn has(&self, signal: i32) -> bool {
        self.waiting.get(&signal).is_some_and(|infos| !infos.is_empty())
    }

    /// Whether a signal waits that this mask does not block.
    pub(crate) fn has_admitted_by(&self, blocked: u64) -> bool {
        let waits = |(signal, infos): (&i32, &VecDeque<Siginfo>)| {
            !infos.is_empty() && blocked >> (signal - 1) & 1 == 0
        };
        self.waiting.iter().any(waits)
    }

    /// Takes the first signal of this number, which is delivered now.
    pub(crate) fn take(&mut self, signal: i32) -> Option<Siginfo> {
        self.waiting.get_mut(&signal).and_then(VecDeque::pop_front)
    }

    /// Puts a signal back that was taken.
    pub(crate) fn put_back(&mut self, signal: i32, info: Siginfo) {
        self.waiting.entry(signal).or_default().push_front(info);
    }

    /// Discards all signals of this number, as the kernel does when a program begins to ignore it.
    pub(crate) fn discard(&mut self, signal: i32) {
        self.waiting.remove(&signal);
        self.deferred.retain(|deferred| *deferred != signal);
        self.refused.retain(|refused| *refused != signal);
    }

    /// The waiting signals, to be sent to the next node.
    pub(crate) fn to_vec(&self) -> Vec<Vec<u8>> {
        self.waiting.values().flatten().map(|info| info.to_vec()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(signal: i32) -> Siginfo {
        let mut info = [0; 128];
        info[..4].copy_from_slice(&signal.to_le_bytes());
        info
    }

    #[test]
    fn second_signal_of_a_number_is_kept_until_the_handler_of_the_first_runs() {
        let mut raised = RaisedSignals::default();
        assert_eq!(raised.add(of(libc::SIGUSR1), |_| false), Some(libc::SIGUSR1));
        assert_eq!(raised.add(of(libc::SIGUSR1), |_| false), None);
        assert_eq!(raised.add(of(libc::SIGUSR1), |_| false), None);
        assert_eq!(raised.to_vec().len(), 2);
        raised.take(libc::SIGUSR1);
        assert_eq!(raised.add(of(libc::SIGUSR1), |_| true), None);
        assert_eq!(raised.to_vec().len(), 1);
    }
}
