//! Two servers with the same addresses, and one client. Packets of the client go to one of the
//! servers at a time, and can be held.

use crate::host::Host;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Number of the client; the servers are 0 and 1.
const CLIENT: usize = 2;

pub(crate) const RST: u8 = 4;

/// The header of a segment that a host has sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) from: usize,
    pub(crate) flags: u8,
}

#[derive(Default)]
struct Paths {
    server: usize,
    hold_to_server: bool,
    hold_to_client: bool,
    held: Vec<(usize, Vec<u8>)>,
    seen: Vec<Seen>,
}

pub(crate) struct Net {
    pub(crate) servers: [Host; 2],
    pub(crate) client: Host,
    paths: Arc<Mutex<Paths>>,
    devices: Arc<[File; 3]>,
    stop: OwnedFd,
}

impl Net {
    pub(crate) fn new() -> Self {
        let ((a, a_device), (b, b_device), (client, client_device)) =
            (Host::new(2), Host::new(2), Host::new(1));
        for host in [&a, &b, &client] {
            // Small buffers are filled sooner.
            host.set("tcp_wmem", "4096 16384 262144");
        }
        let devices = Arc::new([a_device, b_device, client_device]);
        let paths = Arc::new(Mutex::new(Paths::default()));
        let (stopped, stop) = rustix::pipe::pipe().unwrap();
        let (route_devices, route_paths) = (Arc::clone(&devices), Arc::clone(&paths));
        std::thread::spawn(move || route(&route_devices, &route_paths, &stopped));
        Self { servers: [a, b], client, paths, devices, stop }
    }

    /// A connection from the client to server 0. Returns both ends, that of the client first.
    pub(crate) fn connect(&self, listen: &str, to: &str) -> (TcpStream, OwnedFd) {
        let listener = self.servers[0].run(|| TcpListener::bind(listen).unwrap());
        let port = listener.local_addr().unwrap().port();
        let to = SocketAddr::new(to.parse().unwrap(), port);
        let client = self.client.run(|| TcpStream::connect(to).unwrap());
        let (server, _) = listener.accept().unwrap();
        (client, server.into())
    }

    /// Has no host send a segment again within 20 s, on connections of IPv4 that begin from now on.
    pub(crate) fn prevent_repetitions(&self) {
        for host in self.servers.iter().chain([&self.client]) {
            host.set("tcp_early_retrans", "0");
            let change = ["route", "change", "10.0.0.0/24", "dev", "t0", "rto_min", "20s"];
            assert!(host.run(|| Command::new("ip").args(change).status().unwrap().success()));
        }
    }

    /// A connection of IPv4.
    pub(crate) fn pair(&self) -> (TcpStream, OwnedFd) {
        self.connect("10.0.0.2:0", "10.0.0.2")
    }

    /// Holds what the client sends from now on.
    pub(crate) fn hold_to_server(&self) {
        self.paths.lock().unwrap().hold_to_server = true;
    }

    /// Holds what the servers send from now on.
    pub(crate) fn hold_to_client(&self) {
        self.paths.lock().unwrap().hold_to_client = true;
    }

    /// Sends what is held, and all that follows, to a server.
    pub(crate) fn release_to(&self, server: usize) {
        let mut paths = self.paths.lock().unwrap();
        for (from, packet) in std::mem::take(&mut paths.held) {
            let to = if from == CLIENT { server } else { CLIENT };
            deliver(&self.devices[to], &packet);
        }
        paths.server = server;
        (paths.hold_to_server, paths.hold_to_client) = (false, false);
    }

    /// Drops what is held, and sends all that follows to a server.
    pub(crate) fn drop_held(&self, server: usize) {
        self.paths.lock().unwrap().held.clear();
        self.release_to(server);
    }

    /// The segments that were sent until now.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.paths.lock().unwrap().seen.clone()
    }

    /// Fails if any host has sent a reset.
    pub(crate) fn assert_no_reset(&self) {
        let resets: Vec<_> = self.seen().into_iter().filter(|seen| seen.flags & RST != 0).collect();
        assert!(resets.is_empty(), "{resets:?}");
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &[0]);
        // A closed socket whose FIN is not acknowledged would keep its device for 100 s.
        for host in self.servers.iter().chain([&self.client]) {
            let _ = host.run(|| Command::new("ss").args(["-Kt", "state", "connected"]).output());
        }
    }
}

fn route(devices: &[File; 3], paths: &Mutex<Paths>, stopped: &OwnedFd) {
    let mut packet = vec![0; 1 << 16];
    loop {
        let fds = [devices[0].as_fd(), devices[1].as_fd(), devices[2].as_fd(), stopped.as_fd()];
        let mut events = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        poll(&mut events, None).unwrap();
        let ready = events.map(|event| !event.revents().is_empty());
        if ready[3] {
            return;
        }
        for from in (0..3).filter(|from| ready[*from]) {
            // The lock is held from before the read, so that nothing passes after a hold.
            let mut paths = paths.lock().unwrap();
            let length = (&devices[from]).read(&mut packet).unwrap();
            let packet = &packet[..length];
            let Some(seen) = parse(from, packet) else { continue };
            paths.seen.push(seen);
            let (hold, to) = match from {
                CLIENT => (paths.hold_to_server, paths.server),
                _ => (paths.hold_to_client, CLIENT),
            };
            if hold {
                paths.held.push((from, packet.to_vec()));
            } else {
                deliver(&devices[to], packet);
            }
        }
    }
}

fn deliver(mut device: &File, packet: &[u8]) {
    assert_eq!(device.write(packet).unwrap(), packet.len());
}

/// The header, if the packet is of TCP.
fn parse(from: usize, packet: &[u8]) -> Option<Seen> {
    let (protocol, start) = match packet.first()? >> 4 {
        4 => (packet[9], usize::from(packet[0] & 15) * 4),
        _ => (packet[6], 40),
    };
    let tcp = packet.get(start..).filter(|tcp| protocol == 6 && tcp.len() >= 20)?;
    Some(Seen { from, flags: tcp[13] })
}

/// Waits for a condition.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}
