//! Evacuation of a node: guests are sent away, and own processes are fetched home.
//!
//! Only the home of a guest can move it, so this node asks the homes, repeatedly, until no guest is
//! left. A home that is down does not block this for ever, since its guests are ended soon after
//! `give_up_after`. When the node leaves the cluster, guests that no other node has taken in time
//! are killed.

use crate::balance::query;
use crate::cluster::gossip;
use crate::migrate;
use crate::node::Node;
use crate::os::sync::lock;
use crate::peer::client;
use crate::peer::message::PeerRequest;
use crate::process::process_list;
use crate::process::procfs::read_stat;
use crate::shim;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tern_control::{
    Destination, Evacuation, NodeSettings, ProcessRow, Refusal, RefusalKind, Reply, ShimRequest,
};
use tern_ids::{HomePid, NodeId};

/// Maximum number of processes that one request moves at the same time.
const MAX_PARALLEL_MOVES: usize = 8;

/// Interval between two checks of the remaining processes.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Interval between two requests to a home.
const REQUEST_INTERVAL: Duration = Duration::from_secs(2);

/// Timeout of a request to a home.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// `mosctl expel`, `bring`, `isolate` and `shutdown`.
pub(crate) fn evacuate(node: &Arc<Node>, what: Evacuation, seconds: Option<u32>) -> Result<Reply, Refusal> {
    let end = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds.into()));
    let scope = Scope { expel: what != Evacuation::Bring, bring: what != Evacuation::Expel };
    node.settings.change(|settings| {
        scope.enforce(settings);
    })?;
    tracing::info!(?what, "the node is being emptied");
    empty_node(node, scope, end)?;
    if what == Evacuation::Shutdown {
        node.settings.change(|settings| settings.quiet = true)?;
        // The caller may switch the machine off as soon as this function returns.
        thread::sleep(gossip::QUIET_DELAY);
    }
    tracing::info!(?what, "the node is empty");
    Ok(Reply::Done)
}

/// Makes the node leave the cluster until ternd is started again. Guests that remain are killed.
pub(crate) fn leave_cluster(node: &Arc<Node>, within: Duration) {
    let scope = Scope { expel: true, bring: true };
    node.settings.change_until_exit(|settings| scope.enforce(settings));
    tracing::info!(seconds = within.as_secs(), "this node leaves the cluster");
    let Err(left) = empty_node(node, scope, Some(Instant::now() + within)) else {
        return tracing::info!("the node is empty");
    };
    tracing::warn!(%left, "killing the remaining guests");
    let why = format!("node {} was stopped, and no other node took the process in time", node.me());
    shim::request_all(&node.config.run_dir, &ShimRequest::End { why });
}

/// The processes that leave their present node.
#[derive(Debug, Clone, Copy)]
struct Scope {
    /// Guests.
    expel: bool,
    /// Own processes that are away.
    bring: bool,
}

impl Scope {
    /// Changes the settings so that such processes do not come back.
    fn enforce(self, settings: &mut NodeSettings) {
        settings.block |= self.expel;
        settings.local_stay |= self.bring;
        settings.stay |= self.expel && self.bring;
    }
}

