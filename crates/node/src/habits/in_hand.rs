//! What of a process' reading and writing at home would not go there call by call, if it were away: what it does on files
//! that it would have in hand there (docs/design/direct.md) is read ahead and written behind, in large pieces.
//!
//! The kernel counts a process' calls and bytes, of files, pipes and sockets alike. How far it has come in its files is
//! shown with each descriptor. So the bytes by which these positions grow went through files, and the rest did not, or not in order.

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

/// Of more descriptors than that only the first are looked at: each costs a few calls.
const MOST: usize = 16;

/// Whoever makes fewer calls for each second of CPU has nothing to fear from them.
pub(super) const FEW: f64 = 100.0;

/// Flags of files that are not taken in hand: O_APPEND, O_DIRECT, O_DSYNC, O_SYNC.
const THROUGH: u32 = OFlags::APPEND.bits() | OFlags::DIRECT.bits() | OFlags::SYNC.bits();

/// Of one process.
#[derive(Debug, Clone, Default)]
pub(super) struct InHand {
    /// By descriptor: the file, and how far it had come.
    positions: HashMap<i32, (u64, u64)>,
}

impl InHand {
    /// The part of so many bytes, which it has read and written since the last look, that went through files in order.
    pub(super) fn part(&mut self, pid: i32, bytes: f64) -> f64 {
        let now = positions(pid).unwrap_or_default();
        let part = self.grown(&now) as f64 / bytes.max(1.0);
        self.positions = now;
        part.clamp(0.0, 1.0)
    }

    /// By how many bytes they have grown. A file that was not open before is taken to have been read from its beginning.
    fn grown(&self, now: &HashMap<i32, (u64, u64)>) -> u64 {
        let grown = now.iter().map(|(number, (file, at))| {
            let before = self.positions.get(number).filter(|(before, _)| before == file);
            at.saturating_sub(before.map_or(0, |(_, at)| *at))
        });
        grown.fold(0, u64::saturating_add)
    }
}

/// Of each descriptor that may be in hand: the file's inode, and the position.
fn positions(pid: i32) -> Option<HashMap<i32, (u64, u64)>> {
    let open = |path: String| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).ok()
    };
    let (files, texts) = (open(format!("/proc/{pid}/fd"))?, open(format!("/proc/{pid}/fdinfo"))?);
    let mut found = HashMap::new();
    for number in numbers(&files) {
        let name = number.to_string();
        let Ok(stat) = rustix::fs::statat(&files, name.as_str(), AtFlags::empty()) else { continue };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            continue;
        }
        if let Some(at) = position(&texts, &name) {
            found.insert(number, (stat.st_ino, at));
        }
    }
    Some(found)
}

fn numbers(directory: &OwnedFd) -> Vec<i32> {
    let mut space = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(directory, &mut space);
    let mut found = Vec::with_capacity(MOST);
    while let Some(Ok(entry)) = entries.next() {
        found.extend(entry.file_name().to_str().ok().and_then(|name| name.parse::<i32>().ok()));
        if found.len() >= MOST {
            break;
        }
    }
    found
}

/// Nothing if it would not be taken in hand.
fn position(directory: impl AsFd, name: &str) -> Option<u64> {
    let file = rustix::fs::openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut space = [0; 256];
    let length = rustix::io::read(&file, &mut space).ok()?;
    read_position(std::str::from_utf8(space.get(..length)?).ok()?)
}

fn read_position(text: &str) -> Option<u64> {
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let flags = u32::from_str_radix(value("flags:")?, 8).ok()?;
    (flags & THROUGH == 0).then(|| value("pos:")?.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, SeekFrom, Write};

    #[test]
    fn files_that_go_through_at_once_do_not_count() {
        assert_eq!(read_position("pos:\t4096\nflags:\t0100002\nmnt_id:\t29\nino:\t7\n"), Some(4096));
        assert_eq!(read_position("pos:\t4096\nflags:\t0102001\nmnt_id:\t29\n"), None, "O_APPEND");
        assert_eq!(read_position("pos:\t-1\nflags:\t0\n"), None);
        assert_eq!(read_position(""), None);
    }

    /// Of this process itself; other tests of it have files of their own, which are not read meanwhile by these bytes.
    #[test]
    fn what_grows_went_through_files() {
        let path = std::env::temp_dir().join(format!("in-hand-{}", std::process::id()));
        let options =
            || std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(true).clone();
        let mut file = options().open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        let of_it =
            || positions(std::process::id() as i32).unwrap().into_iter().filter(|(n, _)| *n == number);
        let mut habit = InHand { positions: of_it().collect() };
        file.write_all(&[7; 3000]).unwrap();
        let now = of_it().collect();
        assert_eq!(habit.grown(&now), 3000);
        habit.positions = now;
        file.seek(SeekFrom::Start(1000)).unwrap();
        let now = of_it().collect();
        assert_eq!(habit.grown(&now), 0, "it went back");
        habit.positions = now;
        file.read_exact(&mut [0; 500]).unwrap();
        assert_eq!(habit.grown(&of_it().collect()), 500);
    }
}
