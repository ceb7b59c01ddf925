//! The main loop of a guest shim. It polls the link to home, the guests' seccomp traps and ptrace
//! stops, and requests from the node's daemon.

use crate::files::local::LocalNode;
use crate::process::{Guest, State};
use crate::shim::Shim;
use crate::time::clocks::HomeClocks;
use crate::workers::Workers;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tern_control::control_socket::ControlSocket;
use tern_control::shim::ShimStart;
use tern_control::turn_watch::TurnWatch;
use tern_ids::{Epoch, HomePid};
use tern_image::content::ContentCache;
use tern_migrate::message::{Message, Reassembler};
use tern_tracee::listener::Listener;
use tern_tracee::{Memory, procfs};
use tern_wire::{Ephemeral, Link};

/// Interval between the heartbeats that the shim sends home.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// How long home may leave this shim without a guest before the shim ends.
const EMPTY_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval between the questions to home's daemon whether home still waits for guests that have
/// lost their link.
const ASK_HOME_INTERVAL: Duration = Duration::from_secs(1);

/// Limit, in seconds, for a call that the shim injects into a guest. The slowest such call is the
/// unmapping of a large region.
const INJECTED_CALL_TIMEOUT_SECS: u32 = 30;

/// Runs the shim until its family has left this node.
///
/// # Errors
/// If the shim cannot be set up.
pub fn run(start: ShimStart, key: Ephemeral, control_socket: ControlSocket) -> anyhow::Result<()> {
    let tern_control::ShimRole::Guest { home, accept, uid, gid, .. } = start.role.clone() else {
        anyhow::bail!("this shim is not a guest shim");
    };
    tern_tracee::call_timeout::kill_after(INJECTED_CALL_TIMEOUT_SECS, Duration::from_secs(1))?;
    let me = std::process::id() as i32;
    let machine = tern_migrate::machine::describe(&Memory::open(me)?, &procfs::maps(me)?)?;
    let local_node = LocalNode::new(start.node, &start.run_dir, &start.shared);
    let mut shim = Shim {
        home_node: home,
        workers: Workers::new(key, accept.clone())?,
        accept,
        identity: (uid, gid),
        control_socket,
        home: None,
        home_connection: 0,
        home_shim: None,
        last_asked_home: Instant::now(),
        source_links: Vec::new(),
        connecting: HashMap::new(),
        returning: HashMap::new(),
        draining_links: Vec::new(),
        inbox: Reassembler::default(),
        last_contact: Instant::now(),
        last_heartbeat: Instant::now(),
        sandbox: None,
        cache: ContentCache::new(&start.cache_dir).with_opener(local_node.file_opener(home)),
        machine,
        clocks: HomeClocks::default(),
        guests: HashMap::new(),
        by_host_tid: HashMap::new(),
        by_home_tid: HashMap::new(),
        local_node,
        empty_since: Instant::now(),
        has_had_guest: false,
        is_home_readable: true,
        is_trap_pending: true,
        turn_watch: TurnWatch::new("guest shim", &start.run_dir, tern_tracee::stop::time_slept),
        start,
    };
    while !shim.is_finished() {
        shim.run_once()?;
    }
    tracing::info!("the family has left");
    drop(shim.control_socket);
    // The sandbox's helper is the last process in the control group.
    shim.sandbox = None;
    tern_cgroup::guests::remove_if_empty();
    if let Some(home) = &mut shim.home {
        let _best_effort = home.drain(Instant::now() + Duration::from_secs(1));
    }
    Ok(())
}

impl Shim {
    pub(crate) fn is_finished(&self) -> bool {
        // Home's timeout expires 5 s earlier, and home then kills the deputies. Without them the
        // guests are of no use. Until the first guest arrives, `EMPTY_TIMEOUT` applies, which is
        // longer than home waits for a new shim.
        let timeout =
            if self.has_had_guest { self.link_timeout() + Duration::from_secs(5) } else { EMPTY_TIMEOUT };
        let lost = self.home.is_none() && self.last_contact.elapsed() > timeout;
        // Home closes the link when it has no use for this shim; the timeout covers a home that
        // does not.
        let left =
            self.guests.is_empty() && (self.home.is_none() || self.empty_since.elapsed() > EMPTY_TIMEOUT);
        (self.has_had_guest && left) || lost
    }

