//! Bringing guests to a stand, and letting them go on.
//!
//! A process stands when all its threads do. That is a wish (`Process::halting`) which the main loop carries out: each
//! thread is halted as soon as it can be ([`Thread::can_halt`]), and those that stand wait for the others. In the
//! meantime
//! * a thread that stands answers no call: its trapped call was answered so that it will be made again, and a result
//!   that comes for it is dropped, since nothing is open;
//! * a trap that comes from a thread that still runs is not sent home but answered likewise, and the thread stands: a
//!   program that makes one call after the other cannot put its stand off;
//! * a thread that is born stands at its birth, and its maker with it;
//! * a thread that ends is one less to wait for;
//! * a thread that waits for a page of its home's (`homes`) stands when it has that, which may be when home is there again
//! * a signal that comes for a thread that stands is raised in it, and is delivered when it goes on, here or elsewhere.

use crate::member::{Member, Process, State};
use crate::thread::Thread;
use std::time::{Duration, Instant};
use tern_tracee::Result;
use tern_tracee::listener::Notification;
use tern_tracee::registers::restart;
use tern_tracee::stop::{self, Stop, Stopped};

/// A thread that sleeps for longer than this where no signal wakes it is not waited for: what it waits for comes from another node.
const ASLEEP: Duration = Duration::from_millis(20);

/// How nice a guest is while it is brought to a stand: as its shim.
const HURRY: i32 = -10;

impl Member {
    /// Brings those threads of the guest to a stand that can be, answering their open traps so that the calls will be
    /// made again when they go on; whether all stand now. To be called again until they do. Signals that come first are
    /// delivered on the way.
    ///
    /// # Errors
    /// If it is gone.
    pub fn halt(&mut self) -> Result<bool> {
        let Self { process, threads } = self;
        process.halting = true;
        let ready = |thread: &&mut Thread| thread.standing.is_none() && thread.can_halt(process);
        let mut asked: Vec<&mut Thread> = threads.values_mut().filter(ready).collect();
        // All are asked before the first is waited for: those that compute then do not hold up the others.
        for thread in &mut asked {
            thread.ask_to_stand(process)?;
        }
        let until = Instant::now() + ASLEEP;
        for thread in asked {
            thread.come_to_stand(process, until)?;
        }
        Ok(self.stands())
    }

    /// Whether all its threads stand.
    #[must_use]
    pub fn stands(&self) -> bool {
        self.threads.values().all(|thread| thread.standing.is_some())
    }

    /// Lets those threads that stand go on, if the guest has no other reason to stand.
    ///
    /// # Errors
    /// If it is gone.
    pub fn go_on(&mut self) -> Result<()> {
        if self.process.is_to_stand() {
            return Ok(());
        }
        self.process.halting = false;
        for thread in self.threads.values_mut() {
            if let Some(stopped) = thread.standing.take() {
                stopped.resume(0)?;
            }
        }
        Ok(())
    }

    /// It does not go, or has come back from going: it runs here, unless it has another reason to stand.
    ///
    /// # Errors
    /// If it is gone.
    pub fn live_on(&mut self) -> Result<()> {
        self.process.state = State::Running;
        self.process.files.take_up();
        // Home may have told another life.
        self.process.names.forget();
        if let Some(dying) = &mut self.process.dying {
            // Home is told once more, and ends it as it is.
            dying.told = false;
        }
        if let Some((_, told)) = &mut self.process.homesick {
            *told = false;
        }
        self.go_on()
    }

    /// How nice all of it is to this node's own processes.
    pub fn be_nice(&self, nice: i32) {
        self.threads.values().for_each(|thread| thread.be_nice(nice));
    }
}

impl Thread {
    /// Brings this thread to a stand, whatever the others do.
    ///
    /// # Errors
    /// If it is gone.
    pub fn halt(&mut self, process: &mut Process) -> Result<()> {
        if self.standing.is_some() {
            return Ok(());
        }
        self.ask_to_stand(process)?;
        self.come_to_stand(process, Instant::now() + ASLEEP)
    }

