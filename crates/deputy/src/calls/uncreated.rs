//! Children and threads that the kernel of the guest's node has refused to create.
//!
//! Only home's kernel can choose a pid, so home creates its half first. If the guest's node then
//! refuses its half, home removes its own half without a trace, and reports that to the guest. The
//! guest holds the calling thread until the report arrives.
//!
//! A thread first blocks all signals. Those that it has taken for its process until then are sent
//! to the thread that was to create it. Then it exits, which no other process notices.
//!
//! A child would be visible as soon as it has ended: to a wait of any thread of its parent, and by
//! the signal of its end. So it is removed while all threads of the parent are stopped: it is
//! killed and reaped here, the parent reaps it by an injected wait, and the signal is removed from
//! the parent's queue. Then the calls that were interrupted for this continue (`resume_unnoticed`),
//! so a wait that has only this child to wait for fails with ECHILD. A zombie is visible only to its
//! tracer until the tracer has reaped it (`wait_consider_task` in kernel/exit.c).
//!
//! A killed child ends with its own priority, so it may take long if it gets no CPU time. The main
//! loop then serves others, and the parent's threads stay stopped. If other work of the shim resumes
//! one of them, the shim stops that thread again before the parent reaps the child.

use crate::calls::current::Origin;
use crate::links::peers::PeerId;
use crate::process::Process;
use crate::process::state::State;
use crate::shim::Shim;
use crate::signals::order::{dequeue, raise_natively};
use crate::stops::quiesce::{POLL_INTERVAL, Quiesced, is_uninterruptible};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_image::Reserve;
use tern_migrate::message::Message;
use tern_syscall::{Arg, Call};
use tern_tracee::inject::Injection;
use tern_tracee::siginfo::{Siginfo, is_queued, reported_child, signal_of};
use tern_tracee::stop;
use tern_tracee::{Memory, Result, procfs};

/// How long the main loop itself waits for the end of a killed child. It has no file open any more
/// and has never run, so it ends within a millisecond if it gets a CPU.
const SHORT_WAIT: Duration = Duration::from_millis(5);

/// A warning is written if a killed child has not ended after this time.
const LONG_WAIT: Duration = Duration::from_secs(1);

/// Field of /proc/PID/stat: the signal of the process's end.
const EXIT_SIGNAL_FIELD: usize = 38;

fn call(nr: i64, values: [u64; 3]) -> Call {
    let mut args = [const { Arg::Value(0) }; 6];
    for (arg, value) in args.iter_mut().zip(values) {
        *arg = Arg::Value(value);
    }
    Call { nr: nr as u32, args }
}

/// How far a child or thread is removed that a guest's node could not create.
#[derive(Debug)]
pub(crate) struct Removal {
    /// The peer that has reported it.
    peer: PeerId,
    /// None for a thread.
    child: Option<Child>,
    /// A warning about it was written.
    was_warned: bool,
}

/// A child that is being removed.
#[derive(Debug)]
struct Child {
    parent: HomePid,
    /// Its pid as the parent sees it.
    own_pid: i32,
    /// The signal of its end.
    signal: i32,
    /// Set when all threads of the parent are stopped and it was killed.
    killed: Option<Killed>,
}

#[derive(Debug)]
struct Killed {
    at: Instant,
    /// The children of the parent that had ended before.
    zombies: Vec<i32>,
}

impl Shim {
    /// The guest's node, which is this peer, could not create this child or thread. The report is
    /// repeated on a new link until it is confirmed.
    pub(crate) fn undo_creation(&mut self, child: HomePid, peer: PeerId) {
        if self.uncreated.contains_key(&child) {
            return;
        }
        self.close_pidfd_of(child);
        let Some(process) = self.process_of_thread(child) else { return };
        let mut removal = Removal { peer, child: None, was_warned: false };
        if process.pid != child {
            if let Ok(thread) = process.thread(child) {
                thread.set_mask(u64::MAX);
            }
        } else {
            let signal =
                procfs::stat(child.0).map_or(libc::SIGCHLD, |stat| stat.field(EXIT_SIGNAL_FIELD) as i32);
            let (parent, own_pid) = (process.parent, process.own_pid);
            removal.child = Some(Child { parent, own_pid, signal, killed: None });
            // Its end must not wait for a file server. The flag keeps a table that it shares.
            let close_all = [0, u32::MAX.into(), libc::CLOSE_RANGE_UNSHARE.into()];
            if let Ok(thread) = process.thread(child) {
                let _ends_anyway =
                    thread.post_internal(call(libc::SYS_close_range, close_all), Origin::TakeSignals);
            }
        }
        self.uncreated.insert(child, removal);
    }

