//! Guard pages (madvise(2), MADV_GUARD_INSTALL, Linux 6.13): memory without access that is no mapping of
//! its own. glibc 2.42 puts one below the stack of each thread.

use crate::apply::InjectedSpace;
use crate::layout::Layout;
use tern_tracee::batch::InjectedCall;
use tern_tracee::pagemap::{Pagemap, Run};
use tern_tracee::{Error, PAGE, Result};

const MADV_GUARD_INSTALL: u64 = 102;
const MADV_GUARD_REMOVE: u64 = 103;
/// Maximum number of ranges of guard pages.
const MAX_GUARDS: usize = 70_000;

/// The guard pages of a stopped process with this layout, in order. None before Linux 6.16.
///
/// # Errors
/// If it is gone, or has too many.
pub(crate) fn of(pid: i32, layout: &Layout) -> Result<Vec<Run>> {
    let mut guards = Pagemap::open(pid)?.guards()?;
    guards.retain(|(start, len)| layout.is_mapped(*start, start + len));
    if guards.len() > MAX_GUARDS {
        let what = format!("it has {} ranges of guard pages, more than {MAX_GUARDS}", guards.len());
        return Err(Error::Inconsistent { what, pid });
    }
    Ok(guards)
}

/// Whether received guard pages can be those of a process with this layout.
pub(crate) fn are_valid(guards: &[Run], layout: &Layout) -> bool {
    let is_valid = |&(start, len): &Run| {
        start % PAGE == 0 && len % PAGE == 0 && layout.is_mapped(start, start.saturating_add(len))
    };
    guards.len() <= MAX_GUARDS && guards.iter().all(is_valid)
}

/// Makes guard pages anew, after the content of all other pages has been written. Memory with guard pages
/// is unlocked. Where home cannot make them (before Linux 6.13), the program gets memory without access,
/// which madvise does not remove.
///
/// # Errors
/// If the process is gone, or another node cannot make them.
pub(crate) fn install(
    guards: &[Run],
    space: &mut dyn InjectedSpace,
    pid: i32,
    is_at_home: bool,
) -> Result<()> {
    // The kernel makes none in locked memory.
    let unlock = |&(start, len): &Run| (libc::SYS_munlock, [start, len, 0, 0, 0, 0]);
    let protect = |start, len| (libc::SYS_mprotect, [start, len, libc::PROT_NONE as u64, 0, 0, 0]);
    call_all(guards.iter().map(unlock), space)?;
    for ((start, len), result) in
        guards.iter().zip(call_all(guards.iter().map(advise(MADV_GUARD_INSTALL)), space)?)
    {
        if result == 0 {
            continue;
        }
        let source = std::io::Error::from_raw_os_error((-result) as i32);
        if !is_at_home {
            return Err(Error::Refused { operation: "make a guard page (Linux 6.13)", pid, source });
        }
        let protected = call_all(std::iter::once(protect(*start, *len)), space)?;
        tracing::warn!(pid, %source, ?protected, "a guard page at {start:#x} cannot be made again");
    }
    Ok(())
}

/// Removes all guard pages of a deputy: nothing could be written there when its process comes home.
///
/// # Errors
/// If the process is gone.
pub fn remove_all(pid: i32, space: &mut dyn InjectedSpace) -> Result<()> {
    let guards = Pagemap::open(pid)?.guards()?;
    let results = call_all(guards.iter().map(advise(MADV_GUARD_REMOVE)), space)?;
    if let Some(failed) = results.iter().find(|result| **result < 0) {
        tracing::warn!(pid, errno = -failed, "guard pages cannot be removed");
    }
    Ok(())
}

fn advise(advice: u64) -> impl Fn(&Run) -> InjectedCall {
    move |&(start, len)| (libc::SYS_madvise, [start, len, advice, 0, 0, 0])
}

fn call_all(calls: impl Iterator<Item = InjectedCall>, space: &mut dyn InjectedSpace) -> Result<Vec<i64>> {
    let calls: Vec<InjectedCall> = calls.collect();
    if calls.is_empty() { Ok(Vec::new()) } else { space.call_all(&calls) }
}
