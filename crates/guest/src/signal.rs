//! Signals from home, and the guest's own faults.
//!
//! A signal arrives at home, where the pid is; home's kernel decides what becomes of it, and only what a
//! handler must see is sent here. It is raised here with an ordinary signal of the same number, whose siginfo
//! is replaced by the original at the delivery stop; the guest's kernel does the rest. A signal that comes up
//! here without having been sent is a fault of the guest's own (its handler runs here; without one it is
//! home's to end the process), or somebody on this node meddling, which is dropped.

use crate::member::Process;
use crate::thread::Thread;
use tern_image::process::{DEFAULT, IGNORE, is_ignored_by_default};
use tern_tracee::pidfd::signal_thread;
use tern_tracee::siginfo::{self, Siginfo, code, is_queued, wait_behind};
use tern_tracee::stop::{self, Stop, Stopped};
use tern_tracee::{Error, Result};

/// Faults that a program's own instructions raise.
fn is_fault(signal: i32) -> bool {
    matches!(
        signal,
        libc::SIGSEGV | libc::SIGBUS | libc::SIGFPE | libc::SIGILL | libc::SIGTRAP | libc::SIGSYS
    )
}

/// Signals whose default action does not end a program: they are home's affair, and were when they came.
fn is_harmless(signal: i32) -> bool {
    let stops = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU, libc::SIGSTOP];
    stops.contains(&signal) || is_ignored_by_default(signal)
}

impl Thread {
    /// Takes a signal over from home: from now on it is this life's to deliver.
    ///
    /// # Errors
    /// If the guest is gone.
    pub fn raise(&mut self, count: u64, info: Siginfo) -> Result<()> {
        // Sent again after a reconnection.
        if count <= self.talk.signals || self.ending {
            return Ok(());
        }
        self.talk.signals = count;
        let signal = siginfo::signal_of(&info);
        let waiting = self.raised.entry(signal).or_default();
        // Home's kernel has handed it out, where it would have let it wait. Kept, they would come one behind the other for
        // ever if they came faster than their handler is run, and the program to nothing else.
        let before = waiting.len();
        wait_behind(waiting, info);
        if waiting.len() == before {
            return Ok(());
        }
        if self.talk.call_open {
            // A handler that ran before the call is asked for again would make that call's place.
            self.held_back.push(signal);
            return Ok(());
        }
        if is_queued(signal) || waiting.len() == 1 {
            signal_thread(self.group, self.host, signal)
        } else {
            Ok(())
        }
    }

    /// Raises what was held back, now that the open call has been asked for again.
    ///
    /// # Errors
    /// If the guest is gone.
    pub fn raise_held_back(&mut self) -> Result<()> {
        self.held_back.drain(..).try_for_each(|signal| signal_thread(self.group, self.host, signal))
    }

    /// Raises again what another life of the process had taken over and not delivered.
    ///
    /// # Errors
    /// If the guest is gone.
    pub fn raise_carried(&mut self) -> Result<()> {
        for info in std::mem::take(&mut self.talk.carried) {
            let Ok(info) = Siginfo::try_from(info) else { continue };
            let signal = siginfo::signal_of(&info);
            if !(1..=64).contains(&signal) {
                continue;
            }
            self.raised.entry(signal).or_default().push_back(info);
            self.held_back.push(signal);
        }
        if self.talk.call_open { Ok(()) } else { self.raise_held_back() }
    }

    /// Whether a signal from home is waiting here.
    #[must_use]
    pub fn has_raised(&self) -> bool {
        self.raised.values().any(|infos| !infos.is_empty())
    }

    /// Whether a signal from home is waiting here that is let through: by the mask of a call, or else by the thread's. What
    /// a handler that runs keeps blocked is no reason to fail a call: home, which does not know of that, has interrupted it
    /// in vain.
    #[must_use]
    pub fn has_deliverable(&self, mask: Option<u64>) -> bool {
        if !self.has_raised() {
            return false;
        }
        let own = || tern_tracee::procfs::status(self.host).map_or(0, |s| s.blocked);
        let blocked = mask.unwrap_or_else(own);
        let waits = |(signal, infos): (&i32, &std::collections::VecDeque<Siginfo>)| {
            !infos.is_empty() && blocked >> (signal - 1) & 1 == 0
        };
        self.raised.iter().any(waits)
    }

    /// Whether a signal was raised before the call that the thread has just made and is to be delivered first: home has been
    /// told of it as taken, or will be with this call, and would interrupt nothing. The kernel lets a thread whose signal
    /// comes as its call is received wait on, until it is answered (`SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV`).
    #[must_use]
    pub fn takes_signal_first(&self) -> bool {
        !self.talk.call_open && self.has_deliverable(None)
    }

