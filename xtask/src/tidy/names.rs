//! Forbids file names that do not say what a file is about, because such files attract unrelated
//! code.

use crate::source::Source;

const EMPTY: [&str; 12] = [
    "util", "utils", "common", "helper", "helpers", "misc", "core", "base", "types", "manager", "managers",
    "lib",
];

/// One violation per path with such a name.
pub(super) fn check(sources: &[Source]) -> Vec<String> {
    sources.iter().filter(|source| source.is_rust()).filter_map(|source| breach(&source.path)).collect()
}

fn breach(path: &str) -> Option<String> {
    let mut parts: Vec<&str> = path.split('/').collect();
    let file = parts.pop()?.strip_suffix(".rs")?;
    // Below tests/, a file beside its folder would be a separate test, so mod.rs is allowed there.
    if file == "mod" && !parts.contains(&"tests") {
        return Some(format!("{path}: name it after its folder, beside it, instead of mod.rs"));
    }
    // A crate's root must be named lib.rs.
    let root = file == "lib" && parts.last() == Some(&"src");
    let name = parts
        .into_iter()
        .chain((!root).then_some(file))
        .find(|part| EMPTY.contains(part) || part.split('_').any(|word| EMPTY[..11].contains(&word)))?;
    Some(format!("{path}: '{name}' does not say what it is about"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_names_are_found_in_files_folders_and_words() {
        for path in [
            "crates/x/src/utils.rs",
            "crates/common/src/a.rs",
            "a/src/string_util.rs",
            "a/src/b/mod.rs",
            "a/src/b/lib.rs",
        ] {
            assert!(breach(path).is_some(), "{path}");
        }
        for path in [
            "crates/x/src/lib.rs",
            "crates/score/src/a.rs",
            "a/src/database.rs",
            "a/tests/b/mod.rs",
            "a/src/model.rs",
        ] {
            assert_eq!(breach(path), None);
        }
    }
}
