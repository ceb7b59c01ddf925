//! The wire: a process in the switch's network namespace that forwards each frame from port to
//! port, with the configured delay and loss. It replaces netem where that is missing, and
//! implements hubs.

use crate::error::{Result, Tried};
use crate::medium::Medium;
use crate::options::Name;
use crate::packet;
use crate::process::Process;
use crate::state::State;
use crate::{netns, spaces};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

/// The longest frame with its header: 64 KiB of segments that the receiver's kernel splits, plus
/// all headers.
const LONGEST: usize = packet::HEADER + 65_536 + 256;
/// Maximum number of frames read from one port before the other ports are served.
const TURN: usize = 64;
/// Interval at which missing ports, such as those of a node that is down, are looked up again.
const LOOK: Duration = Duration::from_millis(10);

struct Port {
    name: String,
    medium: usize,
    /// The interface's index and the socket on it. A restarted node has a new interface.
    socket: Option<(i32, OwnedFd)>,
    /// The last read failed: the interface is down or removed, and the kernel does not report
    /// which. If it is only down, the socket works again later; if it was removed, `find` finds
    /// another index and opens a new socket.
    doubtful: bool,
}

/// Forwards frames until killed. The caller has put this process into the switch's network
/// namespace.
pub(crate) fn main(lab: &Name) -> Result<()> {
    let state = State::load(lab)?;
    let plan = state.plan();
    let seed = state.seed.unwrap_or_else(rand::random);
    let mut ports: Vec<_> = plan
        .ports
        .iter()
        .map(|p| Port { name: p.port.clone(), medium: p.segment, socket: None, doubtful: false })
        .collect();
    let mut media: Vec<_> = (0..plan.segments())
        .map(|segment| {
            let members = (0..ports.len()).filter(|&p| ports[p].medium == segment).collect();
            Medium::new(&plan.link, members, seed, packet::HEADER)
        })
        .collect();
    // With the default timer slack, the kernel may wake this thread up to 50 µs late to save power.
    rustix::thread::set_current_timer_slack(NonZeroU64::new(1)).tried(|| "set the timer slack".to_owned())?;
    let mut buffer = vec![0; LONGEST];
    let mut look = Instant::now();
    loop {
        let now = Instant::now();
        if now >= look {
            ports.iter_mut().for_each(find);
            look = now + LOOK;
        }
        wait(&ports, &media)?;
        for (at, port) in ports.iter_mut().enumerate() {
            for _ in 0..TURN {
                let Some((_, socket)) = &port.socket else { break };
                match rustix::io::read(socket, &mut buffer[..]) {
                    Ok(length) => {
                        port.doubtful = false;
                        media[port.medium].offer(Instant::now(), at, &buffer[..length]);
                    }
                    Err(Errno::AGAIN) => break,
                    Err(_) => port.doubtful = true,
                }
            }
        }
        for medium in &mut media {
            while let Some(arrival) = medium.take(Instant::now()) {
                for (_, socket) in arrival.to.iter().filter_map(|&to| ports[to].socket.as_ref()) {
                    // A frame that cannot be sent now is lost, as on any wire.
                    let _ = rustix::io::write(socket, &arrival.frame);
                }
            }
        }
    }
}

fn find(port: &mut Port) {
    if port.socket.is_some() && !port.doubtful {
        return;
    }
    let index = packet::index_of(&port.name);
    if port.socket.as_ref().map(|(index, _)| *index) != index {
        port.socket = index.and_then(|index| Some((index, packet::open(index).ok()?)));
        port.doubtful = false;
    }
}

/// Waits until a frame arrives or is due for delivery, or until missing ports must be looked up
/// again.
fn wait(ports: &[Port], media: &[Medium]) -> Result<()> {
    let now = Instant::now();
    let mut until = media.iter().filter_map(Medium::due).min();
    if ports.iter().any(|p| p.socket.is_none() || p.doubtful) {
        until = Some(until.map_or(now + LOOK, |u| u.min(now + LOOK)));
    }
    let timeout = until.map(|u| {
        let left = u.saturating_duration_since(now);
        Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
    });
    let sockets = ports.iter().filter_map(|p| p.socket.as_ref());
    let mut fds: Vec<_> = sockets.map(|(_, s)| PollFd::new(s, PollFlags::IN)).collect();
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e).tried(|| "wait for frames".to_owned()),
    }
}

/// Waits until the wire listens on these ports of the switch; returns false after `timeout`.
pub(crate) fn wait_for_ports(
    switch: Process,
    wire: Process,
    ports: &[&str],
    timeout: Duration,
) -> Result<bool> {
    let end = Instant::now() + timeout;
    let listing = netns::ask(switch, netns::Program::Ip, &["-o", "link", "show"])?;
    // "7: p1@if2: <BROADCAST…"
    let index = |port: &str| {
        listing.lines().find_map(|line| {
            let (index, rest) = line.split_once(": ")?;
            let name = rest.split(['@', ':']).next()?;
            (name == port).then(|| index.to_owned())
        })
    };
    let wanted: Vec<_> = ports.iter().filter_map(|p| index(p)).collect();
    loop {
        // The fifth column is the interface.
        let table = std::fs::read_to_string(format!("/proc/{}/net/packet", wire.pid)).unwrap_or_default();
        let bound: Vec<_> = table.lines().filter_map(|l| l.split_whitespace().nth(4)).collect();
        if wanted.iter().all(|w| bound.contains(&w.as_str())) {
            return Ok(true);
        }
        if !wire.alive() || Instant::now() > end {
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Makes the wire start in the network namespace of the switch.
pub(crate) fn place(command: &mut std::process::Command, switch: Process) -> Result<()> {
    spaces::in_network(command, netns::of(switch)?);
    Ok(())
}
