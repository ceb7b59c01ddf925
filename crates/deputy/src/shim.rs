//! The state of a home shim: its processes, the guest shims that hold their guests, and the
//! operations that concern both.

use crate::calls::uncreated::Removal;
use crate::files::content::ContentTransfers;
use crate::files::names::NameTracker;
use crate::files::timed_worker::TimedWorker;
use crate::links::peer::Peer;
use crate::links::peers::{PeerId, Peers};
use crate::migrate::home_wait::DetachedWait;
use crate::process::Process;
use crate::process::home_record::HomeRecord;
use crate::process::state::State;
use crate::process::thread::Thread;
use crate::shm::shared_memory::SharedMemory;
use crate::time::usage_store::UsageStore;
use crate::waker::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};
use tern_control::control_socket::ControlSocket;
use tern_control::shim::{ShimReply, ShimStart};
use tern_control::turn_watch::TurnWatch;
use tern_control::{Destination, MigrationReport, ProcessRow, Refusal, RefusalKind};
use tern_ids::{HomePid, MigrationId, NodeId};
use tern_migrate::fault;
use tern_migrate::message::Message;
use tern_tracee::procfs::Sleep;
use tern_tracee::stop::Stopped;
use tern_tracee::threads;
use tern_wire::{Ephemeral, Link};

/// How long a guest that reports itself busy is asked again to depart, and how long a move that
/// cannot begin is retried.
pub(crate) const RETRY_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes of stack of a helper thread. A TLS handshake needs less than half of it.
const HELPER_STACK_SIZE: usize = 256 << 10;

/// An event that a helper thread reports to the main loop.
#[derive(Debug)]
pub(crate) enum ShimEvent {
    /// A destination has been prepared for a move of this process, or has refused it. Its threads, and
    /// those of its group, sleep as measured.
    Prepared(HomePid, MigrationId, Result<Box<Peer>, Refusal>, Vec<(HomePid, Sleep)>),
    /// The threads of a process that is to be frozen in this move sleep as measured.
    Measured(HomePid, Option<MigrationId>, Vec<(HomePid, Sleep)>),
    /// The result of an attempt to reconnect to a peer.
    ReconnectDone(PeerId, ReconnectResult),
}

/// The result of an attempt to reconnect to a lost peer.
#[derive(Debug)]
pub(crate) enum ReconnectResult {
    Link(Box<Link>),
    Gone,
    Unreachable,
}

/// A process that was fetched home, stays there, or came home in a wait on a futex, and is not traced any
/// more. Its row is kept for `mps` if it was fetched or stays, and its record and its waits for the next
/// time that the shim seizes it.
#[derive(Debug)]
pub(crate) struct Detached {
    pub(crate) row: ProcessRow,
    /// Refers to the process even if another has its pid by now.
    pidfd: OwnedFd,
    pub(crate) home_record: HomeRecord,
    /// The waits on futexes of its threads.
    pub(crate) waits: Vec<DetachedWait>,
}

impl Detached {
    pub(crate) fn is_alive(&self) -> bool {
        // A pidfd is readable when its process has ended.
        matches!(poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&Timespec::default())), Ok(0))
    }

    /// Whether it is to be kept while it is alive. Reads files of /proc.
    pub(crate) fn is_needed(&self) -> bool {
        self.home_record.is_shown() || self.waits.iter().any(|wait| wait.lasts(self.row.pid))
    }
}

