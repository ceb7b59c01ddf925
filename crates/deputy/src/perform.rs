//! Calls that guests ask for, made by their deputies.
//!
//! A call is made only for the life that home has recorded, once, and only when that life has seen every
//! signal that was sent to it: otherwise it is told to take the signal first and call again, as a signal that
//! arrives just before a call does natively.

use crate::begins;
use crate::chain::{Chain, may_be_errand};
use crate::due::Of;
use crate::family::Family;
use crate::member::{Member, State};
use crate::settle::made;
use crate::thread::{Current, Thread};
use tern_ids::{Epoch, HomePid};
use tern_image::Reserve;
use tern_image::layout::Files;
use tern_image::object::{self, ObjectId};
use tern_migrate::message::{CallRequest, CallResult, Mapped, Message};
use tern_syscall::{Arg, Outcome};
use tern_tracee::registers::restart;
use tern_tracee::stop::Stopped;
use tern_tracee::{PAGE, procfs};

/// The number of calls that are ours and not the program's.
const OURS: u64 = u64::MAX;

/// Where mappings are wanted that only hold a file for the way home. The program may have mapped something there itself: then
/// they are elsewhere.
const HOLDERS: u64 = Reserve::AREA + (2 << 32);

/// The mask that a call of ours is to set.
fn mask_of(request: &CallRequest) -> Option<u64> {
    let Arg::Bytes(mask) = &request.call.args[1] else { return None };
    Some(u64::from_le_bytes(mask.as_slice().try_into().ok()?))
}

/// A call of ours, of which nobody hears.
pub(crate) fn ours(call: tern_syscall::Call) -> CallRequest {
    let (before, resumes, view) = (Vec::new(), None, None);
    CallRequest { epoch: Epoch(0), number: OURS, signals: 0, resumes, before, brings: 0, call, view }
}

/// What a rejected call looks like to the program.
pub(crate) fn refused(number: u64, errno: i32) -> CallResult {
    let outcome = Outcome { ret: -i64::from(errno), outs: Vec::new() };
    CallResult::new(number, outcome)
}

impl Family {
    /// Takes a call from the guest of a thread.
    pub(crate) fn called(&mut self, tid: HomePid, request: CallRequest) {
        let Some(member) = self.of_thread(tid) else { return };
        member.homecoming_reason_is_old();
        let (pid, epoch, away, number) = (member.pid, member.epoch, member.is_away(), request.number);
        let Some(thread) = member.threads.get_mut(&tid) else { return };
        tracing::trace!(%tid, request.number, nr = request.call.nr, ?request.epoch, ?epoch, last = ?thread.last.as_ref().map(|l| l.number), current = ?thread.current.as_ref().map(|c| c.request.number), "a call");
        if request.epoch != epoch || !away || thread.ending {
            return;
        }
        if thread.current.as_ref().is_some_and(|c| c.request.number == OURS) {
            // In a moment: the deputy makes a call for us.
            thread.next_call = Some(request);
            return;
        }
        // An earlier life may still be remembered by its results; whoever calls runs.
        if let Some(last) = thread.last.as_ref().filter(|last| last.number == request.number) {
            let again = Message::Result(Box::new(last.clone()));
            self.tell(tid, &again);
            return;
        }
        if let Some(current) = thread.current.as_ref().filter(|c| c.request.number == request.number) {
            let (chain, number) = (&current.chain, request.number);
            if !chain.goes_on() && !chain.done.is_empty() {
                // It may have been said into a link that was cut.
                let done = Message::Before(number, chain.done.clone());
                self.tell(tid, &done);
            }
            return;
        }
        thread.heard(request.signals);
        if !thread.unheard.is_empty() {
            let mut crossed = refused(number, 0);
            crossed.outcome.ret = request.resumes.filter(|c| restart::is(*c)).unwrap_or(restart::NOINTR);
            self.tell(tid, &Message::Result(Box::new(crossed)));
            return;
        }
        self.may_lead_elsewhere(pid, &request.call);
        let at_home = self.touches_shared(tid, &request);
        let sharer = at_home.or_else(|| self.takes_shared_along(tid, &request));
        let alone = sharer.is_some() && !request.before.is_empty();
        if let Some(sharer) = sharer.filter(|_| !alone) {
            return self.make_it_at_home(tid, sharer, &request);
        }
        let bound = has_two_parts(request.call.nr) || may_be_errand(request.call.nr);
        // What comes first has to be made once it is here, and then the call is under way.
        if !bound && self.freezes(tid, number, false) && request.before.is_empty() {
            return;
        }
        if let Some(outcome) = self.timer_call(pid, tid, &request.call) {
            let made = CallResult::new(number, outcome);
            if let Some(thread) = self.of_thread(tid).and_then(|member| member.threads.get_mut(&tid)) {
                thread.last = Some(made.clone());
            }
            self.tell(tid, &Message::Result(Box::new(made)));
            return self.look_at_timers(pid, Of::All);
        }
        match self.post(tid, request, alone) {
            Ok(true) => self.ended(tid),
            Ok(false) => self.see_it_end(tid),
            Err(errno) => self.tell(tid, &Message::Result(Box::new(refused(number, errno)))),
        }
    }

