//! A process of very many threads goes out, onward and home, all of it.

use anyhow::{Context, Result, anyhow, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::programs::{Flavour, named};
use tern_tests::running::Running;

/// Says the pid of what it was given, and waits for it.
const BESIDE: &str = r#""$@" & echo $! >&2; wait $!"#;

#[test]
fn two_thousand_threads_move() -> Result<()> {
    let program = named("threadmany", Flavour::Static)?;
    let cluster = Cluster::up("crowd")?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", BESIDE, "sh"]).arg(&program).arg("2000");
    command.env("TERN_SECONDS", "0.5").env("TERN_UNTIL", "/tmp/until-crowd");
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let pid = running.pid;
    for to in ["2", "3", "home"] {
        let moved = cluster.migrate(pid, to);
        let report = moved.map_err(|refused| anyhow!("{to}: {}\n{}", refused.message, cluster.scene(pid)))?;
        println!("2,000 threads to {to}: they stood still for {:.0} ms", report.freeze_ms);
    }
    cluster.touch("/tmp/until-crowd")?;
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.scene(pid))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}\n{}", cluster.scene(pid));
    Ok(())
}
