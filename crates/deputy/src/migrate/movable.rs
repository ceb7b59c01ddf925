//! Whether a process can leave home.

use crate::process::Process;
use tern_control::read_process;
use tern_image::{Unmovable, modes};
use tern_tracee::{Error, Memory, Result};

/// As [`tern_image::process::check`], with a limit: the program's file is read, and a relative is
/// examined that may be executing a program. Both may wait for a file server for any time.
///
/// # Errors
/// `Err` if the process is gone; `Ok(Err)` with the reason.
pub(crate) fn check_movable(pid: i32, tracer: i32) -> Result<std::result::Result<(), Unmovable>> {
    let checked = read_process(pid, move || Some(tern_image::process::check(pid, tracer)));
    checked.unwrap_or(Ok(Err(Unmovable::Unanswered)))
}

impl Process {
    /// Checks whether a stopped process may have Tern's code.
    ///
    /// # Errors
    /// `Err` if it is gone; `Ok(Err)` if not.
    pub(crate) fn check_code(&mut self) -> Result<std::result::Result<(), Unmovable>> {
        self.inject(|_, injection| modes::check_code(injection))
    }

    /// Checks that a prepared process has no setting that would not be in force on another node.
    ///
    /// # Errors
    /// `Err` if it is gone; `Ok(Err)` with the setting.
    pub(crate) fn check_modes(&mut self) -> Result<std::result::Result<(), Unmovable>> {
        let gone = Error::Gone { pid: self.pid.0 };
        let (reserve, memory) = (self.reserve.ok_or(gone)?, Memory::open(self.memory.pid())?);
        let mut injections = self.injections()?;
        let area = self.batch_area(reserve);
        let home = self.count_not_draining(&injections);
        let found = modes::check(&mut injections[..home], &memory, area);
        self.finish_injections(injections).and(found)
    }
}
