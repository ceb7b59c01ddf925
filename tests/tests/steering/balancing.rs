//! Load balancing: equal jobs spread, an emptied node is left, and locked processes stay.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tern_control::{ClusterReport, NodeLoad};
use tern_ids::NodeId;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{configure, pids, wait_until};
use tern_tests::cluster::jobs::{
    EVENT_TIMEOUT, await_places, connected_cluster, connected_cluster_with_memory, finish, job, job_on,
    places, program,
};

#[test]
fn equal_jobs_spread_and_stay() {
    let cluster = connected_cluster("spread", 3).unwrap();
    let jobs: Vec<_> = (0..6).map(|_| job(&cluster, "mosrun").unwrap()).collect();
    await_places(&cluster, &jobs, "the jobs do not spread", |places| {
        [1, 2, 3].iter().all(|n| places.get(n) == Some(&2))
    });
    // The decision is not reversed within the next rounds of gossip and balancing.
    let settled = Instant::now();
    while settled.elapsed() < Duration::from_secs(5) {
        let (places, most) = places(&cluster, &jobs);
        assert!(places.values().all(|count| *count == 2), "{places:?}\n{}", cluster.diagnostics(0));
        assert!(most <= 1, "a job has moved {most} times\n{}", cluster.diagnostics(0));
        std::thread::sleep(Duration::from_secs(1));
    }
    finish(&cluster, jobs).unwrap();
}

#[test]
fn expelled_node_is_left_and_not_entered() {
    let cluster = connected_cluster("emptied", 3).unwrap();
    let jobs: Vec<_> = (0..4).map(|_| job(&cluster, "mosrun").unwrap()).collect();
    await_places(&cluster, &jobs, "no job goes to node 2", |places| places.contains_key(&2));
    cluster.run(2, &["mosctl", "expel", "--within", "60"]).unwrap();
    let settled = Instant::now();
    while settled.elapsed() < Duration::from_secs(5) {
        let (places, _) = places(&cluster, &jobs);
        assert!(!places.contains_key(&2), "{places:?}\n{}", cluster.diagnostics(0));
        std::thread::sleep(Duration::from_secs(1));
    }
    cluster.run(2, &["mosctl", "noblock"]).unwrap();
    // With four jobs on two nodes, going back is worthwhile.
    await_places(&cluster, &jobs, "no job comes back to node 2", |places| places.contains_key(&2));
    cluster.run(1, &["mosctl", "bring", "--within", "60"]).unwrap();
    let (places, _) = places(&cluster, &jobs);
    assert_eq!(places, BTreeMap::from([(1, 4)]), "{}", cluster.diagnostics(0));
    finish(&cluster, jobs).unwrap();
}

#[test]
fn node_shutdown_is_reported_as_empty() {
    let cluster = connected_cluster("farewell", 3).unwrap();
    let jobs: Vec<_> = (0..4).map(|_| job(&cluster, "mosrun").unwrap()).collect();
    let node_2 = || {
        let text = cluster.run(1, &["mon", "--json"]).unwrap();
        let report: ClusterReport = serde_json::from_slice(&text).unwrap();
        report.nodes.into_iter().find(|node| node.node == NodeId(2)).unwrap()
    };
    // The other nodes must have received a guest count that they are to replace.
    wait_until("node 1 has received the guest count of node 2", EVENT_TIMEOUT, || node_2().guests > 0)
        .unwrap();
    cluster.run(2, &["mosctl", "shutdown", "--within", "60"]).unwrap();
    let empty = |node: NodeLoad| node.flags.quiet && node.flags.block && node.guests == 0;
    wait_until("node 1 has received that node 2 is empty", EVENT_TIMEOUT, || empty(node_2())).unwrap();
    finish(&cluster, jobs).unwrap();
}

#[test]
fn locked_and_unmanaged_processes_stay() {
    let cluster = connected_cluster("locked", 2).unwrap();
    let locked: Vec<_> = (0..2).map(|_| job(&cluster, "mosrun -L").unwrap()).collect();
    let never: Vec<_> = (0..1).map(|_| job(&cluster, "nomig").unwrap()).collect();
    let plain: Vec<_> = (0..1).map(|_| job(&cluster, "").unwrap()).collect();
    let free: Vec<_> = (0..1).map(|_| job(&cluster, "mosrun").unwrap()).collect();
    await_places(&cluster, &free, "the unlocked job stays", |places| places.contains_key(&2));
    for jobs in [&locked, &never, &plain] {
        assert_eq!(places(&cluster, jobs).0.keys().collect::<Vec<_>>(), [&1]);
    }
    let why = cluster.run(1, &["migrate", "--why", &locked[0].pid.to_string()]).unwrap();
    assert!(String::from_utf8_lossy(&why).contains("it is locked"), "{}", String::from_utf8_lossy(&why));
    for jobs in [locked, never, plain, free] {
        finish(&cluster, jobs).unwrap();
    }
}

