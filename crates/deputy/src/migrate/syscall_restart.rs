//! Resolves the call that each thread of a returning process was in.
//!
//! ```text
//!  finished             its result is delivered: memory, rax
//!  never arrived here,
//!  or was not begun     the kernel makes it again, natively
//!  pending, and the
//!  kernel restarts it   likewise: the interrupted call has had no effect
//!  pending, and only this thread's kernel state knows the rest (sleeps, polls with a timeout),
//!  or the kernel would fail it with EINTR: the deputy finishes it (Draining), all else is home
//! ```

use crate::process::Process;
use crate::process::thread::Thread;
use crate::signals::verdict::fails_with_eintr;
use tern_image::ThreadImage;
use tern_migrate::Partial;
use tern_migrate::message::{CallRequest, ThreadSync};
use tern_syscall::{Outcome, gather, scatter};
use tern_tracee::registers::{Registers, restart};
use tern_tracee::siginfo::signal_of;
use tern_tracee::stop::Stopped;
use tern_tracee::{Error, Memory, Result};

/// A process's memory, as gather and scatter access it.
struct HomeMemory<'a>(&'a Memory);

impl tern_syscall::UserMemory for HomeMemory<'_> {
    fn read(&mut self, addr: u64, buf: &mut [u8]) -> std::result::Result<(), tern_syscall::Fault> {
        self.0.read(addr, buf).map_err(|_e| tern_syscall::Fault)
    }

    fn write(&mut self, addr: u64, data: &[u8]) -> std::result::Result<(), tern_syscall::Fault> {
        self.0.write(addr, data).map_err(|_e| tern_syscall::Fault)
    }

    fn writable(&mut self, addr: u64, len: u64) -> u64 {
        // As the guest has determined it, so that both have the same outputs.
        self.0.mapped_len(addr, len)
    }
}

#[allow(clippy::large_enum_variant, reason = "one at a time")]
pub(crate) enum CallResolution {
    /// The program continues with these registers.
    Registers(Stopped, Registers),
    /// The deputy continues with the call.
    Drain(Stopped, Registers),
    /// The deputy makes the call in these registers, for the rest of this transfer.
    Remainder(Stopped, Registers, Partial),
    /// The deputy was resumed and is about to finish its call: quiesce it again and retry.
    Retry,
}

