//! Moves running programs at random.

use crate::{Chaos, lock};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tern_tests::cluster::Refused;
use tern_tests::programs::generated_input::Sequence;

/// Threads that move programs, each one once a second, unless the move takes longer.
pub(crate) const MOVERS: u64 = 5;
const INTERVAL: Duration = Duration::from_secs(1);

/// Exit status of migrate for an error inside Tern.
const EX_SOFTWARE: i32 = 70;

/// Moves programs until the run is over. `mover` is the number of this thread.
pub(crate) fn move_at_random(chaos: &Chaos, mover: u64) {
    let mut random = Sequence(chaos.seed ^ 0x6d6f_7665 ^ mover);
    while !chaos.is_over() {
        let running: Vec<i32> = lock(&chaos.running).iter().copied().collect();
        let to = ["2", "3", "2", "3", "home"][random.below(5) as usize];
        if let Some(&pid) = running.get(random.below(running.len() as u64) as usize) {
            lock(&chaos.moving).insert(pid);
            lock(&chaos.scarcity).note_move(pid);
            let restarts = chaos.restarts.load(Ordering::SeqCst);
            match chaos.cluster.migrate(pid, to) {
                Ok(_) => chaos.count("moves"),
                // It has ended.
                Err(refused) if refused.code == 1 => {}
                Err(refused)
                    if refused.code == EX_SOFTWARE && !is_excused(chaos, &refused, pid, restarts) =>
                {
                    chaos.fail(format!("migrate {pid} {to}: {}", refused.message));
                }
                Err(refused) => {
                    let reason = refused.message.replace(|c: char| c.is_ascii_digit(), "");
                    let reason: String = reason.lines().next().unwrap_or_default().chars().take(90).collect();
                    let reason = if reason.is_empty() { format!("exit {}", refused.code) } else { reason };
                    chaos.count(&format!("moves refused: {reason}"));
                }
            }
            lock(&chaos.moving).remove(&pid);
        }
        chaos.sleep(INTERVAL);
    }
}

/// Whether a move failed because ternd of node 1 or the program's shim was killed. `restarts` is the
/// value from before the move.
fn is_excused(chaos: &Chaos, refused: &Refused, pid: i32, restarts: u64) -> bool {
    let daemon_was_killed = restarts % 2 == 1 || chaos.restarts.load(Ordering::SeqCst) != restarts;
    let no_daemon = refused.message.contains("ternd closed the connection");
    let no_shim = refused.message.contains("shim did not answer");
    no_daemon && daemon_was_killed || no_shim && lock(&chaos.ever_endangered).contains(&pid)
}
