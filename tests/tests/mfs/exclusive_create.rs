//! Exclusive creation: O_CREAT|O_EXCL without a preceding lookup gives the same result as after a
//! lookup.

use anyhow::Result;
use tern_tests::cluster::Cluster;
use tern_tests::drivers::line_client::LineClient;

/// Number of attempts to create a file that another program has just created.
const ROUNDS: u32 = 250;

/// Number of files created while packets are counted.
const COUNTED_FILES: u64 = 400;

/// Number of files created until a change by the local program counts as noticed.
const FILES_UNTIL_NOTICED: u32 = 30;

/// Performs an operation in one directory as one user for each line, and replies with a line.
const WORKER: &str = r#"
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
operations = {"make": make, "many": many, "put": put, "get": get, "path": lies_at, "below": made_below, "mkdir": os.mkdir, "fifo": os.mkfifo,
         "symlink": os.symlink, "remove": os.unlink, "rename": os.rename, "chmod": lambda name, mode: os.chmod(name, int(mode, 8)),
         "chown": lambda name, who: os.chown(name, int(who), int(who)), "stat": lambda name: oct(os.stat(name).st_mode)}
for line in sys.stdin:
    operation, *words = line.split()
    try:
        said = operations[operation](*words)
    except OSError as error:
        said = errno.errorcode[error.errno]
    print("done" if said is None else said, flush=True)
"#;

/// Nodes 1 and 3 have mounted the files of node 2.
fn cluster(name: &str, variable: &str) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(name, 3)?;
    for node in [1, 3] {
        cluster.run(node, &["mkdir", "-p", "/mfs"])?;
        cluster.run(node, &["env", variable, "mount.mfs", "mymfs", "/mfs"])?;
    }
    cluster.run(2, &["mkdir", "-p", "-m", "777", "/tmp/made"])?;
    Ok(cluster)
}

fn worker(cluster: &Cluster, node: u16, words: &[&str]) -> Result<LineClient> {
    let program = ["170", "/usr/bin/python3", "-c", WORKER];
    LineClient::start(cluster.command(node, "timeout").args(program).args(words))
}

/// Sends a request and compares the reply.
fn expect(worker: &mut LineClient, request: &str, wanted: &str) {
    assert_eq!(worker.request(request), wanted, "{request}");
}

#[test]
fn exclusive_create_finds_remote_files() {
    for (name, variable) in [("mfsmade", "TERN_LOG=info"), ("mfsmadeold", "TERN_NO_EPOCH=1")] {
        let cluster = cluster(name, variable).unwrap();
        let [mut maker, mut far] = [1, 3].map(|node| worker(&cluster, node, &["/mfs/2/tmp/made"]).unwrap());
        let mut local = worker(&cluster, 2, &["/tmp/made"]).unwrap();
        let of_all_kinds = ["put there text", "mkdir there", "symlink nowhere there", "fifo there"];
        for round in 0..ROUNDS {
            let there = of_all_kinds[round as usize % 4].replace("there", &format!("there{round}"));
            expect(&mut maker, &format!("make own{round}"), "done");
            expect(&mut local, &there, "done");
            expect(&mut maker, &format!("make there{round}"), "EEXIST");
            expect(&mut maker, &format!("make more{round}"), "done");
            expect(&mut far, &format!("make far{round}"), "done");
            expect(&mut maker, &format!("make far{round}"), "EEXIST");
            // What the maker creates is visible at once, and so is a removal.
            expect(&mut local, &format!("get own{round}"), "mine");
            expect(&mut far, &format!("get more{round}"), "mine");
            expect(&mut maker, &format!("make own{round}"), "EEXIST");
            expect(&mut local, &format!("remove own{round}"), "done");
            expect(&mut maker, &format!("make own{round}"), "done");
            expect(&mut maker, &format!("rename own{round} other{round}"), "done");
            expect(&mut maker, &format!("make own{round}"), "done");
            expect(&mut maker, &format!("make other{round}"), "EEXIST");
        }
        assert_eq!(local.request("get there0"), "text");
    }
}

