//! The wire: a process in the switch's network namespace that carries each frame from port to port, late,
//! or not at all. It stands in for netem, and is the hub.

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

/// The longest frame with its header: 64 KiB of segments that the receiver's kernel cuts up, and all headers.
const LONGEST: usize = packet::HEADER + 65_536 + 256;
/// Frames taken from one port before the others have their turn.
const TURN: usize = 64;
/// How often to look for a port that is not there, as that of a node that is down.
const LOOK: Duration = Duration::from_millis(10);

struct Port {
    name: String,
    medium: usize,
    /// The interface's number and the socket on it; a node that comes back has a new one.
    socket: Option<(i32, OwnedFd)>,
    /// It was down when it was last heard of: cut, or gone. The socket revives with its interface, but is
    /// told nothing when that goes away for good.
    doubtful: bool,
}

/// Carries frames until killed. The caller has put this process into the switch's network namespace.
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
    // The kernel would otherwise wake us up to 50 µs late to save power.
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
                    // What does not go out now is lost, as on any wire.
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

/// Waits until a frame comes in or is due, or it is time to look for missing ports.
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

/// Waits until the wire listens on these ports of the switch; false if it does not within `patience`.
pub(crate) fn wait_for_ports(
    switch: Process,
    wire: Process,
    ports: &[&str],
    patience: Duration,
) -> Result<bool> {
    let end = Instant::now() + patience;
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

/// The wire shall be started in the network namespace of the switch.
pub(crate) fn place(command: &mut std::process::Command, switch: Process) -> Result<()> {
    spaces::in_network(command, netns::of(switch)?);
    Ok(())
}
