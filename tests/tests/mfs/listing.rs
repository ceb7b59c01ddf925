//! Listings and attributes of directories of another node.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::wait_until;

/// Lists directories, then stats each entry. Prints what differs, the number of entries, and the
/// number of packets sent.
const LISTED: &str = r#"
import os, stat, sys
def packets():
    return sum(int(line.split(":")[1].split()[9]) for line in open("/proc/net/dev") if ":" in line)
before, count = packets(), 0
for directory in sys.argv[1:]:
    with os.scandir(directory) as found:
        all = [(e.name, e.inode(), e.is_dir(follow_symlinks=False), e.is_symlink()) for e in found]
    for name, inode, is_dir, is_link in all:
        is_ = os.lstat(os.path.join(directory, name))
        if (is_.st_ino, stat.S_ISDIR(is_.st_mode), stat.S_ISLNK(is_.st_mode)) != (inode, is_dir, is_link):
            print(name, inode, is_)
    if len({name for name, *_ in all}) != len(all):
        print("some twice")
    count += len(all)
print(count, packets() - before)
"#;

#[test]
fn listing_is_correct_and_stat_of_all_entries_needs_few_requests() {
    let cluster = Cluster::with_nodes("mfslisted", 2).unwrap();
    cluster.run(1, &["sh", "-ec", "mkdir -p /mfs; mount.mfs mymfs /mfs"]).unwrap();
    // A tmpfs: the lab's overlay lists other inode numbers than its files have.
    let make = "mkdir /tmp/d; mount -t tmpfs none /tmp/d; cd /tmp/d; mkdir large $(seq 6); \
        (cd large; seq 2500 | xargs touch; mkdir $(seq 3001 3300); for n in $(seq 4001 4200); do ln -s $n l$n; done); \
        for d in $(seq 6); do (cd $d; seq 400 | xargs touch; mkdir $(seq 401 499)); done";
    cluster.run(2, &["sh", "-ec", make]).unwrap();
    let listed = |which: &str| {
        let line = format!("cd /mfs/2/tmp/d; python3 -c '{LISTED}' {which}");
        let said = String::from_utf8(cluster.run(1, &["sh", "-ec", &line]).unwrap()).unwrap();
        let (entries, packets) = said.trim().split_once(' ').unwrap_or_else(|| panic!("{said}"));
        (entries.to_owned(), packets.parse::<u64>().unwrap_or_else(|_| panic!("{said}")))
    };
    // In a large directory the first entries come with attributes, and names without inodes follow;
    // once entries are looked up, all come with attributes.
    for _ in 0..2 {
        assert_eq!(listed("large").0, "3000");
    }
    let (entries, packets) = listed("1 2 3 4 5 6");
    assert_eq!(entries, "2994");
    // One request for each entry would be as many packets as entries.
    assert!(packets < 500, "{packets} packets");
}

