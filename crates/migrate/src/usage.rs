//! Adds CPU time used on other nodes to the kernel's answers, in the structures that programs read.

use crate::cpu::CpuTime;

/// A clock tick, in nanoseconds: 100 per second on all x86-64 kernels.
const TICK: u64 = 10_000_000;

/// Adds to two clock_t fields of a struct tms, user and system, at offset `at`.
pub fn add_tms(tms: &mut [u8], at: usize, used: CpuTime) {
    add_word(tms, at, used.user / TICK);
    add_word(tms, at + 8, used.system / TICK);
}

/// Adds to the user and system times of a struct rusage.
pub fn add_rusage(rusage: &mut [u8], used: CpuTime) {
    add_time(rusage, 0, 1_000_000, used.user / 1000);
    add_time(rusage, 16, 1_000_000, used.system / 1000);
}

/// Adds nanoseconds to a struct timespec.
pub fn add_timespec(timespec: &mut [u8], more: u64) {
    add_time(timespec, 0, 1_000_000_000, more);
}

fn word(bytes: &mut [u8], at: usize) -> Option<&mut [u8; 8]> {
    bytes.get_mut(at..at + 8)?.try_into().ok()
}

fn add_word(bytes: &mut [u8], at: usize, more: u64) {
    if let Some(word) = word(bytes, at) {
        *word = u64::from_le_bytes(*word).wrapping_add(more).to_le_bytes();
    }
}

/// Adds to a pair of words: seconds, and fractions of which a second has `parts`.
fn add_time(bytes: &mut [u8], at: usize, parts: u64, more: u64) {
    let Some(part) = word(bytes, at + 8) else { return };
    let sum = u64::from_le_bytes(*part).saturating_add(more % parts);
    *part = (sum % parts).to_le_bytes();
    add_word(bytes, at, more / parts + sum / parts);
}
