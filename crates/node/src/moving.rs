//! Moving a process: finding or starting the home shim that holds it, and telling it what to do.

use crate::message::{PeerReply, PeerRequest};
use crate::permission::{Caller, may_move};
use crate::procfs::process;
use crate::slots::lock;
use crate::state::Node;
use crate::{balancing, peers, shims};
use std::time::Duration;
use tern_control::{
    Advice, Destination, Lock, Refusal, RefusalKind, Reply, ShimReply, ShimRequest, ShimRole,
};
use tern_ids::{Epoch, Fingerprint, HomePid, MigrationId, NodeId, ShimId};

/// How long a node may take to start a shim.
const PREPARE: Duration = Duration::from_secs(15);

/// How often a request is sent on to another shim, and how long is waited where there is none.
const MOST_SENT_ON: u32 = 50;
const SENT_ON: Duration = Duration::from_millis(10);

/// How long a node may take to say whether a shim lives.
const LOCATE: Duration = Duration::from_secs(2);

fn refused(kind: RefusalKind, message: impl Into<String>) -> Refusal {
    Refusal::new(kind, message)
}

fn gone(pid: HomePid) -> Refusal {
    refused(RefusalKind::NotFound, format!("there is no process {pid}"))
}

/// Whether the process of this number is still the one that began then.
fn lives(pid: HomePid, started: u64) -> bool {
    process(pid.0).is_some_and(|found| found.start == started)
}

/// A process that is being given its first shim; one at a time.
struct Turn<'a> {
    node: &'a Node,
    pid: HomePid,
}

impl<'a> Turn<'a> {
    fn take(node: &'a Node, pid: HomePid) -> Result<Self, Refusal> {
        if !lock(&node.moving).insert(pid.0) {
            let busy = format!("process {pid} is being moved already");
            return Err(refused(RefusalKind::Unavailable, busy).hint("try again when that is done"));
        }
        Ok(Self { node, pid })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.node.moving).remove(&self.pid.0);
    }
}

/// `migrate PID …`.
pub(crate) fn migrate(node: &Node, caller: Caller, pid: HomePid, to: Destination) -> Result<Reply, Refusal> {
    let started = process(pid.0).filter(|_| pid.0 > 0).ok_or_else(|| gone(pid))?.start;
    if pid.0 == 1 {
        let init = "process 1 is this node's init, and ends with the node only";
        return Err(refused(RefusalKind::CannotMove, init));
    }
    may_move(&node.config, caller, pid.0)?;
    order(node, pid, started, to)
}

/// `migrate PID continue`.
pub(crate) fn let_go_on(node: &Node, caller: Caller, pid: HomePid) -> Result<Reply, Refusal> {
    may_move(&node.config, caller, pid.0)?;
    match shims::owner(&node.config.run_dir, pid) {
        Some(shim) => relay(node, shim, &ShimRequest::Continue { pid }),
        None => Err(refused(RefusalKind::BadRequest, format!("process {pid} is not frozen"))),
    }
}

/// Moves a process of which somebody has decided that it may be moved; `started` says which one of its number.
pub(crate) fn order(node: &Node, pid: HomePid, started: u64, to: Destination) -> Result<Reply, Refusal> {
    let to = match to {
        Destination::Balance => match balancing::better(node, pid)? {
            Some(to) if to == node.me() => Destination::Home,
            Some(to) => Destination::Node(to),
            None => {
                let said = format!("process {pid} is best where it is");
                return Err(refused(RefusalKind::Unavailable, said).hint("migrate --why shows the numbers"));
            }
        },
        Destination::Node(other) if other == node.me() => Destination::Home,
        Destination::Node(other) => {
            if !node.map().contains(other) {
                return Err(refused(RefusalKind::NotFound, format!("there is no node {other} in the map")));
            }
            trusted(node, other)?;
            Destination::Node(other)
        }
        Destination::Home | Destination::Frozen => to,
    };
    if matches!(to, Destination::Node(_)) && node.registry.never_moves(pid.0) {
        let said = format!("process {pid} was started with nomig, or by one that was");
        return Err(refused(RefusalKind::CannotMove, said));
    }
    let request = ShimRequest::Migrate { pid, to };
    let mut again = true;
    while let Some(shim) = shims::owner(&node.config.run_dir, pid) {
        match relay(node, shim, &request) {
            // It may have let go and ended since it said that it has the process.
            Err(refusal)
                if refusal.kind == RefusalKind::NotFound
                    && std::mem::take(&mut again)
                    && lives(pid, started) => {}
            reply => return reply,
        }
    }
    if to == Destination::Home {
        return Err(refused(RefusalKind::BadRequest, format!("process {pid} is at home already")));
    }
    let turn = Turn::take(node, pid)?;
    // Somebody else's turn may have ended since we asked.
    let shim = match shims::owner(&node.config.run_dir, pid) {
        Some(shim) => shim,
        None => shims::start(&node.config, node.me(), ShimRole::Deputy { pid })?.0,
    };
    // The number may be another process's by now, which the caller may not be allowed to move.
    if !lives(pid, started) {
        return Err(gone(pid));
    }
    let reply = relay(node, shim, &request);
    drop(turn);
    if let Err(refusal) = &reply {
        balancing::heard(node, pid, refusal);
    }
    reply
}

