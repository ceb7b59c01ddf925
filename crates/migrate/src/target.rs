//! The receiving half: writes received pages into a stopped process.

use tern_image::Layout;
use tern_image::apply::{InjectedSpace, subtract};
use tern_tracee::batch::InjectedCall;
use tern_tracee::pagemap::{Run, push_run};
use tern_tracee::{Error, Memory, PAGE, Result, TASK_END};

/// MADV_DONTNEED that also works on locked memory (Linux 5.18).
const MADV_DONTNEED_LOCKED: u64 = 24;

/// Writes the content of pages, whatever their protection.
///
/// # Errors
/// If the bytes do not match the runs, or an address is not mapped.
pub fn write_pages(memory: &Memory, runs: &[Run], bytes: &[u8]) -> Result<()> {
    check(memory.pid(), runs)?;
    let total = runs.iter().try_fold(0u64, |sum, run| sum.checked_add(run.1));
    if total != Some(bytes.len() as u64) {
        return Err(inconsistent(memory.pid(), "pages whose content has another length"));
    }
    let from = runs.first().map_or(0, |run| run.0);
    memory
        .write_runs_forced(runs, bytes)
        .inspect_err(|_e| tracing::warn!("{} runs of pages from {from:#x} cannot be written", runs.len()))
}

/// Discards pages, so that they read as zeroes or as their file's content.
///
/// # Errors
/// If the process is gone, or an address is not mapped.
pub fn discard_pages(space: &mut dyn InjectedSpace, pid: i32, runs: &[Run]) -> Result<()> {
    check(pid, runs)?;
    try_discard(space, runs)?.first().map_or(Ok(()), |(_, result)| {
        let source = std::io::Error::from_raw_os_error((-result) as i32);
        Err(Error::Refused { operation: "discard pages", pid, source })
    })
}

/// Frees all private pages of a process except those in the range `keep`. Sealed memory is not
/// freed, nor is locked memory before Linux 5.18; that only costs memory.
///
/// # Errors
/// If the process is gone.
pub fn free_pages(space: &mut dyn InjectedSpace, layout: &Layout, keep: (u64, u64)) -> Result<()> {
    let regions = layout.regions.iter().filter(|region| region.is_private());
    let private: Vec<Run> = regions
        .flat_map(|region| subtract(region.start, region.end, [keep].into_iter()))
        .map(|(start, end)| (start, end - start))
        .collect();
    let mut joined = Vec::new();
    private.iter().for_each(|run| push_run(&mut joined, *run));
    // In a run that fails the kernel may have freed nothing, because of one of its regions.
    let failed = try_discard(space, &joined)?;
    let is_in = |run: &&Run| failed.iter().any(|((start, len), _)| (*start..start + len).contains(&run.0));
    let single: Vec<Run> = private.iter().filter(is_in).copied().collect();
    try_discard(space, &single).map(drop)
}

/// Discards pages, and returns the runs where that failed, with the errors.
fn try_discard(space: &mut dyn InjectedSpace, runs: &[Run]) -> Result<Vec<(Run, i64)>> {
    let mut failed: Vec<(Run, i64)> = runs.iter().map(|run| (*run, 0)).collect();
    // Try the variant for locked memory first, which kernels before 5.18 do not have.
    for advice in [MADV_DONTNEED_LOCKED, libc::MADV_DONTNEED as u64] {
        let discard = |((start, len), _): &(Run, i64)| (libc::SYS_madvise, [*start, *len, advice, 0, 0, 0]);
        let calls: Vec<InjectedCall> = failed.iter().map(discard).collect();
        if calls.is_empty() {
            break;
        }
        let results = space.call_all(&calls)?;
        failed = failed.iter().zip(results).map(|((run, _), result)| (*run, result)).collect();
        failed.retain(|(_, result)| *result < 0);
    }
    Ok(failed)
}

fn check(pid: i32, runs: &[Run]) -> Result<()> {
    let is_valid = |&(start, len): &Run| {
        start % PAGE == 0
            && len % PAGE == 0
            && len > 0
            && start.checked_add(len).is_some_and(|end| end <= TASK_END)
    };
    if runs.iter().all(is_valid) { Ok(()) } else { Err(inconsistent(pid, "misplaced pages")) }
}

fn inconsistent(pid: i32, what: &str) -> tern_tracee::Error {
    tern_tracee::Error::Inconsistent { what: format!("its sender sent {what}"), pid }
}
