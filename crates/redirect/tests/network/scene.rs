//! Client, home and a guest's node on one Ethernet segment, each a network namespace without a name.
//! They end with the test's process, also when a test fails.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};
use tern_redirect::{
    Change, Ends, Injector, Namespace, NetworkInterface, NetworkNamespace, RouteLookup, Table, Way,
};

/// Until when a condition must hold. A loaded machine takes long.
const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) const CLIENT: [&str; 2] = ["10.9.0.1", "fd09::1"];
pub(crate) const HOME: [&str; 2] = ["10.9.0.2", "fd09::2"];
pub(crate) const NODE: [&str; 2] = ["10.9.0.3", "fd09::3"];
/// Name of each machine's interface, and of the table.
pub(crate) const PHYSICAL: &str = "eth0";
pub(crate) const TABLE: &str = "tern";
/// The outer end of home's namespace on the node.
pub(crate) const OUTER: &str = "tern-h1";

/// The three machines and the switch between them.
pub(crate) struct Scene {
    pub(crate) switch: NetworkNamespace,
    pub(crate) client: NetworkNamespace,
    pub(crate) home: NetworkNamespace,
    pub(crate) node: NetworkNamespace,
    /// 0 for IPv4, 1 for IPv6.
    pub(crate) version: usize,
}

impl Scene {
    pub(crate) fn new(version: usize) -> Self {
        let create = || NetworkNamespace::create().unwrap();
        let scene = Self { switch: create(), client: create(), home: create(), node: create(), version };
        ip(&scene.switch, "link add name br0 type bridge mcast_snooping 0");
        ip(&scene.switch, "link set br0 up");
        for (machine, addresses, number) in scene.machines() {
            scene.plug(machine, number);
            ip(machine, "link set lo up");
            // The kernel solicits a neighbour for a forwarded packet from its link-local address, once
            // duplicate detection is over.
            machine.run(|| std::fs::write("/proc/sys/net/ipv6/conf/eth0/accept_dad", "0")).unwrap().unwrap();
            ip(machine, "link set eth0 up");
            ip(machine, &format!("addr add {}/24 dev eth0", addresses[0]));
            ip(machine, &format!("addr add {}/64 dev eth0 nodad", addresses[1]));
        }
        scene.wait_for_links();
        scene
    }

    /// Returns when packets pass. Until then the kernel drops them, at an interface without a carrier and
    /// at a port of the switch that does not forward, and the client's first segment costs a timeout.
    fn wait_for_links(&self) {
        for (machine, _, number) in self.machines() {
            let port = format!("-d link show dev p{number}");
            wait_for("forwarding port", || Some(ip(&self.switch, &port).contains("state forwarding")));
            wait_for("carrier", || Some(ip(machine, "link show dev eth0").contains("state UP")));
        }
    }

