//! Servers with several threads, one of which waits for connections of its node while another one
//! changes what it waits for.

use crate::connections::{EVENT_TIMEOUT, RUN_TIMEOUT, Scene, await_progress};
use crate::waiting::THREADS;
use anyhow::{Context, Result, ensure};
use tern_tests::cluster::fault_injection::wait_until;
use tern_tests::runs::running::Running;

/// Serves a client in a thread. When the client has ended, the only thread computes without a call.
const COMPUTING: &str = "
import socket, threading

def serve():
    client = listener.accept()[0]
    while data := client.recv(1 << 16):
        client.sendall(data)
    client.close()

listener = socket.create_server(('', 7777))
thread = threading.Thread(target=serve)
thread.start()
print('listens', flush=True)
thread.join()
print('computes', flush=True)
while True:
    pass
";

/// Echoes until a file exists at home. Then one thread waits for two seconds, in which nothing happens,
/// while another one adds a member to its set and removes it, again and again.
const CHANGING: &str = "
import os, select, socket, threading, time

def change():
    while not ended:
        waiter.register(reader, select.EPOLLIN)
        waiter.unregister(reader)
        time.sleep(0.02)

reader, _ = os.pipe()
ended = False
listener = socket.create_server(('', 7777))
print('listens', flush=True)
client = listener.accept()[0]
waiter = select.epoll()
waiter.register(client, select.EPOLLIN)
while not os.path.exists('/tmp/quiet'):
    waiter.poll(60)
    client.sendall(client.recv(1000))
waiter.modify(client, select.EPOLLPRI)
for _ in range(3):
    waiter.poll(0.01)
thread = threading.Thread(target=change)
thread.start()
begun = time.monotonic()
events = waiter.poll(2)
waited = time.monotonic() - begun
ended = True
thread.join()
print('waited', events, 2 <= waited < 20, flush=True)
while os.path.exists('/tmp/quiet'):
    time.sleep(0.1)
waiter.modify(client, select.EPOLLIN)
while data := client.recv(1000):
    client.sendall(data)
";

/// One thread waits for a set of clients. Another one accepts a second client, adds it to the set, and
/// sends to it.
const SENDING: &str = "
import os, select, socket, threading

def send():
    second = listener.accept()[0]
    clients[second.fileno()] = second
    waiter.register(second, select.EPOLLIN)
    for _ in range(1000):
        second.sendall(b'line\\n')

clients = {}
listener = socket.create_server(('', 7777))
print('listens', flush=True)
first = listener.accept()[0]
clients[first.fileno()] = first
waiter = select.epoll()
waiter.register(first, select.EPOLLIN)
threading.Thread(target=send).start()
while clients:
    for fd, events in waiter.poll():
        if events != select.EPOLLIN:
            os._exit(3)
        data = clients[fd].recv(1000)
        if data == b'hello':
            print('hello', flush=True)
        if data:
            clients[fd].sendall(data)
        else:
            waiter.unregister(fd)
            clients.pop(fd).close()
";

/// A client that exchanges pieces until a file exists. Its second connection receives, and sends only
/// after that, while the first one is silent.
const RECEIVING: &str = "
import os, socket, sys
first = socket.create_connection((sys.argv[1], 7777))
while not os.path.exists('/tmp/quiet'):
    first.sendall(b'x' * 100)
    assert len(first.recv(100, socket.MSG_WAITALL)) == 100
second = socket.create_connection((sys.argv[1], 7777))
assert len(second.recv(5000, socket.MSG_WAITALL)) == 5000
second.sendall(b'hello')
assert second.recv(5, socket.MSG_WAITALL) == b'hello'
print('done', flush=True)
";

/// A thread waits for a pipe, at home since it waits for a regular file as well. The other one echoes to a
/// client, and then writes to the pipe.
const POLLING: &str = "
import os, select, socket, tempfile, threading
reader, writer = os.pipe()
def wait():
    poll, file = select.poll(), open('/etc/passwd')
    poll.register(reader, select.POLLIN)
    poll.register(file, select.POLLPRI)
    assert poll.poll() == [(reader, select.POLLIN)]
    print('waited', flush=True)
waiting = threading.Thread(target=wait)
waiting.start()
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(('', 7777))
listener.listen(8)
print('listens', flush=True)
client, _ = listener.accept()
while data := client.recv(1 << 16):
    client.sendall(data)
