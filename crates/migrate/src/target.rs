//! The receiving half: what arrives of a process is put into one that stands still.

use tern_image::apply::Space;
use tern_tracee::pagemap::Run;
use tern_tracee::{Memory, PAGE, Result, TASK_END};

/// MADV_DONTNEED for locked memory too (Linux 5.18).
pub const MADV_DONTNEED_LOCKED: u64 = 24;

/// Writes the content of pages, whatever their protection.
///
/// # Errors
/// If the bytes do not fit the runs, or nothing is mapped there.
pub fn write_pages(memory: &Memory, runs: &[Run], bytes: &[u8]) -> Result<()> {
    check(memory.pid(), runs)?;
    let total = runs.iter().try_fold(0u64, |sum, run| sum.checked_add(run.1));
    if total != Some(bytes.len() as u64) {
        return Err(astray(memory.pid(), "pages without their content"));
    }
    let mut rest = bytes;
    for &(start, len) in runs {
        let (now, later) = rest.split_at(len as usize);
        memory
            .write_forced(start, now)
            .inspect_err(|_e| tracing::warn!("pages at {start:#x}, {len:#x} bytes, do not fit"))?;
        rest = later;
    }
    Ok(())
}

/// Lets pages fall back to zero, or to their file's content.
///
/// # Errors
/// If the process is gone, or nothing is mapped there.
pub fn forget(space: &mut dyn Space, pid: i32, runs: &[Run]) -> Result<()> {
    check(pid, runs)?;
    for &(start, len) in runs {
        // Locked memory as well, of which kernels before 5.18 cannot let go.
        let mut advise = |what| space.call("forget pages", libc::SYS_madvise, [start, len, what, 0, 0, 0]);
        if advise(MADV_DONTNEED_LOCKED).is_err() {
            advise(libc::MADV_DONTNEED as u64)?;
        }
    }
    Ok(())
}

fn check(pid: i32, runs: &[Run]) -> Result<()> {
    let sound = |&(start, len): &Run| {
        start % PAGE == 0
            && len % PAGE == 0
            && len > 0
            && start.checked_add(len).is_some_and(|end| end <= TASK_END)
    };
    if runs.iter().all(sound) { Ok(()) } else { Err(astray(pid, "misplaced pages")) }
}

fn astray(pid: i32, what: &str) -> tern_tracee::Error {
    tern_tracee::Error::Astray { what: format!("its sender sent {what}"), pid }
}
