//! `cargo +nightly fuzz run messages` in crates/mexec: input from a socket, in parts whose size is
//! the first byte.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((size, rest)) = bytes.split_first() else { return };
    let _count = tern_mexec::hostile::parse(rest, usize::from(*size));
});
