//! copy_file_range within a node's files.

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
import os, signal, sys
os.chdir(sys.argv[1])
HOW = {"r": os.O_RDONLY, "new": os.O_RDWR | os.O_CREAT}
files = {}
for line in sys.stdin:
    signal.alarm(30)
    verb, key, *words = line.split()
    said = "done"
    if verb == "open":
        files[key] = os.open(words[0], HOW[words[1]], 0o755)
    elif verb == "close":
        os.close(files.pop(key))
    elif verb == "copy":
        said = os.copy_file_range(files[key], files[words[0]], 10, 0, 0)
    print(said, flush=True)
"#;

/// Sends each line, and compares the replies.
fn run_all(worker: &mut LineClient, lines: &[(&str, &str)]) {
    for (line, wanted) in lines {
        assert_eq!(worker.request(line), *wanted, "{line}");
    }
}

/// The client opens both files again, and the previous server's opens do not remain.
#[test]
fn copy_file_range_survives_server_restart() -> Result<()> {
    let cluster = Cluster::with_nodes("mfscopy", 2)?;
    cluster.run(1, &["sh", "-c", "mkdir -m 777 /own && printf small > /own/small"])?;
    cluster.mount(2, "timeout=10")?;
    let python = ["/usr/bin/python3", "-c", WORKER, "/mfs/1/own"];
    let mut other = LineClient::start(cluster.command(2, "env").args(python))?;
    run_all(&mut other, &[("open from small r", "done"), ("open to new new", "done"), ("copy from to", "5")]);
    for _ in 0..2 {
        // A request in flight when the server dies fails, since it is unknown whether it was done.
        let anew = "p=$(pgrep -f '[t]ern-mfs.* serve'); kill -KILL $p; while [ -d /proc/$p ]; do sleep 0.05; done; \
                    until pgrep -f '[t]ern-mfs.* serve'; do sleep 0.05; done";
        cluster.run(1, &["sh", "-c", anew])?;
        run_all(&mut other, &[("copy from to", "5")]);
    }
    run_all(&mut other, &[("close to", "done"), ("close from", "done")]);
    let open = "p=$(pgrep -f '[t]ern-mfs.* serve') && ! ls -l /proc/$p/fd | grep 'lrwx.* /own/new'";
    let look = || cluster.run(1, &["sh", "-c", open]).is_ok();
    fault_injection::wait_until("no file is open at the server", EVENT_TIMEOUT, look)?;
    Ok(())
}
