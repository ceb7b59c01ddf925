//! The receiving half: writes received pages into a stopped process.

use tern_image::apply::InjectedSpace;
use tern_tracee::pagemap::Run;
use tern_tracee::{Memory, PAGE, Result, TASK_END};

/// MADV_DONTNEED that also works on locked memory (Linux 5.18).
pub const MADV_DONTNEED_LOCKED: u64 = 24;

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
    let mut rest = bytes;
    for &(start, len) in runs {
        let (now, later) = rest.split_at(len as usize);
        memory
            .write_forced(start, now)
            .inspect_err(|_e| tracing::warn!("pages at {start:#x}, {len:#x} bytes, cannot be written"))?;
        rest = later;
    }
    Ok(())
}

/// Discards pages, so that they read as zeroes or as their file's content.
///
/// # Errors
/// If the process is gone, or an address is not mapped.
pub fn discard_pages(space: &mut dyn InjectedSpace, pid: i32, runs: &[Run]) -> Result<()> {
    check(pid, runs)?;
    for &(start, len) in runs {
        // Try the variant for locked memory first, which kernels before 5.18 do not have.
        let mut advise = |what| space.call("discard pages", libc::SYS_madvise, [start, len, what, 0, 0, 0]);
        if advise(MADV_DONTNEED_LOCKED).is_err() {
            advise(libc::MADV_DONTNEED as u64)?;
        }
    }
    Ok(())
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
