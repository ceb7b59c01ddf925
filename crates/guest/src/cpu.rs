//! CPU time: what home's kernel says of the deputy, and on top of it what the guest has used away.
//!
//! Home answers `times`, `getrusage` and the CPU clocks for the deputy: that is the time before the process left,
//! and what calls cost at home. What this node's kernel counts is added here, where it is known to the nanosecond,
//! to the sum of the lives before. None of the three ever goes back while the process is away, so their sum does not.

use tern_migrate::{CpuTime, Demand};
use tern_syscall::Outcome;
use tern_tracee::cpu::{Counted, counted, waited};
use tern_tracee::{Result, procfs};

/// Counts one guest's CPU time.
#[derive(Debug)]
pub struct Meter {
    host: i32,
    /// Used away by the lives before this one.
    before: CpuTime,
    /// What had been counted when this life began: our work, not the program's.
    begun: Counted,
    /// What was said last of this life.
    said: CpuTime,
}

impl Meter {
    /// Begins to count for a guest, which the lives before this one have used so much.
    ///
    /// # Errors
    /// If it is gone.
    pub fn begin(host: i32, before: CpuTime) -> Result<Self> {
        Ok(Self { host, before, begun: counted(host)?, said: CpuTime::default() })
    }

    /// What the process has used away, up to now. If the guest is gone, up to when it was asked last.
    pub fn used(&mut self) -> CpuTime {
        if let Ok(now) = counted(self.host) {
            let less = |now: u64, begun: u64| now.saturating_sub(begun);
            let life = Counted {
                total: less(now.total, self.begun.total),
                user: less(now.user, self.begun.user),
                system: less(now.system, self.begun.system),
            };
            self.said = split(life, self.said);
        }
        self.before.and(self.said)
    }

    /// What else the guest asks of this node; nothing if it is gone.
    pub fn demand(&self) -> Demand {
        let memory = procfs::stat(self.host).map_or(0, |stat| stat.resident());
        Demand { waited: waited(self.host).unwrap_or_default(), memory }
    }
}

/// Divides the exact time as the samples are divided, as the kernel does it, and so that neither part goes back
/// behind what was said of it before.
fn split(counted: Counted, said: CpuTime) -> CpuTime {
    let total = counted.total.max(said.total());
    let samples = u128::from(counted.user) + u128::from(counted.system);
    let share = (u128::from(total) * u128::from(counted.system)).checked_div(samples).unwrap_or(0);
    let most = total - said.user;
    let system = u64::try_from(share).unwrap_or(most).clamp(said.system, most);
    CpuTime { user: total - system, system }
}

/// Adds what a process has used away to what home's kernel has answered for it: `times`, `getrusage` or
/// `clock_gettime` with these arguments. What they say of others stays as it is.
pub fn add(nr: u32, args: &[u64; 6], own_pid: i32, used: CpuTime, outcome: &mut Outcome) {
    const TICK: u64 = 10_000_000;
    let Some(out) = outcome.outs.first_mut() else { return };
    match i64::from(nr) {
        libc::SYS_times => {
            // Clock ticks: user, system, and both of the children.
            for (at, part) in [(0, used.user), (8, used.system)] {
                add_word(out, at, part / TICK);
            }
        }
        libc::SYS_getrusage if matches!(args[0] as i32, libc::RUSAGE_SELF | libc::RUSAGE_THREAD) => {
            add_time(out, 0, 1_000_000, used.user / 1000);
            add_time(out, 16, 1_000_000, used.system / 1000);
        }
        libc::SYS_clock_gettime => {
            if let Some(part) = of_clock(args[0] as i32, own_pid, used) {
                add_time(out, 0, 1_000_000_000, part);
            }
        }
        _ => {}
    }
}

/// What of it a CPU clock counts; nothing if the clock is another process's.
fn of_clock(clock: i32, own_pid: i32, used: CpuTime) -> Option<u64> {
    if matches!(clock, libc::CLOCK_PROCESS_CPUTIME_ID | libc::CLOCK_THREAD_CPUTIME_ID) {
        return Some(used.total());
    }
    // The number of a clock of a given process: its pid, inverted, and three bits that say what is counted.
    let pid = !(clock >> 3);
    match clock & 3 {
        _ if clock >= 0 || (pid != 0 && pid != own_pid) => None,
        1 => Some(used.user),
        0 | 2 => Some(used.total()),
        _ => None,
    }
}

