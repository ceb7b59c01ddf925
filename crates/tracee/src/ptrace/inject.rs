//! Makes a stopped process perform one system call, and restores its state.
//!
//! The process runs over an existing `syscall` instruction (in its vDSO, or put there by Tern),
//! from the syscall-entry stop to the syscall-exit stop. All its signals are blocked meanwhile, so
//! that none is delivered while the injected registers are set. SIGSTOP cannot be blocked, and is
//! sent again afterwards. Single-stepping is not used: each step raises a SIGTRAP, which may
//! coincide with one of the program's own, and after the step the kernel delivers a pending fault
//! of the program even if its signal is blocked.

use crate::call_timeout::WaitGuard;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::procfs;
use crate::registers::Registers;
use crate::stop::{self, Stop, Stopped, WaitEvent};

/// The address of a `syscall` instruction in the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site(pub u64);

/// Maximum number of stops in one injected call. It takes two, and a few more for other events.
pub const MAX_STOPS: u32 = 100;

/// The machine code of `syscall`.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];

impl Site {
    /// Finds a `syscall` instruction in the process's vDSO.
    ///
    /// # Errors
    /// If the process has no vDSO, or the vDSO has no such instruction.
    pub fn in_vdso(memory: &Memory) -> Result<Self> {
        let pid = memory.pid();
        let none = || Error::Unreadable { what: "vDSO", pid };
        let vdso = procfs::vdso(pid)?.ok_or_else(none)?;
        let mut code = vec![0; (vdso.end - vdso.start) as usize];
        memory.read(vdso.start, &mut code)?;
        let at = code.windows(2).position(|w| w == SYSCALL).ok_or_else(none)?;
        Ok(Self(vdso.start + at as u64))
    }
}

/// A stopped process that is ready for injected calls. If it is dropped, the process keeps the
/// injected registers: call [`Injection::finish`].
#[derive(Debug)]
pub struct Injection {
    stopped: Option<Stopped>,
    pid: i32,
    site: Site,
    saved_registers: Registers,
    saved_mask: u64,
    /// SIGSTOP was intercepted, and is to be sent again.
    resend_sigstop: bool,
    /// It is, or has been meanwhile, in a group stop (job control).
    in_group_stop: bool,
    /// It is stopped where the kernel checks for signals, and has not run since.
    at_signal_check: bool,
    /// The call in progress has passed its entry stop.
    entered: bool,
    /// It was found gone during a call.
    gone: bool,
    /// Number of stops in the current call, limited because of hostile processes.
    stops: u32,
}

impl Injection {
    /// Saves the process's registers and signal mask, and blocks its signals.
    ///
    /// # Errors
    /// If it is gone.
    pub fn begin(stopped: Stopped, site: Site) -> Result<Self> {
        let in_group_stop = matches!(stopped.stop, Stop::Group(_));
        let saved_registers = stopped.registers()?;
        let mask = stopped.sigmask()?;
        stopped.set_sigmask(u64::MAX)?;
        Ok(Self {
            pid: stopped.pid(),
            stopped: Some(stopped),
            site,
            saved_registers,
            saved_mask: mask,
            resend_sigstop: false,
            gone: false,
            in_group_stop,
            at_signal_check: false,
            entered: false,
            stops: 0,
        })
    }

    /// The saved registers.
    #[must_use]
    pub fn saved_registers(&self) -> &Registers {
        &self.saved_registers
    }

    /// Replaces the saved registers.
    pub fn set_saved_registers(&mut self, registers: Registers) {
        self.saved_registers = registers;
    }

