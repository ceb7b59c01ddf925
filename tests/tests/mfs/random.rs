//! Random operations in the manner of fsx and fsstress, through /mfs and on the disk: each must
//! have the same result.
//!
//! TERN_SEED=N changes the seed and TERN_STEPS=N the number of steps; a failure prints both.

use anyhow::{Context, Result, ensure};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::drivers::disk_comparison::{DiskComparison, Random};

/// Largest size of the file: several pages, and more than one request carries.
const MAX_FILE_SIZE: u64 = 400_000;

/// Largest size of one operation.
const MAX_LENGTH: u64 = 90_000;

fn number(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// Runs one test with the seed and number of steps from the environment; prints both if it fails.
fn seeded(
    name: &str,
    steps: u64,
    nodes: &[u16],
    run: impl Fn(&mut DiskComparison, &mut Random, u64) -> Result<()>,
) -> Result<()> {
    let (seed, steps) = (number("TERN_SEED", 1), number("TERN_STEPS", steps));
    let cluster = mounted(name, nodes)?;
    let mut comparison = DiskComparison::start(&cluster, nodes)?;
    let ended = run(&mut comparison, &mut Random::new(seed), steps).and_then(|()| comparison.compare_trees());
    ended.with_context(|| format!("TERN_SEED={seed} TERN_STEPS={steps}"))
}

fn mounted(prefix: &str, nodes: &[u16]) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(prefix, 3)?;
    for node in nodes {
        cluster.mount(*node, "timeout=3")?;
    }
    Ok(cluster)
}

/// A random operation on one file that is open as `name`; empty if it is to be opened again.
fn file_operation(random: &mut Random, name: &str) -> String {
    let (at, length, seed) = (random.below(MAX_FILE_SIZE), random.below(MAX_LENGTH), random.below(1 << 32));
    match random.below(24) {
        0..=3 => format!("pwrite {name} {at} {length} {seed}"),
        4..=6 => format!("pread {name} {at} {length}"),
        7 => format!("read {name} {length}"),
        8 => format!("write {name} {length} {seed}"),
        9 => format!("seek {name} {at}"),
        10 => format!("ftruncate {name} {at}"),
        11 => format!("truncate f {at}"),
        12 | 13 => format!("map {name} {at} {length}"),
        14 => format!("allocate {name} {} {at} {length}", random.pick(&[0, 1, 3, 16, 17])),
        15 => format!("copy {name} {at} {name} {} {length}", random.below(MAX_FILE_SIZE)),
        16 => format!("fstat {name}"),
        17 => "get f".to_owned(),
        18 => "stat f".to_owned(),
        19 => format!("sync {name}"),
        20 => format!("end {name}"),
        _ => String::new(),
    }
}

/// As `file_operation`, or a close and an open of the file.
fn file_or_open_operation(random: &mut Random, name: &str, modes: &[&str]) -> [Option<String>; 2] {
    let operation = file_operation(random, name);
    if operation.is_empty() {
        let mode = random.pick(modes);
        return [Some(format!("close {name}")), Some(format!("open {name} f {mode}"))];
    }
    [Some(operation), None]
}

