//! Settings of the processor and of the kernel that a program has made for itself, and that are not
//! in force on another node. A process that has one is not moved.

use crate::unmovable::Unmovable;
use tern_tracee::batch::{BatchArea, InjectBatch, run_batches};
use tern_tracee::inject::Injection;
use tern_tracee::{Memory, Result};

const ARCH_GET_CPUID: u64 = 0x1011;
const ARCH_GET_XCOMP_PERM: u64 = 0x1022;
const ARCH_GET_UNTAG_MASK: u64 = 0x4001;
const PR_GET_TSC: u64 = 25;
const PR_GET_SPECULATION_CTRL: u64 = 52;
const PR_GET_MDWE: u64 = 66;

/// PR_TSC_SIGSEGV
const TSC_DISABLED: u64 = 2;
/// XFEATURE_MASK_XTILE_DATA
const TILES: u64 = 1 << 18;
/// PR_SPEC_PRCTL
const SPECULATION_IS_SET: i64 = 1;
/// PR_SPEC_DISABLE, PR_SPEC_FORCE_DISABLE, PR_SPEC_DISABLE_NOEXEC
const SPECULATION_IS_OFF: i64 = 4 | 8 | 16;
/// PR_SPEC_ENABLE. For PR_SPEC_L1D_FLUSH it means that the cache is flushed, and the other value is the
/// default.
const FLUSH_IS_ON: i64 = 2;

/// Asks personality(2) for the present value.
const CURRENT_PERSONALITY: u64 = 0xffff_ffff;

/// PR_SPEC_STORE_BYPASS, PR_SPEC_INDIRECT_BRANCH and PR_SPEC_L1D_FLUSH.
const SPECULATIONS: [u64; 3] = [0, 1, 2];

/// Checks whether a process may have code that Tern writes. One of its threads is under injection.
///
/// # Errors
/// `Err` if it is gone; `Ok(Err)` if not.
pub fn check_code(injection: &mut Injection) -> Result<std::result::Result<(), Unmovable>> {
    let flags = injection.call(libc::SYS_prctl, [PR_GET_MDWE, 0, 0, 0, 0, 0])?;
    let what = "may not make memory executable (PR_SET_MDWE)";
    Ok(if flags > 0 { Err(Unmovable::CpuMode(what.into())) } else { Ok(()) })
}

/// Checks threads under injection, which are all threads of a process; all are stopped. `area` is
/// memory of the process for the calls.
///
/// # Errors
/// `Err` if their process is gone; `Ok(Err)` with the setting that is found.
pub fn check(
    injections: &mut [Injection],
    memory: &Memory,
    area: BatchArea,
) -> Result<std::result::Result<(), Unmovable>> {
    let speculation = |kind| (libc::SYS_prctl, [PR_GET_SPECULATION_CTRL, kind, 0, 0, 0, 0]);
    let [store_bypass, branches, cache] = SPECULATIONS.map(speculation);
    let each = run_batches(injections, memory, area, &|_, data| InjectBatch {
        calls: vec![
            (libc::SYS_prctl, [PR_GET_TSC, data, 0, 0, 0, 0]),
            (libc::SYS_arch_prctl, [ARCH_GET_CPUID, 0, 0, 0, 0, 0]),
            store_bypass,
            branches,
        ],
        ..InjectBatch::default()
    })?;
    // A batch has at most four calls.
    let more = run_batches(injections, memory, area, &|_, data| InjectBatch {
        calls: vec![
            (libc::SYS_arch_prctl, [ARCH_GET_XCOMP_PERM, data, 0, 0, 0, 0]),
            (libc::SYS_arch_prctl, [ARCH_GET_UNTAG_MASK, data + 8, 0, 0, 0, 0]),
            cache,
            (libc::SYS_personality, [CURRENT_PERSONALITY, 0, 0, 0, 0, 0]),
        ],
        // A kernel without these options leaves these values.
        data: [0, u64::MAX, 0, 0, 0, 0],
    })?;
    let found = each.iter().find_map(|done| found_first(&done.calls, &done.data));
    let found = found.or_else(|| more.iter().find_map(|done| found_second(&done.calls, &done.data)));
    let found = found.or_else(|| found_different(more.iter().map(|done| done.calls.as_slice())));
    Ok(found.map_or(Ok(()), |what| Err(Unmovable::CpuMode(what.into()))))
}

fn found_first(calls: &[i64], data: &[u64]) -> Option<&'static str> {
    let ([_, cpuid, store_bypass, branches], [tsc, ..]) = (calls, data) else { return None };
    match () {
        () if tsc & 0xffff_ffff == TSC_DISABLED => Some("may not read the time stamp counter"),
        () if *cpuid == 0 => Some("may not use CPUID"),
        () if restricts_speculation(*store_bypass) || restricts_speculation(*branches) => Some(SPECULATION),
        () => None,
    }
}

fn found_second(calls: &[i64], data: &[u64]) -> Option<&'static str> {
    let ([_, _, cache, _], [features, addresses, ..]) = (calls, data) else { return None };
    match () {
        () if features & TILES != 0 => Some("has asked for AMX tiles"),
        () if *addresses != u64::MAX => Some("has tagged addresses"),
        () if is_set(*cache) && cache & FLUSH_IS_ON != 0 => Some("has its cache flushed"),
        () => None,
    }
}

/// The kernel keeps a personality for each thread, and an image has one for all.
fn found_different<'a>(threads: impl Iterator<Item = &'a [i64]>) -> Option<&'static str> {
    let mut personalities = threads.filter_map(|calls| calls.last());
    let first = personalities.next()?;
    personalities.any(|other| other != first).then_some("has threads with different personalities")
}

const SPECULATION: &str = "restricts speculation";

fn restricts_speculation(state: i64) -> bool {
    is_set(state) && state & SPECULATION_IS_OFF != 0
}

fn is_set(state: i64) -> bool {
    state > 0 && state & SPECULATION_IS_SET != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_settings_move() {
        assert_eq!(found_first(&[0, 1, 3, 3], &[1, 0, 0]), None);
        assert_eq!(found_first(&[0, -22, -19, 0], &[1, 0, 0]), None, "an old kernel");
        assert_eq!(found_first(&[0, 1, 4, 4], &[1, 0, 0]), None, "the machine's setting");
        assert_eq!(found_second(&[-22, -22, -19, 0], &[0, u64::MAX, 0]), None);
        assert_eq!(found_second(&[0, 0, 5, 0], &[0x2ff, u64::MAX, 0]), None);
        assert_eq!(found_different([&[0, 0, 5, 8][..], &[0, 0, 3, 8]].into_iter()), None);
    }

    #[test]
    fn settings_of_the_program_do_not_move() {
        assert!(found_first(&[0, 1, 3, 3], &[2, 0, 0]).is_some());
        assert!(found_first(&[0, 0, 3, 3], &[1, 0, 0]).is_some());
        assert!(found_first(&[0, 1, 5, 3], &[1, 0, 0]).is_some());
        assert!(found_second(&[0, 0, 5, 0], &[0x602ff, u64::MAX, 0]).is_some());
        assert!(found_second(&[0, 0, 5, 0], &[0x2ff, !(63 << 57), 0]).is_some());
        assert!(found_second(&[0, 0, 3, 0], &[0x2ff, u64::MAX, 0]).is_some());
        assert!(found_different([&[0, 0, 5, 0][..], &[0, 0, 5, 8]].into_iter()).is_some());
    }
}
