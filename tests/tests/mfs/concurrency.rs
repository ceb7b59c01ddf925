//! Many concurrent calls.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use tern_tests::cluster::Cluster;

/// Looks up as many files of node 2 at once as there are threads; while all wait for their replies,
/// lists /mfs.
const LOOKERS: &str = "
import os, threading, time
def look(number):
    try:
        os.stat(f'/mfs/2/tmp/none{number}')
    except OSError:
        pass
def waiting():
    calls = [open(f'/proc/self/task/{thread}/syscall').read().split()[0] for thread in os.listdir('/proc/self/task')]
    return sum(call in ('4', '262', '332') for call in calls)
threads = [threading.Thread(target=look, args=(number,)) for number in range(24)]
for thread in threads:
    thread.start()
while waiting() < 24:
    time.sleep(0.01)
print('listed' if '2' in os.listdir('/mfs') else 'empty', waiting(), flush=True)
for thread in threads:
    thread.join()
print('all', flush=True)
";

#[test]
fn calls_to_a_hung_node_do_not_block_others() {
    let cluster = Cluster::with_nodes("mfswaits", 2).unwrap();
    cluster.run(1, &["mkdir", "-p", "/mfs"]).unwrap();
    cluster.run(1, &["mount.mfs", "mymfs", "/mfs", "-o", "timeout=60"]).unwrap();
    cluster.run(1, &["ls", "/mfs/2/tmp"]).unwrap();
    cluster.run(2, &["pkill", "-STOP", "-f", "[t]ern-mfs.*serve"]).unwrap();
    let mut python = cluster.command(1, "timeout");
    let mut program =
        python.args(["50", "/usr/bin/python3", "-c", LOOKERS]).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(program.stdout.take().unwrap()).lines();
    let first = said.next().map(Result::unwrap);
    cluster.run(2, &["pkill", "-CONT", "-f", "[t]ern-mfs.*serve"]).unwrap();
    assert_eq!(first.as_deref(), Some("listed 24"));
    assert_eq!(said.next().map(Result::unwrap).as_deref(), Some("all"));
    assert!(program.wait().unwrap().success());
}
