//! Waits on futexes with a relative time limit ([`tern_image::futex_wait`]).
//!
//! The filter traps these calls, so that the shim knows when each ends, and lets them through. This
//! node's kernel continues them after an interruption, by restart_syscall. The filter traps that call
//! too, since it also continues calls at home.

use crate::process::shared::Process;
use crate::process::thread::Thread;
use std::time::Instant;
use tern_image::futex_wait::{is_interrupted, is_timed_wait, time_limit, undo_rewind};
use tern_tracee::Result;
use tern_tracee::listener::Notification;
use tern_tracee::registers::restart;
use tern_tracee::stop::Stopped;

const FUTEX: u64 = libc::SYS_futex.cast_unsigned();
const RESTART_SYSCALL: u64 = libc::SYS_restart_syscall.cast_unsigned();

impl Thread {
    /// The thread has made a call that was trapped. Any but restart_syscall ends its last wait.
    pub(crate) fn note_call(&mut self, nr: u32) {
        self.futex_wait_end.take_if(|_| u64::from(nr) != RESTART_SYSCALL);
    }

    /// Lets a call through that begins or continues a wait; false for any other call.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn let_futex_wait(&mut self, trap: &Notification, process: &Process) -> Result<bool> {
        if is_timed_wait(trap.nr, &trap.args) {
            // Without an end the kernel refuses the call.
            let limit = time_limit(trap.args[3], &process.memory);
            self.futex_wait_end = limit.and_then(|limit| Instant::now().checked_add(limit));
            self.sync.restart_code = None;
        } else if u64::from(trap.nr) != RESTART_SYSCALL || self.futex_wait_end.is_none() {
            return Ok(false);
        }
        self.let_through(trap.id)?;
        Ok(true)
    }

    /// The thread has stopped. If it is in a wait, its registers become those of the call that the program
    /// made, also if this kernel has continued the call or is about to. So a handler makes the wait fail
    /// as at home, and the next node recognises it. A wait whose end is not known, or that has an absolute
    /// time, begins anew.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn settle_futex_wait(&mut self, stopped: &Stopped) -> Result<()> {
        let before = stopped.registers()?;
        let (mut registers, has_end) = (before, self.futex_wait_end.is_some());
        undo_rewind(&mut registers, has_end);
        if registers.orig_rax == RESTART_SYSCALL && registers.restart_code().is_some() && has_end {
            (registers.orig_rax, registers.rax) = (FUTEX, restart::BLOCK.cast_unsigned());
        }
        let is_wait = registers.orig_rax == FUTEX && registers.restart_code() == Some(restart::BLOCK);
        if is_wait && !(has_end && is_interrupted(&registers)) {
            registers.rax = restart::NOHAND.cast_unsigned();
        }
        if registers != before { stopped.set_registers(&registers) } else { Ok(()) }
    }
}
