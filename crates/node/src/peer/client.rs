//! Requests to the other nodes' daemons, and the distribution of the map.

use crate::node::Node;
use crate::os::clock::unix_ns;
use crate::os::sync::lock;
use crate::peer::message::{Hello, PeerError, PeerReply, PeerRequest, check_protocol, receive, send};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tern_control::{Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_wire::{Link, Preamble};

/// Maximum clock offset of a node that may be a destination.
pub(crate) const MAX_CLOCK_OFFSET: Duration = Duration::from_millis(50);

/// Timeout of sending or fetching a map.
const MAP_TIMEOUT: Duration = Duration::from_secs(5);

/// The reply of a node, with its greeting and timing.
#[derive(Debug)]
pub(crate) struct PeerResponse {
    pub(crate) hello: Hello,
    pub(crate) reply: PeerReply,
    /// From sending our hello to receiving the peer's.
    pub(crate) round_trip: Duration,
    /// How far the peer's clock is ahead of ours, in nanoseconds, within half a round trip.
    pub(crate) clock_ahead: i64,
}

/// Sends a request to a node of the map over a new link.
///
/// # Errors
/// If the node cannot be reached in time, or refuses. Unless it refused, it may or may not have
/// executed the request.
pub(crate) fn call(
    node: &Node,
    peer: NodeId,
    request: &PeerRequest,
    limit: Duration,
) -> Result<PeerResponse, Refusal> {
    let deadline = Instant::now() + limit;
    let mut link = connect(node, peer, deadline)?;
    let answer = exchange(node, &mut link, peer, request, deadline).map_err(|e| e.refusal(peer))?;
    match answer.reply {
        PeerReply::Refused(refusal) => Err(refusal),
        _ => Ok(answer),
    }
}

/// Sends a request over an idle link if there is one, else over a new link, which is kept. The
/// request may arrive twice, since an idle link may have been cut after the request was sent.
///
/// # Errors
/// As [`call`].
pub(crate) fn call_pooled(
    node: &Node,
    peer: NodeId,
    request: &PeerRequest,
    limit: Duration,
) -> Result<PeerReply, Refusal> {
    let deadline = Instant::now() + limit;
    let pooled = node.link_pool.take(peer);
    // Only round trips on an existing link are recorded; a handshake takes longer than a round
    // trip.
    let call_over = |link: &mut Link| -> Result<PeerReply, PeerError> {
        let begun = Instant::now();
        send(link, request, deadline)?;
        let reply = receive(link, deadline)?;
        node.cluster.record_round_trip(peer, begun.elapsed());
        Ok(reply)
    };
    let reused = pooled.and_then(|mut link| call_over(&mut link).ok().map(|reply| (link, reply)));
    let (link, reply) = match reused {
        Some(reused) => reused,
        None => {
            let mut link = connect(node, peer, deadline)?;
            let answer = exchange(node, &mut link, peer, request, deadline).map_err(|e| e.refusal(peer))?;
            (link, answer.reply)
        }
    };
    node.link_pool.put(peer, link);
    match reply {
        PeerReply::Refused(refusal) => Err(refusal),
        reply => Ok(reply),
    }
}

/// A link for a series of requests. Their round trips do not include a handshake.
#[derive(Debug)]
pub(crate) struct PeerSession {
    link: Link,
    peer: NodeId,
    deadline: Instant,
}

impl PeerSession {
    /// Opens a link; all its requests must complete before the deadline.
    ///
    /// # Errors
    /// If the node cannot be reached.
    pub(crate) fn open(node: &Node, peer: NodeId, deadline: Instant) -> Result<Self, Refusal> {
        let mut link = connect(node, peer, deadline)?;
        let greeted = send(&mut link, &node.hello(), deadline)
            .and_then(|()| receive::<Hello>(&mut link, deadline))
            .and_then(|hello| check_protocol(hello.protocol));
        greeted.map_err(|e| unreachable(peer, &e))?;
        Ok(Self { link, peer, deadline })
    }

    /// Sends a request and waits for the reply, which may be a refusal.
    ///
    /// # Errors
    /// If the link breaks, or the deadline passes.
    pub(crate) fn call(&mut self, request: &PeerRequest) -> Result<PeerReply, Refusal> {
        let answer = send(&mut self.link, request, self.deadline)
            .and_then(|()| receive(&mut self.link, self.deadline));
        answer.map_err(|e| unreachable(self.peer, &e))
    }
}

fn unreachable(peer: NodeId, why: &dyn std::fmt::Display) -> Refusal {
    Refusal::new(RefusalKind::Unavailable, format!("node {peer} cannot be reached: {why}"))
}

fn connect(node: &Node, peer: NodeId, deadline: Instant) -> Result<Link, Refusal> {
    let map = node.map();
    if !map.contains(peer) {
        return Err(Refusal::new(RefusalKind::NotFound, format!("there is no node {peer} in the map")));
    }
    let address = map.address(peer).map_err(|e| unreachable(peer, &e))?;
    let tls = node.identity.cluster_client(peer).map_err(|e| unreachable(peer, &e))?;
    Link::connect(&address, Preamble::Node, &tls, deadline).map_err(|e| unreachable(peer, &e))
}

impl ExchangeError {
    fn refusal(self, peer: NodeId) -> Refusal {
        match self {
            Self::Peer(e) => unreachable(peer, &e),
            Self::Clock(refusal) => refusal,
        }
    }
}

enum ExchangeError {
    Peer(PeerError),
    Clock(Refusal),
}

impl<E: Into<PeerError>> From<E> for ExchangeError {
    fn from(error: E) -> Self {
        Self::Peer(error.into())
    }
}

fn exchange(
    node: &Node,
    link: &mut Link,
    peer: NodeId,
    request: &PeerRequest,
    deadline: Instant,
) -> Result<PeerResponse, ExchangeError> {
    let (begin, clock_before) = (Instant::now(), unix_ns());
    send(link, &node.hello(), deadline)?;
    let hello: Hello = receive(link, deadline)?;
    let round_trip = begin.elapsed();
    check_protocol(hello.protocol)?;
    let half = i64::try_from(round_trip.as_nanos() / 2).unwrap_or(i64::MAX);
    let clock_ahead = (hello.clock_ns.wrapping_sub(clock_before) as i64).saturating_sub(half);
    if matches!(request, PeerRequest::StartGuestShim { .. }) {
        check_clock(peer, clock_ahead, half).map_err(ExchangeError::Clock)?;
    }
    send(link, request, deadline)?;
    let reply = receive(link, deadline)?;
    Ok(PeerResponse { hello, reply, round_trip, clock_ahead })
}

/// Checks the clock of a destination: a process must not see time go backwards through a move.
fn check_clock(peer: NodeId, ahead: i64, uncertainty: i64) -> Result<(), Refusal> {
    let off = ahead.saturating_abs().saturating_sub(uncertainty);
    if off <= i64::try_from(MAX_CLOCK_OFFSET.as_nanos()).unwrap_or(i64::MAX) {
        return Ok(());
    }
    let direction = if ahead > 0 { "ahead of" } else { "behind" };
    let message =
        format!("node {peer}'s clock is {} ms {direction} this node's", ahead.unsigned_abs() / 1_000_000);
    Err(Refusal::new(RefusalKind::Unavailable, message).hint("run an NTP client on both"))
}

/// Pings all other nodes at once and synchronises the maps: fetches those that are newer than ours, and
/// sends ours to nodes that have an older one.
pub(crate) fn ping_all(node: &Arc<Node>, limit: Duration) -> Vec<(NodeId, Result<PeerResponse, Refusal>)> {
    let others = node.other_nodes();
    let answers: Vec<_> = thread::scope(|scope| {
        let asking: Vec<_> = others
            .iter()
            .map(|peer| {
                let ping = || call(node, *peer, &PeerRequest::Ping, limit);
                (*peer, thread::Builder::new().spawn_scoped(scope, ping))
            })
            .collect();
        let failed = |why: &str| Err(Refusal::new(RefusalKind::Unavailable, why));
        let answer = |thread: std::io::Result<thread::ScopedJoinHandle<'_, _>>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_panic| failed("the ping failed")),
            Err(error) => failed(&format!("cannot start a thread for the ping: {error}")),
        };
        asking.into_iter().map(|(peer, thread)| (peer, answer(thread))).collect()
    });
    let own = node.map().version();
    let versions =
        || answers.iter().filter_map(|(peer, answer)| Some((*peer, answer.as_ref().ok()?.hello.map_version)));
    let newer: Vec<_> = versions().filter(|(_, map)| *map > own).map(|(peer, _)| peer).collect();
    let behind: Vec<_> = versions().filter(|(_, map)| *map < own).map(|(peer, _)| peer).collect();
    fetch_map(node, newer);
    if !behind.is_empty() {
        send_map(node, behind);
    }
    answers
}

