//! Coherence: a reader gets the newer of two versions of the same size, a thousand times, and a
//! change by a local program of the server is soon visible where the file is open.

use anyhow::Result;
use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;
use tern_tests::drivers::line_client::LineClient;

/// Number of writes, each followed by a read on another node.
const ROUNDS: u32 = 1000;

/// Number of changes by a local program while the file is open elsewhere.
const LOCAL_CHANGES: u32 = 10;

/// The term of a lease.
const LEASE_TERM: Duration = Duration::from_secs(1);

/// Performs an operation in one directory for each line, and replies with a line.
const WORKER: &str = r#"
import os, sys, time
place, kept = sys.argv[1], {}
def until(what):
    end = time.monotonic() + 30
    while not what() and time.monotonic() < end:
        time.sleep(0.002)
    return what()
def name(of):
    return f"{place}/{of}"
def held(of):
    if of not in kept:
        kept[of] = os.open(name(of), os.O_RDONLY)
    return kept[of]
for line in sys.stdin:
    verb, of, value = line.split()
    said = "done"
    if verb == "write":
        file = os.open(name(of), os.O_WRONLY)
        os.write(file, value.encode())
        os.close(file)
    elif verb == "over":
        with open(name("new"), "w") as file:
            file.write(value)
        os.rename(name("new"), name(of))
    elif verb == "chmod":
        os.chmod(name(of), int(value, 8))
    elif verb == "make":
        open(name(of), "x").close()
    elif verb == "remove":
        os.unlink(name(of))
    elif verb == "read":
        with open(name(of)) as file:
            said = file.read()
    elif verb == "keep":
        # A file that has just changed is not cached yet.
        for turn in range(15):
            os.pread(held(of), 100, 0), os.fstat(held(of)), time.sleep(0.01)
    elif verb == "sees":
        said = until(lambda: os.pread(held(of), 100, 0).decode() == value)
    elif verb == "mode":
        said = until(lambda: os.fstat(held(of)).st_mode & 0o777 == int(value, 8))
    elif verb == "there":
        said = until(lambda: os.path.exists(name(of)) == (value == "yes"))
    print(said, flush=True)
"#;

/// A program on one node.
fn worker(cluster: &Cluster, node: u16, place: &str) -> Result<LineClient> {
    LineClient::start(cluster.command(node, "timeout").args(["500", "/usr/bin/python3", "-c", WORKER, place]))
}

fn mounted(prefix: &str, nodes: u16, on: &[u16]) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(prefix, nodes)?;
    for node in on {
        cluster.run(*node, &["mkdir", "-p", "/mfs"])?;
        cluster.run(*node, &["mount.mfs", "mymfs", "/mfs"])?;
    }
    cluster.run(2, &["sh", "-c", "mkdir -m 777 /tmp/co; printf 000000 > /tmp/co/file"])?;
    Ok(cluster)
}

#[test]
fn read_after_remote_write_sees_new_data_a_thousand_times() {
    let cluster = mounted("mfsthousand", 3, &[1, 3]).unwrap();
    // Node 2 has the files, so the writer there is a local program.
    for (writer, place) in [(3, "/mfs/2/tmp/co"), (2, "/tmp/co")] {
        for verb in ["write", "over"] {
            let mut writer = worker(&cluster, writer, place).unwrap();
            let mut reader = worker(&cluster, 1, "/mfs/2/tmp/co").unwrap();
            let mut wrong = Vec::new();
            for round in 0..ROUNDS {
                assert_eq!(writer.request(&format!("{verb} file {round:06}")), "done");
                let read = reader.request("read file -");
                if read != format!("{round:06}") {
                    wrong.push((round, read));
                }
            }
            assert!(wrong.is_empty(), "{verb} in {place}: {} wrong: {wrong:?}", wrong.len());
        }
    }
}

#[test]
fn local_change_is_visible_before_the_lease_expires() {
    let cluster = mounted("mfsnoticed", 2, &[1]).unwrap();
    let mut local = worker(&cluster, 2, "/tmp/co").unwrap();
    let mut reader = worker(&cluster, 1, "/mfs/2/tmp/co").unwrap();
    let mut waited = Duration::ZERO;
    for round in 0..LOCAL_CHANGES {
        let (value, mode) = (format!("{round:06}"), if round % 2 == 0 { "640" } else { "600" });
        let there = if round % 2 == 0 { ("make", "yes") } else { ("remove", "no") };
        for (done, seen) in [
            (format!("write file {value}"), format!("sees file {value}")),
            (format!("chmod file {mode}"), format!("mode file {mode}")),
            (format!("{} name -", there.0), format!("there name {}", there.1)),
        ] {
            assert_eq!(reader.request("keep file -"), "done");
            assert_eq!(local.request(&done), "done");
            let begun = Instant::now();
            assert_eq!(reader.request(&seen), "True", "{seen}");
            waited += begun.elapsed();
        }
    }
    // Without recalls, a change would be visible only when the cached data expires: two of three
    // changes would take half a term or longer.
    assert!(waited < LEASE_TERM * LOCAL_CHANGES / 4, "it took {waited:?}");
    cluster.run(2, &["grep", "a local program has changed a leased file", "/run/tern/mfs.log"]).unwrap();
}
