//! The files of every node, seen from every node.

use anyhow::Result;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use tern_lab::Cable;
use tern_tests::cluster::Cluster;

/// The folder of the tasks, which are run on the disk and through /mfs.
const TASKS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tasks");

/// Longest wait for a lost node with a timeout of 3 s: two more seconds for the last attempt, and
/// as much again on a busy machine.
const LOST_NODE_TIMEOUT: Duration = Duration::from_secs(10);

/// Rounds of alternating writes and reads.
const ROUNDS: u32 = 250;

fn mounted(prefix: &str, nodes: u16, on: &[u16]) -> Result<Cluster> {
    mounted_with_timeout(prefix, nodes, on, 10)
}

/// Mounts with a request timeout of this many seconds.
fn mounted_with_timeout(prefix: &str, nodes: u16, on: &[u16], seconds: u32) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(prefix, nodes)?;
    for node in on {
        cluster.mount(*node, &format!("timeout={seconds}"))?;
    }
    Ok(cluster)
}

/// Kills the file server of node 2, and waits until a new one serves: that may take longer than the
/// request timeout.
fn replace_server(cluster: &Cluster) {
    sh(cluster, 2, "pkill -KILL -f '[t]ern-mfs.*serve'");
    sh(cluster, 1, "until ls -d /mfs/2/. >/dev/null 2>&1; do sleep 0.05; done");
}

/// The output of a shell command on a node, followed by `failed` if it fails.
fn sh(cluster: &Cluster, node: u16, line: &str) -> String {
    let end = match cluster.command(node, "timeout").args(["60", "sh", "-c", line]).output() {
        Ok(end) => end,
        Err(error) => return format!("{error}: failed"),
    };
    let (out, err) = (String::from_utf8_lossy(&end.stdout), String::from_utf8_lossy(&end.stderr));
    format!("{out}{err}{}", if end.status.success() { "" } else { "failed" })
}

/// Runs one task in a directory on node 2 locally, and in another one from node 1, and compares the
/// outputs.
fn same_as_on_the_disk(cluster: &Cluster, task: &str, prefix: &str) {
    sh(cluster, 2, "rm -rf /tmp/there /tmp/here; mkdir -m 777 /tmp/there /tmp/here");
    let task = Path::new(TASKS).join(task);
    let line = |directory: &str| format!("{prefix} /usr/bin/python3 {} {directory}", task.display());
    let there = sh(cluster, 2, &line("/tmp/there"));
    let here = sh(cluster, 1, &line("/mfs/2/tmp/here"));
    for (there, here) in there.lines().zip(here.lines()) {
        assert_eq!(here, there);
    }
    assert_eq!(here, there);
    assert!(there.lines().count() > 50 && !there.ends_with("failed"), "{there}");
}

#[test]
fn calls_match_the_disk() {
    let cluster = mounted("mfsdisk", 2, &[1]).unwrap();
    for prefix in ["", "setpriv --reuid 1234 --regid 1234 --groups 77"] {
        same_as_on_the_disk(&cluster, "files.py", prefix);
    }
}

#[test]
fn permissions_match_the_disk() {
    let cluster = mounted("mfsrights", 2, &[1]).unwrap();
    same_as_on_the_disk(&cluster, "rights.py", "");
}

/// A process that is in more groups than fit into one request writes as many bytes as the kernel
/// sends in one request.
const IN_MANY_GROUPS: &str = "
import os
os.setgroups(range(1000, 4000))
file = os.open('/mfs/2/tmp/many', os.O_WRONLY | os.O_CREAT)
print(os.write(file, bytes(range(256)) * 4096))
";

#[test]
fn member_of_many_groups_can_write_full_requests() {
    let cluster = mounted("mfsgroups", 2, &[1]).unwrap();
    assert_eq!(sh(&cluster, 1, &format!("/usr/bin/python3 -c \"{IN_MANY_GROUPS}\"")), "1048576\n");
    let same = "/usr/bin/python3 -c \"print(open('/tmp/many', 'rb').read() == bytes(range(256)) * 4096)\"";
    assert_eq!(sh(&cluster, 2, same), "True\n");
}

/// Writes the same number of bytes in turns with another program, and reads what the other has
/// written: by a new open each time, or through a descriptor open from the beginning.
const TURNS: &str = r#"
import os, sys, time
place, own, other, first, rounds = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "first", int(sys.argv[5])
held = os.open(f"{place}/value-{other}", os.O_RDONLY) if sys.argv[6] == "held" else None
def read(name):
    if held:
        return os.pread(held, 100, 0).decode()
    with open(f"{place}/{name}") as file:
        return file.read()
