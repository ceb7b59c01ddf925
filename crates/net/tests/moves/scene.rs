//! Client, home and a guest's node, each a network namespace without a name. They end with the test's
//! process, also when a test fails.

use anyhow::Result;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tern_ids::{ConnectionToken, NodeId};
use tern_net::guest::Guests;
use tern_net::home::Home;
use tern_net::link::Homes;
use tern_net::message::{NetReply, NetRequest};
use tern_net::packets::Packets;
use tern_redirect::NetworkNamespace;
use tern_wire::{Authority, Identity, Link, Preamble};

pub(crate) const HOME: NodeId = NodeId(1);
pub(crate) const NODE: NodeId = NodeId(2);
pub(crate) const TOKEN: ConnectionToken = ConnectionToken([7; 16]);
const CLIENT_IP: [u8; 4] = [10, 9, 0, 3];
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Three machines on a bridge: a client, the home, and the guest's node.
pub(crate) struct Scene {
    pub(crate) client: NetworkNamespace,
    pub(crate) home: Arc<NetworkNamespace>,
    pub(crate) node: NetworkNamespace,
    node_address: IpAddr,
    _others: Vec<NetworkNamespace>,
}

pub(crate) fn address(machine: u8) -> IpAddr {
    [10, 9, 0, machine].into()
}

