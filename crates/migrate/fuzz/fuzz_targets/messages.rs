//! `cargo +nightly fuzz run messages` in crates/migrate.
#![no_main]

#[path = "../examine.rs"]
mod examine;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    examine::examine(bytes);
});
