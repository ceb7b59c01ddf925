//! Open work belongs in an issue; a mark in the code must name the issue.

use crate::source::Source;

/// One violation per mark without an issue number.
pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let ours = |path: &str| path != file!() && [".rs", ".sh", ".py"].iter().any(|end| path.ends_with(end));
    let mut breaches = Vec::new();
    for source in sources.iter().filter(|source| ours(&source.path) || source.path.starts_with("scripts/")) {
        for (number, line) in source.text.lines().enumerate() {
            if unnumbered(line) {
                breaches.push(format!("{}:{}: write TODO(#ISSUE)", source.path, number + 1));
            }
        }
    }
    breaches
}

fn unnumbered(line: &str) -> bool {
    ["TODO", "FIXME", "XXX"].iter().any(|mark| {
        let after = line.split_once(mark).map(|(_, after)| after);
        // A longer word that starts with a mark, such as a constant's name, is not a mark.
        let after = after.filter(|after| !after.starts_with(|c: char| c.is_alphanumeric() || c == '_'));
        after.is_some_and(|after| {
            let issue = after.strip_prefix("(#").and_then(|rest| rest.split_once(')'));
            issue.is_none_or(|(number, _)| number.parse::<u32>().is_err())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_have_numbers() {
        assert!(unnumbered("// TODO: later"));
        assert!(unnumbered("// FIXME(#x)"));
        assert!(!unnumbered("// TODO(#12): later"));
        assert!(!unnumbered("TODOS"));
    }
}
