//! Prints `docs/syscalls.md`.

use std::io::Write;

fn main() -> std::io::Result<()> {
    std::io::stdout().write_all(tern_syscall::markdown().as_bytes())
}
