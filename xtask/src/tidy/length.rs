//! Limits the length of files, so that a reader can keep one in mind.

use crate::source::Source;

/// Lines of code above which a file needs a reason in xtask/long-files.txt.
const SOFT: usize = 400;
/// Maximum lines of code, except in files whose reason ends with [`PROMISE`].
const HARD: usize = 600;
/// The end of the reason of a file that exceeds [`HARD`].
const PROMISE: &str = "to be split";

/// One violation per file that is too long, and per reason that is no longer needed.
pub(super) fn check(sources: &[Source], reasons: &[(String, String)]) -> Vec<String> {
    let reason = |path: &str| reasons.iter().find(|(excused, _)| excused == path).map(|(_, reason)| reason);
    let long: Vec<(&str, usize)> = sources
        .iter()
        .filter(|source| source.is_rust())
        .map(|source| (&*source.path, code_lines(&source.text)))
        .filter(|(_, lines)| *lines > SOFT)
        .collect();
    let mut breaches = Vec::new();
    for (path, lines) in &long {
        let reason = reason(path);
        if *lines > HARD && reason.is_none_or(|reason| !reason.ends_with(PROMISE)) {
            breaches.push(format!("{path}: {lines} lines of code, more than {HARD}; split it"));
        } else if reason.is_none() {
            breaches.push(format!(
                "{path}: {lines} lines of code, more than {SOFT}; split it, or give a reason in xtask/long-files.txt"
            ));
        }
    }
    let stale = reasons.iter().filter(|(path, _)| !long.iter().any(|(one, _)| one == path));
    breaches
        .extend(stale.map(|(path, _)| format!("xtask/long-files.txt: {path} is not long, or is missing")));
    breaches
}

/// Number of lines that are neither empty nor comments, without the tests at the end.
fn code_lines(text: &str) -> usize {
    let mut lines = text.lines().map(str::trim).peekable();
    let mut count = 0;
    while let Some(line) = lines.next() {
        if line == "#[cfg(test)]" && lines.peek().is_some_and(|next| next.starts_with("mod ")) {
            break;
        }
        count += usize::from(!line.is_empty() && !line.starts_with("//"));
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::rust;

    #[test]
    fn comments_and_tests_are_free() {
        assert_eq!(
            code_lines("//! a\n\nuse b;\n// c\nfn d() {}\n\n#[cfg(test)]\nmod tests {\nfn e() {}\n}\n"),
            2
        );
    }

    #[test]
    fn long_files_need_a_reason_and_only_they_have_one() {
        let sources =
            [rust("a.rs", "x;\n".repeat(401)), rust("b.rs", "x;\n".repeat(601)), rust("c.rs", "x;\n")];
        let reason = |path: &str| (path.to_owned(), "a table".to_owned());
        let promise = ("b.rs".to_owned(), "one loop; to be split".to_owned());
        assert_eq!(check(&sources, &[reason("a.rs"), promise]).len(), 0);
        assert_eq!(check(&sources, &[]).len(), 2);
        let breaches = check(&sources, &[reason("a.rs"), reason("b.rs"), reason("c.rs")]);
        assert_eq!(breaches.len(), 2, "{breaches:?}");
        assert!(breaches[0].starts_with("b.rs: 601 lines"));
        assert!(breaches[1].contains("c.rs is not long"));
    }
}
