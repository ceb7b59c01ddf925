//! Calls with a local part: what home does and what is done here must agree.
//!
//! Home goes first; what it refuses is not done here either. The local part is the guest's own call let
//! through, which harms nobody but the guest whatever its arguments, or one that we make in its place.

use crate::forward::{Failed, Sent};
use crate::member::{Member, OpenCall};
use crate::space::GuestSpace;
use tern_image::content::Cache;
use tern_image::process::{DEFAULT, IGNORE, is_ignored_by_default};
use tern_migrate::message::{CallResult, Message, send};
use tern_syscall::{Arg, ByteBuf, Call, Gathered, Special};
use tern_tracee::inject::{Injection, Site};
use tern_tracee::listener::Notification;
use tern_wire::Link;

/// Whether something is done here after home has succeeded.
#[must_use]
pub fn has_local_part(special: Special) -> bool {
    let two =
        [Special::Mmap, Special::RtSigaction, Special::RtSigprocmask, Special::RtSigreturn, Special::Fork];
    two.contains(&special)
}

impl Member {
    /// Takes a call with a local part.
    ///
    /// # Errors
    /// As [`trapped`](Self::trapped).
    pub fn special(&mut self, trap: Notification, special: Special, home: Option<&mut Link>) -> Sent {
        if special == Special::RtSigreturn {
            return self.handler_returned(trap, home);
        }
        if special == Special::Exec
            && let Some(home) = home
        {
            // The next program is the same process, with the time of this one: nobody else will tell of it.
            send(home, self.pid, &Message::Used(self.meter.used(), self.meter.demand()), &[])?;
            return self.ask_home(trap, Some(home));
        }
        let asks_only = match special {
            Special::RtSigaction | Special::RtSigprocmask => trap.args[1] == 0,
            _ => false,
        };
        if asks_only {
            return Ok(self.pass(trap.id)?);
        }
        self.ask_home(trap, home)
    }

    /// A handler returns, and with it the mask of before: home follows if it has another.
    fn handler_returned(&mut self, trap: Notification, home: Option<&mut Link>) -> Sent {
        // The frame lies where the stack pointer is after the return address has been popped.
        const MASK_IN_FRAME: u64 = 8 + 8 + 24 + 256;
        let stack = tern_tracee::procfs::stack_pointer(self.host)?;
        let mask = self.memory.word(stack + MASK_IN_FRAME).unwrap_or(self.home_mask);
        if mask == self.home_mask {
            return Ok(self.pass(trap.id)?);
        }
        // Home first: what it then lets through must be here before the handler's caller goes on.
        self.home_mask = mask;
        let set = Arg::Bytes(ByteBuf::from(mask.to_le_bytes().to_vec()));
        let how = Arg::Value(libc::SIG_SETMASK as u64);
        let args = [how, set, Arg::Value(0), Arg::Value(8), Arg::Value(0), Arg::Value(0)];
        let call = Call { nr: libc::SYS_rt_sigprocmask as u32, args };
        self.ask(trap, Gathered { call, landings: Vec::new(), cut: false }, home)
    }

    /// Does the local part of a call that home has done.
    ///
    /// # Errors
    /// If the guest is gone, or home out of reach.
    pub fn local_part(
        &mut self,
        open: OpenCall,
        result: CallResult,
        cache: &mut Cache,
        home: Option<&mut Link>,
    ) -> Sent {
        match open.trap.nr as i64 {
            libc::SYS_rt_sigaction => self.note_action(&open),
            libc::SYS_rt_sigprocmask => {
                // As the kernel does it here in a moment, for the mask that home has.
                let [how, at, ..] = open.trap.args;
                let set = self.memory.word(at)?;
                self.home_mask = match how as i32 {
                    libc::SIG_BLOCK => self.home_mask | set,
                    libc::SIG_UNBLOCK => self.home_mask & !set,
                    _ => set,
                };
                Ok(self.pass(open.trap.id)?)
            }
            libc::SYS_mmap => self.map(open, result, cache, home),
            _ => Ok(self.pass(open.trap.id)?),
        }
    }

    fn note_action(&mut self, open: &OpenCall) -> Sent {
        let [signal, at, ..] = open.trap.args;
        let mut action = [0u64; 4];
        for (word, at) in action.iter_mut().zip((at..).step_by(8)) {
            *word = self.memory.word(at)?;
        }
        let known = self.image.as_mut().and_then(|i| i.actions.get_mut((signal as usize).wrapping_sub(1)));
        if let Some(known) = known {
            *known = action;
        }
        // What waits here the kernel throws away in a moment, as it does at home.
        let ignores = action[0] == IGNORE || action[0] == DEFAULT && is_ignored_by_default(signal as i32);
        if ignores {
            self.raised.remove(&(signal as i32));
            self.held_back.retain(|held| *held as u64 != signal);
        }
        Ok(self.pass(open.trap.id)?)
    }

    fn map(
        &mut self,
        mut open: OpenCall,
        result: CallResult,
        cache: &mut Cache,
        home: Option<&mut Link>,
    ) -> Sent {
        let Some(file) = result.file else {
            return Ok(self.reply(open.trap.id, -i64::from(libc::ENODEV))?);
        };
        let (hash, ready) = (file.hash, cache.has(&file));
        open.file = Some(file);
        self.open = Some(open);
        if ready {
            return Ok(self.map_now(cache)?);
        }
        match home {
            Some(home) => Ok(send(home, self.pid, &Message::WantContent(hash), &[])?),
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
        cache: &mut Cache,
    ) -> Sent {
        let wanted = self.open.as_ref().and_then(|o| o.file.as_ref()).filter(|f| f.hash == hash);
        let Some(file) = wanted else { return Ok(()) };
        let complete = cache.put(file, offset, piece);
        let astray = |e: std::io::Error| tern_tracee::Error::Astray { what: e.to_string(), pid: self.host };
        if complete.map_err(astray)? {
            self.map_now(cache)?;
        }
        Ok(())
    }

    /// Makes the mapping whose content is here, in the guest's place.
    fn map_now(&mut self, cache: &Cache) -> tern_tracee::Result<()> {
        let (Some(open), Some(listener)) = (self.open.take(), self.listener.clone()) else { return Ok(()) };
        let Some(file) = open.file else { return Ok(()) };
        // `open` is ours now: halting would ask for it again, but it is answered below.
        let stopped = self.halt_in(open.trap.id)?;
        let mut injection = Injection::begin(stopped, Site(self.reserve.start))?;
        let mut registers = *injection.before();
        let mut space = GuestSpace { injection: &mut injection, listener: &listener, cache, files: &[] };
        let at = space.map(&file, open.trap.args)?;
        if at > 0 {
            let maps = tern_tracee::procfs::maps(self.host)?;
            let shown = maps.iter().find(|m| m.start <= at.cast_unsigned() && at.cast_unsigned() < m.end);
            if let Some(m) = shown {
                self.shown.insert((m.device, m.inode), file);
            }
        }
        registers.rax = at.cast_unsigned();
        registers.orig_rax = u64::MAX;
        let mask = injection.mask();
        injection.finish_with(&registers, mask)?.resume(0)
    }
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Self {
        Self::Link(error.into())
    }
}
