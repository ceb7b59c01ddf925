//! Moving a process: finds or starts the home shim that holds it, and sends the shim the request.

pub(crate) mod evacuation;
pub(crate) mod expel;

use crate::balance::query;
use crate::node::Node;
use crate::os::sync::lock;
use crate::peer::client;
use crate::peer::message::{PeerReply, PeerRequest};
use crate::process::permission::{Caller, check_may_move};
use crate::process::procfs::{self, is_same_process};
use crate::shim;
use std::time::Duration;
use tern_control::shim::RightsLimit;
use tern_control::{
    Advice, Destination, Lock, ReadError, Refusal, RefusalKind, Reply, ShimReply, ShimRequest, ShimRole,
};
use tern_ids::{Epoch, Fingerprint, HomePid, MigrationId, NodeId, ShimId};

/// Timeout of starting a shim on another node.
const START_SHIM_TIMEOUT: Duration = Duration::from_secs(15);

/// Maximum number of times that a request is sent on to another shim, and the pause before the next
/// try if no shim holds the process.
const MAX_REDIRECTS: u32 = 50;
const REDIRECT_DELAY: Duration = Duration::from_millis(10);

/// Timeout of asking a node whether a shim lives.
const LOCATE_TIMEOUT: Duration = Duration::from_secs(2);

fn refused(kind: RefusalKind, message: impl Into<String>) -> Refusal {
    Refusal::new(kind, message)
}

fn gone(pid: HomePid) -> Refusal {
    procfs::refusal(pid, ReadError::Gone)
}

/// Held while a process gets its first shim, so that only one is started.
struct FirstMove<'a> {
    node: &'a Node,
    pid: HomePid,
}

impl<'a> FirstMove<'a> {
    fn begin(node: &'a Node, pid: HomePid) -> Result<Self, Refusal> {
        if !lock(&node.first_moves).insert(pid.0) {
            let busy = format!("process {pid} is being moved already");
            return Err(refused(RefusalKind::Unavailable, busy).hint("try again when that is done"));
        }
        Ok(Self { node, pid })
    }
}

impl Drop for FirstMove<'_> {
    fn drop(&mut self) {
        lock(&self.node.first_moves).remove(&self.pid.0);
    }
}

/// `migrate PID …`.
pub(crate) fn migrate_for_caller(
    node: &Node,
    caller: Caller,
    pid: HomePid,
    to: Destination,
) -> Result<Reply, Refusal> {
    let started = procfs::read_stat(pid.0).map_err(|e| procfs::refusal(pid, e))?.start;
    if pid.0 == 1 {
        let init = "process 1 is the init of this node, which is never moved";
        return Err(refused(RefusalKind::CannotMove, init));
    }
    check_may_move(&node.config, caller, pid.0)?;
    let rights = if caller.is_root() { RightsLimit::Any } else { limit_of_rights(node, pid) };
    move_with_rights(node, (pid, started), to, rights)
}

/// The rights with which a process may be moved unless root requests that: those of root if
/// `move_root` is set, or if root has started it with mosrun.
fn limit_of_rights(node: &Node, pid: HomePid) -> RightsLimit {
    let may_be_root = node.config.move_root || node.registry.is_by_root(pid.0);
    if may_be_root { RightsLimit::Root } else { RightsLimit::User }
}

/// `migrate PID continue`: resumes a frozen process.
pub(crate) fn continue_frozen(node: &Node, caller: Caller, pid: HomePid) -> Result<Reply, Refusal> {
    check_may_move(&node.config, caller, pid.0)?;
    match shim::home_shim_of(&node.config.run_dir, pid) {
        Some(shim) => forward_to_shim(node, shim, &ShimRequest::Continue { pid }),
        None => Err(refused(RefusalKind::AlreadyDone, format!("process {pid} is not frozen"))),
    }
}

/// Moves a process that the balancer has chosen, or that a node sends away. `started` is its start
/// time, which distinguishes it from a later process with the same pid.
pub(crate) fn move_process(
    node: &Node,
    pid: HomePid,
    started: u64,
    to: Destination,
) -> Result<Reply, Refusal> {
    move_with_rights(node, (pid, started), to, limit_of_rights(node, pid))
}