/// `mosrun -N`: the calling process, as soon as it has executed its program.
pub(crate) fn at_exec(
    node: &Node,
    caller: Caller,
    candidates: &[NodeId],
    wish: Lock,
    advice: Advice,
) -> Result<Reply, Refusal> {
    let pid = HomePid(caller.pid);
    register(node, caller, wish, false, advice)?;
    // What comes after this node in the list is never tried, since this node always takes its own.
    let away: Vec<_> = candidates.iter().copied().take_while(|candidate| *candidate != node.me()).collect();
    let or_here = away.len() < candidates.len();
    if away.is_empty() {
        if or_here {
            return Ok(Reply::Ready);
        }
        return Err(refused(RefusalKind::BadRequest, "no node was named"));
    }
    let outcome = send_at_exec(node, pid, away, wish);
    match outcome {
        Err(refusal) if or_here && refusal.kind == RefusalKind::Unavailable => Ok(Reply::Ready),
        outcome => outcome,
    }
}

/// `mosrun -b`: the calling process, as soon as it has executed its program, on the node that suits it best.
pub(crate) fn at_best(node: &Node, caller: Caller, wish: Lock, advice: Advice) -> Result<Reply, Refusal> {
    register(node, caller, wish, false, advice)?;
    // What it inherits counts as well.
    let advice = node.registry.advice(caller.pid);
    match balancing::best(node, &advice) {
        Some(best) if best != node.me() => at_exec(node, caller, &[best, node.me()], wish, advice),
        _ => Ok(Reply::Ready),
    }
}

fn send_at_exec(node: &Node, pid: HomePid, candidates: Vec<NodeId>, wish: Lock) -> Result<Reply, Refusal> {
    if node.registry.never_moves(pid.0) {
        return Err(refused(RefusalKind::CannotMove, "nothing that nomig has started moves"));
    }
    let map = node.map();
    if let Some(unknown) = candidates.iter().find(|candidate| !map.contains(**candidate)) {
        return Err(refused(RefusalKind::NotFound, format!("there is no node {unknown} in the map")));
    }
    let candidates: Vec<_> = {
        let allowed = candidates.iter().copied().filter(|candidate| trusted(node, *candidate).is_ok());
        allowed.collect()
    };
    if candidates.is_empty() {
        return Err(refused(RefusalKind::NotAllowed, "none of these nodes may host this node's processes"));
    }
    let turn = Turn::take(node, pid)?;
    let shim = match shims::owner(&node.config.run_dir, pid) {
        Some(shim) => shim,
        None => shims::start(&node.config, node.me(), ShimRole::Deputy { pid })?.0,
    };
    let reply = relay(node, shim, &ShimRequest::AtExec { pid, candidates, lock: wish });
    drop(turn);
    match reply? {
        Reply::Done => Ok(Reply::Ready),
        other => Ok(other),
    }
}

/// Notes the calling process.
pub(crate) fn register(
    node: &Node,
    caller: Caller,
    wish: Lock,
    never: bool,
    advice: Advice,
) -> Result<(), Refusal> {
    if caller.pid <= 0 {
        let said = "the calling process is in another pid namespace than ternd";
        return Err(refused(RefusalKind::Unsupported, said));
    }
    node.registry
        .register(caller.pid, wish, never, advice)
        .map_err(|e| refused(RefusalKind::Internal, format!("cannot note process {}: {e}", caller.pid)))
}

