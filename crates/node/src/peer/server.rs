//! Serves the requests of other nodes' daemons.

use crate::balance::accounting;
use crate::cluster::{gossip, tune};
use crate::migrate::evacuation;
use crate::node::{Node, kernel_release};
use crate::peer::client;
use crate::peer::message::{Hello, PeerError, PeerReply, PeerRequest, check_protocol, receive, send};
use crate::process::process_list;
use crate::programs::HelperProgram;
use crate::shim;
use rustix::process::geteuid;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::{Refusal, RefusalKind, ShimRequest, ShimRole};
use tern_ids::{Fingerprint, NodeId};
use tern_wire::Link;

/// Timeout of waiting for the next request, and of sending a reply.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a shim may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of keys that the shim of a guest accepts. Two are used so far: that of home, and
/// that of the source if the guest comes from another away node.
const MAX_ACCEPTED_KEYS: usize = 4;

/// Serves requests of one node until it closes the link.
///
/// # Errors
/// If a message is malformed or does not arrive in time; the link is closed then.
pub(crate) fn serve(
    node: &Arc<Node>,
    link: &mut Link,
    (peer, key): (NodeId, Fingerprint),
) -> Result<(), PeerError> {
    let deadline = || Instant::now() + MESSAGE_TIMEOUT;
    let theirs: Hello = receive(link, deadline())?;
    send(link, &node.hello(), deadline())?;
    check_protocol(theirs.protocol)?;
    if theirs.map_version > node.map().version() {
        client::fetch_map(node, vec![peer]);
    }
    loop {
        let request: PeerRequest = match receive(link, deadline()) {
            Err(PeerError::Link(tern_wire::LinkError::Closed)) => return Ok(()),
            request => request?,
        };
        let reply = handle(node, (peer, key), request).unwrap_or_else(PeerReply::Refused);
        send(link, &reply, deadline())?;
    }
}

fn handle(
    node: &Arc<Node>,
    (peer, key): (NodeId, Fingerprint),
    request: PeerRequest,
) -> Result<PeerReply, Refusal> {
    match request {
        PeerRequest::Ping => {
            let (_, guests) = process_list::counts(node);
            Ok(PeerReply::Pong {
                kernel: kernel_release(),
                guests,
                accepts_guests: node.check_accepts_guests().is_ok(),
            })
        }
        PeerRequest::StartGuestShim { migration, accepted_keys, uid, gid } => {
            let span = tracing::info_span!("migration", id = %migration, home = %peer);
            let _inside = span.enter();
            node.check_accepts_guests()?;
            check_guest_user(node, uid)?;
            if accepted_keys.is_empty() || accepted_keys.len() > MAX_ACCEPTED_KEYS {
                return Err(Refusal::new(
                    RefusalKind::BadRequest,
                    "the shim of a guest needs 1 to 4 keys to accept",
                ));
            }
            let role = ShimRole::Guest { home: peer, migration, accepted_keys, uid, gid };
            if node.config.file.shared.iter().flatten().next().is_some()
                && let Err(error) = HelperProgram::file_server(&node.config).ensure_running()
            {
                // The guest then reads shared files through home.
                tracing::warn!("{error:#}");
            }
            let (shim, fingerprint) = shim::start(&node.config, node.me(), role)?;
            tracing::info!(%shim, uid, "a shim for a guest has started");
            if !node.identity.members().is_member(peer, key) {
                // It was removed before the shim existed.
                let end = ShimRequest::NodeRemoved { node: peer };
                let _ended = shim::request(&node.config.run_dir, shim, &end, Some(END_TIMEOUT));
                return Err(Refusal::new(RefusalKind::NotAllowed, format!("node {peer} was removed")));
            }
            Ok(PeerReply::GuestShimStarted { shim, fingerprint })
        }
        PeerRequest::IsShimAlive { shim } => {
            Ok(PeerReply::YesOrNo(shim::is_alive(&node.config.run_dir, shim)))
        }
        PeerRequest::IsGuestAwaited { shim, pid, epoch } => {
            Ok(PeerReply::YesOrNo(shim::is_guest_awaited(&node.config.run_dir, shim, pid, epoch)))
        }
        PeerRequest::Gossip(bytes) => match gossip::receive_gossip(node, peer, &bytes) {
            Ok(()) => Ok(PeerReply::Done),
            Err(error) => {
                Err(Refusal::new(RefusalKind::BadRequest, format!("invalid gossip message: {error}")))
            }
        },
        PeerRequest::OfferProcess(offer) => {
            Ok(PeerReply::OfferAnswer(accounting::answer_offer(node, peer, offer)))
        }
        PeerRequest::OfferOutcome { pid, arrived } => {
            accounting::receive_outcome(node, peer, pid, arrived);
            Ok(PeerReply::Done)
        }
        PeerRequest::MoveAway { pids } => {
            evacuation::move_away(node, peer, pids);
            Ok(PeerReply::Done)
        }
        PeerRequest::Probe { reply_len, .. } => {
            let reply_len = usize::try_from(reply_len).unwrap_or(usize::MAX).min(tune::MAX_PROBE_LEN);
            Ok(PeerReply::Probed(vec![0; reply_len]))
        }
        PeerRequest::Processes => Ok(PeerReply::Processes(process_list::for_peer(node))),
        PeerRequest::GetMap => Ok(PeerReply::Map(node.map().text().into())),
        PeerRequest::SetMap { text } => node.adopt_map(&text).map(|_newer| PeerReply::Done),
    }
}

/// Checks that a guest can run as its user: a plain user's node can use no other identity.
fn check_guest_user(node: &Node, uid: u32) -> Result<(), Refusal> {
    let own = geteuid();
    if own.is_root() || own.as_raw() == uid {
        return Ok(());
    }
    let message =
        format!("node {} runs for user {} and hosts only processes of that user", node.me(), own.as_raw());
    Err(Refusal::new(RefusalKind::NotAllowed, message))
}