#[test]
fn random_calls_on_a_file_match_the_disk() {
    seeded("mfsfsx", 2500, &[1], |comparison, random, steps| {
        comparison.run_both(0, "put f 100000 1")?;
        for _ in 0..steps {
            for operation in
                file_or_open_operation(random, "a", &["+", "+", "r", "w", "+t", "+c"]).into_iter().flatten()
            {
                comparison.run_both(0, &operation)?;
            }
            let operation = format!("store a {} {} 5", random.below(MAX_FILE_SIZE), random.below(MAX_LENGTH));
            if random.below(20) == 0 {
                comparison.run_both(0, &operation)?;
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn random_calls_on_a_file_from_two_nodes_match_the_disk() {
    seeded("mfstwo", 2500, &[1, 3], |comparison, random, steps| {
        comparison.run_both(0, "put f 100000 1")?;
        for _ in 0..steps {
            let client = usize::try_from(random.below(2)).context("too many")?;
            // Each node has the file open twice.
            let name = format!("{}{}", random.pick(&["x", "y"]), client);
            for operation in
                file_or_open_operation(random, &name, &["+", "r", "r", "w", "+t"]).into_iter().flatten()
            {
                comparison.run_both(client, &operation)?;
            }
        }
        Ok(())
    })
    .unwrap();
}

/// A path in a tree of few names, so that operations collide.
fn path(random: &mut Random) -> String {
    let mut path = String::new();
    for _ in 0..random.below(3) {
        path += random.pick(&["d0/", "d1/", "d2/"]);
    }
    path + random.pick(&["d0", "d1", "d2", "f0", "f1", "f2", "f3", "l0", "l1"])
}

/// A random operation on a tree.
fn tree_operation(random: &mut Random) -> String {
    let (one, other) = (path(random), path(random));
    let (length, seed) = (random.below(9000), random.below(1 << 32));
    match random.below(36) {
        0..=2 => format!("create {one}"),
        3..=6 => format!("mkdir {one}"),
        7..=9 => format!("rename {one} {other} 0"),
        10 => format!("rename {one} {other} {}", 1 + random.below(2)),
        11 | 12 => format!("link {one} {other}"),
        13 => format!("symlink {other} {one}"),
        14 | 15 => format!("unlink {one}"),
        16 => format!("rmdir {one}"),
        17 => format!("chmod {one} {}", random.pick(&["600", "755", "2775", "1777", "4711"])),
        18 => format!("utime {one} {}", random.below(1000)),
        19 => format!("set {one} user.{} {seed} {}", random.pick(&["a", "b"]), random.below(3)),
        20 => format!("unset {one} user.{}", random.pick(&["a", "b"])),
        21 => format!("value {one} user.a"),
        22 => format!("attributes {one}"),
        23 => format!("chown {one} {} {}", random.below(3), random.below(3)),
        24 => format!("fifo {one}"),
        25 | 26 => format!("put {one} {length} {seed}"),
        27 => format!("truncate {one} {length}"),
        28 => format!("get {one}"),
        29 => format!("readlink {one}"),
        30 | 31 => format!("list {one}"),
        32 => "scan .".to_owned(),
        _ => format!("stat {one}"),
    }
}

#[test]
fn random_calls_on_a_tree_from_two_nodes_match_the_disk() {
    seeded("mfsstress", 3000, &[1, 3], |comparison, random, steps| {
        for step in 0..steps {
            let client = usize::try_from(random.below(2)).context("too many")?;
            let operation = tree_operation(random);
            if operation.starts_with("rename") {
                // As mv does. Without these lookups, renaming a directory that another node has
                // moved may fail with ESTALE: the kernel still has the directory's old dentry, and
                // cannot move that dentry during the rename.
                for path in operation.split(' ').skip(1).take(2) {
                    comparison.run_both(client, &format!("stat {path}"))?;
                }
            }
            // Opening a fifo would block: it has no other writer or reader.
            let opens = operation.starts_with("get") || operation.starts_with("put");
            let may = !opens || {
                let path = operation.split(' ').nth(1).unwrap_or(".");
                comparison.run_both(client, &format!("stat {path}"))?.starts_with('-')
            };
            if may {
                comparison.run_both(client, &operation)?;
            }
            if step % 500 == 0 {
                comparison.compare_trees()?;
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn random_calls_are_atomic_when_links_are_cut() {
    seeded("mfscut", 600, &[1, 3], |comparison, random, steps| {
        comparison.run_both(0, "put f 100000 1")?;
        for name in ["x0", "x1"] {
            let client = usize::from(name == "x1");
            comparison.run_both(client, &format!("open {name} f +"))?;
        }
        for step in 1..=steps {
            let client = usize::try_from(random.below(2)).context("too many")?;
            let operation = if random.below(2) == 0 {
                format!("pwrite x{client} {} {} {step}", random.below(MAX_FILE_SIZE), random.below(60_000))
            } else {
                let operation = tree_operation(random);
                if operation.starts_with("get") || operation.starts_with("put") {
                    "list .".to_owned()
                } else {
                    operation
                }
            };
            // The client's own cable to the server, or all cables of the server.
            let cable = random.pick(&[Cable::Node(2), Cable::between(2, if client == 0 { 1 } else { 3 })]);
            match step % 300 {
                0 => comparison.run_both_with_cut(client, &operation, cable, None)?,
                60 | 120 | 180 | 240 => {
                    let duration = Duration::from_millis(100 + random.below(400));
                    comparison.run_both_with_cut(client, &operation, cable, Some(duration))?;
                }
                _ => drop(comparison.run_both(client, &operation)?),
            }
        }
        // Operations that the client's kernel can answer alone are never lost.
        ensure!(steps < 600 || comparison.lost > 0, "no operation was lost");
        Ok(())
    })
    .unwrap();
}
