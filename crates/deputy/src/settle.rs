//! The last call of a thread that comes home: made, under way, or never arrived here.
//!
//! ```text
//!  made                 its result is delivered: memory, rax
//!  not arrived          the kernel makes it again, natively
//!  being made, and the
//!  kernel restarts it   likewise: the interrupted call has had no effect
//!  being made, and only this thread's kernel state knows the rest (sleeps, polls with a time limit), or the
//!  kernel would fail it with EINTR: the deputy goes on with it (Lingering), everything else being home
//! ```

use crate::member::Member;
use crate::signal::fails_when_interrupted;
use crate::thread::{Current, Thread};
use tern_image::ThreadImage;
use tern_migrate::Partial;
use tern_migrate::message::{CallRequest, CallResult, Talk};
use tern_syscall::{Outcome, gather, scatter};
use tern_tracee::registers::{Registers, restart};
use tern_tracee::siginfo::signal_of;
use tern_tracee::stop::Stopped;
use tern_tracee::{Error, Memory, Result};

/// The process memory as the marshaller sees it.
struct HomeMemory<'a>(&'a Memory);

impl tern_syscall::Memory for HomeMemory<'_> {
    fn read(&mut self, addr: u64, buf: &mut [u8]) -> std::result::Result<(), tern_syscall::Fault> {
        self.0.read(addr, buf).map_err(|_e| tern_syscall::Fault)
    }

    fn write(&mut self, addr: u64, data: &[u8]) -> std::result::Result<(), tern_syscall::Fault> {
        self.0.write(addr, data).map_err(|_e| tern_syscall::Fault)
    }
}

#[allow(clippy::large_enum_variant, reason = "one at a time")]
pub(crate) enum Settled {
    /// The program goes on with these.
    Registers(Stopped, Registers),
    /// The deputy goes on with the call.
    Linger(Stopped, Registers),
    /// The deputy makes the call that these are in, for the rest of this transfer.
    Rest(Stopped, Registers, Partial),
    /// The deputy runs on to the end or the beginning of its call, and is to be brought to a stand again.
    Soon,
}

impl Member {
    /// Finds out what has become of the call that the guest was in.
    pub(crate) fn settle(&mut self, stopped: Stopped, image: &ThreadImage, talk: &Talk) -> Result<Settled> {
        let memory = Memory::open(self.memory.pid())?;
        let now = stopped.registers()?;
        let in_call = self.is_in_call(&now);
        let thread = self.thread(image.tid)?;
        let mut registers = image.registers;
        let rest = talk.partial.is_some() && !thread.knows(talk.call);
        if !talk.call_open && !rest {
            return Ok(Settled::Registers(stopped, registers));
        }
        if registers.call().is_none() {
            // The kernel there had already set it to make the call again: put behind it, as if it had not.
            (registers.orig_rax, registers.rip) = (registers.rax, registers.rip + 2);
        }
        let resumes = talk.resumes.filter(|code| restart::is(*code));
        registers.rax = resumes.unwrap_or(restart::NOINTR).cast_unsigned();
        if rest && let Some(partial) = talk.partial {
            // Of a transfer, never asked for here: only the deputy can add to what was done.
            return Ok(Settled::Rest(stopped, registers, partial));
        }
        let signals_wait =
            !talk.carried.is_empty() || thread.unheard.iter().any(|(count, _)| *count > talk.signals);
        let under_mask = signals_wait && has_mask(&memory, &registers);
        // By signals only that a handler keeps blocked, of which the deputy does not know: natively it would not have been.
        let new =
            thread.unheard.iter().filter(|(count, _)| *count > talk.signals).map(|(_, info)| signal_of(info));
        let carried = talk.carried.iter().filter_map(|info| info.as_slice().try_into().ok());
        let mut waiting = new.chain(carried.map(|info| signal_of(&info)));
        let in_vain = signals_wait && waiting.all(|signal| image.sigmask >> ((signal - 1) & 63) & 1 == 1);
        if let Some(last) = thread.last.take_if(|last| last.number == talk.call) {
            if is_interruption(last.outcome.ret) && (under_mask || in_vain) {
                return Ok(Settled::Registers(stopped, registers));
            }
            if let Some(partial) = deliver_piece(&memory, &mut registers, &last.outcome, talk.partial)? {
                return Ok(Settled::Rest(stopped, registers, partial));
            }
            return Ok(Settled::Registers(stopped, registers));
        }
        let Some(current) = thread.current.as_ref().filter(|c| c.request.number == talk.call) else {
            return Ok(Settled::Registers(stopped, registers));
        };
        let code = now.rax.cast_signed();
        let nr = current.request.call.nr;
        if !in_call {
            // Just before or behind it: the blob is on its way to it, or to its answer.
            stopped.resume(0)?;
            return Ok(Settled::Soon);
        }
        let cut_short = tern_migrate::partial::rest(&mut now.clone(), current.partial).is_some();
        let interrupted = is_interruption(code);
        if under_mask && interrupted {
            thread.current = None;
            return Ok(Settled::Registers(stopped, registers));
        }
        let whole = current.partial.is_none() && talk.partial.is_none();
        if interrupted && whole && waits_for_ever(&current.request.call) {
            // Nothing is lost when the kernel makes it anew, natively. But the program is in the call: a signal that
            // comes just now interrupts it, and must not be handled before it is made again.
            thread.current = None;
            registers.rax = restart::NOHAND.cast_unsigned();
            return Ok(Settled::Registers(stopped, registers));
        }
        // The rest of a transfer goes on here: only the deputy knows what was done before.
        if cut_short
            || (interrupted && !whole)
            || code == restart::BLOCK
            || (code == -i64::from(libc::EINTR) && fails_when_interrupted(nr))
        {
            return Ok(Settled::Linger(stopped, registers));
        }
        if restart::is(code) {
            thread.current = None;
            registers.rax = code.cast_unsigned();
            return Ok(Settled::Registers(stopped, registers));
        }
        // It has just ended: let the blob say so.
        stopped.resume(0)?;
        Ok(Settled::Soon)
    }

