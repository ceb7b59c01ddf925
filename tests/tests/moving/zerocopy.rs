//! A buffer that the kernel sends later (MSG_ZEROCOPY), by a program that is away.

use anyhow::{Result, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::runs::running::Running;

const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// Sends 48 buffers of 64 KiB, each of one byte value, and does not change them. The receiver, a
/// child that stays at home, begins to read when all are sent.
const PROGRAM: &str = "
import os, socket, sys
SO_ZEROCOPY, MSG_ZEROCOPY, SIZE, COUNT = 60, 0x4000000, 65536, 48
listener = socket.create_server(('127.0.0.1', 0))
sender = socket.socket()
sender.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
sender.connect(listener.getsockname())
receiver = listener.accept()[0]
is_sent, sent = os.pipe()
if os.fork() == 0:
    sender.close()
    os.read(is_sent, 1)
    at = wrong = 0
    while piece := receiver.recv(SIZE):
        for byte in piece:
            wrong += byte != at // SIZE + 1
            at += 1
    print('received', at, 'wrong', wrong, flush=True)
    os._exit(0)
receiver.close()
buffers = [bytes([i + 1]) * SIZE for i in range(COUNT)]
print('ready', flush=True)
sys.stdin.readline()
for buffer in buffers:
    at = 0
    while at < SIZE:
        at += sender.send(memoryview(buffer)[at:], MSG_ZEROCOPY)
os.write(sent, b'x')
sender.shutdown(socket.SHUT_WR)
os.wait()
";

#[test]
fn lent_buffers_are_sent_as_they_are() -> Result<()> {
    let cluster = Cluster::with_nodes("lent", 2)?;
    let mut running = Running::python(&cluster, &["-L"], PROGRAM, "ready")?;
    cluster.migrate(running.pid, "2").map_err(|refused| anyhow::anyhow!("{refused}"))?;
    running.send_input("\n")?;
    let outcome = running.finish(RUN_TIMEOUT)?;
    let text = String::from_utf8_lossy(&outcome.out).into_owned();
    ensure!(outcome.status == 0, "{outcome:?}");
    ensure!(text.contains("received 3145728 wrong 0"), "{text}");
    Ok(())
}
