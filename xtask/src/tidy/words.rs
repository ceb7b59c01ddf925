//! One word per concept: names must not contain retired words, and a public type's name is unique
//! in the tree.

use crate::source::{self, Source};
use std::collections::{BTreeMap, BTreeSet};

/// One violation per identifier with a retired word in it. `retired` pairs the words, separated by
/// spaces, with the names to use instead.
pub(super) fn retired(sources: &[Source], retired: &[(String, String)]) -> Vec<String> {
    let retired: Vec<(Vec<&str>, &str)> =
        retired.iter().map(|(old, new)| (old.split(' ').collect(), new.as_str())).collect();
    let mut breaches = Vec::new();
    for source in sources.iter().filter(|source| source.is_rust() && source.path != file!()) {
        let file = source.path.rsplit('/').next().unwrap_or_default().trim_end_matches(".rs");
        let lines = source.text.lines().enumerate().map(|(index, line)| (index + 1, source::code(line)));
        for (number, code) in std::iter::once((1, file.to_owned())).chain(lines) {
            for name in identifiers(&code) {
                let words = words(name);
                let found = retired.iter().find(|(old, _)| words.windows(old.len()).any(|some| some == old));
                if let Some((old, new)) = found {
                    let old = old.join(" ");
                    breaches.push(format!("{}:{number}: {name}: not '{old}' but {new}", source.path));
                }
            }
        }
    }
    breaches
}

/// One violation per name that public types of several crates share.
pub(super) fn public_types(sources: &[Source], exceptions: &[(String, String)]) -> Vec<String> {
    let mut crates_of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for source in sources.iter().filter(|source| source.is_rust()) {
        let Some((name, file)) = source.path.strip_prefix("crates/").and_then(|path| path.split_once('/'))
        else {
            continue;
        };
        if file.starts_with("src/") {
            for line in source.text.lines() {
                if let Some(public) = public_type(line) {
                    crates_of.entry(public).or_default().insert(name);
                }
            }
        }
    }
    let is_exception = |name: &str| exceptions.iter().any(|(exception, _)| exception == name);
    let unused = exceptions
        .iter()
        .filter(|(name, _)| crates_of.get(name.as_str()).is_none_or(|crates| crates.len() < 2));
    let unused: Vec<String> = unused
        .map(|(name, _)| {
            format!("{name}: no longer a type of several crates: remove it from shared-type-names.txt")
        })
        .collect();
    let several = crates_of.into_iter().filter(|(name, crates)| crates.len() > 1 && !is_exception(name));
    several
        .map(|(name, crates)| {
            let crates: Vec<&str> = crates.into_iter().collect();
            format!("{name}: a public type of {}: one name, one meaning", crates.join(" and "))
        })
        .chain(unused)
        .collect()
}

fn public_type(line: &str) -> Option<&str> {
    let item = line.trim_start().strip_prefix("pub ")?;
    let rest = ["struct ", "enum ", "trait ", "type "].iter().find_map(|kind| item.strip_prefix(kind))?;
    rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().filter(|name| !name.is_empty())
}

fn identifiers(code: &str) -> impl Iterator<Item = &str> {
    let names = code.split(|c: char| !c.is_alphanumeric() && c != '_');
    names.filter(|name| name.starts_with(|c: char| c.is_alphabetic() || c == '_'))
}

/// The words of a name, in any of Rust's naming styles, in lower case.
fn words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut after_small = false;
    for letter in name.chars() {
        let starts = letter.is_uppercase() && after_small;
        after_small = letter.is_lowercase() || letter.is_ascii_digit();
        match words.last_mut() {
            _ if letter == '_' => words.push(String::new()),
            Some(word) if !starts => word.extend(letter.to_lowercase()),
            _ => words.push(letter.to_lowercase().collect()),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rust(path: &str, text: &str) -> Source {
        super::super::rust(path, text)
    }

    #[test]
    fn names_are_split_into_words() {
        assert_eq!(words("MAX_IN_HAND"), ["max", "in", "hand"]);
        assert_eq!(words("FileInHand2x"), ["file", "in", "hand2x"]);
        assert_eq!(words("_tells"), ["tells"]);
    }

    #[test]
    fn a_retired_word_is_rejected_in_names_only() {
        let list = [
            ("errand".to_owned(), "internal call".to_owned()),
            ("in hand".to_owned(), "delegation".to_owned()),
        ];
        let found = |text| retired(&[rust("crates/a/src/b.rs", text)], &list);
        assert_eq!(found("let errands_left = \"errand\"; // errand"), Vec::<String>::new());
        assert_eq!(
            found("let an_errand = 1;"),
            ["crates/a/src/b.rs:1: an_errand: not 'errand' but internal call"]
        );
        assert_eq!(found("struct FilesInHand;").len(), 1);
        assert_eq!(retired(&[rust("crates/a/src/errand.rs", "")], &list).len(), 1);
    }

    #[test]
    fn a_public_name_has_one_crate() {
        let place = |name: &str| {
            rust(&format!("crates/{name}/src/lib.rs"), "    pub struct Place<'a> {\npub(crate) enum Own {}")
        };
        assert_eq!(public_types(&[place("a")], &[]), Vec::<String>::new());
        assert_eq!(
            public_types(&[place("a"), place("b")], &[]),
            ["Place: a public type of a and b: one name, one meaning"]
        );
    }
}
