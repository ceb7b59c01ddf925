//! Speaking with the other nodes' daemons: asking them, and keeping everybody's map the same.

use crate::message::{Hello, PeerReply, PeerRequest, TalkError, check_protocol, hear, say};
use crate::slots::lock;
use crate::state::{Node, clock};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tern_control::{Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_wire::{Link, Preamble};

/// How far a destination's clock may be off.
pub(crate) const MOST_CLOCK_OFFSET: Duration = Duration::from_millis(50);

/// How long a map may take to a node.
const MAP: Duration = Duration::from_secs(5);

/// What a node said.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) hello: Hello,
    pub(crate) reply: PeerReply,
    /// From our hello to its.
    pub(crate) round_trip: Duration,
    /// How far its clock is ahead of ours, nanoseconds, within half a round trip.
    pub(crate) clock_ahead: i64,
}

/// Asks a node of the map.
///
/// # Errors
/// If it cannot be reached in time, or refuses. Unless it refused, nothing can be said about whether it did
/// what was asked.
pub(crate) fn ask(
    node: &Node,
    peer: NodeId,
    request: &PeerRequest,
    limit: Duration,
) -> Result<Answer, Refusal> {
    let deadline = Instant::now() + limit;
    let mut link = connect(node, peer, deadline)?;
    let answer = converse(node, &mut link, peer, request, deadline).map_err(|e| e.refusal(peer))?;
    match answer.reply {
        PeerReply::Refused(refusal) => Err(refusal),
        _ => Ok(answer),
    }
}

/// Links to other daemons that wait for the next question. What is asked once a second would otherwise cost a
/// handshake each time.
#[derive(Debug, Default)]
pub(crate) struct Idle(Mutex<HashMap<NodeId, (Link, Instant)>>);

/// How long a link may be idle: less than the other side waits for us.
const IDLE: Duration = Duration::from_secs(20);

/// The most links that are kept.
const MOST_IDLE: usize = 64;

/// Asks a node over a link that is there already, if there is one. The question may arrive twice: a link that was idle
/// may have been cut with it under way.
///
/// # Errors
/// As [`ask`].
pub(crate) fn ask_again(
    node: &Node,
    peer: NodeId,
    request: &PeerRequest,
    limit: Duration,
) -> Result<PeerReply, Refusal> {
    let deadline = Instant::now() + limit;
    let kept = lock(&node.idle.0).remove(&peer).filter(|(_, since)| since.elapsed() < IDLE);
    // Only over a link that is there: to make one is more than a round trip, and takes both ends a while.
    let over = |link: &mut Link| -> Result<PeerReply, TalkError> {
        let begun = Instant::now();
        say(link, request, deadline)?;
        let reply = hear(link, deadline)?;
        node.cluster.round_trip(peer, begun.elapsed());
        Ok(reply)
    };
    let known = kept.and_then(|(mut link, _)| over(&mut link).ok().map(|reply| (link, reply)));
    let (link, reply) = match known {
        Some(known) => known,
        None => {
            let mut link = connect(node, peer, deadline)?;
            let answer = converse(node, &mut link, peer, request, deadline).map_err(|e| e.refusal(peer))?;
            (link, answer.reply)
        }
    };
    let mut idle = lock(&node.idle.0);
    if idle.len() >= MOST_IDLE {
        idle.retain(|_, (_, since)| since.elapsed() < IDLE);
    }
    if idle.len() < MOST_IDLE {
        idle.insert(peer, (link, Instant::now()));
    }
    match reply {
        PeerReply::Refused(refusal) => Err(refusal),
        reply => Ok(reply),
    }
}

/// A conversation of one's own with a node, of as many questions as one likes: its times are not those of a handshake.
#[derive(Debug)]
pub(crate) struct Talk {
    link: Link,
    peer: NodeId,
    deadline: Instant,
}

impl Talk {
    /// Begins one, all of which has to be over by then.
    ///
    /// # Errors
    /// If the node cannot be reached.
    pub(crate) fn begin(node: &Node, peer: NodeId, deadline: Instant) -> Result<Self, Refusal> {
        let mut link = connect(node, peer, deadline)?;
        let greeted = say(&mut link, &node.hello(), deadline)
            .and_then(|()| hear::<Hello>(&mut link, deadline))
            .and_then(|hello| check_protocol(hello.protocol));
        greeted.map_err(|e| unreached(peer, &e))?;
        Ok(Self { link, peer, deadline })
    }

    /// Asks, and waits for the answer, which may be a refusal.
    ///
    /// # Errors
    /// If the link breaks, or the time is over.
    pub(crate) fn ask(&mut self, request: &PeerRequest) -> Result<PeerReply, Refusal> {
        let answer =
            say(&mut self.link, request, self.deadline).and_then(|()| hear(&mut self.link, self.deadline));
        answer.map_err(|e| unreached(self.peer, &e))
    }
}

fn unreached(peer: NodeId, why: &dyn std::fmt::Display) -> Refusal {
    Refusal::new(RefusalKind::Unavailable, format!("node {peer} cannot be reached: {why}"))
}

