//! One process: what is known of it, and what its user says of it while it runs.

use crate::permission::{Caller, is_ours, may_move};
use crate::procfs::{self, process};
use crate::state::Node;
use crate::{balancing, processes};
use tern_control::{
    Advice, Lock, Place, ProcessRow, Refusal, RefusalKind, Reply, StartedAs, Usage, executed,
};
use tern_ids::{HomePid, NodeId};

fn gone(pid: HomePid) -> Refusal {
    Refusal::new(RefusalKind::NotFound, format!("there is no process {pid}"))
}

/// The row of a process of this node, whoever has started it. What the words of one are of which nobody said anything is only
/// for whose it is: the system may hide it from others (`hidepid`).
pub(crate) fn row(node: &Node, caller: Caller, pid: HomePid) -> Result<ProcessRow, Refusal> {
    let found = process(pid.0).filter(|_| pid.0 > 0).ok_or_else(|| gone(pid))?;
    let started = started(node, pid);
    let migrations = node.cluster.migrations_of(pid, found.start);
    let of_shims = processes::of_shims(node).into_iter();
    if let Some(mut row) = of_shims.filter(|row| row.pid == pid).find(|row| row.from.is_none()) {
        row.started = started;
        row.migrations = row.migrations.max(migrations);
        return Ok(row);
    }
    let reason = if pid.0 == 1 {
        "process 1 is this node's init, and ends with the node only".into()
    } else if is_ours(&node.config, pid.0) {
        "it is a part of Tern".into()
    } else if started.is_some_and(|started| started.never) {
        "started with nomig".into()
    } else {
        balancing::refusal(node, pid).unwrap_or_default()
    };
    let uid = procfs::users(pid.0).ok_or_else(|| gone(pid))?.0;
    let may_see = caller.is_root() || caller.uid == uid;
    Ok(ProcessRow {
        pid,
        uid,
        r#where: Some(node.me()),
        from: None,
        state: "home".into(),
        cpu_seconds: found.cpu_seconds,
        migrations,
        reason,
        command: if may_see { procfs::command(pid.0) } else { String::new() },
        usage: Usage::default(),
        started,
    })
}

/// How it was started, or is balanced all the same.
fn started(node: &Node, pid: HomePid) -> Option<StartedAs> {
    let named = || balancing::balances(node, pid).then(StartedAs::default);
    node.registry.started(pid.0).or_else(named)
}

/// What a process means by a name below `/mfs`; `None` is its home.
pub(crate) fn place(node: &Node, pid: HomePid, of: Place) -> Option<NodeId> {
    let runs_at = || {
        let mut rows = processes::of_shims(node).into_iter();
        let own = rows.find(|row| row.pid == pid && row.from.is_none());
        own.and_then(|row| row.r#where)
    };
    match of {
        Place::Here => runs_at(),
        Place::Selected => node.selected.of(pid.0),
        // Who has made nothing there yet would make it here.
        Place::Magic => node.magic.of(pid.0).or_else(runs_at),
        Place::LastExec => executed::node_of(&node.config.run_dir, pid.0),
    }
}

/// A process chooses a node for one of these names; 0, as MOSIX has it, is its home.
pub(crate) fn choose(
    node: &Node,
    caller: Caller,
    pid: HomePid,
    of: Place,
    to: Option<NodeId>,
) -> Result<Reply, Refusal> {
    let places = match of {
        Place::Selected => {
            may_move(&node.config, caller, pid.0)?;
            &node.selected
        }
        // What a tree of /mfs tells: it alone sees what is made there.
        Place::Magic => {
            caller.must_own_node("say where a process has made a file")?;
            &node.magic
        }
        Place::Here | Place::LastExec => {
            let said = "where a process runs, and where it has executed its program, is not chosen";
            return Err(Refusal::new(RefusalKind::BadRequest, said).hint("migrate moves it"));
        }
    };
    if let Some(to) = to.filter(|to| !node.map().contains(*to)) {
        return Err(Refusal::new(RefusalKind::NotFound, format!("there is no node {to} in the map")));
    }
    let failed = |e| Refusal::new(RefusalKind::Internal, format!("cannot note the choice of {pid}: {e}"));
    places.choose(pid.0, to).map(|()| Reply::Done).map_err(failed)
}

/// Whether the cluster may move a running process by itself. One of which nothing was said is balanced from then on, if it
/// may.
pub(crate) fn set_lock(node: &Node, caller: Caller, pid: HomePid, lock: Lock) -> Result<Reply, Refusal> {
    if lock == Lock::Keep {
        return Err(Refusal::new(RefusalKind::BadRequest, "a process is locked or it is not"));
    }
    say(node, caller, pid, lock, Advice::default())
}

/// Something is said of a running process.
pub(crate) fn advise(node: &Node, caller: Caller, pid: HomePid, advice: Advice) -> Result<Reply, Refusal> {
    // It must not become one that is balanced by that.
    let lock = if started(node, pid).is_some() { Lock::Keep } else { Lock::Locked };
    say(node, caller, pid, lock, advice)
}

fn say(node: &Node, caller: Caller, pid: HomePid, lock: Lock, advice: Advice) -> Result<Reply, Refusal> {
    may_move(&node.config, caller, pid.0)?;
    let failed = |e| Refusal::new(RefusalKind::Internal, format!("cannot note process {pid}: {e}"));
    node.registry.register(pid.0, lock, false, advice).map(|()| Reply::Done).map_err(failed)
}
