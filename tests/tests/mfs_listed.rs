//! Directories of another node, listed and looked at.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::Duration;
use tern_tests::breaking::until;
use tern_tests::cluster::Cluster;

/// Lists directories, and looks at each entry after that: what differs, how many there were, and how many packets this node sent.
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
fn directories_are_listed_as_they_are_and_few_trips_look_at_all_of_one() {
    let cluster = Cluster::with_nodes("mfslisted", 2).unwrap();
    cluster.run(1, &["sh", "-ec", "mkdir -p /mfs; mount.mfs mymfs /mfs"]).unwrap();
    // A disk of one piece: the lab's overlay lists other numbers than its files have.
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
    // Of a large one the first are looked up, and names without inodes follow; then all, since somebody looks at them.
    for _ in 0..2 {
        assert_eq!(listed("large").0, "3000");
    }
    let (entries, packets) = listed("1 2 3 4 5 6");
    assert_eq!(entries, "2994");
    // A trip for each would be as many.
    assert!(packets < 500, "{packets} packets");
}

#[test]
fn what_is_removed_where_it_is_gives_its_room_back_though_others_have_seen_it() {
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
    until("room of a file that is open nowhere", Duration::from_secs(60), || free() >= 10).unwrap();
    // One that is open is as it was.
    writeln!(ask).unwrap();
    assert_eq!((says(), says()), ("1".into(), "0".into()));
    assert_eq!(free(), 10);
    writeln!(ask).unwrap();
    assert!(reader.wait().unwrap().success());
    until("room of a file that was open", Duration::from_secs(60), || free() == 16).unwrap();
}