impl Process {
    /// Determines what has become of the call that the guest was in.
    pub(crate) fn resolve_call(
        &mut self,
        stopped: Stopped,
        image: &ThreadImage,
        sync: &ThreadSync,
    ) -> Result<CallResolution> {
        let memory = Memory::open(self.memory.pid())?;
        let now = stopped.registers()?;
        let in_call = self.is_in_call(&now);
        let has_not_begun = self.is_before_call(image.tid, &now);
        let thread = self.thread(image.tid)?;
        let mut registers = image.registers;
        let rest = sync.partial.is_some() && !thread.has_seen(sync.call);
        if !sync.call_pending && !rest {
            return Ok(CallResolution::Registers(stopped, registers));
        }
        if registers.call().is_none() {
            // The guest's kernel had already rewound it for a restart: undo that.
            (registers.orig_rax, registers.rip) = (registers.rax, registers.rip + 2);
        }
        let resumes = sync.restart_code.filter(|code| restart::is(*code));
        registers.rax = resumes.unwrap_or(restart::NOINTR).cast_unsigned();
        if rest && let Some(partial) = sync.partial {
            // The rest of a transfer was not requested here yet: only the deputy can add up the
            // counts.
            return Ok(CallResolution::Remainder(stopped, registers, partial));
        }
        let signals_wait =
            !sync.pending_signals.is_empty() || thread.unacked.iter().any(|(count, _)| *count > sync.signals);
        let under_mask = signals_wait && carries_mask(&memory, &registers);
        // Whether all pending signals are blocked by a handler's mask, which the deputy does not
        // know. Natively they would not have interrupted the call.
        let new =
            thread.unacked.iter().filter(|(count, _)| *count > sync.signals).map(|(_, info)| signal_of(info));
        let carried = sync.pending_signals.iter().filter_map(|info| info.as_slice().try_into().ok());
        let mut waiting = new.chain(carried.map(|info| signal_of(&info)));
        let all_signals_blocked =
            signals_wait && waiting.all(|signal| image.sigmask >> ((signal - 1) & 63) & 1 == 1);
        if let Some(last) = thread.last_result.take_if(|last| last.number == sync.call) {
            if is_interruption(last.outcome.ret) && (under_mask || all_signals_blocked) {
                deliver_result(&memory, &mut registers.clone(), &last.outcome, None)?;
                return Ok(CallResolution::Registers(stopped, registers));
            }
            if let Some(partial) = deliver_piece(&memory, &mut registers, &last.outcome, sync.partial)? {
                return Ok(CallResolution::Remainder(stopped, registers, partial));
            }
            return Ok(CallResolution::Registers(stopped, registers));
        }
        let Some(current) = thread.current.as_ref().filter(|c| c.guest_number() == Some(sync.call)) else {
            return Ok(CallResolution::Registers(stopped, registers));
        };
        let code = now.rax.cast_signed();
        let nr = current.request.call.nr;
        // The call is not waited for: it may be a sleep that cannot be interrupted, and home is past
        // the point of no return.
        if has_not_begun && !current.compound.has_more() {
            // The deputy may be about to continue a transfer or a wait that the shim has interrupted
            // before. Then only the deputy knows what was done, and how much of the time is left.
            let has_begun_before = sync.partial.is_some() || current.partial.is_some();
            if has_begun_before || may_have_timeout(&current.request.call) {
                return Ok(CallResolution::Drain(stopped, registers));
            }
            // As if it had never arrived.
            thread.current = None;
            return Ok(CallResolution::Registers(stopped, registers));
        }
        if !in_call {
            // The blob is storing the result of the call, or has more to do than this call.
            stopped.resume(0)?;
            return Ok(CallResolution::Retry);
        }
        let cut_short = tern_migrate::partial::remainder(&mut now.clone(), current.partial).is_some();
        let interrupted = is_interruption(code);
        if under_mask && interrupted {
            thread.deliver_interrupted(&memory, registers, code)?;
            return Ok(CallResolution::Registers(stopped, registers));
        }
        let whole = current.partial.is_none() && sync.partial.is_none();
        if interrupted && whole && has_no_timeout(&current.request.call) {
            // The kernel can make the call anew, natively, without losing anything. The code is
            // ERESTARTNOHAND, since a handler that runs first must end the call with EINTR.
            thread.current = None;
            registers.rax = restart::NOHAND.cast_unsigned();
            return Ok(CallResolution::Registers(stopped, registers));
        }
        // The deputy must finish a transfer: only it knows what was done before.
        if cut_short
            || (interrupted && !whole)
            || code == restart::BLOCK
            || (code == restart::NOHAND && has_time_left(&current.request.call))
            || (code == -i64::from(libc::EINTR) && fails_with_eintr(nr))
        {
            return Ok(CallResolution::Drain(stopped, registers));
        }
        if restart::is(code) {
            thread.deliver_interrupted(&memory, registers, code)?;
            registers.rax = code.cast_unsigned();
            return Ok(CallResolution::Registers(stopped, registers));
        }
        // The call has just finished: let the blob store its result.
        stopped.resume(0)?;
        Ok(CallResolution::Retry)
    }

    /// The request for the rest of a transfer, to be made by the deputy.
    pub(crate) fn remainder_request(
        &self,
        registers: &Registers,
        number: u64,
        signals: u64,
    ) -> Result<CallRequest> {
        let nr = registers.call().unwrap_or_default() as u32;
        let call = gather(nr, &registers.arguments(), &mut HomeMemory(&self.memory));
        let inconsistent =
            |_e| Error::Inconsistent { what: "its node sent an invalid transfer".into(), pid: self.pid.0 };
        Ok(CallRequest {
            epoch: self.epoch,
            number,
            signals,
            restart_code: None,
            prelude: Vec::new(),
            max_prefetch: 0,
            call: call.map_err(inconsistent)?.call,
            procfs_view: None,
            to_publish: Vec::new(),
        })
    }
}

impl Thread {
    /// Whether this call has finished here, or is pending.
    fn has_seen(&self, call: u64) -> bool {
        self.last_result.as_ref().is_some_and(|l| l.number == call)
            || self.current.as_ref().is_some_and(|c| c.guest_number() == Some(call))
    }

    /// Ends the call that the deputy was interrupted in with this code. Its output so far, such as the
    /// time left of a ppoll, is delivered to the program's memory: the kernel makes the call again with
    /// that.
    fn deliver_interrupted(&mut self, memory: &Memory, mut registers: Registers, code: i64) -> Result<()> {
        let (Some(current), Some(mailbox)) = (self.current.take(), &mut self.mailbox) else { return Ok(()) };
        let outcome = mailbox.collect_interrupted(&current.layout, current.partial, code);
        deliver_result(memory, &mut registers, &outcome, None)
    }
}

