//! Make a stopped process perform one system call, then put everything back.
//!
//! The process is led over a `syscall` instruction that it already has (in its vDSO, or where we have put one), from
//! the stop at the call's beginning to that at its end. All its signals are blocked meanwhile, so that none is
//! delivered to registers that are not its own; SIGSTOP cannot be blocked and is sent again afterwards. Single steps
//! would not do: each is a SIGTRAP, which may meet one of the program's own, and in whose wake the kernel delivers
//! a pending fault of the program although it is blocked.

use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::patience::Wait;
use crate::procfs::{self, Mapping};
use crate::registers::Registers;
use crate::stop::{self, Change, Stop, Stopped};

/// The address of a `syscall` instruction in the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site(pub u64);

/// A call needs two stops, and a few more when events come between.
pub const MOST_STOPS: u32 = 100;

/// The two bytes of `syscall`.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];

impl Site {
    /// Finds one in the process' vDSO.
    ///
    /// # Errors
    /// If it has no vDSO, or none with a `syscall` instruction.
    pub fn in_vdso(memory: &Memory, maps: &[Mapping]) -> Result<Self> {
        let pid = memory.pid();
        let none = Error::Unreadable { what: "vDSO", pid };
        let Some(vdso) = maps.iter().find(|m| m.name == b"[vdso]") else { return Err(none) };
        let mut code = vec![0; (vdso.end - vdso.start) as usize];
        memory.read(vdso.start, &mut code)?;
        let at = code.windows(2).position(|w| w == SYSCALL).ok_or(none)?;
        Ok(Self(vdso.start + at as u64))
    }
}

/// A stopped process about to perform calls for us. Dropping it leaves it with our registers: call
/// [`Injection::finish`].
#[derive(Debug)]
pub struct Injection {
    stopped: Option<Stopped>,
    pid: i32,
    site: Site,
    before: Registers,
    mask: u64,
    /// SIGSTOP came meanwhile.
    stop_again: bool,
    /// Job control had stopped it before, or does so meanwhile.
    group: bool,
    /// It stands where the kernel looks for signals, and has not moved since.
    at_signals: bool,
    /// Whether the call under way has begun.
    begun: bool,
    /// It was found gone in a call.
    gone: bool,
    /// How often the process has stopped on its way through the call; a hostile one would have us go on for ever.
    stops: u32,
}

impl Injection {
    /// Begins: the process' registers and signal mask are kept.
    ///
    /// # Errors
    /// If it is gone.
    pub fn begin(stopped: Stopped, site: Site) -> Result<Self> {
        let group = matches!(stopped.stop, Stop::Group(_));
        let before = stopped.registers()?;
        let mask = stopped.sigmask()?;
        stopped.set_sigmask(u64::MAX)?;
        Ok(Self {
            pid: stopped.pid(),
            stopped: Some(stopped),
            site,
            before,
            mask,
            stop_again: false,
            gone: false,
            group,
            at_signals: false,
            begun: false,
            stops: 0,
        })
    }

    /// The registers as they were before.
    #[must_use]
    pub fn before(&self) -> &Registers {
        &self.before
    }

    /// From now on it has had other registers before.
    pub fn set_before(&mut self, registers: Registers) {
        self.before = registers;
    }

    /// The signal mask as it was before.
    #[must_use]
    pub fn mask(&self) -> u64 {
        self.mask
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// From now on uses another `syscall` instruction.
    pub fn set_site(&mut self, site: Site) {
        self.site = site;
    }

    /// Performs one call and returns what the kernel returned, errors as negative numbers.
    ///
    /// # Errors
    /// If the process is gone or strays.
    pub fn call(&mut self, nr: i64, args: [u64; 6]) -> Result<i64> {
        self.begin_call(nr, args)?;
        self.end_call()
    }

    /// As [`call`](Self::call), but an error of the kernel is an error of this function.
    ///
    /// # Errors
    /// Also if the call fails.
    pub fn must(&mut self, operation: &'static str, nr: i64, args: [u64; 6]) -> Result<u64> {
        let ret = self.call(nr, args)?;
        if (-4095..0).contains(&ret) {
            let source = std::io::Error::from_raw_os_error((-ret) as i32);
            return Err(Error::Refused { operation, pid: self.pid, source });
        }
        Ok(ret.cast_unsigned())
    }

    /// Sets a call going; for calls that are trapped on the way, so that the caller can answer the trap
    /// before [`end_call`](Self::end_call) waits.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn begin_call(&mut self, nr: i64, args: [u64; 6]) -> Result<()> {
        let begun = self.set_going(nr, args);
        self.noting(begun)
    }

