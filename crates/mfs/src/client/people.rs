//! Who asks the kernel here, and where his process runs.

use crate::lock;
use crate::message::Caller;
use std::collections::HashMap;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_control::{Reply, Request, stream};
use tern_ids::NodeId;

/// How long a process' groups are believed. They are for root to change, and mostly with the user, who is part of the key.
const FRESH: Duration = Duration::from_secs(1);

/// So many are kept.
const MOST: usize = 1024;

/// How long ternd may take to say where a process is.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a kernel's request says of who made it: process, user, group.
type Asker = (u32, u32, u32);

/// What is known of those who ask.
#[derive(Debug, Default)]
pub(crate) struct People {
    groups: Mutex<HashMap<Asker, (Instant, Vec<u32>)>>,
}

impl People {
    /// The caller with all his groups; the kernel tells but the first.
    pub(crate) fn caller(&self, pid: u32, uid: u32, gid: u32) -> Caller {
        let mut all = lock(&self.groups);
        let asker = (pid, uid, gid);
        if let Some((since, groups)) = all.get(&asker)
            && since.elapsed() < FRESH
        {
            return Caller { uid, gid, groups: groups.clone() };
        }
        let groups = status(pid, "Groups:").unwrap_or_default();
        let groups: Vec<u32> = groups.split_whitespace().filter_map(|group| group.parse().ok()).collect();
        if all.len() >= MOST {
            all.clear();
        }
        all.insert(asker, (Instant::now(), groups.clone()));
        Caller { uid, gid, groups }
    }
}

/// One line of a process' status.
fn status(pid: u32, field: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| Some(line.strip_prefix(field)?.trim().to_owned()))
}

/// Whether a signal waits for a thread that it does not block: then what it waits for is over.
pub(crate) fn is_interrupted(tid: u32) -> bool {
    let set = |field| u64::from_str_radix(&status(tid, field)?, 16).ok();
    let (Some(own), Some(shared), Some(blocked)) = (set("SigPnd:"), set("ShdPnd:"), set("SigBlk:")) else {
        return true;
    };
    (own | shared) & !blocked != 0
}

/// How a thread has asked for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// fcntl, for the process.
    Process,
    /// fcntl, for the open file (`F_OFD_SETLK`).
    OpenFile,
    /// flock.
    Flock,
}

/// Whether we can tell how others have asked: a plain user may not look at what they do.
pub(crate) fn can_tell() -> bool {
    rustix::process::geteuid().is_root()
}

/// How this thread, which waits in its call, has asked for a lock; none if it waits no more. The kernel says so with its
/// request, and fuser does not pass it on.
pub(crate) fn lock_call(tid: u32) -> Option<Manner> {
    let mut nap = Duration::from_micros(20);
    loop {
        let call = fs::read_to_string(format!("/proc/{tid}/syscall")).ok()?;
        if !call.starts_with("running") {
            return manner(&call);
        }
        // It has sent the request, and is about to sleep.
        if nap > FRESH {
            return None;
        }
        std::thread::sleep(nap);
        nap *= 2;
    }
}

fn manner(call: &str) -> Option<Manner> {
    // The calls of 32-bit programs have numbers that are none of other calls for locks.
    const FLOCK: [i64; 3] = [libc::SYS_flock, libc::SYS_flock | 0x4000_0000, 143];
    let mut words = call.split_whitespace();
    let number: i64 = words.next()?.parse().ok().filter(|number| *number >= 0)?;
    let command = i32::from_str_radix(words.nth(1)?.trim_start_matches("0x"), 16).unwrap_or(0);
    Some(match command {
        _ if FLOCK.contains(&number) => Manner::Flock,
        libc::F_OFD_SETLK | libc::F_OFD_SETLKW | libc::F_OFD_GETLK => Manner::OpenFile,
        _ => Manner::Process,
    })
}

/// The node where the process of this thread runs, as ternd knows; this one if it does not know better.
pub(crate) fn runs_at(run_dir: &Path, me: NodeId, tid: u32) -> NodeId {
    let Some(pid) = status(tid, "Tgid:").and_then(|pid| pid.parse::<i32>().ok()) else { return me };
    let ask = || {
        let mut socket = UnixStream::connect(run_dir.join("control"))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        stream::write(&mut socket, &Request::Processes)?;
        stream::read::<Reply>(&mut socket)
    };
    let Ok(Reply::Processes(rows)) = ask() else { return me };
    let own = rows.iter().find(|row| row.pid.0 == pid && row.from.is_none());
    own.and_then(|row| row.r#where).unwrap_or(me)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_the_groups_that_it_has() {
        let own: Vec<u32> =
            rustix::process::getgroups().unwrap().iter().map(|group| group.as_raw()).collect();
        let caller = People::default().caller(std::process::id(), 1, 2);
        assert_eq!((caller.uid, caller.gid, caller.groups), (1, 2, own));
    }

    #[test]
    fn a_lock_is_asked_for_by_a_call() {
        for (call, asked) in [
            ("73 0x3 0x2 0x0 0x0 0x0 0x0 0x7ffd 0x7f01", Some(Manner::Flock)),
            ("143 0x3 0x6 0x0 0x0 0x0 0x0 0xffd 0xf01", Some(Manner::Flock)),
            ("72 0x3 0x6 0x7ffd 0x0 0x0 0x0 0x7ffd 0x7f01", Some(Manner::Process)),
            ("72 0x3 0x25 0x7ffd 0x0 0x0 0x0 0x7ffd 0x7f01", Some(Manner::OpenFile)),
            ("221 0x3 0x26 0x7ffd 0x0 0x0 0x0 0x7ffd 0x7f01", Some(Manner::OpenFile)),
            ("-1 0x7ffd 0x7f01", None),
            ("", None),
        ] {
            assert_eq!(manner(call), asked, "{call}");
        }
        assert_eq!(lock_call(u32::MAX), None);
    }

    #[test]
    fn who_is_gone_waits_for_nothing() {
        assert!(is_interrupted(u32::MAX));
        assert!(!is_interrupted(std::process::id()));
    }
}
