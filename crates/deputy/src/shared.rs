//! Files of file systems that the nodes share, by NFS or the like, as home's `ternd.toml` declares: whether one that is only read may be read
//! where its program runs (docs/design/direct.md, "Files that nodes share").

use crate::direct::{Direct, WORTH_OPENING};
use rustix::fs::{Stat, fstat};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, SystemTime};
use tern_control::shared::{Root, look};
use tern_ids::SharedFile;
use tern_image::place::has_changed;
use tern_migrate::message::{FileWord, SharedPlace};
use tern_syscall::ByteBuf;
use tern_tracee::procfs;

/// The directories that home declares, and the devices that are there.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    declared: Vec<PathBuf>,
    /// What is known holds until this changes.
    table: Option<File>,
    /// The device of each that was looked at; none if it is not to be used.
    devices: BTreeMap<PathBuf, Option<u64>>,
}

impl Shares {
    pub(crate) fn new(declared: Vec<PathBuf>) -> Self {
        Self { declared, ..Self::default() }
    }

    /// Where an open file of a process is in one of them. If it has another root, or mounts of its own, the path may be
    /// another file's, as who opens that will find.
    pub(crate) fn find(&mut self, pid: i32, fd: i32, device: u64) -> Option<(PathBuf, Vec<u8>)> {
        if self.declared.is_empty() {
            return None;
        }
        let path = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
        let root = self.declared.iter().filter(|root| path.starts_with(root));
        let root = root.max_by_key(|root| root.as_os_str().len())?.clone();
        let below = path.strip_prefix(&root).ok()?.as_os_str().as_bytes().to_vec();
        let is_there = self.device(&root) == Some(device) && !below.is_empty();
        is_there.then_some((root, below))
    }

    /// The device of a declared directory. Only those are looked at of which a file has just been open: the server of another may be gone.
    fn device(&mut self, root: &Path) -> Option<u64> {
        if self.table.as_ref().is_none_or(has_changed) {
            self.devices.clear();
            // It says that it has changed once it has been read.
            let table = File::open("/proc/self/mountinfo").and_then(|mut table| {
                table.read_to_end(&mut Vec::new())?;
                Ok(table)
            });
            self.table = table.ok();
        }
        let look = || Root::open(root).ok().filter(|root| !root.loose).map(|root| root.device);
        *self.devices.entry(root.to_owned()).or_insert_with(look)
    }
}

/// How long an answer about a file may take: from what this kernel knows it is there at once, and else the server is asked.
const SOON: Duration = Duration::from_millis(50);

type Ask = Sender<Arc<OwnedFd>>;
type Said = Receiver<Option<Stat>>;

/// Looks at files whose server may be gone: who waits for that can neither be interrupted nor killed, and a shim that waits is
/// taken for dead.
#[derive(Debug, Default)]
pub(crate) struct Looker {
    thread: Option<(Ask, Said)>,
    /// It has not answered yet.
    waits: bool,
}

impl Looker {
    /// What a file is like; nothing if that cannot be said now, and no state if it cannot be at all.
    pub(crate) fn look(&mut self, file: &Arc<OwnedFd>) -> Option<Option<Stat>> {
        if self.thread.is_none() {
            let (ask, asked) = channel::<Arc<OwnedFd>>();
            let (say, said) = channel();
            let work = move || {
                // Until nobody asks any more.
                while let Ok(file) = asked.recv() {
                    if say.send(fstat(&file).ok()).is_err() {
                        break;
                    }
                }
            };
            let looks = std::thread::Builder::new().name("looks".into()).stack_size(64 << 10).spawn(work);
            self.thread = looks.is_ok().then_some((ask, said));
        }
        let (ask, said) = self.thread.as_ref()?;
        if self.waits && said.try_recv().is_err() {
            return None;
        }
        self.waits = true;
        ask.send(file.clone()).ok()?;
        match said.recv_timeout(SOON) {
            Ok(stat) => {
                self.waits = false;
                Some(stat)
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                *self = Self::default();
                None
            }
        }
    }
}

