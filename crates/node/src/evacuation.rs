//! Emptying a node: guests are sent away, own processes brought home.
//!
//! A guest's home moves it, so this node asks the homes, again and again until no guest is left. What a home does not
//! answer to is no reason to wait for ever: a guest without home ends after `give_up_after`. A node that leaves the
//! cluster ends those for which there was no place within its time.

use crate::message::PeerRequest;
use crate::procfs::process;
use crate::slots::lock;
use crate::state::Node;
use crate::{balancing, cluster, moving, peers, processes, shims};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tern_control::{Destination, Evacuation, ProcessRow, Refusal, RefusalKind, Reply, Settings, ShimRequest};
use tern_ids::{HomePid, NodeId};

/// How many processes of this node move at the same time.
const AT_ONCE: usize = 8;

/// How long between two looks at what is left.
const LOOK: Duration = Duration::from_millis(200);

/// How long until a home is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// How long a home may take to hear that it is asked.
const HEAR: Duration = Duration::from_secs(2);

/// `mosctl expel`, `bring`, `isolate`, `shutdown`.
pub(crate) fn evacuate(node: &Arc<Node>, what: Evacuation, seconds: Option<u32>) -> Result<Reply, Refusal> {
    let end = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds.into()));
    let wish = Wish { expel: what != Evacuation::Bring, bring: what != Evacuation::Expel };
    node.settings.change(|settings| {
        wish.enforce(settings);
    })?;
    tracing::info!(?what, "the node is being emptied");
    empty(node, wish, end)?;
    if what == Evacuation::Shutdown {
        node.settings.change(|settings| settings.quiet = true)?;
        // Whoever asked may switch the machine off as soon as we answer.
        thread::sleep(cluster::LAST_WORDS);
    }
    tracing::info!(?what, "the node is empty");
    Ok(Reply::Done)
}

/// The node leaves the cluster for as long as ternd does not run. Guests that could not leave in time are ended.
pub(crate) fn leave_cluster(node: &Arc<Node>, within: Duration) {
    let wish = Wish { expel: true, bring: true };
    node.settings.change_for_now(|settings| wish.enforce(settings));
    tracing::info!(seconds = within.as_secs(), "this node leaves the cluster");
    let Err(left) = empty(node, wish, Some(Instant::now() + within)) else {
        return tracing::info!("the node is empty");
    };
    tracing::warn!(%left, "guests that are still here are ended");
    let why = format!("node {} was stopped, and it had nowhere else to go in time", node.me());
    shims::ask_all(&node.config.run_dir, &ShimRequest::End { why });
}

/// What is to leave.
#[derive(Debug, Clone, Copy)]
struct Wish {
    /// Guests.
    expel: bool,
    /// Own processes that are away.
    bring: bool,
}

impl Wish {
    /// What is gone shall not come again.
    fn enforce(self, settings: &mut Settings) {
        settings.block |= self.expel;
        settings.local_stay |= self.bring;
        settings.stay |= self.expel && self.bring;
    }
}

/// Returns when the node is empty, or at the end with what is left.
fn empty(node: &Arc<Node>, wish: Wish, end: Option<Instant>) -> Result<(), Refusal> {
    let Wish { expel, bring } = wish;
    let mut asked: Option<Instant> = None;
    loop {
        let rows = processes::of_shims(node);
        let guests: Vec<_> = rows.iter().filter(|row| expel && row.from.is_some()).collect();
        let away: Vec<_> =
            rows.iter().filter(|row| bring && processes::is_away(node, row)).map(|row| row.pid).collect();
        // Who is said to be here already may still be on the way.
        let on_the_way = rows.iter().any(|row| row.from.is_none() && row.state == "migrating");
        if guests.is_empty() && away.is_empty() && !on_the_way {
            return Ok(());
        }
        if end.is_some_and(|end| Instant::now() > end) {
            let left =
                format!("{} guests are still here and {} processes still away", guests.len(), away.len());
            return Err(
                Refusal::new(RefusalKind::Unavailable, left).hint("mps shows them; ask again to go on")
            );
        }
        if asked.is_none_or(|asked| asked.elapsed() > ASK_AGAIN) {
            asked = Some(Instant::now());
            ask_homes(node, &guests);
            fetch(node, away, None);
        }
        thread::sleep(LOOK);
    }
}

