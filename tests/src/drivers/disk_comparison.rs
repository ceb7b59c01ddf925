//! Runs the same file operations through /mfs and on a local disk, and compares the results.
//!
//! Node 2 has two directories: `/tmp/there`, in which one local program does all operations, and
//! `/tmp/here`, in which programs on the other nodes do them by turns through `/mfs/2/tmp/here`.
//! Each reply must equal that of the local program.

use crate::cluster::Cluster;
use anyhow::{Context, Result, bail, ensure};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};
use tern_lab::Cable;

/// The node that has the files.
const SERVER: u16 = 2;

/// How long a node may take to be reachable after its cables are healed.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Number of operations shown before a failed one.
const MAX_SHOWN_OPERATIONS: usize = 25;

/// A running `tasks/file_worker.py`: performs one operation for each line.
#[derive(Debug)]
struct Worker {
    child: Child,
    send: ChildStdin,
    replies: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    fn start(cluster: &Cluster, node: u16, directory: &str) -> Result<Self> {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tasks/file_worker.py");
        let mut command = cluster.command(node, "/usr/bin/python3");
        let mut child =
            command.arg(program).arg(directory).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let send = child.stdin.take().context("no input")?;
        let replies = BufReader::new(child.stdout.take().context("no output")?).lines();
        let mut worker = Self { child, send, replies };
        ensure!(worker.receive()? == "ready", "it does not start");
        Ok(worker)
    }

    fn send(&mut self, operation: &str) -> Result<()> {
        Ok(writeln!(self.send, "{operation}")?)
    }

    fn receive(&mut self) -> Result<String> {
        self.replies.next().context("it has ended")?.context("its output cannot be read")
    }

    fn request(&mut self, operation: &str) -> Result<String> {
        self.send(operation)?;
        self.receive()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The programs, and the operations done so far.
#[derive(Debug)]
pub struct DiskComparison<'a> {
    cluster: &'a Cluster,
    local: Worker,
    /// A local program of node 2 in `/tmp/here`.
    witness: Worker,
    remote: Vec<Worker>,
    nodes: Vec<u16>,
    done: VecDeque<String>,
    steps: u64,
    /// Operations that failed with EIO because the node was unreachable.
    pub lost: u64,
}

impl<'a> DiskComparison<'a> {
    /// Starts the programs in empty directories.
    ///
    /// # Errors
    /// If /mfs is not mounted, or python3 is missing.
    pub fn start(cluster: &'a Cluster, nodes: &[u16]) -> Result<Self> {
        let fresh = "rm -rf /tmp/there /tmp/here && mkdir -m 777 /tmp/there /tmp/here";
        cluster.run(SERVER, &["sh", "-c", fresh])?;
        let remote = nodes
            .iter()
            .map(|node| Worker::start(cluster, *node, "/mfs/2/tmp/here"))
            .collect::<Result<_>>()?;
        let local = Worker::start(cluster, SERVER, "/tmp/there")?;
        let witness = Worker::start(cluster, SERVER, "/tmp/here")?;
        let (nodes, done) = (nodes.to_vec(), VecDeque::new());
        Ok(Self { cluster, local, witness, remote, nodes, done, steps: 0, lost: 0 })
    }

    fn note(&mut self, line: String) {
        self.steps += 1;
        self.done.push_back(format!("{:6} {line}", self.steps));
        if self.done.len() > MAX_SHOWN_OPERATIONS {
            self.done.pop_front();
        }
    }

    /// The last operations, for the failure message.
    fn history(&self) -> String {
        let lines: Vec<&str> = self.done.iter().map(String::as_str).collect();
        lines.join("\n")
    }

    /// Has one remote program and the local one do an operation; returns their reply.
    ///
    /// # Errors
    /// If the replies differ.
    pub fn run_both(&mut self, client: usize, operation: &str) -> Result<String> {
        let reply = self.remote(client)?.request(operation)?;
        self.compare(client, operation, &reply)?;
        Ok(reply)
    }

    fn remote(&mut self, client: usize) -> Result<&mut Worker> {
        self.remote.get_mut(client).context("no such program")
    }

    fn compare(&mut self, client: usize, operation: &str, reply: &str) -> Result<()> {
        let local_reply = self.local.request(operation)?;
        let node = self.nodes.get(client).context("no such program")?;
        self.note(format!("node {node}: {operation} -> {reply}"));
        if reply != local_reply {
            bail!("{}\non the disk: {local_reply}", self.history());
        }
        Ok(())
    }

    /// As `run_both`, while a cable is cut. If the cable is cut for a `duration` only, the
    /// operation must succeed. Otherwise the operation may fail with EIO; the cables are then
    /// healed, and the operation must have been done completely or not at all.
    ///
    /// # Errors
    /// As `run_both`.
    pub fn run_both_with_cut(
        &mut self,
        client: usize,
        operation: &str,
        cable: Cable,
        duration: Option<Duration>,
    ) -> Result<()> {
        self.cluster.lab().cut(cable)?;
        self.note(format!("cut {cable:?} for {duration:?}"));
        self.remote(client)?.send(operation)?;
        if let Some(duration) = duration {
            std::thread::sleep(duration);
            self.cluster.lab().heal_all()?;
        }
        let reply = self.remote(client)?.receive()?;
        self.cluster.lab().heal_all()?;
        if duration.is_some() || reply != "EIO" {
            return self.compare(client, operation, &reply);
        }
        self.lost += 1;
        self.note(format!("{operation} -> EIO"));
        let begun = Instant::now();
        for client in 0..self.remote.len() {
            while self.remote(client)?.request("stat .")? == "EIO" {
                ensure!(begun.elapsed() < RECONNECT_TIMEOUT, "it does not come back\n{}", self.history());
            }
        }
        let tree = self.witness.request("tree")?;
        if tree == self.local.request("tree")? {
            return Ok(());
        }
        let _outcome = self.local.request(operation)?;
        if let Some(name) = operation.strip_prefix("open ").and_then(|rest| rest.split(' ').next()) {
            self.local.request(&format!("close {name}"))?;
        }
        let local_tree = self.local.request("tree")?;
        ensure!(tree == local_tree, "half done:\n{}\nis: {tree}\ndisk: {local_tree}", self.history());
        Ok(())
    }

    /// Compares the trees as seen through /mfs and on the disk.
    ///
    /// # Errors
    /// If a program sees another tree than the local one.
    pub fn compare_trees(&mut self) -> Result<()> {
        let local_reply = self.local.request("tree")?;
        ensure!(
            self.witness.request("tree")? == local_reply,
            "the server sees another tree\n{}",
            self.history()
        );
        for client in 0..self.remote.len() {
            let seen = self.remote(client)?.request("tree")?;
            ensure!(
                seen == local_reply,
                "program {client} sees {seen}\nexpected {local_reply}\n{}",
                self.history()
            );
        }
        Ok(())
    }
}

/// Deterministic pseudo-random numbers (splitmix64).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below this one.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }

    /// A random element.
    pub fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        let at = usize::try_from(self.below(all.len() as u64)).unwrap_or(0);
        all[at]
    }
}