impl Direct {
    /// Files that are worth it to be read where the program runs, and that will be found there as they are here: because nobody
    /// changes them.
    pub(crate) fn offer_shared(&mut self, pid: i32, shares: &mut Shares) -> Vec<(i32, FileWord)> {
        let mut words = Vec::new();
        for (fd, watched) in self.watched.iter_mut().filter(|(_, watched)| watched.is_shared) {
            let long = u64::try_from(watched.version.size).is_ok_and(|size| size >= WORTH_OPENING);
            if watched.offered || !long || !watched.was_settled(SystemTime::now()) {
                continue;
            }
            watched.offered = true;
            words.extend(
                watched.shared_place(pid, *fd, shares).map(|place| (*fd, FileWord::Shared(Box::new(place)))),
            );
        }
        words
    }
}

impl crate::direct::Watched {
    fn shared_place(&self, pid: i32, fd: i32, shares: &mut Shares) -> Option<SharedPlace> {
        // What was just looked at is known without asking.
        let file = look(&*self.file, false).ok()??;
        let stat = fstat_known(&file);
        if stat != (self.version.size, self.version.modified, self.version.changed) {
            return None;
        }
        let device = self.device;
        // By a lock its holder sees what others have written, and only here.
        if is_locked(&std::fs::read_to_string("/proc/locks").ok()?, device, file.inode) {
            return None;
        }
        let (root, path) = shares.find(pid, fd, device)?;
        let status = procfs::status(pid).ok()?;
        let who = (status.uid[3], status.gid[3], status.groups);
        let root = ByteBuf::from(root.as_os_str().as_bytes().to_vec());
        Some(SharedPlace { root, path: ByteBuf::from(path), file, who })
    }
}

/// Size and times as they stand in a version.
fn fstat_known(file: &SharedFile) -> (i64, Duration, Duration) {
    let time = |(seconds, nanos): (i64, u32)| Duration::new(u64::try_from(seconds).unwrap_or(0), nanos);
    (i64::try_from(file.size).unwrap_or(i64::MAX), time(file.modified), time(file.changed))
}

/// Whether anybody holds a lock on this file, or waits for one (proc_locks(5)).
fn is_locked(table: &str, device: u64, inode: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    table.lines().any(|line| line.split_ascii_whitespace().any(|word| word == file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_found_by_its_file() {
        let table = "1: POSIX  ADVISORY  WRITE 12 fe:00:1234 0 EOF\n\
                     1: -> FLOCK  ADVISORY  READ 13 00:2f:77 0 EOF\n";
        let device = rustix::fs::makedev;
        assert!(is_locked(table, device(0xfe, 0), 1234) && is_locked(table, device(0, 0x2f), 77));
        assert!(!is_locked(table, device(0xfe, 0), 123) && !is_locked(table, device(0, 0x2e), 77));
    }

    #[test]
    fn what_is_declared_is_found_by_path_and_device() {
        let place = std::env::temp_dir().join(format!("tern-shares-{}", std::process::id()));
        std::fs::create_dir_all(place.join("deep")).unwrap();
        let file = File::create(place.join("deep/a")).unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let device = fstat(&file).unwrap().st_dev;
        let me = std::process::id().cast_signed();
        let found = |declared: &[&str], device| {
            let declared = declared.iter().map(|below| place.join(below)).collect();
            Shares::new(declared).find(me, fd, device)
        };
        let path = |root: &str, below: &str| Some((place.join(root), below.as_bytes().to_vec()));
        assert_eq!(found(&["deep"], device), path("deep", "a"));
        assert_eq!(found(&["", "deep", "other"], device), path("deep", "a"), "the nearest one");
        assert_eq!(found(&["deep"], device + 1), None, "another mount");
        assert_eq!(found(&["dee", "deep/a"], device), None);
        assert_eq!(found(&[], device), None);
        std::fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn files_are_looked_at_and_one_that_says_nothing_waits() {
        let mut looker = Looker::default();
        let file = Arc::new(OwnedFd::from(File::open("/proc/self/exe").unwrap()));
        let size = fstat(&*file).unwrap().st_size;
        assert_eq!(looker.look(&file).flatten().map(|stat| stat.st_size), Some(size));
        // As if the server had not answered.
        let (ask, _asked) = channel();
        let (say, said) = channel();
        looker.thread = Some((ask, said));
        assert!(looker.look(&file).is_none());
        assert!(looker.look(&file).is_none(), "it is not asked twice");
        say.send(fstat(&*file).ok()).unwrap();
        assert!(looker.look(&file).is_none() && looker.waits, "that was the answer of long ago");
    }
}