#[test]
fn local_remove_frees_space_of_files_cached_elsewhere() {
    let cluster = Cluster::with_nodes("mfsroom", 2).unwrap();
    cluster.run(1, &["sh", "-ec", "mkdir -p /mfs; mount.mfs mymfs /mfs"]).unwrap();
    let make = "mkdir /tmp/d; mount -t tmpfs -o size=16m none /tmp/d; head -c 6M /dev/zero > /tmp/d/seen; \
        head -c 6M /dev/zero > /tmp/d/open";
    cluster.run(2, &["sh", "-ec", make]).unwrap();
    let free = || {
        let said = cluster.run(2, &["sh", "-c", "df --output=avail -BM /tmp/d | tail -1"]).unwrap();
        String::from_utf8_lossy(&said).trim().trim_end_matches('M').parse::<u64>().unwrap()
    };
    let line = "exec 3< /mfs/2/tmp/d/open; ls -l /mfs/2/tmp/d >&2; echo seen; read removed; \
        head -c 1 <&3 | wc -c; stat -Lc %h /dev/fd/3; read done";
    let mut command = cluster.command(1, "sh");
    command.args(["-c", line]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut reader = command.spawn().unwrap();
    let (mut ask, said) = (reader.stdin.take().unwrap(), reader.stdout.take().unwrap());
    let mut said = BufReader::new(said).lines();
    let mut says = || said.next().unwrap().unwrap();
    assert_eq!(says(), "seen");
    assert_eq!(free(), 4);
    cluster.run(2, &["sh", "-ec", "rm /tmp/d/*"]).unwrap();
    wait_until("space of a closed file is freed", Duration::from_secs(60), || free() >= 10).unwrap();
    // The file that is open still has its content.
    writeln!(ask).unwrap();
    assert_eq!((says(), says()), ("1".into(), "0".into()));
    assert_eq!(free(), 10);
    writeln!(ask).unwrap();
    assert!(reader.wait().unwrap().success());
    wait_until("space of a file that was open is freed", Duration::from_secs(60), || free() == 16).unwrap();
}

/// Reads extended attributes of files in a directory and sets some; a local program of the server
/// sets others meanwhile. Prints what is wrong, and the number of packets sent while it read
/// attributes that no file has.
const EXTENDED: &str = r#"
import errno, os, sys, time
here = sys.argv[1]
def packets():
    return sum(int(line.split(":")[1].split()[9]) for line in open("/proc/net/dev") if ":" in line)
def get(name, what):
    try:
        return os.getxattr(f"{here}/{name}", what).decode()
    except OSError as error:
        return errno.errorcode[error.errno]
def same(what, is_, wanted):
    if is_ != wanted:
        print(what, is_, "and not", wanted)
names = os.listdir(here)
before = packets()
for name in names:
    os.lstat(f"{here}/{name}")
    for what in "system.posix_acl_access", "security.capability", "user.a":
        same(name, get(name, what), "ENODATA")
sent = packets() - before
for n, name in enumerate(names[:100]):
    os.lstat(f"{here}/{name}")
    same("one that is not there", get(name, "user.a"), "ENODATA")
    os.setxattr(f"{here}/{name}", "user.a", str(n).encode())
    same("one that was given", get(name, "user.a"), str(n))
    os.removexattr(f"{here}/{name}", "user.a")
    same("one that was taken away", get(name, "user.a"), "ENODATA")
    os.setxattr(f"{here}/{name}", "user.a", b"again")
    os.lstat(f"{here}/{name}")
    same("one that was given again", get(name, "user.a"), "again")
    same("the list", "user.a" in os.listxattr(f"{here}/{name}"), True)
print(sent, flush=True)
sys.stdin.readline()
os.lstat(f"{here}/{names[200]}")
same("before", get(names[200], "user.b"), "ENODATA")
print(names[200], flush=True)
sys.stdin.readline()
end = time.monotonic() + 5
while get(names[200], "user.b") != "x" and time.monotonic() < end:
    os.lstat(f"{here}/{names[200]}")
same("what is given there", get(names[200], "user.b"), "x")
same("what only root sees", "trusted.c" in os.listxattr(f"{here}/{names[200]}"), True)
print("done", flush=True)
"#;

#[test]
fn absent_xattrs_need_no_requests_and_new_xattrs_are_visible() {
    let cluster = Cluster::with_nodes("mfsextended", 2).unwrap();
    cluster.run(1, &["sh", "-ec", "mkdir -p /mfs; mount.mfs mymfs /mfs"]).unwrap();
    cluster.run(2, &["sh", "-ec", "mkdir /tmp/d; cd /tmp/d; seq 400 | xargs touch"]).unwrap();
    let mut command = cluster.command(1, "python3");
    command.args(["-c", EXTENDED, "/mfs/2/tmp/d"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut asker = command.spawn().unwrap();
    let (mut ask, said) = (asker.stdin.take().unwrap(), asker.stdout.take().unwrap());
    let mut said = BufReader::new(said).lines();
    let mut says = || said.next().unwrap().unwrap();
    let sent = says();
    // Without caching it would be three requests for each file, and one more.
    assert!(sent.parse::<u64>().unwrap_or_else(|_| panic!("{sent}")) < 200, "{sent} packets");
    writeln!(ask).unwrap();
    let name = says();
    let give = "import os, sys; os.setxattr(sys.argv[1], 'user.b', b'x'); os.setxattr(sys.argv[1], 'trusted.c', b'x')";
    cluster.run(2, &["python3", "-c", give, &format!("/tmp/d/{name}")]).unwrap();
    writeln!(ask).unwrap();
    assert_eq!(says(), "done");
    assert!(asker.wait().unwrap().success());
}

#[test]
fn rights_to_read_and_to_search_a_directory_are_as_at_home() {
    let cluster = Cluster::with_nodes("mfsreadable", 2).unwrap();
    cluster.run(1, &["sh", "-ec", "mkdir -p /mfs; mount.mfs mymfs /mfs"]).unwrap();
    let make = "for mode in 744 711 700 755; do \
        mkdir -p /tmp/d/$mode/sub; touch /tmp/d/$mode/file; chmod $mode /tmp/d/$mode; done";
    for node in [1, 2] {
        cluster.run(node, &["sh", "-ec", make]).unwrap();
    }
    let listed = |directory: &str| {
        let line = format!(
            "setpriv --reuid 1234 --regid 1234 --clear-groups sh -c 'ls {directory}; cat {directory}/file; \
             cd {directory} && pwd; ls {directory}/sub; find {directory} | sort' 2>&1; true"
        );
        let said = String::from_utf8(cluster.run(1, &["sh", "-c", &line]).unwrap()).unwrap();
        said.replace(directory, "DIR")
    };
    for mode in ["744", "711", "700", "755"] {
        let native = listed(&format!("/tmp/d/{mode}"));
        let lists = native.starts_with("file\nsub\n");
        assert_eq!(lists, ["744", "755"].contains(&mode), "{mode}: {native}");
        let away = format!("/mfs/2/tmp/d/{mode}");
        assert_eq!(listed(&away), native, "{mode}");
        // The entries are cached now, as root's.
        cluster.run(1, &["sh", "-ec", &format!("ls -l {away}; cat {away}/file")]).unwrap();
        assert_eq!(listed(&away), native, "{mode}");
    }
}
