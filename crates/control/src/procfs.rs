//! Reads files of /proc as text.
//!
//! The kernel escapes few bytes there. The name of a program (prctl(2), PR_SET_NAME), of a file or
//! of a mount point may contain all other bytes unescaped. Any user can choose such a name, so a
//! reader must not fail because of bytes that are not UTF-8.

use std::io;
use std::path::Path;

/// The text of a file of /proc. Bytes that are not UTF-8 are replaced.
///
/// # Errors
/// If the file cannot be read: mostly because the process is gone.
pub fn read_text(path: impl AsRef<Path>) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&std::fs::read(path)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_any_bytes_is_read() {
        let read = || {
            std::fs::write("/proc/thread-self/comm", b"\xff\xfe name").unwrap();
            let text = read_text("/proc/thread-self/status").unwrap();
            text.lines().any(|line| line.starts_with("Uid:"))
        };
        assert!(std::thread::spawn(read).join().unwrap());
    }
}
