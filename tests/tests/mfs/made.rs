//! Files that are made only if there are none of that name: what a look at the name would have found is found without it.

use anyhow::Result;
use tern_tests::asked::Asked;
use tern_tests::cluster::Cluster;

/// How often one makes a file that another one has made just now.
const ROUNDS: u32 = 250;

/// How many files are made for their trips to be counted.
const COUNTED: u64 = 400;

/// How many files are made before what was changed elsewhere is believed to be known.
const BETWEEN: u32 = 30;

/// Does what each line says, in one directory and as one user, and answers each with a line.
const DOER: &str = r#"
import errno, os, sys
os.chdir(sys.argv[1])
if len(sys.argv) > 2:
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
kept = []
def make(name, *_):
    file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(file, b"mine")
    os.close(file)
def many(count):
    lines = lambda: [line.split() for line in open("/proc/net/dev") if "eth0" in line]
    make("first")
    before = int(lines()[0][10])
    for number in range(int(count)):
        kept.append(os.open(f"n{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    return int(lines()[0][10]) - before
def put(name, text):
    with open(name, "w") as file:
        file.write(text)
def get(name):
    with open(name) as file:
        return file.read()
def lies_at(name):
    os.close(os.open(name, os.O_PATH | os.O_CREAT | os.O_EXCL))
def made_below(place, name):
    at = os.open(place, os.O_RDONLY)
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, dir_fd=at))
    finally:
        os.close(at)
deeds = {"make": make, "many": many, "put": put, "get": get, "path": lies_at, "below": made_below, "mkdir": os.mkdir, "fifo": os.mkfifo,
         "symlink": os.symlink, "remove": os.unlink, "rename": os.rename, "chmod": lambda name, mode: os.chmod(name, int(mode, 8)),
         "chown": lambda name, who: os.chown(name, int(who), int(who)), "stat": lambda name: oct(os.stat(name).st_mode)}
for line in sys.stdin:
    deed, *words = line.split()
    try:
        said = deeds[deed](*words)
    except OSError as error:
        said = errno.errorcode[error.errno]
    print("done" if said is None else said, flush=True)
"#;

/// Nodes 1 and 3 see the files of node 2.
fn cluster(name: &str, variable: &str) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(name, 3)?;
    for node in [1, 3] {
        cluster.run(node, &["mkdir", "-p", "/mfs"])?;
        cluster.run(node, &["env", variable, "mount.mfs", "mymfs", "/mfs"])?;
    }
    cluster.run(2, &["mkdir", "-p", "-m", "777", "/tmp/made"])?;
    Ok(cluster)
}

fn doer(cluster: &Cluster, node: u16, words: &[&str]) -> Result<Asked> {
    let program = ["170", "/usr/bin/python3", "-c", DOER];
    Asked::start(cluster.command(node, "timeout").args(program).args(words))
}

/// What does a deed says.
fn hears(doer: &mut Asked, deed: &str, wanted: &str) {
    assert_eq!(doer.does(deed), wanted, "{deed}");
}

#[test]
fn what_another_one_has_made_is_there() {
    for (name, variable) in [("mfsmade", "TERN_LOG=info"), ("mfsmadeold", "TERN_NO_EPOCH=1")] {
        let cluster = cluster(name, variable).unwrap();
        let [mut maker, mut far] = [1, 3].map(|node| doer(&cluster, node, &["/mfs/2/tmp/made"]).unwrap());
        let mut local = doer(&cluster, 2, &["/tmp/made"]).unwrap();
        let of_all_kinds = ["put there text", "mkdir there", "symlink nowhere there", "fifo there"];
        for round in 0..ROUNDS {
            let there = of_all_kinds[round as usize % 4].replace("there", &format!("there{round}"));
            hears(&mut maker, &format!("make own{round}"), "done");
            hears(&mut local, &there, "done");
            hears(&mut maker, &format!("make there{round}"), "EEXIST");
            hears(&mut maker, &format!("make more{round}"), "done");
            hears(&mut far, &format!("make far{round}"), "done");
            hears(&mut maker, &format!("make far{round}"), "EEXIST");
            // What he makes is seen at once, and so is what is taken away.
            hears(&mut local, &format!("get own{round}"), "mine");
            hears(&mut far, &format!("get more{round}"), "mine");
            hears(&mut maker, &format!("make own{round}"), "EEXIST");
            hears(&mut local, &format!("remove own{round}"), "done");
            hears(&mut maker, &format!("make own{round}"), "done");
            hears(&mut maker, &format!("rename own{round} other{round}"), "done");
            hears(&mut maker, &format!("make own{round}"), "done");
            hears(&mut maker, &format!("make other{round}"), "EEXIST");
        }
        assert_eq!(local.does("get there0"), "text");
    }
}