/// Delivers the result of a call to the program's memory and registers.
pub(crate) fn deliver_result(
    memory: &Memory,
    registers: &mut Registers,
    outcome: &Outcome,
    partial: Option<Partial>,
) -> Result<()> {
    let nr = registers.call().unwrap_or_default() as u32;
    let mut ret = outcome.ret;
    if let Ok(gathered) = gather(nr, &registers.arguments(), &mut HomeMemory(memory))
        && scatter(&gathered.output_buffers, outcome, &mut HomeMemory(memory)).is_err()
    {
        ret = -i64::from(libc::EFAULT);
    }
    if let Some(partial) = partial {
        ret = partial.total_result(ret);
        partial.restore_arguments(registers);
    }
    registers.rax = ret.cast_unsigned();
    if !restart::is(ret) {
        registers.orig_rax = u64::MAX;
    }
    Ok(())
}

/// Delivers the result of a call to the program's memory and registers. If it completes one piece
/// of a longer transfer, the registers are set up for the call that transfers the rest.
pub(crate) fn deliver_piece(
    memory: &Memory,
    registers: &mut Registers,
    outcome: &Outcome,
    before: Option<Partial>,
) -> Result<Option<Partial>> {
    let before_call = *registers;
    deliver_result(memory, registers, outcome, None)?;
    let moved = registers.rax;
    let mut next = Registers { rax: moved, ..before_call };
    if moved == tern_syscall::limits::MAX_DATA
        && let Some(partial) = tern_migrate::partial::long_remainder(&mut next, before)
    {
        *registers = Registers {
            orig_rax: before_call.orig_rax,
            rip: before_call.rip,
            rax: restart::NOINTR.cast_unsigned(),
            ..next
        };
        return Ok(Some(partial));
    }
    if let Some(before) = before {
        // `restore_arguments` needs the call number, which `deliver_result` may clear.
        let after = registers.orig_rax;
        registers.orig_rax = before_call.orig_rax;
        registers.rax = before.total_result(registers.rax.cast_signed()).cast_unsigned();
        before.restore_arguments(registers);
        registers.orig_rax = if restart::is(registers.rax.cast_signed()) { after } else { u64::MAX };
    }
    Ok(None)
}

fn is_interruption(ret: i64) -> bool {
    restart::is(ret) || ret == -i64::from(libc::EINTR)
}

/// Whether a call carries a signal mask of its own. A signal that interrupted it may be one that
/// only this mask lets through. The program then makes the call again with the signal pending and
/// is interrupted natively, so that the handler has run before the call returns EINTR.
fn carries_mask(memory: &Memory, registers: &Registers) -> bool {
    let nr = registers.call().unwrap_or_default() as u32;
    let gathered = gather(nr, &registers.arguments(), &mut HomeMemory(memory));
    gathered.is_ok_and(|gathered| gathered.call.mask().is_some())
}

/// Whether a call has a timeout of which the kernel returns the rest. That rest does not count the
/// time of a stop.
pub(crate) fn has_time_left(call: &tern_syscall::Call) -> bool {
    let timeout = tern_syscall::row(call.nr).and_then(|row| row.wait).map(|wait| wait.timeout);
    matches!(timeout, Some(tern_syscall::Timeout::TimeLeft(_))) && !has_no_timeout(call)
}

/// Whether a call may have a timeout that has partly elapsed. True for all calls that wait, except
/// where [`has_no_timeout`] holds.
fn may_have_timeout(call: &tern_syscall::Call) -> bool {
    tern_syscall::row(call.nr).is_some_and(|row| row.wait.is_some()) && !has_no_timeout(call)
}

/// Whether a call that takes a relative timeout is made without one, so that none can have partly
/// elapsed. False for calls that take no relative timeout.
fn has_no_timeout(call: &tern_syscall::Call) -> bool {
    use tern_syscall::{Arg, Timeout};
    let Some(wait) = tern_syscall::row(call.nr).and_then(|row| row.wait) else { return false };
    match wait.timeout {
        Timeout::Millis(arg) => matches!(call.args[usize::from(arg)], Arg::Value(ms) if (ms as i32) < 0),
        Timeout::Timespec(arg) | Timeout::TimeLeft(arg) => {
            matches!(call.args[usize::from(arg)], Arg::Value(0))
        }
        Timeout::None | Timeout::Absolute(_) => false,
    }
}
