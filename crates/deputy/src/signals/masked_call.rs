//! Signals that end a call with a signal mask of its own: sigsuspend, ppoll, pselect, epoll_pwait.
//!
//! Natively the handler of the first such signal runs under the call's mask and blocks its own number
//! and its `sa_mask`. Further signals of these numbers stay pending, since the program's own mask is in
//! force when the handler has returned. The handler of a deputy's program runs at the guest. So the
//! deputy blocks the same signals until the call has ended, and then sets the program's own mask.

use crate::process::thread::Thread;
use tern_image::process::Action;
use tern_tracee::Result;
use tern_tracee::registers::{Registers, restart};
use tern_tracee::stop::Stopped;

impl Thread {
    /// Has a deputy that is stopped for this signal, which is forwarded next, block what its handler
    /// blocks, if the signal ends a call that has a mask of its own. `registers` are those at the
    /// stop.
    ///
    /// # Errors
    /// If it is gone.
    pub(super) fn block_as_handler(
        &mut self,
        stopped: &Stopped,
        registers: &Registers,
        (signal, action): (i32, &Action),
    ) -> Result<()> {
        let Some(current) = &mut self.current else { return Ok(()) };
        let Some(call_mask) = current.request.call.mask() else { return Ok(()) };
        // The kernel drops the call's mask at once if the call has another result than these.
        let result = registers.rax.cast_signed();
        let ends = registers.call().is_some() && [restart::NOHAND, -i64::from(libc::EINTR)].contains(&result);
        if !current.is_under_handler && !ends {
            return Ok(());
        }
        // During such a call the kernel reports the mask that it restores afterwards. It drops that
        // mask when another one is set.
        let reported = stopped.sigmask()?;
        let before = if current.is_under_handler { reported } else { call_mask };
        if !current.is_under_handler {
            current.is_under_handler = true;
            self.pending_mask = self.pending_mask.or(Some(reported & !self.held.set()));
        }
        let nodefer = action[1] & libc::SA_NODEFER as u32 as u64 != 0;
        let own = if nodefer { 0 } else { 1 << (signal - 1) };
        stopped.set_sigmask(before | action[3] | own)
    }
}