    /// Continues to remove the children and threads that guests' nodes could not create.
    pub(crate) fn continue_undoing(&mut self) {
        let uncreated: Vec<HomePid> = self.uncreated.keys().copied().collect();
        for tid in uncreated {
            let Some(mut removal) = self.uncreated.remove(&tid) else { continue };
            let removed = match &mut removal.child {
                Some(child) => self.remove_child(tid, child),
                None => {
                    self.remove_thread(tid);
                    Ok(self.process_of_thread(tid).is_none())
                }
            };
            let killed = removal.child.as_ref().and_then(|child| child.killed.as_ref());
            let lasts = killed.is_some_and(|killed| killed.at.elapsed() > LONG_WAIT);
            if (lasts || removed.is_err()) && !std::mem::replace(&mut removal.was_warned, true) {
                tracing::warn!(child = %tid, ?removed, "a child that was not created is still there");
            }
            if matches!(removed, Ok(true)) {
                self.send_to_peer(removal.peer, tid, &Message::CreationUndone);
            } else {
                self.uncreated.insert(tid, removal);
            }
        }
    }

    /// The thread whose call has created this child or thread at home, if it has made no call since.
    fn creator_of(&mut self, child: HomePid) -> Option<HomePid> {
        let creator = self.process_of_thread(child)?.threads.get(&child)?.creator?;
        let last_result = self.process_of_thread(creator)?.threads.get(&creator)?.last_result.as_ref();
        (last_result?.child == Some(child)).then_some(creator)
    }

    /// Closes the pidfd that its creator has got for this child.
    fn close_pidfd_of(&mut self, child: HomePid) {
        let Some(creator) = self.creator_of(child) else { return };
        let result = self.process_of_thread(creator).and_then(|process| process.thread(creator).ok());
        let outs = result.and_then(|thread| thread.last_result.as_ref()).map(|last| &last.outcome.outs);
        let bytes = outs.and_then(|outs| outs.first()?.first_chunk());
        let Some(pidfd) = bytes.map(|bytes| i32::from_le_bytes(*bytes)) else { return };
        let closed = self.with_deputy(creator, |process, stopped| {
            // Another thread may have closed it, and opened something else.
            if !procfs::is_pidfd_of(creator.0, pidfd, child.0) {
                return process.resume_unnoticed(stopped);
            }
            let mut injection = process.injection(stopped)?.0;
            let _gone_already = injection.call(libc::SYS_close, [pidfd as u64, 0, 0, 0, 0, 0])?;
            let stopped = injection.finish()?;
            process.resume_unnoticed(stopped)
        });
        if let Err(error) = closed {
            self.handle_error(creator, &error);
        }
    }

    fn remove_thread(&mut self, tid: HomePid) {
        let creator = self.creator_of(tid);
        let Some(process) = self.process_of_thread(tid) else { return };
        let receiver = creator.or_else(|| process.live_threads().map(|other| other.tid).find(|t| *t != tid));
        let Ok(thread) = process.thread(tid) else { return };
        if thread.is_exiting || thread.current.is_some() || thread.pending_mask.is_some() {
            return;
        }
        let taken: Vec<Siginfo> = thread.unacked.drain(..).map(|(_, info)| info).collect();
        if !thread.post_internal(call(libc::SYS_exit, [0; 3]), Origin::TakeSignals) {
            tracing::error!(%tid, "a thread that its node lacks does not end; its process is killed");
            return tern_tracee::pidfd::kill(process.pid.0);
        }
        thread.is_exiting = true;
        process.stop_reading_through(tid);
        let Some(receiver) = receiver else { return };
        for info in taken {
            let thread = self.process_of_thread(receiver).and_then(|process| process.thread(receiver).ok());
            let Some(thread) = thread else { return };
            let message = thread.signal_message(info);
            self.send(receiver, &message);
        }
    }

