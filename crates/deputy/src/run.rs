//! The main loop of a home shim: it waits for guest shims, traced processes, and ternd.

use crate::files::content::ContentTransfers;
use crate::files::names::NameTracker;
use crate::files::shared_fs::SharedFilesystems;
use crate::files::timed_worker::TimedWorker;
use crate::links::peers::Peers;
use crate::links::reconnect::HEARTBEAT_INTERVAL;
use crate::process::Process;
use crate::process::thread::Thread;
use crate::shim::{Detached, Shim, ShimEvent};
use crate::shm::shared_memory::SharedMemory;
use crate::time::usage_store::UsageStore;
use crate::waker::Waker;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tern_control::control_socket::ControlSocket;
use tern_control::shim::ShimStart;
use tern_control::turn_watch::TurnWatch;
use tern_wire::Ephemeral;

/// How long a shim without processes waits before it ends. ternd may still send it requests.
const EMPTY_TIMEOUT: Duration = Duration::from_secs(1);

/// How often the shim examines whether it needs to keep what it has recorded of detached processes.
const DETACHED_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the shim until it has no process, no queued move and no detached process left.
///
/// # Errors
/// If the shim cannot start.
pub fn run(start: ShimStart, key: Ephemeral, control_socket: ControlSocket) -> anyhow::Result<()> {
    let usage_store = UsageStore::new(&start.run_dir);
    let waker = Waker::new()?;
    let turn_watch = TurnWatch::new("home shim", &start.run_dir, tern_tracee::stop::time_slept);
    let mut shim = Shim {
        shared_filesystems: SharedFilesystems::new(start.shared.clone()),
        comparisons: TimedWorker::default(),
        shared_memory: SharedMemory::new(waker.clone()),
        start,
        key: Arc::new(key),
        control_socket,
        waker,
        was_woken: true,
        peers: Peers::default(),
        processes: HashMap::new(),
        events: channel(),
        early_stops: HashMap::new(),
        uncreated: HashMap::new(),
        queued_moves: Vec::new(),
        content_transfers: ContentTransfers::default(),
        names: NameTracker::default(),
        complete_group: None,
        detached: Vec::new(),
        usage_store,
        test_freeze: tern_migrate::fault::FreezeRequest::from_env(),
        empty_since: Instant::now(),
        detached_checked: Instant::now(),
        turn_watch,
    };
    // The first request follows the start of the shim, but may take a while.
    shim.empty_since += Duration::from_secs(10);
    while !shim.is_over() {
        shim.run_once()?;
    }
    // Closed first, so that no request arrives during the rest, which may take a while.
    drop(shim.control_socket);
    shim.usage_store.sweep();
    for peer in shim.peers.iter_mut() {
        if let Some(link) = &mut peer.link {
            let _best_effort = link.drain(Instant::now() + Duration::from_secs(2));
        }
    }
    tracing::info!("all processes are home");
    Ok(())
}

impl Shim {
    pub(crate) fn is_over(&mut self) -> bool {
        self.detached.retain(Detached::is_alive);
        if self.detached_checked.elapsed() > DETACHED_INTERVAL {
            self.detached.retain(Detached::is_needed);
            self.detached_checked = Instant::now();
        }
        if !self.processes.is_empty() || !self.queued_moves.is_empty() || !self.detached.is_empty() {
            self.empty_since = Instant::now();
        }
        Instant::now() > self.empty_since + EMPTY_TIMEOUT
    }

