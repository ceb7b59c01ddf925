//! A cluster of real ternds, removed at the end of the test.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tern_control::{Refusal, Reply, Request, StatusReport, stream};
use tern_ids::NodeId;
use tern_node::{InitOptions, JoinOptions, JoinReport, SetupError};

/// Waits until a condition holds.
pub(crate) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !so() {
        assert!(Instant::now() < end, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A directory with the files of a cluster.
pub(crate) struct Cluster {
    pub(crate) dir: PathBuf,
    pub(crate) nodes: Vec<Node>,
    pub(crate) first_token: String,
}

pub(crate) struct Node {
    pub(crate) dir: PathBuf,
    pub(crate) port: u16,
    pub(crate) ternd: Option<Child>,
}

impl Cluster {
    /// A cluster with only the founding node, which runs. `more` is added to its ternd.toml.
    pub(crate) fn found(more: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let unique = format!("ternd-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(unique);
        fs::create_dir_all(&dir).unwrap();
        // Other users must be able to reach the control sockets in it.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        let mut cluster = Self { dir, nodes: Vec::new(), first_token: String::new() };
        let mut node = Node::new(&cluster, more);
        let report = tern_node::init(&InitOptions {
            name: Some("alpha".into()),
            address: Some(format!("127.0.0.1:{}", node.port)),
            config_dir: Some(node.dir.clone()),
            ..InitOptions::default()
        });
        cluster.first_token = report.unwrap().token;
        node.start();
        cluster.nodes.push(node);
        cluster
    }

    /// A cluster with this many nodes.
    pub(crate) fn of(count: usize) -> Self {
        let mut cluster = Self::found("");
        while cluster.nodes.len() < count {
            cluster.add("");
        }
        cluster
    }

    /// Adds a node, joined and running.
    pub(crate) fn add(&mut self, more: &str) -> JoinReport {
        let mut node = Node::new(self, more);
        let report = self.join(&node, &self.token(), None).unwrap();
        node.start();
        self.nodes.push(node);
        report
    }

    pub(crate) fn token(&self) -> String {
        match self.nodes[0].ask(&Request::Token { seconds: 60 }) {
            Reply::Token(token) => token,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn join(&self, node: &Node, token: &str, wish: Option<u16>) -> Result<JoinReport, SetupError> {
        tern_node::join(&JoinOptions {
            host: format!("127.0.0.1:{}", self.nodes[0].port),
            token: token.into(),
            node: wish.map(NodeId),
            name: Some(format!("host{}", node.port)),
            address: Some(format!("127.0.0.1:{}", node.port)),
            config_dir: Some(node.dir.clone()),
            ..JoinOptions::default()
        })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.nodes.clear();
        // The shims notice that the directory is gone, and end.
        let _gone = fs::remove_dir_all(&self.dir);
    }
}

impl Node {
    pub(crate) fn new(cluster: &Cluster, more: &str) -> Self {
        // Below the ephemeral ports, which the kernel could give to a connection before ternd
        // binds.
        let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
        let port = std::iter::repeat_with(|| rand::random_range(10_000..32_000)).find(free).unwrap();
        let dir = cluster.dir.join(port.to_string());
        fs::create_dir_all(&dir).unwrap();
        let shim = dir.join("shim");
        crate::fake_shim::write_program(&shim);
        let at = |name: &str| format!("{:?}", dir.join(name));
        let config =
            format!("run_dir = {}\ncache_dir = {}\nshim = {shim:?}\n{more}\n", at("run"), at("cache"));
        fs::write(dir.join("ternd.toml"), config).unwrap();
        Self { dir, port, ternd: None }
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ternd"));
        command.arg("--config").arg(self.dir.join("ternd.toml")).stdin(Stdio::null());
        command
    }

    pub(crate) fn start(&mut self) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.dir.join("log")).unwrap();
        self.ternd = Some(self.command().stderr(log).spawn().unwrap());
        until("ternd answers", || {
            let ended = self.ternd.as_mut().unwrap().try_wait().unwrap();
            assert!(ended.is_none(), "{}", self.log());
            self.try_ask(&Request::GetMap).is_ok()
        });
    }

    /// Kills ternd, like a crash.
    pub(crate) fn kill(&mut self) {
        if let Some(mut ternd) = self.ternd.take() {
            let _ended = ternd.kill();
            let _status = ternd.wait();
        }
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.dir.join("run")
    }

    pub(crate) fn try_ask(&self, request: &Request) -> std::io::Result<Reply> {
        let mut socket = UnixStream::connect(self.run_dir().join("control"))?;
        stream::write(&mut socket, request)?;
        stream::read(&mut socket)
    }

    pub(crate) fn ask(&self, request: &Request) -> Reply {
        self.try_ask(request).unwrap_or_else(|e| panic!("{e}; {}", self.log()))
    }

    pub(crate) fn refusal(&self, request: &Request) -> Refusal {
        match self.ask(request) {
            Reply::Refused(refusal) => refusal,
            other => panic!("{other:?}"),
        }
    }

    /// Sends a request as another user. Only the credentials of a separate thread are changed.
    pub(crate) fn ask_as(&self, uid: u32, request: &Request) -> Reply {
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let (user, group) =
                    (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(uid));
                rustix::thread::set_thread_res_gid(group, group, group).unwrap();
                rustix::thread::set_thread_res_uid(user, user, user).unwrap();
                self.ask(request)
            });
            asking.join().unwrap()
        })
    }

    pub(crate) fn status(&self) -> StatusReport {
        match self.ask(&Request::Status) {
            Reply::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn map(&self) -> String {
        match self.ask(&Request::GetMap) {
            Reply::Map(map) => map,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A process to migrate, killed at the end of the test.
pub(crate) struct Sleeper(pub(crate) Child);

impl Sleeper {
    pub(crate) fn of(uid: Option<u32>) -> Self {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new("sleep");
        command.arg("1000").stdin(Stdio::null());
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        Self(command.spawn().unwrap())
    }

    pub(crate) fn pid(&self) -> tern_ids::HomePid {
        tern_ids::HomePid(self.0.id() as i32)
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _status = self.0.wait();
    }
}
