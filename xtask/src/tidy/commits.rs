//! Commit subjects are `area: imperative`, of at most 72 characters.

use anyhow::{Context, Result};
use std::process::Command;

/// The last commit before the rule; this and all earlier commits are exempt.
const BEFORE_THE_RULE: &str = "4d1210bcf4ac";
/// Maximum length of a subject. `git log --oneline` cuts longer ones on a terminal of 80 columns.
const MAX_SUBJECT: usize = 72;

/// One violation per subject since the rule was introduced.
///
/// # Errors
/// git cannot be run.
pub(super) fn check() -> Result<Vec<String>> {
    let range = format!("{BEFORE_THE_RULE}..HEAD");
    let log = Command::new("git").args(["log", "--no-merges", "--format=%h %s", &range]).output();
    let log = log.context("cannot run git")?;
    // A shallow clone lacks that commit; then nothing is checked.
    if !log.status.success() {
        return Ok(Vec::new());
    }
    Ok(String::from_utf8_lossy(&log.stdout).lines().filter_map(breach).collect())
}

fn breach(line: &str) -> Option<String> {
    let (commit, subject) = line.split_once(' ')?;
    if subject.chars().count() > MAX_SUBJECT {
        return Some(format!("{commit}: a subject of more than {MAX_SUBJECT} characters: {subject}"));
    }
    let area = subject.split_once(": ").filter(|(area, what)| {
        let word = |c: char| c.is_ascii_alphanumeric() || "-_./, ".contains(c);
        !area.is_empty() && area.chars().all(word) && !what.is_empty() && !what.ends_with('.')
    });
    area.is_none().then(|| format!("{commit}: not 'area: imperative': {subject}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_have_an_area_and_a_length() {
        assert_eq!(breach("abc names: remove duplicated path parsing"), None);
        assert_eq!(breach("abc mfs, guest: treat late recalls as unacknowledged"), None);
        assert!(breach("abc Remove duplicated path parsing").is_some());
        assert!(breach(&format!("abc names: {}", "x".repeat(70))).is_some());
    }
}