def write(text):
    with open(f"{place}/value-{own}", "r+") as file:
        file.write(text)
def turn(who, number):
    return f"{place}/{who}-{number}"
wrong = 0
for number in range(rounds):
    if not first or number:
        before = number - 1 if first else number
        while not os.path.exists(turn(other, before)):
            time.sleep(0.0005)
        os.unlink(turn(other, before))
        if read(f"value-{other}") != f"{other}{before:06}" or not held and os.stat(f"{place}/value-{other}").st_size != 7:
            wrong += 1
    write(f"{own}{number:06}")
    open(turn(own, number), "w").close()
print("wrong", wrong)
"#;

fn turns(
    cluster: &Cluster,
    node: u16,
    place: &str,
    own: &str,
    other: &str,
    order: &str,
    how: &str,
) -> Result<Child> {
    let rounds = ROUNDS.to_string();
    let mut command = cluster.command(node, "timeout");
    command.args(["90", "/usr/bin/python3", "-c", TURNS, place, own, other, order, &rounds, how]);
    Ok(command.stdout(Stdio::piped()).spawn()?)
}

#[test]
fn writes_on_any_node_are_read_on_every_node() {
    let cluster = mounted("mfscoherent", 3, &[1, 3]).unwrap();
    // The writer on node 2 is a local program that does not use /mfs; the writer on node 3 uses
    // /mfs. Through a descriptor that is already open, only writes through /mfs must be visible at
    // once.
    for (node, place, how) in [(2, "/tmp", "anew"), (3, "/mfs/2/tmp", "anew"), (3, "/mfs/2/tmp", "held")] {
        sh(&cluster, 2, "printf x000000 | tee /tmp/value-a > /tmp/value-b");
        let one = turns(&cluster, node, place, "a", "b", "first", how).unwrap();
        let other = turns(&cluster, 1, "/mfs/2/tmp", "b", "a", "second", how).unwrap();
        for child in [one, other] {
            let end = child.wait_with_output().unwrap();
            assert_eq!(String::from_utf8_lossy(&end.stdout).trim(), "wrong 0", "with node {node}, {how}");
        }
        sh(&cluster, 2, "rm /tmp/?-* /tmp/value-*");
    }
}

