//! Operations at random, in the manner of fsx and fsstress, through /mfs and on the disk: each must have the same outcome.
//!
//! TERN_SEED=N begins elsewhere, TERN_STEPS=N goes on for longer; what failed says both.

use anyhow::{Context, Result, ensure};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::doers::{Chance, Doers};

/// How large the file may become. Some pages, and more than what is sent at once.
const SIZE: u64 = 400_000;

/// The longest piece.
const PIECE: u64 = 90_000;

fn number(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// Runs one test, on so many steps and from the seed that is asked for, which it says if it fails.
fn seeded(
    name: &str,
    steps: u64,
    nodes: &[u16],
    run: impl Fn(&mut Doers, &mut Chance, u64) -> Result<()>,
) -> Result<()> {
    let (seed, steps) = (number("TERN_SEED", 1), number("TERN_STEPS", steps));
    let cluster = mounted(name, nodes)?;
    let mut doers = Doers::start(&cluster, nodes)?;
    let ended = run(&mut doers, &mut Chance::new(seed), steps).and_then(|()| doers.compare_trees());
    ended.with_context(|| format!("TERN_SEED={seed} TERN_STEPS={steps}"))
}

fn mounted(prefix: &str, nodes: &[u16]) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(prefix, 3)?;
    for node in nodes {
        cluster.mount(*node, "timeout=3")?;
    }
    if nodes.contains(&2) {
        // Its own kernel does them itself; the lab's disk is made of others, of which it does not.
        cluster.run(2, &["mount", "-t", "tmpfs", "own", "/tmp"])?;
    }
    Ok(cluster)
}

/// What can be done to one file, by one who has it open as `name`; empty if it is to be opened again.
fn file_deed(chance: &mut Chance, name: &str) -> String {
    let (at, length, seed) = (chance.below(SIZE), chance.below(PIECE), chance.below(1 << 32));
    match chance.below(24) {
        0..=3 => format!("pwrite {name} {at} {length} {seed}"),
        4..=6 => format!("pread {name} {at} {length}"),
        7 => format!("read {name} {length}"),
        8 => format!("write {name} {length} {seed}"),
        9 => format!("seek {name} {at}"),
        10 => format!("ftruncate {name} {at}"),
        11 => format!("truncate f {at}"),
        12 | 13 => format!("map {name} {at} {length}"),
        14 => format!("allocate {name} {} {at} {length}", chance.of(&[0, 1, 3, 16, 17])),
        15 => format!("copy {name} {at} {name} {} {length}", chance.below(SIZE)),
        16 => format!("fstat {name}"),
        17 => "get f".to_owned(),
        18 => "stat f".to_owned(),
        19 => format!("sync {name}"),
        20 => format!("end {name}"),
        _ => String::new(),
    }
}

/// The same, and opening and closing it again.
fn opening_deed(chance: &mut Chance, name: &str, modes: &[&str]) -> [Option<String>; 2] {
    let deed = file_deed(chance, name);
    if deed.is_empty() {
        let mode = chance.of(modes);
        return [Some(format!("close {name}")), Some(format!("open {name} f {mode}"))];
    }
    [Some(deed), None]
}

