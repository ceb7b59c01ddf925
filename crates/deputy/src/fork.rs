//! The home half of a fork: a real child of the real parent, a deputy itself; or a real thread.

use crate::blob;
use crate::family::Family;
use crate::mailbox::{Bell, Mailbox, Room};
use crate::member::{Member, State};
use crate::perform::is_thread;
use crate::thread::Thread;
use tern_ids::HomePid;
use tern_migrate::message::{CallResult, Message};
use tern_syscall::Outcome;
use tern_tracee::inject::{Injection, Site};
use tern_tracee::stop::{self, Stop, Stopped};
use tern_tracee::{Error, Result};

impl Family {
    /// A deputy has forked, or made a thread: what is new gets a mailbox of its own and waits for calls.
    pub(crate) fn forked(&mut self, tid: HomePid, stopped: Stopped) -> Result<()> {
        let new = HomePid(stopped.message()? as i32);
        let (cache, bell) = (self.start.cache_dir.clone(), self.bell.clone());
        let newborn = self.newborn.remove(&new.0);
        let Some(parent) = self.of_thread(tid) else { return stopped.resume(0) };
        let current = parent.threads.get(&tid).and_then(|thread| thread.current.as_ref());
        let thread = current.is_some_and(|current| is_thread(&current.request.call));
        let lent = current.is_some_and(|current| current.lends);
        let newborn = newborn.map_or_else(|| stop::wait_stop(new.0), Ok);
        let made = newborn.and_then(|newborn| match thread {
            true => parent.new_thread(new, newborn, bell).map(|()| None),
            false => parent.child(new, newborn, &cache, bell).map(Some),
        });
        match made {
            Ok(child) => {
                if let Some(current) = parent.threads.get_mut(&tid).and_then(|thread| thread.current.as_mut())
                {
                    current.child = Some(new);
                }
                if let Some(child) = child {
                    let child = Member { lent, ..child };
                    // One that had this number before has been waited for while its parent was at home.
                    parent.ended.remove(&child.own_pid);
                    self.members.insert(new, child);
                }
            }
            Err(error) => {
                tracing::error!(%error, %new, "a child could not be held");
                tern_tracee::pidfd::kill(if thread { parent.pid.0 } else { new.0 });
            }
        }
        stopped.resume(0)
    }

    /// A deputy thread has ended. If it was killed in the middle of a fork its guest makes its half all the same before it
    /// is dropped: the child is there, and outlives its parent.
    pub(crate) fn finish_fork(&mut self, tid: HomePid) {
        let thread = self.of_thread(tid).filter(|member| matches!(member.state, State::Away));
        let current = thread.and_then(|member| member.threads.get_mut(&tid)?.current.take());
        let Some((child, number)) = current.and_then(|c| Some((c.child?, c.request.number))) else { return };
        // Not a thread, which has ended with its process.
        let Some(ret) = self.members.get(&child).map(|member| i64::from(member.own_pid)) else { return };
        let outcome = Outcome { ret, outs: Vec::new() };
        let result = CallResult { child: Some(child), ..CallResult::new(number, outcome) };
        self.tell(tid, &Message::Result(Box::new(result)));
    }
}

impl Member {
    /// What a new child or thread needs to wait for calls.
    fn set_up(
        &self,
        mut stopped: Stopped,
        room: impl FnOnce(tern_image::Reserve) -> Room,
        bell: Bell,
    ) -> Result<Mailbox> {
        let pid = stopped.pid();
        let reserve = self.reserve.ok_or_else(|| Error::Astray { what: "forked at home".into(), pid })?;
        while stopped.stop != Stop::Interrupt {
            stopped.resume(0)?;
            stopped = stop::wait_stop(pid)?;
        }
        let mut injection = Injection::begin(stopped, Site(reserve.start + blob::call_site()))?;
        let mailbox = Mailbox::make(&mut injection, reserve, room(reserve), bell)?;
        let registers = Self::blob_registers(injection.before(), reserve, mailbox.room());
        let mask = injection.mask();
        injection.finish_with(&registers, mask)?.resume(0)?;
        Ok(mailbox)
    }

    fn new_thread(&mut self, tid: HomePid, stopped: Stopped, bell: Bell) -> Result<()> {
        let room = self.next_room();
        let mailbox = self.set_up(stopped, |_reserve| room, bell)?;
        self.threads.insert(tid, Thread { mailbox: Some(mailbox), ..Thread::at_home(tid)? });
        Ok(())
    }

    fn child(&self, pid: HomePid, stopped: Stopped, cache: &std::path::Path, bell: Bell) -> Result<Member> {
        let mailbox = self.set_up(stopped, Room::first, bell)?;
        let thread = Thread { mailbox: Some(mailbox), ..Thread::at_home(pid)? };
        Ok(Member {
            files: self.files.of_child(pid.0),
            command: self.command.clone(),
            uid: self.uid,
            state: State::Away,
            epoch: self.epoch,
            offered: self.epoch,
            peer: self.peer,
            reserve: self.reserve,
            machine: self.machine.clone(),
            threads: [(pid, thread)].into(),
            actions: self.actions.clone(),
            limits: self.limits,
            holders: self.holders.clone(),
            ..Member::at_home(pid, cache)?
        })
    }
}
