//! Ten thousand moves of one program leak no resource on any node. TERN_MOVES=N sets the number.
//!
//! The program moves between nodes 2 and 3, and is away at both counts: so its shim at home lives
//! through all moves, and each node has the same shims.

use anyhow::{Result, anyhow, ensure};
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

/// Moves the process onward `count` times, rounded up to an even number: to node 3 and back to
/// node 2.
fn move_onward(cluster: &Cluster, pid: i32, count: u32) -> Result<()> {
    for number in 0..count.next_multiple_of(2) {
        let to = ["3", "2"][number as usize % 2];
        cluster.migrate(pid, to).map_err(|r| anyhow!("move {number} to {to}: {}", r.message))?;
    }
    Ok(())
}

/// The shims of node 1.
fn shims_at_home(cluster: &Cluster) -> Result<String> {
    Ok(String::from_utf8_lossy(&cluster.run(1, &["pgrep", "-x", "tern-shim"])?).into_owned())
}

#[test]
fn ten_thousand_moves_leak_nothing() -> Result<()> {
    let wanted = std::env::var("TERN_MOVES").ok().and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let cluster = Cluster::up("leaks")?;
    let running = job(&cluster, "mosrun -L")?;
    cluster.migrate(running.pid, "2")?;
    move_onward(&cluster, running.pid, WARM_UP_MOVES)?;
    let check = ResourceCheck { cluster: &cluster, programs: "ternd|tern-shim", slack };
    let shims = shims_at_home(&cluster)?;
    let before = check.stable_count(None)?;
    move_onward(&cluster, running.pid, wanted)?;
    // The shims of earlier stays may need a moment to end.
    let after = check.stable_count(Some(&before))?;
    println!("{wanted} moves");
    show(&before, &after);
    ensure!(shims_at_home(&cluster)? == shims, "the shim that is counted is another one");
    let grown = check.growth(&before, &after);
    ensure!(grown.is_empty(), "grown after {wanted} moves:\n{}", grown.join("\n"));
    Ok(())
}
