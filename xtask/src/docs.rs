//! Files that are made from code, and must not drift from it.

use anyhow::{Context, Result, ensure};
use std::path::Path;

/// A file and what makes the text that belongs into it.
type Generated = (&'static str, fn() -> String);

const GENERATED: [Generated; 1] = [("docs/syscalls.md", tern_syscall::markdown)];

/// Writes them.
///
/// # Errors
/// If one cannot be written.
pub(crate) fn write() -> Result<()> {
    for (path, text) in GENERATED {
        let dir = Path::new(path).parent().context("a generated file is in a folder")?;
        std::fs::create_dir_all(dir)?;
        std::fs::write(path, text()).with_context(|| path.to_owned())?;
        println!("wrote {path}");
    }
    Ok(())
}

/// Compares them.
///
/// # Errors
/// If one differs from what would be written.
pub(crate) fn check() -> Result<()> {
    for (path, text) in GENERATED {
        let found = std::fs::read_to_string(path).unwrap_or_default();
        ensure!(found == text(), "{path} is not what the code says; run make docs, and commit it");
    }
    Ok(())
}
