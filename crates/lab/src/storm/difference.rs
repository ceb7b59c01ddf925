//! Compares the results of two runs: their output and the files in their folders.

use crate::error::{Result, WithContext};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Maximum number of lines shown of a difference.
const MAX_LINES: usize = 20;
/// Maximum number of bytes shown of a line.
const MAX_LINE_LENGTH: usize = 200;
/// Files of at least this many bytes are compared, but not shown as text.
const MAX_TEXT_SIZE: u64 = 4 << 20;

/// One difference between the native run and the run in the storm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// `stdout`, `stderr`, `status`, `processes`, or a file by its name.
    pub what: String,
    /// The difference: for text, the first lines of a unified diff.
    pub how: String,
}

impl Difference {
    pub(super) fn new(what: &str, how: impl Into<String>) -> Self {
        Self { what: what.to_owned(), how: how.into() }
    }
}

/// Compares two files that both exist; `what` is their name in the result.
pub(super) fn compare_files(what: &str, native: &Path, storm: &Path) -> Result<Option<Difference>> {
    let Some(at) = first_difference(native, storm)? else { return Ok(None) };
    let size = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
    let (a, b) = (size(native), size(storm));
    let text = (a.max(b) < MAX_TEXT_SIZE).then(|| unified_diff(what, native, storm)).flatten();
    let bytes = || format!("{b} bytes instead of {a}, first difference at byte {at}");
    Ok(Some(Difference::new(what, text.unwrap_or_else(bytes))))
}

/// Compares two folders: names, kinds, permissions, owners, links and contents, not times.
pub(super) fn compare_folders(native: &Path, storm: &Path) -> Result<Vec<Difference>> {
    let (a, b) = (list_files(native)?, list_files(storm)?);
    let mut differences = Vec::new();
    for name in a.keys().chain(b.keys().filter(|name| !a.contains_key(*name))) {
        let what = name.to_string_lossy();
        match (a.get(name), b.get(name)) {
            (Some(one), Some(other)) if one != other => {
                differences.push(Difference::new(&what, format!("{other} instead of {one}")));
            }
            (Some(one), Some(_)) if one.is_file => {
                differences.extend(compare_files(&what, &native.join(name), &storm.join(name))?);
            }
            (Some(_), None) => differences.push(Difference::new(&what, "it is missing")),
            (None, Some(other)) => {
                differences.push(Difference::new(&what, format!("it is unexpected: {other}")));
            }
            _ => {}
        }
    }
    Ok(differences)
}

/// The properties of a file that are compared, apart from its content.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileProperties {
    is_file: bool,
    text: String,
}

impl FileProperties {
    fn of(path: &Path, metadata: &Metadata) -> Result<Self> {
        let kind = metadata.file_type();
        let named = match kind {
            k if k.is_symlink() => {
                let target = fs::read_link(path).with_context(|| format!("read {}", path.display()))?;
                format!("a link to {}", target.display())
            }
            k if k.is_dir() => "a folder".to_owned(),
            k if k.is_file() => format!("a file with {} names", metadata.nlink()),
            k if k.is_fifo() => "a pipe".to_owned(),
            k if k.is_socket() => "a socket".to_owned(),
            _ => "a device".to_owned(),
        };
        let text = format!("{named}, {:04o} {}:{}", metadata.mode() & 0o7777, metadata.uid(), metadata.gid());
        Ok(Self { is_file: kind.is_file(), text })
    }
}

impl std::fmt::Display for FileProperties {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// All files below a folder, by relative path. Symbolic links are not followed.
fn list_files(folder: &Path) -> Result<BTreeMap<PathBuf, FileProperties>> {
    let mut all = BTreeMap::new();
    let mut left = vec![PathBuf::new()];
    while let Some(below) = left.pop() {
        let at = folder.join(&below);
        for entry in fs::read_dir(&at).with_context(|| format!("list {}", at.display()))? {
            let entry = entry.with_context(|| format!("list {}", at.display()))?;
            let name = below.join(entry.file_name());
            let metadata = entry.metadata().with_context(|| format!("look at {}", name.display()))?;
            if metadata.is_dir() {
                left.push(name.clone());
            }
            all.insert(name, FileProperties::of(&entry.path(), &metadata)?);
        }
    }
    Ok(all)
}

/// The offset of the first byte that differs, which may be the end of the shorter file.
fn first_difference(a: &Path, b: &Path) -> Result<Option<u64>> {
    let open = |path: &Path| File::open(path).with_context(|| format!("open {}", path.display()));
    let (mut a, mut b) = (open(a)?, open(b)?);
    let (mut one, mut other) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut passed = 0;
    loop {
        let (n, m) = (read_fully(&mut a, &mut one)?, read_fully(&mut b, &mut other)?);
        let same = one[..n].iter().zip(&other[..m]).take_while(|(x, y)| x == y).count();
        if same < n.max(m) {
            return Ok(Some(passed + same as u64));
        }
        if n == 0 {
            return Ok(None);
        }
        passed += n as u64;
    }
}

/// Reads until the buffer is full or the file ends.
fn read_fully(from: &mut File, buffer: &mut [u8]) -> Result<usize> {
    let mut count = 0;
    while count < buffer.len() {
        match from.read(&mut buffer[count..]) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error).with_context(|| "read a file that was left".to_owned()),
        }
    }
    Ok(count)
}