#[test]
fn one_file_is_like_one_on_the_disk() {
    seeded("mfsfsx", 2500, &[1], |doers, chance, steps| {
        doers.both(0, "put f 100000 1")?;
        for _ in 0..steps {
            for deed in opening_deed(chance, "a", &["+", "+", "r", "w", "+t", "+c"]).into_iter().flatten() {
                doers.both(0, &deed)?;
            }
            let deed = format!("store a {} {} 5", chance.below(SIZE), chance.below(PIECE));
            if chance.below(20) == 0 {
                doers.both(0, &deed)?;
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn one_file_is_the_same_for_two_nodes() {
    seeded("mfstwo", 2500, &[1, 3], |doers, chance, steps| {
        doers.both(0, "put f 100000 1")?;
        for _ in 0..steps {
            let who = usize::try_from(chance.below(2)).context("too many")?;
            // Each has the file open twice.
            let name = format!("{}{}", chance.of(&["x", "y"]), who);
            for deed in opening_deed(chance, &name, &["+", "r", "r", "w", "+t"]).into_iter().flatten() {
                doers.both(who, &deed)?;
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn one_file_is_the_same_for_its_own_node_and_another() {
    seeded("mfsown", 2500, &[1, 2], |doers, chance, steps| {
        doers.both(0, "put f 100000 1")?;
        for step in 0..steps {
            let who = usize::try_from(chance.below(2)).context("too many")?;
            let name = format!("{}{}", chance.of(&["x", "y"]), who);
            let is_own = who == 1;
            // What is small, and only read, would not be done so, nor what is open then.
            let modes: &[&str] =
                if is_own { &["+", "+", "w", "+t", "+c"] } else { &["+", "r", "r", "w", "+t"] };
            for deed in opening_deed(chance, &name, modes).into_iter().flatten() {
                doers.both(who, &deed)?;
            }
            // The other one is refused such a mapping while this one writes.
            let deed = format!("store {name} {} {} {step}", chance.below(SIZE), chance.below(PIECE));
            if is_own && chance.below(10) == 0 {
                doers.both(who, &deed)?;
            }
        }
        Ok(())
    })
    .unwrap();
}

/// A path in a tree that has few of them, so that they meet.
fn path(chance: &mut Chance) -> String {
    let mut path = String::new();
    for _ in 0..chance.below(3) {
        path += chance.of(&["d0/", "d1/", "d2/"]);
    }
    path + chance.of(&["d0", "d1", "d2", "f0", "f1", "f2", "f3", "l0", "l1"])
}

/// What can be done to a tree.
fn tree_deed(chance: &mut Chance) -> String {
    let (one, other) = (path(chance), path(chance));
    let (length, seed) = (chance.below(9000), chance.below(1 << 32));
    match chance.below(36) {
        0..=2 => format!("create {one}"),
        3..=6 => format!("mkdir {one}"),
        7..=9 => format!("rename {one} {other} 0"),
        10 => format!("rename {one} {other} {}", 1 + chance.below(2)),
        11 | 12 => format!("link {one} {other}"),
        13 => format!("symlink {other} {one}"),
        14 | 15 => format!("unlink {one}"),
        16 => format!("rmdir {one}"),
        17 => format!("chmod {one} {}", chance.of(&["600", "755", "2775", "1777", "4711"])),
        18 => format!("utime {one} {}", chance.below(1000)),
        19 => format!("set {one} user.{} {seed} {}", chance.of(&["a", "b"]), chance.below(3)),
        20 => format!("unset {one} user.{}", chance.of(&["a", "b"])),
        21 => format!("value {one} user.a"),
        22 => format!("attributes {one}"),
        23 => format!("chown {one} {} {}", chance.below(3), chance.below(3)),
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
fn a_tree_is_like_one_on_the_disk_for_two_nodes() {
    seeded("mfsstress", 3000, &[1, 3], |doers, chance, steps| {
        for step in 0..steps {
            let who = usize::try_from(chance.below(2)).context("too many")?;
            let deed = tree_deed(chance);
            if deed.starts_with("rename") {
                // As mv looks first: a directory that another node has moved, and that nobody here has seen since, answers
                // ESTALE to a rename by its new name, since the kernel cannot move its own entry for it meanwhile.
                for path in deed.split(' ').skip(1).take(2) {
                    doers.both(who, &format!("stat {path}"))?;
                }
            }
            // Nobody else writes what would be waited for.
            let opens = deed.starts_with("get") || deed.starts_with("put");
            let may = !opens || {
                let path = deed.split(' ').nth(1).unwrap_or(".");
                doers.both(who, &format!("stat {path}"))?.starts_with('-')
            };
            if may {
                doers.both(who, &deed)?;
            }
            if step % 500 == 0 {
                doers.compare_trees()?;
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn what_was_done_is_done_whatever_is_cut() {
    seeded("mfscut", 600, &[1, 3], |doers, chance, steps| {
        doers.both(0, "put f 100000 1")?;
        for name in ["x0", "x1"] {
            let who = usize::from(name == "x1");
            doers.both(who, &format!("open {name} f +"))?;
        }
        for step in 1..=steps {
            let who = usize::try_from(chance.below(2)).context("too many")?;
            let deed = if chance.below(2) == 0 {
                format!("pwrite x{who} {} {} {step}", chance.below(SIZE), chance.below(60_000))
            } else {
                let deed = tree_deed(chance);
                if deed.starts_with("get") || deed.starts_with("put") { "list .".to_owned() } else { deed }
            };
            // His own cable to the server, or all of the server's.
            let cable = chance.of(&[Cable::Node(2), Cable::between(2, if who == 0 { 1 } else { 3 })]);
            match step % 300 {
                0 => doers.both_without(who, &deed, cable, None)?,
                60 | 120 | 180 | 240 => {
                    let moment = Duration::from_millis(100 + chance.below(400));
                    doers.both_without(who, &deed, cable, Some(moment))?;
                }
                _ => drop(doers.both(who, &deed)?),
            }
        }
        // But for what the kernel here can say by itself.
        ensure!(steps < 600 || doers.lost > 0, "nothing was ever lost");
        Ok(())
    })
    .unwrap();
}
