//! Calls that guests ask for, made by their deputies.
//!
//! A call is made only for the life that home has recorded, once, and only when that life has seen every
//! signal that was sent to it: otherwise it is told to take the signal first and call again, as a signal that
//! arrives just before a call does natively.

use crate::back::made;
use crate::family::Family;
use crate::member::{Current, Member, State};
use std::time::Instant;
use tern_ids::HomePid;
use tern_image::layout::Files;
use tern_image::{FileRef, Reserve};
use tern_migrate::message::{CallRequest, CallResult, Message};
use tern_syscall::{Arg, Layout, Outcome};
use tern_tracee::procfs;
use tern_tracee::registers::restart;
use tern_tracee::stop::Stopped;

/// The number of calls that are ours and not the program's.
const OURS: u64 = u64::MAX;

/// What a rejected call looks like to the program.
fn refused(number: u64, errno: i32) -> CallResult {
    let outcome = Outcome { ret: -i64::from(errno), outs: Vec::new() };
    CallResult { number, outcome, child: None, file: None }
}

impl Family {
    /// Takes a call from the guest of `pid`.
    pub(crate) fn called(&mut self, pid: HomePid, request: CallRequest) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.homecoming_reason_is_old();
        tracing::trace!(%pid, request.number, nr = request.call.nr, ?request.epoch, ?member.epoch, state = member.state_name(), last = ?member.last.as_ref().map(|l| l.number), current = ?member.current.as_ref().map(|c| c.request.number), "a call");
        if request.epoch != member.epoch || !member.is_away() {
            return;
        }
        if member.current.as_ref().is_some_and(|c| c.request.number == OURS) {
            // In a moment: the deputy makes a call for us.
            member.next_call = Some(request);
            return;
        }
        // An earlier life may still be remembered by its results; whoever calls runs.
        if let Some(last) = member.last.as_ref().filter(|last| last.number == request.number) {
            let again = Message::Result(Box::new(last.clone()));
            self.tell(pid, &again);
            return;
        }
        if member.current.as_ref().is_some_and(|c| c.request.number == request.number) {
            return;
        }
        while member.unheard.front().is_some_and(|(count, _)| *count <= request.signals) {
            member.unheard.pop_front();
        }
        let number = request.number;
        if !member.unheard.is_empty() {
            let mut crossed = refused(number, 0);
            crossed.outcome.ret = request.resumes.filter(|c| restart::is(*c)).unwrap_or(restart::NOINTR);
            self.tell(pid, &Message::Result(Box::new(crossed)));
            return;
        }
        if !has_two_parts(request.call.nr) && self.freezes(pid, number, false) {
            return;
        }
        match self.post(pid, request) {
            Ok(true) => self.ended(pid),
            Ok(false) => {}
            Err(errno) => self.tell(pid, &Message::Result(Box::new(refused(number, errno)))),
        }
    }

    /// Has the deputy make a call; true if it has ended already.
    pub(crate) fn post(&mut self, pid: HomePid, mut request: CallRequest) -> std::result::Result<bool, i32> {
        let member = self.members.get_mut(&pid).ok_or(libc::ESRCH)?;
        member.adapt(&mut request.call);
        let layout = request.call.clone().lay_out().map_err(|malformed| {
            tracing::warn!(%pid, %malformed, "a guest sent a call that is none");
            libc::ENOSYS
        })?;
        if member.mailbox.as_ref().is_some_and(|mailbox| !mailbox.fits(layout.size())) {
            let room = self.with_deputy(pid, |member, stopped| member.make_room(stopped, layout.size()));
            room.map_err(|_e| libc::ENOMEM)?;
        }
        self.members.get_mut(&pid).ok_or(libc::ESRCH)?.post(request, layout)
    }

    /// Looks for calls that have ended.
    pub(crate) fn collect_ended(&mut self) {
        if self.rung {
            self.bell.clear();
        }
        let ended: Vec<HomePid> = self.members.values().filter(|m| m.has_ended()).map(|m| m.pid).collect();
        for pid in ended {
            self.ended(pid);
        }
    }

    /// The call of `pid` has ended: its result goes to the guest.
    fn ended(&mut self, pid: HomePid) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        if matches!(member.state, State::Lingering(_)) {
            self.finish_lingering(pid);
            return;
        }
        let (Some(current), Some(mailbox)) = (member.current.take(), &mut member.mailbox) else { return };
        let outcome = mailbox.collect(&current);
        if current.request.number == OURS {
            member.follow_mask();
            if let Some(next) = member.next_call.take() {
                self.called(pid, next);
            }
            return;
        }
        member.calls[0] += 1;
        member.calls[1] += current.request.call.carries() + outcome.carries();
        let mut result = made(&current, outcome);
        let mut surplus = None;
        if i64::from(current.request.call.nr) == libc::SYS_mmap && result.outcome.ret >= 0 {
            (result.file, surplus) = member.mapped(result.outcome.ret.cast_unsigned(), &current.request);
        }
        tracing::trace!(%pid, result.number, result.outcome.ret, "its result");
        member.last = Some(result.clone());
        member.follow_mask();
        // What has a part to be done where the program runs cannot be left half done; and a guest that has been sent a
        // signal cannot be halted before it has the result of the call that the signal interrupted.
        let bound = has_two_parts(current.request.call.nr) || !member.unheard.is_empty();
        let number = result.number;
        if bound || !self.freezes(pid, number, true) {
            self.tell(pid, &Message::Result(Box::new(result)));
        }
        if bound && (self.freezes(pid, number, true) || self.freezes(pid, number, false)) {
            tracing::debug!(%pid, number, "it comes home right behind this call");
        }
        if let Some((start, length)) = surplus
            && let Err(error) = self.with_deputy(pid, |member, stopped| member.unmap(stopped, start, length))
        {
            self.lost(pid, &error);
        }
    }

    /// Fetches a process home at this call, if a test has asked for that.
    fn freezes(&mut self, pid: HomePid, number: u64, made: bool) -> bool {
        let members = &self.members;
        let away = || members.get(&pid).is_some_and(|m| matches!(m.state, State::Away));
        let Some(freeze) = self.freeze.take_if(|f| (f.number, f.made) == (number, made) && away()) else {
            return false;
        };
        freeze.reached();
        self.fetch(pid, "a test");
        true
    }

    pub(crate) fn finish_lingering(&mut self, pid: HomePid) {
        match self.with_deputy(pid, Member::linger_ended) {
            Ok(Some(stopped)) => self.let_go(pid, stopped, 0),
            Ok(None) => {}
            Err(error) => self.lost(pid, &error),
        }
    }
}

