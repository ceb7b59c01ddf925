//! `/proc`, read with little: no path is looked up from the root, nothing is allocated for a directory's entries.

use crate::task::{Stat, Turns};
use rustix::fs::{AtFlags, Mode, OFlags, RawDir};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

/// Longer texts are cut off; those of `/proc/PID` that are read here are not.
const LONGEST: usize = 4096;
/// Kernels do not have more pids.
const MOST: usize = 1 << 22;

/// An open `/proc`.
#[derive(Debug)]
pub(crate) struct ProcDir(Option<OwnedFd>);

/// A text, and the user whose file it is.
#[derive(Debug)]
pub(crate) struct Text {
    pub(crate) bytes: Vec<u8>,
    pub(crate) owner: u32,
}

impl ProcDir {
    /// This node's. Where there is none, nothing will be found in it.
    pub(crate) fn open() -> Self {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self(rustix::fs::open("/proc", flags, Mode::empty()).ok())
    }

    /// The numbers in a directory, with the inodes of what they name. An inode is made when a process is first looked
    /// up and is not handed on to another that gets its pid.
    pub(crate) fn numbers(&self, path: &str) -> Vec<(i32, u64)> {
        self.list(path).unwrap_or_default()
    }

    fn list(&self, path: &str) -> Option<Vec<(i32, u64)>> {
        // Opened each time: a position would be shared, and a rewound directory is no cheaper.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(self.0.as_ref()?, path, flags, Mode::empty()).ok()?;
        let mut space = [MaybeUninit::uninit(); 16 << 10];
        let mut entries = RawDir::new(&directory, &mut space);
        let mut found = Vec::new();
        while let Some(Ok(entry)) = entries.next() {
            let number = entry.file_name().to_str().ok().and_then(|name| name.parse().ok());
            found.extend(number.map(|number| (number, entry.ino())));
            if found.len() >= MOST {
                break;
            }
        }
        Some(found)
    }

    /// A file's text; nothing if its process has gone or may not be looked at.
    pub(crate) fn read(&self, path: &str) -> Option<Text> {
        let file = self.open_file(path)?;
        // Before reading: it is the owner at the time of the text.
        let owner = rustix::fs::fstat(&file).ok()?.st_uid;
        let mut space = [0; LONGEST];
        let length = rustix::io::read(&file, &mut space).ok()?;
        Some(Text { bytes: space.get(..length)?.to_vec(), owner })
    }

    fn open_file(&self, path: &str) -> Option<OwnedFd> {
        rustix::fs::openat(self.0.as_ref()?, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
    }

    /// `stat` of a process.
    pub(crate) fn stat(&self, pid: i32) -> Option<(Stat, u32)> {
        let text = self.read(&format!("{pid}/stat"))?;
        Some((Stat::parse(&text.bytes)?, text.owner))
    }

    /// `schedstat` of a process' first thread.
    pub(crate) fn turns(&self, pid: i32) -> Option<Turns> {
        self.turns_at(&format!("{pid}/schedstat"))
    }

    fn turns_at(&self, path: &str) -> Option<Turns> {
        let file = self.open_file(path)?;
        let mut space = [0; 96];
        let length = rustix::io::read(&file, &mut space).ok()?;
        Turns::parse(space.get(..length)?)
    }

    /// How many threads a process has: the links of its `task`, besides two that every directory has.
    pub(crate) fn threads(&self, pid: i32) -> Option<u64> {
        let path = format!("{pid}/task");
        rustix::fs::statat(self.0.as_ref()?, path, AtFlags::empty()).ok()?.st_nlink.checked_sub(2)
    }

    /// `schedstat` of each thread of a process.
    pub(crate) fn turns_of_threads(&self, pid: i32) -> Vec<(i32, Turns)> {
        let threads = self.numbers(&format!("{pid}/task"));
        let turns = |tid| Some((tid, self.turns_at(&format!("{pid}/task/{tid}/schedstat"))?));
        threads.into_iter().filter_map(|(tid, _)| turns(tid)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found_with_its_threads() {
        let proc = ProcDir::open();
        let pid = std::process::id() as i32;
        assert!(proc.numbers(".").iter().any(|&(one, inode)| one == pid && inode > 0));
        let (stat, owner) = proc.stat(pid).unwrap();
        assert_eq!(owner, rustix::process::geteuid().as_raw());
        assert_eq!(proc.numbers(&format!("{pid}/task")).len() as u64, proc.threads(pid).unwrap());
        assert!(stat.threads > 1, "the harness has a thread for each test");
        assert!(proc.turns_of_threads(pid).iter().any(|(_, turns)| turns.run > 0));
        assert!(proc.turns(0).is_none() && proc.stat(-1).is_none() && proc.numbers("none").is_empty());
    }
}