    fn set_going(&mut self, nr: i64, args: [u64; 6]) -> Result<()> {
        (self.begun, self.stops, self.at_signals) = (false, 0, false);
        let stopped = self.take()?;
        // A hostile process may have put something else there, which never makes a call. It stands still now.
        if stopped.word(self.site.0)?.to_le_bytes()[..2] != SYSCALL {
            let what = format!("without the call at {:#x} that was there", self.site.0);
            return Err(Error::Astray { what, pid: self.pid });
        }
        stopped.set_registers(&self.before.calling(self.site.0, nr.cast_unsigned(), &args))?;
        stopped.to_call()
    }

    /// Whether a call set going has come to its end (without waiting).
    ///
    /// # Errors
    /// If the process is gone or strays.
    pub fn try_end_call(&mut self) -> Result<Option<i64>> {
        let ended = stop::wait(self.pid, false).and_then(|found| match found {
            None => Ok(None),
            Some((_, change)) => self.stopped_at(change),
        });
        self.noting(ended)
    }

    /// Waits for the end of a call set going, for a limited time where there is a limit ([`crate::patience`]).
    ///
    /// # Errors
    /// If the process is gone or strays.
    pub fn end_call(&mut self) -> Result<i64> {
        let ended = self.await_end();
        self.noting(ended)
    }

    fn await_end(&mut self) -> Result<i64> {
        let wait = Wait::begin(self.pid);
        loop {
            let Some((_, change)) = stop::wait(self.pid, true)? else { continue };
            if wait.was_ended() && !matches!(change, Change::Stopped(_)) {
                return Err(self.never());
            }
            if let Some(ret) = self.stopped_at(change)? {
                return Ok(ret);
            }
        }
    }

    fn never(&self) -> Error {
        Error::Astray { what: "it never makes the call that it is to make".into(), pid: self.pid }
    }

    fn stopped_at(&mut self, change: Change) -> Result<Option<i64>> {
        let Change::Stopped(stopped) = change else { return Err(Error::Gone { pid: self.pid }) };
        self.stops += 1;
        if self.stops > MOST_STOPS {
            return Err(self.never());
        }
        match stopped.stop {
            Stop::Call => {
                let now = stopped.registers()?;
                if now.rip != self.site.0 + 2 {
                    let what = format!("at {:#x} in a call at {:#x}", now.rip, self.site.0);
                    return Err(Error::Astray { what, pid: self.pid });
                }
                if !std::mem::replace(&mut self.begun, true) {
                    stopped.to_call()?;
                    return Ok(None);
                }
                self.stopped = Some(stopped);
                Ok(Some(now.rax.cast_signed()))
            }
            stop @ (Stop::Signal(libc::SIGSTOP) | Stop::Group(_)) => {
                self.noted(stop);
                stopped.to_call()?;
                Ok(None)
            }
            // An interrupt on its way from before, or the event of the call itself (fork): go on to its end.
            Stop::Interrupt | Stop::Fork | Stop::Vfork | Stop::Clone => {
                stopped.to_call()?;
                Ok(None)
            }
            // Another thread has executed a program, and has this one's number now.
            Stop::Exec => {
                stop::keep(stopped);
                Err(Error::Gone { pid: self.pid })
            }
            stop => {
                let now = stopped.registers()?;
                let what = format!("{stop:?} at {:#x} during a call of ours at {:#x}", now.rip, self.site.0);
                Err(Error::Astray { what, pid: self.pid })
            }
        }
    }

