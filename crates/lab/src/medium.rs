//! One segment of the wire: decides where and when each frame is delivered. No I/O, and no clock of
//! its own.

use crate::link::{Link, Shape};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Maximum number of bytes in flight on one segment. Further frames are lost, as in a switch with
/// full buffers.
const MOST_UNDER_WAY: usize = 64 << 20;
/// Longest time that a frame waits for a hub to become free, like TBF's `latency`. Later frames are
/// lost.
const LONGEST_WAIT: Duration = Duration::from_millis(50);
/// Maximum number of MAC addresses remembered.
const MOST_ADDRESSES: usize = 4096;
const ETHERNET_HEADER: usize = 14;

/// A frame to be delivered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// The ports to send it to.
    pub(crate) to: Vec<usize>,
    /// The frame as passed to `offer`, with the bytes before its Ethernet header.
    pub(crate) frame: Box<[u8]>,
}

/// A segment.
#[derive(Debug)]
pub(crate) struct Medium {
    ports: Vec<usize>,
    learns: bool,
    delay: Duration,
    loss: f64,
    rate: Option<u64>,
    /// Each port has its own generator, so that one node's losses do not depend on when other nodes
    /// send.
    dice: HashMap<usize, StdRng>,
    addresses: HashMap<[u8; 6], usize>,
    busy_until: Option<Instant>,
    under_way: VecDeque<(Instant, Arrival)>,
    bytes: usize,
    header: usize,
}

impl Medium {
    /// A segment of these ports. `header` bytes precede the Ethernet header of each frame.
    pub(crate) fn new(link: &Link, ports: Vec<usize>, seed: u64, header: usize) -> Self {
        let dice = ports.iter().map(|&p| (p, StdRng::seed_from_u64(seed.wrapping_add(p as u64)))).collect();
        let hub = link.shape == Shape::Hub;
        Self {
            ports,
            learns: !hub,
            delay: link.delay,
            loss: link.loss,
            // For switches and point-to-point cables, tc limits the rate.
            rate: link.rate.filter(|_| hub),
            dice,
            addresses: HashMap::new(),
            busy_until: None,
            under_way: VecDeque::new(),
            bytes: 0,
            header,
        }
    }

    /// Accepts a frame that came in on this port.
    pub(crate) fn offer(&mut self, now: Instant, from: usize, frame: &[u8]) {
        let Some(ethernet) = frame.get(self.header..).filter(|e| e.len() >= ETHERNET_HEADER) else { return };
        let (Some(&destination), Some(&source)) =
            (ethernet.first_chunk::<6>(), ethernet.get(6..).and_then(<[u8]>::first_chunk::<6>))
        else {
            return;
        };
        if self.learns && (self.addresses.len() < MOST_ADDRESSES || self.addresses.contains_key(&source)) {
            self.addresses.insert(source, from);
        }
        // One random number is drawn per frame, even if the frame is lost otherwise, so the
        // sequence is the same.
        let lost = self.loss > 0.0 && self.dice.get_mut(&from).is_some_and(|d| d.random::<f64>() < self.loss);
        let mut leaves = now;
        if let Some(rate) = self.rate {
            let start = self.busy_until.map_or(now, |busy| busy.max(now));
            if start.duration_since(now) > LONGEST_WAIT {
                return;
            }
            leaves = start + Duration::from_secs_f64(ethernet.len() as f64 * 8.0 / rate as f64);
            // A lost frame occupies the medium, too.
            self.busy_until = Some(leaves);
        }
        if lost || self.bytes + frame.len() > MOST_UNDER_WAY {
            return;
        }
        let group = destination[0] & 1 == 1;
        let known = self.addresses.get(&destination).filter(|_| self.learns && !group);
        let to: Vec<usize> = match known {
            Some(&port) if port == from => return,
            Some(&port) => vec![port],
            None => self.ports.iter().copied().filter(|&p| p != from).collect(),
        };
        self.bytes += frame.len();
        self.under_way.push_back((leaves + self.delay, Arrival { to, frame: frame.into() }));
    }

    /// When the next frame is to be delivered.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.under_way.front().map(|(due, _)| *due)
    }

    /// The next frame, if it is due by now.
    pub(crate) fn take(&mut self, now: Instant) -> Option<Arrival> {
        let (due, _) = self.under_way.front()?;
        if *due > now {
            return None;
        }
        let (_, arrival) = self.under_way.pop_front()?;
        self.bytes -= arrival.frame.len();
        Some(arrival)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn medium(link: &str, seed: u64) -> Medium {
        Medium::new(&link.parse().unwrap(), vec![0, 1, 2], seed, 2)
    }

    fn frame(to: u8, from: u8, length: usize) -> Vec<u8> {
        let mut frame = vec![9, 9, to, 0, 0, 0, 0, 0, from, 0, 0, 0, 0, 0, 8, 0];
        frame.resize(length + 2, 0);
        frame
    }

    fn targets(medium: &mut Medium, now: Instant) -> Vec<Vec<usize>> {
        std::iter::from_fn(|| medium.take(now)).map(|a| a.to).collect()
    }

    #[test]
    fn frames_arrive_late_by_the_delay_and_in_order() {
        let start = Instant::now();
        let mut medium = medium("switch:5ms", 1);
        medium.offer(start, 0, &frame(4, 2, 100));
        medium.offer(start + Duration::from_millis(1), 1, &frame(2, 4, 100));
        assert_eq!(medium.due(), Some(start + Duration::from_millis(5)));
        assert_eq!(medium.take(start + Duration::from_millis(4)), None);
        // Address 4 was unknown at first; 2 had been seen at port 0.
        assert_eq!(targets(&mut medium, start + Duration::from_millis(6)), [vec![1, 2], vec![0]]);
        assert_eq!((medium.due(), medium.bytes), (None, 0));
    }

    #[test]
    fn groups_are_flooded_and_hubs_never_learn() {
        let now = Instant::now();
        for link in ["switch:1us", "hub"] {
            let mut medium = medium(link, 1);
            medium.offer(now, 0, &frame(1, 2, 60));
            medium.offer(now, 1, &frame(2, 4, 60));
            let seen = targets(&mut medium, now + Duration::from_secs(1));
            assert_eq!(seen[0], [1, 2]);
            assert_eq!(seen[1].len(), if link == "hub" { 2 } else { 1 }, "{link}");
        }
    }

    #[test]
    fn a_hub_carries_one_frame_at_a_time() {
        let now = Instant::now();
        let mut medium = medium("hub:8mbit", 1);
        // 1000 bytes take 1 ms, from any sender.
        medium.offer(now, 0, &frame(1, 2, 1000));
        medium.offer(now, 1, &frame(1, 4, 1000));
        assert_eq!(targets(&mut medium, now + Duration::from_micros(1500)).len(), 1);
        assert_eq!(medium.due(), Some(now + Duration::from_millis(2)));
        for _ in 0..1000 {
            medium.offer(now, 0, &frame(1, 2, 1000));
        }
        // Frames that would wait longer than 50 ms are lost.
        assert!(medium.under_way.len() < 60, "{}", medium.under_way.len());
    }

    #[test]
    fn losses_follow_the_seed() {
        let now = Instant::now();
        let pattern = |seed| {
            let mut medium = medium("switch:,25%", seed);
            let lost = (0..4000).map(|_| {
                medium.offer(now, 0, &frame(1, 2, 60));
                medium.take(now).is_none()
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
        let mut medium = medium("switch:1ms", 1);
        for length in 0..16 {
            medium.offer(Instant::now(), 0, &vec![0; length]);
        }
        assert_eq!(medium.due(), None);
    }
}
