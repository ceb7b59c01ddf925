//! The home half of a fork: the deputy's child, which becomes a deputy itself, or its new thread.

use crate::calls::current::CurrentCall;
use crate::calls::kinds::{creates_process, creates_thread};
use crate::process::Process;
use crate::process::blob;
use crate::process::mailbox::{Mailbox, MailboxArea};
use crate::process::state::State;
use crate::process::thread::Thread;
use crate::shim::Shim;
use crate::waker::Waker;
use tern_ids::HomePid;
use tern_migrate::message::{CallResult, Message};
use tern_syscall::Outcome;
use tern_tracee::inject::{Injection, Site};
use tern_tracee::stop::{self, Stop, Stopped};
use tern_tracee::{Error, Result, procfs};

impl Shim {
    /// A deputy has forked or created a thread. The child or thread gets a mailbox and waits for
    /// calls.
    pub(crate) fn handle_fork(&mut self, tid: HomePid, stopped: Stopped) -> Result<()> {
        let new = HomePid(stopped.message()? as i32);
        let newborn = self.early_stops.remove(&new.0);
        if self.process_of_thread(tid).is_some() {
            self.set_up_newborn(tid, new, newborn.map_or_else(|| stop::wait_stop(new.0), Ok));
        }
        stopped.resume(0)
    }

    /// Sets up the new child or thread of a deputy thread, and records it with the thread's call.
    fn set_up_newborn(&mut self, tid: HomePid, new: HomePid, newborn: Result<Stopped>) {
        let (cache, waker) = (self.start.cache_dir.clone(), self.waker.clone());
        let Some(parent) = self.process_of_thread(tid) else { return };
        let current = parent.threads.get(&tid).and_then(|thread| thread.current.as_ref());
        let thread = current.is_some_and(|current| creates_thread(&current.request.call));
        let in_parent_memory = current.is_some_and(|current| current.child_in_parent_memory);
        let made = newborn.and_then(|newborn| match thread {
            true => parent.new_thread((new, tid), newborn, waker).map(|()| None),
            false => parent.new_child((new, tid), newborn, &cache, waker).map(Some),
        });
        match made {
            Ok(child) => {
                if let Some(current) = parent.threads.get_mut(&tid).and_then(|thread| thread.current.as_mut())
                {
                    current.child = Some(new);
                }
                if let Some(child) = child {
                    let child = Process { in_parent_memory, ..child };
                    parent.usage.forget_child(child.own_pid);
                    self.processes.insert(new, child);
                }
            }
            Err(error) => {
                tracing::error!(%error, %new, "a child could not be set up");
                tern_tracee::pidfd::kill(if thread { parent.pid.0 } else { new.0 });
            }
        }
    }

    /// Sets up the child of a thread that was killed in a fork before it could report the child: a
    /// killed thread makes no ptrace stop (`ptrace_stop`, kernel/signal.c). The child is stopped, or
    /// will be as soon as it gets a CPU. Its mailbox register, copied from its parent, names the
    /// thread that created it.
    fn adopt_unreported_child(&mut self, tid: HomePid) {
        let Some(process) = self.process_of_thread(tid) else { return };
        let parents = [process.pid.0, process.parent.0];
        let Some(thread) = process.threads.get(&tid) else { return };
        let is_unreported =
            |current: &CurrentCall| current.child.is_none() && creates_process(&current.request.call);
        let Some(area) = thread.mailbox.as_ref().map(|mailbox| mailbox.area().at) else { return };
        if !thread.current.as_ref().is_some_and(is_unreported) {
            return;
        }
        for child in parents.into_iter().flat_map(procfs::children) {
            let is_tracee = procfs::status(child).is_ok_and(|is| is.tracer == std::process::id() as i32);
            if self.processes.contains_key(&HomePid(child)) || !is_tracee {
                continue;
            }
            let newborn = self.early_stops.remove(&child).map_or_else(|| stop::wait_stop(child), Ok);
            let Ok(newborn) = newborn else { continue };
            if newborn.registers().is_ok_and(|registers| registers.rbx == area) {
                return self.set_up_newborn(tid, HomePid(child), Ok(newborn));
            }
            self.early_stops.insert(child, newborn);
        }
    }

