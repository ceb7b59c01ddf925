//! Requests of ternd to a home shim: lists of processes, and moves to begin.

use crate::files::connections::{ListedSocket, sockets};
use crate::links::peer::Peer;
use crate::links::ternd;
use crate::migrate::group::{GroupRefusal, not_found};
use crate::migrate::home_wait::measure_sleeps;
use crate::migrate::movable::check_movable;
use crate::process::Process;
use crate::process::state::{Frozen, MigrationTask, State};
use crate::process::thread::Thread;
use crate::process::waits::WhenStopped;
use crate::shim::{Detached, RETRY_TIMEOUT, Shim, ShimEvent};
use crate::time::namespace::clock_offsets;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::control_socket::{self, PendingRequest};
use tern_control::shim::{RightsLimit, ShimReply, ShimRequest};
use tern_control::{ConnectionRow, Destination, ProcessRow, Refusal, RefusalKind, Reply, Request, Usage};
use tern_ids::{HomePid, MigrationId, NodeId};
use tern_image::Unmovable;
use tern_migrate::message::{Message, send};
use tern_tracee::cpu::cpu_total_ns;
use tern_tracee::procfs;
use tern_tracee::stop::{self};
use tern_wire::limits::SLOW_SHIM_TIMEOUT;
use tern_wire::{Ephemeral, Link};

/// How long to wait for another shim that holds a process which must move together with one of
/// ours.
const OTHER_SHIM_TIMEOUT: Duration = Duration::from_secs(1);

/// Minimum number of times the clocks are sent to a guest shim. It keeps the fastest sample.
const MIN_CLOCK_SAMPLES: usize = 6;

/// Sampling ends with a sample this fast: the guest's clocks lag by the transit time of the sample.
/// On busy CPUs there may be no such sample.
const FAST_CLOCK_SAMPLE: Duration = Duration::from_micros(200);

/// Sampling also ends when this many samples took at most a tenth longer than the fastest, as
/// happens on a slower network.
const MIN_SIMILAR_SAMPLES: usize = 5;

/// Sampling ends after this time in any case. With four other moves and busy shims on two CPUs, 2
/// of 150 runs had no sample below 2 ms within 50 ms.
const CLOCK_SAMPLING_TIMEOUT: Duration = Duration::from_millis(200);

impl Shim {
    pub(crate) fn handle_requests(&mut self) {
        while let Some(caller) = self.control_socket.accept() {
            match caller.request().clone() {
                ShimRequest::Processes => caller.reply(&ShimReply::Processes(self.rows())),
                ShimRequest::Connections => caller.reply(&ShimReply::Connections(self.connection_rows())),
                ShimRequest::Owns { pid } => {
                    let is_ours = self.processes.contains_key(&pid)
                        || self.detached.iter().any(|detached| detached.row.pid == pid);
                    caller.reply(&if is_ours { ShimReply::Done } else { control_socket::not_held() });
                }
                ShimRequest::IsGuestAwaited { pid, epoch } => {
                    let is_awaited = self.processes.get(&pid).is_some_and(|process| process.awaits(epoch));
                    caller.reply(&if is_awaited { ShimReply::Done } else { control_socket::not_held() });
                }
                ShimRequest::Migrate { pid, to, .. } => self.begin_migration(pid, to, caller, Instant::now()),
                ShimRequest::AtExec { pid, candidates, .. } => self.hold_at_exec(pid, &candidates, caller),
                ShimRequest::Continue { pid } => self.continue_frozen(pid, caller),
                ShimRequest::NodeRemoved { node } => {
                    self.node_removed(node);
                    caller.reply(&ShimReply::Done);
                }
                // Requests for other programs.
                _ => caller.reply(&control_socket::not_held()),
            }
        }
    }

    pub(crate) fn rows(&self) -> Vec<ProcessRow> {
        let is_shown = |detached: &&Detached| {
            detached.home_record.is_shown() && !self.processes.contains_key(&detached.row.pid)
        };
        let detached = self.detached.iter().filter(is_shown).map(|detached| ProcessRow {
            uid: uid_now(detached.row.pid, detached.row.uid),
            ..detached.row.clone()
        });
        self.processes.values().map(|process| self.row(process)).chain(detached).collect()
    }