    /// A thread among others that has been asked to exit never answers, and cannot refuse either: its guest may do the
    /// same. The kernel would not tell us of the end of the first thread before that of the last.
    pub(crate) fn see_it_end(&mut self, tid: HomePid) {
        let Some(member) = self.of_thread(tid) else { return };
        let current = member.threads.get(&tid).and_then(|thread| thread.current.as_ref());
        let exits = current.is_some_and(|current| i64::from(current.request.call.nr) == libc::SYS_exit);
        if exits
            && member.living().any(|thread| thread.tid != tid)
            && let Some(thread) = member.threads.get_mut(&tid)
        {
            thread.ending = true;
            member.look_past(tid);
            self.tell(tid, &Message::ThreadEnded);
        }
    }

    /// Looks for calls that have ended.
    pub(crate) fn collect_ended(&mut self) {
        if self.rung {
            self.bell.clear();
        }
        let threads = self.members.values().flat_map(|member| member.threads.values());
        let ended: Vec<HomePid> = threads.filter(|t| t.has_ended()).map(|t| t.tid).collect();
        for tid in ended {
            self.ended(tid);
        }
    }

    /// The call of a thread has ended: its result goes to the guest.
    pub(crate) fn ended(&mut self, tid: HomePid) {
        if !self.go_through_chain(tid) {
            return;
        }
        let Some(member) = self.of_thread(tid) else { return };
        let pid = member.pid;
        let Some(thread) = member.threads.get_mut(&tid) else { return };
        if thread.lingering.is_some() {
            self.finish_lingering(tid);
            return;
        }
        let (Some(current), Some(mailbox)) = (thread.current.take(), &mut thread.mailbox) else { return };
        let outcome = mailbox.collect(&current);
        if current.request.number == OURS {
            let brought = thread.brought.take();
            // Called off for a signal that came before it was begun, it has not been made. A later mask goes before it.
            if restart::is(outcome.ret) {
                thread.mask_due = thread.mask_due.or(mask_of(&current.request));
            }
            thread.follow_mask();
            if let Some(brought) = brought {
                self.bring(tid, *brought, &outcome);
            }
            let thread = self.of_thread(tid).and_then(|member| member.threads.get_mut(&tid));
            if let Some(next) = thread.and_then(|thread| thread.next_call.take()) {
                self.called(tid, next);
            }
            return;
        }
        let mut result = made(&current, outcome);
        self.hear_of_files(pid, &current, &mut result);
        self.has_looked(pid, tid, &current, &result.outcome);
        self.add_children(pid, &current.request.call, &mut result.outcome);
        self.take_what_it_sent(&current.request.call);
        let look = self.timer_called(pid, tid, &current.request.call, &result.outcome);
        let Some(member) = self.of_thread(tid) else { return };
        let nr = current.request.call.nr;
        let carried = current.request.call.carries() + result.outcome.carries();
        let mut surplus = None;
        if i64::from(nr) == libc::SYS_mmap && result.outcome.ret >= 0 {
            (result.file, surplus) = member.mapped(result.outcome.ret.cast_unsigned(), &current.request);
            if let Some(Mapped::File(file)) = &result.file
                && file.live
            {
                let id = (file.device, file.inode);
                let opened = member.open_object(id).and_then(|file| self.keep_object(id, file));
                if let Err(error) = opened {
                    tracing::warn!(%tid, %error, "what it shares cannot be opened");
                    let (at, request) = (result.outcome.ret.cast_unsigned(), &current.request);
                    let length = if let Arg::Value(length) = request.call.args[1] { length } else { 0 };
                    let unmapped = self.with_deputy(tid, |member, stopped| member.unmap(stopped, at, length));
                    if let Err(error) = unmapped {
                        self.lost(tid, &error);
                    }
                    return self.make_it_at_home(tid, pid, &current.request);
                }
            }
        }
        let view = current.request.view.as_ref().filter(|_| result.outcome.ret >= 0);
        if let Some(view) = view
            && let Err(error) =
                self.with_deputy(tid, |member, stopped| member.show_own(stopped, result.outcome.ret, view))
        {
            self.lost(tid, &error);
            return;
        }
        let Some(member) = self.of_thread(tid) else { return };
        member.calls[0] += 1;
        member.calls[1] += carried;
        let Some(thread) = member.threads.get_mut(&tid) else { return };
        tracing::trace!(%tid, result.number, result.outcome.ret, "its result");
        thread.last = Some(begins::without_beginning(&result));
        thread.follow_mask();
        // What has a part to be done where the program runs cannot be left half done; and a guest that has been sent a
        // signal cannot be halted before it has the result of the call that the signal interrupted.
        let bound = has_two_parts(nr) || may_be_errand(nr) || !thread.unheard.is_empty();
        let number = result.number;
        if self.freeze.is_some() && !result.before.is_empty() {
            self.tell(tid, &Message::Before(number, result.before.clone()));
        }
        let brings = |family: &mut Self| !bound && family.brings_beginning(tid, &current, &result);
        if bound || !self.freezes(tid, number, true) && !brings(self) {
            self.tell(tid, &Message::Result(Box::new(result)));
        }
        if bound && (self.freezes(tid, number, true) || self.freezes(tid, number, false)) {
            tracing::debug!(%tid, number, "it comes home right behind this call");
        }
        if let Some((start, length)) = surplus
            && let Err(error) = self.with_deputy(tid, |member, stopped| member.unmap(stopped, start, length))
        {
            self.lost(tid, &error);
        }
        if look {
            self.look_at_timers(pid, Of::All);
        }
    }

