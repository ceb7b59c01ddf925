//! `cargo +nightly fuzz run gatekeeper` in crates/mexec: input of a gatekeeper's client,
//! authenticated or not.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _accepted = tern_mexec::gatekeeper::hostile::accepts(bytes);
});