    /// The sockets of the processes that are away, as `mps -n` shows them.
    fn connection_rows(&mut self) -> Vec<ConnectionRow> {
        let Self { processes, comparisons, peers, start, .. } = self;
        let mut rows = Vec::new();
        for process in processes.values().filter(|process| process.is_away()) {
            let pid = process.memory.pid();
            // One that executes a program, which may wait for a file server, is left out.
            let sockets = comparisons.run(move || sockets(pid)).unwrap_or_default();
            let node = peers.node(process.peer).unwrap_or(start.node);
            let uid = uid_now(process.pid, process.uid);
            let row = |socket: ListedSocket| ConnectionRow {
                pid: process.pid,
                uid,
                from: None,
                r#where: Some(if socket.stays.is_none() { node } else { start.node }),
                fd: socket.fd,
                local: socket.local,
                peer: socket.peer,
                reason: socket.stays.unwrap_or_default().to_owned(),
                command: process.command.chars().take(ConnectionRow::MAX_COMMAND).collect(),
            };
            rows.extend(
                sockets.into_iter().map(|socket| row(process.delegations.connections.describe(socket))),
            );
        }
        rows.truncate(ConnectionRow::MAX_ROWS);
        rows
    }

    /// The row of a process as `mps` shows it.
    pub(crate) fn row(&self, process: &Process) -> ProcessRow {
        let suspended = process.is_away() && self.peers.link(process.peer).is_none();
        // /proc/PID/stat would wait while the process executes a program.
        let at_home = cpu_total_ns(process.pid.0).map_or(0.0, |ns| ns as f64 / 1e9);
        ProcessRow {
            pid: process.pid,
            uid: uid_now(process.pid, process.uid),
            r#where: Some(self.current_node(process)),
            from: None,
            state: if suspended { "suspended" } else { process.state_name() }.into(),
            cpu_seconds: at_home + process.usage.of(None).seconds(),
            migrations: process.migrations,
            reason: process.home_record.reason().to_owned(),
            command: process.command.clone(),
            usage: Usage {
                memory: if process.is_away() { process.demand.memory } else { 0 },
                waited_seconds: process.demand.cpu_wait_ns as f64 / 1e9,
                calls: process.call_count,
                call_bytes: process.call_bytes,
                local_bytes: if process.is_away() { process.demand.local_io } else { 0 },
            },
            started: None,
        }
    }

    /// Seizes all threads of a process that runs at home.
    pub(crate) fn seize(&mut self, pid: HomePid) -> tern_tracee::Result<()> {
        if let Some(process) = self.processes.get_mut(&pid) {
            // Its threads whose last calls have ended were detached.
            if matches!(process.state, State::Draining) {
                tern_tracee::reap::with_reaper(pid.0, || seize_threads(process, true))?;
                process.recall_waits();
            }
            return Ok(());
        }
        let mut process = Process::new_resident(pid, &self.start.cache_dir)?;
        // Most processes have one thread.
        if !seize_threads(&mut process, false)? {
            tern_tracee::reap::with_reaper(pid.0, || seize_threads(&mut process, true))?;
        }
        let before = self.detached.iter().find(|detached| detached.row.pid == pid && detached.is_alive());
        let mut process = Process {
            home_record: before.map(|detached| detached.home_record.continued()).unwrap_or_default(),
            detached_waits: before.map(|detached| detached.waits.clone()).unwrap_or_default(),
            ..process
        };
        process.recall_waits();
        if let Some(saved_usage) = self.usage_store.take(pid, process.started) {
            process.usage.restore(saved_usage);
        }
        self.processes.insert(pid, process);
        Ok(())
    }