    /// Goes on from a stop before the delivery of a signal. If that ends the program, it stands there.
    ///
    /// # Errors
    /// If the guest is gone.
    pub fn deliver(&mut self, stopped: Stopped, signal: i32, process: &mut Process) -> Result<()> {
        let copied = self.leave_stub(&stopped, process)?;
        if copied && is_fault(signal) && code(&stopped.siginfo()?) > 0 {
            // It makes the call itself now, whose arguments are no good.
            return self.run_on(stopped, process);
        }
        let waits = self.raised.get(&signal).is_some_and(|infos| !infos.is_empty());
        if waits && process.stands_in_vdso(&stopped)? {
            let stopped = process.out_of_vdso(stopped)?;
            signal_thread(self.group, self.host, signal)?;
            return stopped.resume(0);
        }
        if let Some(foreign) = &process.foreign
            && !waits
            && is_fault(signal)
            && foreign.in_copy(stopped.registers()?.rip)
            && code(&stopped.siginfo()?) > 0
        {
            // Home has what it looked for, and makes the same instruction again.
            process.homesick = Some((self.tid, false));
            self.standing = Some(stopped);
            return Ok(());
        }
        let mut none = [DEFAULT; 4];
        let known = process.action(signal).unwrap_or(&mut none);
        let action = known[0];
        if let Some(waiting) = self.raised.get_mut(&signal)
            && let Some(info) = waiting.pop_front()
        {
            // This kernel keeps one of each number; the next is raised when this one has been delivered.
            if !is_queued(signal) && !waiting.is_empty() {
                signal_thread(self.group, self.host, signal)?;
            }
            match action {
                // The program has taken its handler away since home let the signal through.
                IGNORE => return self.passed_over(stopped),
                DEFAULT if is_harmless(signal) => return self.passed_over(stopped),
                DEFAULT => {
                    // If it goes home to die there, this goes with it.
                    waiting.push_front(info);
                    process.die(signal, self.tid);
                    self.standing = Some(stopped);
                    return Ok(());
                }
                _ => {}
            }
            if known[1] & libc::SA_RESETHAND as u32 as u64 != 0 {
                known[0] = DEFAULT;
            }
            stopped.set_siginfo(&info)?;
            self.mend_unreceived(&stopped)?;
            self.talk.resumes = None;
            return match self.mask_after.take() {
                Some(mask) => self.enter_handler(stopped, signal, mask, process),
                None => stopped.resume(signal),
            };
        }
        if !is_fault(signal) || code(&stopped.siginfo()?) <= 0 {
            return stopped.resume(0);
        }
        let blocked = stopped.sigmask()? >> (signal - 1) & 1 == 1;
        if action == DEFAULT || action == IGNORE || blocked {
            // It stands still until home, told by the main loop, has ended its deputy.
            process.die(signal, self.tid);
            self.standing = Some(stopped);
            return Ok(());
        }
        if known[1] & libc::SA_RESETHAND as u32 as u64 != 0 {
            known[0] = DEFAULT;
        }
        stopped.resume(signal)
    }

    /// Goes on without a handler. If no other comes, a call that the signal has interrupted is made again, and until then the
    /// program's own mask is in force.
    fn passed_over(&mut self, stopped: Stopped) -> Result<()> {
        if !self.has_deliverable(None)
            && let Some(mask) = self.mask_after.take()
        {
            stopped.set_sigmask(mask)?;
        }
        stopped.resume(0)
    }

    /// Lets a handler begin that interrupted a call with a mask of its own, and sees to it that the program
    /// gets its own mask back when the handler returns: the mask in the handler's frame is the call's, since
    /// the call was performed elsewhere and this kernel never knew another one.
    fn enter_handler(&self, stopped: Stopped, signal: i32, mask: u64, process: &Process) -> Result<()> {
        // struct rt_sigframe: return address 8, then ucontext: flags 8, link 8, stack 24, registers 256, mask.
        const MASK_IN_FRAME: u64 = 8 + 8 + 8 + 24 + 256;
        let before = stopped.registers()?.rip;
        stopped.step(signal)?;
        loop {
            let stopped = stop::wait_stop(self.host)?;
            match stopped.stop {
                Stop::Signal(libc::SIGTRAP) => {
                    let now = stopped.registers()?;
                    if now.rip != before {
                        process.memory.write(now.rsp + MASK_IN_FRAME, &mask.to_le_bytes())?;
                    }
                    return stopped.resume(0);
                }
                Stop::Interrupt => stopped.step(0)?,
                stop => {
                    let what = format!("{stop:?} at the beginning of a handler");
                    return Err(Error::Astray { what, pid: self.host });
                }
            }
        }
    }
}
