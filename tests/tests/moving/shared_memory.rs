//! After a program that is away has unmapped shared memory or a file, neither takes memory,
//! descriptors or mappings on any node.

use anyhow::{Context, Result, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{
    TestProcess, await_up, kill_daemon, pids, start_daemon, wait_until,
};
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::{ANNOUNCE, Running};

/// How often the program maps and unmaps a mebibyte.
const TIMES: &str = "200";

/// Number of lines with this pattern in the output of a command on a node.
fn lines(cluster: &Cluster, node: u16, command: &str, pattern: &str) -> Result<usize> {
    let count = cluster.run(node, &["sh", "-c", &format!("{command} | grep -c '{pattern}'; true")])?;
    Ok(String::from_utf8_lossy(&count).trim().parse()?)
}

#[test]
fn unmapped_shared_memory_is_freed() -> Result<()> {
    let program = named("unmapped", Flavour::Static)?;
    let cluster = Cluster::without_quotas("unmapped", 2)?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh", "mosrun", "-2"]).arg(program).arg(TIMES);
    let until = "/tmp/until-unmapped";
    command.env("TERN_SECONDS", "0").env("TERN_UNTIL", until);
    let mut running = Running::start(&mut command, false)?;
    running.await_output("unmapped")?;
    // The program and its child still share one piece.
    let mapped = format!("cat /proc/{}/maps", running.pid);
    let held = || -> Result<[usize; 3]> {
        let shims = pids(&cluster, 2, "tern-shim")?;
        let of_guests: Vec<String> = shims.iter().map(|pid| format!("/proc/{pid}/fd")).collect();
        let of_home = pids(&cluster, 1, "tern-shim")?;
        let of_home: Vec<String> = of_home.iter().map(|pid| format!("/proc/{pid}/fd")).collect();
        Ok([
            lines(&cluster, 2, &format!("ls -l {}", of_guests.join(" ")), "tern-shared")?,
            lines(&cluster, 1, &format!("ls -l {}", of_home.join(" ")), "/dev/zero")?,
            lines(&cluster, 1, &mapped, "/dev/zero")?,
        ])
    };
    let are_freed = || held().is_ok_and(|held| held.iter().all(|count| *count <= 1));
    wait_until("the memory is freed", Duration::from_secs(20), are_freed)
        .with_context(|| format!("held by the guest's shim, home's shim and the deputy: {:?}", held()))?;
    for to in ["home", "2"] {
        cluster.migrate(running.pid, to)?;
    }
    cluster.touch(until)?;
    let end = running.finish(Duration::from_secs(60))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}");
    Ok(())
}

/// Maps and unmaps files that only their owner may read, and maps the first one again when its input
/// ends.
const MAPS_FILES: &str = "
import mmap, os, sys, tempfile
folder = tempfile.TemporaryDirectory()
def path(number):
    return f'{folder.name}/{number}'
def first_byte(number):
    with open(path(number), 'rb') as file:
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as content:
            return content[0]
for number in range(30):
    with open(path(number), 'wb') as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(bytes([number]) * (1 << 20))
for number in range(30):
    assert first_byte(number) == number
print('unmapped', flush=True)
sys.stdin.read()
print('PASS' if first_byte(0) == 0 else 'FAIL')
";

#[test]
fn content_of_unmapped_files_is_freed() -> Result<()> {
    let cluster = Cluster::with_nodes("unmappedfiles", 2)?;
    let mut running = Running::python(&cluster, &["-2"], MAPS_FILES, "unmapped")?;
    let held = || -> Result<usize> {
        let shims = pids(&cluster, 2, "tern-shim")?;
        let descriptors: Vec<String> = shims.iter().map(|pid| format!("/proc/{pid}/fd")).collect();
        lines(&cluster, 2, &format!("ls -l {}", descriptors.join(" ")), "tern-content")
    };
    let are_freed = || held().is_ok_and(|held| held <= 1);
    wait_until("the content is freed", Duration::from_secs(30), are_freed)
        .with_context(|| format!("{:?} files are held", held()))?;
    running.close_input();
    let end = running.finish(Duration::from_secs(60))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}");
    Ok(())
}

/// Shares memory as Python's multiprocessing and SQLite do, prints a line, and checks the memory when
/// its input ends.
const SHARES: &str = "
import multiprocessing, sqlite3, sys, tempfile
from multiprocessing.shared_memory import SharedMemory
def add(lock, memory):
    for _ in range(100):
        with lock:
            memory.buf[0:4] = (int.from_bytes(memory.buf[0:4], 'big') + 1).to_bytes(4, 'big')
context = multiprocessing.get_context('fork')
lock, memory = context.Lock(), SharedMemory(create=True, size=1 << 20)
children = [context.Process(target=add, args=(lock, memory)) for _ in range(3)]
for child in children:
    child.start()
for child in children:
    child.join()
folder = tempfile.TemporaryDirectory()
database = sqlite3.connect(folder.name + '/numbers')
assert database.execute('pragma journal_mode=wal').fetchone() == ('wal',)
database.execute('create table numbers (number integer)')
for number in range(20):
    with database:
        database.execute('insert into numbers values (?)', (number,))
print('shared', flush=True)
sys.stdin.read()
assert int.from_bytes(memory.buf[0:4], 'big') == 300
assert database.execute('select sum(number) from numbers').fetchone() == (190,)
memory.close()
memory.unlink()
print('PASS')
";

#[test]
fn process_that_maps_shared_files_stays_away() -> Result<()> {
    let cluster = Cluster::without_quotas("mapsaway", 2)?;
    let mut running = Running::python(&cluster, &["-2"], SHARES, "shared")?;
    let place = cluster.location(running.pid)?.context("mps does not list it")?;
    let log = cluster.shim_logs(running.pid);
    ensure!(place.0 == 2 && !log.contains("fetched home"), "{place:?}: {log}");
    running.close_input();
    let end = running.finish(Duration::from_secs(60))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}");
    Ok(())
}

/// Home repeats its request to a group to come home if one of the group was busy. A guest that has
/// sent everything by then must not take the repetition for a new request.
#[test]
fn repeated_requests_bring_a_group_home() -> Result<()> {
    let cluster = Cluster::without_quotas("repeated", 2)?;
    kill_daemon(&cluster, 1)?;
    start_daemon(&cluster, 1, &["TERN_FAULT=home:prepare:repeat".to_owned()])?;
    await_up(&cluster, 1)?;
    let mut process = TestProcess::start(&cluster, "shared")?;
    for to in ["2", "home", "2", "home", "2", "home"] {
        process.migrate(to)?;
    }
    process.finish_correctly(Duration::from_secs(60))
}