fn word(bytes: &mut [u8], at: usize) -> Option<&mut [u8; 8]> {
    bytes.get_mut(at..at + 8)?.try_into().ok()
}

fn add_word(bytes: &mut [u8], at: usize, more: u64) {
    if let Some(word) = word(bytes, at) {
        *word = u64::from_le_bytes(*word).wrapping_add(more).to_le_bytes();
    }
}

/// Adds to seconds and a part of a second, which both take a word.
fn add_time(bytes: &mut [u8], at: usize, parts: u64, more: u64) {
    let Some(part) = word(bytes, at + 8) else { return };
    let sum = u64::from_le_bytes(*part).saturating_add(more % parts);
    *part = (sum % parts).to_le_bytes();
    add_word(bytes, at, more / parts + sum / parts);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_syscall::ByteBuf;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn neither_part_ever_goes_back() {
        let said = CpuTime { user: 90, system: 10 };
        // The samples now say that more of it was spent in the kernel.
        let now = split(Counted { total: 104, user: 1, system: 3 }, said);
        assert_eq!(now, CpuTime { user: 90, system: 14 });
        let now = split(Counted { total: 200, user: 1, system: 0 }, now);
        assert_eq!(now, CpuTime { user: 186, system: 14 });
        assert_eq!(split(Counted { total: 5, user: 9, system: 9 }, now), now, "what cannot be");
        assert_eq!(split(Counted { total: 7, ..Counted::default() }, CpuTime::default()).user, 7);
        let huge = Counted { total: u64::MAX, user: u64::MAX, system: u64::MAX };
        assert_eq!(split(huge, said).total(), u64::MAX);
    }

    fn answered(nr: i64, first: u64, words: &[u64]) -> Vec<u64> {
        let used = CpuTime { user: 2 * SECOND + 700_000_000, system: 300_000_000 };
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let mut outcome = Outcome { ret: 0, outs: vec![ByteBuf::from(bytes)] };
        add(nr as u32, &[first, 0, 0, 0, 0, 0], 4711, used, &mut outcome);
        outcome.outs[0].chunks(8).map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect()
    }

    #[test]
    fn home_s_answers_grow_by_what_was_used_away() {
        assert_eq!(answered(libc::SYS_times, 1, &[10, 20, 30, 40]), [280, 50, 30, 40]);
        let usage = [1, 400_000, 0, 900_000, 77];
        assert_eq!(answered(libc::SYS_getrusage, 0, &usage), [4, 100_000, 1, 200_000, 77]);
        let children = libc::RUSAGE_CHILDREN as u64;
        assert_eq!(answered(libc::SYS_getrusage, children, &usage), usage);
        assert_eq!(answered(libc::SYS_clock_gettime, 2, &[1, 999_999_999]), [4, 999_999_999]);
        assert_eq!(answered(libc::SYS_clock_gettime, 3, &[0, 1]), [3, 1]);
        assert_eq!(answered(libc::SYS_times, 1, &[10]), [280], "a home that writes less than it should");
    }

    #[test]
    fn clocks_of_others_are_left_alone() {
        let used = CpuTime { user: 5, system: 2 };
        let clock = |pid: i32, kind: i32| (!pid << 3) | kind;
        assert_eq!(of_clock(clock(4711, 2), 4711, used), Some(7));
        assert_eq!(of_clock(clock(0, 6), 4711, used), Some(7));
        assert_eq!(of_clock(clock(4711, 1), 4711, used), Some(5));
        assert_eq!(of_clock(clock(4712, 2), 4711, used), None);
        assert_eq!(of_clock(clock(4711, 3), 4711, used), None, "a device");
        assert_eq!(of_clock(libc::CLOCK_MONOTONIC, 4711, used), None);
    }
}
