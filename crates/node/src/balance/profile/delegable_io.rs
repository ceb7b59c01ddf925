//! The share of a process' I/O at home that would not be forwarded call by call if the process were
//! away: I/O on files that would be delegated to its node (docs/design/delegation.md) is read ahead
//! and written behind in large pieces.
//!
//! The kernel counts calls and bytes of a process over files, pipes and sockets together. The file
//! position of each descriptor is in its fdinfo. The bytes by which the positions advance went
//! through files in order; the rest did not.

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, StatxFlags};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use tern_control::read_process;

/// Maximum number of descriptors that are examined, as each costs a few system calls.
const MAX_DESCRIPTORS: usize = 16;

/// With fewer calls per second of CPU time, forwarding them costs too little to matter.
pub(super) const MIN_CALLS_PER_CPU_S: f64 = 100.0;

/// Flags of files that are not delegated: O_APPEND, O_DIRECT, O_DSYNC, O_SYNC.
const UNDELEGATED_FLAGS: u32 = OFlags::APPEND.bits() | OFlags::DIRECT.bits() | OFlags::SYNC.bits();

/// The file positions of one process.
#[derive(Debug, Clone, Default)]
pub(super) struct DelegableIo {
    /// By descriptor: the inode of the file, and the position at the last scan.
    positions: HashMap<i32, (u64, u64)>,
}

impl DelegableIo {
    /// The share, 0 to 1, of `bytes` that went through files in order. `bytes` is what the process
    /// has read and written since the last call.
    pub(super) fn sequential_share(&mut self, pid: i32, bytes: f64) -> f64 {
        let now = read_process(pid, move || positions(pid)).unwrap_or_default();
        let sequential_share = self.advanced_bytes(&now) as f64 / bytes.max(1.0);
        self.positions = now;
        sequential_share.clamp(0.0, 1.0)
    }

    /// By how many bytes the positions have advanced. A file that was not open at the last scan is
    /// assumed to have been read from its start.
    fn advanced_bytes(&self, now: &HashMap<i32, (u64, u64)>) -> u64 {
        let advanced_bytes = now.iter().map(|(number, (file, at))| {
            let before = self.positions.get(number).filter(|(before, _)| before == file);
            at.saturating_sub(before.map_or(0, |(_, at)| *at))
        });
        advanced_bytes.fold(0, u64::saturating_add)
    }
}

/// The inode and position of each descriptor whose file could be delegated.
fn positions(pid: i32) -> Option<HashMap<i32, (u64, u64)>> {
    let open = |path: String| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).ok()
    };
    let (files, fdinfo) = (open(format!("/proc/{pid}/fd"))?, open(format!("/proc/{pid}/fdinfo"))?);
    let mut found = HashMap::new();
    for number in descriptors(&files) {
        let name = number.to_string();
        // Asks no file server.
        let (known, fields) = (AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE | StatxFlags::INO);
        let Ok(stat) = rustix::fs::statx(&files, name.as_str(), known, fields) else { continue };
        if FileType::from_raw_mode(stat.stx_mode.into()) != FileType::RegularFile {
            continue;
        }
        if let Some(at) = position(&fdinfo, &name) {
            found.insert(number, (stat.stx_ino, at));
        }
    }
    Some(found)
}

fn descriptors(directory: &OwnedFd) -> Vec<i32> {
    let mut space = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(directory, &mut space);
    let mut found = Vec::with_capacity(MAX_DESCRIPTORS);
    while let Some(Ok(entry)) = entries.next() {
        found.extend(entry.file_name().to_str().ok().and_then(|name| name.parse::<i32>().ok()));
        if found.len() >= MAX_DESCRIPTORS {
            break;
        }
    }
    found
}

/// The position of a descriptor; `None` if its file would not be delegated.
fn position(directory: impl AsFd, name: &str) -> Option<u64> {
    let file = rustix::fs::openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut space = [0; 256];
    let length = rustix::io::read(&file, &mut space).ok()?;
    read_position(std::str::from_utf8(space.get(..length)?).ok()?)
}

fn read_position(text: &str) -> Option<u64> {
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let flags = u32::from_str_radix(value("flags:")?, 8).ok()?;
    (flags & UNDELEGATED_FLAGS == 0).then(|| value("pos:")?.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, SeekFrom, Write};

    #[test]
    fn files_with_undelegated_flags_do_not_count() {
        assert_eq!(read_position("pos:\t4096\nflags:\t0100002\nmnt_id:\t29\nino:\t7\n"), Some(4096));
        assert_eq!(read_position("pos:\t4096\nflags:\t0102001\nmnt_id:\t29\n"), None, "O_APPEND");
        assert_eq!(read_position("pos:\t-1\nflags:\t0\n"), None);
        assert_eq!(read_position(""), None);
    }

    /// Uses a file of this process. Only its descriptor is compared, since other tests have files
    /// open.
    #[test]
    fn advanced_positions_count_as_file_io() {
        let path = std::env::temp_dir().join(format!("in-hand-{}", std::process::id()));
        let options =
            || std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(true).clone();
        let mut file = options().open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        let of_it =
            || positions(std::process::id() as i32).unwrap().into_iter().filter(|(n, _)| *n == number);
        let mut io = DelegableIo { positions: of_it().collect() };
        file.write_all(&[7; 3000]).unwrap();
        let now = of_it().collect();
        assert_eq!(io.advanced_bytes(&now), 3000);
        io.positions = now;
        file.seek(SeekFrom::Start(1000)).unwrap();
        let now = of_it().collect();
        assert_eq!(io.advanced_bytes(&now), 0, "it went back");
        io.positions = now;
        file.read_exact(&mut [0; 500]).unwrap();
        assert_eq!(io.advanced_bytes(&of_it().collect()), 500);
    }
}
