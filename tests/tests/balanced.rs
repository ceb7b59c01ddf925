//! The cluster moves work by itself: equal jobs spread, a node that is emptied is left, and what is locked stays.
#![forbid(unsafe_code)]

use anyhow::Result;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tern_control::ProcessRow;
use tern_tests::cluster::Cluster;
use tern_tests::running::{ANNOUNCE, Running};

/// However busy the machine is, it has happened by then.
const PATIENCE: Duration = Duration::from_secs(90);

/// A program on node 1 that computes, and does nothing else, until it is killed; started with `words` in front of it.
fn job(cluster: &Cluster, words: &str) -> Result<Running> {
    let mut command = cluster.command(1, "sh");
    let script = format!("exec {words} sh -c \"$0\" sh \"$@\"");
    command.args(["-c", &script, ANNOUNCE, "awk", "BEGIN { while (1) i++ }"]);
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    Ok(running)
}

/// A cluster whose nodes have heard of each other.
fn known(name: &str, nodes: u16) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(name, nodes)?;
    let end = Instant::now() + PATIENCE;
    for (one, other) in (1..=nodes).flat_map(|one| (1..=nodes).map(move |other| (one, other))) {
        while cluster.run(one, &["mosctl", "getload", &other.to_string()]).is_err() {
            assert!(Instant::now() < end, "node {one} hears nothing of {other}\n{}", cluster.scene(0));
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    Ok(cluster)
}

/// How many of these run where, and the most moves that one of them has made.
fn places(cluster: &Cluster, jobs: &[Running]) -> (BTreeMap<u16, usize>, u32) {
    let rows = cluster.processes(1).unwrap_or_default();
    let mine = |row: &&ProcessRow| jobs.iter().any(|job| job.pid == row.pid.0);
    let mut places = BTreeMap::new();
    for row in rows.iter().filter(mine) {
        *places.entry(row.r#where.map_or(1, |node| node.0)).or_default() += 1;
    }
    // Those that have never left are not told of.
    let at_home = jobs.len() - places.values().sum::<usize>();
    if at_home > 0 {
        *places.entry(1).or_default() += at_home;
    }
    (places, rows.iter().filter(mine).map(|row| row.migrations).max().unwrap_or(0))
}

fn until(cluster: &Cluster, jobs: &[Running], what: &str, holds: impl Fn(&BTreeMap<u16, usize>) -> bool) {
    let end = Instant::now() + PATIENCE;
    loop {
        let (places, _) = places(cluster, jobs);
        if holds(&places) {
            return;
        }
        assert!(Instant::now() < end, "{what}: {places:?}\n{}", cluster.scene(0));
        // Each look is work that the node is measured by.
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Wherever they are, their signals find them.
fn finish(cluster: &Cluster, jobs: Vec<Running>) -> Result<()> {
    for mut job in jobs {
        cluster.run(1, &["kill", &job.pid.to_string()])?;
        let outcome = job.finish(PATIENCE)?;
        assert_eq!(outcome.status, 128 + 15, "{}", cluster.scene(job.pid));
    }
    Ok(())
}

#[test]
fn equal_jobs_spread_and_stay() {
    let cluster = known("spread", 3).unwrap();
    let jobs: Vec<_> = (0..6).map(|_| job(&cluster, "mosrun").unwrap()).collect();
    until(&cluster, &jobs, "they do not spread", |places| {
        [1, 2, 3].iter().all(|n| places.get(n) == Some(&2))
    });
    // Two rounds of gossip and decisions later nobody has thought better of it.
    let settled = Instant::now();
    while settled.elapsed() < Duration::from_secs(5) {
        let (places, most) = places(&cluster, &jobs);
        assert!(places.values().all(|count| *count == 2), "{places:?}\n{}", cluster.scene(0));
        assert!(most <= 1, "one has moved {most} times\n{}", cluster.scene(0));
        std::thread::sleep(Duration::from_secs(1));
    }
    finish(&cluster, jobs).unwrap();
}

#[test]
fn a_node_that_is_emptied_is_left_and_not_entered() {
    let cluster = known("emptied", 3).unwrap();
    let jobs: Vec<_> = (0..4).map(|_| job(&cluster, "mosrun").unwrap()).collect();
    until(&cluster, &jobs, "nobody goes to node 2", |places| places.contains_key(&2));
    cluster.run(2, &["mosctl", "expel", "--within", "60"]).unwrap();
    let settled = Instant::now();
    while settled.elapsed() < Duration::from_secs(5) {
        let (places, _) = places(&cluster, &jobs);
        assert!(!places.contains_key(&2), "{places:?}\n{}", cluster.scene(0));
        std::thread::sleep(Duration::from_secs(1));
    }
    cluster.run(2, &["mosctl", "noblock"]).unwrap();
    // Of four on two nodes it is worth going back.
    until(&cluster, &jobs, "nobody comes back to node 2", |places| places.contains_key(&2));
    cluster.run(1, &["mosctl", "bring", "--within", "60"]).unwrap();
    let (places, _) = places(&cluster, &jobs);
    assert_eq!(places, BTreeMap::from([(1, 4)]), "{}", cluster.scene(0));
    finish(&cluster, jobs).unwrap();
}

#[test]
fn the_locked_and_the_never_started_stay() {
    let cluster = known("locked", 2).unwrap();
    let locked: Vec<_> = (0..2).map(|_| job(&cluster, "mosrun -L").unwrap()).collect();
    let never: Vec<_> = (0..1).map(|_| job(&cluster, "nomig").unwrap()).collect();
    let plain: Vec<_> = (0..1).map(|_| job(&cluster, "").unwrap()).collect();
    let free: Vec<_> = (0..1).map(|_| job(&cluster, "mosrun").unwrap()).collect();
    until(&cluster, &free, "the free one stays", |places| places.contains_key(&2));
    for jobs in [&locked, &never, &plain] {
        assert_eq!(places(&cluster, jobs).0.keys().collect::<Vec<_>>(), [&1]);
    }
    let why = cluster.run(1, &["migrate", "--why", &locked[0].pid.to_string()]).unwrap();
    assert!(String::from_utf8_lossy(&why).contains("it is locked"), "{}", String::from_utf8_lossy(&why));
    for jobs in [locked, never, plain, free] {
        finish(&cluster, jobs).unwrap();
    }
}