    /// Continues to remove a child. Returns whether it is gone.
    fn remove_child(&mut self, pid: HomePid, child: &mut Child) -> Result<bool> {
        // A child that was stopped with its process group does not finish its call, but can be killed.
        let closes_files = |process: &Process| {
            !process.job_stopped && process.live_threads().any(|thread| thread.current.is_some())
        };
        if child.killed.is_none() && self.processes.get(&pid).is_some_and(closes_files) {
            return Ok(false);
        }
        let parent = child.parent;
        match self.processes.get(&parent) {
            // The threads of one parent are stopped for one child at a time.
            Some(process) if is_deputy(process) => {
                if self.is_stopped_for_removal(parent)
                    || process.live_threads().any(|thread| is_uninterruptible(thread.tid))
                {
                    return Ok(false);
                }
            }
            // It moves, or has executed a program. Either ends soon.
            Some(process) if !process.is_at_home() => return Ok(false),
            // The parent has ended, is not traced (CLONE_PARENT), or has executed a program and
            // stayed at home. Then only the kernel's own report of the end is left.
            _ => {
                if child.killed.is_none() {
                    child.killed = Some(self.kill_child(pid, parent));
                }
                return Ok(!self.processes.contains_key(&pid));
            }
        }
        let quiesced = self.quiesce_deputy(parent);
        if matches!(quiesced, Ok(Quiesced::Stopped)) {
            let killed = match child.killed.take() {
                Some(killed) => killed,
                None => {
                    let killed = self.kill_child(pid, parent);
                    self.await_end(pid);
                    killed
                }
            };
            let killed = child.killed.insert(killed);
            if self.processes.contains_key(&pid) {
                return Ok(false);
            }
            if let Some(process) = self.processes.get_mut(&parent)
                && let Err(error) = process.reap((child.own_pid, child.signal), &killed.zombies)
            {
                self.handle_error(parent, &error);
            }
        }
        let is_done = matches!(quiesced, Ok(Quiesced::Stopped));
        if let Some(process) = self.processes.get_mut(&parent).filter(|parent| is_deputy(parent))
            && (is_done || child.killed.is_none())
            && let Err(error) = process.withdraw_stops()
        {
            self.handle_error(parent, &error);
        }
        quiesced.map(|_| is_done)
    }

    /// Whether the threads of this process are stopped until a killed child has ended.
    fn is_stopped_for_removal(&self, parent: HomePid) -> bool {
        let children = self.uncreated.values().filter_map(|removal| removal.child.as_ref());
        children.filter(|child| child.parent == parent).any(|child| child.killed.is_some())
    }

    fn kill_child(&mut self, pid: HomePid, parent: HomePid) -> Killed {
        let killed = Killed { at: Instant::now(), zombies: zombie_children(parent) };
        if let Some(process) = self.processes.get_mut(&pid) {
            process.is_dying = true;
            tern_tracee::pidfd::kill(pid.0);
        }
        killed
    }

    /// Waits a moment for the end of a killed child.
    fn await_end(&mut self, pid: HomePid) {
        let until = Instant::now() + SHORT_WAIT;
        while self.processes.contains_key(&pid) && Instant::now() < until {
            match stop::wait(pid.0, false) {
                Ok(Some((_, change))) => self.handle_change(pid, change),
                Ok(None) => stop::pause(POLL_INTERVAL),
                Err(_) => return,
            }
        }
    }
}

impl Process {
    /// Makes the process reap a child that has ended, and removes the signal of its end. All threads
    /// of the process are stopped. `child` is its pid as the process sees it, and that signal.
    /// `zombies` are the children that had ended before.
    fn reap(&mut self, child: (i32, i32), zombies: &[i32]) -> Result<()> {
        let stopped = self.live_threads().filter(|thread| thread.stopped.is_some());
        let Some(tid) = stopped.min_by_key(|thread| !thread.is_idle()).map(|thread| thread.tid) else {
            return Ok(());
        };
        let (parent, own_pid, own_tid) = (self.pid, self.own_pid, self.thread(tid)?.own_tid);
        let memory = Memory::open(tid.0)?;
        let stopped = self.take_stopped(tid)?;
        let (mut injection, reserve) = self.injection(stopped)?;
        let mut queue = Queue { injection: &mut injection, memory, reserve };
        let reaped = queue.reap(child, (own_pid, own_tid), || {
            zombie_children(parent).into_iter().filter(|zombie| !zombies.contains(zombie)).collect()
        });
        self.set_stopped(injection.finish()?)?;
        self.usage.forget_child(child.0);
        reaped
    }
}

