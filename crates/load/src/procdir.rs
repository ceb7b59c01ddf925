//! Reads `/proc` cheaply: no path is looked up from the root, and a directory's entries are not
//! allocated one by one.

use crate::task::{IoCounters, ProcStat, SchedStat};
use rustix::fs::{AtFlags, Mode, OFlags, RawDir};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

/// Longer texts are truncated; those of `/proc/PID` that are read here are shorter.
const MAX_TEXT_LEN: usize = 4096;
/// The kernel's limit of PIDs (PID_MAX_LIMIT).
const MAX_PIDS: usize = 1 << 22;

/// An open `/proc`.
#[derive(Debug)]
pub(crate) struct ProcDir(Option<OwnedFd>);

/// A file's text and owner.
#[derive(Debug)]
pub(crate) struct Text {
    pub(crate) bytes: Vec<u8>,
    pub(crate) owner: u32,
}

/// The files of one process.
#[derive(Debug)]
pub(crate) struct ProcessFiles {
    pub(crate) stat: ProcStat,
    /// The owner of the files.
    pub(crate) owner: u32,
    /// The sum of all threads.
    pub(crate) schedstat: SchedStat,
    pub(crate) io: Option<IoCounters>,
}

impl ProcDir {
    /// Opens this node's `/proc`. If it fails, all reads return nothing.
    pub(crate) fn open() -> Self {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self(rustix::fs::open("/proc", flags, Mode::empty()).ok())
    }

    /// The numeric entries of a directory, with their inodes. An inode is allocated when a process
    /// is first looked up, and is not reused by another process with the same PID.
    pub(crate) fn numeric_entries(&self, path: &str) -> Vec<(i32, u64)> {
        self.list(path).unwrap_or_default()
    }

    fn list(&self, path: &str) -> Option<Vec<(i32, u64)>> {
        // Opened each time: a descriptor that stays open keeps its position, and rewinding it is no
        // cheaper.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(self.0.as_ref()?, path, flags, Mode::empty()).ok()?;
        let mut space = [MaybeUninit::uninit(); 16 << 10];
        let mut entries = RawDir::new(&directory, &mut space);
        let mut found = Vec::new();
        while let Some(Ok(entry)) = entries.next() {
            let number = entry.file_name().to_str().ok().and_then(|name| name.parse().ok());
            found.extend(number.map(|number| (number, entry.ino())));
            if found.len() >= MAX_PIDS {
                break;
            }
        }
        Some(found)
    }

    /// A file's text; `None` if its process has ended or access is denied.
    pub(crate) fn read(&self, path: &str) -> Option<Text> {
        let file = self.open_file(path)?;
        // The owner is queried before the text is read, so that the owner is not newer than the
        // text.
        let owner = rustix::fs::fstat(&file).ok()?.st_uid;
        let mut space = [0; MAX_TEXT_LEN];
        let length = rustix::io::read(&file, &mut space).ok()?;
        Some(Text { bytes: space.get(..length)?.to_vec(), owner })
    }

    fn open_file(&self, path: &str) -> Option<OwnedFd> {
        rustix::fs::openat(self.0.as_ref()?, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
    }

    /// Reads the files of a process, `io` only on request.
    pub(crate) fn files(&self, pid: i32, reads_io: bool) -> Option<ProcessFiles> {
        // Read before `stat`, so that a change between the two reads is detected in the next scan.
        let first = self.schedstat(pid).unwrap_or_default();
        let (stat, owner) = self.stat(pid)?;
        let schedstat = match stat.threads {
            0 | 1 => first,
            _ => {
                let threads = self.thread_schedstats(pid);
                threads.iter().fold(SchedStat::default(), |sum, (_, one)| sum.plus(one))
            }
        };
        let io = || self.read(&format!("{pid}/io")).and_then(|text| IoCounters::parse(&text.bytes));
        let io = if reads_io && !stat.is_kernel_thread { io() } else { None };
        Some(ProcessFiles { stat, owner, schedstat, io })
    }

    /// Parses `stat` of a process; also returns the file's owner.
    pub(crate) fn stat(&self, pid: i32) -> Option<(ProcStat, u32)> {
        let text = self.read(&format!("{pid}/stat"))?;
        Some((ProcStat::parse(&text.bytes)?, text.owner))
    }

    /// Parses `schedstat` of a process's first thread.
    pub(crate) fn schedstat(&self, pid: i32) -> Option<SchedStat> {
        self.schedstat_at(&format!("{pid}/schedstat"))
    }

    fn schedstat_at(&self, path: &str) -> Option<SchedStat> {
        let file = self.open_file(path)?;
        let mut space = [0; 96];
        let length = rustix::io::read(&file, &mut space).ok()?;
        SchedStat::parse(space.get(..length)?)
    }

    /// Number of threads of a process: the link count of its `task` directory, less 2.
    pub(crate) fn threads(&self, pid: i32) -> Option<u64> {
        let path = format!("{pid}/task");
        rustix::fs::statat(self.0.as_ref()?, path, AtFlags::empty()).ok()?.st_nlink.checked_sub(2)
    }

    /// Parses `schedstat` of each thread of a process.
    pub(crate) fn thread_schedstats(&self, pid: i32) -> Vec<(i32, SchedStat)> {
        let threads = self.numeric_entries(&format!("{pid}/task"));
        let schedstat = |tid| Some((tid, self.schedstat_at(&format!("{pid}/task/{tid}/schedstat"))?));
        threads.into_iter().filter_map(|(tid, _)| schedstat(tid)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found_with_its_threads() {
        let proc = ProcDir::open();
        let pid = std::process::id() as i32;
        assert!(proc.numeric_entries(".").iter().any(|&(one, inode)| one == pid && inode > 0));
        let (stat, owner) = proc.stat(pid).unwrap();
        assert_eq!(owner, rustix::process::geteuid().as_raw());
        assert_eq!(proc.numeric_entries(&format!("{pid}/task")).len() as u64, proc.threads(pid).unwrap());
        assert!(stat.threads > 1, "the harness has a thread for each test");
        assert!(proc.thread_schedstats(pid).iter().any(|(_, stat)| stat.run_ns > 0));
        assert!(
            proc.schedstat(0).is_none() && proc.stat(-1).is_none() && proc.numeric_entries("none").is_empty()
        );
    }
}