/// Asks each home of these guests to have them elsewhere.
pub(crate) fn ask_homes(node: &Arc<Node>, guests: &[&ProcessRow]) {
    let mut homes: BTreeMap<NodeId, Vec<HomePid>> = BTreeMap::new();
    for guest in guests {
        if let Some(home) = guest.from {
            homes.entry(home).or_default().push(guest.pid);
        }
    }
    for (home, pids) in homes {
        let own = node.clone();
        let ask = move || {
            if let Err(error) = peers::ask(&own, home, &PeerRequest::TakeBack { pids }, HEAR) {
                tracing::warn!(%home, %error, "it does not take its processes back");
            }
        };
        if let Err(error) = thread::Builder::new().name("expel".into()).spawn(ask) {
            tracing::warn!(%error, "no thread to ask a home");
        }
    }
}

/// A node wants to be rid of these processes of ours. What is not there is left alone.
pub(crate) fn take_back(node: &Arc<Node>, from: NodeId, pids: Vec<HomePid>) {
    fetch(node, pids, Some(from));
}

/// Brings these home in the background, a few at a time; only those that are on `from`, if that is given. What is on
/// its way already is not asked for again.
fn fetch(node: &Arc<Node>, pids: Vec<HomePid>, from: Option<NodeId>) {
    let there: Vec<_> = processes::of_shims(node)
        .into_iter()
        .filter(|row| processes::is_away(node, row) && pids.contains(&row.pid))
        .filter(|row| from.is_none_or(|from| row.r#where == Some(from)))
        .map(|row| row.pid)
        .collect();
    let new: Vec<_> = {
        let mut leaving = lock(&node.leaving);
        there.into_iter().filter(|pid| leaving.insert(pid.0)).collect()
    };
    for some in spread(&new) {
        let (own, mine) = (node.clone(), some.clone());
        let run = move || {
            for pid in mine {
                let outcome = process(pid.0).map(|found| leave(&own, pid, found.start, from));
                lock(&own.leaving).remove(&pid.0);
                if let Some(Err(error)) = outcome {
                    tracing::info!(%pid, %error, "it did not come home");
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("fetch".into()).spawn(run) {
            tracing::warn!(%error, "no thread to bring processes home");
            let mut leaving = lock(&node.leaving);
            leaving.retain(|pid| !some.contains(&HomePid(*pid)));
        }
    }
}

/// Moves a process to where it is best, if that is not where it shall leave, and home if that fails or it is to come.
fn leave(node: &Node, pid: HomePid, start: u64, from: Option<NodeId>) -> Result<Reply, Refusal> {
    if let Some(better) = from.and_then(|_| balancing::better(node, pid).ok()?).filter(|to| *to != node.me())
    {
        match moving::order(node, pid, start, Destination::Node(better)) {
            Ok(reply) => return Ok(reply),
            Err(error) => tracing::info!(%pid, to = %better, %error, "it comes home instead"),
        }
    }
    moving::order(node, pid, start, Destination::Home)
}

/// Shares for at most so many workers as may work at once.
fn spread(pids: &[HomePid]) -> Vec<Vec<HomePid>> {
    let mut shares = vec![Vec::new(); AT_ONCE.min(pids.len())];
    for (at, pid) in pids.iter().enumerate() {
        shares[at % AT_ONCE].push(*pid);
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_is_in_one_share() {
        assert!(spread(&[]).is_empty());
        let pids: Vec<_> = (1..=19).map(HomePid).collect();
        let shares = spread(&pids);
        assert_eq!(shares.len(), AT_ONCE);
        let mut all = shares.concat();
        all.sort_unstable();
        assert_eq!(all, pids);
        assert_eq!(spread(&pids[..2]), [[HomePid(1)], [HomePid(2)]]);
    }
}