    /// Begins a move requested at `since`. One that cannot begin now is queued.
    pub(crate) fn begin_migration(
        &mut self,
        pid: HomePid,
        to: Destination,
        caller: PendingRequest,
        since: Instant,
    ) {
        let home = self.start.node;
        let refuse = |caller: PendingRequest, kind, why: &str| {
            caller.reply(&ShimReply::Refused(Refusal::new(kind, why)));
        };
        let to = if to == Destination::Node(home) { Destination::Home } else { to };
        if let Some(process) = self.processes.get_mut(&pid) {
            if process.frozen.is_some() {
                let again = to == Destination::Frozen;
                let kind = if again { RefusalKind::AlreadyDone } else { RefusalKind::CannotMove };
                let why = format!("process {pid} is frozen{}", if again { " already" } else { "" });
                let refusal = Refusal::new(kind, why).hint(format!("migrate {pid} continue"));
                return caller.reply(&ShimReply::Refused(refusal));
            }
            if to == Destination::Frozen && matches!(process.state, State::Draining) && !is_busy(process) {
                process.frozen = Some(Frozen::Requested);
                return caller.reply(&ShimReply::Done);
            }
        }
        let limit = rights_limit(&caller);
        let known = self.processes.get(&pid);
        if known.is_some_and(is_busy) {
            self.queued_moves.push((since, pid, to, caller));
            return;
        }
        let away = known.is_some_and(Process::is_away);
        let from = known.map_or(home, |process| self.current_node(process));
        match (to, away) {
            (Destination::Balance, _) => {
                refuse(caller, RefusalKind::BadRequest, "internal error: ternd must choose the node first");
            }
            (Destination::Home, false) => {
                refuse(caller, RefusalKind::AlreadyDone, &format!("process {pid} is at home already"));
            }
            (Destination::Node(node), _) if node == from => {
                refuse(caller, RefusalKind::AlreadyDone, &format!("process {pid} is on node {node} already"));
            }
            (Destination::Frozen, false) => self.freeze_at_home(pid, caller, since),
            (_, true) if known.is_some_and(|process| self.peers.link(process.peer).is_none()) => {
                refuse(caller, RefusalKind::CannotMove, OUT_OF_REACH);
            }
            (Destination::Home | Destination::Frozen, true) => {
                let Some(process) = self.processes.get_mut(&pid) else { return };
                if !matches!(process.state, State::Away) {
                    return refuse(caller, RefusalKind::CannotMove, OUT_OF_REACH);
                }
                process.task = Some(MigrationTask::new(Some((caller, to)), from));
                process.frozen = (to == Destination::Frozen).then_some(Frozen::Requested);
                self.begin_return(pid);
            }
            (Destination::Node(_), true) if self.sharers_away(pid).len() > 1 => {
                self.migrate_via_home(pid, to, caller, since);
            }
            (Destination::Node(node), _) => {
                let group = match if away { Ok(vec![pid]) } else { self.seize_group(pid, limit) } {
                    Ok(group) => group,
                    // The shim with the lower pid seizes the whole group. The request is redirected
                    // to the other shim if that has the lower pid, or does not release its process
                    // in time.
                    Err(GroupRefusal { held_by: Some((by, other)), .. })
                        if by < std::process::id() as i32 || since.elapsed() > OTHER_SHIM_TIMEOUT =>
                    {
                        return caller.reply(&ShimReply::HeldWith { pid: other });
                    }
                    Err(GroupRefusal { is_transient: true, .. }) if since.elapsed() < RETRY_TIMEOUT => {
                        self.queued_moves.push((since, pid, to, caller));
                        return;
                    }
                    Err(why) => return caller.reply(&ShimReply::Refused(why.refusal)),
                };
                let task = MigrationTask::new(Some((caller, to)), from);
                group.iter().for_each(|one| self.raise_rights_limit(*one, limit));
                self.prepare_destination(pid, group.clone(), vec![node], task.migration);
                for other in group.into_iter().filter(|other| *other != pid) {
                    if let Some(process) = self.processes.get_mut(&other) {
                        process.task = Some(MigrationTask {
                            migration: task.migration,
                            ..MigrationTask::new(None, from)
                        });
                    }
                }
                if let Some(process) = self.processes.get_mut(&pid) {
                    process.task = Some(task);
                }
            }
        }
    }

    /// Moves a process that shares memory by way of home to another node: at home its group is
    /// complete and leaves together.
    fn migrate_via_home(&mut self, pid: HomePid, to: Destination, caller: PendingRequest, since: Instant) {
        let is_away = self.processes.get(&pid).is_some_and(|one| matches!(one.state, State::Away));
        if !is_away || since.elapsed() > RETRY_TIMEOUT {
            let why = if is_away { "busy: it does not come home; try again" } else { OUT_OF_REACH };
            return caller.reply(&ShimReply::Refused(Refusal::new(RefusalKind::CannotMove, why)));
        }
        self.return_unasked(pid);
        self.queued_moves.push((since, pid, to, caller));
    }

    /// Retries the moves that were queued.
    pub(crate) fn retry_queued_moves(&mut self) {
        for (since, pid, to, caller) in std::mem::take(&mut self.queued_moves) {
            if !self.processes.get(&pid).is_some_and(is_busy) {
                self.begin_migration(pid, to, caller, since);
            } else if since.elapsed() < RETRY_TIMEOUT {
                self.queued_moves.push((since, pid, to, caller));
            } else {
                let why = "busy: it is on its way; try again";
                caller.reply(&ShimReply::Refused(Refusal::new(RefusalKind::CannotMove, why)));
            }
        }
    }

