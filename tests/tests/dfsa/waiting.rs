//! Servers that wait for connections of their node and for descriptors at home in one call.

use crate::connections::{EVENT_TIMEOUT, RUN_TIMEOUT, Scene, await_progress, nothing_is_left, progress};
use anyhow::{Context, Result, ensure};
use tern_tests::cluster::fault_injection::wait_until;
use tern_tests::cluster::limits::shims;
use tern_tests::runs::running::Running;

/// Serves all clients at a time, until it reads `end` from a pipe at home. Each other line in this
/// pipe is printed.
pub(crate) const SERVER: &str = "
import os, select, selectors, signal, socket, sys

class Edges:
    def __init__(self):
        self.set = select.epoll()
    def register(self, fd, events):
        self.set.register(fd, events | select.EPOLLET)
    def modify(self, fd, events):
        self.set.modify(fd, events | select.EPOLLET)
    def __getattr__(self, name):
        return getattr(self.set, name)

mode = sys.argv[1]
if mode == 'select':
    waiter = selectors.SelectSelector()
elif mode == 'poll':
    waiter = selectors.PollSelector()
else:
    waiter = selectors.EpollSelector()
    if mode == 'edges':
        waiter._selector = Edges()
if 'timer' in sys.argv:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)

def accept():
    while True:
        try:
            client = listener.accept()[0]
        except BlockingIOError:
            return
        client.setblocking(False)
        waiter.register(client, selectors.EVENT_READ, [bytearray(), 0])

def serve(client, state):
    unsent = state[0]
    try:
        while data := client.recv(1 << 16):
            unsent += data
            state[1] += len(data)
        waiter.unregister(client)
        client.close()
        print('served', state[1], flush=True)
        return
    except BlockingIOError:
        pass
    try:
        while unsent:
            del unsent[:client.send(unsent)]
    except BlockingIOError:
        pass
    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
    if wanted != waiter.get_key(client).events:
        waiter.modify(client, wanted, state)

os.mkfifo('/tmp/lines')
lines = os.open('/tmp/lines', os.O_RDWR | os.O_NONBLOCK)
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(('', 7777))
listener.listen(8)
listener.setblocking(False)
waiter.register(listener, selectors.EVENT_READ, None)
waiter.register(lines, selectors.EVENT_READ, None)
print('listens', flush=True)
ended = False
while not ended:
    for key, _ in waiter.select(60):
        if key.fileobj is listener:
            accept()
        elif key.fileobj == lines:
            try:
                while True:
                    line = os.read(lines, 100).decode()
                    ended |= line == 'end\\n'
                    print(line, flush=True)
            except BlockingIOError:
                pass
        else:
            serve(key.fileobj, key.data)
signal.setitimer(signal.ITIMER_REAL, 0)
";

/// As [`SERVER`], with a thread for each client.
pub(crate) const THREADS: &str = "
import os, socket, threading

def serve(client):
    total = 0
    while data := client.recv(1 << 16):
        client.sendall(data)
        total += len(data)
    client.close()
    os.write(1, b'served %d\\n' % total)

def read_lines():
    while True:
        line = os.read(lines, 100).decode()
        print(line, flush=True)
        if line == 'end\\n':
            os._exit(0)

os.mkfifo('/tmp/lines')
lines = os.open('/tmp/lines', os.O_RDWR)
listener = socket.create_server(('', 7777))
threading.Thread(target=read_lines).start()
print('listens', flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],)).start()
";

/// As [`SERVER`], with an event loop that gives other threads work now and then.
pub(crate) const LOOP: &str = "
import asyncio, os

async def serve(reader, writer):
    total = pieces = 0
    while data := await reader.read(1 << 16):
        pieces += 1
        if pieces % 20 == 0:
            data = await asyncio.get_running_loop().run_in_executor(None, bytes, data)
        writer.write(data)
        await writer.drain()
        total += len(data)
    writer.close()
    print('served', total, flush=True)

