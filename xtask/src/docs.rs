//! Files that are generated from code, and a check that they are up to date.

use anyhow::{Context, Result, ensure};
use std::path::Path;

/// The path of a generated file, and the function that generates its text.
type Generated = (&'static str, fn() -> String);

const GENERATED: [Generated; 1] = [("docs/reference/syscalls.md", tern_syscall::markdown)];

/// Writes all generated files.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn write() -> Result<()> {
    for (path, text) in GENERATED {
        let dir = Path::new(path).parent().context("a generated file is in a folder")?;
        std::fs::create_dir_all(dir)?;
        std::fs::write(path, text()).with_context(|| path.to_owned())?;
        println!("wrote {path}");
    }
    Ok(())
}

/// Compares all generated files with the code.
///
/// # Errors
/// A file differs from the generated text.
pub(crate) fn check() -> Result<()> {
    for (path, text) in GENERATED {
        let found = std::fs::read_to_string(path).unwrap_or_default();
        ensure!(found == text(), "{path} differs from the code; run make docs, and commit it");
    }
    Ok(())
}
