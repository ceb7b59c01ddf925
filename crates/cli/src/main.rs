//! `tern`, which is also `mosrun`, `migrate`, `mps` and the rest, by the name it is called with.
//!
//! It has a C `main`, because Rust's runtime changes things before its own that `mosrun` would pass on to the
//! program it becomes: it ignores SIGPIPE, and opens /dev/null on standard descriptors that were closed. After
//! that nobody could tell what the caller had set.
#![no_main]
#![deny(unsafe_code)]

use std::ffi::{CStr, OsStr, OsString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;

#[expect(unsafe_code, reason = "the entry point, and the arguments the C library passes to it")]
#[unsafe(no_mangle)]
extern "C" fn main(argc: c_int, argv: *const *const c_char) -> c_int {
    let count = usize::try_from(argc).unwrap_or(0);
    let mut words = (0..count).map(|i| {
        // SAFETY: main's contract (ISO C, 5.1.2.2.1): argv holds argc pointers to strings that stay as they
        // are, unless we change them, until the process ends.
        let word = unsafe { CStr::from_ptr(*argv.add(i)) };
        OsStr::from_bytes(word.to_bytes()).to_owned()
    });
    let program = words.next().unwrap_or_default();
    let args: Vec<OsString> = words.collect();
    // A panic must not unwind into C.
    let code = std::panic::catch_unwind(|| tern_cli::tool::main(&program, &args)).unwrap_or(70);
    std::process::exit(c_int::from(code))
}
