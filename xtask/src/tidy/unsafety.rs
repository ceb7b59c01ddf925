//! Unsafe code is allowed only in the places listed in xtask/unsafe-allowed.txt. In all other
//! crates `#![forbid(unsafe_code)]` makes the compiler enforce it.

use crate::source::{Source, code};
use std::collections::BTreeSet;

/// One violation per file with forbidden unsafe code, per crate without the attribute that forbids
/// it, and per unused permission.
pub(super) fn check(sources: &[Source], allowed: &[(String, String)]) -> Vec<String> {
    let mut breaches = Vec::new();
    let mut used = BTreeSet::new();
    for source in sources.iter().filter(|source| source.is_rust() && has_unsafe(&source.text)) {
        match allowed.iter().find(|(place, _)| covers(place, &source.path)) {
            Some((place, _)) => drop(used.insert(place.as_str())),
            None => breaches
                .push(format!("{}: unsafe code, which xtask/unsafe-allowed.txt does not allow", source.path)),
        }
    }
    let unused = allowed.iter().filter(|(place, _)| !used.contains(place.as_str()));
    breaches.extend(unused.map(|(place, _)| format!("xtask/unsafe-allowed.txt: {place} has no unsafe code")));
    for source in sources.iter().filter(|source| is_root(&source.path)) {
        let Some(folder) = source.path.rsplit_once("/src/").map(|(folder, _)| folder) else { continue };
        // If the whole crate is allowed to use unsafe code, it needs no attribute.
        if allowed.iter().any(|(place, _)| place == folder) {
            continue;
        }
        let some = allowed.iter().any(|(place, _)| place.starts_with(&format!("{folder}/")));
        let says = |level: &str| source.text.contains(&format!("#![{level}(unsafe_code)]"));
        if !says("forbid") && !says("deny") {
            let level = if some { "deny" } else { "forbid" };
            breaches.push(format!("{}: has no #![{level}(unsafe_code)]", source.path));
        }
    }
    breaches
}

/// Whether a permission, for a file or a folder, covers this file.
fn covers(place: &str, path: &str) -> bool {
    path.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether it is the root file of a library or program.
fn is_root(path: &str) -> bool {
    path.ends_with("/src/lib.rs") || path.ends_with("/src/main.rs")
}

/// Whether the text has the keyword before a Rust item or block. In prose, other words follow it.
fn has_unsafe(text: &str) -> bool {
    let objects = ["{", "(", "fn ", "impl", "extern", "trait"];
    text.lines().any(|line| {
        let line = code(line);
        line.match_indices("unsafe").any(|(at, word)| {
            let whole = !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let after = line[at + word.len()..].trim_start();
            whole && (after.is_empty() || objects.iter().any(|object| after.starts_with(object)))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::rust;

    #[test]
    fn unsafe_code_is_code() {
        assert!(has_unsafe("let a = unsafe { b() };"));
        assert!(has_unsafe("#[unsafe(no_mangle)]"));
        assert!(has_unsafe("pub unsafe fn f()"));
        assert!(has_unsafe("let a = unsafe"));
        assert!(!has_unsafe("fn has_unsafe(text: &str)"));
        assert!(!has_unsafe("names and unsafe code"));
        assert!(!has_unsafe("#![forbid(unsafe_code)]\n// unsafe\nlet a = \"unsafe\";"));
    }

    #[test]
    fn crates_are_held_to_the_list() {
        let sources = [
            rust("crates/a/src/lib.rs", "#![deny(unsafe_code)]"),
            rust("crates/a/src/b.rs", "unsafe {}"),
            rust("crates/c/src/lib.rs", "unsafe {}"),
            rust("crates/d/src/lib.rs", "fn e() {}"),
        ];
        let allow = |place: &str| (place.to_owned(), "because".to_owned());
        assert_eq!(check(&sources, &[allow("crates/a/src/b.rs"), allow("crates/c")]).len(), 1);
        let breaches = check(&sources, &[allow("crates/d"), allow("crates/c")]);
        assert_eq!(breaches.len(), 2, "{breaches:?}");
        assert!(breaches[0].starts_with("crates/a/src/b.rs: unsafe code"));
        assert_eq!(breaches[1], "xtask/unsafe-allowed.txt: crates/d has no unsafe code");
    }
}
