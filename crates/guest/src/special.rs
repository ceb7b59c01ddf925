//! Calls with a local part: what home does and what is done here must agree.
//!
//! Home goes first; what it refuses is not done here either. The local part is the guest's own call let
//! through, which harms nobody but the guest whatever its arguments, or one that we make in its place.

use crate::forward::{Failed, Sent};
use crate::member::{GuestMemory, Member, Process};
use crate::space::GuestSpace;
use crate::thread::{OpenCall, Thread};
use tern_ids::HomePid;
use tern_image::FileRef;
use tern_image::content::Cache;
use tern_image::limits::{self, Limit};
use tern_image::process::{Action, DEFAULT, IGNORE, is_ignored_by_default};
use tern_migrate::message::{CallResult, Mapped, Message, send};
use tern_syscall::{Arg, ByteBuf, Call, Gathered, Memory, Route, Special, reason, route};
use tern_tracee::inject::{Injection, Site};
use tern_tracee::listener::Notification;
use tern_wire::Link;

/// Whether something is done here after home has succeeded.
#[must_use]
pub fn has_local_part(special: Special) -> bool {
    matches!(
        special,
        Special::Mmap
            | Special::RtSigaction
            | Special::RtSigprocmask
            | Special::RtSigreturn
            | Special::Fork
            | Special::Thread
            | Special::Setrlimit
    )
}

impl Thread {
    /// Takes a call with a local part.
    ///
    /// # Errors
    /// As [`trapped`](Self::trapped).
    pub fn special(
        &mut self,
        trap: Notification,
        special: Special,
        process: &mut Process,
        home: Option<&mut Link>,
    ) -> Sent {
        if special == Special::RtSigreturn {
            return self.handler_returned(trap, process, home);
        }
        if matches!(special, Special::Exec | Special::Exit)
            && let Some(home) = home
        {
            // The next program is the same process, with the time of this one, and who waits for the end of this one is
            // told of it: nobody else will say it.
            send(home, process.pid, &Message::Used(process.meter.used(), process.demand), &[])?;
            return self.ask_home(trap, process, Some(home));
        }
        if special == Special::CpuTimer {
            return self.about_timer(trap, process, home);
        }
        let asks_only = match special {
            Special::RtSigaction | Special::RtSigprocmask => trap.args[1] == 0,
            _ => false,
        };
        if asks_only {
            return Ok(self.pass(trap.id)?);
        }
        self.ask_home(trap, process, home)
    }

    /// Answers a call for CPU time of which home's part is known; false if it is not.
    pub(crate) fn tell_time(
        &mut self,
        trap: &Notification,
        process: &mut Process,
    ) -> tern_tracee::Result<bool> {
        if route(trap.nr, &trap.args) != Route::Both(Special::CpuTime) {
            return Ok(false);
        }
        let known = process.at_home.answer(trap.nr, &trap.args).filter(|_| !self.talk.call_open);
        let Some(mut outcome) = known else { return Ok(false) };
        let of_clock = i64::from(trap.nr) == libc::SYS_clock_gettime;
        let used = if of_clock { process.meter.used_in_all() } else { process.meter.used() };
        crate::cpu::add(trap.nr, &trap.args, used, &mut outcome);
        let told = outcome.outs.first().map(|time| GuestMemory(&process.memory).write(trap.args[1], time));
        if !matches!(told, Some(Ok(()))) {
            return Ok(false);
        }
        if let Some(home) = process.at_home.known().filter(|_| of_clock) {
            process.told_time(trap, home)?;
        }
        self.talk.resumes = None;
        self.reply(trap.id, 0)?;
        Ok(true)
    }

    /// A call about a timer. Home answers by what has been used until now, by the process and by the thread: no other
    /// thread's clock is in a timer that is as likely as its own.
    fn about_timer(&mut self, trap: Notification, process: &mut Process, home: Option<&mut Link>) -> Sent {
        let creates = i64::from(trap.nr) == libc::SYS_timer_create;
        if creates && crate::cpu::whose_clock(trap.args[0] as i32, process.own_pid).is_none() {
            return self.go_home_for(trap, reason::CPU_TIMER, process, home);
        }
        let Some(home) = home else { return self.ask_home(trap, process, None) };
        send(home, process.pid, &Message::Used(process.meter.used(), process.demand), &[])?;
        send(home, self.tid, &Message::ThreadUsed(self.meter.used()), &[])?;
        self.ask_home(trap, process, Some(home))
    }

