//! A fake daemon on a control socket.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tern_control::{
    ClusterReport, NodeFlags, NodeLoad, NodeState, ProcessRow, Reply, Request, Usage, stream,
};
use tern_ids::{HomePid, NodeId};

use crate::tmux::SCREEN_TIMEOUT;

/// A directory with the tools and a control socket that is served; removed on drop.
pub(crate) struct Ternd {
    pub(crate) dir: PathBuf,
    received: Arc<Received>,
    serving: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Received {
    requests: Mutex<Vec<Request>>,
    caller: AtomicI32,
    is_stopped: AtomicBool,
}

impl Ternd {
    pub(crate) fn start(name: &str, reply_to: impl Fn(&Request) -> Reply + Send + 'static) -> Self {
        let dir = std::env::temp_dir().join(format!("tern-mon-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for tool in ["mon", "mosmon", "mtop"] {
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tern"), dir.join(tool)).unwrap();
        }
        let mut ternd = Self { dir, received: Arc::default(), serving: None };
        ternd.serve_again(reply_to);
        ternd
    }

    /// Starts serving the socket.
    pub(crate) fn serve_again(&mut self, reply_to: impl Fn(&Request) -> Reply + Send + 'static) {
        let listener = UnixListener::bind(self.dir.join("control")).unwrap();
        let received = self.received.clone();
        received.is_stopped.store(false, Ordering::Release);
        self.serving = Some(std::thread::spawn(move || {
            for connection in listener.incoming() {
                if received.is_stopped.load(Ordering::Acquire) {
                    return;
                }
                // A client that has closed the connection early is not an error.
                let _closed = serve(connection.unwrap(), &received, &reply_to);
            }
        }));
    }

    /// Stops serving and removes the socket.
    pub(crate) fn stop(&mut self) {
        if let Some(serving) = self.serving.take() {
            self.received.is_stopped.store(true, Ordering::Release);
            let socket = self.dir.join("control");
            drop(UnixStream::connect(&socket));
            serving.join().unwrap();
            std::fs::remove_file(socket).unwrap();
        }
    }

    /// All requests received so far.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.received.requests.lock().unwrap().clone()
    }

    /// Waits until `count` requests have been received.
    pub(crate) fn wait_for_requests(&self, count: usize) {
        let started = Instant::now();
        while self.requests().len() < count {
            assert!(started.elapsed() < SCREEN_TIMEOUT, "received only {:?}", self.requests());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The pid of the last client.
    pub(crate) fn caller(&self) -> i32 {
        self.received.caller.load(Ordering::Acquire)
    }

    /// A command that runs a tool with this directory's socket.
    pub(crate) fn command(&self, line: &str) -> Command {
        let mut words = line.split(' ');
        let mut command = Command::new(self.dir.join(words.next().unwrap()));
        command.args(words).env("TERN_RUN_DIR", &self.dir);
        command
    }
}

impl Drop for Ternd {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn serve(
    mut connection: UnixStream,
    received: &Received,
    reply_to: &dyn Fn(&Request) -> Reply,
) -> std::io::Result<()> {
    let request = stream::read(&mut connection)?;
    let peer = rustix::net::sockopt::socket_peercred(&connection)?;
    received.caller.store(peer.pid.as_raw_nonzero().get(), Ordering::Release);
    let reply = reply_to(&request);
    received.requests.lock().unwrap().push(request);
    stream::write(&mut connection, &reply)
}

/// Nodes with these loads, reported by the first.
pub(crate) fn cluster(loads: &[f32]) -> ClusterReport {
    let node = |(number, load): (u16, &f32)| NodeLoad {
        node: NodeId(number),
        host: format!("host{number}"),
        state: NodeState::Alive,
        age_ms: 0,
        load: *load,
        speed: 10_000,
        cpus: 1.0,
        mem_total: 8_000_000_000,
        mem_free: 6_000_000_000,
        mem_raw_free: 2_000_000_000,
        swap_total: 0,
        swap_free: 0,
        utilisability: 100,
        guests: 0,
        away: 0,
        flags: NodeFlags::default(),
    };
    ClusterReport { me: NodeId(1), nodes: (1..).zip(loads).map(node).collect(), migrations: Vec::new() }
}

/// A process of root.
pub(crate) fn row(pid: i32, r#where: Option<u16>, from: Option<u16>) -> ProcessRow {
    ProcessRow {
        pid: HomePid(pid),
        uid: 0,
        r#where: r#where.map(NodeId),
        from: from.map(NodeId),
        state: "running".into(),
        cpu_seconds: 65.0,
        migrations: 1,
        reason: String::new(),
        command: "/usr/bin/flac -8 a.wav".into(),
        usage: Usage::default(),
        started: None,
    }
}
