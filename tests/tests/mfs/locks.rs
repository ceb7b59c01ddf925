//! Locks of whole files (flock) and of open files (`F_OFD_SETLK`) hold across the cluster, and end
//! with their owner.

use anyhow::Result;
use std::process::Stdio;
use tern_tests::cluster::Cluster;
use tern_tests::drivers::line_client::LineClient;

/// Performs an operation on one file for each line, and replies with a line. `f` is flock, `o` a
/// lock of the open file, `p` one of the process; the kind of lock and whether to wait follow.
/// `add` appends a number, and `look` prints size and content.
const WORKER: &str = r#"
import errno, fcntl, os, struct, sys
path, files = sys.argv[1], {}
def lock(file, how, wanted, waits):
    flag = {"shared": fcntl.LOCK_SH, "alone": fcntl.LOCK_EX, "none": fcntl.LOCK_UN}[wanted]
    if how != "o":
        call = fcntl.flock if how == "f" else fcntl.lockf
        return call(file, flag | (0 if waits or wanted == "none" else fcntl.LOCK_NB))
    kind = {"shared": fcntl.F_RDLCK, "alone": fcntl.F_WRLCK, "none": fcntl.F_UNLCK}[wanted]
    fcntl.fcntl(file, 38 if waits else 37, struct.pack("hhqqi4x", kind, 0, 0, 0, 0))
for line in sys.stdin:
    words = line.split()
    try:
        if words[0] == "open":
            files[words[1]] = os.open(path, os.O_RDWR)
        elif words[0] == "close":
            os.close(files.pop(words[1]))
        elif words[0] == "add":
            os.pwrite(files[words[1]], b"%4d" % int(words[2]), os.fstat(files[words[1]]).st_size)
        elif words[0] == "look":
            read = os.pread(files[words[1]], 1 << 16, 0)
            print("size", os.fstat(files[words[1]]).st_size, "read", len(read), "last", int(read[-4:] or 0), flush=True)
            continue
        else:
            lock(files[words[0]], words[1], words[2], len(words) > 3)
        print("done", flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"#;

/// Python restarts its own lock call after a signal, so `flock` waits instead.
const WAITER: &str = "flock /mfs/2/tmp/locked -c 'echo has'";

fn worker(cluster: &Cluster, node: u16, path: &str) -> Result<LineClient> {
    let mut worker = LineClient::start(cluster.command(node, "timeout").args([
        "60",
        "/usr/bin/python3",
        "-c",
        WORKER,
        path,
    ]))?;
    for name in ["a", "b"] {
        worker.request(&format!("open {name}"));
    }
    Ok(worker)
}

/// Three nodes; nodes 1 and 3 have mounted the files of node 2.
fn mounted(prefix: &str) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(prefix, 3)?;
    for node in [1, 3] {
        cluster.mount(node, "timeout=10")?;
    }
    cluster.run(2, &["sh", "-c", "echo one > /tmp/locked; chmod 666 /tmp/locked"])?;
    Ok(cluster)
}

const THERE: &str = "/mfs/2/tmp/locked";

#[test]
fn locks_hold_on_every_node() {
    let cluster = mounted("mfslocks").unwrap();
    let mut one = worker(&cluster, 1, THERE).unwrap();
    for (node, path) in [(3, THERE), (2, "/tmp/locked"), (1, THERE)] {
        let mut other = worker(&cluster, node, path).unwrap();
        for how in ["f", "o"] {
            let mut is = |who: u8, line: String, said: &str| {
                let worker = if who == 1 { &mut one } else { &mut other };
                assert_eq!(
                    worker.request(&line),
                    said,
                    "{line} by program {who}; the second one is on node {node}"
                );
            };
            is(1, format!("a {how} alone"), "done");
            is(2, format!("a {how} alone"), "EAGAIN");
            is(2, format!("a {how} shared"), "EAGAIN");
            // The other descriptor is another open file.
            is(1, format!("b {how} shared"), "EAGAIN");
            is(1, format!("a {how} shared"), "done");
            is(2, format!("a {how} shared"), "done");
            is(1, format!("b {how} shared"), "done");
            is(2, format!("a {how} alone"), "EAGAIN");
            is(1, format!("a {how} none"), "done");
            is(1, "close b".into(), "done");
            is(2, format!("a {how} alone wait"), "done");
            is(1, format!("a {how} shared"), "EAGAIN");
            is(2, "close a".into(), "done");
            is(1, format!("a {how} alone wait"), "done");
            is(1, format!("a {how} none"), "done");
            is(1, "open b".into(), "done");
            is(2, "open a".into(), "done");
        }
    }
    // Locks of open files and of processes conflict; flock conflicts with neither.
    let mut other = worker(&cluster, 3, THERE).unwrap();
    assert_eq!(one.request("a f alone"), "done");
    assert_eq!(other.request("a p alone"), "done");
    assert_eq!(one.request("a o alone"), "EAGAIN");
    assert_eq!(other.request("a p none"), "done");
    assert_eq!(one.request("a o alone"), "done");
    assert_eq!(other.request("a p alone"), "EAGAIN");
}

