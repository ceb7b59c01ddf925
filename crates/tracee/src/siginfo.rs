//! What the kernel tells of a signal, as bytes (`siginfo_t`), and which signals it keeps one of.
//!
//! Sources: sigqueue(3), timer_getoverrun(2), signal(7).

use std::collections::VecDeque;

/// `siginfo_t`.
pub type Siginfo = [u8; 128];

/// Where in it: si_signo, si_code, si_timerid, si_overrun.
const SIGNAL: usize = 0;
const CODE: usize = 8;
const TIMER: usize = 16;
const OVERRUN: usize = 20;

/// si_code: by the kernel; by a timer of timer_create.
const SI_KERNEL: i32 = 0x80;
const SI_TIMER: i32 = -2;

/// The signal number.
#[must_use]
pub fn signal_of(info: &Siginfo) -> i32 {
    word(info, SIGNAL)
}

/// Why it was sent (`si_code`).
#[must_use]
pub fn code(info: &Siginfo) -> i32 {
    word(info, CODE)
}

/// The timer of timer_create that has raised it, if one has.
#[must_use]
pub fn timer_of(info: &Siginfo) -> Option<i32> {
    (code(info) == SI_TIMER).then(|| word(info, TIMER))
}

/// Says how many periods of its timer have ended besides.
pub fn set_overrun(info: &mut Siginfo, overrun: i32) {
    info[OVERRUN..OVERRUN + 4].copy_from_slice(&overrun.to_le_bytes());
}

/// What a signal tells that the kernel sends for its own reasons.
#[must_use]
pub fn by_the_kernel(signal: i32) -> Siginfo {
    let mut info = [0; 128];
    info[SIGNAL..SIGNAL + 4].copy_from_slice(&signal.to_le_bytes());
    info[CODE..CODE + 4].copy_from_slice(&SI_KERNEL.to_le_bytes());
    info
}

/// Real-time signals are queued, each one; of the others the kernel keeps one of a number.
#[must_use]
pub fn is_queued(signal: i32) -> bool {
    signal >= 32
}

/// Lets a signal wait behind those of its number that wait already, or drops it, as the kernel does with one that
/// cannot be delivered yet: a timer has one at most, which counts the rest as overrun; of any other that is not queued,
/// the first is kept.
pub fn wait_behind(waiting: &mut VecDeque<Siginfo>, info: Siginfo) {
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
        let mut info = by_the_kernel(signal);
        info[CODE..CODE + 4].copy_from_slice(&SI_TIMER.to_le_bytes());
        info[TIMER..TIMER + 4].copy_from_slice(&timer.to_le_bytes());
        set_overrun(&mut info, overrun);
        info
    }

    #[test]
    fn one_of_a_number_waits_and_each_that_is_queued() {
        let mut waiting = VecDeque::new();
        for _ in 0..3 {
            wait_behind(&mut waiting, by_the_kernel(libc::SIGALRM));
        }
        assert_eq!(waiting.len(), 1);
        let mut queued = VecDeque::new();
        for _ in 0..3 {
            wait_behind(&mut queued, by_the_kernel(40));
        }
        assert_eq!(queued.len(), 3);
    }

    #[test]
    fn a_timer_has_one_that_counts() {
        for signal in [libc::SIGALRM, 40] {
            let mut waiting = VecDeque::new();
            wait_behind(&mut waiting, by_the_kernel(signal));
            for (timer, overrun) in [(7, 0), (8, 2), (7, 4), (7, 0)] {
                wait_behind(&mut waiting, of_a_timer(signal, timer, overrun));
            }
            let told: Vec<_> = waiting.iter().map(|info| (timer_of(info), word(info, OVERRUN))).collect();
            assert_eq!(told, [(None, 0), (Some(7), 6), (Some(8), 2)]);
        }
    }
}
