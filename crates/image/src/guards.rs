//! Guard pages (madvise(2), MADV_GUARD_INSTALL, Linux 6.13): memory without access that is no mapping of
//! its own. glibc 2.42 puts one below the stack of each thread.

use crate::apply::InjectedSpace;
use crate::layout::Layout;
use tern_tracee::batch::InjectedCall;
use tern_tracee::pagemap::{Pagemap, Run};
use tern_tracee::{Error, PAGE, Result};

const MADV_GUARD_INSTALL: u64 = 102;
const MADV_GUARD_REMOVE: u64 = 103;
/// Maximum number of ranges of guard pages, as many as a process may have mappings.
const MAX_GUARDS: usize = 70_000;

/// The guard pages of a stopped process, in order. None before Linux 6.15.
pub(crate) fn of(pid: i32) -> Result<Vec<Run>> {
    Pagemap::open(pid)?.guards()
}

/// Whether received guard pages can be those of a process with this layout.
pub(crate) fn are_valid(guards: &[Run], layout: &Layout) -> bool {
    let is_valid = |&(start, len): &Run| {
        start % PAGE == 0 && len % PAGE == 0 && layout.is_mapped(start, start.saturating_add(len))
    };
    guards.len() <= MAX_GUARDS && guards.iter().all(is_valid)
}

/// Makes guard pages anew, after the content of all other pages has been written. If home's kernel has
/// none (before Linux 6.13), the program gets memory without access there, which madvise does not remove.
///
/// # Errors
/// If the process is gone, or another node's kernel has none.
pub(crate) fn install(
    guards: &[Run],
    space: &mut dyn InjectedSpace,
    pid: i32,
    is_at_home: bool,
) -> Result<()> {
    for ((start, len), result) in guards.iter().zip(advise(guards, MADV_GUARD_INSTALL, space)?) {
        match i32::try_from(-result).unwrap_or(0) {
            libc::EINVAL if is_at_home => {
                let args = [*start, *len, libc::PROT_NONE as u64, 0, 0, 0];
                space.call("protect a guard page", libc::SYS_mprotect, args)?;
            }
            errno if result < 0 => {
                let source = std::io::Error::from_raw_os_error(errno);
                return Err(Error::Refused { operation: "make a guard page (Linux 6.13)", pid, source });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Removes guard pages of a process that is away: nothing could be written there when it comes home.
///
/// # Errors
/// If the process is gone.
pub fn remove(guards: &[Run], space: &mut dyn InjectedSpace) -> Result<()> {
    advise(guards, MADV_GUARD_REMOVE, space).map(drop)
}

fn advise(runs: &[Run], advice: u64, space: &mut dyn InjectedSpace) -> Result<Vec<i64>> {
    if runs.is_empty() {
        return Ok(Vec::new());
    }
    let call = |&(start, len): &Run| (libc::SYS_madvise, [start, len, advice, 0, 0, 0]);
    space.call_all(&runs.iter().map(call).collect::<Vec<InjectedCall>>())
}