    /// A handler returns, and with it the mask of before: home follows if it has another.
    fn handler_returned(
        &mut self,
        trap: Notification,
        process: &mut Process,
        home: Option<&mut Link>,
    ) -> Sent {
        // The frame lies where the stack pointer is after the return address has been popped.
        const MASK_IN_FRAME: u64 = 8 + 8 + 24 + 256;
        let stack = tern_tracee::procfs::stack_pointer(self.host)?;
        let mask = process.memory.word(stack + MASK_IN_FRAME).unwrap_or(self.home_mask);
        if mask == self.home_mask {
            return Ok(self.pass(trap.id)?);
        }
        // Home first: what it then lets through must be here before the handler's caller goes on.
        self.home_mask = mask;
        let set = Arg::Bytes(ByteBuf::from(mask.to_le_bytes().to_vec()));
        let how = Arg::Value(libc::SIG_SETMASK as u64);
        let args = [how, set, Arg::Value(0), Arg::Value(8), Arg::Value(0), Arg::Value(0)];
        let call = Call { nr: libc::SYS_rt_sigprocmask as u32, args };
        self.ask(trap, Gathered { call, landings: Vec::new(), cut: false }, process, home)
    }

    /// Follows home's signal mask, as the kernel does it here in a moment.
    fn follow_mask(&mut self, open: &OpenCall, process: &Process) -> Sent {
        let [how, at, ..] = open.trap.args;
        let set = process.memory.word(at)?;
        self.home_mask = match how as i32 {
            libc::SIG_BLOCK => self.home_mask | set,
            libc::SIG_UNBLOCK => self.home_mask & !set,
            _ => set,
        };
        Ok(self.pass(open.trap.id)?)
    }

    fn map(
        &mut self,
        mut open: OpenCall,
        result: CallResult,
        process: &mut Process,
        cache: &mut Cache,
        home: Option<&mut Link>,
    ) -> Sent {
        let file = match result.file {
            Some(Mapped::File(file)) => file,
            Some(Mapped::Zero) => return Ok(self.map_here(&open, None, process, cache)?),
            None => return Ok(self.reply(open.trap.id, -i64::from(libc::ENODEV))?),
        };
        if file.live
            && let Err(error) = cache.objects.make(&file)
        {
            tracing::warn!(pid = %process.pid, %error, "no room for memory that is to be shared");
            return Ok(self.reply(open.trap.id, -i64::from(libc::ENOMEM))?);
        }
        let (hash, ready) = (file.hash, cache.has(&file));
        open.file = Some(file);
        self.open = Some(open);
        if ready {
            return Ok(self.map_now(process, cache)?);
        }
        match home {
            Some(home) => Ok(send(home, self.tid, &Message::WantContent(hash), &[])?),
            None => Ok(()),
        }
    }

    /// Takes a piece of the content that a mapping waits for.
    ///
    /// # Errors
    /// If it is not that content, or the guest is gone.
    pub fn take_content(
        &mut self,
        hash: tern_ids::ContentHash,
        offset: u64,
        piece: &[u8],
        process: &mut Process,
        cache: &mut Cache,
    ) -> Sent {
        let wanted = self.open.as_ref().and_then(|o| o.file.as_ref()).filter(|f| f.hash == hash);
        let Some(file) = wanted else { return Ok(()) };
        let complete = cache.put(file, self.tid, offset, piece);
        let astray = |e: std::io::Error| tern_tracee::Error::Astray { what: e.to_string(), pid: self.host };
        if complete.map_err(astray)? {
            self.map_now(process, cache)?;
        }
        Ok(())
    }

