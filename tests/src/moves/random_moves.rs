//! Migrates the processes of a family at random times to random nodes while it runs.

use crate::cluster::Cluster;
use crate::programs::generated_input::Sequence;
use crate::programs::{Flavour, named};
use crate::runs::running::{ANNOUNCE, Running};
use anyhow::{Context, Result, anyhow, ensure};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

/// Number of moves after which a program of `move_while_running` may end.
const MIN_MOVES: u32 = 10;

/// The result of `move_randomly`.
#[derive(Debug, Default)]
pub struct Moves {
    /// Moves that succeeded.
    pub done: u32,
    /// The same moves, as `PID to PLACE`.
    pub made: Vec<String>,
    /// Refusals for processes that were still alive, with the message of `migrate`.
    pub refused: Vec<String>,
    /// Refusals that are failures of Tern.
    pub broken: Vec<String>,
}

/// Migrates the process and its descendants until `stop` is set, and calls `moved` with the number
/// of moves after each. The seed decides the process, the target and the time, as far as the timing
/// of the family allows.
///
/// # Errors
/// If the processes of node 1 cannot be listed.
pub fn move_randomly(
    cluster: &Cluster,
    root: i32,
    seed: u64,
    stop: &AtomicBool,
    mut moved: impl FnMut(u32),
) -> Result<Moves> {
    let mut random = Sequence(seed);
    let mut moves = Moves::default();
    let mut places: HashMap<i32, &'static str> = HashMap::new();
    while !stop.load(Ordering::Relaxed) {
        let family = family(cluster, root)?;
        let Some(&pid) = family.get(random.below(family.len() as u64) as usize) else {
            sleep(Duration::from_millis(20));
            continue;
        };
        let here = places.get(&pid).copied().unwrap_or("home");
        // Away two times in three, so that most of the work is done there.
        let all = ["2", "3", "home"];
        let others: Vec<_> = all.into_iter().filter(|place| *place != here).collect();
        let there = others[random.below(others.len() as u64) as usize];
        match cluster.migrate(pid, there) {
            Ok(_) => {
                moves.done += 1;
                moves.made.push(format!("{pid} to {there}"));
                moved(moves.done);
                places.insert(pid, there);
            }
            // The process has ended meanwhile.
            Err(refused) if refused.code == 1 => {}
            Err(refused) => {
                let what = format!("{pid} to {there}: exit {}: {}", refused.code, refused.message);
                if refused.code == 70 || refused.code < 0 {
                    moves.broken.push(what);
                } else {
                    moves.refused.push(what);
                }
                // Its location is uncertain: it may have come home by itself.
                places.remove(&pid);
            }
        }
        let pause = if there == "home" { 10 + random.below(60) } else { 60 + random.below(300) };
        sleep(Duration::from_millis(pause));
    }
    Ok(moves)
}

/// The process and all its descendants on node 1.
fn family(cluster: &Cluster, root: i32) -> Result<Vec<i32>> {
    let table = cluster.run(1, &["ps", "-e", "-o", "pid=,ppid=,stat="])?;
    Ok(descendants(&String::from_utf8_lossy(&table), root))
}

/// Parses lines of pid, parent and state; leaves zombies out.
fn descendants(table: &str, root: i32) -> Vec<i32> {
    let rows: Vec<(i32, i32)> = table
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let row = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            (!words.next()?.starts_with('Z')).then_some(row)
        })
        .collect();
    let mut family: Vec<i32> = rows.iter().filter(|(pid, _)| *pid == root).map(|(pid, _)| *pid).collect();
    let mut at = 0;
    while let Some(&parent) = family.get(at) {
        family.extend(rows.iter().filter(|(_, ppid)| *ppid == parent).map(|(pid, _)| *pid));
        at += 1;
    }
    family
}

/// Migrates a program that works on files of this folder all the time, until it has passed.
///
/// # Errors
/// If it fails, or a move does.
pub fn move_while_running(cluster: &Cluster, program: &str, scratch: &str) -> Result<()> {
    let program = named(program, Flavour::Dynamic)?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh"]).arg(&program);
    command.env("TERN_SECONDS", "12").env("TERN_SCRATCH", scratch).env("TERN_UNTIL", "/tmp/enough");
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let (pid, stop) = (running.pid, AtomicBool::new(false));
    let (end, moves) = std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            move_randomly(cluster, pid, 3, &stop, |done| {
                // If this file cannot be created, the program runs for too long, and the test
                // fails.
                if done == MIN_MOVES {
                    let _fails_then = cluster.touch("/tmp/enough");
                }
            })
        });
        let end = running.finish(Duration::from_secs(90)).with_context(|| cluster.diagnostics(pid));
        stop.store(true, Ordering::Relaxed);
        (end, mover.join())
    });
    let (end, moves) = (end?, moves.map_err(|_panic| anyhow!("the mover failed"))??);
    ensure!(end.status == 0 && end.out == b"PASS\n", "{end:?}");
    ensure!(moves.done >= MIN_MOVES && moves.broken.is_empty(), "{moves:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descendants_exclude_zombies_and_strangers() {
        let table = "  1 0 Ss\n 10 1 S\n 11 10 R\n 12 10 Z\n 13 11 S\n 20 1 S\n";
        assert_eq!(descendants(table, 10), [10, 11, 13]);
        assert!(descendants(table, 99).is_empty());
    }
}
