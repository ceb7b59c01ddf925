//! `cargo +nightly fuzz run replies` in crates/mfs: replies of a hostile server.
#![no_main]

use std::sync::LazyLock;
use tern_mfs::client::hostile::Client;

static CLIENT: LazyLock<Client> = LazyLock::new(|| Client::new().expect("cannot create a client"));

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _count = CLIENT.receive(bytes);
});
