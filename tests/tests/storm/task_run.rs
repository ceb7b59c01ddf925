//! Runs a task in the storm, and checks the report.

use super::tasks::Task;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{SystemTime, UNIX_EPOCH};
use tern_lab::StormReport;
use tern_tests::cluster::Cluster;

/// Seconds after which a run counts as hung.
const RUN_TIMEOUT_SECS: &str = "600";

/// The script of a task.
pub(crate) fn script(task: &Task) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tasks").join(task.script)
}

/// `tern lab storm` on this machine, with these words after it.
pub(crate) fn tool(cluster: &Cluster, words: &[&str]) -> Command {
    let mut command = cluster.on_machine("tern");
    command.args(["lab", "storm", "--lab", cluster.lab().name().as_str()]).args(words);
    command
}

/// Fails if a program of the task is missing, and names its package: no task is skipped silently.
pub(crate) fn check_requirements(task: &Task) -> Result<()> {
    for (program, package) in task.needs {
        let found = if program.starts_with('/') {
            Path::new(program).exists()
        } else {
            Command::new("sh").args(["-c", &format!("command -v {program}")]).output()?.status.success()
        };
        ensure!(found, "{} needs {program}: install {package}, or run scripts/setup", task.name);
    }
    Ok(())
}

/// Runs a task in the storm until it has been moved this often, and requires that nothing differs.
pub(crate) fn storm(
    cluster: &Cluster,
    task: &Task,
    args: &[&str],
    every: &str,
    moves: u64,
) -> Result<StormReport> {
    check_requirements(task)?;
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let seed = std::env::var("TERN_SEED").unwrap_or_else(|_unset| clock.to_string());
    let moves = moves.to_string();
    let script = script(task);
    let script = script.to_str().context("the path of this folder is not UTF-8")?;
    let words = [
        "--json",
        "--seed",
        &seed,
        "--every",
        every,
        "--moves",
        &moves,
        "--limit",
        RUN_TIMEOUT_SECS,
        "--",
        "bash",
        script,
    ];
    let end = tool(cluster, &words).args(args).output()?;
    let report = report(&end)?;
    ensure!(
        end.status.success(),
        "TERN_SEED={seed}, exit {:?}\n{}\n{}",
        end.status.code(),
        report.text(),
        cluster.diagnostics(0)
    );
    ensure!(report.moves.failures.is_empty(), "tern failed, though the program did not:\n{}", report.text());
    Ok(report)
}

/// Parses the output of the tool.
pub(crate) fn report(end: &Output) -> Result<StormReport> {
    serde_json::from_slice(&end.stdout)
        .with_context(|| format!("no report: {:?} {}", end.status, String::from_utf8_lossy(&end.stderr)))
}

/// A summary for the log.
pub(crate) fn summary(name: &str, report: &StormReport) -> String {
    let refused: u64 = report.moves.refused.values().sum();
    format!(
        "{name}: {} moves in {} runs, {} of {} processes, {refused} refused {:?}, native {:.1} s, storm {:.1} s",
        report.moves.moves,
        report.runs,
        report.moves.moved,
        report.moves.processes,
        report.moves.refused,
        report.native_s,
        report.storm_s.iter().sum::<f64>() / report.storm_s.len().max(1) as f64,
    )
}
