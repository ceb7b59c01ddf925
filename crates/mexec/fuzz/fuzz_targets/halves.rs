//! `cargo +nightly fuzz run halves` in crates/mexec: input of a hostile node or caller while a
//! command runs.
#![no_main]

use std::sync::LazyLock;
use tern_mexec::hostile::Halves;

static HALVES: LazyLock<Halves> = LazyLock::new(|| Halves::new().expect("two halves"));

// std's start-up code ignores SIGPIPE, so that a write to a broken pipe only returns an error.
// libFuzzer's start-up code does not.
libfuzzer_sys::fuzz_target!(init: {
    // SAFETY: no other thread runs yet, and no handler is installed.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}, |bytes: &[u8]| {
    let _any = HALVES.feed(bytes).expect("both halves continue");
});
