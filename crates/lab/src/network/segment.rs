//! One segment of the link emulator: decides where and when each frame is delivered. No I/O, and no
//! clock of its own.

use crate::network::link_spec::{LinkSpec, Topology};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Maximum number of bytes in flight on one segment. Further frames are lost, as in a switch with
/// full buffers.
const MAX_BYTES_IN_FLIGHT: usize = 64 << 20;
/// Longest time that a frame waits for a hub to become free, like TBF's `latency`. Later frames are
/// lost.
const MAX_HUB_WAIT: Duration = Duration::from_millis(50);
/// Maximum number of MAC addresses remembered.
const MAX_MAC_ADDRESSES: usize = 4096;
const ETHERNET_HEADER_LEN: usize = 14;

/// A frame to be delivered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Delivery {
    /// The ports to send it to.
    pub(crate) to: Vec<usize>,
    /// The frame as passed to `receive`, with the bytes before its Ethernet header.
    pub(crate) frame: Box<[u8]>,
}

/// A segment.
#[derive(Debug)]
pub(crate) struct Segment {
    ports: Vec<usize>,
    learns_addresses: bool,
    delay: Duration,
    loss: f64,
    rate: Option<u64>,
    /// Each port has its own generator, so that one node's losses do not depend on when other nodes
    /// send.
    loss_rngs: HashMap<usize, StdRng>,
    mac_table: HashMap<[u8; 6], usize>,
    busy_until: Option<Instant>,
    in_flight: VecDeque<(Instant, Delivery)>,
    bytes_in_flight: usize,
    prefix_len: usize,
}

impl Segment {
    /// A segment of these ports. `prefix_len` bytes precede the Ethernet header of each frame.
    pub(crate) fn new(link: &LinkSpec, ports: Vec<usize>, seed: u64, prefix_len: usize) -> Self {
        let loss_rngs =
            ports.iter().map(|&p| (p, StdRng::seed_from_u64(seed.wrapping_add(p as u64)))).collect();
        let hub = link.topology == Topology::Hub;
        Self {
            ports,
            learns_addresses: !hub,
            delay: link.delay,
            loss: link.loss,
            // For switches and point-to-point cables, tc limits the rate.
            rate: link.rate.filter(|_| hub),
            loss_rngs,
            mac_table: HashMap::new(),
            busy_until: None,
            in_flight: VecDeque::new(),
            bytes_in_flight: 0,
            prefix_len,
        }
    }

    /// Accepts a frame that came in on this port.
    pub(crate) fn receive(&mut self, now: Instant, from: usize, frame: &[u8]) {
        let Some(ethernet) = frame.get(self.prefix_len..).filter(|e| e.len() >= ETHERNET_HEADER_LEN) else {
            return;
        };
        let (Some(&destination), Some(&source)) =
            (ethernet.first_chunk::<6>(), ethernet.get(6..).and_then(<[u8]>::first_chunk::<6>))
        else {
            return;
        };
        if self.learns_addresses
            && (self.mac_table.len() < MAX_MAC_ADDRESSES || self.mac_table.contains_key(&source))
        {
            self.mac_table.insert(source, from);
        }
        // One random number is drawn per frame, even for a frame that is lost for another reason,
        // so that the n-th frame of a port always gets the same number.
        let lost =
            self.loss > 0.0 && self.loss_rngs.get_mut(&from).is_some_and(|d| d.random::<f64>() < self.loss);
        let mut leaves = now;
        if let Some(rate) = self.rate {
            let start = self.busy_until.map_or(now, |busy| busy.max(now));
            if start.duration_since(now) > MAX_HUB_WAIT {
                return;
            }
            leaves = start + Duration::from_secs_f64(ethernet.len() as f64 * 8.0 / rate as f64);
            // A lost frame occupies the medium, too.
            self.busy_until = Some(leaves);
        }
        if lost || self.bytes_in_flight + frame.len() > MAX_BYTES_IN_FLIGHT {
            return;
        }
        let is_multicast = destination[0] & 1 == 1;
        let learned = self.mac_table.get(&destination).filter(|_| self.learns_addresses && !is_multicast);
        let to: Vec<usize> = match learned {
            Some(&port) if port == from => return,
            Some(&port) => vec![port],
            None => self.ports.iter().copied().filter(|&p| p != from).collect(),
        };
        self.bytes_in_flight += frame.len();
        self.in_flight.push_back((leaves + self.delay, Delivery { to, frame: frame.into() }));
    }

