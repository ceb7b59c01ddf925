//! One guest.

use crate::arrive::Arriving;
use crate::cpu::Meter;
use crate::depart::Departing;
use crate::fork::Forking;
use crate::space::Shown;
use rustix::process::{Pid, setpriority_process};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::Instant;
use tern_ids::{Epoch, HomePid};
use tern_image::{FileRef, ProcessImage, Reserve};
use tern_migrate::CpuTime;
use tern_migrate::message::Conversation;
use tern_syscall::{Gathered, Route, Special};
use tern_tracee::listener::{Listener, Notification};
use tern_tracee::stop::{self, Siginfo, Stop, Stopped};
use tern_tracee::{Memory, Result};

/// How nice a guest is while it is brought to a stand: as its shim.
const HURRY: i32 = -10;

/// A guest of this family on this node.
#[derive(Debug)]
pub struct Member {
    /// Its pid at home.
    pub pid: HomePid,
    /// Its pid as it sees it.
    pub own_pid: i32,
    /// Its pid as we see it.
    pub host: i32,
    /// Its life.
    pub epoch: Epoch,
    /// Our range in it.
    pub reserve: Reserve,
    /// Its memory.
    pub memory: Memory,
    /// The listening end of its filter, once it has one.
    pub listener: Option<Rc<Listener>>,
    /// How this node shows the files that it maps.
    pub shown: Shown,
    /// What of its image does not change while it runs here: bounds, auxiliary vector, name; and its actions,
    /// which are kept up to date.
    pub image: Option<Box<ProcessImage>>,
    /// Calls and signals.
    pub talk: Conversation,
    /// A call whose result is awaited.
    pub open: Option<OpenCall>,
    /// Signals from home that have been raised here and not been delivered yet, by number.
    pub raised: HashMap<i32, VecDeque<Siginfo>>,
    /// The signal mask that its deputy has.
    pub home_mask: u64,
    /// The mask that the program shall have when the handler that is about to run returns.
    pub mask_after: Option<u64>,
    /// What it is doing.
    pub state: State,
    /// Signals taken over while a call was to be asked for again: they are raised when it has been.
    pub held_back: Vec<i32>,
    /// It runs in its parent's memory, after a vfork.
    pub borrowed: bool,
    /// When it began here.
    pub since: Instant,
    /// Its CPU time.
    pub meter: Meter,
}

/// What a guest is doing.
#[derive(Debug)]
pub enum State {
    /// Being built.
    Arriving(Box<Arriving>),
    /// Running, or in a trapped call.
    Running,
    /// Waiting in a vfork until its child has executed or ended.
    Forking(Box<Forking>),
    /// Running, while its memory is sent.
    Departing(Box<Departing>),
    /// Standing still, its image sent: home decides.
    Frozen(Stopped),
    /// Standing still by job control, or because its home is out of reach.
    Held(Stopped),
    /// Killed by a fault of its own, standing still until home has ended its deputy likewise.
    Dying {
        /// The fault's signal.
        signal: i32,
        /// Whether home has been told.
        told: bool,
        /// Itself, at the instruction that raised it.
        stopped: Stopped,
    },
}

/// A trapped call that is being performed at home.
#[derive(Debug)]
pub struct OpenCall {
    /// The trap.
    pub trap: Notification,
    /// What was sent home; nothing if the process is to go home for it.
    pub sent: Option<Gathered>,
    /// Why the process is to go home for it.
    pub homeward: Option<String>,
    /// A file that is to be mapped as soon as its content is here.
    pub file: Option<FileRef>,
    /// When.
    pub since: Instant,
}

impl Member {
    /// A process of this node that begins a life under these names.
    ///
    /// # Errors
    /// If it is gone.
    pub fn new(
        pid: HomePid,
        own_pid: i32,
        host: i32,
        epoch: Epoch,
        reserve: Reserve,
        state: State,
    ) -> Result<Self> {
        Ok(Self {
            pid,
            own_pid,
            host,
            epoch,
            reserve,
            memory: Memory::open(host)?,
            listener: None,
            shown: HashMap::new(),
            image: None,
            talk: Conversation::default(),
            open: None,
            raised: HashMap::new(),
            home_mask: 0,
            mask_after: None,
            state,
            held_back: Vec::new(),
            borrowed: false,
            since: Instant::now(),
            meter: Meter::begin(host, CpuTime::default())?,
        })
    }

    /// Brings the running guest to a stand, answering its open trap, if there is one, so that the call will be
    /// made again when it goes on. Signals that come first are delivered on the way.
    ///
    /// # Errors
    /// If it is gone.
    pub fn halt(&mut self) -> Result<Stopped> {
        // It must be given a CPU to come to a stand, and what waits for that is urgent.
        self.be_nice(HURRY);
        stop::interrupt(self.host)?;
        if let Some(open) = self.open.take() {
            // Always made again: a handler that runs first did not interrupt it.
            self.reply(open.trap.id, tern_tracee::registers::restart::NOINTR)?;
            self.talk.call_open |= open.sent.is_some();
        }
        self.await_halt()
    }

