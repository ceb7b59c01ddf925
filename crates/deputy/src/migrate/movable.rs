//! Whether a process can leave home.

use crate::process::Process;
use tern_control::read_process;
use tern_control::shim::RightsLimit;
use tern_image::{Rights, Unmovable, modes};
use tern_tracee::{Error, Memory, Result};

/// Checks whether a process can leave home, with the rights that it has there. Every guest is made from
/// a process that has passed this check when all its threads were stopped, or by the fork of one.
///
/// It is [`tern_image::process::check`] with a time limit: the program's file is read, and a relative
/// is examined that may be executing a program. Both may wait for a file server for any time.
///
/// # Errors
/// `Err` if the process is gone; `Ok(Err)` with the reason.
pub(crate) fn check_movable(
    pid: i32,
    tracer: i32,
    limit: RightsLimit,
) -> Result<std::result::Result<(), Unmovable>> {
    let checked = read_process(pid, move || Some(tern_image::process::check(pid, tracer)));
    let checked = checked.unwrap_or(Ok(Err(Unmovable::Unanswered)))?;
    Ok(checked.and_then(|rights| check_rights(rights, limit)))
}

/// Checks whether a process may be moved with these rights.
pub(crate) fn check_rights(rights: Rights, limit: RightsLimit) -> std::result::Result<(), Unmovable> {
    match rights {
        Rights::Root if limit < RightsLimit::Root => {
            Err(Unmovable::Rights("is root's, and only root may move it"))
        }
        Rights::MoreThanUser if limit < RightsLimit::Any => {
            Err(Unmovable::Rights("has more rights than its user, and only root may move it"))
        }
        Rights::User | Rights::Root | Rights::MoreThanUser => Ok(()),
    }
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