/// The state of a home shim.
#[derive(Debug)]
pub(crate) struct Shim {
    pub(crate) start: ShimStart,
    pub(crate) key: std::sync::Arc<Ephemeral>,
    pub(crate) control_socket: ControlSocket,
    pub(crate) waker: Waker,
    /// Whether the waker was signalled during the last wait. Set by the main loop, read once a turn.
    pub(crate) was_woken: bool,
    pub(crate) peers: Peers,
    /// All processes that are traced.
    pub(crate) processes: HashMap<HomePid, Process>,
    /// Processes that were fetched home and now run untraced.
    pub(crate) detached: Vec<Detached>,
    /// CPU time used away by processes that are not traced any more.
    pub(crate) usage_store: UsageStore,
    /// Moves that cannot begin yet and are retried. For `migrate` and `requeue_task` only.
    pub(crate) queued_moves:
        Vec<(Instant, HomePid, Destination, tern_control::control_socket::PendingRequest)>,
    /// The stops of new children and threads that came before the fork stop of the parent, which
    /// names the child. For the handling of stops and of forks.
    pub(crate) early_stops: HashMap<i32, Stopped>,
    /// The children and threads that guests' nodes could not create, and how far they are removed.
    /// For `calls::uncreated` only.
    pub(crate) uncreated: HashMap<HomePid, Removal>,
    /// Contents of files that are being sent to guests.
    pub(crate) content_transfers: ContentTransfers,
    /// Events of helper threads: the helper threads send them, and the main loop receives them.
    pub(crate) events: (Sender<ShimEvent>, Receiver<ShimEvent>),
    /// The memory that processes away share.
    pub(crate) shared_memory: SharedMemory,
    /// The file systems that this node declares as shared.
    pub(crate) shared_filesystems: crate::files::shared_fs::SharedFilesystems,
    /// Compares processes with others of the machine (kcmp(2)). For each of the two processes that
    /// waits until an execve has ended, which closes files and may wait for a file server.
    pub(crate) comparisons: TimedWorker,
    /// Watches the directories whose names are cached at guests.
    pub(crate) names: NameTracker,
    /// The last migration whose group is known to be complete and stopped. For `migrate::group` only.
    pub(crate) complete_group: Option<MigrationId>,
    /// A call at which a test wants the process to be fetched home. For `calls::perform` only.
    pub(crate) test_freeze: Option<fault::FreezeRequest>,
    /// When the last process left. The shim ends a moment later. For `run` only.
    pub(crate) empty_since: Instant,
    /// When it was last examined which detached processes are needed. For `run` only.
    pub(crate) detached_checked: Instant,
    /// Reports steps of the main loop that take too long. For `run` only.
    pub(crate) turn_watch: TurnWatch,
}

impl Shim {
    /// Runs `work` in a thread of its own and delivers its event to the main loop. Returns false if
    /// no thread can be started, as at a limit on the number of processes.
    pub(crate) fn start_helper(&self, work: impl FnOnce() -> ShimEvent + Send + 'static) -> bool {
        let (events, waker) = (self.events.0.clone(), self.waker.clone());
        let run = move || {
            let _loop_is_gone = events.send(work());
            waker.wake();
        };
        threads::spawn("helper", HELPER_STACK_SIZE, run).is_ok()
    }

    /// The process that a thread belongs to.
    pub(crate) fn process_of_thread(&mut self, tid: HomePid) -> Option<&mut Process> {
        let has = |process: &Process| process.threads.contains_key(&tid);
        if self.processes.get(&tid).is_some_and(has) {
            return self.processes.get_mut(&tid);
        }
        self.processes.values_mut().find(|process| has(process))
    }

    /// As [`process_of_thread`](Self::process_of_thread), for reading.
    pub(crate) fn find_process(&self, tid: HomePid) -> Option<&Process> {
        self.processes.values().find(|process| process.threads.contains_key(&tid))
    }

    /// Sends a message about a process, or about one of its threads, to the peer that holds its
    /// guest.
    pub(crate) fn send(&mut self, tag: HomePid, message: &Message) {
        if matches!(message, Message::Result(_) | Message::Signal(..))
            && let Some(pid) = self.process_of_thread(tag).map(|process| process.pid)
        {
            self.report_events(pid);
        }
        let process = if message.is_per_thread() { self.process_of_thread(tag) } else { None };
        let peer = process.as_ref().map(|process| process.peer);
        if process.is_some_and(|process| process.keep_result_back(tag, message)) {
            return;
        }
        if let Some(peer) = peer.or_else(|| self.processes.get(&tag).map(|process| process.peer)) {
            self.send_to_peer(peer, tag, message);
        }
    }

    pub(crate) fn send_to_peer(&mut self, peer: PeerId, pid: HomePid, message: &Message) {
        // The message may be a consequence of a change to a directory, so such changes are sent
        // first.
        self.send_name_changes();
        self.send_directly(peer, pid, message);
    }

    /// Like [`Self::send_to_peer`], without sending pending name changes first. Returns whether the
    /// link accepted the message.
    pub(crate) fn send_directly(&mut self, peer: PeerId, pid: HomePid, message: &Message) -> bool {
        let Some(linked) = self.peers.get_mut(peer).filter(|peer| peer.link.is_some()) else { return false };
        let sent = linked.send(pid, message, &[]).is_ok();
        if !sent {
            self.peer_lost(peer);
        }
        sent
    }