    /// How nice the guest is to this node's own processes. What it has itself said of that is the deputy's.
    pub fn be_nice(&self, nice: i32) {
        // Only root may make it less so, and nothing depends on it but time.
        let _refused = Pid::from_raw(self.host).map(|pid| setpriority_process(Some(pid), nice));
    }

    /// Brings the guest to a stand inside the trapped call `id`, which the caller then completes in its place.
    ///
    /// # Errors
    /// If it is gone.
    pub fn halt_in(&mut self, id: u64) -> Result<Stopped> {
        stop::interrupt(self.host)?;
        self.reply(id, tern_tracee::registers::restart::SYS)?;
        self.await_halt()
    }

    fn await_halt(&mut self) -> Result<Stopped> {
        // A call that was received while another member's was waited for would keep it from stopping.
        if let Some(trap) = self.listener.as_ref().and_then(|l| l.take_aside(self.host)) {
            self.reply(trap.id, tern_tracee::registers::restart::NOINTR)?;
        }
        loop {
            let stopped = stop::wait_stop(self.host)?;
            match stopped.stop {
                Stop::Interrupt => {
                    // Only this kernel could continue a futex wait with a time limit: it begins anew.
                    let mut registers = stopped.registers()?;
                    if registers.begin_anew() {
                        stopped.set_registers(&registers)?;
                    }
                    return self.out_of_vdso(stopped);
                }
                Stop::Signal(signal) => {
                    self.deliver(stopped, signal)?;
                    if matches!(self.state, State::Dying { .. }) {
                        return Err(tern_tracee::Error::Gone { pid: self.host });
                    }
                }
                _ => stopped.resume(0)?,
            }
            stop::interrupt(self.host)?;
        }
    }

    /// Whether it can be halted now. While a signal waits that has interrupted its call at home, the result of
    /// that call is under way; halted before it, the guest would take the signal first and lose the result.
    /// And a call with a local part, once home has done its part, must be done here as well before it moves.
    #[must_use]
    pub fn can_halt(&self) -> bool {
        let Some(open) = &self.open else { return true };
        let two_parts = match tern_syscall::route(open.trap.nr, &open.trap.args) {
            Route::Both(Special::Exec | Special::Exit) => true,
            Route::Both(special) => crate::special::has_local_part(special),
            _ => false,
        };
        !(self.has_raised() || two_parts && open.sent.is_some())
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
        self.listener.as_ref().map_or(Ok(()), |l| l.reply(id, ret).map(drop))
    }

    /// Lets a trapped call happen natively (see [`Listener::pass`]).
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn pass(&self, id: u64) -> Result<()> {
        self.listener.as_ref().map_or(Ok(()), |l| l.pass(id).map(drop))
    }

    /// Whether it can be given results and signals now.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self.state, State::Running | State::Departing(_) | State::Forking(_))
    }

    /// Its command, for lists.
    #[must_use]
    pub fn command(&self) -> String {
        match &self.state {
            State::Arriving(arriving) => arriving.offer.command.clone(),
            _ => {
                // What `ps` shows here, without the words that say whose it is.
                let title = tern_tracee::procfs::command_line(self.host);
                title.split_once(' ').map_or(title.clone(), |(_, command)| command.to_owned())
            }
        }
    }

    /// The title that `ps` on this node shows.
    #[must_use]
    pub fn title(home: tern_ids::NodeId, pid: HomePid, command: &str) -> String {
        format!("tern:{home}/{pid} {command}")
    }
}

/// A guest's memory as the marshaller sees it.
#[derive(Debug)]
pub struct GuestMemory<'a>(pub &'a Memory);

impl tern_syscall::Memory for GuestMemory<'_> {
    fn read(&mut self, addr: u64, buf: &mut [u8]) -> std::result::Result<(), tern_syscall::Fault> {
        match self.0.read_some(addr, buf) {
            Ok(n) if n == buf.len() => Ok(()),
            _ => Err(tern_syscall::Fault),
        }
    }

    fn write(&mut self, addr: u64, data: &[u8]) -> std::result::Result<(), tern_syscall::Fault> {
        self.0.write(addr, data).map_err(|_e| tern_syscall::Fault)
    }

    fn writable(&mut self, addr: u64, len: u64) -> bool {
        // Writing a page's first byte back would be seen by its other users; reading shows that it is mapped,
        // and what is mapped but read-only is found when the result is written.
        let mut byte = [0];
        let pages = (addr & !4095..addr.saturating_add(len)).step_by(4096);
        pages.into_iter().all(|page| self.0.read_some(page.max(addr), &mut byte).is_ok_and(|n| n == 1))
    }
}