/// Reads a file through one descriptor for each line, and prints the content or the error.
const READER: &str = r#"
import errno, os, sys, time
file = os.open("/mfs/2/tmp/kept", os.O_RDONLY)
for line in sys.stdin:
    try:
        print(os.pread(file, 100, 0).decode(), flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"#;

#[test]
fn cached_content_is_valid_until_the_lease_expires() {
    let cluster = mounted_with_timeout("mfskept", 2, &[1], 3).unwrap();
    sh(&cluster, 2, "printf first > /tmp/kept; sleep 0.2");
    let mut reader = cluster.command(1, "/usr/bin/python3");
    let mut reader =
        reader.args(["-c", READER]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut ask, mut lines) =
        (reader.stdin.take().unwrap(), BufReader::new(reader.stdout.take().unwrap()).lines());
    let mut read = || {
        writeln!(ask, "read").unwrap();
        lines.next().unwrap().unwrap()
    };
    assert_eq!(read(), "first");
    // A local program on the server rewrites it: the change must be visible within the lease term.
    sh(&cluster, 2, "printf other > /tmp/kept");
    let begun = Instant::now();
    while read() != "other" {
        assert!(begun.elapsed() < LOST_NODE_TIMEOUT, "the old content stays");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Cached content can be read without the server until the lease expires.
    let kept = |read: &mut dyn FnMut() -> String| {
        assert_eq!(read(), "other");
        cluster.lab().cut(Cable::Node(2)).unwrap();
        let (cut, was) = (Instant::now(), read());
        (was == "other" && cut.elapsed() < Duration::from_millis(500), was)
    };
    let mut tries = 0;
    while !kept(&mut read).0 {
        // The lease had just expired.
        cluster.lab().heal_all().unwrap();
        while read() != "other" {}
        tries += 1;
        assert!(tries < 20, "nothing is cached");
    }
    let begun = Instant::now();
    while read() != "EIO" {
        assert!(begun.elapsed() < LOST_NODE_TIMEOUT, "cached content does not expire");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(ask);
    reader.wait().unwrap();
}

#[test]
fn lost_node_gives_eio_and_comes_back() {
    let cluster = mounted_with_timeout("mfslost", 3, &[1], 3).unwrap();
    // A program with a file open, which continues when a file appears.
    let mut program = cluster.command(1, "sh");
    let line = "exec 3>/mfs/2/tmp/held; echo one >&3; touch /tmp/open; until [ -e /tmp/on ]; do sleep 0.02; done; \
                echo two >&3; touch /tmp/again; until [ -e /tmp/off ]; do sleep 0.02; done; echo three >&3";
    let mut held = program.args(["-c", line]).spawn().unwrap();
    sh(&cluster, 1, "until [ -e /tmp/open ]; do sleep 0.02; done");

    cluster.lab().cut(Cable::Node(2)).unwrap();
    let begun = Instant::now();
    let said = sh(&cluster, 1, "cat /mfs/2/tmp/held");
    assert!(said.contains("Input/output error"), "{said}");
    assert!(begun.elapsed() < LOST_NODE_TIMEOUT, "it took {:?}", begun.elapsed());
    assert_eq!(sh(&cluster, 1, "ls /mfs"), "1\n2\n3\nhere\nhome\nlastexec\nmagic\nselected\n");
    assert!(!sh(&cluster, 1, "ls /mfs/3/").contains("failed"));

    cluster.lab().heal_all().unwrap();
    sh(&cluster, 1, "until ls /mfs/2/tmp >/dev/null 2>&1; do sleep 0.05; done; touch /tmp/on");
    sh(&cluster, 1, "until [ -e /tmp/again ]; do sleep 0.02; done");
    assert_eq!(sh(&cluster, 1, "cat /mfs/2/tmp/held"), "one\ntwo\n");

    // A killed server has lost all its open files: they are opened again by name.
    replace_server(&cluster);
    sh(&cluster, 1, "touch /tmp/off");
    assert!(held.wait().unwrap().success());
    assert_eq!(sh(&cluster, 1, "cat /mfs/2/tmp/held"), "one\ntwo\nthree\n");

    // A file that was renamed meanwhile is found by its new name.
    let line = "exec 3</mfs/2/tmp/held; mv /mfs/2/tmp/held /mfs/2/tmp/moved; touch /tmp/moved; \
                until [ -e /tmp/see ]; do sleep 0.02; done; cat <&3; mv /mfs/2/tmp/moved /mfs/2/tmp/held";
    let held = cluster.command(1, "sh").args(["-c", line]).stdout(Stdio::piped()).spawn().unwrap();
    sh(&cluster, 1, "until [ -e /tmp/moved ]; do sleep 0.02; done");
    replace_server(&cluster);
    sh(&cluster, 1, "touch /tmp/see");
    assert_eq!(String::from_utf8_lossy(&held.wait_with_output().unwrap().stdout), "one\ntwo\nthree\n");

    // A removed file is not found again, and another file of its name is not taken for it.
    let line = "exec 3</mfs/2/tmp/held; rm /mfs/2/tmp/held; echo other > /mfs/2/tmp/held; cat <&3 | head -1; touch /tmp/gone; \
                until [ -e /tmp/look ]; do sleep 0.02; done; cat <&3";
    let mut program = cluster.command(1, "sh");
    let held = program.args(["-c", line]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    sh(&cluster, 1, "until [ -e /tmp/gone ]; do sleep 0.02; done");
    replace_server(&cluster);
    sh(&cluster, 1, "touch /tmp/look");
    let end = held.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&end.stdout), "one\n");
    assert!(String::from_utf8_lossy(&end.stderr).contains("Stale file handle"), "{end:?}");

    // /mfs can be unmounted at any time.
    cluster.lab().cut(Cable::Node(2)).unwrap();
    assert_eq!(
        sh(&cluster, 1, "umount /mfs; until ! pgrep -f '[t]ern-mfs.*mount' >/dev/null; do sleep 0.02; done"),
        ""
    );
}

/// Locks a file, and reports that.
const LOCKER: &str = "
import fcntl, time
file = open('/mfs/2/tmp/locked', 'r+')
fcntl.lockf(file, fcntl.LOCK_EX)
print('locked', flush=True)
time.sleep(100)
";

/// Tries to lock the same file as a local program on node 2, until it can.
const LOCK_PROBE: &str = "
import fcntl, time
file = open('/tmp/locked', 'r+')
for wait in range(200):
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print('free')
        break
    except BlockingIOError:
        time.sleep(0.05)
else:
    print('locked')
";

#[test]
fn exit_while_a_node_is_lost_releases_locks_and_files_there() {
    let cluster = mounted_with_timeout("mfsended", 2, &[1], 3).unwrap();
    sh(&cluster, 2, "echo one > /tmp/locked");
    let mut locker = cluster.command(1, "/usr/bin/python3");
    let mut locker = locker.args(["-c", LOCKER]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(locker.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "locked");
    let open =
        "for pid in $(pgrep -f '[t]ern-mfs.*serve'); do ls -l /proc/$pid/fd; done | grep -c '/tmp/locked$'";
    assert_ne!(sh(&cluster, 2, open).lines().next(), Some("0"));

    cluster.lab().cut(Cable::Node(2)).unwrap();
    // The last requests to the node are lost.
    let _lost = sh(&cluster, 1, "cat /mfs/2/tmp/locked");
    locker.kill().unwrap();
    locker.wait().unwrap();
    cluster.lab().heal_all().unwrap();
    assert_eq!(sh(&cluster, 2, &format!("/usr/bin/python3 -c \"{LOCK_PROBE}\"")), "free\n");
    // No request has been sent since; the release of the inode is sent with the next call.
    sh(&cluster, 1, "echo 2 > /proc/sys/vm/drop_caches; ls /mfs/2/tmp");
    let closed = format!("for i in $(seq 100); do [ $({open}) -le 1 ] && break; sleep 0.05; done; {open}");
    assert!(
        matches!(sh(&cluster, 2, &closed).lines().next(), Some("0" | "1")),
        "{}",
        sh(&cluster, 2, &closed)
    );
}

/// Twice: creates a directory and writes to a file; after a line of input, calls fsync on several
/// descriptors, and locks a file. Prints the results.
const SAVER: &str = "
import errno, fcntl, os
def tried(call, *words):
    try:
        call(*words)
        return 'done'
    except OSError as error:
        return errno.errorcode[error.errno]
file = os.open('/mfs/2/tmp/saved/file', os.O_RDWR | os.O_CREAT)
idle = os.open('/mfs/2/tmp/saved/idle', os.O_RDWR | os.O_CREAT)
locked = os.open('/mfs/2/tmp/saved/locked', os.O_RDWR | os.O_CREAT)
reader = os.open('/mfs/2/tmp/saved/file', os.O_RDONLY)
directory = os.open('/mfs/2/tmp/saved', os.O_RDONLY)
os.fsync(idle)
for turn in range(2):
    os.mkdir(f'/mfs/2/tmp/saved/{turn}')
    os.write(file, b'one')
    print('written', flush=True)
    input()
    print(tried(os.fsync, file), tried(os.fsync, idle), tried(os.fsync, directory), end=' ')
    print(tried(os.read, reader, 9), tried(os.fsync, reader), sorted(os.listdir(directory))[turn], end=' ')
    print(tried(fcntl.lockf, locked, fcntl.LOCK_EX), flush=True)
print(tried(os.write, file, b'two'), tried(os.write, idle, b'two'))
file = os.open('/mfs/2/tmp/saved/file', os.O_RDWR)
os.write(file, b'three')
print(tried(os.fsync, file))
";

#[test]
fn fsync_reports_lost_writes() {
    let cluster = mounted("mfssaved", 2, &[1]).unwrap();
    sh(&cluster, 2, "mkdir -m 777 /tmp/saved");
    let mut saver = cluster.command(1, "/usr/bin/python3");
    let mut saver = saver.args(["-c", SAVER]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(saver.stdout.take().unwrap()).lines();
    let mut line = || lines.next().unwrap().unwrap();
    let mut on = saver.stdin.take().unwrap();
    let kill = "pkill -KILL -f '[t]ern-mfs.*serve'";
    // Data that a killed server has written is in its kernel, and the next server syncs it. No lock
    // was held, so the program can take one.
    assert_eq!(line(), "written");
    // Without a server nothing pins the kernel's inodes, so that they are dropped. Inodes that are
    // read again must have the same numbers.
    sh(&cluster, 2, &format!("{kill}; echo 2 > /proc/sys/vm/drop_caches"));
    writeln!(on).unwrap();
    assert_eq!(line(), "done done done done done 0 done");
    // Another boot id stands for a machine that was reset. Another process may have held the lock
    // since then.
    assert_eq!(line(), "written");
    let reset = "cat /proc/sys/kernel/random/uuid > /tmp/boot && mount --bind /tmp/boot /proc/sys/kernel/random/boot_id";
    assert_eq!(sh(&cluster, 2, reset), "");
    sh(&cluster, 2, kill);
    writeln!(on).unwrap();
    assert_eq!(line(), "EIO done EIO done EIO 1 ESTALE");
    assert_eq!(line(), "EIO done");
    assert_eq!(line(), "done");
    assert!(saver.wait().unwrap().success());
}

#[test]
fn mounted_tree_cannot_be_escaped() {
    let cluster = mounted("mfsout", 2, &[1, 2]).unwrap();
    let refused = |line: &str, why: &str| {
        let said = sh(&cluster, 1, line);
        assert!(said.contains(why) && said.ends_with("failed"), "{line}: {said}");
    };
    refused("ls /mfs/2/mfs/1/", "Too many levels of symbolic links");
    refused("ls /mfs/2/proc/1", "Permission denied");
    refused("ls /mfs/2/sys/kernel", "Permission denied");
    sh(&cluster, 2, "rm -f /tmp/null; mknod -m 666 /tmp/null c 1 3");
    refused("echo x > /mfs/2/tmp/null", "Permission denied");
    refused("mknod /mfs/2/tmp/zero c 1 5", "Operation not permitted");
    // A symbolic link is resolved on the client's side.
    sh(&cluster, 1, "echo first > /tmp/mine");
    sh(
        &cluster,
        2,
        "echo second > /tmp/mine; ln -sf /tmp/mine /tmp/link; ln -sf ../../../../../tmp/mine /tmp/up",
    );
    assert_eq!(sh(&cluster, 1, "cat /mfs/2/tmp/mine /mfs/2/tmp/link"), "second\nfirst\n");
    assert_eq!(sh(&cluster, 1, "cat /mfs/2/tmp/up"), "first\n");
    // Set-user-id programs of another node have no effect.
    sh(&cluster, 2, "cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id");
    let id = "setpriv --reuid 1234 --regid 1234 --clear-groups /mfs/2/tmp/id -u";
    assert_eq!(sh(&cluster, 1, id), "1234\n");
    assert!(sh(&cluster, 1, "mount | grep /mfs").contains("type fuse.mfs (rw,nosuid,nodev"));
}

#[test]
fn access_follows_the_nodes_configuration() {
    let cluster = mounted("mfsrules", 2, &[1]).unwrap();
    let rule = |lines: &str| {
        let line = format!(
            "sed -i '/^mfs/d' /etc/tern/ternd.toml; printf '%b' '{lines}' >> /etc/tern/ternd.toml; \
             pkill -KILL -f '[t]ern-mfs.*serve'; mkdir -p /srv/data; echo in > /srv/data/in; chmod 600 /srv/data/in"
        );
        sh(&cluster, 2, &line);
        cluster.lab().restart_daemon(2).unwrap();
        sh(
            &cluster,
            1,
            "i=0; until ls /mfs/2/ >/dev/null 2>&1 || [ $i = 20 ]; do sleep 0.1; i=$((i+1)); done",
        );
    };
    rule(r#"mfs_paths = ["/srv/data"]\n"#);
    assert_eq!(
        sh(&cluster, 1, "ls /mfs/2/ /mfs/2/srv; cat /mfs/2/srv/data/in"),
        "/mfs/2/:\nsrv\n\n/mfs/2/srv:\ndata\nin\n"
    );
    assert!(sh(&cluster, 1, "ls /mfs/2/etc").contains("No such file"));
    assert!(sh(&cluster, 1, "touch /mfs/2/srv/x").contains("Permission denied"));
    rule(r#"mfs_read_only = true\n"#);
    assert!(
        sh(&cluster, 1, "cat /mfs/2/srv/data/in; echo more >> /mfs/2/srv/data/in")
            .contains("Read-only file system")
    );
    rule(r#"mfs_squash_root = true\n"#);
    assert!(sh(&cluster, 1, "cat /mfs/2/srv/data/in").contains("Permission denied"));
    rule(r#"mfs = false\n"#);
    assert!(sh(&cluster, 1, "ls /mfs/2/").contains("Permission denied"));
}

#[test]
fn here_is_the_node_of_the_process() {
    let cluster = mounted("mfshere", 2, &[1]).unwrap();
    assert_eq!(sh(&cluster, 1, "readlink /mfs/here; readlink /mfs/home; readlink /mfs/0"), "1\n1\n1\n");
    assert_eq!(sh(&cluster, 1, "runon 2 sh -c 'cd /mfs/here && pwd -P; readlink /mfs/home'"), "/mfs/2\n1\n");
    assert_eq!(sh(&cluster, 1, "runon 2 sh -c 'echo written away > /mfs/here/tmp/x'"), "");
    assert_eq!(sh(&cluster, 2, "cat /tmp/x"), "written away\n");
}
