//! What is changed in one place is seen in the others: which of two versions of the same size is read, a thousand times, and how
//! soon what a local program of the server does is seen where the file is open.

use anyhow::Result;
use std::time::{Duration, Instant};
use tern_tests::asked::Asked;
use tern_tests::cluster::Cluster;

/// How often one writes and the other one reads.
const ROUNDS: u32 = 1000;

/// How often something is changed behind the back of who has it open.
const NOTICED: u32 = 10;

/// The term of a lease.
const TERM: Duration = Duration::from_secs(1);

/// Does what each line says, in one directory, and answers each with a line.
const DOER: &str = r#"
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
        # What has just been changed is not kept yet.
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
fn doer(cluster: &Cluster, node: u16, place: &str) -> Result<Asked> {
    Asked::start(cluster.command(node, "timeout").args(["500", "/usr/bin/python3", "-c", DOER, place]))
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
fn what_was_written_is_what_is_read_a_thousand_times() {
    let cluster = mounted("mfsthousand", 3, &[1, 3]).unwrap();
    // Node 2 has the files: there the writer is a local program.
    for (writer, place) in [(3, "/mfs/2/tmp/co"), (2, "/tmp/co")] {
        for verb in ["write", "over"] {
            let mut writer = doer(&cluster, writer, place).unwrap();
            let mut reader = doer(&cluster, 1, "/mfs/2/tmp/co").unwrap();
            let mut wrong = Vec::new();
            for round in 0..ROUNDS {
                assert_eq!(writer.does(&format!("{verb} file {round:06}")), "done");
                let read = reader.does("read file -");
                if read != format!("{round:06}") {
                    wrong.push((round, read));
                }
            }
            assert!(wrong.is_empty(), "{verb} in {place}: {} wrong: {wrong:?}", wrong.len());
        }
    }
}

#[test]
fn a_local_program_is_noticed_long_before_the_term_is_over() {
    let cluster = mounted("mfsnoticed", 2, &[1]).unwrap();
    let mut local = doer(&cluster, 2, "/tmp/co").unwrap();
    let mut reader = doer(&cluster, 1, "/mfs/2/tmp/co").unwrap();
    let mut waited = Duration::ZERO;
    for round in 0..NOTICED {
        let (value, mode) = (format!("{round:06}"), if round % 2 == 0 { "640" } else { "600" });
        let there = if round % 2 == 0 { ("make", "yes") } else { ("remove", "no") };
        for (done, seen) in [
            (format!("write file {value}"), format!("sees file {value}")),
            (format!("chmod file {mode}"), format!("mode file {mode}")),
            (format!("{} name -", there.0), format!("there name {}", there.1)),
        ] {
            assert_eq!(reader.does("keep file -"), "done");
            assert_eq!(local.does(&done), "done");
            let begun = Instant::now();
            assert_eq!(reader.does(&seen), "True", "{seen}");
            waited += begun.elapsed();
        }
    }
    // Two of each three are believed until somebody says that they are not so: for half a term and more, if nobody did.
    assert!(waited < TERM * NOTICED / 4, "it took {waited:?}");
    cluster
        .run(
            2,
            &["grep", "a program of this node has changed what another one believes", "/run/tern/mfs.log"],
        )
        .unwrap();
}
