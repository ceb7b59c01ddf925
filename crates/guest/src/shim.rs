//! The loop of a guest shim. It keeps the links, the workers and the members of its family on this
//! node. No other module of the crate has access to it. A guest, or a part of it, handles its own
//! events and returns messages and requests, which the shim carries out.

mod arrivals;
mod departures;
mod family_sandbox;
mod free_unmapped;
mod home_link;
mod keep_alive;
mod members;
mod messages;
mod onward;
mod poll;
mod requests;
mod stops;
mod uncreated;

use crate::error::{GuestError, GuestResult};
use crate::files::local::LocalNode;
use crate::process::Guest;
use crate::process::outbox::Outbox;
use crate::process::shared::State;
use crate::workers::Workers;
use family_sandbox::FamilySandbox;
use home_link::HomeLink;
use members::Members;
use onward::{Departures, SourceLink};
use std::collections::BTreeMap;
use std::time::Duration;
use tern_control::ShimRole;
use tern_control::control_socket::ControlSocket;
use tern_control::shim::ShimStart;
use tern_control::turn_watch::TurnWatch;
use tern_ids::{Epoch, HomePid};
use tern_image::content::ContentCache;
use tern_migrate::message::{Machine, Message};
use tern_tracee::{Memory, procfs};
use tern_wire::Ephemeral;

/// A shim that has no guest any more ends after this time at the latest. A shim that has had none
/// yet ends when home has been unreachable for this time.
const EMPTY_TIMEOUT: Duration = Duration::from_secs(30);

/// How long to wait, when the shim ends, for home to receive the last messages.
const LAST_MESSAGES_TIMEOUT: Duration = Duration::from_secs(1);

/// The away half of one family on one node.
#[derive(Debug)]
pub(crate) struct Shim {
    start: ShimStart,
    workers: Workers,
    control_socket: ControlSocket,
    home: HomeLink,
    /// The links from the previous nodes of guests that migrate onward to this one.
    source_links: Vec<SourceLink>,
    departures: Departures,
    members: Members,
    /// Children and threads that could not be created here and are being removed at home, and the
    /// threads that wait for this; all by their ids at home. For `uncreated` only.
    uncreated: BTreeMap<HomePid, HomePid>,
    sandbox: FamilySandbox,
    cache: ContentCache,
    machine: Machine,
    /// This node, and access to its files.
    local_node: LocalNode,
    /// Whether the last poll found a trap pending.
    is_trap_pending: bool,
    /// Reports steps of the main loop that take too long.
    /// Its home is no longer a member of the cluster.
    is_home_removed: bool,
    turn_watch: TurnWatch,
}

impl Shim {
    /// A shim without a guest, which waits for home.
    ///
    /// # Errors
    /// If it cannot be set up, or is not to be a guest shim.
    pub(crate) fn new(
        start: ShimStart,
        key: Ephemeral,
        control_socket: ControlSocket,
    ) -> anyhow::Result<Self> {
        let ShimRole::Guest { home, accepted_keys, uid, gid, .. } = start.role.clone() else {
            anyhow::bail!("this shim is not a guest shim");
        };
        let me = std::process::id() as i32;
        let machine = tern_migrate::machine::describe(&Memory::open(me)?, &procfs::maps(me)?)?;
        let local_node = LocalNode::new(start.node, &start.run_dir, &start.shared);
        Ok(Self {
            home: HomeLink::new(home, accepted_keys.first().copied()),
            workers: Workers::new(key, accepted_keys)?,
            control_socket,
            source_links: Vec::new(),
            departures: Departures::default(),
            members: Members::new(),
            uncreated: BTreeMap::new(),
            sandbox: FamilySandbox::new((uid, gid)),
            cache: ContentCache::new(&start.cache_dir),
            machine,
            local_node,
            is_trap_pending: true,
            is_home_removed: false,
            turn_watch: TurnWatch::new("guest shim", &start.run_dir, tern_tracee::stop::time_slept),
            start,
        })
    }

    /// Whether its family has left this node, or home is lost.
    pub(crate) fn is_finished(&self) -> bool {
        // Home's timeout expires 5 s earlier, and home then kills the deputies. Without them the
        // guests are of no use. Until the first guest arrives, `EMPTY_TIMEOUT` applies, which is
        // longer than home waits for a new shim.
        let has_had_guest = self.members.has_had_any();
        let timeout =
            if has_had_guest { self.link_timeout() + Duration::from_secs(5) } else { EMPTY_TIMEOUT };
        let unreachable = self.home.time_unreachable();
        let lost = unreachable.is_some_and(|time| time > timeout);
        // Home closes the link when it no longer needs this shim. `EMPTY_TIMEOUT` is for a home
        // that fails to close it.
        let left =
            self.members.empty_time().is_some_and(|time| unreachable.is_some() || time > EMPTY_TIMEOUT);
        (has_had_guest && left) || lost || self.is_home_removed
    }

    /// How long another node may be unreachable before its link counts as lost. It applies to home
    /// and to the next node of a departing guest.
    fn link_timeout(&self) -> Duration {
        Duration::from_secs(u64::from(self.start.give_up_after))
    }

