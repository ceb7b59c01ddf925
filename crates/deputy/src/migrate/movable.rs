//! Whether a process can leave home.

use tern_control::read_process;
use tern_image::Unmovable;
use tern_tracee::Result;

/// As [`tern_image::process::check`], with a limit: the program's file is read, and a relative is
/// examined that may be executing a program. Both may wait for a file server for any time.
///
/// # Errors
/// `Err` if the process is gone; `Ok(Err)` with the reason.
pub(crate) fn check_movable(pid: i32, tracer: i32) -> Result<std::result::Result<(), Unmovable>> {
    let checked = read_process(pid, move || Some(tern_image::process::check(pid, tracer)));
    checked.unwrap_or(Ok(Err(Unmovable::Unanswered)))
}