    /// Checks whether a process at home can leave, and seizes it. The error holds the reason and
    /// whether it is transient.
    pub(crate) fn seize_movable(&mut self, pid: HomePid, limit: RightsLimit) -> Result<(), (Refusal, bool)> {
        let known = self.processes.get(&pid);
        let tracer = if known.is_some() { std::process::id() as i32 } else { 0 };
        let limit = known.map_or(limit, |process| process.rights.max(limit));
        let movable = check_movable(pid.0, tracer, limit).map_err(|_gone| not_found(pid))?;
        movable.map_err(|reason| {
            // A vfork ends as soon as the child executes its program.
            let is_transient = matches!(reason, Unmovable::SharedAddressSpace(_));
            (Refusal::new(RefusalKind::CannotMove, reason.to_string()), is_transient)
        })?;
        let several = || procfs::status(pid.0).is_ok_and(|status| status.threads > 1);
        let before = several();
        // Tried twice: a thread that exits while another one executes a program cannot be seized
        // (EPERM).
        self.seize(pid).or_else(|_passing| self.seize(pid)).map_err(|error| {
            let refusal = Refusal::new(RefusalKind::CannotMove, error.to_string());
            // While another thread executes a program, the first thread exits. If the exec is
            // complete by now, a thread is gone, but not the process.
            let only_a_thread = || error.is_gone() && procfs::status(pid.0).is_ok();
            let is_transient = before || several() || only_a_thread();
            (
                refusal.hint("it may be traced by another program, or not be yours; see tern doctor"),
                is_transient,
            )
        })
    }

    /// A request allows this process to leave home with these rights.
    fn raise_rights_limit(&mut self, pid: HomePid, limit: RightsLimit) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.rights = process.rights.max(limit);
        }
    }

    pub(crate) fn hold_at_exec(&mut self, pid: HomePid, candidates: &[NodeId], caller: PendingRequest) {
        if let Err(error) = self.seize(pid) {
            return caller
                .reply(&ShimReply::Refused(Refusal::new(RefusalKind::CannotMove, error.to_string())));
        }
        self.raise_rights_limit(pid, rights_limit(&caller));
        let from = self.start.node;
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.state = State::AtExec;
        let first = candidates.first().map_or(Destination::Home, |node| Destination::Node(*node));
        let task = MigrationTask::new(Some((caller, first)), from);
        let migration = task.migration;
        process.task = Some(task);
        self.prepare_destination(pid, vec![pid], candidates.to_vec(), migration);
    }

    /// Requests a guest shim on the first of these nodes that accepts, and connects to the shim.
    /// Runs in a helper thread.
    pub(crate) fn prepare_destination(
        &self,
        pid: HomePid,
        group: Vec<HomePid>,
        nodes: Vec<NodeId>,
        migration: MigrationId,
    ) {
        let (run_dir, key) = (self.start.run_dir.clone(), Arc::clone(&self.key));
        let process = self.processes.get(&pid);
        let at_home = process.is_some_and(Process::is_at_home);
        // When a process moves from node to node its current guest shim sends it.
        let source = process
            .filter(|process| process.is_away())
            .and_then(|process| Some(self.peers.get(process.peer)?.fingerprint));
        let status = procfs::status(pid.0).unwrap_or_default();
        let started = self.start_helper(move || {
            let mut accepted_keys = vec![key.fingerprint()];
            accepted_keys.extend(source);
            let mut result = Err(Refusal::new(RefusalKind::BadRequest, "no node to go to"));
            let clock_offsets = match clock_offsets(&group) {
                Ok(offsets) => offsets,
                Err(why) => {
                    let refusal = Refusal::new(RefusalKind::CannotMove, why);
                    return ShimEvent::Prepared(pid, migration, Err(refusal), Vec::new());
                }
            };
            for node in nodes {
                let (accepted_keys, uid, gid) = (accepted_keys.clone(), status.uid[1], status.gid[1]);
                let group = group.clone();
                let request = Request::Prepare { node, migration, accepted_keys, uid, gid, group };
                result = ternd::request(&run_dir, &request)
                    .and_then(|reply| connect_to_guest_shim(node, reply, &key, clock_offsets));
                if result.is_ok() {
                    break;
                }
            }
            // Last, since the processes are stopped next.
            let sleeps = if result.is_ok() && at_home { measure_sleeps(&group) } else { Vec::new() };
            ShimEvent::Prepared(pid, migration, result.map(Box::new), sleeps)
        });
        if !started {
            let refusal = Refusal::new(RefusalKind::Unavailable, NO_THREAD);
            let _we_hold_the_other_end =
                self.events.0.send(ShimEvent::Prepared(pid, migration, Err(refusal), Vec::new()));
            self.waker.wake();
        }
    }

    pub(crate) fn destination_prepared(
        &mut self,
        pid: HomePid,
        migration: MigrationId,
        prepared: Result<Box<Peer>, Refusal>,
    ) {
        // If the process has ended in the meantime, the rest of its group continues.
        let processes_in_migration = self.processes_in_migration(migration);
        let Some(pid) = processes_in_migration
            .iter()
            .find(|one| **one == pid)
            .or(processes_in_migration.first())
            .copied()
        else {
            return;
        };
        let Some(process) = self.processes.get_mut(&pid) else { return };
        // If the move was aborted in the meantime, the new guest shim ends by itself.
        if process.task.as_ref().is_none_or(|t| t.migration != migration) {
            return;
        }
        let at_exec = matches!(process.state, State::AtExec);
        let peer = match prepared {
            Ok(peer) => self.peers.insert(*peer),
            Err(refusal) => {
                self.abort_task_with(pid, refusal);
                if !self.processes.get(&pid).is_some_and(Process::is_away) {
                    self.release(pid);
                }
                return;
            }
        };
        if at_exec {
            // mosrun waits for this reply and then executes the program.
            process.peer = peer;
            if let Some((caller, _)) = process.task.as_mut().and_then(|t| t.caller.take()) {
                caller.reply(&ShimReply::Done);
            }
            return;
        }
        if process.is_away() {
            if matches!(process.state, State::Away) {
                self.begin_remigration(pid, peer);
            } else {
                self.abort_task(pid, "it moved meanwhile");
            }
            return;
        }
        for pid in self.group_of(pid) {
            self.when_stopped(pid, WhenStopped::Leave(peer, false));
        }
    }
}