/// The signals of a process, all threads of which are stopped, and one is under injection.
struct Queue<'a> {
    injection: &'a mut Injection,
    memory: Memory,
    reserve: Reserve,
}

impl Queue<'_> {
    /// Has the process reap this child, and removes the signals about it. `own` is the process's
    /// pid, and the thread's tid, in their own namespace; `ended` lists the children that have ended
    /// meanwhile.
    fn reap(
        &mut self,
        (child, signal): (i32, i32),
        own: (i32, i32),
        ended: impl Fn() -> Vec<i32>,
    ) -> Result<()> {
        let options = (libc::__WALL | libc::WNOHANG) as u64;
        // Fails if the process ignores SIGCHLD: then the kernel has reaped the child.
        let _reaped_already = self.injection.call(libc::SYS_wait4, [child as u64, 0, options, 0, 0, 0])?;
        // The kernel sends SIGCHLD for a stop, and if the parent has executed a program since.
        let others = [libc::SIGCHLD].into_iter().filter(|other| *other != signal);
        for signal in [signal].into_iter().chain(others) {
            self.remove_signal((child, signal), own, &ended)?;
        }
        Ok(())
    }

    fn remove_signal(
        &mut self,
        (child, signal): (i32, i32),
        own: (i32, i32),
        ended: &impl Fn() -> Vec<i32>,
    ) -> Result<()> {
        let is_of_child = |info: &Siginfo| signal_of(info) == signal && reported_child(info) == Some(child);
        let (of_thread, shared) = self.injection.stopped()?.pending()?;
        if !shared.iter().any(is_of_child) {
            return Ok(());
        }
        // The kernel dequeues the thread's own signals first. Those that are to stay are queued
        // again, in their order.
        let of_number = |infos: &[Siginfo]| infos.iter().filter(|info| signal_of(info) == signal).count();
        let count = of_number(&of_thread);
        let wanted = BTreeMap::from([(signal, count + of_number(&shared))]);
        let taken = dequeue(self.injection, &self.memory, self.reserve, wanted)?;
        let (of_thread, shared) = taken.split_at(count.min(taken.len()));
        raise_natively(self.injection, &self.memory, self.reserve, own, of_thread)?;
        for info in shared.iter().filter(|info| !is_of_child(info)) {
            self.raise(own.1, info)?;
        }
        if !is_queued(signal) {
            // The kernel keeps one signal of a number, so that of another child may be lost.
            for zombie in ended() {
                if procfs::stat(zombie).is_ok_and(|stat| stat.field(EXIT_SIGNAL_FIELD) == signal as u64) {
                    self.raise_end_of(own.1, procfs::status(zombie)?.own_pid)?;
                }
            }
        }
        Ok(())
    }

    /// Queues a signal to the process. The thread under injection may send any siginfo to itself only,
    /// that is, if its own tid names the process; the kernel accepts the tid of any thread, and the
    /// signal is the process's.
    fn raise(&mut self, own_tid: i32, info: &Siginfo) -> Result<()> {
        let (at, signal) = (self.reserve.scratch(), signal_of(info));
        self.memory.write(at, info)?;
        let args = [own_tid as u64, signal as u64, at, 0, 0, 0];
        let result = self.injection.call(libc::SYS_rt_sigqueueinfo, args)?;
        if result < 0 {
            tracing::warn!(signal, result, "a pending signal could not be queued again");
        }
        Ok(())
    }

    /// Queues the signal of the end of a child that has ended and was not waited for.
    fn raise_end_of(&mut self, own_tid: i32, child: i32) -> Result<()> {
        let at = self.reserve.scratch();
        let options = (libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL) as u64;
        let mut info = [0; 128];
        self.memory.write(at, &info)?;
        self.injection.call(libc::SYS_waitid, [libc::P_PID as u64, child as u64, at, options, 0, 0])?;
        self.memory.read(at, &mut info)?;
        if reported_child(&info) == Some(child) { self.raise(own_tid, &info) } else { Ok(()) }
    }
}

/// Whether all threads of a process are deputies.
fn is_deputy(process: &Process) -> bool {
    matches!(process.state, State::Away | State::Returning(_) | State::Remigrating(_))
}

/// The children of a process that have ended and were not waited for.
fn zombie_children(pid: HomePid) -> Vec<i32> {
    procfs::children(pid.0).into_iter().filter(|child| procfs::has_exited(*child)).collect()
}
