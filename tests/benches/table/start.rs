//! Runs inside a node: the time of a program from fork to the end of wait.

use anyhow::{Result, ensure};
use std::io::{Write, stdout};
use std::process::Command;
use std::time::Instant;

/// Prints this many lines with the milliseconds of `mosrun true` and of `true`.
///
/// # Errors
/// If one of them fails.
pub(crate) fn count(times: u32) -> Result<()> {
    // The first run of each is discarded: it reads files from disk.
    for turn in 0..=times {
        let (mosrun, plain) = (run(&["mosrun", "/bin/true"])?, run(&["/bin/true"])?);
        if turn > 0 {
            writeln!(stdout(), "{mosrun:.4} {plain:.4}")?;
        }
    }
    Ok(())
}

fn run(words: &[&str]) -> Result<f64> {
    let begun = Instant::now();
    let status = Command::new(words[0]).args(&words[1..]).status()?;
    let took = begun.elapsed().as_secs_f64() * 1e3;
    ensure!(status.success(), "{words:?} ended with {status}");
    Ok(took)
}