    /// Makes the mapping whose content is here, in the thread's place.
    fn map_now(&mut self, process: &mut Process, cache: &Cache) -> tern_tracee::Result<()> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        let Some(file) = open.file.take() else { return Ok(()) };
        self.map_here(&open, Some(file), process, cache)
    }

    /// Makes a mapping in the thread's place: of this file, or else anonymous memory, which /dev/zero is.
    fn map_here(
        &mut self,
        open: &OpenCall,
        file: Option<FileRef>,
        process: &mut Process,
        cache: &Cache,
    ) -> tern_tracee::Result<()> {
        // `open` is ours now: halting would ask for it again, but it is answered below.
        let Some(stopped) = self.halt_in(open.trap.id, process)? else { return Ok(()) };
        let mut injection = Injection::begin(stopped, Site(process.reserve.start))?;
        let mut registers = *injection.before();
        let mut space = GuestSpace { injection: &mut injection, listener: &self.listener, cache, files: &[] };
        let [addr, length, prot, flags, ..] = open.trap.args;
        let at = match &file {
            Some(file) => space.map(file, open.trap.args)?,
            None => {
                let flags = flags | libc::MAP_ANONYMOUS as u64;
                space.make(libc::SYS_mmap, [addr, length, prot, flags, u64::MAX, 0])?
            }
        };
        if at < 0 {
            tracing::warn!(pid = %process.pid, errno = -at, args = ?open.trap.args, "a file could not be mapped here");
        }
        if let Some(file) = file.filter(|_| at > 0) {
            let maps = tern_tracee::procfs::maps(self.host)?;
            let shown = maps.iter().find(|m| m.start <= at.cast_unsigned() && at.cast_unsigned() < m.end);
            // Another thread may have unmapped it since, or mapped private memory there.
            if let Some(m) = shown.filter(|m| !m.is_anonymous()) {
                process.shown.insert((m.device, m.inode), file);
            }
        }
        registers.rax = at.cast_unsigned();
        registers.orig_rax = u64::MAX;
        let mask = injection.mask();
        let stopped = injection.finish_with(&registers, mask)?;
        self.run_on(stopped, process)
    }
}

impl Process {
    /// A limit that home has accepted binds here too, and goes with the process. That of another member binds where it is
    /// from its next move on.
    fn limit(&mut self, open: &OpenCall) {
        let (whose, resource, value) = match (open.trap.nr as i64, open.trap.args) {
            (libc::SYS_setrlimit, [resource, ..]) => (0, resource, 1),
            (_, [whose, resource, ..]) => (whose as i32, resource, 2),
        };
        let value = open.sent.as_ref().and_then(|sent| sent.call.args.get(value));
        let Some(Arg::Bytes(value)) = value else { return };
        let ([soft, hard], []) = value.as_chunks::<8>() else { return };
        let (soft, hard) = (u64::from_le_bytes(*soft), u64::from_le_bytes(*hard));
        let of = |limit: &&mut Limit| u64::from(limit.resource) == resource;
        let known = self.image.as_mut().and_then(|image| image.limits.iter_mut().find(of));
        let Some(limit) = known.filter(|_| whose == 0 || whose == self.own_pid) else { return };
        (limit.soft, limit.hard) = (soft, hard);
        limits::impose(self.host, *limit);
    }
}

/// Whether a call changes the action of a signal.
fn changes_action(trap: &Notification) -> bool {
    i64::from(trap.nr) == libc::SYS_rt_sigaction && trap.args[1] != 0
}

/// The action that lies there in a guest's memory, in the kernel's form.
fn action_at(process: &Process, at: u64) -> tern_tracee::Result<Action> {
    let mut action = [0; 4];
    for (word, at) in action.iter_mut().zip((at..).step_by(8)) {
        *word = process.memory.word(at)?;
    }
    Ok(action)
}

impl Thread {
    /// Changes a signal's action in the thread's place, so that it is done when the next change is asked for.
    fn act(&mut self, open: &OpenCall, process: &mut Process, cache: &Cache) -> tern_tracee::Result<()> {
        let Some(stopped) = self.halt_in(open.trap.id, process)? else { return Ok(()) };
        let mut injection = Injection::begin(stopped, Site(process.reserve.start))?;
        let (mut registers, mask) = (*injection.before(), injection.mask());
        let mut space = GuestSpace { injection: &mut injection, listener: &self.listener, cache, files: &[] };
        let ret = space.make(libc::SYS_rt_sigaction, open.trap.args)?;
        (registers.rax, registers.orig_rax) = (ret.cast_unsigned(), u64::MAX);
        let stopped = injection.finish_with(&registers, mask)?;
        self.run_on(stopped, process)
    }
}

impl Member {
    /// Takes a call that a thread has made; false if there is no such thread.
    ///
    /// Of two threads that change the action of a signal the second waits until both parts of the first one's change are
    /// done: else home's order and ours could differ. Unless it comes to a stand, in which its call is made again.
    ///
    /// # Errors
    /// As [`Thread::trapped`].
    pub fn trapped(
        &mut self,
        tid: HomePid,
        trap: Notification,
        home: Option<&mut Link>,
    ) -> Result<bool, Failed> {
        let changes = changes_action(&trap) && self.changes_an_action();
        let waits = !self.process.halting && (changes || self.runs_errands());
        if !waits && self.sets_default_again(tid, &trap)? {
            return Ok(true);
        }
        let Self { process, threads } = self;
        let Some(thread) = threads.get_mut(&tid) else { return Ok(false) };
        process.is_back();
        if waits {
            process.queued.push_back(trap);
        } else {
            thread.trapped(trap, process, home)?;
        }
        Ok(true)
    }

