//! `cargo +nightly fuzz run answers` in crates/mfs: what a hostile server answers.
#![no_main]

use std::sync::LazyLock;
use tern_mfs::client::hostile::Client;

static CLIENT: LazyLock<Client> = LazyLock::new(|| Client::new().expect("an identity"));

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _many = CLIENT.hear(bytes);
});
