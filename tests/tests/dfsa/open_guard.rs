//! A program at home opens a file that a process away has mapped shared.

use anyhow::{Context, Result, anyhow, ensure};
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

/// A program on node 1 that maps a file shared.
struct Sharer {
    cluster: Cluster,
    running: Running,
}

impl Sharer {
    /// Starts it in a cluster of its own, and waits until the file is there.
    fn start(name: &str, nodes: u16) -> Result<Self> {
        let cluster = Cluster::with_nodes(name, nodes)?;
        let mut command = cluster.command(1, "mosrun");
        command.args(["-L", "sh", "-c", ANNOUNCE, "sh", "/usr/bin/python3", "-c", SHARER]);
        let mut running = Running::start(&mut command, false)?;
        running.close_input();
        cluster.run(1, &["sh", "-c", "until [ -s /tmp/shared ]; do sleep 0.01; done"])?;
        Ok(Self { cluster, running })
    }

    /// Moves it to node 2, where it increments the first word.
    fn count_away(&self) -> Result<()> {
        self.cluster.migrate(self.running.pid, "2").map_err(|refused| anyhow!("{refused:?}"))?;
        let count = "touch /tmp/count; while [ -e /tmp/count ]; do sleep 0.01; done";
        self.cluster.run(1, &["sh", "-c", count]).map(drop)
    }

    /// Checks the first word that an opener has printed.
    fn check(&self, opened: Result<Vec<u8>>, first: &str) -> Result<()> {
        let read = opened.with_context(|| self.diagnostics())?;
        let read = String::from_utf8_lossy(&read);
        ensure!(read.trim() == first, "{read:?} instead of {first}: {}", self.diagnostics());
        Ok(())
    }

    /// Ends it, and checks the second word.
    fn finish(mut self, second: &str) -> Result<()> {
        self.cluster.touch("/tmp/enough")?;
        let end = self.running.finish(Duration::from_secs(30))?;
        let is_right = end.status == 0 && String::from_utf8_lossy(&end.out).trim() == second;
        ensure!(is_right, "{end:?} instead of {second}: {}", self.diagnostics());
        Ok(())
    }

    fn diagnostics(&self) -> String {
        self.cluster.diagnostics(self.running.pid)
    }
}

/// open(2) blocks until the sharing processes are home: it sees what they have written, and they
/// see what it writes.
#[test]
fn open_at_home_brings_memory_sharers_home() -> Result<()> {
    let sharer = Sharer::start("opened", 2)?;
    for round in ["1", "2"] {
        sharer.count_away()?;
        sharer.check(sharer.cluster.run(1, &["/usr/bin/python3", "-c", OPENER]), round)?;
        let (at, why) = sharer.cluster.location(sharer.running.pid).unwrap().unwrap();
        assert!(at == 1 && why.contains("is opening its shared memory"), "it is on {at}: {why}");
    }
    sharer.finish("2")
}

/// Home cannot bring the sharing process home at once, because that process's node is unreachable.
/// An open of the file waits until the node is reachable again. The test opens it by a process that
/// is not traced, and by a process that another shim traces, because its program runs away.
#[test]
fn open_at_home_waits_for_memory_sharers_behind_a_cut_link() -> Result<()> {
    let sharer = Sharer::start("opencut", 3)?;
    let lab = sharer.cluster.lab();
    let openers: [&[&str]; 2] = [&[], &["mosrun", "-3", "-L"]];
    for (round, opener) in ["1", "2"].into_iter().zip(openers) {
        sharer.count_away()?;
        lab.cut(Cable::Pair(1, 2)).unwrap();
        let words = [opener, &["/usr/bin/python3", "-c", OPENER]].concat();
        let opened = std::thread::scope(|scope| {
            let opener = scope.spawn(|| sharer.cluster.run(1, &words));
            // Longer than home may take for the return of a reachable group.
            std::thread::sleep(Duration::from_secs(5));
            assert!(!opener.is_finished(), "it opened memory whose content is not reachable");
            lab.heal(Cable::Pair(1, 2)).unwrap();
            opener.join().unwrap()
        });
        sharer.check(opened, round)?;
    }
    sharer.finish("2")
}
