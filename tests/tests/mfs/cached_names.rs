//! Names cached by a node while others change what they refer to: open must find the current file.
//!
//! TERN_ROUNDS=N sets the number of rounds.

use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use tern_tests::cluster::Cluster;

/// Performs an operation in a directory for each line, and replies with a line.
const WORKER: &str = r#"
import errno, os, sys
os.chdir(sys.argv[1])
if len(sys.argv) > 2:
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
def put(name, text):
    with open(name, "w") as file:
        file.write(text)
def replace(name, text):
    put(name + ".new", text)
    os.rename(name + ".new", name)
def get(name):
    with open(name) as file:
        return file.read()
def kind(name):
    os.stat(name)
    return "there"
operations = {"put": put, "replace": replace, "get": get, "stat": kind, "remove": os.unlink, "mkdir": os.mkdir, "rmdir": os.rmdir,
         "rename": os.rename, "link": os.link, "symlink": os.symlink, "create": lambda name: os.close(os.open(name, os.O_CREAT | os.O_EXCL)),
         "chmod": lambda name, mode: os.chmod(name, int(mode, 8)), "list": lambda name: " ".join(sorted(os.listdir(name))),
         "mode": lambda name: oct(os.stat(name).st_mode & 0o777), "scan": lambda name: " ".join(sorted(f"{e.name}:{e.stat().st_size}" for e in os.scandir(name)))}
for line in sys.stdin:
    operation, *words = line.split()
    try:
        said = operations[operation](*words)
    except OSError as error:
        said = errno.errorcode[error.errno]
    print("done" if said is None else said, flush=True)
"#;

/// A running `WORKER`.
struct Worker {
    process: Child,
    input: ChildStdin,
    reply: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    fn start(cluster: &Cluster, node: u16, words: &[&str]) -> Result<Self> {
        let mut command = cluster.command(node, "/usr/bin/python3");
        command.args(["-c", WORKER]).args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let input = process.stdin.take().context("no stdin")?;
        let reply = BufReader::new(process.stdout.take().context("no stdout")?).lines();
        Ok(Self { process, input, reply })
    }

    fn request(&mut self, request: &str) -> Result<String> {
        writeln!(self.input, "{request}")?;
        Ok(self.reply.next().context("it has ended")??)
    }

    /// Performs an operation that must succeed.
    fn must(&mut self, request: &str) -> Result<()> {
        let reply = self.request(request)?;
        ensure!(reply == "done", "{request}: {reply}");
        Ok(())
    }

    fn expect(&mut self, request: &str, wanted: &str) -> Result<()> {
        let reply = self.request(request)?;
        ensure!(reply == wanted, "{request}: {reply} instead of {wanted}");
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ended = self.process.kill();
        let _reaped = self.process.wait();
    }
}

fn rounds() -> u32 {
    std::env::var("TERN_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(100)
}

/// A setting of node 2, and an environment variable for the nodes that mount its files.
#[derive(Debug, Clone, Copy)]
struct Setup {
    rule: &'static str,
    variable: &'static str,
}

/// Changes by local programs are reported, and the kernel can be told to invalidate names.
const DEFAULT_SETUP: Setup = Setup { rule: "", variable: "TERN_LOG=info" };

/// Changes by local programs are not reported.
const WITHOUT_NOTICES: Setup = Setup { rule: "mfs_notices = false", ..DEFAULT_SETUP };

/// As before Linux 6.16: `tern-mfs` caches names instead of the kernel.
const OLD_KERNEL: Setup = Setup { variable: "TERN_NO_EPOCH=1", ..DEFAULT_SETUP };
const OLD_KERNEL_WITHOUT_NOTICES: Setup = Setup { variable: OLD_KERNEL.variable, ..WITHOUT_NOTICES };

/// Nodes 1 and 3 have mounted /mfs, and node 2 has the files.
fn cluster(name: &str, kind: Setup) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(name, 3)?;
    cluster.run(2, &["sh", "-c", &format!("echo '{}' >> /etc/tern/ternd.toml", kind.rule)])?;
    for node in [1, 3] {
        cluster.run(node, &["mkdir", "-p", "/mfs"])?;
        cluster.run(node, &["env", kind.variable, "mount.mfs", "mymfs", "/mfs"])?;
    }
    cluster.run(2, &["mkdir", "-p", "-m", "777", "/tmp/names/deep/down"])?;
    Ok(cluster)
}

