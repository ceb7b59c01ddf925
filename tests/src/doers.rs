//! Operations on files, told one by one to programs that do them through /mfs, and to one that does the same on the disk.
//!
//! Node 2 has two directories: `/tmp/there`, in which a program of its own does everything, and `/tmp/here`, in which those
//! on the other nodes do it by turns through `/mfs/2/tmp/here`. Each must say what the first one says.

use crate::cluster::Cluster;
use anyhow::{Context, Result, bail, ensure};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};
use tern_lab::Cable;

/// Whose files they are.
const SERVER: u16 = 2;

/// How long a node may take to be back after its cables are whole.
const BACK: Duration = Duration::from_secs(20);

/// So many operations before one that failed are shown.
const SHOWN: usize = 25;

/// A program that does what it is told.
#[derive(Debug)]
struct Doer {
    child: Child,
    tell: ChildStdin,
    says: Lines<BufReader<ChildStdout>>,
}

impl Doer {
    fn start(cluster: &Cluster, node: u16, directory: &str) -> Result<Self> {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tasks/doer.py");
        let mut command = cluster.command(node, "/usr/bin/python3");
        let mut child =
            command.arg(program).arg(directory).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let tell = child.stdin.take().context("no input")?;
        let says = BufReader::new(child.stdout.take().context("no output")?).lines();
        let mut doer = Self { child, tell, says };
        ensure!(doer.hear()? == "ready", "it does not begin");
        Ok(doer)
    }

    fn tell(&mut self, deed: &str) -> Result<()> {
        Ok(writeln!(self.tell, "{deed}")?)
    }

    fn hear(&mut self) -> Result<String> {
        self.says.next().context("it has ended")?.context("it cannot be heard")
    }

    fn ask(&mut self, deed: &str) -> Result<String> {
        self.tell(deed)?;
        self.hear()
    }
}

impl Drop for Doer {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The programs, and what they have done.
#[derive(Debug)]
pub struct Doers<'a> {
    cluster: &'a Cluster,
    disk: Doer,
    /// One on the disk that sees the other directory.
    witness: Doer,
    away: Vec<Doer>,
    nodes: Vec<u16>,
    done: VecDeque<String>,
    steps: u64,
    /// Operations that were answered with EIO, as the node was not there.
    pub lost: u64,
}

impl<'a> Doers<'a> {
    /// Starts them, in directories that are empty.
    ///
    /// # Errors
    /// If the tree is not mounted there, or python3 is missing.
    pub fn start(cluster: &'a Cluster, nodes: &[u16]) -> Result<Self> {
        let fresh = "rm -rf /tmp/there /tmp/here && mkdir -m 777 /tmp/there /tmp/here";
        cluster.run(SERVER, &["sh", "-c", fresh])?;
        let away =
            nodes.iter().map(|node| Doer::start(cluster, *node, "/mfs/2/tmp/here")).collect::<Result<_>>()?;
        let disk = Doer::start(cluster, SERVER, "/tmp/there")?;
        let witness = Doer::start(cluster, SERVER, "/tmp/here")?;
        let (nodes, done) = (nodes.to_vec(), VecDeque::new());
        Ok(Self { cluster, disk, witness, away, nodes, done, steps: 0, lost: 0 })
    }

    fn note(&mut self, line: String) {
        self.steps += 1;
        self.done.push_back(format!("{:6} {line}", self.steps));
        if self.done.len() > SHOWN {
            self.done.pop_front();
        }
    }

    /// What was done last, for who reads of a failure.
    fn story(&self) -> String {
        let lines: Vec<&str> = self.done.iter().map(String::as_str).collect();
        lines.join("\n")
    }

    /// Has one of them do something, and the one on the disk as well; what both said.
    ///
    /// # Errors
    /// If they do not say the same.
    pub fn both(&mut self, who: usize, deed: &str) -> Result<String> {
        let said = self.away(who)?.ask(deed)?;
        self.compare(who, deed, &said)?;
        Ok(said)
    }

    fn away(&mut self, who: usize) -> Result<&mut Doer> {
        self.away.get_mut(who).context("nobody is there")
    }

    fn compare(&mut self, who: usize, deed: &str, said: &str) -> Result<()> {
        let wanted = self.disk.ask(deed)?;
        let node = self.nodes.get(who).context("nobody is there")?;
        self.note(format!("node {node}: {deed} -> {said}"));
        if said != wanted {
            bail!("{}\non the disk: {wanted}", self.story());
        }
        Ok(())
    }

    /// The same while some cables are cut. If they are cut only for a moment, nobody must notice; else the answer may be
    /// EIO, after which the cables are healed, and it must have been done wholly or not at all.
    ///
    /// # Errors
    /// As `both`.
    pub fn both_without(
        &mut self,
        who: usize,
        deed: &str,
        cable: Cable,
        moment: Option<Duration>,
    ) -> Result<()> {
        self.cluster.lab().cut(cable)?;
        self.note(format!("cut {cable:?} for {moment:?}"));
        self.away(who)?.tell(deed)?;
        if let Some(moment) = moment {
            std::thread::sleep(moment);
            self.cluster.lab().heal_all()?;
        }
        let said = self.away(who)?.hear()?;
        self.cluster.lab().heal_all()?;
        if moment.is_some() || said != "EIO" {
            return self.compare(who, deed, &said);
        }
        self.lost += 1;
        self.note(format!("{deed} -> EIO"));
        let begun = Instant::now();
        for who in 0..self.away.len() {
            while self.away(who)?.ask("stat .")? == "EIO" {
                ensure!(begun.elapsed() < BACK, "it does not come back\n{}", self.story());
            }
        }
        let is = self.witness.ask("tree")?;
        if is == self.disk.ask("tree")? {
            return Ok(());
        }
        let _outcome = self.disk.ask(deed)?;
        if let Some(name) = deed.strip_prefix("open ").and_then(|rest| rest.split(' ').next()) {
            self.disk.ask(&format!("close {name}"))?;
        }
        let would_be = self.disk.ask("tree")?;
        ensure!(is == would_be, "half done:\n{}\nis: {is}\ndisk: {would_be}", self.story());
        Ok(())
    }

    /// Compares what there is, through /mfs and on the disk.
    ///
    /// # Errors
    /// If anybody sees another tree than there should be.
    pub fn compare_trees(&mut self) -> Result<()> {
        let wanted = self.disk.ask("tree")?;
        ensure!(self.witness.ask("tree")? == wanted, "the disk has another tree\n{}", self.story());
        for who in 0..self.away.len() {
            let seen = self.away(who)?.ask("tree")?;
            ensure!(seen == wanted, "doer {who} sees {seen}\nthere is {wanted}\n{}", self.story());
        }
        Ok(())
    }
}

/// Numbers that look like chance and are the same each time (splitmix64).
#[derive(Debug)]
pub struct Chance(u64);

impl Chance {
    /// What comes of this seed.
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

    /// One of these.
    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        let at = usize::try_from(self.below(all.len() as u64)).unwrap_or(0);
        all[at]
    }
}