/// The beginning of a unified diff; `None` if the files are not text, or `diff` is not installed.
fn unified_diff(what: &str, native: &Path, storm: &Path) -> Option<String> {
    let labels = [format!("native/{what}"), format!("storm/{what}")];
    let mut command = Command::new("diff");
    command.args(["-u", "--label", &labels[0], "--label", &labels[1]]).args([native, storm]);
    let end = command.env("LC_ALL", "C").output().ok()?;
    let text = String::from_utf8(end.stdout).ok()?;
    if end.status.code() != Some(1) || !text.starts_with("---") {
        return None;
    }
    let mut shown: Vec<String> = text.lines().take(MAX_LINES).map(printable).collect();
    let more = text.lines().count().saturating_sub(MAX_LINES);
    if more > 0 {
        shown.push(format!("… {more} more lines"));
    }
    Some(shown.join("\n"))
}

/// Removes characters that could control a terminal.
fn printable(line: &str) -> String {
    line.chars().take(MAX_LINE_LENGTH).map(|c| if c.is_control() && c != '\t' { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// Two identical folders, removed on drop.
    struct TwoFolders(PathBuf);

    impl TwoFolders {
        fn new(name: &str) -> Self {
            let two = Self(std::env::temp_dir().join(format!("tern-left-{name}-{}", std::process::id())));
            for half in [two.native(), two.storm()] {
                fs::create_dir_all(half.join("sub")).unwrap();
                fs::write(half.join("sub/text"), "one\ntwo\n").unwrap();
                fs::write(half.join("bytes"), vec![7u8; 70_000]).unwrap();
                symlink("nowhere", half.join("link")).unwrap();
            }
            two
        }

        fn native(&self) -> PathBuf {
            self.0.join("native")
        }

        fn storm(&self) -> PathBuf {
            self.0.join("storm")
        }

        fn differences(&self) -> Vec<(String, String)> {
            let found = compare_folders(&self.native(), &self.storm()).unwrap();
            found.into_iter().map(|difference| (difference.what, difference.how)).collect()
        }
    }

    impl Drop for TwoFolders {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn identical_folders_have_no_differences() {
        assert_eq!(TwoFolders::new("same").differences(), []);
    }

    #[test]
    fn every_kind_of_difference_is_found() {
        let two = TwoFolders::new("kinds");
        let storm = two.storm();
        let mut bytes = vec![7u8; 70_000];
        bytes[66_000] = 255;
        fs::write(storm.join("bytes"), bytes).unwrap();
        fs::write(storm.join("sub/text"), "one\nTWO\n").unwrap();
        fs::remove_file(storm.join("link")).unwrap();
        symlink("somewhere", storm.join("link")).unwrap();
        fs::write(storm.join("new"), "").unwrap();
        fs::write(two.native().join("old"), "").unwrap();
        for half in [two.native(), storm.clone()] {
            fs::write(half.join("mode"), "").unwrap();
        }
        fs::set_permissions(storm.join("mode"), fs::Permissions::from_mode(0o755)).unwrap();
        let found = two.differences();
        let how =
            |what: &str| found.iter().find(|(name, _)| name == what).map(|(_, how)| how.clone()).unwrap();
        assert_eq!(found.len(), 6, "{found:?}");
        assert_eq!(how("bytes"), "70000 bytes instead of 70000, first difference at byte 66000");
        assert_eq!(
            how("sub/text"),
            "--- native/sub/text\n+++ storm/sub/text\n@@ -1,2 +1,2 @@\n one\n-two\n+TWO"
        );
        assert!(how("link").starts_with("a link to somewhere"));
        assert_eq!(how("old"), "it is missing");
        assert!(how("new").starts_with("it is unexpected: a file"));
        assert!(how("mode").contains("0755"));
    }

    #[test]
    fn a_shorter_file_differs_where_it_ends() {
        let two = TwoFolders::new("short");
        fs::write(two.native().join("bytes"), vec![0u8; 70_000]).unwrap();
        fs::write(two.storm().join("bytes"), vec![0u8; 65_536]).unwrap();
        assert_eq!(two.differences()[0].1, "65536 bytes instead of 70000, first difference at byte 65536");
    }
}
