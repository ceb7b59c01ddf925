//! A FUSE file system on a node that can stall: its requests then wait.

use crate::cluster::Cluster;
use crate::cluster::fault_injection::wait_until;
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

/// Where the file system is mounted.
const MOUNT: &str = "/tmp/stalling";

/// Its one file: 4096 zeros. Writes to it are accepted and have no effect.
pub const FILE: &str = "/tmp/stalling/f";

/// Requests wait while this file exists.
const STALL: &str = "/tmp/stall";

/// A byte for each request that has waited.
const WAITED: &str = "/tmp/stall.waited";

/// The server. A thread that is interrupted while its request waits is in an uninterruptible sleep,
/// since the server has read the request. The kernel caches only the file's name, and the file's
/// content until the next open.
const SERVER: &str = "
import ctypes, os, struct, sys, threading, time
at, stall, waited = sys.argv[1:4]
after_read = sys.argv[4] == 'after-read'
waiting = [int(operation) for operation in sys.argv[5:]]
os.makedirs(at, exist_ok=True)
fuse = os.open('/dev/fuse', os.O_RDWR)
options = f'fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other'.encode()
assert ctypes.CDLL(None).mount(b'slow', at.encode(), b'fuse.slow', 0, options) == 0
count = os.open(waited, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
print('ready', flush=True)

def reply(unique, data=b'', error=0):
    try:
        os.write(fuse, struct.pack('=IiQ', 16 + len(data), -error, unique) + data)
    except FileNotFoundError:
        pass # The caller was killed.

def attributes(node):
    mode = 0o40777 if node == 1 else 0o100666
    return struct.pack('=6Q10I', node, 0 if node == 1 else 4096, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

def answer(operation, unique, node, body):
    if operation == 26:
        reply(unique, struct.pack('=4I2H2I2H8I', 7, 31, 4096, 0, 0, 0, 4096, 1, 0, 0, *[0] * 8))
    elif operation == 1 and body == b'f\\0':
        reply(unique, struct.pack('=4Q2I', 2, 1, 1000, 0, 0, 0) + attributes(2))
    elif operation == 1:
        reply(unique, error=2)
    elif operation in (3, 4):
        reply(unique, struct.pack('=Q2I', 0, 0, 0) + attributes(node))
    elif operation in (14, 27):
        reply(unique, bytes(16))
    elif operation == 15:
        offset, size = struct.unpack_from('=8xQI', body)
        if after_read:
            open(stall, 'w')
        reply(unique, bytes(max(0, min(size, 4096 - offset))))
    elif operation == 16:
        reply(unique, struct.pack('=II', struct.unpack_from('=16xI', body)[0], 0))
    elif operation in (18, 20, 25, 28, 29):
        reply(unique)
    elif operation not in (2, 36, 42):
        reply(unique, error=38)

def answer_later(*request):
    os.write(count, b'.')
    while os.path.exists(stall):
        time.sleep(0.01)
    answer(*request)

while True:
    try:
        request = os.read(fuse, 1 << 20)
    except FileNotFoundError:
        continue # The caller was killed.
    _, operation, unique, node = struct.unpack_from('=IIQQ', request)
    if operation in waiting and os.path.exists(stall):
        arguments = [operation, unique, node, request[40:]]
        threading.Thread(target=answer_later, args=arguments, daemon=True).start()
    else:
        answer(operation, unique, node, request[40:])
";

/// Requests that can wait, by the kernel's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// fsync.
    Syncs,
    /// stat, open, read, write and fsync.
    All,
    /// open, once the file has been read.
    OpensOnceRead,
    /// close.
    Closes,
}

/// The file system, until it is dropped.
#[derive(Debug)]
pub struct StallingFiles {
    server: Child,
    node: u16,
}

impl StallingFiles {
    /// Mounts it on a node.
    ///
    /// # Errors
    /// If its server does not start or cannot mount it.
    pub fn mount(cluster: &Cluster, node: u16, waiting: Waiting) -> Result<Self> {
        let operations: &[&str] = match waiting {
            Waiting::Syncs => &["on-request", "20"],
            Waiting::All => &["on-request", "3", "14", "15", "16", "20"],
            Waiting::OpensOnceRead => &["after-read", "14"],
            Waiting::Closes => &["on-request", "25"],
        };
        let mut server = cluster.command(node, "python3");
        server.args(["-c", SERVER, MOUNT, STALL, WAITED]).args(operations);
        let mut this = Self { server: server.stdout(Stdio::piped()).spawn()?, node };
        let mut line = String::new();
        BufReader::new(this.server.stdout.take().context("no output")?).read_line(&mut line)?;
        ensure!(line == "ready\n", "the file system is not mounted");
        Ok(this)
    }

    /// Requests wait from now on.
    ///
    /// # Errors
    /// If the server's file cannot be created.
    pub fn stall(&self, cluster: &Cluster) -> Result<()> {
        Ok(std::fs::write(cluster.lab().node(self.node).path(STALL)?, "")?)
    }

    /// Requests are answered again.
    ///
    /// # Errors
    /// If the file system does not stall.
    pub fn release(&self, cluster: &Cluster) -> Result<()> {
        Ok(std::fs::remove_file(cluster.lab().node(self.node).path(STALL)?)?)
    }

    /// Number of requests that have waited, or wait now.
    ///
    /// # Errors
    /// If the server's file cannot be examined.
    pub fn waited(&self, cluster: &Cluster) -> Result<u64> {
        Ok(std::fs::metadata(cluster.lab().node(self.node).path(WAITED)?)?.len())
    }
}

impl Drop for StallingFiles {
    /// The kernel then fails all requests.
    fn drop(&mut self) {
        let _has_ended = self.server.kill();
        let _has_ended = self.server.wait();
    }
}

/// Executes a program with an open file, which execve(2) closes.
pub const EXECUTES: &str =
    "import os, sys; os.open(sys.argv[1], os.O_RDONLY); os.execv('/bin/true', ['true'])";

/// Starts a process on node 1 whose execve(2) waits for a file system, until that is released.
///
/// # Errors
/// If it does not wait.
pub fn stall_an_execve(cluster: &Cluster) -> Result<(StallingFiles, Child)> {
    let files = StallingFiles::mount(cluster, 1, Waiting::Closes)?;
    files.stall(cluster)?;
    let mut stranger = cluster.command(1, "python3");
    let stranger = stranger.args(["-c", EXECUTES, FILE]).spawn()?;
    let closes = || files.waited(cluster).is_ok_and(|waited| waited > 0);
    wait_until("the stranger's execve waits", Duration::from_secs(20), closes)?;
    Ok((files, stranger))
}
