//! Small files that are read and replaced as a whole.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Replaces a file atomically, by rename: a reader finds the old or the new contents, also after a
/// crash.
pub(crate) fn replace(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let unique = format!("new-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let temporary = path.with_extension(unique);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&temporary)
        .and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _nothing_to_remove = fs::remove_file(&temporary);
    }
    written
}

/// Reads a text file; fails if it has more than `max_len` bytes.
pub(crate) fn read_bounded(path: &Path, max_len: usize) -> io::Result<String> {
    let mut text = String::new();
    let file = fs::File::open(path)?;
    file.take(max_len as u64 + 1).read_to_string(&mut text)?;
    if text.len() > max_len {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is too long"));
    }
    Ok(text)
}
