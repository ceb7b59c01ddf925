//! FUSE passthrough: a node's kernel reads and writes the node's own files itself, with the user's
//! rights, and other nodes see each write.

use anyhow::Result;
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection;
use tern_tests::drivers::line_client::LineClient;

/// Timeout for anything that a busy machine may delay.
const EVENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Performs an operation on the files of one directory for each line, and replies with a line. An
/// operation that blocks for longer than 30 s ends the program.
const WORKER: &str = r#"
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
os.chdir(sys.argv[1])
HOW = {"r": os.O_RDONLY, "w": os.O_WRONLY, "rw": os.O_RDWR, "a": os.O_WRONLY | os.O_APPEND, "new": os.O_RDWR | os.O_CREAT}
files, maps = {}, {}
for line in sys.stdin:
    signal.alarm(30)
    verb, key, *words = line.split()
    said = "done"
    if verb == "open":
        files[key] = os.open(words[0], HOW[words[1]], 0o755)
    elif verb == "close":
        os.close(files.pop(key))
    elif verb == "write":
        os.pwrite(files[key], words[1].encode(), int(words[0]))
    elif verb == "append":
        os.write(files[key], words[0].encode())
    elif verb == "end":
        # As a program that appends without O_APPEND, again and again.
        said = 0
        for _ in range(int(words[0])):
            said = os.lseek(files[key], 0, os.SEEK_END)
            os.write(files[key], bytes(100))
    elif verb == "copy":
        said = os.copy_file_range(files[key], files[words[0]], 10, 0, 0)
    elif verb == "read":
        said = os.pread(files[key], 100, int(words[0])).decode()
    elif verb == "map":
        # Python's own mmap keeps the file open.
        maps[key] = libc.mmap(None, 4096, 3, 1, files[key], 0)
    elif verb == "store":
        ctypes.memmove(maps[key], words[0].encode(), len(words[0]))
    elif verb == "newer":
        # Attributes of a file that has just changed would not be cached in any case.
        time.sleep(0.2)
        before = os.stat(words[0]).st_mtime_ns
        ctypes.memmove(maps[key], b"new", 3)
        said = os.stat(words[0]).st_mtime_ns > before
    elif verb == "unmap":
        libc.munmap(maps.pop(key), 4096)
    elif verb == "look":
        with open(key) as file:
            said = f"{os.stat(key).st_size} {file.read(20).strip(chr(0))}"
    elif verb == "mode":
        os.chmod(key, int(words[0], 8))
    elif verb == "modeof":
        said = oct(os.stat(key).st_mode & 0o7777)
    print(said, flush=True)
"#;

/// A program on one node, running as this user.
fn worker(cluster: &Cluster, node: u16, place: &str, uid: u32) -> Result<LineClient> {
    let uid = uid.to_string();
    let as_user =
        ["--reuid", &uid, "--regid", &uid, "--clear-groups", "/usr/bin/python3", "-c", WORKER, place];
    LineClient::start(cluster.command(node, "setpriv").args(as_user))
}

/// Two nodes that have mounted /mfs; node 1 has a tmpfs at /own.
fn mounted(prefix: &str) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(prefix, 2)?;
    cluster.run(
        1,
        &["sh", "-c", "mkdir /own && mount -t tmpfs own /own && chmod 777 /own && printf small > /own/small"],
    )?;
    for node in [1, 2] {
        cluster.run(node, &["sh", "-c", "mkdir -p /mfs && mount.mfs mymfs /mfs"])?;
    }
    Ok(cluster)
}

/// Sends each line, and compares the replies.
fn run_all(worker: &mut LineClient, lines: &[(&str, &str)]) {
    for (line, wanted) in lines {
        assert_eq!(worker.request(line), *wanted, "{line}");
    }
}

#[test]
fn own_files_need_no_daemon_and_writes_are_visible_elsewhere() {
    let cluster = mounted("mfspass").unwrap();
    let mut own = worker(&cluster, 1, "/mfs/1/own", 0).unwrap();
    let mut other = worker(&cluster, 2, "/mfs/1/own", 0).unwrap();
    run_all(&mut own, &[("open f f new", "done"), ("open g f a", "done"), ("write f 0 000", "done")]);
    // The FUSE daemon is stopped now: only the kernel's own passthrough works.
    let tree = r#"p=$(pgrep -f "[t]ern-mfs mount /mfs") && kill -"#;
    cluster.run(1, &["sh", "-c", &format!("{tree}STOP $p")]).unwrap();
    run_all(&mut own, &[("write f 0 001", "done"), ("append g 23", "done"), ("read f 0", "00123")]);
    cluster.run(1, &["sh", "-c", &format!("{tree}CONT $p")]).unwrap();
    run_all(&mut other, &[("look f", "5 00123"), ("open f f r", "done"), ("read f 0", "00123")]);
    for round in 100..200 {
        own.request(&format!("write f 0 {round}"));
        assert_eq!(other.request("read f 0"), format!("{round}23"));
    }
    for round in 0..20 {
        own.request("append g x");
        let (size, seen) = (6 + round, own.request("look f"));
        assert!(seen.starts_with(&format!("{size} ")), "{size}: {seen}");
        assert_eq!(other.request("look f"), seen);
    }
    // The owning node reads what the other node writes.
    run_all(&mut other, &[("open w f w", "done"), ("write w 0 abc", "done")]);
    run_all(&mut own, &[("read f 0", "abc23xxxxxxxxxxxxxxxxxxxx"), ("close f", "done"), ("close g", "done")]);
    // A file that is already open without passthrough is opened without it again.
    run_all(&mut own, &[("open r small r", "done"), ("open w small w", "done"), ("write w 0 SMALL", "done")]);
    run_all(
        &mut own,
        &[("read r 0", "SMALL"), ("look small", "5 SMALL"), ("close r", "done"), ("close w", "done")],
    );
    run_all(&mut own, &[("open w small w", "done"), ("write w 0 small", "done"), ("look small", "5 small")]);
    run_all(&mut other, &[("look small", "5 small")]);
}