    /// Aborts the move of a process and reports the reason to its caller.
    pub(crate) fn abort_task(&mut self, pid: HomePid, why: &str) {
        self.abort_task_with(pid, Refusal::new(RefusalKind::CannotMove, why));
    }

    pub(crate) fn abort_task_with(&mut self, pid: HomePid, refusal: Refusal) {
        let why = refusal.message.clone();
        if let Some(migration) = self.end_task(pid, refusal) {
            self.abort_group(migration, pid, &why);
        }
    }

    /// Ends the move of this process unsuccessfully, but not that of its group. Returns the move's
    /// id.
    fn end_task(&mut self, pid: HomePid, refusal: Refusal) -> Option<MigrationId> {
        let process = self.processes.get_mut(&pid)?;
        process.home_record.set_reason(&refusal.message);
        if process.is_away() {
            // The process did not come home to be frozen there.
            process.frozen = None;
        }
        let task = process.task.take()?;
        tracing::info!(id = %task.migration, %pid, why = refusal.message, "a move was aborted");
        self.rejoin_left_behind(task.migration);
        if let Some((caller, _)) = task.caller {
            caller.reply(&ShimReply::Refused(refusal));
        }
        Some(task.migration)
    }

    /// Requeues a move that is about to be aborted for a transient reason, if it is young enough:
    /// it begins again and its caller keeps waiting.
    pub(crate) fn requeue_task(&mut self, pid: HomePid) {
        let task = self.processes.get_mut(&pid).and_then(|process| process.task.as_mut());
        if let Some(task) = task.filter(|task| task.started_at.elapsed() < RETRY_TIMEOUT)
            && let Some((caller, to)) = task.caller.take()
        {
            self.queued_moves.push((task.started_at, pid, to, caller));
        }
    }

    /// Ends the move of a process successfully.
    pub(crate) fn complete_task(&mut self, pid: HomePid) {
        let home = self.start.node;
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.migrations += 1;
        let to = if process.is_away() { self.peers.node(process.peer).unwrap_or(home) } else { home };
        let Some(task) = process.task.take() else { return };
        let report = MigrationReport {
            pid,
            command: tern_tracee::procfs::status(pid.0)
                .map_or_else(|_| process.command.clone(), |s| String::from_utf8_lossy(&s.name).into_owned()),
            migration: task.migration,
            from: task.from,
            to,
            bytes: task.bytes,
            freeze_ms: task.frozen_at.map_or(0.0, |f| f.elapsed().as_secs_f64() * 1e3),
            total_ms: task.started_at.elapsed().as_secs_f64() * 1e3,
        };
        tracing::info!(id = %task.migration, %pid, from = %report.from, to = %report.to, report.bytes, report.freeze_ms, "moved");
        if let Some((caller, _)) = task.caller {
            caller.reply(&ShimReply::Migrated(report));
        }
    }

    /// Resends all signals that the guest has not acknowledged. The guest drops duplicates.
    pub(crate) fn resend_signals(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get(&pid) else { return };
        let again: Vec<(HomePid, Message)> = process
            .threads
            .values()
            .flat_map(|t| {
                t.unacked.iter().map(|(count, info)| (t.tid, Message::Signal(*count, info.to_vec())))
            })
            .collect();
        again.iter().for_each(|(tid, m)| self.send(*tid, m));
    }

    /// Detaches from the threads of a process that are stopped and at home. When the last one is
    /// detached the shim forgets the process. A process that is to be frozen stays stopped instead.
    pub(crate) fn detach(&mut self, pid: HomePid) {
        self.detach_with_signal(pid, pid, 0);
    }