    /// Takes the result of a thread's call, if it has ended, for when it is home.
    pub(crate) fn take_result(&mut self, pid: HomePid, tid: HomePid) {
        let Some(thread) = self.members.get_mut(&pid).and_then(|m| m.threads.get_mut(&tid)) else { return };
        if let Some(mailbox) = &mut thread.mailbox
            && let Some(current) = thread.current.take_if(|_| mailbox.is_done())
        {
            let mut result = made(&current, mailbox.collect(&current));
            // Not in the place of the last result of the program's own: that may not have been delivered.
            if result.number == OURS {
                return;
            }
            self.may_lead_elsewhere(pid, &current.request.call);
            self.add_children(pid, &current.request.call, &mut result.outcome);
            if let Some(member) = self.members.get_mut(&pid)
                && let Some(thread) = member.threads.get_mut(&tid)
            {
                thread.last = Some(result);
            }
        }
    }

    /// Fetches a process home at this call, if a test has asked for that.
    fn freezes(&mut self, tid: HomePid, number: u64, made: bool) -> bool {
        let members = &self.members;
        let away = || members.get(&tid).is_some_and(|m| matches!(m.state, State::Away));
        let Some(freeze) = self.freeze.take_if(|f| (f.number, f.made) == (number, made) && away()) else {
            return false;
        };
        freeze.reached();
        self.fetch(tid, "a test");
        true
    }
}