#[test]
fn blocked_lock_is_granted_or_interrupted() {
    let cluster = mounted("mfswaits").unwrap();
    let mut one = worker(&cluster, 1, THERE).unwrap();
    assert_eq!(one.request("a f alone"), "done");
    let end = cluster.command(3, "timeout").args(["1", "sh", "-c", WAITER]).output().unwrap();
    assert_eq!((end.status.code(), &end.stdout[..]), (Some(124), &b""[..]), "the lock was granted");
    let mut waiter = cluster.command(3, "timeout");
    let waiter = waiter.args(["30", "sh", "-c", WAITER]).stdout(Stdio::piped()).spawn().unwrap();
    // The owner of the lock is killed.
    one.kill().unwrap();
    cluster.run(1, &["pkill", "-KILL", "-f", "[i]mport errno, fcntl, os, struct"]).unwrap();
    assert_eq!(waiter.wait_with_output().unwrap().stdout, b"has\n");
}

#[test]
fn lock_lost_with_its_server_gives_estale() {
    let cluster = mounted("mfskilled").unwrap();
    let mut one = worker(&cluster, 1, THERE).unwrap();
    assert_eq!(one.request("a f alone"), "done");
    cluster.run(2, &["pkill", "-KILL", "-f", "[t]ern-mfs.*serve"]).unwrap();
    assert_eq!(one.request("a f shared"), "ESTALE");
    assert_eq!(one.request("b f alone"), "done", "a file without locks is opened again");
}

#[test]
fn lock_holder_sees_writes_under_the_previous_lock() {
    let cluster = mounted("mfslocksee").unwrap();
    cluster.run(2, &["sh", "-c", ": > /tmp/locked"]).unwrap();
    let mut there = worker(&cluster, 1, THERE).unwrap();
    let mut local = worker(&cluster, 2, "/tmp/locked").unwrap();
    for round in 1..=200 {
        // The client then has content in its cache.
        there.request("look a");
        let how = if round % 2 == 0 { "p" } else { "f" };
        local.request(&format!("a {how} alone wait"));
        local.request(&format!("add a {round}"));
        local.request(&format!("a {how} none"));
        there.request(&format!("a {how} shared wait"));
        let is = there.request("look a");
        assert_eq!(is, format!("size {0} read {0} last {round}", 4 * round), "round {round}");
        there.request(&format!("a {how} none"));
    }
}

/// An open for writing recalls the leases of other nodes. If such a recall makes the kernel discard
/// attributes that it has requested for a read, the read finds the old end of the file.
#[test]
fn lock_holder_finds_the_end_although_another_node_opens_the_file() {
    let cluster = mounted("mfslockend").unwrap();
    cluster.run(2, &["sh", "-c", ": > /tmp/locked"]).unwrap();
    cluster.run(1, &["umount", "/mfs"]).unwrap();
    let mount = "TERN_LATE_ATTRIBUTES=20 mount.mfs mymfs /mfs -o timeout=10";
    cluster.run(1, &["sh", "-ec", mount]).unwrap();
    let mut there = worker(&cluster, 1, THERE).unwrap();
    let mut local = worker(&cluster, 2, "/tmp/locked").unwrap();
    let opens = format!("while :; do : 3<>{THERE}; done");
    let mut opener = cluster.command(3, "timeout").args(["60", "sh", "-c", &opens]).spawn().unwrap();
    for round in 1..=40 {
        local.request("a p alone wait");
        local.request(&format!("add a {round}"));
        local.request("a p none");
        there.request("a p shared wait");
        let is = there.request("look a");
        assert_eq!(is, format!("size {0} read {0} last {round}", 4 * round), "round {round}");
        there.request("a p none");
    }
    opener.kill().unwrap();
    opener.wait().unwrap();
}