/// Returns when the node is empty, or with a refusal that lists what is left when the time is up.
fn empty_node(node: &Arc<Node>, scope: Scope, end: Option<Instant>) -> Result<(), Refusal> {
    let Scope { expel, bring } = scope;
    let mut asked: Option<Instant> = None;
    loop {
        let rows = process_list::from_shims(node);
        let guests: Vec<_> = rows.iter().filter(|row| expel && row.from.is_some()).collect();
        let away: Vec<_> =
            rows.iter().filter(|row| bring && process_list::is_away(node, row)).map(|row| row.pid).collect();
        // A process whose row shows this node may still be migrating.
        let on_the_way = rows.iter().any(|row| row.from.is_none() && row.state == "migrating");
        if guests.is_empty() && away.is_empty() && !on_the_way {
            return Ok(());
        }
        if end.is_some_and(|end| Instant::now() > end) {
            let left =
                format!("{} guests are still here and {} processes still away", guests.len(), away.len());
            return Err(Refusal::new(RefusalKind::Unavailable, left)
                .hint("mps shows them; repeat the command to continue"));
        }
        if asked.is_none_or(|asked| asked.elapsed() > REQUEST_INTERVAL) {
            asked = Some(Instant::now());
            request_moves(node, &guests);
            move_in_background(node, away, None);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Asks the home of each of these guests to move it to another node.
pub(crate) fn request_moves(node: &Arc<Node>, guests: &[&ProcessRow]) {
    let mut homes: BTreeMap<NodeId, Vec<HomePid>> = BTreeMap::new();
    for guest in guests {
        if let Some(home) = guest.from {
            homes.entry(home).or_default().push(guest.pid);
        }
    }
    for (home, pids) in homes {
        let own = node.clone();
        let ask = move || {
            if let Err(error) = client::call(&own, home, &PeerRequest::MoveAway { pids }, REQUEST_TIMEOUT) {
                tracing::warn!(%home, %error, "a home did not accept the request to move its guests");
            }
        };
        if let Err(error) = thread::Builder::new().name("expel".into()).spawn(ask) {
            tracing::warn!(%error, "cannot start a thread to ask a home");
        }
    }
}

/// Moves processes of this home off the node `from`, which has asked for it. Processes that do not
/// run there are ignored.
pub(crate) fn move_away(node: &Arc<Node>, from: NodeId, pids: Vec<HomePid>) {
    move_in_background(node, pids, Some(from));
}

/// Moves these processes in the background, a few at a time; with `from`, only those on that node.
/// Processes that are being moved already are skipped.
fn move_in_background(node: &Arc<Node>, pids: Vec<HomePid>, from: Option<NodeId>) {
    let there: Vec<_> = process_list::from_shims(node)
        .into_iter()
        .filter(|row| process_list::is_away(node, row) && pids.contains(&row.pid))
        .filter(|row| from.is_none_or(|from| row.r#where == Some(from)))
        .map(|row| row.pid)
        .collect();
    let new: Vec<_> = {
        let mut leaving = lock(&node.moving_off);
        there.into_iter().filter(|pid| leaving.insert(pid.0)).collect()
    };
    for some in split_shares(&new) {
        let (own, mine) = (node.clone(), some.clone());
        let run = move || {
            for pid in mine {
                let outcome = read_stat(pid.0).ok().map(|found| move_off(&own, pid, found.start, from));
                lock(&own.moving_off).remove(&pid.0);
                if let Some(Err(error)) = outcome {
                    tracing::info!(%pid, %error, "the process was not moved");
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("fetch".into()).spawn(run) {
            tracing::warn!(%error, "cannot start a thread to move processes");
            let mut leaving = lock(&node.moving_off);
            leaving.retain(|pid| !some.contains(&HomePid(*pid)));
        }
    }
}

/// Moves a process off `from` to the node that suits it best. Moves it home if there is no such
/// node, if that fails, or if `from` is `None`.
fn move_off(node: &Node, pid: HomePid, start: u64, from: Option<NodeId>) -> Result<Reply, Refusal> {
    if let Some(better) = from.and_then(|_| query::better_node(node, pid).ok()?).filter(|to| *to != node.me())
    {
        match migrate::move_process(node, pid, start, Destination::Node(better)) {
            Ok(reply) => return Ok(reply),
            Err(error) => {
                tracing::info!(%pid, to = %better, %error, "cannot move the process there; moving it home instead");
            }
        }
    }
    migrate::move_process(node, pid, start, Destination::Home)
}

/// Distributes the processes to at most [`MAX_PARALLEL_MOVES`] workers.
fn split_shares(pids: &[HomePid]) -> Vec<Vec<HomePid>> {
    let mut shares = vec![Vec::new(); MAX_PARALLEL_MOVES.min(pids.len())];
    for (at, pid) in pids.iter().enumerate() {
        shares[at % MAX_PARALLEL_MOVES].push(*pid);
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_is_in_one_share() {
        assert!(split_shares(&[]).is_empty());
        let pids: Vec<_> = (1..=19).map(HomePid).collect();
        let shares = split_shares(&pids);
        assert_eq!(shares.len(), MAX_PARALLEL_MOVES);
        let mut all = shares.concat();
        all.sort_unstable();
        assert_eq!(all, pids);
        assert_eq!(split_shares(&pids[..2]), [[HomePid(1)], [HomePid(2)]]);
    }
}
