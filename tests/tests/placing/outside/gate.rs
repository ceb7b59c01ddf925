//! A cluster with a gatekeeper, and a machine outside it for the clients.

use serde_json::Value;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection;
use tern_tests::runs::outcome::result_of;

/// Timeout for anything that a busy machine may delay.
const EVENT_TIMEOUT: Duration = Duration::from_secs(30);

/// The node that serves as the outside machine: its client uses nothing of Tern's there.
pub(super) const OUTSIDE: u16 = 2;

/// A cluster whose node 1 has users and a gatekeeper.
pub(super) struct Gate(pub(super) Cluster);

impl Gate {
    pub(super) fn open(prefix: &str, nodes: u16) -> Self {
        let gate = Self(Cluster::with_nodes(prefix, nodes).expect("the lab does not come up"));
        gate.on(1, "useradd -m -u 4242 anna && useradd -m -u 4243 bert && chmod 700 /home/anna /home/bert");
        gate.listens("0.0.0.0:7102");
        gate
    }

    pub(super) fn listens(&self, address: &str) {
        self.on(1, &format!("sed -i /mexec_outside/d /etc/tern/ternd.toml; echo 'mexec_outside = \"{address}\"' >> /etc/tern/ternd.toml"));
        self.0.lab().restart_daemon(1).expect("ternd does not restart");
        wait_until("the gatekeeper listens", || {
            self.0
                .tool(1, "outside")
                .arg("jobs")
                .output()
                .expect("the command cannot be run")
                .status
                .success()
        });
    }

    fn address(&self) -> String {
        format!("{}:7102", self.0.lab().node(1).address())
    }

    /// Runs a shell command on a node; it must succeed.
    pub(super) fn on(&self, node: u16, line: &str) -> String {
        String::from_utf8(self.0.run(node, &["sh", "-c", line]).expect("the shell command fails"))
            .expect("no text")
    }

    /// Creates a key, and stores it on the outside machine under this name.
    pub(super) fn key(&self, name: &str, words: &[&str]) -> String {
        let mut add = self.0.tool(1, "outside");
        let end = add
            .args(["add", name, "--address", &self.address()])
            .args(words)
            .output()
            .expect("the command cannot be run");
        assert!(end.status.success(), "{}", result_of(&end).2);
        let path = format!("/tmp/{name}.key");
        self.put(&path, &end.stdout);
        path
    }

    fn put(&self, path: &str, content: &[u8]) {
        let mut put = self.0.command(OUTSIDE, "sh");
        let line = format!("umask 077; cat > {path}");
        let mut child = put.args(["-c", &line]).stdin(Stdio::piped()).spawn().expect("it cannot be started");
        child.stdin.take().expect("no pipe").write_all(content).expect("the write fails");
        assert!(child.wait().expect("cannot wait for it").success());
    }

    /// The client with this key; the command is to be added.
    pub(super) fn client(&self, key: &str) -> Command {
        self.client_of(&["python3".into()], key)
    }

    /// As `client`, with another Python.
    pub(super) fn client_of(&self, python: &[String], key: &str) -> Command {
        let mut command = self.0.command(OUTSIDE, &python[0]);
        command
            .args(&python[1..])
            .arg(client_path())
            .args(["--key", key])
            .stdin(Stdio::null())
            .current_dir("/tmp");
        command
    }

    /// Runs a command by the client.
    pub(super) fn run(&self, key: &str, words: &[&str]) -> (Option<i32>, String, String) {
        result_of(&self.client(key).arg("--").args(words).output().expect("the command cannot be run"))
    }

    pub(super) fn begin(&self, key: &str, line: &str) -> Child {
        self.begin_of(&["python3"], key, line)
    }

    pub(super) fn begin_of(&self, python: &[&str], key: &str, line: &str) -> Child {
        let python: Vec<String> = python.iter().map(|word| (*word).to_owned()).collect();
        let mut client = self.client_of(&python, key);
        client
            .args(["--", "sh", "-c", &format!("echo begun; {line}")])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = client.spawn().expect("it cannot be started");
        let mut begun = [0; 6];
        child.stdout.as_mut().expect("no pipe").read_exact(&mut begun).expect("it does not start");
        child
    }

    /// Number of processes of all nodes whose command line contains this.
    pub(super) fn count(&self, word: &str) -> usize {
        self.0.lab().nodes().map(|node| self.0.count(node.number(), word)).sum()
    }

    /// A listing of `tern outside`.
    pub(super) fn list(&self, what: &str) -> Vec<Value> {
        let end =
            self.0.tool(1, "outside").args([what, "--json"]).output().expect("the command cannot be run");
        serde_json::from_slice(&end.stdout).expect("no list")
    }
}

pub(super) fn client_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../packaging/outside/mexec.py")
        .canonicalize()
        .expect("there is no client")
}

pub(super) fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    fault_injection::wait_until(what, EVENT_TIMEOUT, holds).expect("timed out");
}

/// Pseudo-random bytes.
pub(super) fn content(length: u32) -> Vec<u8> {
    (0..length).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}