impl Member {
    /// Whether its deputy has made a call whose result has not been taken.
    fn has_ended(&self) -> bool {
        self.current.is_some() && self.mailbox.as_ref().is_some_and(crate::mailbox::Mailbox::is_done)
    }

    /// Follows the program's mask, which was changed where it runs: by the return of a handler, or known anew
    /// after a journey. A deputy that is in a call follows when that has ended.
    pub(crate) fn set_mask(&mut self, mask: u64) {
        self.mask_due = Some(mask);
        self.follow_mask();
    }

    /// The deputy makes this call for us; nobody waits for its result. It may end in a stop, for a signal that is
    /// unblocked by it, so it is not waited for here.
    fn follow_mask(&mut self) {
        let (Some(mailbox), None) = (&mut self.mailbox, &self.current) else { return };
        let Some(mask) = self.mask_due.take() else { return };
        let set = Arg::Bytes(tern_syscall::ByteBuf::from(mask.to_le_bytes().to_vec()));
        let how = Arg::Value(libc::SIG_SETMASK as u64);
        let args = [how, set, Arg::Value(0), Arg::Value(8), Arg::Value(0), Arg::Value(0)];
        let call = tern_syscall::Call { nr: libc::SYS_rt_sigprocmask as u32, args };
        let request =
            CallRequest { epoch: self.epoch, number: OURS, signals: 0, resumes: None, call: call.clone() };
        let Ok(layout) = call.lay_out() else { return };
        if mailbox.post(&layout).is_ok() {
            mailbox.ring_later();
            self.current =
                Some(Current { request, layout, since: Instant::now(), partial: None, child: None });
        }
    }

    fn homecoming_reason_is_old(&mut self) {
        if self.is_away() && !self.reason.is_empty() && self.homecomings.is_empty() {
            self.reason.clear();
        }
    }

