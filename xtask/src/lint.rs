//! The checks of CI that run no tests. All of them run, even if an earlier one fails.

use crate::{docs, tidy};
use anyhow::{Result, bail, ensure};
use std::process::Command;

/// A check's name and function.
type Check = (&'static str, fn() -> Result<()>);

const CHECKS: [Check; 4] =
    [("cargo fmt", format), ("cargo clippy", clippy), ("tidy", tidy::run), ("generated files", docs::check)];

/// Runs all checks.
///
/// # Errors
/// Names the checks that failed. Each has printed its findings.
pub(crate) fn run() -> Result<()> {
    let failed: Vec<&str> = CHECKS
        .iter()
        .filter_map(|(name, check)| {
            println!("── {name}");
            let error = check().err()?;
            eprintln!("{name}: {error:#}");
            Some(*name)
        })
        .collect();
    if failed.is_empty() {
        println!("── all clean");
        return Ok(());
    }
    bail!("failed: {}", failed.join(", "))
}

fn format() -> Result<()> {
    cargo(&["fmt", "--all", "--check"])
}

fn clippy() -> Result<()> {
    cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"])
}

fn cargo(args: &[&str]) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo).args(args).status()?;
    ensure!(status.success(), "cargo {} failed", args[0]);
    Ok(())
}
