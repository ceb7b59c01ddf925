//! The binary of `tern`, `mosrun`, `migrate`, `mps` and the other tools; the name it is called with
//! selects one.
//!
//! It has a C `main`, because Rust's runtime changes two things before Rust's `main` runs: it
//! ignores SIGPIPE, and it opens /dev/null on standard descriptors that were closed. The program
//! that `mosrun` becomes would inherit both, and the caller's settings could no longer be
//! determined.
#![no_main]
#![deny(unsafe_code)]

use std::ffi::{CStr, OsStr, OsString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;

#[expect(unsafe_code, reason = "the entry point, and the arguments the C library passes to it")]
#[unsafe(no_mangle)]
extern "C" fn main(argc: c_int, argv: *const *const c_char) -> c_int {
    let count = usize::try_from(argc).unwrap_or(0);
    let mut words = (0..count).map(|i| {
        // SAFETY: main's contract (ISO C, 5.1.2.2.1): argv holds argc pointers to strings, which
        // live until the process ends and which nothing here modifies.
        let word = unsafe { CStr::from_ptr(*argv.add(i)) };
        OsStr::from_bytes(word.to_bytes()).to_owned()
    });
    let program = words.next().unwrap_or_default();
    let args: Vec<OsString> = words.collect();
    // A panic must not unwind into C.
    let code = std::panic::catch_unwind(|| tern_cli::tool::main(&program, &args)).unwrap_or(70);
    std::process::exit(c_int::from(code))
}