/// Moves a process for which permission was checked already.
fn move_with_rights(
    node: &Node,
    (pid, started): (HomePid, u64),
    to: Destination,
    rights: RightsLimit,
) -> Result<Reply, Refusal> {
    let to = match to {
        Destination::Balance => match query::better_node(node, pid)? {
            Some(to) if to == node.me() => Destination::Home,
            Some(to) => Destination::Node(to),
            None => {
                let message = format!("process {pid} is best where it is");
                return Err(
                    refused(RefusalKind::Unavailable, message).hint("migrate --why shows the numbers")
                );
            }
        },
        Destination::Node(other) if other == node.me() => Destination::Home,
        Destination::Node(other) => {
            if !node.map().contains(other) {
                return Err(refused(RefusalKind::NotFound, format!("there is no node {other} in the map")));
            }
            check_trusted(node, other)?;
            Destination::Node(other)
        }
        Destination::Home | Destination::Frozen => to,
    };
    if matches!(to, Destination::Node(_)) && node.registry.never_moves(pid.0) {
        let message = format!("process {pid} was started with nomig, or by a process that was");
        return Err(refused(RefusalKind::CannotMove, message));
    }
    let request = ShimRequest::Migrate { pid, to, rights };
    let mut may_retry = true;
    while let Some(shim) = shim::home_shim_of(&node.config.run_dir, pid) {
        match forward_to_shim(node, shim, &request) {
            // Since the shim replied that it holds the process, it may have detached the process
            // and ended.
            Err(refusal)
                if refusal.kind == RefusalKind::NotFound
                    && std::mem::take(&mut may_retry)
                    && is_same_process(pid.0, started) => {}
            reply => return reply,
        }
    }
    if to == Destination::Home {
        return Err(refused(RefusalKind::AlreadyDone, format!("process {pid} is at home already")));
    }
    let first_move = FirstMove::begin(node, pid)?;
    // A shim may have been started since the check above.
    let shim = match shim::home_shim_of(&node.config.run_dir, pid) {
        Some(shim) => shim,
        None => shim::start(&node.config, node.me(), ShimRole::Deputy { pid })?.0,
    };
    // The pid may have been reused by a process that the caller may not move.
    if !is_same_process(pid.0, started) {
        return Err(gone(pid));
    }
    let reply = forward_to_shim(node, shim, &request);
    drop(first_move);
    if let Err(refusal) = &reply {
        node.balancing.record_refusal(pid, refusal);
    }
    reply
}

/// `mosrun -N`: moves the calling process as soon as it has executed its program.
pub(crate) fn migrate_at_exec(
    node: &Node,
    caller: Caller,
    candidates: &[NodeId],
    lock: Lock,
    advice: Advice,
) -> Result<Reply, Refusal> {
    let pid = HomePid(caller.pid);
    register_caller(node, caller, lock, false, advice)?;
    // Nodes after this one in the list are never tried, since this node always accepts its own
    // processes.
    let away: Vec<_> = candidates.iter().copied().take_while(|candidate| *candidate != node.me()).collect();
    let or_here = away.len() < candidates.len();
    if away.is_empty() {
        if or_here {
            return Ok(Reply::Ready);
        }
        return Err(refused(RefusalKind::BadRequest, "no node was named"));
    }
    let rights = if caller.is_root() { RightsLimit::Any } else { limit_of_rights(node, pid) };
    let outcome = send_at_exec(node, pid, away, lock, rights);
    match outcome {
        Err(refusal) if or_here && refusal.kind == RefusalKind::Unavailable => Ok(Reply::Ready),
        outcome => outcome,
    }
}

/// `mosrun -b`: moves the calling process to the node that suits it best, as soon as it has
/// executed its program.
pub(crate) fn migrate_to_best_at_exec(
    node: &Node,
    caller: Caller,
    lock: Lock,
    advice: Advice,
) -> Result<Reply, Refusal> {
    register_caller(node, caller, lock, false, advice)?;
    // Includes inherited advice.
    let advice = node.registry.advice(caller.pid);
    match query::best_node_for_start(node, &advice) {
        Some(best) if best != node.me() => migrate_at_exec(node, caller, &[best, node.me()], lock, advice),
        _ => Ok(Reply::Ready),
    }
}