/// CPU seconds that a guest has used, as reported by its home's `mps`.
fn cpu_seconds(cluster: &Cluster, pid: i32) -> f64 {
    let rows = cluster.processes(1).unwrap_or_default();
    rows.iter().find(|row| row.pid.0 == pid).map_or(0.0, |row| row.cpu_seconds)
}

#[test]
fn time_and_moves_of_a_process_are_shown_when_it_is_home_again() {
    let cluster = connected_cluster("counted", 2).unwrap();
    let jobs = vec![job(&cluster, "mosrun -L -2").unwrap()];
    let pid = jobs[0].pid;
    await_places(&cluster, &jobs, "the job does not leave", |places| places.contains_key(&2));
    wait_until("it computes", EVENT_TIMEOUT, || cpu_seconds(&cluster, pid) > 0.5).unwrap();
    let row = || cluster.processes(1).unwrap().into_iter().find(|row| row.pid.0 == pid).expect("a row");
    let away = row();
    cluster.migrate(pid, "home").unwrap();
    let is_over = || pids(&cluster, 1, "tern-shim").is_ok_and(|shims| shims.is_empty());
    wait_until("its shim ends", EVENT_TIMEOUT, is_over).unwrap();
    let home = row();
    // The shim also counted that the new program was sent after the execve.
    assert!(home.cpu_seconds >= away.cpu_seconds && home.migrations > 0, "{home:?}, away {away:?}");
    finish(&cluster, jobs).unwrap();
}

#[test]
fn processes_of_configured_users_are_balanced() {
    let cluster = connected_cluster("named", 2).unwrap();
    configure(&cluster, 1, "balance_users = [\"4242\"]").unwrap();
    let theirs = |cluster: &Cluster, words| job(cluster, &format!("setpriv --reuid 4242 {words}")).unwrap();
    let jobs: Vec<_> = (0..2).map(|_| theirs(&cluster, "")).collect();
    let never = vec![theirs(&cluster, "nomig")];
    let leader = vec![theirs(&cluster, "setsid --wait")];
    let another = vec![job(&cluster, "setpriv --reuid 4243").unwrap()];
    await_places(&cluster, &jobs, "no job leaves", |places| places.contains_key(&2));
    for stays in [&never, &leader, &another] {
        assert_eq!(places(&cluster, stays).0.keys().collect::<Vec<_>>(), [&1]);
    }
    for jobs in [jobs, never, leader, another] {
        finish(&cluster, jobs).unwrap();
    }
}

#[test]
fn owner_of_a_node_has_priority_over_guests() {
    let cluster = connected_cluster("owner", 2).unwrap();
    configure(&cluster, 2, "owner_share = 50\nguest_cpus = 0.1").unwrap();
    let guest = vec![job(&cluster, "runon 2").unwrap()];
    await_places(&cluster, &guest, "the job does not leave", |places| places.contains_key(&2));
    // It gets a tenth of a CPU and no more, though the rest is idle.
    let pid = guest[0].pid;
    let (begun, used) = (Instant::now(), cpu_seconds(&cluster, pid));
    wait_until("it computes", EVENT_TIMEOUT, || cpu_seconds(&cluster, pid) > used + 0.3).unwrap();
    let (seconds, used) = (begun.elapsed().as_secs_f64(), cpu_seconds(&cluster, pid) - used);
    assert!(used < seconds * 0.1 + 0.3, "{used} s in {seconds} s\n{}", cluster.diagnostics(pid));
    // The owner starts to work.
    let own = vec![job_on(&cluster, 2, "").unwrap()];
    await_places(&cluster, &guest, "the guest stays although the owner works", |places| {
        !places.contains_key(&2)
    });
    let refused = cluster.migrate(pid, "2").unwrap_err();
    assert!(refused.message.contains("need it"), "{}", refused.message);
    for mut job in own {
        cluster.run(2, &["kill", &job.pid.to_string()]).unwrap();
        job.finish(EVENT_TIMEOUT).unwrap();
    }
    wait_until("guests may come again", EVENT_TIMEOUT, || cluster.migrate(pid, "2").is_ok()).unwrap();
    finish(&cluster, guest).unwrap();
}

