//! Names that a node believes while others change what they mean: what is opened is what is there.
//!
//! TERN_ROUNDS=N for more.

use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use tern_tests::cluster::Cluster;

/// Does in a directory what it is told to, line by line, and says what came of it.
const HAND: &str = r#"
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
deeds = {"put": put, "replace": replace, "get": get, "stat": kind, "remove": os.unlink, "mkdir": os.mkdir, "rmdir": os.rmdir,
         "rename": os.rename, "link": os.link, "symlink": os.symlink, "create": lambda name: os.close(os.open(name, os.O_CREAT | os.O_EXCL)),
         "chmod": lambda name, mode: os.chmod(name, int(mode, 8)), "list": lambda name: " ".join(sorted(os.listdir(name))),
         "mode": lambda name: oct(os.stat(name).st_mode & 0o777), "scan": lambda name: " ".join(sorted(f"{e.name}:{e.stat().st_size}" for e in os.scandir(name)))}
for line in sys.stdin:
    deed, *words = line.split()
    try:
        said = deeds[deed](*words)
    except OSError as error:
        said = errno.errorcode[error.errno]
    print("done" if said is None else said, flush=True)
"#;

/// One who does what he is told, in one directory of a node.
struct Hand {
    process: Child,
    ask: ChildStdin,
    said: Lines<BufReader<ChildStdout>>,
}

impl Hand {
    fn start(cluster: &Cluster, node: u16, words: &[&str]) -> Result<Self> {
        let mut command = cluster.command(node, "/usr/bin/python3");
        command.args(["-c", HAND]).args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let ask = process.stdin.take().context("no stdin")?;
        let said = BufReader::new(process.stdout.take().context("no stdout")?).lines();
        Ok(Self { process, ask, said })
    }

    fn does(&mut self, deed: &str) -> Result<String> {
        writeln!(self.ask, "{deed}")?;
        Ok(self.said.next().context("it has ended")??)
    }

    /// Does what must succeed.
    fn must(&mut self, deed: &str) -> Result<()> {
        let said = self.does(deed)?;
        ensure!(said == "done", "{deed}: {said}");
        Ok(())
    }

    fn hears(&mut self, deed: &str, wanted: &str) -> Result<()> {
        let said = self.does(deed)?;
        ensure!(said == wanted, "{deed}: {said}, and not {wanted}");
        Ok(())
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        let _ended = self.process.kill();
        let _reaped = self.process.wait();
    }
}

fn rounds() -> u32 {
    std::env::var("TERN_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(100)
}

/// A rule of node 2, and a variable of who mounts its files.
#[derive(Debug, Clone, Copy)]
struct Kind {
    rule: &'static str,
    variable: &'static str,
}

/// Changes of local programs are told of, and the kernel here can be told to forget names.
const AS_IT_IS: Kind = Kind { rule: "", variable: "TERN_LOG=info" };

/// Nobody is told of them.
const UNTOLD: Kind = Kind { rule: "mfs_notices = false", ..AS_IT_IS };

/// As before Linux 6.16: `tern-mfs` keeps names in the kernel's place.
const OLD: Kind = Kind { variable: "TERN_NO_EPOCH=1", ..AS_IT_IS };
const OLD_AND_UNTOLD: Kind = Kind { variable: OLD.variable, ..UNTOLD };

/// Node 1 looks through /mfs; node 3 does as well, and node 2 has the files.
fn cluster(name: &str, kind: Kind) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(name, 3)?;
    cluster.run(2, &["sh", "-c", &format!("echo '{}' >> /etc/tern/ternd.toml", kind.rule)])?;
    for node in [1, 3] {
        cluster.run(node, &["mkdir", "-p", "/mfs"])?;
        cluster.run(node, &["env", kind.variable, "mount.mfs", "mymfs", "/mfs"])?;
    }
    cluster.run(2, &["mkdir", "-p", "-m", "777", "/tmp/names/deep/down"])?;
    Ok(cluster)
}

/// Who looks, and both others.
fn hands(cluster: &Cluster) -> Result<(Hand, [Hand; 2])> {
    let looks = Hand::start(cluster, 1, &["/mfs/2/tmp/names"])?;
    let here = Hand::start(cluster, 2, &["/tmp/names"])?;
    let other = Hand::start(cluster, 3, &["/mfs/2/tmp/names"])?;
    Ok((looks, [here, other]))
}

#[test]
fn what_is_opened_is_what_is_there() {
    opens(&cluster("mfsnames", AS_IT_IS).unwrap(), rounds()).unwrap();
}

fn opens(cluster: &Cluster, rounds: u32) -> Result<()> {
    let (mut looks, others) = hands(cluster)?;
    for mut other in others {
        for round in 0..rounds {
            let [first, second, third] = ["a", "b", "c"].map(|which| format!("{which}{round:06}"));
            let mut turn = || {
                let file = "deep/down/file";
                other.must(&format!("put {file} {first}"))?;
                // The name, what it is like, and its content are kept.
                looks.hears(&format!("get {file}"), &first)?;
                looks.hears(&format!("get {file}"), &first)?;
                other.must(&format!("put {file} {second}"))?;
                looks.hears(&format!("get {file}"), &second)?;
                other.must(&format!("replace {file} {third}"))?;
                looks.hears(&format!("get {file}"), &third)?;
                // All of its names are.
                other.must(&format!("link {file} deep/second"))?;
                looks.hears("get deep/second", &third)?;
                other.must(&format!("replace deep/second {first}"))?;
                looks.hears("get deep/second", &first)?;
                looks.hears(&format!("get {file}"), &third)?;
                other.must(&format!("remove {file}"))?;
                looks.hears(&format!("get {file}"), "ENOENT")?;
                // And that there was nothing is not.
                other.must(&format!("put {file} {second}"))?;
                looks.hears(&format!("get {file}"), &second)?;
                other.must(&format!("remove {file}"))?;
                looks.must(&format!("create {file}"))?;
                other.must("remove deep/second")
            };
            turn().with_context(|| format!("round {round}"))?;
        }
    }
    Ok(())
}

