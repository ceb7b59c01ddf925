//! A cluster with a gatekeeper, and a machine outside with its clients.

use serde_json::Value;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tern_tests::breaking;
use tern_tests::cluster::Cluster;
use tern_tests::outcome::said;

/// How long something that is to happen may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// The node whose machine stands for one outside: its client uses nothing of Tern's there.
pub(super) const OUTSIDE: u16 = 2;

/// A cluster whose node 1 has users, and a gatekeeper.
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
        self.0.lab().restart_daemon(1).expect("ternd does not start again");
        until("the gatekeeper listens", || {
            self.0.tool(1, "outside").arg("jobs").output().expect("it cannot be run").status.success()
        });
    }

    fn address(&self) -> String {
        format!("{}:7102", self.0.lab().node(1).address())
    }

    /// A shell's line on a node, which must succeed.
    pub(super) fn on(&self, node: u16, line: &str) -> String {
        String::from_utf8(self.0.run(node, &["sh", "-c", line]).expect("the line fails")).expect("no text")
    }

    /// Makes a key, and gives it to the machine outside under this name.
    pub(super) fn key(&self, name: &str, words: &[&str]) -> String {
        let mut add = self.0.tool(1, "outside");
        let end = add
            .args(["add", name, "--address", &self.address()])
            .args(words)
            .output()
            .expect("it cannot be run");
        assert!(end.status.success(), "{}", said(&end).2);
        let path = format!("/tmp/{name}.key");
        self.put(&path, &end.stdout);
        path
    }

    fn put(&self, path: &str, content: &[u8]) {
        let mut put = self.0.command(OUTSIDE, "sh");
        let line = format!("umask 077; cat > {path}");
        let mut child = put.args(["-c", &line]).stdin(Stdio::piped()).spawn().expect("it cannot be begun");
        child.stdin.take().expect("no pipe").write_all(content).expect("nobody reads");
        assert!(child.wait().expect("its end is not known").success());
    }

    /// The client with a key, before its command.
    pub(super) fn client(&self, key: &str) -> Command {
        self.client_of(&["python3".into()], key)
    }

    /// The same with another Python.
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

    /// A command's end, as its client tells it.
    pub(super) fn run(&self, key: &str, words: &[&str]) -> (Option<i32>, String, String) {
        said(&self.client(key).arg("--").args(words).output().expect("it cannot be run"))
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
        let mut child = client.spawn().expect("it cannot be begun");
        let mut begun = [0; 6];
        child.stdout.as_mut().expect("no pipe").read_exact(&mut begun).expect("it does not begin");
        child
    }

    /// Processes of all nodes whose command line has this.
    pub(super) fn count(&self, word: &str) -> usize {
        self.0.lab().nodes().map(|node| self.0.count(node.number(), word)).sum()
    }

    /// What a listing of `tern outside` says.
    pub(super) fn list(&self, what: &str) -> Vec<Value> {
        let end = self.0.tool(1, "outside").args([what, "--json"]).output().expect("it cannot be run");
        serde_json::from_slice(&end.stdout).expect("no list")
    }
}

pub(super) fn client_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../packaging/outside/mexec.py")
        .canonicalize()
        .expect("there is no client")
}

pub(super) fn until(what: &str, holds: impl FnMut() -> bool) {
    breaking::until(what, PATIENCE, holds).expect("it takes too long");
}

/// Bytes of all values, in no order.
pub(super) fn content(length: u32) -> Vec<u8> {
    (0..length).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}