/// Grows by 3 MB a second to 100 MB, prints that, and stays so. Six of these grow slower than the
/// nodes can send, even with half a CPU each and debug builds.
const GROWS: &str = "import time
held = []
for at in range(100):
    held.append(bytearray(b'x' * (1 << 20)))
    time.sleep(0.33)
print('full', flush=True)
while True:
    time.sleep(1)
    assert all(one == b'x' * (1 << 20) for one in held)
";

#[test]
fn growing_processes_move_before_a_node_is_full() {
    // Six of them with their interpreters need nearly twice the memory of one node.
    let cluster = connected_cluster_with_memory("memory", 3, 400 << 20).unwrap();
    let mut jobs: Vec<_> =
        (0..6).map(|_| program(&cluster, 1, "mosrun", &["python3", "-c", GROWS]).unwrap()).collect();
    for job in &mut jobs {
        let full = wait_until("it is fully grown", EVENT_TIMEOUT, || job.await_output("full").is_ok());
        full.unwrap_or_else(|e| {
            panic!("{e:#}; it has ended: {}\n{}", job.has_ended(), cluster.diagnostics(job.pid))
        });
    }
    // They must also survive some time at full size.
    std::thread::sleep(Duration::from_secs(3));
    for job in &mut jobs {
        assert!(!job.has_ended(), "one was killed\n{}", cluster.diagnostics(job.pid));
    }
    let swap = cluster.run(1, &["sh", "-c", "grep -h VmSwap /proc/[0-9]*/status"]).unwrap();
    let swapped = |line: &str| line.split_whitespace().nth(1).is_some_and(|kib| kib != "0");
    assert!(!String::from_utf8_lossy(&swap).lines().any(swapped), "{}", String::from_utf8_lossy(&swap));
    finish(&cluster, jobs).unwrap();
}

/// Reads a file of node 3 over and over, and drops it from this kernel's page cache.
const READS: &str = "import os
file = os.open('/mfs/3/tmp/data', os.O_RDONLY)
while True:
    os.lseek(file, 0, os.SEEK_SET)
    while os.read(file, 65536):
        pass
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
";

#[test]
fn file_reader_moves_to_the_files_and_computing_job_does_not() {
    let cluster = connected_cluster("drawn", 3).unwrap();
    cluster.run(1, &["sh", "-c", "mkdir -p /mfs && mount.mfs mymfs /mfs"]).unwrap();
    // Threads that all start at once would be a load that makes processes leave.
    let threads = cluster.run(1, &["sh", "-c", "ls /proc/$(pgrep tern-mfs)/task | wc -l"]).unwrap();
    let threads: usize = String::from_utf8_lossy(&threads).trim().parse().unwrap();
    assert!(threads < 32, "{threads} threads for an unused mount");
    cluster.run(3, &["sh", "-c", "head -c 16M /dev/zero > /tmp/data"]).unwrap();
    let row = |pid| cluster.processes(1).unwrap_or_default().into_iter().find(|row| row.pid.0 == pid);
    let migrations = |pid| row(pid).map_or(0, |row| row.migrations);
    // All nodes must be idle but for this process, so that there is no other reason to leave.
    // The query itself is a load as well.
    let end = Instant::now() + EVENT_TIMEOUT;
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let load = cluster.run(1, &["mosctl", "getload"]).unwrap();
        let load: u32 = String::from_utf8_lossy(&load).trim().parse().unwrap();
        if load < 20 {
            break;
        }
        assert!(Instant::now() < end, "an unexplained load of {load}\n{}", cluster.diagnostics(0));
    }
    let computes = vec![job(&cluster, "mosrun").unwrap()];
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(migrations(computes[0].pid), 0, "{}", cluster.diagnostics(computes[0].pid));
    finish(&cluster, computes).unwrap();
    let reads = vec![program(&cluster, 1, "mosrun", &["/usr/bin/python3", "-c", READS]).unwrap()];
    let pid = reads[0].pid;
    let is_there = || row(pid).is_some_and(|row| row.r#where == Some(NodeId(3)));
    wait_until("it is where its files are", EVENT_TIMEOUT, is_there)
        .unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.diagnostics(pid)));
    // The process stays: on this node it does not wait for its file, but elsewhere it would.
    let settled = Instant::now();
    while settled.elapsed() < Duration::from_secs(10) {
        assert!(is_there() && migrations(pid) == 1, "{}", cluster.diagnostics(pid));
        std::thread::sleep(Duration::from_secs(1));
    }
    let why = cluster.run(1, &["migrate", "--why", &pid.to_string()]).unwrap();
    let why = String::from_utf8_lossy(&why);
    assert!(why.contains("files of node 3: "), "{why}");
    finish(&cluster, reads).unwrap();
}