/// The program that looks names up, and two that change them: one local, one on another node.
fn workers(cluster: &Cluster) -> Result<(Worker, [Worker; 2])> {
    let reader = Worker::start(cluster, 1, &["/mfs/2/tmp/names"])?;
    let here = Worker::start(cluster, 2, &["/tmp/names"])?;
    let other = Worker::start(cluster, 3, &["/mfs/2/tmp/names"])?;
    Ok((reader, [here, other]))
}

#[test]
fn open_after_remote_change_finds_current_file() {
    opens(&cluster("mfsnames", DEFAULT_SETUP).unwrap(), rounds()).unwrap();
}

fn opens(cluster: &Cluster, rounds: u32) -> Result<()> {
    let (mut reader, others) = workers(cluster)?;
    for mut other in others {
        for round in 0..rounds {
            let [first, second, third] = ["a", "b", "c"].map(|which| format!("{which}{round:06}"));
            let mut turn = || {
                let file = "deep/down/file";
                other.must(&format!("put {file} {first}"))?;
                // The name, the attributes and the content are cached.
                reader.expect(&format!("get {file}"), &first)?;
                reader.expect(&format!("get {file}"), &first)?;
                other.must(&format!("put {file} {second}"))?;
                reader.expect(&format!("get {file}"), &second)?;
                other.must(&format!("replace {file} {third}"))?;
                reader.expect(&format!("get {file}"), &third)?;
                // The same for a second name of the file.
                other.must(&format!("link {file} deep/second"))?;
                reader.expect("get deep/second", &third)?;
                other.must(&format!("replace deep/second {first}"))?;
                reader.expect("get deep/second", &first)?;
                reader.expect(&format!("get {file}"), &third)?;
                other.must(&format!("remove {file}"))?;
                reader.expect(&format!("get {file}"), "ENOENT")?;
                // A negative entry is not cached.
                other.must(&format!("put {file} {second}"))?;
                reader.expect(&format!("get {file}"), &second)?;
                other.must(&format!("remove {file}"))?;
                reader.must(&format!("create {file}"))?;
                other.must("remove deep/second")
            };
            turn().with_context(|| format!("round {round}"))?;
        }
    }
    Ok(())
}

#[test]
fn path_lookup_follows_remote_renames() {
    paths(&cluster("mfspaths", DEFAULT_SETUP).unwrap(), rounds()).unwrap();
}

fn paths(cluster: &Cluster, rounds: u32) -> Result<()> {
    let (mut reader, others) = workers(cluster)?;
    for mut other in others {
        for round in 0..rounds {
            let [first, second] = ["a", "b"].map(|which| format!("{which}{round:06}"));
            let mut turn = || {
                // A directory is renamed, and another one takes its name.
                other.must("mkdir one")?;
                other.must("mkdir one/two")?;
                other.must(&format!("put one/two/file {first}"))?;
                reader.expect("get one/two/file", &first)?;
                other.must("rename one old")?;
                reader.expect("get one/two/file", "ENOENT")?;
                other.must("mkdir one")?;
                other.must("mkdir one/two")?;
                reader.expect("get one/two/file", "ENOENT")?;
                other.must(&format!("put one/two/file {second}"))?;
                reader.expect("get one/two/file", &second)?;
                reader.expect("get old/two/file", &first)?;
                // Files are created, changed and removed in the directory that has the name now.
                other.must("rename one other")?;
                other.must("rename old one")?;
                reader.must("put one/two/new new")?;
                reader.must("chmod one/two/file 640")?;
                other.expect("list one/two", "file new")?;
                other.expect("mode one/two/file", "0o640")?;
                other.must("rename one old")?;
                other.must("rename other one")?;
                reader.must("remove one/two/file")?;
                other.expect("get old/two/file", &first)?;
                other.expect("list one/two", "")?;
                // The same name, another directory.
                other.must("rmdir one/two")?;
                other.must("mkdir one/two")?;
                reader.must("put one/two/file again")?;
                other.expect("get one/two/file", "again")?;
                // A symbolic link is replaced.
                other.must("symlink one current")?;
                reader.expect("get current/two/file", "again")?;
                other.must("symlink old next")?;
                other.must("rename next current")?;
                reader.expect("get current/two/file", &first)?;
                reader.expect("scan old/two", "file:7 new:3")?;
                for gone in ["current", "one/two/file", "old/two/file", "old/two/new"] {
                    other.must(&format!("remove {gone}"))?;
                }
                for gone in ["one/two", "one", "old/two", "old"] {
                    other.must(&format!("rmdir {gone}"))?;
                }
                Ok(())
            };
            let turn: Result<()> = turn();
            turn.with_context(|| format!("round {round}"))?;
        }
    }
    Ok(())
}