    /// [`Self::detach`], with this signal delivered to one thread.
    pub(crate) fn detach_with_signal(&mut self, pid: HomePid, tid: HomePid, signal: i32) {
        if self.freeze_instead(pid, tid, signal) {
            return;
        }
        let Some(process) = self.processes.get_mut(&pid) else { return };
        for thread in process.threads.values_mut().filter(|thread| thread.draining.is_none()) {
            process.detached_waits.extend(thread.detached_wait());
            let Some(stopped) = thread.stopped.take() else { continue };
            if let Err(error) = stopped.detach(if thread.tid == tid { signal } else { 0 }) {
                tracing::debug!(%error, "it was gone already");
            }
        }
        process.threads.retain(|_, thread| thread.draining.is_some());
        if let Some(draining) = process.threads.keys().next().map(|tid| tid.0) {
            // Draining threads that were stopped for a departure continue their calls.
            if let Err(error) = process.resume_all() {
                tracing::warn!(%pid, %error, "a thread whose call is pending is not resumed");
            }
            // A detached thread may exit unnoticed, so read memory through one that is still
            // traced.
            if let Ok(memory) = tern_tracee::Memory::open(draining) {
                process.memory = memory;
            }
            process.state = State::Draining;
            return;
        }
        let Some(process) = self.processes.remove(&pid) else { return };
        self.close_unused_objects();
        self.usage_store.save(pid, process.started, process.usage.saved());
        // An entry of an earlier return is out of date.
        self.detached.retain(|detached| detached.row.pid != pid);
        if (process.home_record.is_shown() || !process.detached_waits.is_empty())
            && let Some(pidfd) =
                Pid::from_raw(pid.0).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        {
            let row = self.row(&process);
            let (home_record, waits) = (process.home_record, process.detached_waits);
            self.detached.push(Detached { row, pidfd, home_record, waits });
        }
    }

    /// Handles an error of a traced thread: it is gone, or its process is in an inconsistent state.
    pub(crate) fn handle_error(&mut self, tid: HomePid, error: &tern_tracee::Error) {
        let Some(pid) = self.process_of_thread(tid).map(|process| process.pid).or(Some(tid)) else { return };
        if error.is_gone() {
            // If the thread is unknown, its exit was handled already. Otherwise this records the
            // threads that have exited, without waiting for their wait statuses.
            let gone = |tid: HomePid| tern_tracee::procfs::has_exited(tid.0);
            let Some(process) = self.processes.get_mut(&pid) else { return };
            let exited = |thread: &&Thread| thread.tid != pid && !thread.is_exiting && gone(thread.tid);
            let exited: Vec<HomePid> =
                process.threads.values().filter(exited).map(|thread| thread.tid).collect();
            for tid in exited {
                self.finish_fork(tid);
                if let Some(process) = self.processes.get_mut(&pid) {
                    process.thread_exited(tid);
                }
            }
            let Some(process) = self.processes.get(&pid) else { return };
            let has_others = process.threads.keys().any(|tid| *tid != pid);
            if !has_others && !tern_tracee::procfs::is_alive(pid.0) {
                self.finish_fork(pid);
                self.process_exited(pid);
            }
            return;
        }
        tracing::error!(%pid, %error, "a process is in an inconsistent state; it is killed");
        self.abort_task(pid, &error.to_string());
        tern_tracee::pidfd::kill(pid.0);
    }

    /// A process has exited at home: its guest is dropped.
    pub(crate) fn process_exited(&mut self, pid: HomePid) {
        let migration = self.end_task(pid, Refusal::new(RefusalKind::NotFound, "it has ended"));
        let Some(mut process) = self.processes.remove(&pid) else { return };
        self.close_unused_objects();
        self.keep_usage_for_parent(&process);
        let waiting = process.waits.take_when_stopped();
        waiting.into_iter().for_each(|(then, _)| then.refuse_gone(pid));
        let may_have_carried_objects = process.may_carry_objects();
        for peer in process.peers() {
            self.send_to_peer(peer, pid, &Message::Drop);
        }
        self.leave_group(migration, pid, may_have_carried_objects, "it has ended");
    }

    /// A process leaves the group of a migration. If it may have carried a part of the shared
    /// memory (`may_have_carried_objects`), the move of the others is requeued.
    pub(crate) fn leave_group(
        &mut self,
        migration: Option<MigrationId>,
        pid: HomePid,
        may_have_carried_objects: bool,
        why: &str,
    ) {
        match migration {
            Some(migration) if may_have_carried_objects => {
                self.requeue_group(migration);
                self.abort_group(migration, pid, why);
                self.rejoin_left_behind(migration);
            }
            Some(migration) => self.member_left_group(migration),
            None => {}
        }
    }

    /// The node on which the program of a process runs now.
    pub(crate) fn current_node(&self, process: &Process) -> NodeId {
        if process.is_away() {
            self.peers.node(process.peer).unwrap_or(self.start.node)
        } else {
            self.start.node
        }
    }
}