fn send_at_exec(
    node: &Node,
    pid: HomePid,
    candidates: Vec<NodeId>,
    lock: Lock,
    rights: RightsLimit,
) -> Result<Reply, Refusal> {
    if node.registry.never_moves(pid.0) {
        return Err(refused(RefusalKind::CannotMove, "a process that was started with nomig is never moved"));
    }
    let map = node.map();
    if let Some(unknown) = candidates.iter().find(|candidate| !map.contains(**candidate)) {
        return Err(refused(RefusalKind::NotFound, format!("there is no node {unknown} in the map")));
    }
    let candidates: Vec<_> = {
        let allowed = candidates.iter().copied().filter(|candidate| check_trusted(node, *candidate).is_ok());
        allowed.collect()
    };
    if candidates.is_empty() {
        return Err(refused(RefusalKind::NotAllowed, "none of these nodes may host this node's processes"));
    }
    let first_move = FirstMove::begin(node, pid)?;
    let shim = match shim::home_shim_of(&node.config.run_dir, pid) {
        Some(shim) => shim,
        None => shim::start(&node.config, node.me(), ShimRole::Deputy { pid })?.0,
    };
    let reply = forward_to_shim(node, shim, &ShimRequest::AtExec { pid, candidates, lock, rights });
    drop(first_move);
    match reply? {
        Reply::Done => Ok(Reply::Ready),
        other => Ok(other),
    }
}

/// Registers the calling process.
pub(crate) fn register_caller(
    node: &Node,
    caller: Caller,
    lock: Lock,
    never: bool,
    advice: Advice,
) -> Result<(), Refusal> {
    if caller.pid <= 0 {
        let message = "the calling process is in another pid namespace than ternd";
        return Err(refused(RefusalKind::Unsupported, message));
    }
    node.registry
        .register(caller.pid, lock, never, advice, caller.is_root())
        .map_err(|e| refused(RefusalKind::Internal, format!("cannot register process {}: {e}", caller.pid)))
}

/// Sends a request to a shim and waits without a limit: the time of a migration depends on the size
/// of the memory. Processes that share memory move together, and one of their shims moves them all;
/// the other shims redirect the request to that shim.
fn forward_to_shim(node: &Node, mut shim: ShimId, request: &ShimRequest) -> Result<Reply, Refusal> {
    let run_dir = &node.config.run_dir;
    let mut reply = shim::request(run_dir, shim, request, None);
    for _ in 0..MAX_REDIRECTS {
        let Ok(ShimReply::HeldWith { pid }) = reply else { break };
        match shim::home_shim_of(run_dir, pid) {
            Some(owner) => shim = owner,
            // The shim has detached the process just now.
            None => std::thread::sleep(REDIRECT_DELAY),
        }
        reply = shim::request(run_dir, shim, request, None);
    }
    match reply {
        Ok(ShimReply::HeldWith { pid }) => {
            let message =
                format!("busy: process {pid}, with which it shares memory, is being moved; try again");
            Err(refused(RefusalKind::CannotMove, message))
        }
        Ok(ShimReply::Refused(refusal)) => Err(refusal),
        Ok(ShimReply::Done) => Ok(Reply::Done),
        Ok(ShimReply::Processes(rows)) => Ok(Reply::Processes(rows)),
        Ok(ShimReply::Placed(rows)) => Ok(Reply::Placed(rows)),
        Ok(ShimReply::Connections(rows)) => Ok(Reply::Connections(rows)),
        Ok(ShimReply::Paths(_)) => {
            Err(refused(RefusalKind::Internal, "the process's shim sent an unexpected reply"))
        }
        Ok(ShimReply::Migrated(report)) => {
            tracing::info!(pid = %report.pid, migration = %report.migration, from = %report.from,
                to = %report.to, freeze_ms = report.freeze_ms, total_ms = report.total_ms, "migrated");
            node.cluster.record_migration(&report);
            Ok(Reply::Migrated(report))
        }
        Err(error) if shim::had_ended(&error) => {
            tracing::info!(%shim, "the shim has ended before a request was sent to it");
            Err(refused(RefusalKind::NotFound, "the process's shim has just ended; try again"))
        }
        Err(error) => {
            tracing::error!(%shim, %error, "a shim did not answer");
            Err(refused(RefusalKind::Internal, format!("the process's shim did not answer: {error}"))
                .hint(format!("{}/shims/{shim}.log says why", node.config.run_dir.display())))
        }
    }
}

