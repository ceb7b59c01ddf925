//! Files of a node in its own tree: its kernel reads and writes them itself, as its user may, and other nodes see each write.

use anyhow::Result;
use std::time::Duration;
use tern_tests::asked::Asked;
use tern_tests::breaking;
use tern_tests::cluster::Cluster;

/// How long something that is to happen may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Does what each line says with the files of one directory, and answers each with a line. What it has to wait for longer than that
/// ends it.
const DOER: &str = r#"
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
        # As who writes to the end of a file without O_APPEND, time and again.
        said = 0
        for _ in range(int(words[0])):
            said = os.lseek(files[key], 0, os.SEEK_END)
            os.write(files[key], bytes(100))
    elif verb == "copy":
        said = os.copy_file_range(files[key], files[words[0]], 10, 0, 0)
    elif verb == "read":
        said = os.pread(files[key], 100, int(words[0])).decode()
    elif verb == "map":
        # Python's own keeps the file open.
        maps[key] = libc.mmap(None, 4096, 3, 1, files[key], 0)
    elif verb == "store":
        ctypes.memmove(maps[key], words[0].encode(), len(words[0]))
    elif verb == "newer":
        # What has just been changed would be asked for in any case.
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

/// A program on one node.
fn doer(cluster: &Cluster, node: u16, place: &str, uid: u32) -> Result<Asked> {
    let uid = uid.to_string();
    let as_user = ["--reuid", &uid, "--regid", &uid, "--clear-groups", "/usr/bin/python3", "-c", DOER, place];
    Asked::start(cluster.command(node, "setpriv").args(as_user))
}

/// Two nodes that see all, of which the first has a disk of its own at /own.
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

/// Has each line done, and compares what is said.
fn does(doer: &mut Asked, lines: &[(&str, &str)]) {
    for (line, wanted) in lines {
        assert_eq!(doer.does(line), *wanted, "{line}");
    }
}

#[test]
fn a_node_needs_nobody_for_its_own_open_files_and_others_see_what_it_writes() {
    let cluster = mounted("mfspass").unwrap();
    let mut own = doer(&cluster, 1, "/mfs/1/own", 0).unwrap();
    let mut other = doer(&cluster, 2, "/mfs/1/own", 0).unwrap();
    does(&mut own, &[("open f f new", "done"), ("open g f a", "done"), ("write f 0 000", "done")]);
    // Nobody serves the tree now, but for what its kernel does itself.
    let tree = r#"p=$(pgrep -f "[t]ern-mfs mount /mfs") && kill -"#;
    cluster.run(1, &["sh", "-c", &format!("{tree}STOP $p")]).unwrap();
    does(&mut own, &[("write f 0 001", "done"), ("append g 23", "done"), ("read f 0", "00123")]);
    cluster.run(1, &["sh", "-c", &format!("{tree}CONT $p")]).unwrap();
    does(&mut other, &[("look f", "5 00123"), ("open f f r", "done"), ("read f 0", "00123")]);
    for round in 100..200 {
        own.does(&format!("write f 0 {round}"));
        assert_eq!(other.does("read f 0"), format!("{round}23"));
    }
    for round in 0..20 {
        own.does("append g x");
        let (size, seen) = (6 + round, own.does("look f"));
        assert!(seen.starts_with(&format!("{size} ")), "{size}: {seen}");
        assert_eq!(other.does("look f"), seen);
    }
    // What the other writes is what is read here.
    does(&mut other, &[("open w f w", "done"), ("write w 0 abc", "done")]);
    does(&mut own, &[("read f 0", "abc23xxxxxxxxxxxxxxxxxxxx"), ("close f", "done"), ("close g", "done")]);
    // Who comes to what is open in the usual way has it in that way.
    does(&mut own, &[("open r small r", "done"), ("open w small w", "done"), ("write w 0 SMALL", "done")]);
    does(
        &mut own,
        &[("read r 0", "SMALL"), ("look small", "5 SMALL"), ("close r", "done"), ("close w", "done")],
    );
    does(&mut own, &[("open w small w", "done"), ("write w 0 small", "done"), ("look small", "5 small")]);
    does(&mut other, &[("look small", "5 small")]);
}