    pub(crate) fn run_once(&mut self) -> anyhow::Result<()> {
        self.wait()?;
        self.turn_watch.begin();
        self.handle_requests();
        self.turn_watch.step("handle_requests");
        self.handle_events();
        self.turn_watch.step("handle_events");
        self.handle_stops();
        self.turn_watch.step("handle_stops");
        self.continue_stops();
        self.turn_watch.step("continue_stops");
        self.handle_messages();
        self.turn_watch.step("handle_messages");
        self.release_overdue_signals();
        self.turn_watch.step("release_overdue_signals");
        self.fire_late();
        self.turn_watch.step("fire_late");
        self.continue_returns();
        self.turn_watch.step("continue_returns");
        self.end_offers_at_home();
        self.continue_revocations();
        self.turn_watch.step("continue_revocations");
        self.end_socket_calls();
        self.collect_finished_calls();
        self.turn_watch.step("collect_finished_calls");
        self.continue_undoing();
        self.turn_watch.step("continue_undoing");
        self.report_readiness();
        self.turn_watch.step("report_readiness");
        self.collect_scans();
        self.turn_watch.step("collect_scans");
        self.handle_opens();
        self.turn_watch.step("handle_opens");
        self.continue_sending();
        self.turn_watch.step("continue_sending");
        self.continue_content_transfers();
        self.turn_watch.step("continue_content_transfers");
        self.retry_busy_guests();
        self.turn_watch.step("retry_busy_guests");
        // Before moves are retried, so that they notice an open that is released here.
        self.release_blocked_opens();
        self.turn_watch.step("release_blocked_opens");
        self.retry_queued_moves();
        self.turn_watch.step("retry_queued_moves");
        self.keep_alive();
        self.turn_watch.step("keep_alive");
        Ok(())
    }

    pub(crate) fn wait(&mut self) -> anyhow::Result<()> {
        let mut fds: Vec<(BorrowedFd<'_>, i16)> = vec![(self.waker.fd(), libc::POLLIN)];
        fds.extend(self.names.fd().map(|names| (names, libc::POLLIN)));
        fds.extend(self.shared_memory.watch_fd().map(|watch| (watch, libc::POLLIN)));
        let mut timeout = HEARTBEAT_INTERVAL / 2;
        let mut threads = self.processes.values().flat_map(|process| process.threads.values());
        if threads.any(Thread::needs_polling) {
            timeout = Duration::from_millis(5);
        }
        let threads = self.processes.values().flat_map(|process| process.threads.values());
        if let Some(at) = threads.filter_map(Thread::must_end_call_at).min() {
            let left = at.saturating_duration_since(Instant::now());
            timeout = timeout.min(left.max(Duration::from_millis(1)));
        }
        let is_retried = |process: &Process| process.waits.needs_polling();
        if !self.queued_moves.is_empty()
            || !self.uncreated.is_empty()
            || self.processes.values().any(is_retried)
        {
            timeout = Duration::from_millis(5);
        }
        if self.processes.values().any(Process::waits_for_group) {
            timeout = Duration::from_millis(1);
        }
        for link in self.peers.links() {
            fds.push((
                link.as_fd(),
                if link.wants_write() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN },
            ));
            if link.has_frame() {
                timeout = Duration::ZERO;
            }
        }
        fds.extend(self.watched_sets().map(|set| (set.as_fd(), libc::POLLIN)));
        let offers = fds.len();
        for process in self.processes.values() {
            let offers = process.delegations.connections.offers();
            fds.extend(offers.map(|offer| (offer.as_fd(), libc::POLLRDHUP)));
        }
        let ready = self.control_socket.wait(&fds, timeout)?;
        let has_ended = ready.get(offers..).is_some_and(|offers| offers.contains(&true));
        self.was_woken = ready.first().copied().unwrap_or(true);
        if self.names.fd().is_some() && ready.get(1).copied().unwrap_or(true) {
            self.send_name_changes();
        }
        if has_ended {
            self.report_ended_offers();
        }
        Ok(())
    }

    pub(crate) fn handle_events(&mut self) {
        while let Ok(event) = self.events.1.try_recv() {
            match event {
                ShimEvent::Prepared(pid, migration, prepared, sleeps) => {
                    self.record_sleeps(sleeps);
                    self.destination_prepared(pid, migration, prepared);
                }
                ShimEvent::Measured(pid, migration, sleeps) => self.waits_measured(pid, migration, sleeps),
                ShimEvent::ReconnectDone(peer, found) => self.reconnect_done(peer, found),
            }
        }
    }
}
