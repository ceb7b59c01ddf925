//! Ten thousand moves of one program leak no resource on any node. TERN_MOVES=N sets the number.

use anyhow::{Result, ensure};
use tern_tests::cluster::Cluster;
use tern_tests::cluster::jobs::job;
use tern_tests::cluster::resources::{ResourceCheck, show};

/// Moves before the first count: caches have filled, and the permanent shims exist.
const WARM_UP_MOVES: u32 = 300;
/// Memory in KiB that ternd and the home shim may gain: allocators round, and logs have buffers.
const SLACK_KIB: u64 = 4 << 10;
/// Mappings that ternd may gain: glibc's allocator makes another arena, of two mappings, when
/// threads contend for one, up to eight for each CPU.
const SLACK_MAPPINGS: u64 = 64;

fn slack(of: &str) -> u64 {
    match of {
        "kib" => SLACK_KIB,
        "mappings" => SLACK_MAPPINGS,
        _ => 0,
    }
}

fn move_around(cluster: &Cluster, pid: i32, count: u32) -> Result<()> {
    for number in 0..count.next_multiple_of(3) {
        let to = ["2", "3", "home"][number as usize % 3];
        if let Err(refused) = cluster.migrate(pid, to) {
            // Its last call may still be pending at home.
            ensure!(refused.message.contains("busy"), "move {number} to {to}: {}", refused.message);
        }
    }
    cluster.migrate(pid, "2").map_err(|r| anyhow::anyhow!("{}", r.message))?;
    cluster.migrate(pid, "home").map(drop).map_err(|r| anyhow::anyhow!("{}", r.message))
}

#[test]
fn ten_thousand_moves_leak_nothing() -> Result<()> {
    let wanted = std::env::var("TERN_MOVES").ok().and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let cluster = Cluster::up("leaks")?;
    let running = job(&cluster, "")?;
    move_around(&cluster, running.pid, WARM_UP_MOVES)?;
    // Guest shims come and go with each move, so resources are counted while the program is at
    // home.
    let check = ResourceCheck { cluster: &cluster, programs: "ternd|tern-shim", slack };
    let before = check.stable_count(None)?;
    move_around(&cluster, running.pid, wanted)?;
    let after = check.stable_count(Some(&before))?;
    println!("{wanted} moves");
    show(&before, &after);
    let grown = check.growth(&before, &after);
    ensure!(grown.is_empty(), "grown after {wanted} moves:\n{}", grown.join("\n"));
    Ok(())
}