#[test]
fn a_node_knows_where_its_own_files_end() {
    let cluster = mounted("mfspassend").unwrap();
    let mut own = doer(&cluster, 1, "/mfs/1/own", 0).unwrap();
    for file in ["a", "b", "c"] {
        does(&mut own, &[(&format!("open f {file} new"), "done"), ("end f 40", "3900"), ("close f", "done")]);
        let size = cluster.run(1, &["stat", "-c", "%s", &format!("/own/{file}")]).unwrap();
        assert_eq!(size, b"4000\n");
    }
}

/// Both files are opened again, and nothing stays of what they were before.
#[test]
fn a_copy_goes_on_when_the_server_has_begun_anew() {
    let cluster = mounted("mfscopy").unwrap();
    let mut other = doer(&cluster, 2, "/mfs/1/own", 0).unwrap();
    does(&mut other, &[("open from small r", "done"), ("open to new new", "done"), ("copy from to", "5")]);
    for _ in 0..2 {
        // What is asked of one that dies just then ends with an error, since nobody knows whether it was done.
        let anew = "p=$(pgrep -f '[t]ern-mfs.* serve'); kill -KILL $p; while [ -d /proc/$p ]; do sleep 0.05; done; \
                    until pgrep -f '[t]ern-mfs.* serve'; do sleep 0.05; done";
        cluster.run(1, &["sh", "-c", anew]).unwrap();
        does(&mut other, &[("copy from to", "5")]);
    }
    does(&mut other, &[("close to", "done"), ("close from", "done")]);
    let open = "p=$(pgrep -f '[t]ern-mfs.* serve') && ! ls -l /proc/$p/fd | grep 'lrwx.* /own/new'";
    let look = || cluster.run(1, &["sh", "-c", open]).is_ok();
    breaking::until("none is open at the server", PATIENCE, look).unwrap();
}

#[test]
fn what_is_stored_to_a_file_that_was_closed_is_seen_by_others() {
    let cluster = mounted("mfsmapped").unwrap();
    let mut own = doer(&cluster, 1, "/mfs/1/own", 0).unwrap();
    let mut other = doer(&cluster, 2, "/mfs/1/own", 0).unwrap();
    let long = "x".repeat(100);
    does(
        &mut own,
        &[("open f f new", "done"), ("write f 4095 !", "done"), (&format!("write f 0 {long}"), "done")],
    );
    does(&mut own, &[("map f", "done"), ("newer f f", "True"), ("close f", "done")]);
    does(&mut other, &[("open f f r", "done")]);
    does(&mut own, &[("open g f r", "done")]);
    for round in 100..200 {
        own.does(&format!("store f {round}"));
        assert_eq!(other.does("read f 0")[..3], format!("{round}"));
        // Here it goes on in its way, small as it is.
        assert_eq!(own.does("read g 0")[..3], format!("{round}"));
    }
    does(&mut own, &[("unmap f", "done")]);
}

#[test]
fn its_user_may_what_he_may_on_the_disk() {
    let cluster = mounted("mfspassuser").unwrap();
    let said = ["/own", "/mfs/1/own"].map(|place| {
        let mut user = doer(&cluster, 1, place, 5001).unwrap();
        let lines = "open f mine new|write f 0 x|mode mine 4755|write f 0 y|modeof mine|close f|open f mine rw|\
                     mode mine 4755|write f 0 z|modeof mine|look mine";
        let said: Vec<_> = lines.split('|').map(|line| user.does(line)).collect();
        cluster.run(1, &["rm", "/own/mine"]).unwrap();
        said
    });
    assert_eq!(said[0], said[1]);
    assert_eq!(said[0][4], "0o755", "the kernel takes it away");
}
