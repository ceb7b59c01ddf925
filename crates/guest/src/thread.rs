//! One thread of a guest: who it is, its talk with its deputy, and whether it stands.
//!
//! What a thread does by itself needs nothing but what is here; what its process shares ([`Process`]) is given to it.

use crate::cpu::Meter;
use crate::direct::Errand;
use crate::fork::Forking;
use crate::member::Process;
use rustix::process::{Pid, setpriority_process};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::Instant;
use tern_ids::HomePid;
use tern_image::FileRef;
use tern_migrate::message::Talk;
use tern_syscall::{Call, Gathered, Route, Special};
use tern_tracee::listener::{Listener, Notification};
use tern_tracee::registers::restart;
use tern_tracee::siginfo::Siginfo;
use tern_tracee::stop::{self, Stopped};
use tern_tracee::{Error, Result};

/// A thread of a guest.
#[derive(Debug)]
pub struct Thread {
    /// Its number at home.
    pub tid: HomePid,
    /// Its number as it sees it.
    pub own_tid: i32,
    /// Its number as we see it.
    pub host: i32,
    /// Its process' number as we see it.
    pub group: i32,
    /// The listening end of its filter.
    pub listener: Rc<Listener>,
    /// Calls and signals.
    pub talk: Talk,
    /// A call whose result is awaited.
    pub open: Option<OpenCall>,
    /// What is asked of home for its process's files.
    pub errand: Option<Box<Errand>>,
    /// Signals from home that have been raised here and not been delivered yet, by number.
    pub raised: HashMap<i32, VecDeque<Siginfo>>,
    /// The signal mask that its deputy has.
    pub home_mask: u64,
    /// The mask that the program shall have when the handler that is about to run returns.
    pub mask_after: Option<u64>,
    /// Signals taken over while a call was to be asked for again: they are raised when it has been.
    pub held_back: Vec<i32>,
    /// It stands still, until its process goes on.
    pub standing: Option<Stopped>,
    /// It waits in a vfork until its child has executed or ended.
    pub forking: Option<Box<Forking>>,
    /// Its deputy has ended, and it makes its own end natively: nothing more is asked of it.
    pub ending: bool,
    /// Its CPU time.
    pub meter: Meter,
}

/// A trapped call that is being performed at home.
#[derive(Debug)]
pub struct OpenCall {
    /// The trap.
    pub trap: Notification,
    /// What was sent home; nothing if the process is to go home for it.
    pub sent: Option<Gathered>,
    /// What of its files goes home with it.
    pub before: Vec<Call>,
    /// Why the process is to go home for it.
    pub homeward: Option<String>,
    /// A file that is to be mapped as soon as its content is here.
    pub file: Option<FileRef>,
    /// When.
    pub since: Instant,
}

impl Thread {
    /// A thread of this process that begins under these numbers: at home, as it sees it, and as we see it. It talks to
    /// home from here on, with this mask.
    ///
    /// # Errors
    /// If it is gone.
    pub fn new(
        process: &Process,
        (tid, own_tid, host): (HomePid, i32, i32),
        talk: Talk,
        home_mask: u64,
    ) -> Result<Self> {
        let listener = process.listener.clone();
        Ok(Self {
            tid,
            own_tid,
            host,
            group: process.host,
            listener: listener.ok_or(Error::Gone { pid: host })?,
            meter: Meter::of_thread(process.host, host, talk.used)?,
            talk,
            open: None,
            errand: None,
            raised: HashMap::new(),
            home_mask,
            mask_after: None,
            held_back: Vec::new(),
            standing: None,
            forking: None,
            ending: false,
        })
    }

    /// Whether it can be halted now. While a signal waits that has interrupted its call at home, the result of
    /// that call is under way; halted before it, the guest would take the signal first and lose the result. (One that a
    /// handler keeps blocked is not taken before.) And a call with a local part, once home has done its part, must be done here as well before it moves.
    ///
    /// And what was called from a stub in the place of home's vDSO is not asked for again elsewhere: there is no such
    /// place there, and the function begins anew.
    ///
    /// And where a handler is about to begin under the mask of a call that it has interrupted, the program's own mask is
    /// known to nobody else until it is in the handler's frame.
    ///
    /// It then waits for home, never for another thread, except in a vfork; so all of them can be in the end.
    #[must_use]
    pub fn can_halt(&self, process: &Process) -> bool {
        if self.ending || self.forking.is_some() || self.mask_after.is_some() {
            return false;
        }
        let Some(open) = &self.open else { return true };
        let two_parts = match tern_syscall::route(open.trap.nr, &open.trap.args) {
            Route::Both(Special::Exec | Special::Exit) => true,
            Route::Both(special) => crate::special::has_local_part(special),
            _ => false,
        };
        let in_stubs = process.foreign.as_ref().is_some_and(|foreign| foreign.in_stubs(open.trap.ip));
        open.sent
            .as_ref()
            .is_none_or(|sent| !(two_parts || in_stubs || self.has_deliverable(sent.call.mask())))
    }

    /// How nice it is to this node's own processes. What it has itself said of that is the deputy's.
    pub fn be_nice(&self, nice: i32) {
        // Only root may make it less so, and nothing depends on it but time.
        let _refused = Pid::from_raw(self.host).map(|pid| setpriority_process(Some(pid), nice));
    }

    /// Keeps the kernel from returning a restart code to the program: with no signal pending, a stop does it.
    ///
    /// # Errors
    /// If it is gone.
    pub fn answer_restart(&mut self, id: u64, code: i64) -> Result<()> {
        // Any stop will do; it is resumed as it comes by the main loop.
        stop::interrupt(self.host)?;
        self.reply(id, code)
    }

    /// Answers a trap.
    ///
    /// # Errors
    /// Those of the kernel, except that the guest is gone.
    pub fn reply(&self, id: u64, ret: i64) -> Result<()> {
        self.listener.reply(id, ret).map(drop)
    }

    /// Lets a trapped call happen natively (see [`Listener::pass`]).
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn pass(&self, id: u64) -> Result<()> {
        self.listener.pass(id).map(drop)
    }

    /// The restart code of a call that has not begun here. The thread may be in it already, and then a signal interrupts it.
    pub(crate) fn before_its_call(&self) -> i64 {
        self.talk.resumes.filter(|code| restart::is(*code)).unwrap_or(restart::NOINTR)
    }

    /// A call that had not been received when the thread was interrupted has not begun: it is made again, whatever handler
    /// runs first. The kernel says of it what it says of one that waits (ERESTARTSYS), so that a handler without SA_RESTART
    /// would make any call fail with EINTR, also one that never does.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn mend_unreceived(&self, stopped: &Stopped) -> Result<()> {
        let mut registers = stopped.registers()?;
        let waits_here = || tern_syscall::waits_here(registers.orig_rax as u32, &registers.arguments());
        if registers.restart_code() == Some(restart::SYS) && !waits_here() {
            registers.rax = self.before_its_call().cast_unsigned();
            stopped.set_registers(&registers)?;
        }
        Ok(())
    }

    /// Lets it run on from a stop, unless its process is coming to a stand: then it stands there.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn run_on(&mut self, stopped: Stopped, process: &Process) -> Result<()> {
        if process.halting {
            self.standing = Some(stopped);
            return Ok(());
        }
        stopped.resume(0)
    }

    /// What it has said, for the next life.
    pub fn last_words(&mut self) -> Talk {
        let carried = self.raised.values().flatten().map(|info| info.to_vec()).collect();
        Talk { carried, used: self.meter.used(), ..self.talk.clone() }
    }
}
