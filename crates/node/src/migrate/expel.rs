//! `migrate PID out`: makes one process leave this node, as `mosctl expel` does with all guests.

use crate::balance::query;
use crate::migrate;
use crate::node::Node;
use crate::peer::client;
use crate::peer::message::PeerRequest;
use crate::process::permission::{Caller, check_may_move};
use crate::process::process_list;
use std::thread;
use std::time::{Duration, Instant};
use tern_control::{Destination, ProcessRow, Refusal, RefusalKind, Reply};
use tern_ids::{HomePid, NodeId};

/// How long to wait for a guest to leave. Its home continues to move it after that.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval between two checks whether it has left.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Interval between two requests to the home, which may be busy.
const REQUEST_INTERVAL: Duration = Duration::from_secs(2);

/// Timeout of a request to the home.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// The process that the request means.
enum Target {
    Own,
    Guest(NodeId),
}

/// Makes a process leave this node.
pub(crate) fn expel(
    node: &Node,
    caller: Caller,
    pid: HomePid,
    from: Option<NodeId>,
) -> Result<Reply, Refusal> {
    match find_target(node.me(), &process_list::from_shims(node), pid, from)? {
        Target::Own => move_own(node, caller, pid),
        Target::Guest(home) => {
            caller.check_owns_node("send guests away")?;
            expel_guest(node, pid, home)
        }
    }
}

/// Selects the guest with this pid if there is one, else a process of this node.
fn find_target(
    me: NodeId,
    rows: &[ProcessRow],
    pid: HomePid,
    from: Option<NodeId>,
) -> Result<Target, Refusal> {
    let guests = rows.iter().filter(|row| row.pid == pid).filter_map(|row| row.from);
    let mut homes: Vec<NodeId> = guests.filter(|home| from.is_none_or(|from| from == *home)).collect();
    homes.sort_unstable();
    homes.dedup();
    match (&*homes, from) {
        ([home], _) => Ok(Target::Guest(*home)),
        ([], None) => Ok(Target::Own),
        ([], Some(from)) if from == me => Ok(Target::Own),
        ([], Some(from)) => {
            let message = format!("there is no guest {pid} from node {from} here");
            Err(Refusal::new(RefusalKind::NotFound, message).hint("mosps --guests"))
        }
        (several, _) => {
            let message = format!("guests of {} nodes have the pid {pid}", several.len());
            Err(Refusal::new(RefusalKind::BadRequest, message).hint(format!("--from {}", several[0])))
        }
    }
}

fn move_own(node: &Node, caller: Caller, pid: HomePid) -> Result<Reply, Refusal> {
    let away = process_list::from_shims(node)
        .into_iter()
        .find(|row| row.pid == pid && process_list::is_away(node, row))
        .and_then(|row| row.r#where);
    if let Some(place) = away {
        let message = format!("process {pid} is out already, on node {place}");
        return Err(Refusal::new(RefusalKind::BadRequest, message));
    }
    // Checked before the candidates are considered, so that the refusals below reveal nothing more
    // about processes of others.
    check_may_move(&node.config, caller, pid.0)?;
    match query::other_node(node, pid)? {
        Some(to) => migrate::migrate_for_caller(node, caller, pid, Destination::Node(to)),
        None => {
            let message = format!("no other node can take process {pid}");
            Err(Refusal::new(RefusalKind::Unavailable, message)
                .hint("migrate --why shows the reason for each"))
        }
    }
}

/// Only its home can move a guest, so the home is asked, repeatedly, until the guest is gone. The
/// home may send it here again later, unless this node is blocked.
fn expel_guest(node: &Node, pid: HomePid, home: NodeId) -> Result<Reply, Refusal> {
    let end = Instant::now() + LEAVE_TIMEOUT;
    let mut asked: Option<Instant> = None;
    let mut request_error = None;
    while process_list::from_shims(node).iter().any(|row| row.pid == pid && row.from == Some(home)) {
        if asked.is_none_or(|asked| asked.elapsed() > REQUEST_INTERVAL) {
            asked = Some(Instant::now());
            request_error =
                client::call(node, home, &PeerRequest::MoveAway { pids: vec![pid] }, REQUEST_TIMEOUT).err();
        }
        if Instant::now() > end {
            let message = format!("guest {pid} of node {home} is still here");
            let refusal = Refusal::new(RefusalKind::Unavailable, message);
            return Err(request_error.map_or(refusal, |request_error: Refusal| request_error));
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(Reply::Done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_control::Usage;

    fn guest(pid: i32, home: u16) -> ProcessRow {
        ProcessRow {
            pid: HomePid(pid),
            uid: 0,
            r#where: None,
            from: Some(NodeId(home)),
            state: "running".into(),
            cpu_seconds: 0.0,
            migrations: 1,
            reason: String::new(),
            command: String::new(),
            usage: Usage::default(),
            started: None,
        }
    }

    #[test]
    fn ambiguous_pid_is_refused() {
        let rows = [guest(7, 2), guest(7, 3), guest(8, 2)];
        let of = |pid, from: Option<u16>| match find_target(NodeId(1), &rows, HomePid(pid), from.map(NodeId))
        {
            Ok(Target::Own) => Ok(1),
            Ok(Target::Guest(home)) => Ok(home.0),
            Err(refusal) => Err(refusal.kind),
        };
        assert_eq!(of(8, None), Ok(2));
        assert_eq!(of(7, None), Err(RefusalKind::BadRequest));
        assert_eq!(of(7, Some(3)), Ok(3));
        assert_eq!(of(7, Some(4)), Err(RefusalKind::NotFound));
        assert_eq!(of(9, None), Ok(1), "a process of this node, if there is one");
        assert_eq!(of(7, Some(1)), Ok(1));
    }
}