    /// Lets a call through that gives a signal its default action, which it has already; false if it is another call. Home
    /// has nothing to learn from it, and posix_spawn, system and popen make it for every signal: some sixty round trips.
    ///
    /// Not if there are other threads, whose change could overtake one that is let through; nor for signals that are
    /// ignored by default, since asking again throws away those that wait, at home too; nor when the call is one that home may have
    /// seen: its number is still open.
    fn sets_default_again(&mut self, tid: HomePid, trap: &Notification) -> tern_tracee::Result<bool> {
        let Self { process, threads } = self;
        if !changes_action(trap) || process.halting || threads.len() > 1 {
            return Ok(false);
        }
        let Some(thread) = threads.get_mut(&tid).filter(|thread| !thread.talk.call_open) else {
            return Ok(false);
        };
        let [signal, at, ..] = trap.args;
        let signal = signal as i32;
        let Ok(wanted) = action_at(process, at) else { return Ok(false) };
        let Some(known) = process.action(signal) else { return Ok(false) };
        let defaults = known[0] == DEFAULT && wanted[0] == DEFAULT;
        if !defaults || is_ignored_by_default(signal) || matches!(signal, libc::SIGKILL | libc::SIGSTOP) {
            return Ok(false);
        }
        *known = wanted;
        thread.talk.resumes = None;
        thread.pass(trap.id)?;
        Ok(true)
    }

    /// Whether the change of a signal's action is under way.
    fn changes_an_action(&self) -> bool {
        self.threads
            .values()
            .any(|thread| thread.open.as_ref().is_some_and(|open| changes_action(&open.trap)))
    }

    /// Takes calls that have waited for another one's end, if it has come.
    ///
    /// # Errors
    /// As [`Thread::trapped`].
    pub fn take_queued(&mut self, mut home: Option<&mut Link>) -> Sent {
        while !self.changes_an_action()
            && !self.runs_errands()
            && let Some(trap) = self.process.queued.pop_front()
        {
            let tid = self.threads.values().find(|thread| thread.host == trap.pid).map(|thread| thread.tid);
            if let Some(tid) = tid {
                self.trapped(tid, trap, home.as_deref_mut())?;
            }
        }
        Ok(())
    }

    /// Does the local part of a call of a thread that home has done.
    ///
    /// # Errors
    /// If the guest is gone, or home out of reach.
    pub fn local_part(
        &mut self,
        tid: HomePid,
        open: OpenCall,
        result: CallResult,
        cache: &mut Cache,
        home: Option<&mut Link>,
    ) -> Sent {
        if open.trap.nr as i64 == libc::SYS_rt_sigaction {
            self.note_action(&open)?;
        }
        let Self { process, threads } = self;
        let alone = threads.len() == 1;
        let Some(thread) = threads.get_mut(&tid) else { return Ok(()) };
        match open.trap.nr as i64 {
            libc::SYS_rt_sigaction if !alone => Ok(thread.act(&open, process, cache)?),
            libc::SYS_rt_sigprocmask => thread.follow_mask(&open, process),
            libc::SYS_mmap => thread.map(open, result, process, cache, home),
            libc::SYS_setrlimit | libc::SYS_prlimit64 => {
                process.limit(&open);
                thread.finish(&open, &result, process)
            }
            _ => Ok(thread.pass(open.trap.id)?),
        }
    }

    fn note_action(&mut self, open: &OpenCall) -> Sent {
        let [signal, at, ..] = open.trap.args;
        let signal = signal as i32;
        let action = action_at(&self.process, at)?;
        if let Some(known) = self.process.action(signal) {
            *known = action;
        }
        // What waits here, in whichever thread, the kernel throws away in a moment, as it does at home.
        if action[0] == IGNORE || action[0] == DEFAULT && is_ignored_by_default(signal) {
            for thread in self.threads.values_mut() {
                thread.raised.remove(&signal);
                thread.held_back.retain(|held| *held != signal);
            }
        }
        Ok(())
    }
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Self {
        Self::Link(error.into())
    }
}