pub(crate) fn ip(place: &NetworkNamespace, arguments: &str) -> String {
    let done = place.run(|| Command::new("ip").args(arguments.split(' ')).output().unwrap()).unwrap();
    assert!(done.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// The network between the guest's node and the two others.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Network {
    /// One Ethernet segment.
    Segment,
    /// A router, with another network behind it.
    Routed,
    /// It looks like one segment, since a router answers ARP for both sides. Most clouds are so.
    ProxyArp,
}

impl Scene {
    pub(crate) fn new(network: Network) -> Self {
        let segment = NetworkNamespace::create().unwrap();
        ip(&segment, "link add bridge type bridge");
        ip(&segment, "link set bridge up");
        let plug = |place: &NetworkNamespace, number: u8, name: &str| {
            ip(&segment, &format!("link add port{number} type veth peer name {name} netns {}", path(place)));
            ip(&segment, &format!("link set port{number} master bridge up"));
            ip(place, "link set lo up");
            ip(place, &format!("link set {name} up"));
        };
        let [home, node, client, router] = [(); 4].map(|()| NetworkNamespace::create().unwrap());
        for (place, number) in [(&home, 1), (&client, 3)] {
            plug(place, number, "eth0");
            ip(place, &format!("addr add 10.9.0.{number}/24 dev eth0"));
        }
        let node_address = match network {
            Network::Segment => {
                plug(&node, 2, "eth0");
                ip(&node, "addr add 10.9.0.2/24 dev eth0");
                address(2)
            }
            Network::Routed | Network::ProxyArp => {
                plug(&router, 4, "near");
                ip(&router, &format!("link add far type veth peer name eth0 netns {}", path(&node)));
                ip(&node, "link set lo up");
                for (place, name) in [(&node, "eth0"), (&router, "far")] {
                    ip(place, &format!("link set {name} up"));
                }
                set(&router, "ip_forward");
                ip(&router, "addr add 10.9.0.254/24 dev near");
                if network == Network::ProxyArp {
                    ip(&router, "route add 10.9.0.2 dev far");
                    for name in ["near", "far"] {
                        set(&router, &format!("conf/{name}/proxy_arp"));
                    }
                    ip(&node, "addr add 10.9.0.2/24 dev eth0");
                    address(2)
                } else {
                    ip(&router, "addr add 10.9.1.254/24 dev far");
                    ip(&node, "addr add 10.9.1.2/24 dev eth0");
                    ip(&node, "route add default via 10.9.1.254");
                    for place in [&home, &client] {
                        ip(place, "route add default via 10.9.0.254");
                    }
                    [10, 9, 1, 2].into()
                }
            }
        };
        wait_for_links(&segment, "bridge_slave", "state forwarding");
        for place in [&home, &node, &client, &router] {
            wait_for_links(place, "veth", "state UP");
        }
        // However slow this machine is, only a lost packet causes a timeout.
        ip(&client, "route change 10.9.0.0/24 dev eth0 rto_min 20s");
        let no_probes = || std::fs::write("/proc/sys/net/ipv4/tcp_early_retrans", "0").unwrap();
        client.run(no_probes).unwrap();
        Self { client, home: Arc::new(home), node, node_address, _others: vec![segment, router] }
    }
}

/// Returns when all links of this kind pass packets. Until then the kernel drops them, at an interface
/// without a carrier and at a port of the bridge that does not forward.
fn wait_for_links(place: &NetworkNamespace, kind: &str, ready: &str) {
    let until = Instant::now() + LIMIT;
    while !ip(place, &format!("-d -o link show type {kind}")).lines().all(|link| link.contains(ready)) {
        assert!(Instant::now() < until, "no link with {ready:?} after {LIMIT:?}");
        thread::yield_now();
    }
}

/// A path by which the program `ip` finds a namespace.
fn path(place: &NetworkNamespace) -> String {
    use std::os::fd::{AsFd, AsRawFd};
    format!("/proc/{}/fd/{}", std::process::id(), place.as_fd().as_raw_fd())
}

fn set(place: &NetworkNamespace, setting: &str) {
    let path = format!("/proc/sys/net/ipv4/{setting}");
    place.run(|| std::fs::write(path, "1").unwrap()).unwrap();
}

/// Requests reach home without a link. Those of the kinds in `lost` are performed, and their reply is
/// lost, once for each.
pub(crate) struct Direct {
    place: Arc<NetworkNamespace>,
    node_address: IpAddr,
    home: Arc<Home>,
    lost: Arc<Mutex<Vec<&'static str>>>,
    authority: Authority,
    /// Number of links of tunnels so far.
    tunnels: Arc<AtomicU64>,
}

impl Homes for Direct {
    fn call(&self, home: NodeId, request: &NetRequest) -> Result<NetReply> {
        assert_eq!(home, HOME);
        let reply = self.place.run(|| self.home.handle(NODE, self.node_address, request.clone()))?;
        let mut lost = self.lost.lock().unwrap();
        let at = lost.iter().position(|kind| format!("{request:?}").contains(kind));
        anyhow::ensure!(at.map(|at| lost.remove(at)).is_none(), "the link broke");
        Ok(reply)
    }

    fn tunnel(&self, home: NodeId) -> Result<Link> {
        assert_eq!(home, HOME);
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let to = listener.local_addr()?.to_string();
        let [client, server] = [NODE, HOME].map(|node| Identity::issued_by_authority(&self.authority, node));
        let (client, server) = (client?, server?);
        for end in [&client, &server] {
            end.members().set([client.member(), server.member()]);
        }
        let (place, home, server) = (self.place.clone(), self.home.clone(), server.cluster_server()?);
        let deadline = Instant::now() + LIMIT;
        thread::spawn(move || -> Result<()> {
            let (mut socket, _) = listener.accept()?;
            socket.read_exact(&mut vec![0; Preamble::Net.to_bytes().len()])?;
            let mut link = Link::accept(socket, &server, deadline)?;
            place.run(|| home.serve_tunnel(NODE, &mut link))?
        });
        let mut link = Link::connect(&to, Preamble::Net, &client.cluster_client(HOME)?, deadline)?;
        // The reply that the link is a tunnel.
        let reply = link.recv(deadline)?;
        assert_eq!(tern_wire::decode::<NetReply>(&reply.payload)?, NetReply::Done);
        self.tunnels.fetch_add(1, Ordering::Relaxed);
        Ok(link)
    }
}

pub(crate) struct Nodes {
    pub(crate) home: Arc<Home>,
    pub(crate) guests: Guests<Direct>,
    pub(crate) lost: Arc<Mutex<Vec<&'static str>>>,
    pub(crate) tunnels: Arc<AtomicU64>,
}

impl Nodes {
    pub(crate) fn new(scene: &Scene) -> Self {
        let packets =
            |place: &NetworkNamespace| place.run(|| Arc::new(Packets::open("tern").unwrap())).unwrap();
        let home = Arc::new(Home::new(packets(&scene.home)));
        let lost = Arc::new(Mutex::default());
        let tunnels = Arc::<AtomicU64>::default();
        let direct = Direct {
            place: scene.home.clone(),
            node_address: scene.node_address,
            home: home.clone(),
            lost: lost.clone(),
            authority: Authority::create("test").unwrap(),
            tunnels: tunnels.clone(),
        };
        Self { home, guests: Guests::new(direct, packets(&scene.node)), lost, tunnels }
    }

    /// Takes the connection. The path may have to be examined first, or the tunnel to be connected.
    pub(crate) fn take(&self, scene: &Scene) -> Result<TcpStream> {
        let until = Instant::now() + LIMIT;
        loop {
            match scene.node.run(|| self.guests.take(HOME, address(1), TOKEN))? {
                Ok((socket, _)) => return Ok(socket.into()),
                Err(error) if is_temporary(&error) && Instant::now() < until => {}
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) fn give_back(&self, scene: &Scene, socket: TcpStream) -> Result<()> {
        let socket = OwnedFd::from(socket);
        scene.node.run(|| self.guests.give_back(HOME, TOKEN, &socket))?
    }
}

fn is_temporary(error: &anyhow::Error) -> bool {
    let error = format!("{error:#}");
    ["is being examined", "is interrupted"].iter().any(|text| error.contains(text))
}

/// A connection from the client to home.
pub(crate) fn connect(scene: &Scene) -> (TcpStream, TcpStream) {
    let listener = scene.home.run(|| TcpListener::bind((address(1), 0)).unwrap()).unwrap();
    let to = listener.local_addr().unwrap();
    let client = scene.client.run(|| TcpStream::connect(to).unwrap()).unwrap();
    let (server, from) = listener.accept().unwrap();
    assert_eq!(from.ip(), IpAddr::from(CLIENT_IP));
    for socket in [&client, &server] {
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.set_write_timeout(Some(LIMIT)).unwrap();
    }
    (client, server)
}

/// The byte at a place of the stream.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Sends and receives the pattern until told to stop. Returns how much was received.
pub(crate) fn talk(mut socket: TcpStream, stop: &AtomicBool) -> u64 {
    let mut writer = socket.try_clone().unwrap();
    let sent = AtomicU64::new(0);
    let mut received = 0;
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut at = 0u64;
            while !stop.load(Ordering::Acquire) {
                let piece: Vec<u8> = (at..at + 4000).map(byte).collect();
                writer.write_all(&piece).unwrap();
                at += 4000;
                sent.store(at, Ordering::Release);
            }
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut piece = [0; 16384];
        loop {
            let count = socket.read(&mut piece).unwrap();
            if count == 0 {
                break;
            }
            for (at, found) in (received..).zip(&piece[..count]) {
                assert_eq!(*found, byte(at), "byte {at}");
            }
            received += count as u64;
        }
        sender.join().unwrap();
    });
    assert_eq!(received, sent.into_inner(), "all that was sent came back");
    received
}

/// Sends back what arrives, `count` times or until the end. Returns whether there is more.
pub(crate) fn echo(socket: &mut TcpStream, count: usize) -> bool {
    let mut piece = [0; 8192];
    for _ in 0..count {
        let count = socket.read(&mut piece).unwrap();
        if count == 0 {
            return false;
        }
        socket.write_all(&piece[..count]).unwrap();
    }
    true
}

/// A counter of a namespace's TCP (proc_net_netstat, or proc_net_snmp).
pub(crate) fn counter(place: &NetworkNamespace, name: &str) -> u64 {
    let read = || {
        ["/proc/thread-self/net/netstat", "/proc/thread-self/net/snmp"]
            .map(|table| std::fs::read_to_string(table).unwrap())
            .concat()
    };
    let text = place.run(read).unwrap();
    let lines: Vec<_> = text.lines().collect();
    let value = lines.chunks(2).find_map(|pair| {
        let at = pair[0].split(' ').position(|column| column == name)?;
        pair[1].split(' ').nth(at)?.parse().ok()
    });
    value.unwrap()
}
