//! The project's source files, as input for the checks.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The project's root folder.
pub(crate) fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_path_buf()
}

/// A file and its text.
#[derive(Debug)]
pub(crate) struct Source {
    /// The path relative to the project's root, with slashes.
    pub(crate) path: String,
    /// The file's content.
    pub(crate) text: String,
}

impl Source {
    /// Whether it is a Rust file.
    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }
}

/// All text files of the project, including uncommitted ones.
///
/// # Errors
/// git cannot list the files.
pub(crate) fn all() -> Result<Vec<Source>> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output()
        .context("cannot run git")?;
    ensure!(listed.status.success(), "git ls-files failed: {}", String::from_utf8_lossy(&listed.stderr));
    let names = String::from_utf8(listed.stdout)?;
    // Third-party code follows its own rules.
    let names = names.split('\0').filter(|name| !name.is_empty() && !name.starts_with("third_party/"));
    // Files that are deleted but still in the index, and files that are not text, are skipped.
    Ok(names
        .filter_map(|path| Some(Source { path: path.into(), text: std::fs::read_to_string(path).ok()? }))
        .collect())
}

/// A line of Rust without its comment and the contents of its strings. Strings that span several
/// lines are not recognised; they are too rare to matter.
pub(crate) fn code(line: &str) -> String {
    let mut kept = String::new();
    let mut letters = line.chars().peekable();
    let mut in_string = false;
    while let Some(letter) = letters.next() {
        match letter {
            '\\' if in_string => drop(letters.next()),
            // The quote in the character literal '"' does not start a string.
            '"' if in_string || !kept.ends_with('\'') => in_string = !in_string,
            '/' if !in_string && letters.peek() == Some(&'/') => break,
            letter if !in_string => kept.push(letter),
            _ => {}
        }
    }
    kept
}

/// Reads a list of exceptions: lines `PATH: REASON`; `#` starts a comment.
///
/// # Errors
/// The file cannot be read, or a line has no reason.
pub(crate) fn exceptions(path: &str) -> Result<Vec<(String, String)>> {
    let text = std::fs::read_to_string(path).with_context(|| path.to_owned())?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let (what, why) =
                line.split_once(": ").with_context(|| format!("{path}: '{line}' has no reason"))?;
            Ok((what.to_owned(), why.trim().to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_what_the_compiler_runs() {
        assert_eq!(code(r#"let a = "b // \" c"; d // e"#), "let a = ; d ");
        assert_eq!(code("/// doc"), "");
        assert_eq!(code(r#"x == '"' && y // z"#), r#"x == '"' && y "#);
    }
}