/// The rights with which the process of a request may leave home.
pub(super) fn rights_limit(caller: &PendingRequest) -> RightsLimit {
    match caller.request() {
        ShimRequest::Migrate { rights, .. } | ShimRequest::AtExec { rights, .. } => *rights,
        _ => RightsLimit::User,
    }
}

/// The effective user of a process, which may have changed since it was seized.
fn uid_now(pid: HomePid, when_seized: u32) -> u32 {
    procfs::status(pid.0).map_or(when_seized, |status| status.uid[1])
}

/// The reason of a move that is refused since there is no link to the guest.
pub(crate) const OUT_OF_REACH: &str = "suspended: its node is out of reach";

/// The reason of a move that is refused since no helper thread can be started.
const NO_THREAD: &str = "home's limit on processes is reached, so that no thread can be started; try again";

/// Seizes all threads of a process. Threads that a seized thread creates are seized as well, unless it
/// was in that call already: the kernel decides at the beginning of clone(2) whether the new thread is
/// traced. So a thread that this function has not found can appear until all threads have stopped
/// once ([`Shim::quiesce_resident`] looks for it then).
///
/// A thread may execute a program meanwhile. That thread then takes over the process's pid as its
/// tid, and is still seized if it was before; all other threads are gone. Once a thread is seized
/// the shim must continue, or nothing would handle its stops. Without `with_reaper` this function
/// seizes only the first thread, and returns false if there are others.
///
/// # Errors
/// If the process cannot be seized, or is gone. None of its threads is seized then.
pub(crate) fn seize_threads(process: &mut Process, with_reaper: bool) -> tern_tracee::Result<bool> {
    let (pid, own) = (process.pid, std::process::id() as i32);
    let is_seized = |tid: HomePid| procfs::status(tid.0).is_ok_and(|status| status.tracer == own);
    loop {
        let mut new = false;
        // The first thread first: if it cannot be seized, none is.
        let first = Some(pid.0).into_iter();
        for tid in first.chain(procfs::threads(pid.0)?) {
            let tid = HomePid(tid);
            if process.threads.contains_key(&tid) {
                continue;
            }
            // The first thread may have exited before others: a zombie cannot be seized, but
            // counts.
            let ended = exited_before_others(tid).filter(|_| tid == pid);
            if !with_reaper && tid != pid {
                return Ok(false);
            }
            let is_none_seized = process.threads.values().all(|thread| thread.draining.is_some());
            let seized = match ended {
                Some(false) => return Err(tern_tracee::Error::Gone { pid: pid.0 }),
                Some(true) => Ok(()),
                None => stop::seize(tid.0, stop::FOLLOW_THREADS),
            };
            match seized.or_else(|error| if is_seized(tid) { Ok(()) } else { Err(error) }) {
                Ok(()) => {
                    let Ok(thread) = Thread::new_resident(tid) else { continue };
                    process.threads.insert(tid, Thread { is_exiting: ended.is_some(), ..thread });
                    new = true;
                }
                Err(error) if tid == pid && is_none_seized => return Err(error),
                // It has exited; or an unseized thread executes a program, which is checked below.
                Err(_) => {}
            }
        }
        if new {
            continue;
        }
        let first_ends = process.threads.get(&pid).map(|first| first.is_exiting);
        if first_ends.is_some() && exited_before_others(pid) == Some(true)
            || first_ends == Some(false) && is_seized(pid)
        {
            return Ok(true);
        }
        // Another thread has taken over the pid by an exec: it is unseized, or was seized under its
        // old tid, which is not valid any more.
        process.threads.remove(&pid);
    }
}