os.write(writer, b'x')
waiting.join()
";

fn away(name: &str, program: &str) -> Result<Scene> {
    let scene = Scene::with_server(name, program, &[])?;
    scene.migrate("2")?;
    Ok(scene)
}

fn await_connections(scene: &Scene, count: usize) -> Result<()> {
    wait_until("the connections are there", EVENT_TIMEOUT, || scene.connections(2) == count)
        .with_context(|| scene.diagnostics())?;
    Ok(())
}

fn end(scene: &mut Scene, client: &mut Running) -> Result<()> {
    let outcome = client.finish(RUN_TIMEOUT).with_context(|| scene.diagnostics())?;
    ensure!(outcome.status == 0, "{outcome:?}");
    let outcome = scene.server.finish(RUN_TIMEOUT).with_context(|| scene.diagnostics())?;
    ensure!(outcome.status == 0, "{outcome:?}");
    Ok(())
}

#[test]
fn thread_that_computes_departs_after_the_others_have_ended() -> Result<()> {
    let scene = away("threads-computing", COMPUTING)?;
    let mut client = scene.client(1000)?;
    await_connections(&scene, 1)?;
    await_progress(&scene, &client, 300_000)?;
    scene.cluster.run(3, &["touch", "/tmp/stop"])?;
    client.finish(RUN_TIMEOUT)?;
    scene.server.await_output("computes")?;
    for to in ["3", "home"] {
        scene.migrate(to).with_context(|| scene.diagnostics())?;
    }
    Ok(())
}

#[test]
fn wait_lasts_as_long_as_if_its_set_did_not_change() -> Result<()> {
    let mut scene = away("threads-changing", CHANGING)?;
    let mut client = scene.client(1000)?;
    await_connections(&scene, 1)?;
    await_progress(&scene, &client, 300_000)?;
    scene.cluster.run(1, &["touch", "/tmp/quiet"])?;
    scene.server.await_output("waited [] True").with_context(|| scene.diagnostics())?;
    ensure!(scene.connections(2) == 1, "the connection has returned\n{}", scene.diagnostics());
    scene.cluster.run(1, &["rm", "/tmp/quiet"])?;
    scene.cluster.run(3, &["touch", "/tmp/stop"])?;
    end(&mut scene, &mut client)
}

/// Home's mappings for large calls would otherwise be where the program maps memory meanwhile, which could
/// then not come home.
#[test]
fn large_calls_of_threads_use_no_addresses_of_the_program() -> Result<()> {
    const LEN: u64 = 1 << 20;
    let scene = away("threads-large", THREADS)?;
    let clients = [scene.client(200_000)?, scene.client(200_000)?];
    for client in &clients {
        await_progress(&scene, client, 2_000_000)?;
    }
    let maps = scene.cluster.run(1, &["cat", &format!("/proc/{}/maps", scene.server.pid)])?;
    let maps = String::from_utf8_lossy(&maps).into_owned();
    let range = |line: &str| -> Option<(u64, u64)> {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
    };
    let large = maps.lines().filter(|line| line.contains("memfd:tern")).filter_map(range);
    let large: Vec<(u64, u64)> = large.filter(|(start, end)| end - start >= LEN).collect();
    ensure!(large.len() >= 2, "no two threads have made large calls:\n{maps}");
    ensure!(large.iter().all(|(_, end)| *end < 0x4000_0000_0000), "{large:x?}\n{maps}");
    Ok(())
}

#[test]
fn thread_waits_for_a_connection_that_another_thread_brings_here() -> Result<()> {
    let mut scene = away("threads-sending", SENDING)?;
    let mut client = scene.run_client(RECEIVING, "")?;
    await_connections(&scene, 1)?;
    scene.cluster.run(3, &["touch", "/tmp/quiet"])?;
    scene.server.await_output("hello").with_context(|| scene.diagnostics())?;
    end(&mut scene, &mut client)
}

/// A thread that waits at home for other descriptors keeps no connection there.
#[test]
fn connection_moves_while_a_thread_polls_at_home() -> Result<()> {
    let mut scene = away("threads-polling", POLLING)?;
    let mut client = scene.client(100)?;
    await_connections(&scene, 1)?;
    scene.cluster.run(3, &["touch", "/tmp/stop"])?;
    scene.server.await_output("waited").with_context(|| scene.diagnostics())?;
    end(&mut scene, &mut client)
}