impl Thread {
    /// Follows the program's mask, which was changed where it runs: by the return of a handler, or known anew
    /// after a journey. A deputy that is in a call follows when that has ended.
    pub(crate) fn set_mask(&mut self, mask: u64) {
        self.mask_due = Some(mask);
        self.follow_mask();
    }

    /// The deputy makes this call for us; nobody waits for its result. It may end in a stop, for a signal that is
    /// unblocked by it, so it is not waited for here.
    pub(crate) fn follow_mask(&mut self) {
        let (Some(mailbox), None) = (&mut self.mailbox, &self.current) else { return };
        let Some(mask) = self.mask_due.take() else { return };
        let set = Arg::Bytes(tern_syscall::ByteBuf::from(mask.to_le_bytes().to_vec()));
        let how = Arg::Value(libc::SIG_SETMASK as u64);
        let args = [how, set, Arg::Value(0), Arg::Value(8), Arg::Value(0), Arg::Value(0)];
        let call = tern_syscall::Call { nr: libc::SYS_rt_sigprocmask as u32, args };
        let request = ours(call.clone());
        let Ok(layout) = call.lay_out() else { return };
        if mailbox.post(&layout).is_ok() {
            mailbox.ring_later();
            self.current = Some(Current::new(request, layout, false, Chain::default()));
        }
    }
}

impl Member {
    fn homecoming_reason_is_old(&mut self) {
        if self.is_away() && !self.reason.is_empty() && self.homecomings.is_empty() {
            self.reason.clear();
        }
    }

    /// Makes room for a large call in the standing deputy; it goes on afterwards.
    pub(crate) fn make_room(&mut self, stopped: Stopped, size: usize) -> tern_tracee::Result<()> {
        let tid = HomePid(stopped.pid());
        let (mut injection, reserve) = self.injection(stopped)?;
        let mailbox = self.thread(tid)?.mailbox.as_mut();
        let made = mailbox.map_or(Ok(()), |mailbox| mailbox.grow(&mut injection, reserve, size));
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
    pub(crate) fn adapt(&mut self, call: &mut tern_syscall::Call) {
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
            // Its stack and its words for its number are the guest's affair.
            libc::SYS_clone if is_thread(call) => {
                let shared = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND;
                let flags = shared | libc::CLONE_THREAD | libc::CLONE_SYSVSEM;
                call.args = [const { Arg::Value(0) }; 6];
                call.args[0] = Arg::Value(flags as u64);
            }
            // The child's memory and ids are too. Here it is a child with what concerns the system: whose it is, what
            // it shares, the signal of its end.
            libc::SYS_clone => {
                let away = libc::CLONE_VM
                    | libc::CLONE_VFORK
                    | libc::CLONE_SETTLS
                    | libc::CLONE_PARENT_SETTID
                    | libc::CLONE_CHILD_SETTID
                    | libc::CLONE_CHILD_CLEARTID
                    | libc::CLONE_UNTRACED;
                let [flags, stack, _pidfd, child_tid, tls, _] = &mut call.args;
                if let Arg::Value(flags) = flags {
                    *flags &= u64::from(u32::MAX) & !u64::from(away.cast_unsigned());
                }
                for other in [stack, child_tid, tls] {
                    *other = Arg::Value(0);
                }
            }
            libc::SYS_clone3 | libc::SYS_vfork | libc::SYS_fork => {
                call.nr = libc::SYS_fork as u32;
                call.args = [const { Arg::Value(0) }; 6];
            }
            // Any address will do: the mapping only holds the file for the way home.
            libc::SYS_mmap => {
                let all = self.holders.iter().copied().chain(self.holders_to_be());
                let mebibytes: u64 = all.map(|(start, end)| ((end - start) >> 20) + 1).sum();
                call.args[0] = Arg::Value(HOLDERS + ((mebibytes % (1 << 20)) << 20));
                if let Arg::Value(flags) = &mut call.args[3] {
                    *flags &= !((libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) as u64);
                }
            }
            _ => {}
        }
    }

