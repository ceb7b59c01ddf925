//! Answering the other nodes' daemons.

use crate::beside::Beside;
use crate::message::{Hello, PeerReply, PeerRequest, TalkError, check_protocol, hear, say};
use crate::state::{Node, kernel};
use crate::{balancing, cluster, costs, evacuation, peers, processes, shims};
use rustix::process::geteuid;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::{Refusal, RefusalKind, ShimRole};
use tern_ids::NodeId;
use tern_wire::Link;

/// How long a node may be silent, and how long an answer may take to leave.
const PATIENCE: Duration = Duration::from_secs(30);

/// The most keys that a guest's shim accepts: home's, and the source's of an onward journey.
const MOST_KEYS: usize = 4;

/// Answers one node until it ends the conversation.
///
/// # Errors
/// If it says something that is not understood; the link is closed then.
pub(crate) fn serve(node: &Arc<Node>, link: &mut Link, peer: NodeId) -> Result<(), TalkError> {
    let soon = || Instant::now() + PATIENCE;
    let theirs: Hello = hear(link, soon())?;
    say(link, &node.hello(), soon())?;
    check_protocol(theirs.protocol)?;
    let map = node.map();
    if theirs.map > map.version() {
        // A node that the map lacks is either new or expelled: then those in the map know better than it.
        let from = if map.contains(peer) { vec![peer] } else { node.others() };
        peers::refresh(node, from);
    }
    loop {
        let request: PeerRequest = match hear(link, soon()) {
            Err(TalkError::Link(tern_wire::LinkError::Closed)) => return Ok(()),
            request => request?,
        };
        let reply = answer(node, peer, request).unwrap_or_else(PeerReply::Refused);
        say(link, &reply, soon())?;
    }
}

fn answer(node: &Arc<Node>, peer: NodeId, request: PeerRequest) -> Result<PeerReply, Refusal> {
    if !matches!(request, PeerRequest::Ping) && !node.map().contains(peer) {
        let said = format!("node {peer} is not in node {}'s map", node.me());
        return Err(
            Refusal::new(RefusalKind::NotAllowed, said).hint("tern status there, to compare the maps")
        );
    }
    match request {
        PeerRequest::Ping => {
            let (_, guests) = processes::counts(node);
            Ok(PeerReply::Pong { kernel: kernel(), guests, open: node.takes_guests().is_ok() })
        }
        PeerRequest::Host { migration, accept, uid, gid } => {
            let span = tracing::info_span!("migration", id = %migration, home = %peer);
            let _inside = span.enter();
            node.takes_guests()?;
            may_host(node, uid)?;
            if accept.is_empty() || accept.len() > MOST_KEYS {
                return Err(Refusal::new(RefusalKind::BadRequest, "a guest has 1 to 4 keys to accept"));
            }
            let role = ShimRole::Guest { home: peer, migration, accept, uid, gid };
            if node.config.file.shared.iter().flatten().next().is_some()
                && let Err(error) = Beside::files(&node.config).ensure()
            {
                // Its files are read through home then.
                tracing::warn!("{error:#}");
            }
            let (shim, fingerprint) = shims::start(&node.config, node.me(), role)?;
            tracing::info!(%shim, uid, "a guest is expected");
            Ok(PeerReply::Hosted { shim, fingerprint })
        }
        PeerRequest::ShimAlive { shim } => Ok(PeerReply::Alive(shims::is_alive(&node.config.run_dir, shim))),
        PeerRequest::Awaited { shim, pid, epoch } => {
            Ok(PeerReply::Alive(shims::awaits(&node.config.run_dir, shim, pid, epoch)))
        }
        PeerRequest::Gossip(bytes) => match cluster::heard(node, peer, &bytes) {
            Ok(()) => Ok(PeerReply::Done),
            Err(error) => Err(Refusal::new(RefusalKind::BadRequest, format!("this is no gossip: {error}"))),
        },
        PeerRequest::MayCome(offer) => Ok(PeerReply::Answer(balancing::asked(node, peer, offer))),
        PeerRequest::Settled { pid, came } => {
            balancing::settled(node, peer, pid, came);
            Ok(PeerReply::Done)
        }
        PeerRequest::TakeBack { pids } => {
            evacuation::take_back(node, peer, pids);
            Ok(PeerReply::Done)
        }
        PeerRequest::Probe { want, .. } => {
            let want = usize::try_from(want).unwrap_or(usize::MAX).min(costs::PIECE);
            Ok(PeerReply::Probed(vec![0; want]))
        }
        PeerRequest::Processes => Ok(PeerReply::Processes(processes::for_others(node))),
        PeerRequest::GetMap => Ok(PeerReply::Map(node.map().text().into())),
        PeerRequest::SetMap { text } => node.adopt(&text).map(|_newer| PeerReply::Done),
    }
}

/// A plain user's node can give its guests no identity but his.
fn may_host(node: &Node, uid: u32) -> Result<(), Refusal> {
    let own = geteuid();
    if own.is_root() || own.as_raw() == uid {
        return Ok(());
    }
    let said = format!("node {} runs for user {} and hosts his processes only", node.me(), own.as_raw());
    Err(Refusal::new(RefusalKind::NotAllowed, said))
}
