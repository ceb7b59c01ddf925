//! Ten thousand moves of one program leak no resource on any node, and an idle second costs its
//! shims and the daemons as much CPU time as before. TERN_MOVES=N sets the number.
//!
//! The program moves between nodes 2 and 3, and is away at both counts: so its shim at home lives
//! through all moves, and each node has the same shims.

use anyhow::{Result, bail, ensure};
use std::os::unix::net::UnixStream;
use std::time::Instant;
use tern_control::{Destination, Reply, Request, stream};
use tern_ids::{HomePid, NodeId};
use tern_tests::cluster::Cluster;
use tern_tests::cluster::jobs::program;
use tern_tests::cluster::resources::{ResourceCheck, show};

/// Moves before the first count: caches have filled, and the permanent shims exist.
const WARM_UP_MOVES: u32 = 300;
/// Memory in KiB that ternd and the home shim may gain: allocators round, and logs have buffers.
const SLACK_KIB: u64 = 4 << 10;
/// Mappings that ternd may gain: glibc's allocator makes another arena, of two mappings, when
/// threads contend for one, up to eight for each CPU.
const SLACK_MAPPINGS: u64 = 64;

/// Microseconds of CPU time that an idle second may cost more than before. On a machine with a load
/// of 90 the daemons use up to 2 ms, and at times they do not run for a second. A loop that examines
/// one more entry for each move, for 1 µs, uses 20 ms more.
const SLACK_IDLE_US: u64 = 5_000;

/// The balancer watches a process by a pidfd once that has used half a second of CPU time. The moves
/// alone use as much, so the program does it before the first count. Then it leaves the CPU to the
/// moves.
const BUSY_THEN_IDLE: &str = "i=0; while [ $i -lt 1000000 ]; do i=$((i + 1)); done; exec sleep infinity";

fn slack(of: &str) -> u64 {
    match of {
        "kib" => SLACK_KIB,
        "idle" => SLACK_IDLE_US,
        "mappings" => SLACK_MAPPINGS,
        _ => 0,
    }
}

/// Moves the process onward `count` times, rounded up to an even number: to node 3 and back to
/// node 2.
fn move_onward(cluster: &Cluster, pid: i32, count: u32) -> Result<()> {
    // Without a process of `migrate` for each move.
    let control = cluster.lab().node(1).path("/run/tern/control")?;
    for number in 0..count.next_multiple_of(2) {
        let to = NodeId([3, 2][number as usize % 2]);
        let mut connection = UnixStream::connect(&control)?;
        let request = Request::Migrate { pid: HomePid(pid), to: Destination::Node(to) };
        stream::write(&mut connection, &request)?;
        match stream::read(&mut connection)? {
            Reply::Migrated(report) if report.to == to => {}
            other => bail!("move {number} to {to}: {other:?}"),
        }
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
    let cluster = Cluster::without_quotas("leaks", 3)?;
    let running = program(&cluster, 1, "mosrun -L", &["sh", "-c", BUSY_THEN_IDLE])?;
    cluster.migrate(running.pid, "2")?;
    move_onward(&cluster, running.pid, WARM_UP_MOVES)?;
    let check = ResourceCheck { cluster: &cluster, programs: "ternd|tern-shim", slack };
    let shims = shims_at_home(&cluster)?;
    let mut before = check.stable_count(None)?;
    let names_before = check.count_by_name()?;
    before.extend(check.idle_cpu()?);
    let begun = Instant::now();
    move_onward(&cluster, running.pid, wanted)?;
    println!("{wanted} moves in {:.0} s", begun.elapsed().as_secs_f64());
    // The shims of earlier stays may need a moment to end.
    let mut after = check.stable_count(Some(&before))?;
    after.extend(check.idle_cpu()?);
    show(&before, &after);
    ensure!(shims_at_home(&cluster)? == shims, "the shim that is counted is another one");
    let grown = check.growth(&before, &after);
    if !grown.is_empty() {
        let names = check.growth(&names_before, &check.count_by_name()?);
        bail!("grown after {wanted} moves:\n{}\nby name:\n{}", grown.join("\n"), names.join("\n"));
    }
    Ok(())
}