/// Checks that this node trusts the other one with its processes.
fn check_trusted(node: &Node, other: NodeId) -> Result<(), Refusal> {
    if node.config.trusts(other) {
        return Ok(());
    }
    let message = format!("node {other} is not trusted with this node's processes");
    Err(refused(RefusalKind::NotAllowed, message).hint("trust in ternd.toml lists the nodes that are"))
}

/// The request of a home shim to prepare the destination of a migration.
pub(crate) struct GuestPreparation {
    pub(crate) to: NodeId,
    pub(crate) migration: MigrationId,
    pub(crate) accepted_keys: Vec<Fingerprint>,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) group: Vec<HomePid>,
}

/// From a home shim: makes the destination start a shim for the guest.
pub(crate) fn prepare_destination(node: &Node, preparation: GuestPreparation) -> Result<Reply, Refusal> {
    let GuestPreparation { to, migration, accepted_keys, uid, gid, group } = preparation;
    let span = tracing::info_span!("migration", id = %migration, %to);
    let _inside = span.enter();
    if to == node.me() {
        return Err(refused(RefusalKind::BadRequest, format!("node {to} is this node")));
    }
    check_trusted(node, to)?;
    if let Some(other) = group.iter().find(|pid| node.registry.never_moves(pid.0)) {
        let message =
            format!("shared memory: process {other}, with which it shares memory, was started with nomig");
        return Err(refused(RefusalKind::CannotMove, message));
    }
    let answer = client::call(
        node,
        to,
        &PeerRequest::StartGuestShim { migration, accepted_keys, uid, gid },
        START_SHIM_TIMEOUT,
    )?;
    let PeerReply::GuestShimStarted { shim, fingerprint } = answer.reply else {
        return Err(refused(RefusalKind::Internal, format!("node {to} sent an unexpected reply")));
    };
    let address = node.map().address(to);
    let address = address.map_err(|e| refused(RefusalKind::Unavailable, format!("node {to}: {e}")))?;
    tracing::info!(%shim, "prepared");
    Ok(Reply::Prepared { address, shim, fingerprint })
}

/// From a shim that has lost its peer: the peer's present address, and whether the peer is alive.
/// Only the daemon of the peer's node can report that it is not.
pub(crate) fn locate_shim(node: &Node, on: NodeId, shim: ShimId) -> Reply {
    if on == node.me() {
        let alive = Some(shim::is_alive(&node.config.run_dir, shim));
        return Reply::Located { address: node.map().address(on).ok(), alive };
    }
    ask_about_shim(node, on, shim, &PeerRequest::IsShimAlive { shim })
}

/// From a guest shim that has lost its home: whether home still waits for this epoch.
pub(crate) fn ask_if_awaited(node: &Node, on: NodeId, shim: ShimId, pid: HomePid, epoch: Epoch) -> Reply {
    ask_about_shim(node, on, shim, &PeerRequest::IsGuestAwaited { shim, pid, epoch })
}

fn ask_about_shim(node: &Node, on: NodeId, shim: ShimId, request: &PeerRequest) -> Reply {
    match client::call(node, on, request, LOCATE_TIMEOUT).map(|answer| answer.reply) {
        Ok(PeerReply::YesOrNo(alive)) => {
            Reply::Located { address: node.map().address(on).ok(), alive: Some(alive) }
        }
        outcome => {
            tracing::debug!(%on, %shim, ?outcome, "not located");
            Reply::Located { address: None, alive: None }
        }
    }
}