    /// How long another node may be unreachable before its link counts as lost. It applies to home
    /// and to the next node of a departing guest.
    pub(crate) fn link_timeout(&self) -> Duration {
        Duration::from_secs(u64::from(self.start.give_up_after))
    }

    pub(crate) fn run_once(&mut self) -> anyhow::Result<()> {
        self.poll()?;
        self.turn_watch.begin();
        if !self.guests.is_empty() {
            self.empty_since = Instant::now();
        }
        self.serve_node();
        self.step_ended("serve_node");
        self.handle_worker_events();
        self.step_ended("handle_worker_events");
        self.handle_stops();
        self.step_ended("handle_stops");
        self.receive_from_home();
        self.step_ended("receive_from_home");
        self.handle_traps();
        self.step_ended("handle_traps");
        self.start_openings();
        self.step_ended("start_openings");
        self.do_due_work();
        self.step_ended("do_due_work");
        self.return_delegations();
        self.step_ended("return_delegations");
        self.advance_departures();
        self.step_ended("advance_departures");
        self.drain_links();
        self.step_ended("drain_links");
        self.report_fatal_signals();
        self.step_ended("report_fatal_signals");
        self.request_fetches();
        self.step_ended("request_fetches");
        self.report_cpu_thresholds();
        self.step_ended("report_cpu_thresholds");
        self.keep_alive();
        self.step_ended("keep_alive");
        self.continue_quiesce();
        self.step_ended("continue_quiesce");
        Ok(())
    }

    /// Records that a step of this turn of the main loop has ended, and warns if it took long.
    fn step_ended(&mut self, step: &str) {
        if let Some(took) = self.turn_watch.step(step) {
            tracing::warn!(step, ?took, "a step of the main loop took long");
        }
    }

    pub(crate) fn poll(&mut self) -> anyhow::Result<()> {
        let listeners = self.listeners();
        let mut fds: Vec<(BorrowedFd<'_>, i16)> = Vec::new();
        let busy = self.guests.values().any(|guest| matches!(guest.process.state, State::Departing(_)));
        for link in self.home.iter().chain(self.source_links.iter().map(|s| &s.link)) {
            fds.push((
                link.as_fd(),
                if link.wants_write() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN },
            ));
        }
        for guest in self.guests.values() {
            if let State::Departing(departing) = &guest.process.state
                && let Some(link) = &departing.link
            {
                fds.push((
                    link.as_fd(),
                    if link.wants_write() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN },
                ));
            }
        }
        fds.push((self.workers.as_fd(), libc::POLLIN));
        let draining_links = self.draining_links.iter().map(|l| &l.link);
        fds.extend(draining_links.filter(|l| l.wants_write()).map(|l| (l.as_fd(), libc::POLLOUT)));
        // These come last: `is_trap_pending` is read from the end of `ready` below.
        fds.extend(listeners.iter().map(|l| (l.as_fd(), libc::POLLIN)));
        let has_deferred_call = listeners.iter().any(|l| l.has_deferred_call());
        let buffered = has_deferred_call
            || self.home.iter().chain(self.source_links.iter().map(|s| &s.link)).any(Link::has_frame);
        let full = self.home.as_ref().is_some_and(Link::wants_write);
        let due = self.guests.values().filter_map(Guest::due).min();
        let due = due.map(|due| due.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
        let timeout =
            if buffered || (busy && !full) { Duration::from_millis(1) } else { HEARTBEAT_INTERVAL / 2 };
        let timeout = due.map_or(timeout, |due| due.min(timeout));
        let ready = self.control_socket.wait(&fds, if buffered { Duration::ZERO } else { timeout })?;
        // Most turns serve either the link to home or the traps. The other one is then not read.
        self.is_home_readable = buffered || self.home.is_none() || ready.first().copied().unwrap_or(true);
        self.is_trap_pending = has_deferred_call || ready.iter().rev().take(listeners.len()).any(|r| *r);
        Ok(())
    }

