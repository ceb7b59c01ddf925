//! A program at home opens a file that a process away has mapped shared.

use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::runs::running::{ANNOUNCE, Running};

/// Increments the first word of a file on request until it is asked to end; then prints the second
/// word.
const SHARER: &str = r#"
import mmap, os, struct, time
file = os.open("/tmp/shared", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4096)
shared = mmap.mmap(file, 4096)
while not os.path.exists("/tmp/enough"):
    if os.path.exists("/tmp/count"):
        shared[:4] = struct.pack("I", struct.unpack("I", shared[:4])[0] + 1)
        os.remove("/tmp/count")
    time.sleep(0.001)
print(struct.unpack("I", shared[4:8])[0])
"#;

/// Prints the first word, and increments the second.
const OPENER: &str = r#"
import mmap, os, struct
shared = mmap.mmap(os.open("/tmp/shared", os.O_RDWR), 4096)
first, second = struct.unpack("II", shared[:8])
shared[4:8] = struct.pack("I", second + 1)
print(first)
"#;

/// open(2) blocks until the sharing processes are home: it sees what they have written, and they
/// see what it writes.
#[test]
fn open_at_home_brings_memory_sharers_home() {
    let cluster = Cluster::with_nodes("opened", 2).unwrap();
    let mut command = cluster.command(1, "mosrun");
    command.args(["-L", "sh", "-c", ANNOUNCE, "sh", "/usr/bin/python3", "-c", SHARER]);
    let mut running = Running::start(&mut command, false).unwrap();
    running.close_input();
    let pid = running.pid;
    let on_1 = |words: &[&str]| String::from_utf8_lossy(&cluster.run(1, words).unwrap()).trim().to_owned();
    on_1(&["sh", "-c", "until [ -s /tmp/shared ]; do sleep 0.01; done"]);
    for round in ["1", "2"] {
        cluster.migrate(pid, "2").unwrap();
        on_1(&["sh", "-c", "touch /tmp/count; while [ -e /tmp/count ]; do sleep 0.01; done"]);
        assert_eq!(on_1(&["/usr/bin/python3", "-c", OPENER]), round, "{}", cluster.diagnostics(pid));
        let (at, why) = cluster.location(pid).unwrap().unwrap();
        assert!(at == 1 && why.contains("opens what it shares"), "it is on {at}: {why}");
    }
    cluster.touch("/tmp/enough").unwrap();
    let end = running.finish(Duration::from_secs(30)).unwrap();
    assert_eq!(
        (end.status, String::from_utf8_lossy(&end.out).trim()),
        (0, "2"),
        "{}",
        cluster.diagnostics(pid)
    );
}

/// Home cannot bring the sharing process home at once, since its node is not reachable. An open by a
/// process that is not traced waits for as long as that lasts, and so does one by a process that
/// another shim traces, since its program runs away.
#[test]
fn open_at_home_waits_for_memory_sharers_behind_a_cut_link() {
    let cluster = Cluster::with_nodes("opencut", 3).unwrap();
    let mut command = cluster.command(1, "mosrun");
    command.args(["-L", "sh", "-c", ANNOUNCE, "sh", "/usr/bin/python3", "-c", SHARER]);
    let mut running = Running::start(&mut command, false).unwrap();
    running.close_input();
    let pid = running.pid;
    let on_1 = |words: &[&str]| String::from_utf8_lossy(&cluster.run(1, words).unwrap()).trim().to_owned();
    on_1(&["sh", "-c", "until [ -s /tmp/shared ]; do sleep 0.01; done"]);
    let openers: [&[&str]; 2] = [&[], &["mosrun", "-3", "-L"]];
    for (round, opener) in ["1", "2"].into_iter().zip(openers) {
        cluster.migrate(pid, "2").unwrap();
        on_1(&["sh", "-c", "touch /tmp/count; while [ -e /tmp/count ]; do sleep 0.01; done"]);
        cluster.lab().cut(Cable::Pair(1, 2)).unwrap();
        let words = [opener, &["/usr/bin/python3", "-c", OPENER]].concat();
        let read = std::thread::scope(|scope| {
            let opener = scope.spawn(|| cluster.run(1, &words));
            // Longer than home may take for the return of a reachable group.
            std::thread::sleep(Duration::from_secs(5));
            assert!(!opener.is_finished(), "it opened memory whose content is not reachable");
            cluster.lab().heal(Cable::Pair(1, 2)).unwrap();
            opener.join().unwrap()
        });
        let read = read.unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.diagnostics(pid)));
        assert_eq!(String::from_utf8_lossy(&read).trim(), round, "{}", cluster.diagnostics(pid));
    }
    cluster.touch("/tmp/enough").unwrap();
    let end = running.finish(Duration::from_secs(30)).unwrap();
    assert_eq!(
        (end.status, String::from_utf8_lossy(&end.out).trim()),
        (0, "2"),
        "{}",
        cluster.diagnostics(pid)
    );
}
