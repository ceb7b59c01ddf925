//! The home half: places each command of this node, and relays between the command and its caller.
//!
//! ```text
//!  mexec ──JobRequest──▶ caller: one thread each
//!                     ├▶ admission  limits the placement searches of each user
//!                     ├▶ ranking    ranks the nodes by their load
//!                     ├▶ slot_wait  waits for a slot; queue: for this node's own slots
//!                     ├▶ classes    run times of such commands
//!                     ├▶ links      connections to the nodes' away halves
//!                     └▶ relay      streams, signals and the end
//! ```

mod admission;
mod caller;
mod clamp;
mod classes;
mod cluster_view;
mod links;
mod queue;
mod ranking;
pub(crate) mod relay;
mod slot_wait;
mod usage;

use crate::frames::{self, LocalFrame};
use crate::job_table::JobTable;
use crate::lock;
use crate::messages::{
    ExecReply, ExecRequest, JobRequest, NodeChoice, PendingReason, PlacementReason, WANTS_PROGRESS, kind,
};
use admission::AdmissionLimit;
use anyhow::{Context, Result, bail};
use caller::Caller;
use classes::CommandClasses;
use cluster_view::ClusterView;
use links::NodeLinks;
use queue::LocalQueue;
use ranking::{Constraint, NodeInfo};
use rustix::event::{PollFd, PollFlags, poll};
use slot_wait::WaitOutcome;
use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tern_control::{Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_node::Config;
use tern_wire::{Identity, Link};
use usage::{RunningCommand, UsageTracker};

/// Time limit for a caller's request, and for a node's reply to a request. A node's first command
/// needs a new container.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);

/// The maximum number of concurrent placement searches of a user: enough that each node always has
/// a queued request of the user.
const MAX_USER_SEARCHES: u32 = 8;

/// The maximum number of commands of one user at a time: less than the number of connections, so
/// that no user locks others out.
const MAX_USER_COMMANDS: u32 = 2048;

/// After a node has refused a command or was lost with it, the node is not asked to run this
/// command again for this long. The exclusion is limited, since the command may wait for hours for
/// a slot on another node.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// The home half of a node.
#[derive(Debug)]
pub(crate) struct Home {
    me: NodeId,
    config: Config,
    view: ClusterView,
    links: NodeLinks,
    classes: CommandClasses,
    usage: UsageTracker,
    /// Held while a caller chooses a node, so that only one caller sees a free slot of this node.
    choosing: Mutex<()>,
    queue: LocalQueue,
    searches: AdmissionLimit,
    commands: AdmissionLimit,
    jobs: Arc<JobTable>,
}

/// After a node's executor has ended, the node is not asked again for this long. The executor is
/// usually restarted at once, for example after an upgrade.
const RESTART_INTERVAL: Duration = Duration::from_secs(1);

/// The outcome of an attempt to run a command on a node.
pub(crate) enum RunOutcome {
    /// The command has ended, and the caller has all replies.
    Finished,
    /// The node has no free slot.
    NoSlot,
    /// It was not run: the node has refused it, or cannot be reached.
    NotRun(Refusal),
    /// The node is lost, and nothing was relayed to the caller. A repeatable command may be run
    /// again.
    NodeLost,
    /// The node is lost, and something was relayed to the caller.
    Cut,
}

/// Nodes that a command is not sent to for a while, and until when.
#[derive(Debug, Default)]
struct ExcludedNodes(HashMap<NodeId, Instant>);

impl ExcludedNodes {
    fn insert(&mut self, node: NodeId) {
        self.0.insert(node, Instant::now() + RETRY_INTERVAL);
    }

    fn exclude_for_restart(&mut self, node: NodeId) {
        self.0.insert(node, Instant::now() + RESTART_INTERVAL);
    }

    fn contains(&self, node: NodeId) -> bool {
        self.0.get(&node).is_some_and(|until| Instant::now() < *until)
    }
}

impl Home {
    /// The home half of this node.
    pub(crate) fn new(config: Config, identity: Identity, jobs: Arc<JobTable>) -> Self {
        let me = identity.node();
        Self {
            me,
            view: ClusterView::new(&config),
            links: NodeLinks::new(&config, identity),
            // The default number of slots of a node that has this node's number of CPUs.
            classes: CommandClasses::new(1 + std::thread::available_parallelism().map_or(1, usize::from)),
            usage: UsageTracker::new(me),
            choosing: Mutex::default(),
            queue: LocalQueue::default(),
            searches: AdmissionLimit::new(MAX_USER_SEARCHES),
            commands: AdmissionLimit::new(MAX_USER_COMMANDS),
            jobs,
            config,
        }
    }

    /// Serves one caller, from its request to the end of its command.
    pub(crate) fn serve(&self, mut socket: UnixStream) -> Result<()> {
        let (pid, credentials) = tern_node::peer_credentials(&socket)?;
        let uid = credentials.uid;
        socket.set_read_timeout(Some(REQUEST_TIMEOUT))?;
        let LocalFrame { kind: kind::JOB_REQUEST, stream, payload } = frames::read_frame(&mut socket)? else {
            bail!("no job request was received")
        };
        let mut request: JobRequest = frames::decode(&payload)?;
        let Some(_permit) = self.commands.acquire((uid, None), Duration::ZERO) else {
            let message =
                format!("{MAX_USER_COMMANDS} commands of this user are placed from this node already");
            let refused = ExecReply::Refused(Refusal::new(RefusalKind::Unavailable, message));
            return Ok(frames::write_message(&mut socket, kind::EXEC_REPLY, &refused)?);
        };
        if uid != 0 {
            clamp::clamp(&mut request.task, pid)?;
        }
        let entry = self.jobs.add(&request.task, uid, None);
        let wants_progress = stream == WANTS_PROGRESS;
        let mut caller =
            Caller { socket, pid, credentials, wants_progress, entry, permit: None, queue_place: None };
        match self.place(&request, &mut caller) {
            Ok(()) => Ok(()),
            Err(error) => {
                let refusal = error.downcast::<Refusal>();
                let refusal =
                    refusal.unwrap_or_else(|e| Refusal::new(RefusalKind::Internal, format!("{e:#}")));
                caller.reply(&ExecReply::Refused(refusal))
            }
        }
    }

    /// Finds a node that runs the command, and relays until it has ended.
    fn place<'a>(&'a self, request: &JobRequest, caller: &mut Caller<'a>) -> Result<()> {
        let uid = caller.credentials.uid;
        let class = &request.class;
        let is_best = matches!(request.nodes, NodeChoice::Best);
        // Counts as a running short command until this is dropped.
        let short = is_best.then(|| self.classes.permit_short(uid, class)).flatten();
        let constraint = match &request.nodes {
            NodeChoice::Best => {
                Constraint::Any { is_short: short.is_some(), cpu_need: self.classes.cpu_need(uid, class) }
            }
            NodeChoice::Among(nodes) => Constraint::Among(nodes.clone()),
        };
        let (mut excluded, mut refusal) = (ExcludedNodes::default(), None);
        let mut requeued = None;
        // A command that will not wait for a slot must not wait for the searches of the user's
        // other commands either.
        let is_light = is_best && self.classes.permit_light(uid, class).is_some();
        if !constraint.stays_home(self.me) && !is_light {
            caller.admit(&self.searches, constraint.single_node())?;
        }
        let since = Instant::now();
        loop {
            let choosing = lock(&self.choosing);
            let (mut now, later) = match self.candidates(&constraint, (&excluded, since)) {
                Err(error) => return Err(refusal.map_or(error, anyhow::Error::from)),
                Ok(candidates) => candidates,
            };
            if !constraint.stays_home(self.me) && !self.is_next(caller) {
                now.retain(|node| *node != self.me);
            }
            let is_home_first = now.first() == Some(&self.me);
            let mut running = is_home_first.then(|| self.start_here(uid));
            drop(choosing);
            let mut outcome = None;
            for node in now {
                if node == self.me {
                    let taken = running.take();
                    let Some(running) = taken.map_or_else(
                        || self.try_start_here(&constraint, (&excluded, since), caller),
                        |running| Ok(Some(running)),
                    )?
                    else {
                        continue;
                    };
                    let reason = requeued.unwrap_or_else(|| constraint.reason(true));
                    return self.run_here(request, reason, caller, running);
                }
                let reason = requeued.unwrap_or_else(|| constraint.reason(false));
                match self.run_on(node, request, reason, caller)? {
                    RunOutcome::NoSlot => {}
                    // It is excluded for a while, also from the wait for a slot.
                    RunOutcome::NotRun(why) => {
                        excluded.insert(node);
                        refusal = Some(why);
                    }
                    other => {
                        outcome = Some((node, other));
                        break;
                    }
                }
            }
            if outcome.is_none() {
                // A command that needs next to no CPU time does not wait for a slot.
                let light = is_best.then(|| self.classes.permit_light(uid, class)).flatten();
                if light.is_some() && later.contains(&self.me) {
                    return self.run_here(request, PlacementReason::Short, caller, self.start_here(uid));
                }
                let later: Vec<_> = later.into_iter().filter(|node| !excluded.contains(*node)).collect();
                outcome = match self.wait_for_slot(&constraint, &later, (&mut excluded, since), caller)? {
                    WaitOutcome::Slot(node, link) => {
                        let reason = requeued.unwrap_or(PlacementReason::FirstSlot);
                        Some((node, self.run_over(node, *link, request, reason, caller)?))
                    }
                    WaitOutcome::Changed => None,
                    WaitOutcome::NoNodes => {
                        let none = || {
                            Refusal::new(RefusalKind::Unavailable, "no node can run it").hint("tern status")
                        };
                        return Err(refusal.take().unwrap_or_else(none).into());
                    }
                };
            }
            match outcome {
                Some((_, RunOutcome::Finished)) => return Ok(()),
                Some((node, RunOutcome::NodeLost)) if request.repeatable => {
                    excluded.insert(node);
                    requeued = Some(PlacementReason::Requeued(node));
                    caller.admit(&self.searches, constraint.single_node())?;
                }
                Some((node, RunOutcome::NodeLost | RunOutcome::Cut)) => {
                    return caller.reply(&ExecReply::NodeLost(node));
                }
                Some((node, RunOutcome::NotRun(why))) => {
                    excluded.insert(node);
                    refusal = Some(why);
                }
                Some((_, RunOutcome::NoSlot)) | None => {}
            }
        }
    }

    /// The state of this node and of those that it trusts.
    fn known_nodes(&self) -> Result<Vec<NodeInfo>> {
        let mut nodes = self.view.nodes(|node| self.usage.on_node(node))?;
        nodes.retain(|node| node.node == self.me || self.config.trusts(node.node));
        Ok(nodes)
    }

    fn known_node(&self, node: NodeId) -> Option<NodeInfo> {
        self.known_nodes().ok()?.into_iter().find(|known| known.node == node)
    }

    /// The nodes to ask now, and those that may have a slot later.
    fn candidates(
        &self,
        constraint: &Constraint,
        (excluded, since): (&ExcludedNodes, Instant),
    ) -> Result<(Vec<NodeId>, Vec<NodeId>)> {
        let mut known = self.known_nodes()?;
        known.retain(|known| !excluded.contains(known.node));
        let (now, later) = (
            ranking::rank(&known, self.me, constraint, since.elapsed()),
            ranking::eligible(&known, constraint),
        );
        if later.is_empty() {
            let message = "none of the nodes asked for is up and trusted";
            return Err(Refusal::new(RefusalKind::Unavailable, message)
                .hint("tern status, which lists them")
                .into());
        }
        Ok((now, later))
    }

    /// Whether this caller is next for a slot of this node.
    fn is_next(&self, caller: &Caller<'_>) -> bool {
        self.queue.is_next(caller.credentials.uid, caller.queue_place.as_ref(), &|uid| {
            self.usage.of_user(uid, None)
        })
    }

    /// Takes a slot of this node after other nodes were asked first. `None` if another caller has
    /// taken it meanwhile, or is next.
    fn try_start_here(
        &self,
        constraint: &Constraint,
        excluded: (&ExcludedNodes, Instant),
        caller: &Caller<'_>,
    ) -> Result<Option<RunningCommand<'_>>> {
        let _choosing = lock(&self.choosing);
        let has_slot = self.candidates(constraint, excluded)?.0.contains(&self.me);
        Ok((has_slot && self.is_next(caller)).then(|| self.start_here(caller.credentials.uid)))
    }

    fn start_here(&self, uid: u32) -> RunningCommand<'_> {
        self.queue.record_served(uid);
        self.usage.start(self.me, uid)
    }

    /// Lets the caller execute the command itself. The command counts as running until it ends.
    fn run_here(
        &self,
        request: &JobRequest,
        reason: PlacementReason,
        caller: &mut Caller<'_>,
        running: RunningCommand<'_>,
    ) -> Result<()> {
        let pid =
            rustix::process::Pid::from_raw(caller.pid).context("the caller is of another pid namespace")?;
        let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
        caller.set_placed(self.me, reason)?;
        caller.reply(&ExecReply::RunLocally)?;
        let started = Instant::now();
        while let Err(rustix::io::Errno::INTR) = poll(&mut [PollFd::new(&process, PollFlags::IN)], None) {}
        let wall = started.elapsed();
        let need = self.known_node(self.me).map_or(wall, |known| known.standard_time(wall));
        self.classes.record(caller.credentials.uid, &request.class, wall, need);
        running.finish(need);
        self.queue.wake_next(&|uid| self.usage.of_user(uid, None));
        Ok(())
    }

    /// Runs the command on another node, if that has a free slot.
    fn run_on(
        &self,
        node: NodeId,
        request: &JobRequest,
        reason: PlacementReason,
        caller: &mut Caller<'_>,
    ) -> Result<RunOutcome> {
        caller.set_pending(PendingReason::NodeReply(node))?;
        match self.links.get(node) {
            Ok(link) => self.run_over(node, link, request, reason, caller),
            Err(error) => {
                let message = format!("node {node} cannot be reached: {error:#}");
                Ok(RunOutcome::NotRun(Refusal::new(RefusalKind::Unavailable, message)))
            }
        }
    }

    fn run_over(
        &self,
        node: NodeId,
        mut link: Link,
        request: &JobRequest,
        reason: PlacementReason,
        caller: &mut Caller<'_>,
    ) -> Result<RunOutcome> {
        let uid = caller.credentials.uid;
        let running = self.usage.start(node, uid);
        let run = ExecRequest::Run(Box::new(request.task.clone()), caller.credentials.clone());
        match links::call(&mut link, &run, Instant::now() + REQUEST_TIMEOUT) {
            Ok(ExecReply::NoSlot) => {
                self.links.put_back(node, link);
                Ok(RunOutcome::NoSlot)
            }
            Ok(ExecReply::Refused(refusal)) => Ok(RunOutcome::NotRun(refusal)),
            Ok(reply @ (ExecReply::Started(_) | ExecReply::StartFailed(..))) => {
                caller.set_placed(node, reason)?;
                // The caller sends input only after `Started`, which therefore must not be held
                // back; and input that was consumed cannot be sent again.
                let holds_output = request.repeatable && !request.task.forwards_stdin;
                let (outcome, report) = relay::relay(&mut link, &mut caller.socket, reply, holds_output)?;
                if let Some(report) = report {
                    let used = Duration::from_micros(report.cpu_us);
                    let used =
                        self.known_node(node).map_or(used, |known| NodeInfo::to_standard(known.speed, used));
                    running.finish(used);
                    self.classes.record(uid, &request.class, Duration::from_micros(report.wall_us), used);
                    self.links.put_back(node, link);
                }
                Ok(outcome)
            }
            Ok(reply) => bail!("node {node} sent an unexpected reply to a run request: {reply:?}"),
            // The command may have been started.
            Err(error) => {
                tracing::info!(%node, "lost while a command was requested: {error:#}");
                Ok(RunOutcome::NodeLost)
            }
        }
    }
}
