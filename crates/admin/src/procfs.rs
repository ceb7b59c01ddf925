//! Reads `/proc` for the processes of this node.

use rustix::io::Errno;
use std::fs;
use std::os::unix::fs::MetadataExt;
use tern_control::procfs::read_text;
use tern_control::{ReadError, read_process};
use tern_ids::HomePid;

fn status(tid: i32) -> Option<String> {
    read_text(format!("/proc/{tid}/status")).ok()
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// The process of a thread; `None` if it is gone, or in a pid namespace that is not visible from
/// here.
pub(crate) fn process_of(tid: u32) -> Option<HomePid> {
    let tid = i32::try_from(tid).ok().filter(|tid| *tid > 0)?;
    field(&status(tid)?, "Tgid:")?.parse().ok().map(HomePid)
}

/// Whether this is the pid of a process, and not the tid of one of its other threads.
pub(crate) fn is_process(pid: HomePid) -> bool {
    pid.0 > 0 && process_of(pid.0.cast_unsigned()) == Some(pid)
}

/// The owner of a process' files in `/proc`: its user and group, or root if the process is not
/// dumpable.
pub(crate) fn owner(pid: HomePid) -> Option<(u32, u32)> {
    fs::metadata(format!("/proc/{pid}")).ok().map(|file| (file.uid(), file.gid()))
}

/// Start time of a process; together with the pid it is unique. None if the process is gone.
///
/// # Errors
/// EAGAIN if it cannot be read now, because the process waits in an execve(2).
pub(crate) fn start_time(pid: HomePid) -> Result<Option<u64>, Errno> {
    let read = move || {
        let stat = read_text(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
    };
    match read_process(pid.0, read) {
        Ok(start_time) => Ok(Some(start_time)),
        Err(ReadError::Gone) => Ok(None),
        Err(ReadError::Overdue) => Err(Errno::AGAIN),
    }
}

/// The pids of all processes, in ascending order.
pub(crate) fn all_pids() -> Vec<HomePid> {
    let files = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<i32> = files.filter_map(|file| file.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids.into_iter().map(HomePid).collect()
}

/// Whether a thread has an unblocked signal pending, which must end its wait. True if the thread is
/// gone.
pub(crate) fn is_interrupted(tid: u32) -> bool {
    let Some(status) = i32::try_from(tid).ok().and_then(status) else { return true };
    let mask = |name| u64::from_str_radix(field(&status, name)?, 16).ok();
    let (Some(pending), Some(shared), Some(blocked)) = (mask("SigPnd:"), mask("ShdPnd:"), mask("SigBlk:"))
    else {
        return true;
    };
    (pending | shared) & !blocked != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_not_processes() {
        let own = HomePid(std::process::id() as i32);
        assert!(is_process(own) && all_pids().contains(&own) && start_time(own).unwrap().is_some());
        assert_eq!(owner(own).map(|(uid, _)| uid), Some(rustix::process::geteuid().as_raw()));
        let tid = std::thread::spawn(|| rustix::thread::gettid().as_raw_nonzero().get()).join().unwrap();
        assert!(!is_process(HomePid(tid)) && !is_process(HomePid(0)) && !is_process(HomePid(-1)));
        let inside =
            std::thread::spawn(|| process_of(rustix::thread::gettid().as_raw_nonzero().get() as u32));
        assert_eq!(inside.join().unwrap(), Some(own));
        assert!(is_interrupted(u32::MAX) && !is_interrupted(own.0 as u32));
    }
}