/// Asks a shim, and waits however long it takes: a migration takes as long as the memory is large. Of several shims that
/// hold processes which share memory, one takes all; the others send here to that one.
fn relay(node: &Node, mut shim: ShimId, request: &ShimRequest) -> Result<Reply, Refusal> {
    let run_dir = &node.config.run_dir;
    let mut reply = shims::ask(run_dir, shim, request, None);
    for _ in 0..MOST_SENT_ON {
        let Ok(ShimReply::HeldWith { pid }) = reply else { break };
        match shims::owner(run_dir, pid) {
            Some(owner) => shim = owner,
            // It has let go just now.
            None => std::thread::sleep(SENT_ON),
        }
        reply = shims::ask(run_dir, shim, request, None);
    }
    match reply {
        Ok(ShimReply::HeldWith { pid }) => {
            let said = format!("busy: process {pid}, with which it shares memory, is being moved; try again");
            Err(refused(RefusalKind::CannotMove, said))
        }
        Ok(ShimReply::Refused(refusal)) => Err(refusal),
        Ok(ShimReply::Done) => Ok(Reply::Done),
        Ok(ShimReply::Processes(rows)) => Ok(Reply::Processes(rows)),
        Ok(ShimReply::Placed(rows)) => Ok(Reply::Placed(rows)),
        Ok(ShimReply::Migrated(report)) => {
            tracing::info!(pid = %report.pid, migration = %report.migration, from = %report.from,
                to = %report.to, freeze_ms = report.freeze_ms, total_ms = report.total_ms, "migrated");
            node.cluster.migrated(&report);
            Ok(Reply::Migrated(report))
        }
        Err(error) => {
            tracing::error!(%shim, %error, "a shim did not answer");
            Err(refused(RefusalKind::Internal, format!("the process's shim did not answer: {error}"))
                .hint(format!("{}/shims/{shim}.log says why", node.config.run_dir.display())))
        }
    }
}

/// Passes if that node may host processes of this one.
fn trusted(node: &Node, other: NodeId) -> Result<(), Refusal> {
    if node.config.trusts(other) {
        return Ok(());
    }
    let said = format!("node {other} is not trusted with this node's processes");
    Err(refused(RefusalKind::NotAllowed, said).hint("trust in ternd.toml lists the nodes that are"))
}

/// What a home shim needs for a journey, in one piece.
pub(crate) struct Preparation {
    pub(crate) to: NodeId,
    pub(crate) migration: MigrationId,
    pub(crate) accept: Vec<Fingerprint>,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) company: Vec<HomePid>,
}

/// From a home shim: has the destination start a shim for the guest.
pub(crate) fn prepare(node: &Node, wanted: Preparation) -> Result<Reply, Refusal> {
    let Preparation { to, migration, accept, uid, gid, company } = wanted;
    let span = tracing::info_span!("migration", id = %migration, %to);
    let _inside = span.enter();
    if to == node.me() {
        return Err(refused(RefusalKind::BadRequest, format!("node {to} is this node")));
    }
    trusted(node, to)?;
    if let Some(other) = company.iter().find(|pid| node.registry.never_moves(pid.0)) {
        let said =
            format!("shared memory: process {other}, with which it shares memory, was started with nomig");
        return Err(refused(RefusalKind::CannotMove, said));
    }
    let answer = peers::ask(node, to, &PeerRequest::Host { migration, accept, uid, gid }, PREPARE)?;
    let PeerReply::Hosted { shim, fingerprint } = answer.reply else {
        return Err(refused(RefusalKind::Internal, format!("node {to} gave an answer to another question")));
    };
    let address = node.map().address(to);
    let address = address.map_err(|e| refused(RefusalKind::Unavailable, format!("node {to}: {e}")))?;
    tracing::info!(%shim, "prepared");
    Ok(Reply::Prepared { address, shim, fingerprint })
}

/// From a shim that has lost its peer: where that is now, and whether it lives. Only that node's own daemon
/// can say that it does not.
pub(crate) fn locate(node: &Node, on: NodeId, shim: ShimId) -> Reply {
    if on == node.me() {
        let alive = Some(shims::is_alive(&node.config.run_dir, shim));
        return Reply::Located { address: node.map().address(on).ok(), alive };
    }
    ask_there(node, on, shim, &PeerRequest::ShimAlive { shim })
}

/// From a guest shim that has lost its home: whether home still waits for this life.
pub(crate) fn awaited(node: &Node, on: NodeId, shim: ShimId, pid: HomePid, epoch: Epoch) -> Reply {
    ask_there(node, on, shim, &PeerRequest::Awaited { shim, pid, epoch })
}

fn ask_there(node: &Node, on: NodeId, shim: ShimId, request: &PeerRequest) -> Reply {
    match peers::ask(node, on, request, LOCATE).map(|answer| answer.reply) {
        Ok(PeerReply::Alive(alive)) => {
            Reply::Located { address: node.map().address(on).ok(), alive: Some(alive) }
        }
        outcome => {
            tracing::debug!(%on, %shim, ?outcome, "not located");
            Reply::Located { address: None, alive: None }
        }
    }
}