    pub(crate) fn take(&mut self) -> Result<Stopped> {
        self.stopped.take().ok_or_else(|| match self.gone {
            true => Error::Gone { pid: self.pid },
            false => Error::Astray { what: "a call during a call".into(), pid: self.pid },
        })
    }

    /// Notes of what has been done with it whether it is gone: then it has no other end.
    pub(crate) fn noting<T>(&mut self, done: Result<T>) -> Result<T> {
        self.gone |= done.as_ref().is_err_and(Error::is_gone);
        done
    }

    /// The stopped process, for requests that are not calls.
    ///
    /// # Errors
    /// If a call is going on.
    pub fn stopped(&self) -> Result<&Stopped> {
        self.stopped
            .as_ref()
            .ok_or_else(|| Error::Astray { what: "looked at during a call".into(), pid: self.pid })
    }

    /// Ends: gives the process its registers and mask back, still stopped.
    ///
    /// # Errors
    /// If it is gone.
    pub fn finish(self) -> Result<Stopped> {
        let (before, mask) = (self.before, self.mask);
        self.finish_with(&before, mask)
    }

    /// Ends with other registers and another mask.
    ///
    /// # Errors
    /// If it is gone.
    pub fn finish_with(mut self, registers: &Registers, mask: u64) -> Result<Stopped> {
        let mut stopped = self.take()?;
        stopped.set_registers(registers)?;
        let mut stop = if self.at_signals { stopped.stop } else { Stop::Interrupt };
        // The kernel looks at restart codes where it looks for signals, which lies behind the end of a call. And only
        // at a stop of its own kind can a thread be told to stay stopped by job control.
        if !self.at_signals && (registers.restart_code().is_some() || self.group) {
            loop {
                stop::interrupt(self.pid)?;
                stopped.resume(0)?;
                stopped = stop::wait_stop(self.pid)?;
                stop = stopped.stop;
                if matches!(stop, Stop::Interrupt | Stop::Group(_)) {
                    break;
                }
                self.noted(stop);
            }
        }
        if self.group && stop == Stop::Interrupt {
            // SIGCONT came meanwhile: that is to be seen by who waits for it.
            stop::interrupt(self.pid)?;
        }
        stopped.set_sigmask(mask)?;
        if self.stop_again {
            // SAFETY: plain kill(2).
            unsafe { libc::kill(self.pid, libc::SIGSTOP) };
        }
        // To the caller it is a process standing still.
        Ok(Stopped::again(self.pid, stop))
    }

    /// It has come to a stop where the kernel looks for signals.
    pub(crate) fn is_back(&mut self, stopped: Stopped) {
        self.group |= matches!(stopped.stop, Stop::Group(_));
        (self.stopped, self.at_signals) = (Some(stopped), true);
    }

    pub(crate) fn noted(&mut self, stop: Stop) {
        match stop {
            Stop::Group(_) => self.group = true,
            _ => self.stop_again = true,
        }
    }
}

/// Reads the maps and begins an injection through the vDSO.
///
/// # Errors
/// If the process is gone or has no usable vDSO.
pub fn through_vdso(stopped: Stopped) -> Result<(Injection, Vec<Mapping>, Memory)> {
    let maps = procfs::maps(stopped.pid())?;
    let memory = Memory::open(stopped.pid())?;
    let site = Site::in_vdso(&memory, &maps)?;
    Ok((Injection::begin(stopped, site)?, maps, memory))
}

/// A `syscall` instruction in this very program: the site for processes that were forked from it and still
/// have its memory.
#[must_use]
pub fn own_site() -> Site {
    Site(syscall_instruction as *const () as u64)
}

/// Never called; its first instruction is what [`own_site`] names.
#[unsafe(naked)]
extern "C" fn syscall_instruction() {
    core::arch::naked_asm!("syscall", "ret")
}