/// Fetches the map from the founder because a machine with a certificate of this cluster is not in ours:
/// it is new, or it was removed.
pub(crate) fn fetch_map_for_stranger(node: &Arc<Node>) {
    let founder = node.config.file.founder.map(NodeId).filter(|founder| *founder != node.me());
    fetch_map(node, founder.into_iter().collect());
}

/// Minimum interval between two requests for the map to one node: a node may claim to have a newer one,
/// and not have it.
const FETCH_INTERVAL: Duration = Duration::from_secs(2);

/// Fetches the map from each of these nodes in the background, and installs it if it is newer. None delays
/// the others.
pub(crate) fn fetch_map(node: &Arc<Node>, from: Vec<NodeId>) {
    for peer in from {
        let mut requests = lock(&node.map_requests);
        requests.retain(|_, at| at.elapsed() < FETCH_INTERVAL);
        if requests.contains_key(&peer) {
            continue;
        }
        requests.insert(peer, Instant::now());
        drop(requests);
        let own = node.clone();
        let fetch = move || match call(&own, peer, &PeerRequest::GetMap, MAP_TIMEOUT) {
            Ok(PeerResponse { reply: PeerReply::Map(text), .. }) => {
                if let Err(error) = own.adopt_map(&text) {
                    tracing::warn!(%peer, %error, "the map of a peer was not installed");
                }
            }
            outcome => tracing::debug!(%peer, ?outcome, "received no map"),
        };
        if let Err(error) = thread::Builder::new().name("map".into()).spawn(fetch) {
            tracing::warn!(%peer, %error, "cannot start a thread to fetch the map");
        }
    }
}

