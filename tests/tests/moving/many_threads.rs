//! A process of very many threads is migrated out, onward and home.

use anyhow::{Context, Result, anyhow, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::Running;

/// Starts the given command as a child, prints its pid, and waits for it.
const RUN_AS_CHILD: &str = r#""$@" & echo $! >&2; wait $!"#;

#[test]
fn two_thousand_threads_move() -> Result<()> {
    let program = named("threadmany", Flavour::Static)?;
    let cluster = Cluster::up("crowd")?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", RUN_AS_CHILD, "sh"]).arg(&program).arg("2000");
    command.env("TERN_SECONDS", "0.5").env("TERN_UNTIL", "/tmp/until-crowd");
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let pid = running.pid;
    for to in ["2", "3", "home"] {
        let moved = cluster.migrate(pid, to);
        let report =
            moved.map_err(|refused| anyhow!("{to}: {}\n{}", refused.message, cluster.diagnostics(pid)))?;
        println!("2,000 threads to {to}: frozen for {:.0} ms", report.freeze_ms);
    }
    cluster.touch("/tmp/until-crowd")?;
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.diagnostics(pid))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}\n{}", cluster.diagnostics(pid));
    Ok(())
}