    /// Where mappings are just being made that hold files for the way home, or are there and not known yet.
    pub(crate) fn holders_to_be(&self) -> impl Iterator<Item = (u64, u64)> {
        let calls = self.threads.values().filter_map(|thread| Some(&thread.current.as_ref()?.request.call));
        calls.filter(|call| i64::from(call.nr) == libc::SYS_mmap).filter_map(|call| match call.args {
            [Arg::Value(at), Arg::Value(length), ..] => Some((at, at.saturating_add(length))),
            _ => None,
        })
    }

    /// Opens shared memory that it maps.
    fn open_object(&self, id: ObjectId) -> std::io::Result<std::fs::File> {
        let maps = procfs::maps(self.memory.pid()).map_err(std::io::Error::other)?;
        let mapping = maps.iter().find(|m| m.shared && object::id(m) == id);
        self.files.open_object(mapping.ok_or(std::io::ErrorKind::NotFound)?)
    }

    /// The file of a mapping that the deputy has just made; and the mapping, if another holds the file as well: once is
    /// enough.
    fn mapped(&mut self, at: u64, request: &CallRequest) -> (Option<Mapped>, Option<(u64, u64)>) {
        let Ok(maps) = procfs::maps(self.memory.pid()) else { return (None, None) };
        let Some(mapping) = maps.iter().find(|m| m.start <= at && at < m.end && !m.is_anonymous()) else {
            tracing::warn!(pid = %self.pid, at, "what it maps away is not seen here");
            return (None, None);
        };
        let held = maps.iter().any(|m| {
            (m.device, m.inode) == (mapping.device, mapping.inode)
                && self.holders.iter().any(|(start, end)| m.start < *end && *start < m.end)
        });
        // Memory without a file that nobody has yet, but for this process, to share with children.
        const SHARED: u64 = (libc::MAP_SHARED | libc::MAP_ANONYMOUS) as u64;
        if matches!(request.call.args[3], Arg::Value(flags) if flags & SHARED == SHARED) {
            self.files.objects.insert(object::id(mapping));
        }
        if !self.files.is_live(mapping) {
            self.files.mapped(mapping);
        }
        let mapped = match self.files.identify(mapping) {
            Ok(file) => Some(file.map_or(Mapped::Zero, Mapped::File)),
            Err(why) => {
                tracing::warn!(pid = %self.pid, %why, "a file that it maps away cannot be read");
                None
            }
        };
        let Arg::Value(length) = request.call.args[1] else { return (mapped, None) };
        if held || mapped == Some(Mapped::Zero) {
            return (mapped, Some((at, length)));
        }
        self.holders.push((at, at + length.next_multiple_of(PAGE)));
        (mapped, None)
    }
}

/// Whether this clone is to make a thread.
pub(crate) fn is_thread(call: &tern_syscall::Call) -> bool {
    let wanted = libc::CLONE_THREAD as u64;
    i64::from(call.nr) == libc::SYS_clone && matches!(call.args[0], Arg::Value(flags) if flags & wanted != 0)
}

/// Whether this call is to make a child that runs in its parent's memory.
pub(crate) fn lends_memory(call: &tern_syscall::Call) -> bool {
    let wanted = libc::CLONE_VM as u64;
    match i64::from(call.nr) {
        libc::SYS_vfork => true,
        libc::SYS_clone => matches!(call.args[0], Arg::Value(flags) if flags & wanted != 0),
        _ => false,
    }
}

/// Whether a call is done at home and where the program runs as well.
fn has_two_parts(nr: u32) -> bool {
    let two = [libc::SYS_mmap, libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn];
    let forks = [libc::SYS_clone3, libc::SYS_vfork];
    two.contains(&i64::from(nr)) || forks.contains(&i64::from(nr)) || forks_or_ends(nr)
}

pub(crate) fn forks_or_ends(nr: u32) -> bool {
    let nr = i64::from(nr);
    let ends = [libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group];
    [libc::SYS_fork, libc::SYS_clone].contains(&nr) || ends.contains(&nr)
}