#[test]
fn a_step_on_the_way_is_not_taken_for_the_name() {
    let cluster = cluster("mfsmadeway", "TERN_LOG=info").unwrap();
    let mut maker = doer(&cluster, 1, &["/mfs/2/tmp/made"]).unwrap();
    let mut local = doer(&cluster, 2, &["/tmp/made"]).unwrap();
    hears(&mut maker, "mkdir down", "done");
    for round in 0..20 {
        // The kernel here knows nothing of what the other one makes, and something was made just now beside it.
        hears(&mut local, &format!("mkdir down/s{round}"), "done");
        hears(&mut local, &format!("symlink down/s{round}/.. l{round}"), "done");
        hears(&mut local, &format!("symlink target{round} down/link{round}"), "done");
        // So many that what the local program has done is known by then to have been done.
        for number in 0..BETWEEN {
            hears(&mut maker, &format!("make down/own{round}-{number}"), "done");
        }
        hears(&mut maker, &format!("make l{round}/s{round}"), "EEXIST");
        // What may open what is there is no such call.
        hears(&mut maker, &format!("put down/link{round} text"), "done");
        hears(&mut local, &format!("get down/target{round}"), "text");
        for (name, deed) in [
            ("t", format!("make down/t{round}/t{round}")),
            ("u", format!("make down/u{round}/x")),
            ("v", format!("make ./down//v{round}/x")),
            ("w", format!("make down/../down/w{round}/x")),
            ("x", format!("below down x{round}/x")),
        ] {
            hears(&mut local, &format!("mkdir down/{name}{round}"), "done");
            hears(&mut maker, &format!("make down/{name}own{round}"), "done");
            hears(&mut maker, &deed, "done");
            hears(&mut maker, &deed, "EEXIST");
        }
        // It makes nothing, whatever else is said.
        hears(&mut local, &format!("put down/y{round} text"), "done");
        hears(&mut maker, &format!("make down/z{round}"), "done");
        hears(&mut maker, &format!("path down/y{round}"), "done");
        hears(&mut maker, &format!("path down/no{round}"), "ENOENT");
        hears(&mut maker, &format!("below down y{round}"), "EEXIST");
        hears(&mut maker, &format!("below down no{round}"), "done");
        hears(&mut maker, &format!("make down/no{round}"), "EEXIST");
    }
}

#[test]
fn who_may_make_nothing_any_more_is_told_what_is_there() {
    let cluster = cluster("mfsmademay", "TERN_LOG=info").unwrap();
    let [mut root, mut far] = [1, 3].map(|node| doer(&cluster, node, &["/mfs/2/tmp/made"]).unwrap());
    let mut local = doer(&cluster, 2, &["/tmp/made"]).unwrap();
    hears(&mut root, "mkdir his", "done");
    hears(&mut root, "chown his 1234", "done");
    let mut maker = doer(&cluster, 1, &["/mfs/2/tmp/made/his", "1234"]).unwrap();
    for round in 0..50 {
        let other = if round % 2 == 0 { &mut root } else { &mut far };
        hears(&mut maker, &format!("make own{round}"), "done");
        hears(&mut local, &format!("put his/there{round} text"), "done");
        hears(other, "chmod his 555", "done");
        hears(&mut maker, &format!("make there{round}"), "EEXIST");
        hears(&mut maker, &format!("make new{round}"), "EACCES");
        hears(other, "chmod his 755", "done");
    }
}

#[test]
fn a_file_that_is_made_is_one_trip() {
    let cluster = cluster("mfsmadetrips", "TERN_LOG=info").unwrap();
    let mut maker = doer(&cluster, 1, &["/mfs/2/tmp/made"]).unwrap();
    let said = maker.does(&format!("many {COUNTED}"));
    let packets: u64 = said.parse().unwrap_or_else(|_| panic!("{said}"));
    // With what else the nodes say to each other; with a look at each name they would be twice as many.
    assert!((COUNTED..COUNTED * 3 / 2).contains(&packets), "{packets} packets");
}