    fn machines(&self) -> [(&NetworkNamespace, [&'static str; 2], u32); 3] {
        [(&self.client, CLIENT, 1), (&self.home, HOME, 2), (&self.node, NODE, 3)]
    }

    fn plug(&self, machine: &NetworkNamespace, number: u32) {
        use std::os::fd::{AsFd, AsRawFd};
        // The program `ip` inherits the descriptor under the same number.
        let fd = rustix::io::fcntl_dupfd_cloexec(machine.as_fd(), 100).unwrap();
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty()).unwrap();
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        ip(&self.switch, &format!("link add p{number} type veth peer name eth0 netns {path}"));
        ip(&self.switch, &format!("link set p{number} master br0 up"));
    }

    pub(crate) fn address(&self, machine: [&str; 2]) -> IpAddr {
        machine[self.version].parse().unwrap()
    }

    pub(crate) fn end(&self, machine: [&str; 2], port: u16) -> SocketAddr {
        SocketAddr::new(self.address(machine), port)
    }

    pub(crate) fn connection(&self, client_port: u16, home_port: u16) -> Ends {
        Ends::new(self.end(CLIENT, client_port), self.end(HOME, home_port)).unwrap()
    }

    /// The route from one machine to another.
    pub(crate) fn way(&self, from: &NetworkNamespace, to: [&str; 2]) -> Way {
        let to = self.address(to);
        match from.run(|| RouteLookup::to(to)).unwrap().unwrap() {
            RouteLookup::Through(way) => way,
            RouteLookup::Local => panic!("{to} is local"),
        }
    }

    /// Home's table, with the chain of its interface.
    pub(crate) fn home_table(&self) -> Table {
        self.home.run(table).unwrap()
    }

    pub(crate) fn injector(&self, table: &mut Table) -> Injector {
        self.home.run(|| Injector::create(table).unwrap()).unwrap()
    }

    /// The node's table, and home's namespace on the node.
    pub(crate) fn guest_node(&self) -> (Table, Namespace) {
        let addresses = HOME.map(|a| a.parse().unwrap());
        self.node
            .run(|| {
                let mut table = table();
                let mtu = NetworkInterface::find(PHYSICAL).unwrap().mtu;
                let namespace = Namespace::create(&mut table, OUTER, &addresses, mtu).unwrap();
                (table, namespace)
            })
            .unwrap()
    }

    /// The changes of the node's table by which a connection's packets reach the namespace and leave it.
    pub(crate) fn node_changes(&self, namespace: &Namespace, connection: Ends) -> [Change; 2] {
        let way_in = namespace.way_in(connection.home().ip());
        let way = self.way(&self.node, CLIENT);
        [
            Change::Forward(connection, way_in),
            Change::Answer { from: namespace.outer().index, connection, way },
        ]
    }
}

/// Connects from a known end, so that rules can exist before the first packet.
pub(crate) fn connect(namespace: &NetworkNamespace, connection: &Ends) -> TcpStream {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
    let family = if connection.client().is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    namespace
        .run(|| {
            let fd = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
            bind(&fd, &connection.client()).unwrap();
            connect(&fd, &connection.home()).unwrap();
            TcpStream::from(fd)
        })
        .unwrap()
}

fn table() -> Table {
    let mut table = Table::open(TABLE).unwrap();
    table.attach(PHYSICAL).unwrap();
    table
}

/// Runs `ip` with these words in a namespace.
pub(crate) fn ip(namespace: &NetworkNamespace, words: &str) -> String {
    let run = || Command::new("ip").args(words.split(' ')).output();
    let output = namespace.run(run).unwrap().expect("the tests need iproute2");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Reads a file as a thread of this namespace sees it, for example below /proc/thread-self/net.
pub(crate) fn read(namespace: &NetworkNamespace, path: &str) -> Option<String> {
    namespace.run(|| std::fs::read_to_string(path).ok()).unwrap()
}

/// The kernel's counters of a namespace, such as "TcpExt:TCPTimeouts" and "Ip6InReceives".
pub(crate) fn counters(namespace: &NetworkNamespace) -> BTreeMap<String, u64> {
    let mut counters = BTreeMap::new();
    for file in ["snmp", "netstat"] {
        let text = read(namespace, &format!("/proc/thread-self/net/{file}")).unwrap();
        let lines: Vec<_> = text.lines().collect();
        for [names, values] in lines.as_chunks::<2>().0 {
            let (mut names, values) = (names.split_whitespace(), values.split_whitespace().skip(1));
            let group = names.next().unwrap();
            counters.extend(
                names.zip(values).map(|(name, value)| (format!("{group}{name}"), value.parse().unwrap_or(0))),
            );
        }
    }
    for line in read(namespace, "/proc/thread-self/net/snmp6").unwrap_or_default().lines() {
        let (name, value) = line.split_once(char::is_whitespace).unwrap();
        counters.insert(name.to_owned(), value.trim().parse().unwrap());
    }
    counters
}

/// Number of IP packets that a namespace's IP stack received.
pub(crate) fn received(namespace: &NetworkNamespace, version: usize) -> u64 {
    counters(namespace)[["Ip:InReceives", "Ip6InReceives"][version]]
}

/// Number of segments that a namespace's TCP received.
pub(crate) fn tcp_segments(namespace: &NetworkNamespace) -> u64 {
    counters(namespace)["Tcp:InSegs"]
}

/// Waits until a condition holds.
pub(crate) fn wait_for(what: &str, mut holds: impl FnMut() -> Option<bool>) {
    let until = Instant::now() + DEADLINE;
    while holds() != Some(true) {
        assert!(Instant::now() < until, "no {what} after {DEADLINE:?}");
        std::thread::yield_now();
    }
}

/// Number of bytes that a machine's interface received.
pub(crate) fn received_bytes(namespace: &NetworkNamespace) -> u64 {
    let text = read(namespace, "/proc/thread-self/net/dev").unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