fn connect(node: &Node, peer: NodeId, deadline: Instant) -> Result<Link, Refusal> {
    let map = node.map();
    if !map.contains(peer) {
        return Err(Refusal::new(RefusalKind::NotFound, format!("there is no node {peer} in the map")));
    }
    let address = map.address(peer).map_err(|e| unreached(peer, &e))?;
    let tls = node.identity.cluster_client(peer).map_err(|e| unreached(peer, &e))?;
    Link::connect(&address, Preamble::Node, &tls, deadline).map_err(|e| unreached(peer, &e))
}

impl Problem {
    fn refusal(self, peer: NodeId) -> Refusal {
        match self {
            Self::Talk(e) => unreached(peer, &e),
            Self::Clock(refusal) => refusal,
        }
    }
}

enum Problem {
    Talk(TalkError),
    Clock(Refusal),
}

impl<E: Into<TalkError>> From<E> for Problem {
    fn from(error: E) -> Self {
        Self::Talk(error.into())
    }
}

fn converse(
    node: &Node,
    link: &mut Link,
    peer: NodeId,
    request: &PeerRequest,
    deadline: Instant,
) -> Result<Answer, Problem> {
    let (begin, clock_before) = (Instant::now(), clock());
    say(link, &node.hello(), deadline)?;
    let hello: Hello = hear(link, deadline)?;
    let round_trip = begin.elapsed();
    check_protocol(hello.protocol)?;
    let half = i64::try_from(round_trip.as_nanos() / 2).unwrap_or(i64::MAX);
    let clock_ahead = (hello.clock.wrapping_sub(clock_before) as i64).saturating_sub(half);
    if matches!(request, PeerRequest::Host { .. }) {
        check_clock(peer, clock_ahead, half).map_err(Problem::Clock)?;
    }
    say(link, request, deadline)?;
    let reply = hear(link, deadline)?;
    Ok(Answer { hello, reply, round_trip, clock_ahead })
}

/// A process must not see time go backwards through a move.
fn check_clock(peer: NodeId, ahead: i64, uncertainty: i64) -> Result<(), Refusal> {
    let off = ahead.saturating_abs().saturating_sub(uncertainty);
    if off <= i64::try_from(MOST_CLOCK_OFFSET.as_nanos()).unwrap_or(i64::MAX) {
        return Ok(());
    }
    let direction = if ahead > 0 { "ahead of" } else { "behind" };
    let said =
        format!("node {peer}'s clock is {} ms {direction} this node's", ahead.unsigned_abs() / 1_000_000);
    Err(Refusal::new(RefusalKind::Unavailable, said).hint("run an NTP client on both"))
}

/// Asks all other nodes at once whether they are there, and brings the maps together: takes the newest that
/// any of them has, and sends ours to those whose is older.
pub(crate) fn ping_all(node: &Arc<Node>, limit: Duration) -> Vec<(NodeId, Result<Answer, Refusal>)> {
    let others = node.others();
    let answers: Vec<_> = thread::scope(|scope| {
        let asking: Vec<_> = others
            .iter()
            .map(|peer| (*peer, scope.spawn(|| ask(node, *peer, &PeerRequest::Ping, limit))))
            .collect();
        let lost = |_panic| Err(Refusal::new(RefusalKind::Internal, "the ping failed"));
        asking.into_iter().map(|(peer, thread)| (peer, thread.join().unwrap_or_else(lost))).collect()
    });
    let own = node.map().version();
    let versions =
        || answers.iter().filter_map(|(peer, answer)| Some((*peer, answer.as_ref().ok()?.hello.map)));
    if let Some((peer, _)) = versions().filter(|(_, map)| *map > own).max_by_key(|(_, map)| *map) {
        refresh(node, vec![peer]);
    } else {
        let behind: Vec<_> = versions().filter(|(_, map)| *map < own).map(|(peer, _)| peer).collect();
        if !behind.is_empty() {
            spread(node, behind);
        }
    }
    answers
}

/// Gets the map from these nodes, in the background; takes the newest.
pub(crate) fn refresh(node: &Arc<Node>, from: Vec<NodeId>) {
    if node.refreshing.swap(true, Ordering::SeqCst) {
        return;
    }
    let own = node.clone();
    let fetch = move || {
        for peer in from {
            match ask(&own, peer, &PeerRequest::GetMap, MAP) {
                Ok(Answer { reply: PeerReply::Map(text), .. }) => {
                    if let Err(error) = own.adopt(&text) {
                        tracing::warn!(%peer, %error, "its map is not taken");
                    }
                }
                outcome => tracing::debug!(%peer, ?outcome, "no map from it"),
            }
        }
        own.refreshing.store(false, Ordering::SeqCst);
    };
    if thread::Builder::new().name("map".into()).spawn(fetch).is_err() {
        node.refreshing.store(false, Ordering::SeqCst);
    }
}

/// Sends our map to these nodes, in the background. Those that are down get it when they answer again.
pub(crate) fn spread(node: &Arc<Node>, to: Vec<NodeId>) {
    let node = node.clone();
    let send = move || {
        let request = PeerRequest::SetMap { text: node.map().text().into() };
        thread::scope(|scope| {
            for peer in to {
                let (node, request) = (&node, &request);
                scope.spawn(move || {
                    if let Err(error) = ask(node, peer, request, MAP) {
                        tracing::info!(%peer, %error, "it has not got the new map");
                    }
                });
            }
        });
    };
    if let Err(error) = thread::Builder::new().name("map".into()).spawn(send) {
        tracing::warn!(%error, "nobody has got the new map");
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