/// Whether an exited thread was not the last of its process; none if the thread is alive.
fn exited_before_others(tid: HomePid) -> Option<bool> {
    let status = procfs::status(tid.0).ok().filter(procfs::Status::has_exited)?;
    Some(status.threads > 1)
}

/// Whether a move of the process is in progress.
fn is_busy(process: &Process) -> bool {
    process.task.is_some() || process.waits.is_for_stop() || process.left_behind.is_some()
}

/// Whether these clock samples suffice: the fastest is fast enough, or several are about as fast.
fn clock_samples_suffice(samples: &[Duration]) -> bool {
    let Some(fastest) = samples.iter().min() else { return false };
    *fastest <= FAST_CLOCK_SAMPLE
        || samples.iter().filter(|each| **each <= *fastest * 11 / 10).count() >= MIN_SIMILAR_SAMPLES
}

/// `clock_offsets`: by how many nanoseconds the program's clocks are ahead of ours.
fn connect_to_guest_shim(
    node: NodeId,
    reply: Reply,
    key: &Ephemeral,
    clock_offsets: [i64; 2],
) -> Result<Peer, Refusal> {
    let Reply::Prepared { address, shim, fingerprint } = reply else {
        return Err(Refusal::new(RefusalKind::Internal, "ternd sent an unexpected reply"));
    };
    let failed =
        |e: &dyn std::fmt::Display| Refusal::new(RefusalKind::Unavailable, format!("node {node}: {e}"));
    let tls = tern_wire::pinned_client(key, fingerprint).map_err(|e| failed(&e))?;
    let mut link = Link::connect_to_shim(&address, shim, &tls).map_err(|e| failed(&e))?;
    // The guest shim's first message: the shim has accepted the link and runs its main loop, so the
    // messages below are read at once.
    let deadline = Instant::now() + SLOW_SHIM_TIMEOUT;
    link.recv(deadline).map_err(|e| failed(&e))?;
    let (started, mut samples) = (Instant::now(), Vec::new());
    while samples.len() < MIN_CLOCK_SAMPLES
        || !clock_samples_suffice(&samples) && started.elapsed() < CLOCK_SAMPLING_TIMEOUT
    {
        let sent_at = Instant::now();
        let [monotonic, boot] = clock_offsets;
        let clocks = [(rustix::time::ClockId::Monotonic, monotonic), (rustix::time::ClockId::Boottime, boot)];
        let clocks = clocks.map(|(clock, offset)| {
            let now = rustix::time::clock_gettime(clock);
            (now.tv_sec * 1_000_000_000 + now.tv_nsec).wrapping_add(offset).cast_unsigned()
        });
        send(&mut link, HomePid(0), &Message::Clocks(clocks), &[]).map_err(|e| failed(&e))?;
        link.recv(deadline).map_err(|e| failed(&e))?;
        samples.push(sent_at.elapsed());
    }
    tracing::info!(%node, samples = samples.len(), fastest = ?samples.iter().min(), "the guest shim has our clocks");
    Ok(Peer::new(node, shim, address, fingerprint, link))
}