    pub(crate) fn listeners(&self) -> Vec<Rc<Listener>> {
        let mut all: Vec<Rc<Listener>> = Vec::new();
        for listener in self.guests.values().filter_map(|guest| guest.process.listener.as_ref()) {
            if !all.iter().any(|l| Rc::ptr_eq(l, listener)) {
                all.push(Rc::clone(listener));
            }
        }
        all
    }

    pub(crate) fn keep_alive(&mut self) {
        let suspend = Duration::from_secs(u64::from(self.start.suspend_after));
        let mut is_silent = false;
        if self.home.is_some() && self.last_heartbeat.elapsed() > HEARTBEAT_INTERVAL {
            self.last_heartbeat = Instant::now();
            // Restores the nice value of guests that got a higher priority for a departure that did
            // not take place.
            for guest in self.guests.values().filter(|guest| matches!(guest.process.state, State::Running)) {
                guest.set_nice(self.start.guest_nice.into());
            }
            let live = self.guests.values_mut().filter(|guest| guest.is_active());
            let reports: Vec<_> = live
                .map(|guest| {
                    (
                        guest.process.pid,
                        Message::Usage(guest.process.cpu_meter.used(), guest.measure_demand()),
                    )
                })
                .collect();
            self.send_home(HomePid(0), &Message::Heartbeat);
            // A home shim that is slow does not count as silent, since its kernel still
            // acknowledges.
            let silence = self.home.as_mut().map_or(Duration::ZERO, Link::time_without_ack);
            if self.home.is_some() && silence.is_zero() {
                self.last_contact = Instant::now();
            }
            is_silent = silence > suspend;
            self.repeat_fetch_requests();
            self.find_unmapped();
            for (pid, used) in reports {
                self.send_home(pid, &used);
            }
        }
        if is_silent {
            tracing::warn!("home's machine has acknowledged nothing for {suspend:?}");
            self.drop_home_link();
        }
        if self.home.is_none() && self.last_contact.elapsed() > suspend {
            for guest in self.guests.values_mut() {
                guest.process.is_suspended |= matches!(guest.process.state, State::Running);
            }
        }
        self.ask_home_daemon();
    }

    /// Repeats the requests to be fetched home. An earlier journey home may have failed, or the
    /// request may have come while another journey was under way that failed.
    fn repeat_fetch_requests(&mut self) {
        let waiting = |guest: &&Guest| matches!(guest.process.state, State::Running);
        let waiting = self.guests.values().filter(waiting);
        let requests = waiting.filter_map(|guest| {
            Some((guest.process.pid, Message::FetchHome(guest.homeward_reason()?.to_owned())))
        });
        for (pid, message) in requests.collect::<Vec<_>>() {
            self.send_home(pid, &message);
        }
    }

    /// While the link to home is down, has the node's daemon ask home's daemon whether home still
    /// waits for these guests. So guests that home has taken back or declared lost end as soon as
    /// that is known.
    pub(crate) fn ask_home_daemon(&mut self) {
        let Some(shim) = self
            .home_shim
            .filter(|_| self.home.is_none() && self.last_asked_home.elapsed() > ASK_HOME_INTERVAL)
        else {
            return;
        };
        self.last_asked_home = Instant::now();
        let epochs: Vec<(HomePid, Epoch)> =
            self.guests.values().map(|guest| (guest.process.pid, guest.process.epoch)).collect();
        if !epochs.is_empty() {
            self.workers.ask_home_daemon(self.start.run_dir.clone(), self.home_node, shim, epochs);
        }
    }
}