    /// Brings it to a stand in a call that it has just made, and that is not sent home: it is made again later.
    ///
    /// # Errors
    /// If it is gone.
    pub fn halt_at(&mut self, trap: &Notification, process: &mut Process) -> Result<()> {
        self.be_nice(HURRY);
        stop::interrupt(self.host)?;
        self.reply(trap.id, restart::NOINTR)?;
        self.come_to_stand(process, Instant::now() + ASLEEP)
    }

    /// Brings it to a stand inside the trapped call `id`, which the caller then completes in its place. Nothing if a
    /// signal has come before that ends the program: it stands at that.
    ///
    /// # Errors
    /// If it is gone.
    pub fn halt_in(&mut self, id: u64, process: &mut Process) -> Result<Option<Stopped>> {
        stop::interrupt(self.host)?;
        self.reply(id, restart::NOINTR)?;
        self.await_halt(process, None)
    }

    fn ask_to_stand(&mut self, process: &mut Process) -> Result<()> {
        // It must be given a CPU to come to a stand, and what waits for that is urgent.
        self.be_nice(HURRY);
        stop::interrupt(self.host)?;
        if let Some(open) = self.open.take() {
            // Always made again: a handler that runs first did not interrupt it.
            self.reply(open.trap.id, restart::NOINTR)?;
            self.talk.call_open |= open.sent.is_some();
        }
        // A call that was received while another thread's was waited for would keep it from stopping.
        for trap in
            [self.listener.take_aside(self.host), process.take_queued(self.host)].into_iter().flatten()
        {
            self.reply(trap.id, restart::NOINTR)?;
        }
        Ok(())
    }

    fn come_to_stand(&mut self, process: &mut Process, until: Instant) -> Result<()> {
        // One that sleeps stops when it wakes ([`stopped_late`](Self::stopped_late)).
        if let Some(stopped) = self.await_halt(process, Some(until))? {
            self.standing = Some(stopped);
        }
        Ok(())
    }

    fn await_halt(&mut self, process: &mut Process, until: Option<Instant>) -> Result<Option<Stopped>> {
        loop {
            let stopped = match until {
                None => stop::wait_stop(self.host)?,
                Some(until) => match stop::wait_stop_awake(self.host, until)? {
                    Some(stopped) => stopped,
                    None => return Ok(None),
                },
            };
            match stopped.stop {
                Stop::Interrupt => return self.at_interrupt(stopped, process).map(Some),
                Stop::Signal(signal) => {
                    self.deliver(stopped, signal, process)?;
                    if self.standing.is_some() {
                        return Ok(None);
                    }
                }
                _ => stopped.resume(0)?,
            }
            stop::interrupt(self.host)?;
        }
    }

    /// It has stopped because it was asked to: what it was in the middle of is ended, or will begin anew.
    fn at_interrupt(&self, stopped: Stopped, process: &mut Process) -> Result<Stopped> {
        self.leave_stub(&stopped, process)?;
        self.mend_unreceived(&stopped)?;
        // Only this kernel could continue a futex wait with a time limit: it begins anew.
        let mut registers = stopped.registers()?;
        if registers.begin_anew() {
            stopped.set_registers(&registers)?;
        }
        process.out_of_vdso(stopped)
    }

    /// It has stopped because it was asked to, when nobody waited for it any more. If its process is to stand it does, or one that sleeps again and again
    /// would never; else the stop is given back.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn stopped_late(
        &mut self,
        stopped: Stopped,
        process: &mut Process,
    ) -> Result<Option<Stopped>> {
        if process.halting && self.standing.is_none() && self.open.is_none() && self.can_halt(process) {
            self.standing = Some(self.at_interrupt(stopped, process)?);
            return Ok(None);
        }
        Ok(Some(stopped))
    }
}