#[test]
fn a_path_leads_where_it_leads_now() {
    paths(&cluster("mfspaths", AS_IT_IS).unwrap(), rounds()).unwrap();
}

fn paths(cluster: &Cluster, rounds: u32) -> Result<()> {
    let (mut looks, others) = hands(cluster)?;
    for mut other in others {
        for round in 0..rounds {
            let [first, second] = ["a", "b"].map(|which| format!("{which}{round:06}"));
            let mut turn = || {
                // A directory has another name, and another one has its.
                other.must("mkdir one")?;
                other.must("mkdir one/two")?;
                other.must(&format!("put one/two/file {first}"))?;
                looks.hears("get one/two/file", &first)?;
                other.must("rename one old")?;
                looks.hears("get one/two/file", "ENOENT")?;
                other.must("mkdir one")?;
                other.must("mkdir one/two")?;
                looks.hears("get one/two/file", "ENOENT")?;
                other.must(&format!("put one/two/file {second}"))?;
                looks.hears("get one/two/file", &second)?;
                looks.hears("get old/two/file", &first)?;
                // What is made, changed and removed is so where the path leads.
                other.must("rename one other")?;
                other.must("rename old one")?;
                looks.must("put one/two/new new")?;
                looks.must("chmod one/two/file 640")?;
                other.hears("list one/two", "file new")?;
                other.hears("mode one/two/file", "0o640")?;
                other.must("rename one old")?;
                other.must("rename other one")?;
                looks.must("remove one/two/file")?;
                other.hears("get old/two/file", &first)?;
                other.hears("list one/two", "")?;
                // The same name, another directory.
                other.must("rmdir one/two")?;
                other.must("mkdir one/two")?;
                looks.must("put one/two/file again")?;
                other.hears("get one/two/file", "again")?;
                // A link leads elsewhere.
                other.must("symlink one current")?;
                looks.hears("get current/two/file", "again")?;
                other.must("symlink old next")?;
                other.must("rename next current")?;
                looks.hears("get current/two/file", &first)?;
                looks.hears("scan old/two", "file:7 new:3")?;
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
fn who_may_not_any_more_does_not() {
    may_not(&cluster("mfsmayno", AS_IT_IS).unwrap(), rounds()).unwrap();
}

fn may_not(cluster: &Cluster, rounds: u32) -> Result<()> {
    let (_, others) = hands(cluster)?;
    let mut looks = Hand::start(cluster, 1, &["/mfs/2/tmp/names", "1234"])?;
    for mut other in others {
        for round in 0..rounds / 4 {
            let mut turn = || {
                other.must("chmod deep 755")?;
                other.must("put deep/down/file text")?;
                other.must("chmod deep/down/file 644")?;
                looks.hears("get deep/down/file", "text")?;
                other.must("chmod deep 700")?;
                looks.hears("get deep/down/file", "EACCES")?;
                other.must("chmod deep 755")?;
                looks.hears("get deep/down/file", "text")?;
                other.must("chmod deep/down/file 600")?;
                looks.hears("get deep/down/file", "EACCES")?;
                other.must("remove deep/down/file")
            };
            turn().with_context(|| format!("round {round}"))?;
        }
    }
    Ok(())
}

/// A directory whose own name changes while somebody is in it.
#[test]
fn who_is_in_a_directory_stays_there() {
    stays(&cluster("mfsstays", AS_IT_IS).unwrap(), rounds()).unwrap();
}

fn stays(cluster: &Cluster, rounds: u32) -> Result<()> {
    let (mut looks, others) = hands(cluster)?;
    for mut other in others {
        for round in 0..rounds / 4 {
            let mut turn = || {
                other.must("mkdir place")?;
                other.must("put place/file text")?;
                looks.hears("get place/file", "text")?;
                let mut inside = Hand::start(cluster, 1, &["/mfs/2/tmp/names/place"])?;
                inside.hears("get file", "text")?;
                other.must("rename place moved")?;
                inside.hears("get file", "text")?;
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
fn all_this_is_so_where_nobody_is_told_and_on_older_kernels() {
    for (name, kind) in [("mfsuntold", UNTOLD), ("mfsold", OLD), ("mfsolduntold", OLD_AND_UNTOLD)] {
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

/// Two make, rename and remove files in one directory at once; neither may wait for the other's term again and again.
#[test]
fn two_in_one_directory_do_not_stand_in_each_others_way() {
    let cluster = cluster("mfsboth", AS_IT_IS).unwrap();
    let (mut one, [_, mut other]) = hands(&cluster).unwrap();
    let begun = std::time::Instant::now();
    let run = |hand: &mut Hand, name: &str| -> Result<()> {
        for round in 0..rounds() {
            hand.must(&format!("put deep/{name} {round}"))?;
            hand.hears(&format!("get deep/{name}"), &round.to_string())?;
            hand.must(&format!("rename deep/{name} deep/{name}.old"))?;
            hand.must(&format!("remove deep/{name}.old"))?;
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