    /// When the next frame is to be delivered.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.in_flight.front().map(|(due, _)| *due)
    }

    /// The next frame, if it is due by now.
    pub(crate) fn take_due(&mut self, now: Instant) -> Option<Delivery> {
        let (due, _) = self.in_flight.front()?;
        if *due > now {
            return None;
        }
        let (_, delivery) = self.in_flight.pop_front()?;
        self.bytes_in_flight -= delivery.frame.len();
        Some(delivery)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(link: &str, seed: u64) -> Segment {
        Segment::new(&link.parse().unwrap(), vec![0, 1, 2], seed, 2)
    }

    fn frame(to: u8, from: u8, length: usize) -> Vec<u8> {
        let mut frame = vec![9, 9, to, 0, 0, 0, 0, 0, from, 0, 0, 0, 0, 0, 8, 0];
        frame.resize(length + 2, 0);
        frame
    }

    fn targets(segment: &mut Segment, now: Instant) -> Vec<Vec<usize>> {
        std::iter::from_fn(|| segment.take_due(now)).map(|a| a.to).collect()
    }

    #[test]
    fn frames_arrive_late_by_the_delay_and_in_order() {
        let start = Instant::now();
        let mut segment = segment("switch:5ms", 1);
        segment.receive(start, 0, &frame(4, 2, 100));
        segment.receive(start + Duration::from_millis(1), 1, &frame(2, 4, 100));
        assert_eq!(segment.next_due(), Some(start + Duration::from_millis(5)));
        assert_eq!(segment.take_due(start + Duration::from_millis(4)), None);
        // Address 4 was unknown at first; 2 had been seen at port 0.
        assert_eq!(targets(&mut segment, start + Duration::from_millis(6)), [vec![1, 2], vec![0]]);
        assert_eq!((segment.next_due(), segment.bytes_in_flight), (None, 0));
    }

    #[test]
    fn groups_are_flooded_and_hubs_never_learn() {
        let now = Instant::now();
        for link in ["switch:1us", "hub"] {
            let mut segment = segment(link, 1);
            segment.receive(now, 0, &frame(1, 2, 60));
            segment.receive(now, 1, &frame(2, 4, 60));
            let seen = targets(&mut segment, now + Duration::from_secs(1));
            assert_eq!(seen[0], [1, 2]);
            assert_eq!(seen[1].len(), if link == "hub" { 2 } else { 1 }, "{link}");
        }
    }

    #[test]
    fn a_hub_carries_one_frame_at_a_time() {
        let now = Instant::now();
        let mut segment = segment("hub:8mbit", 1);
        // 1000 bytes take 1 ms, from any sender.
        segment.receive(now, 0, &frame(1, 2, 1000));
        segment.receive(now, 1, &frame(1, 4, 1000));
        assert_eq!(targets(&mut segment, now + Duration::from_micros(1500)).len(), 1);
        assert_eq!(segment.next_due(), Some(now + Duration::from_millis(2)));
        for _ in 0..1000 {
            segment.receive(now, 0, &frame(1, 2, 1000));
        }
        // Frames that would wait longer than 50 ms are lost.
        assert!(segment.in_flight.len() < 60, "{}", segment.in_flight.len());
    }

    #[test]
    fn losses_follow_the_seed() {
        let now = Instant::now();
        let pattern = |seed| {
            let mut segment = segment("switch:,25%", seed);
            let lost = (0..4000).map(|_| {
                segment.receive(now, 0, &frame(1, 2, 60));
                segment.take_due(now).is_none()
            });
            lost.collect::<Vec<_>>()
        };
        let (a, b, c) = (pattern(1), pattern(1), pattern(2));
        assert_eq!(a, b);
        assert_ne!(a, c);
        let lost = a.iter().filter(|&&l| l).count();
        assert!((850..1150).contains(&lost), "{lost}");
    }

    #[test]
    fn short_frames_are_ignored() {
        let mut segment = segment("switch:1ms", 1);
        for length in 0..16 {
            segment.receive(Instant::now(), 0, &vec![0; length]);
        }
        assert_eq!(segment.next_due(), None);
    }
}
