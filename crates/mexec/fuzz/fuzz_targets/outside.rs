//! `cargo +nightly fuzz run outside` in crates/mexec: what a client says to a gatekeeper, or who pretends to be one.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _heard = tern_mexec::outside::hostile::hears(bytes);
});
