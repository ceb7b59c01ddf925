//! The cluster moves work by itself: equal jobs spread, a node that is emptied is left, and what is locked stays.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tern_tests::jobs::{await_places, finish, job, known, places};

#[test]
fn equal_jobs_spread_and_stay() {
    let cluster = known("spread", 3).unwrap();
    let jobs: Vec<_> = (0..6).map(|_| job(&cluster, "mosrun").unwrap()).collect();
    await_places(&cluster, &jobs, "they do not spread", |places| {
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
    await_places(&cluster, &jobs, "nobody goes to node 2", |places| places.contains_key(&2));
    cluster.run(2, &["mosctl", "expel", "--within", "60"]).unwrap();
    let settled = Instant::now();
    while settled.elapsed() < Duration::from_secs(5) {
        let (places, _) = places(&cluster, &jobs);
        assert!(!places.contains_key(&2), "{places:?}\n{}", cluster.scene(0));
        std::thread::sleep(Duration::from_secs(1));
    }
    cluster.run(2, &["mosctl", "noblock"]).unwrap();
    // Of four on two nodes it is worth going back.
    await_places(&cluster, &jobs, "nobody comes back to node 2", |places| places.contains_key(&2));
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
    await_places(&cluster, &free, "the free one stays", |places| places.contains_key(&2));
    for jobs in [&locked, &never, &plain] {
        assert_eq!(places(&cluster, jobs).0.keys().collect::<Vec<_>>(), [&1]);
    }
    let why = cluster.run(1, &["migrate", "--why", &locked[0].pid.to_string()]).unwrap();
    assert!(String::from_utf8_lossy(&why).contains("it is locked"), "{}", String::from_utf8_lossy(&why));
    for jobs in [locked, never, plain, free] {
        finish(&cluster, jobs).unwrap();
    }
}