    /// Kills new processes whose creator was killed with all its threads before it could report
    /// them. They have run no instruction of the program, so no other process can tell that they
    /// have existed.
    pub(crate) fn end_orphans(&mut self) {
        if self.early_stops.is_empty() {
            return;
        }
        let may_report = |thread: &Thread| {
            let creates =
                |current: &CurrentCall| current.child.is_none() && creates_process(&current.request.call);
            thread.current.as_ref().is_some_and(creates)
        };
        if self.processes.values().any(|process| process.threads.values().any(may_report)) {
            return;
        }
        let processes = &self.processes;
        self.early_stops.retain(|tid, _stopped| {
            let Ok(status) = procfs::status(*tid) else { return false };
            let is_orphan = status.group == *tid && !processes.contains_key(&HomePid(status.parent));
            if is_orphan {
                tern_tracee::pidfd::kill(*tid);
            }
            !is_orphan
        });
    }

    /// A deputy thread has exited. If it was killed in the middle of a fork, its guest still gets
    /// the fork's result, and makes its half of the fork before it is dropped: at home, the child
    /// exists and outlives its parent or, if another thread has executed a program, is waited for.
    pub(crate) fn finish_fork(&mut self, tid: HomePid) {
        self.adopt_unreported_child(tid);
        // A guest cannot leave its node during a fork, so a process on its way is still there.
        let thread = self.process_of_thread(tid).filter(|process| process.is_away());
        let current = thread.and_then(|process| process.threads.get_mut(&tid)?.current.take());
        let Some((child, number)) = current.and_then(|c| Some((c.child?, c.guest_number()?))) else { return };
        // A new thread has exited with its process, so the guest gets no result for it.
        let Some(ret) = self.processes.get(&child).map(|process| i64::from(process.own_pid)) else { return };
        let outcome = Outcome { ret, outs: Vec::new() };
        let result = CallResult { child: Some(child), ..CallResult::new(number, outcome) };
        self.send(tid, &Message::Result(Box::new(result)));
    }
}

impl Process {
    /// Sets up the blob and a mailbox in a new child or thread. `held` are the signals that are held
    /// in the deputy thread that has created it.
    fn set_up_blob(
        &self,
        (mut stopped, held): (Stopped, u64),
        area: impl FnOnce(tern_image::Reserve) -> MailboxArea,
        waker: Waker,
    ) -> Result<Mailbox> {
        let pid = stopped.pid();
        let reserve =
            self.reserve.ok_or_else(|| Error::Inconsistent { what: "forked at home".into(), pid })?;
        while stopped.stop != Stop::Interrupt {
            stopped.resume(0)?;
            stopped = stop::wait_stop(pid)?;
        }
        let mut injection = Injection::begin(stopped, Site(reserve.start + blob::call_site()))?;
        let mailbox = Mailbox::create(&mut injection, reserve, area(reserve), waker)?;
        let registers = Self::blob_registers(injection.saved_registers(), reserve, mailbox.area());
        let mask = injection.saved_mask() & !held;
        injection.finish_with(&registers, mask)?.resume(0)?;
        Ok(mailbox)
    }

    /// The signals that are held in a thread.
    fn held_in(&self, tid: HomePid) -> u64 {
        self.threads.get(&tid).map_or(0, |thread| thread.held.set())
    }

    fn new_thread(
        &mut self,
        (tid, creator): (HomePid, HomePid),
        stopped: Stopped,
        waker: Waker,
    ) -> Result<()> {
        let area = self.own_mappings.next_area();
        let held = self.held_in(creator);
        let mailbox = self.set_up_blob((stopped, held), |_reserve| area, waker)?;
        let creator = Some(creator);
        let thread = Thread { mailbox: Some(mailbox), creator, ..Thread::new_resident(tid)? };
        self.threads.insert(tid, thread);
        Ok(())
    }

    fn new_child(
        &self,
        (pid, creator): (HomePid, HomePid),
        stopped: Stopped,
        cache: &std::path::Path,
        waker: Waker,
    ) -> Result<Process> {
        let held = self.held_in(creator);
        let mailbox = self.set_up_blob((stopped, held), MailboxArea::primary, waker)?;
        let creator = Some(creator);
        let thread = Thread { mailbox: Some(mailbox), creator, ..Thread::new_resident(pid)? };
        Ok(Process {
            files: self.files.for_child(pid.0),
            command: self.command.clone(),
            uid: self.uid,
            rights: self.rights,
            state: State::Away,
            epoch: self.epoch,
            offered_epoch: self.epoch,
            peer: self.peer,
            reserve: self.reserve,
            machine: self.machine.clone(),
            threads: [(pid, thread)].into(),
            actions: self.actions.clone(),
            timers: self.timers.for_child(),
            own_mappings: self.own_mappings.for_child(),
            ..Process::new_resident(pid, cache)?
        })
    }
}