/// Sends our map to these nodes in the background. Nodes that are down get it when they answer a
/// ping.
pub(crate) fn send_map(node: &Arc<Node>, to: Vec<NodeId>) {
    let node = node.clone();
    let send = move || {
        let request = PeerRequest::SetMap { text: node.map().text().into() };
        thread::scope(|scope| {
            for peer in to {
                let (node, request) = (&node, &request);
                let send = move || {
                    if let Err(error) = call(node, peer, request, MAP_TIMEOUT) {
                        tracing::info!(%peer, %error, "cannot send the new map");
                    }
                };
                if let Err(error) = thread::Builder::new().spawn_scoped(scope, send) {
                    tracing::warn!(%peer, %error, "cannot start a thread to send the map");
                }
            }
        });
    };
    if let Err(error) = thread::Builder::new().name("map".into()).spawn(send) {
        tracing::warn!(%error, "cannot start a thread to send the map");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_may_differ_by_what_cannot_be_measured_and_a_little() {
        let ms = 1_000_000;
        assert!(check_clock(NodeId(2), 50 * ms, 0).is_ok());
        assert!(check_clock(NodeId(2), -60 * ms, 10 * ms).is_ok());
        let refusal = check_clock(NodeId(2), -61 * ms, 10 * ms).unwrap_err();
        assert_eq!(refusal.message, "node 2's clock is 61 ms behind this node's");
        assert!(check_clock(NodeId(2), i64::MIN, 0).is_err());
    }
}