    /// The rest of a transfer, to be made by the deputy.
    pub(crate) fn the_rest(&self, registers: &Registers, number: u64, signals: u64) -> Result<CallRequest> {
        let nr = registers.call().unwrap_or_default() as u32;
        let call = gather(nr, &registers.arguments(), &mut HomeMemory(&self.memory));
        let astray =
            |_e| Error::Astray { what: "its node sent a transfer that is none".into(), pid: self.pid.0 };
        Ok(CallRequest {
            epoch: self.epoch,
            number,
            signals,
            resumes: None,
            before: Vec::new(),
            brings: 0,
            call: call.map_err(astray)?.call,
            view: None,
        })
    }
}

impl Thread {
    /// Whether this call has been made, or is being made.
    fn knows(&self, call: u64) -> bool {
        self.last.as_ref().is_some_and(|l| l.number == call)
            || self.current.as_ref().is_some_and(|c| c.request.number == call)
    }
}

/// Puts the result of a call where the program expects it.
pub(crate) fn deliver_result(
    memory: &Memory,
    registers: &mut Registers,
    outcome: &Outcome,
    partial: Option<Partial>,
) -> Result<()> {
    let nr = registers.call().unwrap_or_default() as u32;
    let mut ret = outcome.ret;
    if let Ok(gathered) = gather(nr, &registers.arguments(), &mut HomeMemory(memory))
        && scatter(&gathered.landings, outcome, &mut HomeMemory(memory)).is_err()
    {
        ret = -i64::from(libc::EFAULT);
    }
    if let Some(partial) = partial {
        ret = partial.whole(ret);
        partial.mend(registers);
    }
    registers.rax = ret.cast_unsigned();
    if !restart::is(ret) {
        registers.orig_rax = u64::MAX;
    }
    Ok(())
}

/// Puts the result of a call where the program expects it. If it is a whole piece of a longer transfer, the registers are
/// those in the call for the rest.
pub(crate) fn deliver_piece(
    memory: &Memory,
    registers: &mut Registers,
    outcome: &Outcome,
    before: Option<Partial>,
) -> Result<Option<Partial>> {
    let begun = *registers;
    deliver_result(memory, registers, outcome, None)?;
    let moved = registers.rax;
    let mut next = Registers { rax: moved, ..begun };
    if moved == tern_syscall::limits::PAYLOAD
        && let Some(partial) = tern_migrate::partial::rest_of_long(&mut next, before)
    {
        *registers = Registers {
            orig_rax: begun.orig_rax,
            rip: begun.rip,
            rax: restart::NOINTR.cast_unsigned(),
            ..next
        };
        return Ok(Some(partial));
    }
    if let Some(before) = before {
        // It knows by its number where its own arguments were.
        let after = registers.orig_rax;
        registers.orig_rax = begun.orig_rax;
        registers.rax = before.whole(registers.rax.cast_signed()).cast_unsigned();
        before.mend(registers);
        registers.orig_rax = if restart::is(registers.rax.cast_signed()) { after } else { u64::MAX };
    }
    Ok(None)
}

fn is_interruption(ret: i64) -> bool {
    restart::is(ret) || ret == -i64::from(libc::EINTR)
}

/// Whether a call carries a signal mask of its own. Then a signal that has interrupted it may be one that only this mask
/// lets through: with the signal waiting for it, the program makes the call again, and is interrupted natively, so that
/// the handler has run when it is told so.
fn has_mask(memory: &Memory, registers: &Registers) -> bool {
    let nr = registers.call().unwrap_or_default() as u32;
    let gathered = gather(nr, &registers.arguments(), &mut HomeMemory(memory));
    gathered.is_ok_and(|gathered| gathered.call.mask().is_some())
}

/// Whether a call that was interrupted has no time limit that could have run down.
fn waits_for_ever(call: &tern_syscall::Call) -> bool {
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

/// The result of a call.
pub(crate) fn made(current: &Current, outcome: Outcome) -> CallResult {
    let result = CallResult::new(current.request.number, outcome);
    CallResult { child: current.child, before: current.chain.done.clone(), ..result }
}
