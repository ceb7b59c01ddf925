//! Small files that are replaced as a whole.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Writes a file under another name and renames it: a reader finds the old one or the new one, also after a
/// crash.
pub(crate) fn replace(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let unique = format!("new-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let fresh = path.with_extension(unique);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&fresh)
        .and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&fresh, path));
    if written.is_err() {
        let _nothing_to_remove = fs::remove_file(&fresh);
    }
    written
}

/// Reads at most `most` bytes of text.
pub(crate) fn read_bounded(path: &Path, most: usize) -> io::Result<String> {
    let mut text = String::new();
    let file = fs::File::open(path)?;
    file.take(most as u64 + 1).read_to_string(&mut text)?;
    if text.len() > most {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "longer than it can be"));
    }
    Ok(text)
}