    /// The saved signal mask.
    #[must_use]
    pub fn saved_mask(&self) -> u64 {
        self.saved_mask
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Uses another `syscall` instruction from now on.
    pub fn set_site(&mut self, site: Site) {
        self.site = site;
    }

    /// Performs a call. Returns the kernel's result, errors as negative numbers.
    ///
    /// # Errors
    /// If the process is gone or in an unexpected state.
    pub fn call(&mut self, nr: i64, args: [u64; 6]) -> Result<i64> {
        self.begin_call(nr, args)?;
        self.end_call()
    }

    /// Like [`call`](Self::call), but returns the kernel's error as an error.
    ///
    /// # Errors
    /// Those of [`call`](Self::call), and if the call fails.
    pub fn must(&mut self, operation: &'static str, nr: i64, args: [u64; 6]) -> Result<u64> {
        let ret = self.call(nr, args)?;
        if (-4095..0).contains(&ret) {
            let source = std::io::Error::from_raw_os_error((-ret) as i32);
            return Err(Error::Refused { operation, pid: self.pid, source });
        }
        Ok(ret.cast_unsigned())
    }

    /// Starts a call, without waiting for its end. If the filter traps the call, the caller answers
    /// the trap before [`end_call`](Self::end_call).
    ///
    /// # Errors
    /// If the process is gone.
    pub fn begin_call(&mut self, nr: i64, args: [u64; 6]) -> Result<()> {
        let begun = self.start_call(nr, args);
        self.note_gone(begun)
    }

    fn start_call(&mut self, nr: i64, args: [u64; 6]) -> Result<()> {
        (self.entered, self.stops, self.at_signal_check) = (false, 0, false);
        let stopped = self.take()?;
        // A hostile process may have replaced the instruction. It is stopped now.
        if stopped.word(self.site.0)?.to_le_bytes()[..2] != SYSCALL {
            let what = format!("its syscall instruction at {:#x} was overwritten", self.site.0);
            return Err(Error::Inconsistent { what, pid: self.pid });
        }
        stopped.set_registers(&self.saved_registers.calling(self.site.0, nr.cast_unsigned(), &args))?;
        stopped.run_to_syscall()
    }

    /// Polls for the end of a call that was started.
    ///
    /// # Errors
    /// If the process is gone or in an unexpected state.
    pub fn try_end_call(&mut self) -> Result<Option<i64>> {
        let ended = stop::wait(self.pid, false).and_then(|found| match found {
            None => Ok(None),
            Some((_, change)) => self.stopped_at(change),
        });
        self.note_gone(ended)
    }

    /// Waits for the end of a call that was started, for a limited time if a limit is set
    /// ([`crate::call_timeout`]).
    ///
    /// # Errors
    /// If the process is gone or in an unexpected state.
    pub fn end_call(&mut self) -> Result<i64> {
        let ended = self.wait_for_end();
        self.note_gone(ended)
    }

    fn wait_for_end(&mut self) -> Result<i64> {
        let wait = WaitGuard::begin(self.pid);
        loop {
            let Some((_, change)) = stop::wait(self.pid, true)? else { continue };
            if wait.was_killed() && !matches!(change, WaitEvent::Stopped(_)) {
                return Err(self.never_made_call());
            }
            if let Some(ret) = self.stopped_at(change)? {
                return Ok(ret);
            }
        }
    }

    /// Performs a call that is interrupted if it waits, before it waits. The result is then a restart
    /// code, and the kernel has recorded what it needs to continue the call. The process is stopped where
    /// the kernel checks for signals.
    ///
    /// # Errors
    /// If the process is gone or in an unexpected state.
    pub fn call_interrupted(&mut self, nr: i64, args: [u64; 6]) -> Result<i64> {
        self.begin_call(nr, args)?;
        let ended = self.interrupt_call();
        self.note_gone(ended)
    }

    fn interrupt_call(&mut self) -> Result<i64> {
        let wait = WaitGuard::begin(self.pid);
        loop {
            let Some((_, change)) = stop::wait(self.pid, true)? else { continue };
            let WaitEvent::Stopped(stopped) = change else {
                return Err(if wait.was_killed() {
                    self.never_made_call()
                } else {
                    Error::Gone { pid: self.pid }
                });
            };
            match stopped.stop {
                Stop::Interrupt | Stop::Group(_) if self.entered => {
                    let result = stopped.registers()?.rax.cast_signed();
                    self.set_stopped(stopped);
                    return Ok(result);
                }
                Stop::Syscall if !self.entered && stopped.registers()?.rip == self.site.0 + 2 => {
                    self.entered = true;
                    stop::interrupt(self.pid)?;
                    stopped.resume(0)?;
                }
                stop @ Stop::Signal(libc::SIGSTOP) if self.entered => {
                    self.note_stop(stop);
                    // The kernel may have cleared the interrupt request at this stop.
                    stop::interrupt(self.pid)?;
                    stopped.resume(0)?;
                }
                _ if !self.entered => drop(self.stopped_at(WaitEvent::Stopped(stopped))?),
                _ => return Err(self.never_made_call()),
            }
        }
    }

    fn never_made_call(&self) -> Error {
        Error::Inconsistent { what: "it did not make the injected call".into(), pid: self.pid }
    }

    fn stopped_at(&mut self, change: WaitEvent) -> Result<Option<i64>> {
        let WaitEvent::Stopped(stopped) = change else { return Err(Error::Gone { pid: self.pid }) };
        self.stops += 1;
        if self.stops > MAX_STOPS {
            return Err(self.never_made_call());
        }
        match stopped.stop {
            Stop::Syscall => {
                let now = stopped.registers()?;
                if now.rip != self.site.0 + 2 {
                    let what =
                        format!("it stopped at {:#x} during an injected call at {:#x}", now.rip, self.site.0);
                    return Err(Error::Inconsistent { what, pid: self.pid });
                }
                if !std::mem::replace(&mut self.entered, true) {
                    stopped.run_to_syscall()?;
                    return Ok(None);
                }
                self.stopped = Some(stopped);
                Ok(Some(now.rax.cast_signed()))
            }
            stop @ (Stop::Signal(libc::SIGSTOP) | Stop::Group(_)) => {
                self.note_stop(stop);
                stopped.run_to_syscall()?;
                Ok(None)
            }
            // An earlier interrupt, or the event of the call itself (fork): continue to the call's
            // end.
            Stop::Interrupt | Stop::Fork | Stop::Vfork | Stop::Clone => {
                stopped.run_to_syscall()?;
                Ok(None)
            }
            // Another thread executed a program, and has this thread's number now.
            Stop::Exec => {
                stop::defer(stopped);
                Err(Error::Gone { pid: self.pid })
            }
            stop => {
                let now = stopped.registers()?;
                let what =
                    format!("{stop:?} at {:#x} during an injected call at {:#x}", now.rip, self.site.0);
                Err(Error::Inconsistent { what, pid: self.pid })
            }
        }
    }

    pub(crate) fn take(&mut self) -> Result<Stopped> {
        self.stopped.take().ok_or_else(|| match self.gone {
            true => Error::Gone { pid: self.pid },
            false => {
                Error::Inconsistent { what: "an injected call is already in progress".into(), pid: self.pid }
            }
        })
    }

    /// Records whether an operation found the process gone.
    pub(crate) fn note_gone<T>(&mut self, done: Result<T>) -> Result<T> {
        self.gone |= done.as_ref().is_err_and(Error::is_gone);
        done
    }

    /// The stopped process, for ptrace requests.
    ///
    /// # Errors
    /// If a call is in progress.
    pub fn stopped(&self) -> Result<&Stopped> {
        self.stopped.as_ref().ok_or_else(|| Error::Inconsistent {
            what: "an injected call is in progress".into(),
            pid: self.pid,
        })
    }

    /// Restores the saved registers and signal mask. The process stays stopped.
    ///
    /// # Errors
    /// If it is gone.
    pub fn finish(self) -> Result<Stopped> {
        let (saved_registers, mask) = (self.saved_registers, self.saved_mask);
        self.finish_with(&saved_registers, mask)
    }

    /// Like [`finish`](Self::finish), with other registers and another mask.
    ///
    /// # Errors
    /// If it is gone.
    pub fn finish_with(mut self, registers: &Registers, mask: u64) -> Result<Stopped> {
        let mut stopped = self.take()?;
        stopped.set_registers(registers)?;
        let mut stop = if self.at_signal_check { stopped.stop } else { Stop::Interrupt };
        // The kernel processes restart codes where it checks for signals, which is after the
        // syscall-exit stop. PTRACE_LISTEN, which keeps a thread in its group stop, also needs a
        // stop at that place.
        if !self.at_signal_check && (registers.restart_code().is_some() || self.in_group_stop) {
            loop {
                stop::interrupt(self.pid)?;
                stopped.resume(0)?;
                stopped = stop::wait_stop(self.pid)?;
                stop = stopped.stop;
                if matches!(stop, Stop::Interrupt | Stop::Group(_)) {
                    break;
                }
                self.note_stop(stop);
            }
        }
        if self.in_group_stop && stop == Stop::Interrupt {
            // SIGCONT has ended the group stop meanwhile. A further stop reports that to the
            // tracer.
            stop::interrupt(self.pid)?;
        }
        stopped.set_sigmask(mask)?;
        if self.resend_sigstop {
            // SAFETY: plain kill(2).
            unsafe { libc::kill(self.pid, libc::SIGSTOP) };
        }
        // To the caller it looks as if the process had not run.
        Ok(Stopped::again(self.pid, stop))
    }

    /// Records a stop where the kernel checks for signals.
    pub(crate) fn set_stopped(&mut self, stopped: Stopped) {
        self.in_group_stop |= matches!(stopped.stop, Stop::Group(_));
        (self.stopped, self.at_signal_check) = (Some(stopped), true);
    }

    pub(crate) fn note_stop(&mut self, stop: Stop) {
        match stop {
            Stop::Group(_) => self.in_group_stop = true,
            _ => self.resend_sigstop = true,
        }
    }
}

/// Starts an injection through the vDSO.
///
/// # Errors
/// If the process is gone or has no usable vDSO.
pub fn through_vdso(stopped: Stopped) -> Result<(Injection, Memory)> {
    let memory = Memory::open(stopped.pid())?;
    let site = Site::in_vdso(&memory)?;
    Ok((Injection::begin(stopped, site)?, memory))
}

/// The address of a `syscall` instruction in this program: a site for processes forked from it that
/// still have its memory.
#[must_use]
pub fn own_site() -> Site {
    Site(syscall_instruction as *const () as u64)
}

/// Never called. [`own_site`] returns the address of its first instruction.
#[unsafe(naked)]
extern "C" fn syscall_instruction() {
    core::arch::naked_asm!("syscall", "ret")
}