def read_line():
    line = os.read(lines, 100).decode()
    print(line, flush=True)
    if line == 'end\\n':
        os._exit(0)

async def main():
    asyncio.get_running_loop().add_reader(lines, read_line)
    async with await asyncio.start_server(serve, '', 7777) as server:
        print('listens', flush=True)
        await server.serve_forever()

os.mkfifo('/tmp/lines')
lines = os.open('/tmp/lines', os.O_RDWR | os.O_NONBLOCK)
asyncio.run(main())
";

/// As [`SERVER`], with two threads that wait for a set of clients each. The first thread adds clients to
/// these sets meanwhile.
pub(crate) const WORKERS: &str = "
import os, select, socket, threading

clients = {}

def work(waiter):
    while True:
        for fd, _ in waiter.poll(60):
            client, state = clients[fd]
            if data := client.recv(1 << 16):
                client.sendall(data)
                state[0] += len(data)
            else:
                waiter.unregister(fd)
                del clients[fd]
                client.close()
                os.write(1, b'served %d\\n' % state[0])

def read_lines():
    while True:
        line = os.read(lines, 100).decode()
        print(line, flush=True)
        if line == 'end\\n':
            os._exit(0)

os.mkfifo('/tmp/lines')
lines = os.open('/tmp/lines', os.O_RDWR)
listener = socket.create_server(('', 7777))
waiters = [select.epoll() for _ in range(2)]
for waiter in waiters:
    threading.Thread(target=work, args=(waiter,)).start()
threading.Thread(target=read_lines).start()
print('listens', flush=True)
while True:
    client = listener.accept()[0]
    clients[client.fileno()] = client, [0]
    waiters[client.fileno() % 2].register(client, select.EPOLLIN)
";

/// Echoes until a file exists at home. Then nothing arrives any more, and a signal interrupts its
/// read.
const INTERRUPTED: &str = "
import os, signal, socket
class Alarm(Exception):
    pass
def interrupt(*_):
    raise Alarm
signal.signal(signal.SIGALRM, interrupt)
listener = socket.socket()
listener.bind(('', 7777))
listener.listen(8)
print('listens', flush=True)
client, _ = listener.accept()
while not os.path.exists('/tmp/quiet'):
    client.sendall(client.recv(1000))
client.settimeout(None)
signal.setitimer(signal.ITIMER_REAL, 1, 1)
try:
    while client.recv(1000):
        pass
except Alarm:
    print('interrupted', flush=True)
";

impl Scene {
    fn write_line(&mut self, line: &str) -> Result<()> {
        self.cluster.run(1, &["sh", "-c", &format!("echo {line} > /tmp/lines")])?;
        self.server.await_output(line).with_context(|| self.diagnostics())?;
        Ok(())
    }

    fn await_connections(&self, node: u16, count: usize) -> Result<()> {
        wait_until("the connections are there", EVENT_TIMEOUT, || self.connections(node) == count)
            .with_context(|| self.diagnostics())?;
        Ok(())
    }

    /// The server's calls on its connections do not wake its shim. A trap for each call would wake it at
    /// least twice for each piece, of a client that sends pieces of this size.
    fn calls_do_not_trap(&self, client: &Running, size: u64) -> Result<()> {
        let wakes = || -> Result<u64> {
            let count = |pid: i32| -> Result<u64> {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
                let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
                Ok(line.context("no count")?.trim().parse()?)
            };
            shims(&self.cluster, 2)?.into_iter().map(count).sum()
        };
        let are_rare = || -> Result<bool> {
            let (pieces, before) = (progress(client) / size, wakes()?);
            await_progress(self, client, 300 * size)?;
            Ok(wakes()? - before < progress(client) / size - pieces)
        };
        wait_until("its calls do not trap", EVENT_TIMEOUT, || are_rare().is_ok_and(|are_rare| are_rare))
            .with_context(|| self.diagnostics())?;
        Ok(())
    }
}

