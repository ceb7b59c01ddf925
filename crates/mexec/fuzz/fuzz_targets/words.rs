//! `cargo +nightly fuzz run words` in crates/mexec: what is read from a socket, in parts of a size that the first byte says.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((size, rest)) = bytes.split_first() else { return };
    let _many = tern_mexec::hostile::words(rest, usize::from(*size));
});
