//! `cargo +nightly fuzz run halves` in crates/mexec: what a hostile node or caller says while a command runs.
#![no_main]

use std::sync::LazyLock;
use tern_mexec::hostile::Halves;

static HALVES: LazyLock<Halves> = LazyLock::new(|| Halves::new().expect("two halves"));

// The daemon's own start has a broken pipe be an error, and no end; libFuzzer's has not.
libfuzzer_sys::fuzz_target!(init: {
    // SAFETY: nothing else runs yet.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}, |bytes: &[u8]| {
    let _heard = HALVES.hear(bytes).expect("they go on");
});
