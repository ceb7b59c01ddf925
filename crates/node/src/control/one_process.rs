//! Requests about one process: its row, and changes that its user makes while it runs.

use crate::node::Node;
use crate::process::permission::{Caller, check_may_move, is_part_of_tern};
use crate::process::process_list;
use crate::process::procfs::{self, read_stat};
use tern_control::{
    Advice, Lock, ProcessRow, Refusal, RefusalKind, Reply, StartedAs, SymbolicNode, Usage, executed,
    read_process, used_away,
};
use tern_ids::{HomePid, NodeId};

/// The row of any process of this node. The command line of a process that no shim holds is shown
/// only to its owner and root, as the system may hide it from others (`hidepid`).
pub(crate) fn row(node: &Node, caller: Caller, pid: HomePid) -> Result<ProcessRow, Refusal> {
    let found = read_stat(pid.0).map_err(|e| procfs::refusal(pid, e))?;
    let started = started_as(node, pid);
    let migrations = node.cluster.migrations_of(pid, found.start);
    let shim_rows = process_list::from_shims(node).into_iter();
    if let Some(mut row) = shim_rows.filter(|row| row.pid == pid).find(|row| row.from.is_none()) {
        row.started = started;
        row.migrations = row.migrations.max(migrations);
        return Ok(row);
    }
    let reason = if pid.0 == 1 {
        "process 1 is the init of this node, which is never moved".into()
    } else if is_part_of_tern(&node.config, pid.0) {
        "it is part of Tern".into()
    } else if started.is_some_and(|started| started.never) {
        "started with nomig".into()
    } else {
        node.balancing.refusal(pid).unwrap_or_default()
    };
    let uid = procfs::uids(pid.0).map_err(|e| procfs::refusal(pid, e))?.0;
    let may_see = caller.is_root() || caller.uid == uid;
    let used_away = used_away::by_process(&node.config.run_dir, pid.0, found.start).as_secs_f64();
    Ok(ProcessRow {
        pid,
        uid,
        r#where: Some(node.me()),
        from: None,
        state: "home".into(),
        cpu_seconds: found.cpu_seconds + used_away,
        migrations,
        reason,
        command: if may_see { procfs::command_line(pid.0) } else { String::new() },
        usage: Usage::default(),
        started,
    })
}

/// How the process was started; the defaults if it was not started with mosrun but is balanced.
fn started_as(node: &Node, pid: HomePid) -> Option<StartedAs> {
    let named = || node.balancing.is_balanced(pid).then(StartedAs::default);
    node.registry.started_as(pid.0).or_else(named)
}

/// The node that a name below `/mfs` means for a process; `None` is its home.
pub(crate) fn resolve_node(node: &Node, pid: HomePid, of: SymbolicNode) -> Option<NodeId> {
    let runs_at = || {
        let mut rows = process_list::from_shims(node).into_iter();
        let own = rows.find(|row| row.pid == pid && row.from.is_none());
        own.and_then(|row| row.r#where)
    };
    match of {
        SymbolicNode::Here => runs_at(),
        SymbolicNode::Selected => node.selected.get(pid.0),
        // Without a choice: the node where the process would create a file now.
        SymbolicNode::Magic => node.magic.get(pid.0).or_else(runs_at),
        SymbolicNode::LastExec => {
            let run_dir = node.config.run_dir.clone();
            read_process(pid.0, move || executed::node_of(&run_dir, pid.0)).ok()
        }
    }
}

/// Sets the node that one of these names means for a process; `None` is its home.
pub(crate) fn set_symbolic_node(
    node: &Node,
    caller: Caller,
    pid: HomePid,
    of: SymbolicNode,
    to: Option<NodeId>,
) -> Result<Reply, Refusal> {
    let choices = match of {
        SymbolicNode::Selected => {
            check_may_move(&node.config, caller, pid.0)?;
            &node.selected
        }
        // Only the mounted MFS tree sees where a process creates a file.
        SymbolicNode::Magic => {
            caller.check_owns_node("report where a process has created a file")?;
            &node.magic
        }
        SymbolicNode::Here | SymbolicNode::LastExec => {
            let message = "here and lastexec cannot be set";
            return Err(Refusal::new(RefusalKind::BadRequest, message).hint("migrate moves it"));
        }
    };
    if let Some(to) = to.filter(|to| !node.map().contains(*to)) {
        return Err(Refusal::new(RefusalKind::NotFound, format!("there is no node {to} in the map")));
    }
    let failed = |e| Refusal::new(RefusalKind::Internal, format!("cannot store the choice of {pid}: {e}"));
    choices.choose(pid.0, to).map(|()| Reply::Done).map_err(failed)
}

/// Sets whether the balancer may move a running process. A process that is not registered becomes
/// registered, and so is balanced from then on if it is unlocked.
pub(crate) fn set_lock(node: &Node, caller: Caller, pid: HomePid, lock: Lock) -> Result<Reply, Refusal> {
    if lock == Lock::Keep {
        return Err(Refusal::new(RefusalKind::BadRequest, "the request must lock or unlock the process"));
    }
    update_registration(node, caller, pid, lock, Advice::default())
}

/// Sets the advice for a running process.
pub(crate) fn advise(node: &Node, caller: Caller, pid: HomePid, advice: Advice) -> Result<Reply, Refusal> {
    // Advice alone must not make the balancer move the process.
    let lock = if started_as(node, pid).is_some() { Lock::Keep } else { Lock::Locked };
    update_registration(node, caller, pid, lock, advice)
}

fn update_registration(
    node: &Node,
    caller: Caller,
    pid: HomePid,
    lock: Lock,
    advice: Advice,
) -> Result<Reply, Refusal> {
    check_may_move(&node.config, caller, pid.0)?;
    let failed = |e| Refusal::new(RefusalKind::Internal, format!("cannot register process {pid}: {e}"));
    node.registry.register(pid.0, lock, false, advice, caller.is_root()).map(|()| Reply::Done).map_err(failed)
}
