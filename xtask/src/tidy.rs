//! The project's rules that no compiler checks, one module each. CONTRIBUTING.md gives the reasons.

mod arrows;
mod commits;
mod length;
mod names;
mod todo;
mod unsafety;
mod words;

use crate::source;
use anyhow::{Result, bail};

/// Checks all rules.
///
/// # Errors
/// Lists each violation on a line of its own.
pub(crate) fn run() -> Result<()> {
    let sources = source::all()?;
    let breaches = [
        length::check(&sources, &source::exceptions("xtask/long-files.txt")?),
        names::check(&sources),
        unsafety::check(&sources, &source::exceptions("xtask/unsafe-allowed.txt")?),
        todo::check(&sources),
        arrows::check()?,
        words::retired(&sources, &source::exceptions("xtask/retired-words.txt")?),
        words::public_types(&sources, &source::exceptions("xtask/shared-type-names.txt")?),
        commits::check()?,
    ]
    .concat();
    if breaches.is_empty() {
        println!("tidy: {} files", sources.len());
        return Ok(());
    }
    bail!("{} breaches\n  {}", breaches.len(), breaches.join("\n  "))
}

#[cfg(test)]
fn rust(path: &str, text: impl Into<String>) -> source::Source {
    source::Source { path: path.into(), text: text.into() }
}
