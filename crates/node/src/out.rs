//! `migrate PID out`: one process leaves this node, as `mosctl expel` has all guests leave.

use crate::message::PeerRequest;
use crate::permission::Caller;
use crate::state::Node;
use crate::{balancing, moving, peers, processes};
use std::thread;
use std::time::{Duration, Instant};
use tern_control::{Destination, ProcessRow, Refusal, RefusalKind, Reply};
use tern_ids::{HomePid, NodeId};

/// How long a guest may take to leave. Its home goes on after that.
const LEAVE: Duration = Duration::from_secs(60);

/// How long between two looks whether it has.
const LOOK: Duration = Duration::from_millis(50);

/// How long until its home is asked again: it may be busy with something.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// How long its home may take to hear that it is asked.
const HEAR: Duration = Duration::from_secs(2);

/// Whose process is meant.
enum Meant {
    Own,
    Guest(NodeId),
}

/// Has a process leave this node.
pub(crate) fn out(node: &Node, caller: Caller, pid: HomePid, from: Option<NodeId>) -> Result<Reply, Refusal> {
    match meant(node.me(), &processes::of_shims(node), pid, from)? {
        Meant::Own => elsewhere(node, caller, pid),
        Meant::Guest(home) => {
            caller.must_own_node("send guests away")?;
            send_away(node, pid, home)
        }
    }
}

/// A guest if there is one of this number, else a process of this node.
fn meant(me: NodeId, rows: &[ProcessRow], pid: HomePid, from: Option<NodeId>) -> Result<Meant, Refusal> {
    let guests = rows.iter().filter(|row| row.pid == pid).filter_map(|row| row.from);
    let mut homes: Vec<NodeId> = guests.filter(|home| from.is_none_or(|from| from == *home)).collect();
    homes.sort_unstable();
    homes.dedup();
    match (&*homes, from) {
        ([home], _) => Ok(Meant::Guest(*home)),
        ([], None) => Ok(Meant::Own),
        ([], Some(from)) if from == me => Ok(Meant::Own),
        ([], Some(from)) => {
            let said = format!("there is no guest {pid} from node {from} here");
            Err(Refusal::new(RefusalKind::NotFound, said).hint("mosps --guests"))
        }
        (several, _) => {
            let said = format!("guests of {} nodes have the number {pid}", several.len());
            Err(Refusal::new(RefusalKind::BadRequest, said).hint(format!("--from {}", several[0])))
        }
    }
}

fn elsewhere(node: &Node, caller: Caller, pid: HomePid) -> Result<Reply, Refusal> {
    let away = processes::of_shims(node)
        .into_iter()
        .find(|row| row.pid == pid && processes::is_away(node, row))
        .and_then(|row| row.r#where);
    if let Some(place) = away {
        let said = format!("process {pid} is out already, on node {place}");
        return Err(Refusal::new(RefusalKind::BadRequest, said));
    }
    // Whether he may is asked before anything is told of it.
    crate::permission::may_move(&node.config, caller, pid.0)?;
    match balancing::elsewhere(node, pid)? {
        Some(to) => moving::migrate(node, caller, pid, Destination::Node(to)),
        None => {
            let said = format!("no other node can take process {pid}");
            Err(Refusal::new(RefusalKind::Unavailable, said).hint("migrate --why says what is against each"))
        }
    }
}

/// Only its home can move it: that is asked, and again, until it is gone. It may come back later; who does not want that
/// blocks the node.
fn send_away(node: &Node, pid: HomePid, home: NodeId) -> Result<Reply, Refusal> {
    let end = Instant::now() + LEAVE;
    let mut asked: Option<Instant> = None;
    let mut unheard = None;
    while processes::of_shims(node).iter().any(|row| row.pid == pid && row.from == Some(home)) {
        if asked.is_none_or(|asked| asked.elapsed() > ASK_AGAIN) {
            asked = Some(Instant::now());
            unheard = peers::ask(node, home, &PeerRequest::TakeBack { pids: vec![pid] }, HEAR).err();
        }
        if Instant::now() > end {
            let said = format!("guest {pid} of node {home} is still here");
            let refusal = Refusal::new(RefusalKind::Unavailable, said);
            return Err(unheard.map_or(refusal, |unheard: Refusal| unheard));
        }
        thread::sleep(LOOK);
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
    fn numbers_that_two_guests_have_are_asked_about() {
        let rows = [guest(7, 2), guest(7, 3), guest(8, 2)];
        let of = |pid, from: Option<u16>| match meant(NodeId(1), &rows, HomePid(pid), from.map(NodeId)) {
            Ok(Meant::Own) => Ok(1),
            Ok(Meant::Guest(home)) => Ok(home.0),
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
