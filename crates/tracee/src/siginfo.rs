//! `siginfo_t` as bytes, and the kernel's rules for queueing signals.
//!
//! Sources: sigqueue(3), timer_getoverrun(2), signal(7).

use std::collections::VecDeque;

/// `siginfo_t`.
pub type Siginfo = [u8; 128];

/// Offsets of si_signo, si_code, si_timerid or si_pid, si_overrun.
const SIGNAL: usize = 0;
const CODE: usize = 8;
const TIMER: usize = 16;
const OVERRUN: usize = 20;

/// si_code: sent by the kernel, or by a POSIX timer.
const SI_KERNEL: i32 = 0x80;
const SI_TIMER: i32 = -2;

/// The signal number.
#[must_use]
pub fn signal_of(info: &Siginfo) -> i32 {
    word(info, SIGNAL)
}

/// `si_code`: why the signal was sent.
#[must_use]
pub fn code(info: &Siginfo) -> i32 {
    word(info, CODE)
}

/// The child whose end, stop or continuation it reports, if it reports one. A child may end with any
/// signal.
#[must_use]
pub fn reported_child(info: &Siginfo) -> Option<i32> {
    (libc::CLD_EXITED..=libc::CLD_CONTINUED).contains(&code(info)).then(|| word(info, TIMER))
}

/// The POSIX timer that raised it, if one did.
#[must_use]
pub fn timer_of(info: &Siginfo) -> Option<i32> {
    (code(info) == SI_TIMER).then(|| word(info, TIMER))
}

/// Whether a timer has raised it: such a signal has no sender, and may come at any time.
#[must_use]
pub fn is_expiry(info: &Siginfo) -> bool {
    let interval_timers = [libc::SIGALRM, libc::SIGVTALRM, libc::SIGPROF];
    timer_of(info).is_some() || code(info) == SI_KERNEL && interval_timers.contains(&signal_of(info))
}

/// Sets the timer's overrun count.
pub fn set_overrun(info: &mut Siginfo, overrun: i32) {
    info[OVERRUN..OVERRUN + 4].copy_from_slice(&overrun.to_le_bytes());
}

/// The siginfo of a signal that the kernel sends by itself.
#[must_use]
pub fn kernel_siginfo(signal: i32) -> Siginfo {
    let mut info = [0; 128];
    info[SIGNAL..SIGNAL + 4].copy_from_slice(&signal.to_le_bytes());
    info[CODE..CODE + 4].copy_from_slice(&SI_KERNEL.to_le_bytes());
    info
}

/// Whether every instance of a signal is queued (real-time signals); of all others the kernel keeps
/// only one.
#[must_use]
pub fn is_queued(signal: i32) -> bool {
    signal >= 32
}

/// Queues a signal behind the pending ones of the same number, or drops it, by the kernel's rules
/// for a signal that cannot be delivered yet. A timer has at most one pending signal; later
/// signals of the timer raise its overrun count. Any other signal that is not queued is kept once: the
/// first.
pub fn enqueue(waiting: &mut VecDeque<Siginfo>, info: Siginfo) {
    if let Some(timer) = timer_of(&info) {
        if let Some(first) = waiting.iter_mut().find(|first| timer_of(first) == Some(timer)) {
            let both = word(first, OVERRUN).saturating_add(word(&info, OVERRUN)).saturating_add(1);
            return set_overrun(first, both);
        }
    } else if !is_queued(signal_of(&info)) && !waiting.is_empty() {
        return;
    }
    waiting.push_back(info);
}

fn word(info: &Siginfo, at: usize) -> i32 {
    info.get(at..).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| i32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_a_timer(signal: i32, timer: i32, overrun: i32) -> Siginfo {
        let mut info = kernel_siginfo(signal);
        info[CODE..CODE + 4].copy_from_slice(&SI_TIMER.to_le_bytes());
        info[TIMER..TIMER + 4].copy_from_slice(&timer.to_le_bytes());
        set_overrun(&mut info, overrun);
        info
    }

    #[test]
    fn standard_signals_merge_and_realtime_signals_queue() {
        let mut waiting = VecDeque::new();
        for _ in 0..3 {
            enqueue(&mut waiting, kernel_siginfo(libc::SIGALRM));
        }
        assert_eq!(waiting.len(), 1);
        let mut queued = VecDeque::new();
        for _ in 0..3 {
            enqueue(&mut queued, kernel_siginfo(40));
        }
        assert_eq!(queued.len(), 3);
    }

    #[test]
    fn expiries_are_signals_of_timers() {
        assert!(is_expiry(&of_a_timer(40, 1, 0)) && is_expiry(&kernel_siginfo(libc::SIGPROF)));
        assert!(!is_expiry(&kernel_siginfo(libc::SIGPIPE)));
        let mut sent = kernel_siginfo(libc::SIGALRM);
        sent[CODE..CODE + 4].fill(0);
        assert!(!is_expiry(&sent), "by kill");
    }

    #[test]
    fn timer_signals_merge_into_overrun_count() {
        for signal in [libc::SIGALRM, 40] {
            let mut waiting = VecDeque::new();
            enqueue(&mut waiting, kernel_siginfo(signal));
            for (timer, overrun) in [(7, 0), (8, 2), (7, 4), (7, 0)] {
                enqueue(&mut waiting, of_a_timer(signal, timer, overrun));
            }
            let merged: Vec<_> = waiting.iter().map(|info| (timer_of(info), word(info, OVERRUN))).collect();
            assert_eq!(merged, [(None, 0), (Some(7), 6), (Some(8), 2)]);
        }
    }
}
