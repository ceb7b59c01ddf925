//! The link emulator: a process in the switch's network namespace that forwards each frame from
//! port to port, with the configured delay and loss. It replaces netem where the kernel lacks it,
//! and implements hubs and losses that follow a seed.

use crate::error::{Result, WithContext};
use crate::lab::options::LabName;
use crate::lab::state::LabState;
use crate::network::iproute2;
use crate::network::packet_socket;
use crate::network::segment::Segment;
use crate::process::Process;
use crate::process::cgroup::Hierarchies;
use crate::roles::report_ready;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

/// The longest frame with its header: 64 KiB of segments that the receiver's kernel splits, plus
/// all headers.
const MAX_FRAME_SIZE: usize = packet_socket::VNET_HEADER_LEN + 65_536 + 256;
/// Maximum number of frames read from one port before the other ports are served.
const MAX_READS_PER_PORT: usize = 64;
/// Interval at which missing ports, such as those of a node that is down, are looked up again.
const PORT_LOOKUP_INTERVAL: Duration = Duration::from_millis(10);

struct Port {
    name: String,
    segment: usize,
    /// The interface's index and the socket on it. A restarted node has a new interface.
    socket: Option<(i32, OwnedFd)>,
    /// The last read failed: the interface is down or removed, and the kernel does not report
    /// which. If it is only down, the socket works again later; if it was removed, `update_socket`
    /// finds another index and opens a new socket.
    read_failed: bool,
}

/// Forwards frames until killed. The caller has put this process into the switch's network
/// namespace.
pub(crate) fn main(lab: &LabName) -> Result<u8> {
    Hierarchies::find()?.switch_group(lab).join()?;
    report_ready()?;
    let state = LabState::load(lab)?;
    let layout = state.layout();
    let seed = state.seed.unwrap_or_else(rand::random);
    let mut ports: Vec<_> = layout
        .ports
        .iter()
        .map(|p| Port { name: p.port.clone(), segment: p.segment, socket: None, read_failed: false })
        .collect();
    let mut segments: Vec<_> = (0..layout.segments())
        .map(|segment| {
            let members = (0..ports.len()).filter(|&p| ports[p].segment == segment).collect();
            Segment::new(&layout.link, members, seed, packet_socket::VNET_HEADER_LEN)
        })
        .collect();
    // With the default timer slack, the kernel may wake this thread up to 50 µs late to save power.
    rustix::thread::set_current_timer_slack(NonZeroU64::new(1))
        .with_context(|| "set the timer slack".to_owned())?;
    let mut buffer = vec![0; MAX_FRAME_SIZE];
    let mut next_lookup = Instant::now();
    loop {
        let now = Instant::now();
        if now >= next_lookup {
            ports.iter_mut().for_each(update_socket);
            next_lookup = now + PORT_LOOKUP_INTERVAL;
        }
        wait_for_frames(&ports, &segments)?;
        for (at, port) in ports.iter_mut().enumerate() {
            for _ in 0..MAX_READS_PER_PORT {
                let Some((_, socket)) = &port.socket else { break };
                match rustix::io::read(socket, &mut buffer[..]) {
                    Ok(length) => {
                        port.read_failed = false;
                        segments[port.segment].receive(Instant::now(), at, &buffer[..length]);
                    }
                    Err(Errno::AGAIN) => break,
                    Err(_) => port.read_failed = true,
                }
            }
        }
        for segment in &mut segments {
            while let Some(delivery) = segment.take_due(Instant::now()) {
                for (_, socket) in delivery.to.iter().filter_map(|&to| ports[to].socket.as_ref()) {
                    // A frame that cannot be sent now is lost, as on any link.
                    let _ = rustix::io::write(socket, &delivery.frame);
                }
            }
        }
    }
}

/// Opens a socket on the port's interface, if it has none or the interface has changed.
fn update_socket(port: &mut Port) {
    if port.socket.is_some() && !port.read_failed {
        return;
    }
    let index = packet_socket::interface_index(&port.name);
    if port.socket.as_ref().map(|(index, _)| *index) != index {
        port.socket = index.and_then(|index| Some((index, packet_socket::open(index).ok()?)));
        port.read_failed = false;
    }
}

/// Waits until a frame arrives or is due for delivery, or until missing ports must be looked up
/// again.
fn wait_for_frames(ports: &[Port], segments: &[Segment]) -> Result<()> {
    let now = Instant::now();
    let mut until = segments.iter().filter_map(Segment::next_due).min();
    if ports.iter().any(|p| p.socket.is_none() || p.read_failed) {
        until = Some(until.map_or(now + PORT_LOOKUP_INTERVAL, |u| u.min(now + PORT_LOOKUP_INTERVAL)));
    }
    let timeout = until.map(|u| {
        let left = u.saturating_duration_since(now);
        Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
    });
    let sockets = ports.iter().filter_map(|p| p.socket.as_ref());
    let mut fds: Vec<_> = sockets.map(|(_, s)| PollFd::new(s, PollFlags::IN)).collect();
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e).with_context(|| "wait for frames".to_owned()),
    }
}

/// Waits until the link emulator listens on these ports of the switch; returns false after
/// `timeout`, or if the emulator has ended.
pub(crate) fn wait_for_ports(
    switch: Process,
    emulator: Process,
    ports: &[&str],
    timeout: Duration,
) -> Result<bool> {
    let end = Instant::now() + timeout;
    let listing = iproute2::output(switch, iproute2::Program::Ip, &["-o", "link", "show"])?;
    // "7: p1@if2: <BROADCAST…"
    let index = |port: &str| {
        listing.lines().find_map(|line| {
            let (index, rest) = line.split_once(": ")?;
            let name = rest.split(['@', ':']).next()?;
            (name == port).then(|| index.to_owned())
        })
    };
    let expected: Vec<_> = ports.iter().filter_map(|p| index(p)).collect();
    loop {
        // The fifth column is the interface.
        let table = std::fs::read_to_string(format!("/proc/{}/net/packet", emulator.pid)).unwrap_or_default();
        let bound: Vec<_> = table.lines().filter_map(|l| l.split_whitespace().nth(4)).collect();
        if expected.iter().all(|index| bound.contains(&index.as_str())) {
            return Ok(true);
        }
        if !emulator.is_alive() || Instant::now() > end {
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(2));
    }
}