#[test]
fn access_after_remote_chmod_is_refused() {
    may_not(&cluster("mfsmayno", DEFAULT_SETUP).unwrap(), rounds()).unwrap();
}

fn may_not(cluster: &Cluster, rounds: u32) -> Result<()> {
    let (_, others) = workers(cluster)?;
    let mut reader = Worker::start(cluster, 1, &["/mfs/2/tmp/names", "1234"])?;
    for mut other in others {
        for round in 0..rounds / 4 {
            let mut turn = || {
                other.must("chmod deep 755")?;
                other.must("put deep/down/file text")?;
                other.must("chmod deep/down/file 644")?;
                reader.expect("get deep/down/file", "text")?;
                other.must("chmod deep 700")?;
                reader.expect("get deep/down/file", "EACCES")?;
                other.must("chmod deep 755")?;
                reader.expect("get deep/down/file", "text")?;
                other.must("chmod deep/down/file 600")?;
                reader.expect("get deep/down/file", "EACCES")?;
                other.must("remove deep/down/file")
            };
            turn().with_context(|| format!("round {round}"))?;
        }
    }
    Ok(())
}

/// A directory is renamed while it is a program's working directory.
#[test]
fn working_directory_survives_remote_rename() {
    stays(&cluster("mfsstays", DEFAULT_SETUP).unwrap(), rounds()).unwrap();
}

fn stays(cluster: &Cluster, rounds: u32) -> Result<()> {
    let (mut reader, others) = workers(cluster)?;
    for mut other in others {
        for round in 0..rounds / 4 {
            let mut turn = || {
                other.must("mkdir place")?;
                other.must("put place/file text")?;
                reader.expect("get place/file", "text")?;
                let mut inside = Worker::start(cluster, 1, &["/mfs/2/tmp/names/place"])?;
                inside.expect("get file", "text")?;
                other.must("rename place moved")?;
                inside.expect("get file", "text")?;
                inside.must("put new more")?;
                inside.must("chmod file 600")?;
                other.must("rename moved place")?;
                inside.must("remove new")?;
                inside.must("remove file")?;
                other.must("rmdir place")
            };
            turn().with_context(|| format!("round {round}"))?;
        }
    }
    Ok(())
}

#[test]
fn names_are_coherent_without_notices_and_on_older_kernels() {
    for (name, kind) in
        [("mfsuntold", WITHOUT_NOTICES), ("mfsold", OLD_KERNEL), ("mfsolduntold", OLD_KERNEL_WITHOUT_NOTICES)]
    {
        let cluster = cluster(name, kind).unwrap();
        for (which, all) in [
            ("opens", opens as fn(&Cluster, u32) -> Result<()>),
            ("paths", paths),
            ("may not", may_not),
            ("stays", stays),
        ] {
            println!("{name}: {which}");
            all(&cluster, rounds().div_ceil(5)).unwrap();
        }
    }
}

/// Two programs create, rename and remove files in one directory at once; neither may wait for the
/// other's lease again and again.
#[test]
fn concurrent_writers_in_one_directory_do_not_delay_each_other() {
    let cluster = cluster("mfsboth", DEFAULT_SETUP).unwrap();
    let (mut one, [_, mut other]) = workers(&cluster).unwrap();
    let begun = std::time::Instant::now();
    let run = |worker: &mut Worker, name: &str| -> Result<()> {
        for round in 0..rounds() {
            worker.must(&format!("put deep/{name} {round}"))?;
            worker.expect(&format!("get deep/{name}"), &round.to_string())?;
            worker.must(&format!("rename deep/{name} deep/{name}.old"))?;
            worker.must(&format!("remove deep/{name}.old"))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| run(&mut one, "one"));
        run(&mut other, "other").unwrap();
        first.join().unwrap().unwrap();
    });
    let each = begun.elapsed() / rounds();
    assert!(each < std::time::Duration::from_millis(400), "a round takes {each:?}");
}
