//! Ten thousand moves of one program in one run: nothing grows, on no node. TERN_MOVES=N for fewer.

use anyhow::{Result, ensure};
use tern_tests::cluster::Cluster;
use tern_tests::held::{Held, show};
use tern_tests::jobs::job;

/// Moves before the first look: caches have filled, and the shims that stay are there.
const WARM: u32 = 300;
/// Memory that ternd and the home shim may have gained (KiB): an allocator rounds, and logs have buffers.
const SLACK_KIB: u64 = 4 << 10;
/// Mappings that ternd may have gained: glibc's allocator makes another arena, of two mappings, when threads meet in it, up
/// to eight for a CPU.
const SLACK_MAPPINGS: u64 = 64;

fn slack(of: &str) -> u64 {
    match of {
        "kib" => SLACK_KIB,
        "mappings" => SLACK_MAPPINGS,
        _ => 0,
    }
}

fn moves(cluster: &Cluster, pid: i32, count: u32) -> Result<()> {
    for number in 0..count.next_multiple_of(3) {
        let to = ["2", "3", "home"][number as usize % 3];
        if let Err(refused) = cluster.migrate(pid, to) {
            // Its last call may still be under way at home.
            ensure!(refused.message.contains("busy"), "move {number} to {to}: {}", refused.message);
        }
    }
    cluster.migrate(pid, "2").map_err(|r| anyhow::anyhow!("{}", r.message))?;
    cluster.migrate(pid, "home").map(drop).map_err(|r| anyhow::anyhow!("{}", r.message))
}

#[test]
fn ten_thousand_moves_leave_nothing() -> Result<()> {
    let wanted = std::env::var("TERN_MOVES").ok().and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let cluster = Cluster::up("leaks")?;
    let running = job(&cluster, "")?;
    moves(&cluster, running.pid, WARM)?;
    // Guest shims come and go with each move, so that is looked at while the program is at home.
    let held = Held { cluster: &cluster, programs: "ternd|tern-shim", slack };
    let before = held.settled(None)?;
    moves(&cluster, running.pid, wanted)?;
    let after = held.settled(Some(&before))?;
    println!("{wanted} moves");
    show(&before, &after);
    let grown = held.grown(&before, &after);
    ensure!(grown.is_empty(), "after {wanted} moves there is more of:\n{}", grown.join("\n"));
    Ok(())
}
