//! `cargo +nightly fuzz run asks` in crates/mfs: what a hostile client asks is done in a directory of its own.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // As the corpus says: one fuzzer at a time.
    tern_mfs::serve::hostile::hear("/tmp/tern-asks".as_ref(), bytes).expect("a directory");
});