/// `is_woken`: its waits or signals wake its shim.
fn server_waits(name: &str, program: &str, options: &[&str], is_woken: bool) -> Result<()> {
    const SIZE: u64 = 1000;
    let mut scene = Scene::with_server(name, program, options)?;
    let mut first = scene.client(SIZE)?;
    await_progress(&scene, &first, 20 * SIZE)?;
    scene.migrate("2")?;
    scene.await_connections(2, 1)?;
    await_progress(&scene, &first, 120 * SIZE)?;
    // Events at home wake the server, and so does its connection afterwards.
    scene.write_line("away")?;
    let mut second = scene.client(50 * SIZE)?;
    scene.await_connections(2, 2)?;
    for client in [&first, &second] {
        await_progress(&scene, client, 120 * SIZE)?;
    }
    ensure!(scene.connections(2) == 2, "they stay\n{}", scene.diagnostics());
    if !is_woken {
        scene.calls_do_not_trap(&first, SIZE)?;
    }
    for to in ["home", "3", "2"] {
        scene.migrate(to)?;
        for client in [&first, &second] {
            await_progress(&scene, client, 120 * SIZE).context(to)?;
        }
        scene.write_line(&format!("after-{to}"))?;
    }
    scene.await_connections(2, 2)?;
    scene.cluster.run(3, &["touch", "/tmp/stop"])?;
    for client in [&mut first, &mut second] {
        let outcome = client.finish(RUN_TIMEOUT).with_context(|| scene.diagnostics())?;
        let text = String::from_utf8_lossy(&outcome.out).into_owned();
        let total =
            text.lines().find_map(|line| line.strip_prefix("done ")).context("the client has failed")?;
        scene.server.await_output(&format!("served {total}"))?;
    }
    scene.write_line("end")?;
    let outcome = scene.server.finish(RUN_TIMEOUT)?;
    ensure!(outcome.status == 0, "{outcome:?}");
    nothing_is_left(&scene)
}

#[test]
fn server_that_selects_waits_for_both_nodes() -> Result<()> {
    server_waits("waits-select", SERVER, &["select"], true)
}

#[test]
fn server_that_polls_waits_for_both_nodes() -> Result<()> {
    server_waits("waits-poll", SERVER, &["poll"], true)
}

#[test]
fn server_with_an_epoll_set_waits_for_both_nodes() -> Result<()> {
    server_waits("waits-epoll", SERVER, &["epoll", "timer"], true)
}

#[test]
fn server_with_edge_triggered_events_waits_for_both_nodes() -> Result<()> {
    server_waits("waits-edges", SERVER, &["edges"], false)
}

#[test]
fn server_with_a_thread_for_each_client_moves_with_its_connections() -> Result<()> {
    server_waits("waits-threads", THREADS, &[], false)
}

#[test]
fn server_with_an_event_loop_and_threads_waits_for_both_nodes() -> Result<()> {
    server_waits("waits-loop", LOOP, &[], false)
}

#[test]
fn server_with_an_epoll_set_for_each_thread_waits_for_both_nodes() -> Result<()> {
    server_waits("waits-workers", WORKERS, &[], false)
}

/// A handler without SA_RESTART makes a read of a connection fail with EINTR.
#[test]
fn signal_interrupts_a_read_of_a_moved_connection() -> Result<()> {
    let mut scene = Scene::with_server("waits-signal", INTERRUPTED, &[])?;
    let client = scene.client(1000)?;
    scene.migrate("2")?;
    scene.await_connections(2, 1)?;
    await_progress(&scene, &client, 20_000)?;
    scene.cluster.run(1, &["touch", "/tmp/quiet"])?;
    scene.server.await_output("interrupted").with_context(|| scene.diagnostics())?;
    let outcome = scene.server.finish(RUN_TIMEOUT)?;
    ensure!(outcome.status == 0, "{outcome:?}");
    Ok(())
}
