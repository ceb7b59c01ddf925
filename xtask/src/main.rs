//! The project's own checks and generated files: `cargo xtask tidy`, `docs`, `ci-lint`.
#![forbid(unsafe_code)]

mod docs;
mod lint;
mod source;
mod tidy;

use anyhow::{Result, bail};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  tidy             sizes, names, arrows between crates, unsafe code and TODOs
  docs [--check]   write docs/reference/syscalls.md from the table of system calls; or compare it
  ci-lint          fmt, clippy, tidy and docs; reports everything that is wrong, not only the first";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<()> {
    // `cargo xtask` works from every folder of the project.
    std::env::set_current_dir(source::root())?;
    match words {
        ["tidy"] => tidy::run(),
        ["docs"] => docs::write(),
        ["docs", "--check"] => docs::check(),
        ["ci-lint"] => lint::run(),
        _ => bail!("unknown command\n\n{USAGE}"),
    }
}