#[test]
fn exclusive_create_intent_applies_only_to_the_last_component() {
    let cluster = cluster("mfsmadeway", "TERN_LOG=info").unwrap();
    let mut maker = worker(&cluster, 1, &["/mfs/2/tmp/made"]).unwrap();
    let mut local = worker(&cluster, 2, &["/tmp/made"]).unwrap();
    expect(&mut maker, "mkdir down", "done");
    for round in 0..20 {
        // The client's kernel has not seen what the local program makes, and a file was just
        // created beside it.
        expect(&mut local, &format!("mkdir down/s{round}"), "done");
        expect(&mut local, &format!("symlink down/s{round}/.. l{round}"), "done");
        expect(&mut local, &format!("symlink target{round} down/link{round}"), "done");
        // Enough files that the changes of the local program count as noticed.
        for number in 0..FILES_UNTIL_NOTICED {
            expect(&mut maker, &format!("make down/own{round}-{number}"), "done");
        }
        expect(&mut maker, &format!("make l{round}/s{round}"), "EEXIST");
        // An open without O_EXCL is no exclusive creation.
        expect(&mut maker, &format!("put down/link{round} text"), "done");
        expect(&mut local, &format!("get down/target{round}"), "text");
        for (name, request) in [
            ("t", format!("make down/t{round}/t{round}")),
            ("u", format!("make down/u{round}/x")),
            ("v", format!("make ./down//v{round}/x")),
            ("w", format!("make down/../down/w{round}/x")),
            ("x", format!("below down x{round}/x")),
        ] {
            expect(&mut local, &format!("mkdir down/{name}{round}"), "done");
            expect(&mut maker, &format!("make down/{name}own{round}"), "done");
            expect(&mut maker, &request, "done");
            expect(&mut maker, &request, "EEXIST");
        }
        // O_PATH creates nothing, whatever other flags are given.
        expect(&mut local, &format!("put down/y{round} text"), "done");
        expect(&mut maker, &format!("make down/z{round}"), "done");
        expect(&mut maker, &format!("path down/y{round}"), "done");
        expect(&mut maker, &format!("path down/no{round}"), "ENOENT");
        expect(&mut maker, &format!("below down y{round}"), "EEXIST");
        expect(&mut maker, &format!("below down no{round}"), "done");
        expect(&mut maker, &format!("make down/no{round}"), "EEXIST");
    }
}

#[test]
fn exclusive_create_without_permission_gives_eexist_or_eacces() {
    let cluster = cluster("mfsmademay", "TERN_LOG=info").unwrap();
    let [mut root, mut far] = [1, 3].map(|node| worker(&cluster, node, &["/mfs/2/tmp/made"]).unwrap());
    let mut local = worker(&cluster, 2, &["/tmp/made"]).unwrap();
    expect(&mut root, "mkdir owned", "done");
    expect(&mut root, "chown owned 1234", "done");
    let mut maker = worker(&cluster, 1, &["/mfs/2/tmp/made/owned", "1234"]).unwrap();
    for round in 0..50 {
        let other = if round % 2 == 0 { &mut root } else { &mut far };
        expect(&mut maker, &format!("make own{round}"), "done");
        expect(&mut local, &format!("put owned/there{round} text"), "done");
        expect(other, "chmod owned 555", "done");
        expect(&mut maker, &format!("make there{round}"), "EEXIST");
        expect(&mut maker, &format!("make new{round}"), "EACCES");
        expect(other, "chmod owned 755", "done");
    }
}

#[test]
fn exclusive_create_needs_one_request() {
    let cluster = cluster("mfsmadetrips", "TERN_LOG=info").unwrap();
    let mut maker = worker(&cluster, 1, &["/mfs/2/tmp/made"]).unwrap();
    let said = maker.request(&format!("many {COUNTED_FILES}"));
    let packets: u64 = said.parse().unwrap_or_else(|_| panic!("{said}"));
    // The count includes other traffic between the nodes. With a lookup for each name it would be
    // twice as high.
    assert!((COUNTED_FILES..COUNTED_FILES * 3 / 2).contains(&packets), "{packets} packets");
}