#[test]
fn seek_end_on_own_files_is_current() {
    let cluster = mounted("mfspassend").unwrap();
    let mut own = worker(&cluster, 1, "/mfs/1/own", 0).unwrap();
    for file in ["a", "b", "c"] {
        run_all(
            &mut own,
            &[(&format!("open f {file} new"), "done"), ("end f 40", "3900"), ("close f", "done")],
        );
        let size = cluster.run(1, &["stat", "-c", "%s", &format!("/own/{file}")]).unwrap();
        assert_eq!(size, b"4000\n");
    }
}

/// The client opens both files again, and the previous server's opens do not remain.
#[test]
fn copy_file_range_survives_server_restart() {
    let cluster = mounted("mfscopy").unwrap();
    let mut other = worker(&cluster, 2, "/mfs/1/own", 0).unwrap();
    run_all(&mut other, &[("open from small r", "done"), ("open to new new", "done"), ("copy from to", "5")]);
    for _ in 0..2 {
        // A request in flight when the server dies fails, since it is unknown whether it was done.
        let anew = "p=$(pgrep -f '[t]ern-mfs.* serve'); kill -KILL $p; while [ -d /proc/$p ]; do sleep 0.05; done; \
                    until pgrep -f '[t]ern-mfs.* serve'; do sleep 0.05; done";
        cluster.run(1, &["sh", "-c", anew]).unwrap();
        run_all(&mut other, &[("copy from to", "5")]);
    }
    run_all(&mut other, &[("close to", "done"), ("close from", "done")]);
    let open = "p=$(pgrep -f '[t]ern-mfs.* serve') && ! ls -l /proc/$p/fd | grep 'lrwx.* /own/new'";
    let look = || cluster.run(1, &["sh", "-c", open]).is_ok();
    fault_injection::wait_until("no file is open at the server", EVENT_TIMEOUT, look).unwrap();
}

#[test]
fn stores_to_a_closed_mapped_file_are_visible_elsewhere() {
    let cluster = mounted("mfsmapped").unwrap();
    let mut own = worker(&cluster, 1, "/mfs/1/own", 0).unwrap();
    let mut other = worker(&cluster, 2, "/mfs/1/own", 0).unwrap();
    let long = "x".repeat(100);
    run_all(
        &mut own,
        &[("open f f new", "done"), ("write f 4095 !", "done"), (&format!("write f 0 {long}"), "done")],
    );
    run_all(&mut own, &[("map f", "done"), ("newer f f", "True"), ("close f", "done")]);
    run_all(&mut other, &[("open f f r", "done")]);
    run_all(&mut own, &[("open g f r", "done")]);
    for round in 100..200 {
        own.request(&format!("store f {round}"));
        assert_eq!(other.request("read f 0")[..3], format!("{round}"));
        // A small file that was opened without passthrough stays so, and reads the new content.
        assert_eq!(own.request("read g 0")[..3], format!("{round}"));
    }
    run_all(&mut own, &[("unmap f", "done")]);
}

#[test]
fn user_has_the_same_rights_as_on_the_disk() {
    let cluster = mounted("mfspassuser").unwrap();
    let said = ["/own", "/mfs/1/own"].map(|place| {
        let mut user = worker(&cluster, 1, place, 5001).unwrap();
        let lines = "open f mine new|write f 0 x|mode mine 4755|write f 0 y|modeof mine|close f|open f mine rw|\
                     mode mine 4755|write f 0 z|modeof mine|look mine";
        let said: Vec<_> = lines.split('|').map(|line| user.request(line)).collect();
        cluster.run(1, &["rm", "/own/mine"]).unwrap();
        said
    });
    assert_eq!(said[0], said[1]);
    assert_eq!(said[0][4], "0o755", "the kernel clears the set-id bit");
}
