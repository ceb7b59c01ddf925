//! Connections whose peer has not authenticated: how many there may be at once, and from where.
//!
//! Every machine can connect. So an address of a member has places that no other address can take, and all
//! others share a few. An address counts as a member's if it is in the map, or if a member has
//! authenticated from it. A connection that is passed on to another program keeps the place of a stranger
//! until its handshake must be over, since only that program sees the result.

use crate::node::Node;
use crate::os::sync::lock;
use crate::peer::connection_limit::{ConnectionLimit, ConnectionPermit};
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_wire::limits::HANDSHAKE_TIMEOUT;

/// Maximum number of connections from addresses of members, in total and from one address.
const MAX_FROM_MEMBERS: (usize, usize) = (256, 64);

/// The same for all other addresses.
const MAX_FROM_STRANGERS: (usize, usize) = (64, 16);

/// How long a stranger may take for its preamble. Others may take [`HANDSHAKE_TIMEOUT`].
const STRANGER_PREAMBLE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of addresses that are remembered.
const MAX_KNOWN: usize = 4096;

/// Lines of one kind that are logged within [`LOG_WINDOW`]; the others are counted.
const MAX_LOG_LINES: u32 = 3;
const LOG_WINDOW: Duration = Duration::from_secs(60);

/// The places for connections that have not authenticated.
#[derive(Debug)]
pub(super) struct Unauthenticated {
    members: Arc<ConnectionLimit<IpAddr>>,
    strangers: Arc<ConnectionLimit<IpAddr>>,
    /// Addresses from which members have authenticated.
    known: Mutex<HashMap<IpAddr, NodeId>>,
    /// Places of connections that were passed on, and when each becomes free. In this order.
    passed_on: Mutex<VecDeque<(Instant, Place)>>,
    pub(super) closed: LogBudget,
    pub(super) failed: LogBudget,
}

/// The place of one connection.
#[derive(Debug)]
pub(super) struct Place {
    _permit: ConnectionPermit<IpAddr>,
    from: IpAddr,
    /// Whether its address is not known as that of a member.
    pub(super) is_stranger: bool,
}

impl Place {
    /// When its preamble must be complete.
    pub(super) fn preamble_deadline(&self) -> Instant {
        Instant::now() + if self.is_stranger { STRANGER_PREAMBLE_TIMEOUT } else { HANDSHAKE_TIMEOUT }
    }
}

impl Unauthenticated {
    pub(super) fn new() -> Self {
        Self {
            members: ConnectionLimit::new(MAX_FROM_MEMBERS.0, MAX_FROM_MEMBERS.1),
            strangers: ConnectionLimit::new(MAX_FROM_STRANGERS.0, MAX_FROM_STRANGERS.1),
            known: Mutex::default(),
            passed_on: Mutex::default(),
            closed: LogBudget::default(),
            failed: LogBudget::default(),
        }
    }

    /// A place for a connection from this address; `None` if there is none.
    pub(super) fn place(&self, node: &Node, from: IpAddr) -> Option<Place> {
        let from = from.to_canonical();
        self.place_at(from, self.is_of_member(node, from), Instant::now())
    }

    fn place_at(&self, from: IpAddr, is_of_member: bool, now: Instant) -> Option<Place> {
        let mut passed_on = lock(&self.passed_on);
        while passed_on.front().is_some_and(|(until, _)| *until <= now) {
            passed_on.pop_front();
        }
        drop(passed_on);
        let limit = if is_of_member { &self.members } else { &self.strangers };
        Some(Place { _permit: limit.acquire(from)?, from, is_stranger: !is_of_member })
    }

    fn is_of_member(&self, node: &Node, from: IpAddr) -> bool {
        let known = lock(&self.known).get(&from).copied();
        known.is_some_and(|member| node.identity.members().contains(member)) || node.map().has_address(from)
    }

    /// Notes that a member has authenticated, and frees the place.
    pub(super) fn authenticated(&self, place: Place, member: NodeId) {
        if place.is_stranger {
            let mut known = lock(&self.known);
            if known.len() >= MAX_KNOWN {
                known.clear();
            }
            known.insert(place.from, member);
        }
    }

    /// Keeps the place of a stranger whose connection was passed on.
    pub(super) fn passed_on(&self, place: Place) {
        if place.is_stranger {
            lock(&self.passed_on).push_back((Instant::now() + HANDSHAKE_TIMEOUT, place));
        }
    }
}

/// Limits what strangers can write to the log.
#[derive(Debug, Default)]
pub(super) struct LogBudget(Mutex<Window>);

#[derive(Debug, Default)]
struct Window {
    begun: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl LogBudget {
    /// Whether a line may be written now, and how many were left out since the last one.
    pub(super) fn take(&self) -> Option<u64> {
        self.take_at(Instant::now())
    }

    fn take_at(&self, now: Instant) -> Option<u64> {
        let mut window = lock(&self.0);
        if window.begun.is_none_or(|begun| now.duration_since(begun) > LOG_WINDOW) {
            (window.begun, window.lines) = (Some(now), 0);
        }
        if window.lines >= MAX_LOG_LINES {
            window.left_out += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[test]
    fn strangers_take_no_place_of_members() {
        let places = Unauthenticated::new();
        let now = Instant::now();
        let mut taken: Vec<Place> = Vec::new();
        for stranger in 0..20 {
            taken.extend((0..100).filter_map(|_| places.place_at(address(stranger), false, now)));
        }
        assert_eq!(taken.len(), MAX_FROM_STRANGERS.0);
        assert_eq!(taken.iter().filter(|place| place.from == address(0)).count(), MAX_FROM_STRANGERS.1);
        assert!(places.place_at(address(99), false, now).is_none());
        let of_member = (0..100).filter_map(|_| places.place_at(address(0), true, now)).collect::<Vec<_>>();
        assert_eq!(of_member.len(), MAX_FROM_MEMBERS.1);
    }

    #[test]
    fn connection_that_is_passed_on_keeps_its_place_for_a_while() {
        let places = Unauthenticated::new();
        for _ in 0..MAX_FROM_STRANGERS.1 {
            places.passed_on(places.place_at(address(1), false, Instant::now()).unwrap());
        }
        assert!(places.place_at(address(1), false, Instant::now()).is_none());
        assert!(places.place_at(address(1), false, Instant::now() + HANDSHAKE_TIMEOUT).is_some());
        // A member's is free at once.
        for _ in 0..2 * MAX_FROM_MEMBERS.1 {
            places.passed_on(places.place_at(address(2), true, Instant::now()).unwrap());
        }
    }

    #[test]
    fn few_lines_are_logged_and_the_others_counted() {
        let (log, now) = (LogBudget::default(), Instant::now());
        assert_eq!((0..1000).filter_map(|_| log.take_at(now)).collect::<Vec<_>>(), [0; 3]);
        assert_eq!(log.take_at(now + 2 * LOG_WINDOW), Some(997));
    }
}
