//! `cargo +nightly fuzz run requests` in crates/mfs: requests of a hostile client, performed in a
//! directory of their own.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // The corpus names this directory, so only one fuzzer may run at a time.
    tern_mfs::serve::hostile::perform_all("/tmp/tern-asks".as_ref(), bytes)
        .expect("cannot prepare the directory");
});
