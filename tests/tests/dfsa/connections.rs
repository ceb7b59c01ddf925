//! Connections that move with their process: a server that is away serves from where it runs.

use anyhow::{Context, Result, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{configure, kill_shims, wait_until};
use tern_tests::cluster::stalling_files;
use tern_tests::runs::running::{ANNOUNCE, Running};

pub(crate) const EVENT_TIMEOUT: Duration = Duration::from_secs(30);
pub(crate) const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// Serves one client after the other, until one sends nothing. With `timer`, signals interrupt it
/// all the time. With `shares`, it duplicates, changes and inherits each connection now and then.
const SERVER: &str = "
import os, signal, socket, sys
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(('', 7777))
listener.listen(8)
print('listens', flush=True)
signals = 0
def count(*_):
    global signals
    signals += 1
signal.signal(signal.SIGALRM, count)
if 'timer' in sys.argv:
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
total = 1
while total:
    client, _ = listener.accept()
    total = pieces = 0
    while data := client.recv(1 << 20):
        pieces += 1
        if 'shares' in sys.argv and pieces % 50 == 0:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, pieces // 50 % 4)
            other = client.dup()
            child = os.fork()
            if child == 0:
                other.sendall(data)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            other.close()
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == pieces // 50 % 4
        else:
            client.sendall(data)
        total += len(data)
    client.close()
    print('served', total, flush=True)
signal.setitimer(signal.ITIMER_REAL, 0)
print(signals > 0)
";

/// Sends a pattern in pieces of a size and checks what comes back, until /tmp/stop exists.
const CLIENT: &str = "
import os, socket, sys, threading
server = socket.create_connection((sys.argv[1], 7777))
size, at = int(sys.argv[2]), 0
pattern = bytes(i * 7 & 255 for i in range(256)) * (size // 256 + 2)
while not os.path.exists('/tmp/stop'):
    piece = pattern[at % 256:][:size]
    sender = threading.Thread(target=server.sendall, args=(piece,))
    sender.start()
    got = bytearray()
    while len(got) < size:
        more = server.recv(size - len(got))
        assert more, 'the server has closed the connection'
        got += more
    sender.join()
    assert got == piece, at
    at += size
    print('at', at, flush=True)
server.shutdown(socket.SHUT_WR)
assert server.recv(1) == b''
print('done', at, flush=True)
";

/// Sends to one client until SIGPIPE kills it. The call before that reports the reset.
const SENDER: &str = "
import signal, socket
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
listener = socket.socket()
listener.bind(('', 7777))
listener.listen(8)
print('listens', flush=True)
client, _ = listener.accept()
while True:
    try:
        client.sendall(b'x' * 1000)
    except ConnectionResetError:
        pass
";

/// Reads until /tmp/stop exists.
const READER: &str = "
import os, socket, sys
server = socket.create_connection((sys.argv[1], 7777))
while not os.path.exists('/tmp/stop'):
    assert server.recv(100000)
";

/// A server on node 1 of three nodes.
pub(crate) struct Scene {
    pub(crate) cluster: Cluster,
    pub(crate) server: Running,
    address: String,
}

impl Scene {
    fn new(name: &str, options: &[&str]) -> Result<Self> {
        Self::with_server(name, SERVER, options)
    }

    pub(crate) fn with_server(name: &str, server: &str, options: &[&str]) -> Result<Self> {
        Self::in_cluster(Cluster::with_nodes(name, 3)?, server, options)
    }

    fn in_cluster(cluster: Cluster, server: &str, options: &[&str]) -> Result<Self> {
        for node in 1..=3 {
            configure(&cluster, node, "connections = true")?;
            let is_up = || cluster.run(node, &["test", "-S", "/run/tern/net.sock"]).is_ok();
            wait_until("tern-net runs", EVENT_TIMEOUT, is_up).with_context(|| cluster.diagnostics(0))?;
        }
        let address = cluster.lab().node(1).address().to_string();
        let mut command = cluster.command(1, "sh");
        command.args(["-c", ANNOUNCE, "sh", "mosrun", "-L", "/usr/bin/python3", "-c", server]).args(options);
        let server = Running::start(&mut command, false)?;
        server.await_output("listens")?;
        Ok(Self { cluster, server, address })
    }

    /// A client on node 3 that sends pieces of this size.
    pub(crate) fn client(&self, size: u64) -> Result<Running> {
        self.run_client(CLIENT, &size.to_string())
    }

    pub(crate) fn run_client(&self, program: &str, argument: &str) -> Result<Running> {
        let mut command = self.cluster.command(3, "sh");
        command.args(["-c", ANNOUNCE, "sh", "/usr/bin/python3", "-c", program, &self.address, argument]);
        Running::start(&mut command, false)
    }

    /// Whether the guest on this node has a connection of its own.
    fn has_connection(&self, node: u16) -> bool {
        self.connections(node) > 0
    }

    /// The number of connections that the guest on this node has.
    pub(crate) fn connections(&self, node: u16) -> usize {
        // A guest has no other sockets.
        let line = "for p in $(pgrep ^tern:); do ls -l /proc/$p/fd; done 2> /dev/null | grep -c socket:";
        let found = self.cluster.run(node, &["sh", "-c", line]).unwrap_or_default();
        String::from_utf8_lossy(&found).trim().parse().unwrap_or(0)
    }

    /// The state of the cluster, for a failed test.
    pub(crate) fn diagnostics(&self) -> String {
        let log = |node| self.cluster.run(node, &["cat", "/run/tern/net.log"]).unwrap_or_default();
        let logs: String = (1..=3)
            .map(|node| format!("── tern-net of node {node}\n{}", String::from_utf8_lossy(&log(node))))
            .collect();
        self.cluster.diagnostics(self.server.pid) + &logs
    }

    pub(crate) fn migrate(&self, to: &str) -> Result<()> {
        self.cluster.migrate(self.server.pid, to).map_err(|refused| anyhow::anyhow!("{to}: {refused}"))?;
        Ok(())
    }
}

/// The number of bytes that the client has got back.
pub(crate) fn progress(client: &Running) -> u64 {
    let digits =
        |text: &str| text.find(|c: char| !c.is_ascii_digit()).and_then(|end| text[..end].parse().ok());
    client.output_so_far().rsplit("at ").find_map(digits).unwrap_or(0)
}

pub(crate) fn await_progress(scene: &Scene, client: &Running, bytes: u64) -> Result<()> {
    let from = progress(client);
    wait_until("the client gets more", EVENT_TIMEOUT, || progress(client) > from + bytes)
        .with_context(|| format!("{}\n{}", client.output_so_far(), scene.diagnostics()))?;
    Ok(())
}

/// The server moves while its client gets back all that it sends, in pieces of this size.
fn server_moves(name: &str, options: &[&str], size: u64) -> Result<()> {
    server_moves_in(Scene::new(name, options)?, options, size)
}

fn server_moves_in(mut scene: Scene, options: &[&str], size: u64) -> Result<()> {
    let mut client = scene.client(size)?;
    await_progress(&scene, &client, 50 * size)?;
    for to in ["2", "home", "2", "3", "2"] {
        scene.migrate(to)?;
        if to != "home" && !options.contains(&"shares") {
            let node = to.parse()?;
            wait_until("the connection is there", EVENT_TIMEOUT, || scene.has_connection(node))
                .with_context(|| scene.diagnostics())?;
        }
        await_progress(&scene, &client, 120 * size).context(to)?;
    }
    if options.is_empty() {
        lists_show_the_connection(&scene)?;
    }
    scene.cluster.run(3, &["touch", "/tmp/stop"])?;
    let outcome = client.finish(RUN_TIMEOUT)?;
    let text = String::from_utf8_lossy(&outcome.out).into_owned();
    let total = text.lines().find_map(|line| line.strip_prefix("done ")).context("the client has failed")?;
    scene.server.await_output(&format!("served {total}"))?;
    // A client that sends nothing ends the server.
    scene.client(size)?.finish(RUN_TIMEOUT)?;
    scene.server.await_output("served 0")?;
    scene.server.await_output(if options.contains(&"timer") { "True" } else { "False" })?;
    let outcome = scene.server.finish(RUN_TIMEOUT)?;
    ensure!(outcome.status == 0, "{outcome:?}");
    nothing_is_left(&scene)
}

/// The connection is on node 2, and the listening socket at home.
fn lists_show_the_connection(scene: &Scene) -> Result<()> {
    let row = |row: &serde_json::Value| {
        let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
        (row["where"].as_u64(), row["from"].as_u64(), text("reason"), text("peer").is_empty())
    };
    let list = |node| -> Result<Vec<_>> {
        let json = scene.cluster.run(node, &["mps", "-n", "--json"])?;
        Ok(serde_json::from_slice::<Vec<serde_json::Value>>(&json)?.iter().map(row).collect())
    };
    let home = [(Some(1), None, "listens".into(), true), (Some(2), None, String::new(), false)];
    ensure!(list(1)? == home, "{:?}", list(1)?);
    ensure!(list(2)? == [(None, Some(1), String::new(), false)], "{:?}", list(2)?);
    let as_another = ["setpriv", "--reuid=1234", "--clear-groups", "mps", "-n", "--json"];
    ensure!(scene.cluster.run(1, &as_another)?.trim_ascii() == b"[]", "another user's sockets are listed");
    Ok(())
}

pub(crate) fn nothing_is_left(scene: &Scene) -> Result<()> {
    let left = |node| scene.cluster.run(node, &["sh", "-c", "ls /sys/class/net | grep 'tern[0-9]'"]).is_ok();
    wait_until("no namespace is left", EVENT_TIMEOUT, || (1..=3).all(|node| !left(node)))
        .with_context(|| scene.diagnostics())?;
    Ok(())
}

#[test]
fn connection_is_served_where_its_server_runs() -> Result<()> {
    server_moves("served", &[], 1000)
}

#[test]
fn large_transfers_survive_moves_and_signals() -> Result<()> {
    server_moves("served-large", &["timer"], 300_000)
}

/// Node 2 reaches the client by another cable than home, so that all packets pass through home.
#[test]
fn connection_is_served_through_a_tunnel() -> Result<()> {
    for (options, size) in [(&[][..], 1000), (&["timer"], 300_000)] {
        let cluster = Cluster::with_link("served-tunnel", 3, "p2p")?;
        let scene = Scene::in_cluster(cluster, SERVER, options)?;
        server_moves_in(scene, options, size)?;
    }
    Ok(())
}

/// The paths that `tern doctor` finds out on node 2.
fn paths_are(scene: &Scene, expected: &str) -> Result<()> {
    // A finding that is missing makes it fail.
    let json = scene.cluster.run(2, &["sh", "-c", "tern doctor --json || true"])?;
    let findings: Vec<serde_json::Value> = serde_json::from_slice(&json)?;
    let paths = findings.iter().find(|finding| finding["name"] == "paths of moved connections");
    let found = paths.context("no finding")?["found"].as_str().unwrap_or_default();
    ensure!(found == expected, "{found}\n{}", scene.diagnostics());
    Ok(())
}

/// A cut between home and the guest's node only delays the bytes.
#[test]
fn tunnel_is_connected_again() -> Result<()> {
    let scene = Scene::in_cluster(Cluster::with_link("served-cut", 3, "p2p")?, SERVER, &[])?;
    let client = scene.client(1000)?;
    scene.migrate("2")?;
    wait_until("the connection is there", EVENT_TIMEOUT, || scene.has_connection(2))
        .with_context(|| scene.diagnostics())?;
    paths_are(&scene, "node 1: direct, but a tunnel for 1 of its connections, node 3: direct")?;
    for _ in 0..3 {
        await_progress(&scene, &client, 20_000)?;
        // All links of tern-net, and with them that of the tunnel.
        scene.cluster.run(1, &["ss", "-K", "state", "established", "( sport = :7101 )"])?;
    }
    await_progress(&scene, &client, 20_000)?;
    ensure!(scene.has_connection(2), "it is at home");
    let interrupted = ["grep", "-c", "a tunnel was interrupted", "/run/tern/net.log"];
    let times = scene.cluster.run(2, &interrupted).with_context(|| scene.diagnostics())?;
    let times: usize = String::from_utf8_lossy(&times).trim().parse()?;
    ensure!(times >= 3, "{}", scene.diagnostics());
    Ok(())
}

/// The queue of a connection is longer than one message between nodes.
#[test]
fn connection_with_long_queues_moves() -> Result<()> {
    const SIZE: u64 = 8_000_000;
    let scene = Scene::new("served-queues", &[])?;
    scene.migrate("2")?;
    let mut client = scene.client(SIZE)?;
    wait_until("the connection is there", EVENT_TIMEOUT, || scene.has_connection(2))
        .with_context(|| scene.diagnostics())?;
    await_progress(&scene, &client, 2 * SIZE)?;
    scene.migrate("home")?;
    await_progress(&scene, &client, 2 * SIZE)?;
    scene.cluster.run(3, &["touch", "/tmp/stop"])?;
    let outcome = client.finish(RUN_TIMEOUT)?;
    ensure!(outcome.status == 0, "{outcome:?}");
    Ok(())
}

/// A failure by which a connection stays at home for a while.
#[derive(Debug, Clone, Copy)]
enum Obstacle {
    /// Home cannot find out in time whether other processes have the socket open.
    ComparisonsWait,
    /// Home's tern-net cannot be reached.
    TernNetHangs,
    /// Home's tern-net gets a request when the guest's node has given it up.
    TernNetAnswersLate,
}

fn connection_moves_after(obstacle: Obstacle) -> Result<()> {
    let scene = Scene::new(&format!("served-{obstacle:?}").to_lowercase(), &[])?;
    let client = scene.client(1000)?;
    await_progress(&scene, &client, 20_000)?;
    if matches!(obstacle, Obstacle::TernNetAnswersLate) {
        // There is a link between the two tern-nets afterwards.
        scene.migrate("2")?;
        wait_until("the connection is there", EVENT_TIMEOUT, || scene.has_connection(2))
            .with_context(|| scene.diagnostics())?;
        scene.migrate("home")?;
        await_progress(&scene, &client, 20_000)?;
    }
    let signal = |signal: &str| scene.cluster.run(1, &["pkill", signal, "-x", "tern-net"]);
    let stalled = match obstacle {
        Obstacle::ComparisonsWait => Some(stalling_files::stall_an_execve(&scene.cluster)?),
        Obstacle::TernNetHangs | Obstacle::TernNetAnswersLate => signal("-STOP").map(|_| None)?,
    };
    scene.migrate("2")?;
    await_progress(&scene, &client, 500_000)?;
    ensure!(!scene.has_connection(2), "it has moved");
    match stalled {
        Some((files, mut stranger)) => {
            files.release(&scene.cluster)?;
            stranger.wait()?;
        }
        None => drop(signal("-CONT")?),
    }
    wait_until("the connection is there", EVENT_TIMEOUT, || scene.has_connection(2))
        .with_context(|| scene.diagnostics())?;
    await_progress(&scene, &client, 100_000)
}

#[test]
fn connection_moves_after_comparisons_have_waited() -> Result<()> {
    connection_moves_after(Obstacle::ComparisonsWait)
}

#[test]
fn connection_moves_after_tern_net_has_hung() -> Result<()> {
    connection_moves_after(Obstacle::TernNetHangs)
}

#[test]
fn connection_moves_after_tern_net_has_answered_late() -> Result<()> {
    connection_moves_after(Obstacle::TernNetAnswersLate)
}

#[test]
fn shared_connections_survive_moves() -> Result<()> {
    server_moves("served-shared", &["shares"], 1000)
}

/// The client of a server that is killed sees its connection end, and the port is free again.
#[test]
fn connection_of_a_killed_server_ends() -> Result<()> {
    for guest_shim in [false, true] {
        let mut scene = Scene::new("served-killed", &[])?;
        let mut client = scene.client(1000)?;
        scene.migrate("2")?;
        wait_until("the connection is there", EVENT_TIMEOUT, || scene.has_connection(2))?;
        await_progress(&scene, &client, 100_000)?;
        if guest_shim {
            kill_shims(&scene.cluster, 2)?;
        } else {
            scene.cluster.run(1, &["kill", "-KILL", &scene.server.pid.to_string()])?;
        }
        let outcome = client.finish(RUN_TIMEOUT).with_context(|| scene.diagnostics())?;
        ensure!(outcome.status != 0, "{outcome:?}");
        scene.server.finish(RUN_TIMEOUT)?;
        let again = "import socket; s = socket.socket(); s.setsockopt(1, 2, 1); s.bind(('', 7777))";
        let binds = || scene.cluster.run(1, &["/usr/bin/python3", "-c", again]).is_ok();
        wait_until("the port is free", EVENT_TIMEOUT, binds).with_context(|| scene.diagnostics())?;
    }
    Ok(())
}

/// If the program that moves connections ends, on either side, the server and its client see a reset.
#[test]
fn connection_is_reset_when_tern_net_ends() -> Result<()> {
    for node in [1, 2] {
        let mut scene = Scene::new("served-reset", &[])?;
        let mut client = scene.client(1000)?;
        scene.migrate("2")?;
        wait_until("the connection is there", EVENT_TIMEOUT, || scene.has_connection(2))
            .with_context(|| scene.diagnostics())?;
        scene.cluster.run(node, &["pkill", "-KILL", "tern-net"])?;
        let outcome = scene.server.finish(RUN_TIMEOUT).with_context(|| scene.diagnostics())?;
        let said = String::from_utf8_lossy(&outcome.err).into_owned();
        // The second is what the kernel gives to a thread that waits in recv.
        let is_reset = said.contains("ConnectionResetError") || said.contains("BrokenPipeError");
        ensure!(is_reset, "node {node}: {said}\n{}", scene.diagnostics());
        let outcome = client.finish(RUN_TIMEOUT).with_context(|| scene.diagnostics())?;
        ensure!(outcome.status != 0, "{outcome:?}");
    }
    Ok(())
}

/// A program that sends to a connection which its client has reset gets SIGPIPE.
#[test]
fn sender_without_a_client_is_killed_by_sigpipe() -> Result<()> {
    let mut scene = Scene::with_server("served-pipe", SENDER, &[])?;
    let mut client = scene.run_client(READER, "")?;
    scene.migrate("2")?;
    wait_until("the connection is there", EVENT_TIMEOUT, || scene.has_connection(2))
        .with_context(|| scene.diagnostics())?;
    scene.cluster.run(3, &["touch", "/tmp/stop"])?;
    client.finish(RUN_TIMEOUT)?;
    let outcome = scene.server.finish(RUN_TIMEOUT).with_context(|| scene.diagnostics())?;
    ensure!(outcome.status == 128 + 13, "{outcome:?}");
    nothing_is_left(&scene)
}
