//! What home says, and the shims of earlier lives.

use crate::family::Family;
use crate::forward::Failed;
use crate::member::{Member, Process, State};
use crate::thread::OpenCall;
use std::time::Instant;
use tern_ids::HomePid;
use tern_migrate::message::{Arrived, Message};
use tern_syscall::{Outcome, Route, Special, route};
use tern_tracee::siginfo::Siginfo;

/// After so many signals, home is told that they are taken over: until then it keeps them.
const TELL_EVERY: u64 = 64;

impl Family {
    pub(crate) fn take_messages(&mut self) {
        // A few at a time: a link that is never idle must not keep us from our other duties.
        for _ in 0..64 {
            if !self.home_ready {
                break;
            }
            let Some(home) = &mut self.home else { break };
            let taken = match home.receive() {
                Ok(Some(frame)) => {
                    let taken = self.inbox.take(frame).map_err(|e| e.to_string());
                    home.recycle(self.inbox.spare());
                    taken
                }
                Ok(None) => break,
                Err(error) => Err(error.to_string()),
            };
            self.heard = Instant::now();
            match taken {
                Ok(Some(arrived)) => self.take_message(arrived),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(error, "the link to home is cut");
                    self.lose_home();
                }
            }
        }
        self.take_from_sources();
        self.take_from_next();
    }

    pub(crate) fn take_from_sources(&mut self) {
        let mut sources = std::mem::take(&mut self.sources);
        sources.retain_mut(|source| {
            for _ in 0..64 {
                match source.link.receive() {
                    Ok(Some(frame)) => match source.inbox.take(frame) {
                        Ok(Some(Arrived { pid, message: Message::Brings(life), .. })) => {
                            source.brings = Some((pid, life));
                        }
                        Ok(Some(arrived)) => {
                            let pid = arrived.pid;
                            let life = self.members.get(&pid).map(|member| (pid, member.process.epoch));
                            // One whose program has executed another meanwhile comes from home, and what it had sent
                            // before is still under way here.
                            if life.is_none() || source.brings != life {
                                continue;
                            }
                            if let Err(error) = self.receive_part(arrived, Some(&mut source.link)) {
                                tracing::warn!(%pid, %error, "an arrival failed");
                                self.decline(pid, &error.to_string());
                            }
                        }
                        Ok(None) => {}
                        Err(_) => return false,
                    },
                    Ok(None) => return true,
                    Err(_) => return false,
                }
            }
            true
        });
        self.sources.append(&mut sources);
    }

    pub(crate) fn take_message(&mut self, arrived: Arrived) {
        if arrived.message.is_of_a_thread() {
            // Of one that has ended here, or that has never been, nobody waits for anything.
            if let Some(pid) = self.of_thread(arrived.pid).or_else(|| self.of_arriving(arrived.pid))
                && let Err(error) = self.take_word_for_thread(pid, arrived)
            {
                self.failed(pid, &error);
            }
            return;
        }
        let pid = arrived.pid;
        let failed = match &arrived.message {
            Message::Offer(offer) => self.offered(offer),
            Message::Crew(_)
            | Message::Space(_)
            | Message::File { .. }
            | Message::Object { .. }
            | Message::Pages(_)
            | Message::Forget(_)
            | Message::Image(..) => {
                let done = self.receive_part(arrived, None);
                if let Err(error) = done {
                    tracing::warn!(%pid, %error, "an arrival failed");
                    self.decline(pid, &error.to_string());
                }
                Ok(())
            }
            Message::Go(epoch) => self.go(pid, *epoch),
            Message::GoTogether(lives) => {
                self.go_together(lives);
                Ok(())
            }
            Message::Depart(departure) => self.depart(pid, departure),
            Message::Clocks(home) => {
                self.clocks.heard(*home);
                self.tell(HomePid(0), &Message::Beat);
                Ok(())
            }
            Message::Drop => {
                self.end(pid);
                Ok(())
            }
            Message::Thaw => self.thaw(pid),
            Message::Want(_, indices) => self.wanted(pid, indices),
            Message::Stop(stop) => self.job_control(pid, *stop),
            Message::Names(_) => {
                if let (Some(member), Message::Names(word)) = (self.members.get_mut(&pid), arrived.message) {
                    member.process.names.take(word);
                }
                return;
            }
            Message::Watch(at) => {
                if let Some(member) = self.members.get_mut(&pid) {
                    member.watch_for(None, *at);
                }
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(error) = failed {
            self.failed(pid, &error);
        }
    }

    /// A message for one thread of a guest.
    fn take_word_for_thread(&mut self, pid: HomePid, arrived: Arrived) -> Result<(), Failed> {
        let tid = arrived.pid;
        match &arrived.message {
            Message::Result(_) => self.result(pid, arrived),
            Message::Before(number, returned) => {
                if let Some(member) = self.members.get_mut(&pid) {
                    member.process.files.confirm(*number, returned);
                    let Process { hot, memory, reserve, .. } = &mut member.process;
                    hot.revoke(memory, *reserve)?;
                }
                Ok(())
            }
            Message::ThreadEnded => {
                let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
                if member.let_end(tid)? {
                    // What is sent was seen through it; home asks again in a moment.
                    self.stay(pid, Some("busy: its first thread is ending".into()));
                }
                Ok(())
            }
            Message::WatchThread(at) => {
                if let Some(member) = self.members.get_mut(&pid) {
                    member.watch_for(Some(tid), *at);
                }
                Ok(())
            }
            Message::Content { hash, offset } => {
                let Some(Member { process, threads }) = self.members.get_mut(&pid) else { return Ok(()) };
                let Some(thread) = threads.get_mut(&tid) else { return Ok(()) };
                thread.take_content(*hash, *offset, arrived.bytes(), process, &mut self.cache)
            }
            Message::Signal(count, info) => {
                let Some(Member { process, threads }) = self.members.get_mut(&pid) else { return Ok(()) };
                if let State::Arriving(arriving) = &mut process.state {
                    arriving.take_signal(tid, *count, info);
                    return Ok(());
                }
                // Whoever has sent it may have changed a file before.
                process.distrust()?;
                if let (Some(thread), Ok(info)) = (threads.get_mut(&tid), Siginfo::try_from(info.as_slice()))
                {
                    thread.raise(*count, info)?;
                    // Its calls say so too, but it may make none. What comes when its image is on its way is not in that, and is sent again to its
                    // next life, unless home believes that it has been heard of.
                    if count.is_multiple_of(TELL_EVERY) && matches!(process.state, State::Running) {
                        self.tell(tid, &Message::Heard(*count));
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn result(&mut self, pid: HomePid, arrived: Arrived) -> Result<(), Failed> {
        let tid = arrived.pid;
        let Message::Result(result) = arrived.message else { return Ok(()) };
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        if member.take_words(tid, &result, &self.beside) {
            return member.take_queued(self.home.as_mut());
        }
        let Some((open, result)) = member.answered(tid, *result)? else {
            return member.take_queued(self.home.as_mut());
        };
        match (route(open.trap.nr, &open.trap.args), result.child) {
            (Route::Both(Special::Fork), Some(child)) => {
                self.fork(pid, tid, &open, (child, &result.outcome));
                Ok(())
            }
            (Route::Both(Special::Thread), Some(child)) => {
                let Some(sandbox) = &self.sandbox else { return Ok(()) };
                let host = member.bear(tid, &open, (child, result.outcome.ret as i32), sandbox)?;
                self.note(pid, child, host);
                Ok(())
            }
            (Route::Both(Special::Fork | Special::Thread), None) => {
                let what = "home has made a child without a number".into();
                Err(tern_tracee::Error::Astray { what, pid: tid.0 }.into())
            }
            _ => {
                member.local_part(tid, open, result, &mut self.cache, self.home.as_mut())?;
                member.take_queued(self.home.as_mut())
            }
        }
    }

    fn fork(&mut self, pid: HomePid, tid: HomePid, open: &OpenCall, child: (HomePid, &Outcome)) {
        // It cannot go while it makes a child; home asks again in a moment.
        self.stay(pid, Some("busy: it is making a child".into()));
        let (Some(member), Some(sandbox)) = (self.members.get_mut(&pid), &self.sandbox) else { return };
        match member.fork(tid, open, child, sandbox) {
            Ok(forked) => {
                self.note(child.0, child.0, forked.process.host);
                self.members.insert(child.0, forked);
            }
            Err(error) => {
                tracing::error!(%error, "a fork failed here");
                self.tell(child.0, &Message::Died(libc::SIGKILL));
            }
        }
    }

    /// A wish that the main loop carries out: not all threads may be able to stand at once.
    fn job_control(&mut self, pid: HomePid, stop: bool) -> Result<(), Failed> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        member.process.held = stop;
        member.process.distrust()?;
        if !stop && matches!(member.process.state, State::Running) {
            member.go_on()?;
        }
        Ok(())
    }

    fn thaw(&mut self, pid: HomePid) -> Result<(), Failed> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        match member.process.state {
            State::Running => {
                member.process.held = false;
                member.go_on()?;
            }
            State::Frozen => member.live_on()?,
            State::Departing(_) => self.stay(pid, None),
            State::Arriving(_) => {}
        }
        Ok(())
    }
}
