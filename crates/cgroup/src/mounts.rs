//! The mount table of this process, read from `/proc/self/mountinfo`.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The mount point.
    pub at: PathBuf,
    /// The directory of the file system that is mounted there.
    pub root: PathBuf,
    /// The file system's type.
    pub kind: String,
    /// The file system's options, such as cgroup controllers.
    pub options: Vec<String>,
}

/// All mounts, in mount order.
///
/// # Errors
/// If /proc cannot be read.
pub fn table() -> io::Result<Vec<Mount>> {
    // The kernel escapes only white space and backslashes, so other bytes need not be UTF-8.
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(String::from_utf8_lossy(&table).lines().filter_map(parse).collect())
}

fn parse(line: &str) -> Option<Mount> {
    // The number of optional fields varies; they end with a hyphen.
    let (front, back) = line.split_once(" - ")?;
    let mut front = front.split(' ').skip(3);
    let (root, at) = (front.next()?, front.next()?);
    let mut back = back.split(' ');
    let kind = back.next()?.to_owned();
    let options = back.nth(1)?.split(',').map(str::to_owned).collect();
    Some(Mount { at: unescape(at), root: unescape(root), kind, options })
}

/// Undoes the kernel's escapes, such as `\040` for a blank.
fn unescape(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = text.get(at + 1..at + 4).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (bytes[at], octal) {
            (b'\\', Some(byte)) => {
                out.push(byte);
                at += 4;
            }
            (byte, _) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_lines_are_parsed() {
        let mount =
            parse("36 35 98:0 /x /mnt/a\\040b rw,noatime master:1 shared:2 - cgroup cgroup rw,cpu,cpuacct")
                .unwrap();
        assert_eq!(mount.at, PathBuf::from("/mnt/a b"));
        assert_eq!((mount.root, mount.kind), ("/x".into(), "cgroup".to_owned()));
        assert_eq!(mount.options, ["rw", "cpu", "cpuacct"]);
        assert_eq!(parse("nonsense"), None);
        assert!(table().unwrap().iter().any(|m| m.at == *"/"));
    }
}
