//! Runs the fuzz target's corpus in every build: no stream may panic.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

#[path = "../fuzz/examine.rs"]
mod examine;

use std::path::Path;

#[test]
fn corpus_does_not_panic() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/stream");
    let mut frames = std::collections::BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        frames.insert(name, examine::examine(&std::fs::read(&path).unwrap()));
    }
    let expected = [
        ("bad-version", 1),
        ("frames-cut-small", 4),
        ("frames-whole", 4),
        ("http", 0),
        ("length-over", 0),
        ("truncated", 1),
    ];
    for (name, count) in expected {
        assert_eq!(frames.get(name), Some(&count), "{name}");
    }
}

#[test]
fn truncations_and_bit_flips_do_not_panic() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/stream/frames-whole");
    let bytes = std::fs::read(path).unwrap();
    for end in 0..bytes.len() {
        examine::examine(&bytes[..end]);
    }
    for bit in 0..bytes.len() * 8 {
        let mut turned = bytes.clone();
        turned[bit / 8] ^= 1 << (bit % 8);
        examine::examine(&turned);
    }
}