    /// One turn of the main loop.
    ///
    /// # Errors
    /// If the events cannot be waited for.
    pub(crate) fn run_once(&mut self) -> anyhow::Result<()> {
        self.poll()?;
        self.turn_watch.begin();
        self.members.update_empty_since();
        self.serve_daemon_requests();
        self.turn_watch.step("serve_daemon_requests");
        self.handle_worker_events();
        self.turn_watch.step("handle_worker_events");
        self.handle_stops();
        self.turn_watch.step("handle_stops");
        self.receive_from_home();
        self.turn_watch.step("receive_from_home");
        self.handle_traps();
        self.turn_watch.step("handle_traps");
        self.start_file_opens();
        self.turn_watch.step("start_file_opens");
        self.start_connection_moves();
        self.turn_watch.step("start_connection_moves");
        self.change_code();
        self.turn_watch.step("change_code");
        self.do_due_work();
        self.turn_watch.step("do_due_work");
        self.retry_departures();
        self.turn_watch.step("retry_departures");
        self.advance_departures();
        self.turn_watch.step("advance_departures");
        self.drain_links();
        self.turn_watch.step("drain_links");
        self.report_fatal_signals();
        self.turn_watch.step("report_fatal_signals");
        self.request_fetches();
        self.turn_watch.step("request_fetches");
        self.report_reached_cpu_thresholds();
        self.turn_watch.step("report_reached_cpu_thresholds");
        self.keep_alive();
        self.turn_watch.step("keep_alive");
        self.continue_quiesce();
        self.turn_watch.step("continue_quiesce");
        Ok(())
    }

    /// Ends the shim: its family has left.
    pub(crate) fn end(mut self) {
        drop(self.control_socket);
        // The sandbox's helper is the last process in the control group.
        self.sandbox.end();
        tern_cgroup::guests::remove_if_empty();
        self.home.drain(LAST_MESSAGES_TIMEOUT);
    }

    /// Sends a message to home about a process or one of its threads. A failure drops the link.
    fn send_home(&mut self, tag: HomePid, message: &Message) {
        if self.home.send(tag, message).is_err() {
            self.drop_home_link();
        }
    }

    /// Has a guest do something, and then sends its messages home. `None` if there is no such guest.
    ///
    /// # Errors
    /// Those of the guest, or if the link to home is cut.
    fn try_act_on<T>(
        &mut self,
        pid: HomePid,
        act: impl FnOnce(&mut Guest, &mut Outbox) -> GuestResult<T>,
    ) -> GuestResult<Option<T>> {
        let Some(guest) = self.members.get_mut(pid) else { return Ok(None) };
        let mut outbox = Outbox::default();
        let done = act(guest, &mut outbox);
        let sent = self.home.send_all(outbox);
        let done = done?;
        sent?;
        Ok(Some(done))
    }

    /// As [`try_act_on`](Self::try_act_on), but handles an error itself and returns `None`.
    fn act_on<T>(
        &mut self,
        pid: HomePid,
        act: impl FnOnce(&mut Guest, &mut Outbox) -> GuestResult<T>,
    ) -> Option<T> {
        self.try_act_on(pid, act).unwrap_or_else(|error| {
            self.handle_error(pid, &error);
            None
        })
    }

    /// Drops the link to home, if there is one. Migrations that home has not decided are cancelled:
    /// arriving guests end, departing ones stay.
    fn drop_home_link(&mut self) {
        if !self.home.disconnect() {
            return;
        }
        self.members.iter_mut().for_each(|guest| guest.process.names.clear());
        for pid in self.departures.cancel_all() {
            if let Some(guest) = self.members.get_mut(pid) {
                guest.process.files.allow_delegations();
            }
        }
        for pid in self.members.pids() {
            match self.members.get(pid).map(|guest| &guest.process.state) {
                Some(State::Arriving(_)) => self.kill(pid),
                Some(State::Departing(_)) => self.cancel_departure(pid, None),
                _ => {}
            }
        }
    }

    fn handle_error(&mut self, pid: HomePid, error: &GuestError) {
        match error {
            GuestError::Link(error) => {
                tracing::warn!(%error, "the link to home is cut");
                self.drop_home_link();
            }
            GuestError::Process(_) | GuestError::Unmovable(_) => {
                // The exit status may have been collected already, so the main loop will not see
                // the end.
                if self.members.contains(pid) {
                    tracing::error!(%pid, %error, "a guest cannot continue here");
                    self.send_home(pid, &Message::KilledBySignal(libc::SIGKILL));
                    self.kill(pid);
                }
            }
        }
    }

    /// Kills a guest and waits until its pids are free.
    fn kill(&mut self, pid: HomePid) {
        self.members.kill(pid);
        self.departures.cancel(pid);
    }

    /// Removes a guest that has ended.
    fn remove(&mut self, pid: HomePid) {
        self.members.remove(pid);
        self.departures.cancel(pid);
    }

    /// Ends the guests of these epochs: home's daemon has reported that home no longer waits for
    /// them. While the link was down, home has taken them back, or they have ended there.
    fn end_not_awaited(&mut self, epochs: &[(HomePid, Epoch)]) {
        if self.home.is_connected() {
            // The link is back, and home decides by itself.
            return;
        }
        for (pid, epoch) in epochs {
            if self.members.get(*pid).is_some_and(|guest| guest.process.epoch == *epoch) {
                tracing::info!(%pid, ?epoch, "home no longer waits for this guest");
                self.kill(*pid);
            }
        }
    }
}
