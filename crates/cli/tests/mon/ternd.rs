//! What answers on a control socket in place of a daemon.

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

use crate::tmux::PATIENCE;

/// A directory with the tools in it and a control socket, which is answered. All is gone at the end.
pub(crate) struct Ternd {
    pub(crate) place: PathBuf,
    heard: Arc<Heard>,
    serving: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Heard {
    requests: Mutex<Vec<Request>>,
    caller: AtomicI32,
    over: AtomicBool,
}

impl Ternd {
    pub(crate) fn start(name: &str, answer: impl Fn(&Request) -> Reply + Send + 'static) -> Self {
        let place = std::env::temp_dir().join(format!("tern-mon-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        for tool in ["mon", "mosmon", "mtop"] {
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tern"), place.join(tool)).unwrap();
        }
        let mut ternd = Self { place, heard: Arc::default(), serving: None };
        ternd.go_on(answer);
        ternd
    }

    /// Answers from now on.
    pub(crate) fn go_on(&mut self, answer: impl Fn(&Request) -> Reply + Send + 'static) {
        let listener = UnixListener::bind(self.place.join("control")).unwrap();
        let heard = self.heard.clone();
        heard.over.store(false, Ordering::Release);
        self.serving = Some(std::thread::spawn(move || {
            for connection in listener.incoming() {
                if heard.over.load(Ordering::Acquire) {
                    return;
                }
                // One who has left without asking is no concern of ours.
                let _left = serve(connection.unwrap(), &heard, &answer);
            }
        }));
    }

    /// Answers no more, and nobody does.
    pub(crate) fn stop(&mut self) {
        if let Some(serving) = self.serving.take() {
            self.heard.over.store(true, Ordering::Release);
            let socket = self.place.join("control");
            drop(UnixStream::connect(&socket));
            serving.join().unwrap();
            std::fs::remove_file(socket).unwrap();
        }
    }

    /// What has been asked until now.
    pub(crate) fn asked(&self) -> Vec<Request> {
        self.heard.requests.lock().unwrap().clone()
    }

    /// Waits until so much has been asked.
    pub(crate) fn wait_until_asked(&self, count: usize) {
        let begun = Instant::now();
        while self.asked().len() < count {
            assert!(begun.elapsed() < PATIENCE, "asked only {:?}", self.asked());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Who has asked last.
    pub(crate) fn caller(&self) -> i32 {
        self.heard.caller.load(Ordering::Acquire)
    }

    /// A tool that asks here, by its command line.
    pub(crate) fn command(&self, line: &str) -> Command {
        let mut words = line.split(' ');
        let mut command = Command::new(self.place.join(words.next().unwrap()));
        command.args(words).env("TERN_RUN_DIR", &self.place);
        command
    }
}

impl Drop for Ternd {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_dir_all(&self.place);
    }
}

fn serve(
    mut connection: UnixStream,
    heard: &Heard,
    answer: &dyn Fn(&Request) -> Reply,
) -> std::io::Result<()> {
    let request = stream::read(&mut connection)?;
    let peer = rustix::net::sockopt::socket_peercred(&connection)?;
    heard.caller.store(peer.pid.as_raw_nonzero().get(), Ordering::Release);
    let reply = answer(&request);
    heard.requests.lock().unwrap().push(request);
    stream::write(&mut connection, &reply)
}

/// Nodes of these loads, seen from the first.
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

/// A process of root's.
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