    /// Has the deputy make a call, for which there is room; true if it has ended already.
    fn post(&mut self, request: CallRequest, layout: Layout) -> std::result::Result<bool, i32> {
        let mailbox = self.mailbox.as_mut().ok_or(libc::ESRCH)?;
        mailbox.post(&layout)?;
        let waits = forks_or_ends(request.call.nr);
        self.current = Some(Current { request, layout, since: Instant::now(), partial: None, child: None });
        // A fork's event must be seen to before it can end.
        if !waits && mailbox.soon() {
            return Ok(true);
        }
        mailbox.ring_later();
        Ok(false)
    }

    /// Makes room for a large call in the standing deputy; it goes on afterwards.
    fn make_room(&mut self, stopped: Stopped, size: usize) -> tern_tracee::Result<()> {
        let mut injection = self.injection(stopped)?.0;
        let made = self.mailbox.as_mut().map_or(Ok(()), |mailbox| mailbox.grow(&mut injection, size));
        let stopped = injection.finish()?;
        self.go_on(stopped).and(made)
    }

    /// Has the standing deputy remove a mapping; it goes on afterwards.
    fn unmap(&mut self, stopped: Stopped, start: u64, length: u64) -> tern_tracee::Result<()> {
        let mut injection = self.injection(stopped)?.0;
        let _gone_already = injection.call(libc::SYS_munmap, [start, length, 0, 0, 0, 0])?;
        let stopped = injection.finish()?;
        self.go_on(stopped)
    }

    /// Changes a call with a local part into what home's part of it is.
    fn adapt(&mut self, call: &mut tern_syscall::Call) {
        match i64::from(call.nr) {
            // Handlers are the guest's: here the signal has its default action, and is forwarded.
            libc::SYS_rt_sigaction => {
                let [Arg::Value(signal), Arg::Bytes(action), ..] = &mut call.args else { return };
                let Some(known) = self.actions.get_mut((*signal as usize).wrapping_sub(1)) else { return };
                if let Some((words, [])) = action.as_chunks::<8>().into() {
                    for (word, bytes) in known.iter_mut().zip(words) {
                        *word = u64::from_le_bytes(*bytes);
                    }
                }
                if known[0] > 1
                    && !tern_image::process::is_ignored_by_default(*signal as i32)
                    && let Some(handler) = action.get_mut(..8)
                {
                    handler.fill(0);
                }
            }
            // The child's memory and ids are the guest's affair; here it is a plain child.
            libc::SYS_clone | libc::SYS_vfork | libc::SYS_fork => {
                call.nr = libc::SYS_fork as u32;
                call.args = [const { Arg::Value(0) }; 6];
            }
            // Any address will do: the mapping only holds the file for the way home.
            libc::SYS_mmap => {
                call.args[0] = Arg::Value(Reserve::AREA + (2 << 32) + self.holders);
                if let Arg::Value(length) = call.args[1] {
                    self.holders = (self.holders + length.next_multiple_of(1 << 20)) % (1 << 40);
                }
                if let Arg::Value(flags) = &mut call.args[3] {
                    *flags &= !((libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) as u64);
                }
            }
            _ => {}
        }
    }

    /// The file of a mapping that the deputy has just made; and the mapping, if the file is mapped elsewhere as
    /// well: once is enough.
    fn mapped(&mut self, at: u64, request: &CallRequest) -> (Option<FileRef>, Option<(u64, u64)>) {
        let Ok(maps) = procfs::maps(self.pid.0) else { return (None, None) };
        let Some(mapping) = maps.iter().find(|m| m.start <= at && at < m.end && m.inode != 0) else {
            return (None, None);
        };
        let same = |m: &&procfs::Mapping| (m.device, m.inode) == (mapping.device, mapping.inode);
        let surplus = match request.call.args[1] {
            Arg::Value(length) if maps.iter().filter(same).count() > 1 => Some((at, length)),
            _ => None,
        };
        (self.files.identify(mapping).ok(), surplus)
    }
}

/// Whether a call is done at home and where the program runs as well.
fn has_two_parts(nr: u32) -> bool {
    let two = [libc::SYS_mmap, libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn];
    let forks = [libc::SYS_clone, libc::SYS_clone3, libc::SYS_vfork];
    two.contains(&i64::from(nr)) || forks.contains(&i64::from(nr)) || forks_or_ends(nr)
}

fn forks_or_ends(nr: u32) -> bool {
    let nr = i64::from(nr);
    [libc::SYS_fork, libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group].contains(&nr)
}
