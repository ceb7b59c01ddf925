//! Who asks the kernel here, and where his process runs.

use crate::lock;
use crate::message::Caller;
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_control::{Place, Reply, Request, stream};
use tern_ids::{HomePid, NodeId};

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

/// The process of a thread; none if it is in no pid namespace of ours.
pub(crate) fn process(tid: u32) -> Option<HomePid> {
    status(tid, "Tgid:").and_then(|pid| pid.parse().ok()).map(HomePid)
}

pub(crate) fn ask(run_dir: &Path, request: &Request) -> std::io::Result<Reply> {
    let mut socket = UnixStream::connect(run_dir.join("control"))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    stream::write(&mut socket, request)?;
    stream::read(&mut socket)
}

/// The node that the process of this thread means by a name, as ternd knows.
///
/// # Errors
/// `EIO` if it does not answer: another node must not be taken for the one that was meant. Where a process runs it is this
/// one's then.
pub(crate) fn means(run_dir: &Path, me: NodeId, tid: u32, of: Place) -> Result<NodeId, Errno> {
    let Some(pid) = process(tid) else { return Ok(me) };
    match ask(run_dir, &Request::Place { pid, of }) {
        Ok(Reply::Place(node)) => Ok(node.unwrap_or(me)),
        _ if of == Place::Here => Ok(me),
        _ => Err(Errno::IO),
    }
}

/// Tells ternd that the process of this thread means this node from now on.
pub(crate) fn chosen(run_dir: &Path, tid: u32, of: Place, node: NodeId) {
    let Some(pid) = process(tid) else { return };
    match ask(run_dir, &Request::Choose { pid, of, node: Some(node) }) {
        Ok(Reply::Done) => {}
        outcome => tracing::warn!(%pid, %node, ?outcome, "ternd does not note where a file was made"),
    }
}

/// Whether this thread, which waits in its call, has asked for a lock of its open file (`F_OFD_SETLK`) and not of its process. The kernel
/// does not say, nor when such a lock is to go; what cannot be seen from here is taken for a process's.
pub(crate) fn is_of_open_file(tid: u32) -> bool {
    let mut nap = Duration::from_micros(20);
    while nap <= FRESH {
        let Ok(call) = fs::read_to_string(format!("/proc/{tid}/syscall")) else { return false };
        if !call.starts_with("running") {
            return names_open_file(&call);
        }
        // It has sent the request, and is about to sleep.
        std::thread::sleep(nap);
        nap *= 2;
    }
    false
}

fn names_open_file(call: &str) -> bool {
    let command = call.split_whitespace().nth(2).map(|word| word.trim_start_matches("0x"));
    let command = command.and_then(|word| i32::from_str_radix(word, 16).ok());
    command
        .is_some_and(|command| [libc::F_OFD_SETLK, libc::F_OFD_SETLKW, libc::F_OFD_GETLK].contains(&command))
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
    fn a_lock_of_an_open_file_is_known_by_its_call() {
        for (call, is_it) in [
            ("72 0x3 0x6 0x7ffd 0x0 0x0 0x0 0x7ffd 0x7f01", false),
            ("72 0x3 0x25 0x7ffd 0x0 0x0 0x0 0x7ffd 0x7f01", true),
            ("221 0x3 0x26 0x7ffd 0x0 0x0 0x0 0x7ffd 0x7f01", true),
            ("-1 0x7ffd 0x7f01", false),
            ("", false),
        ] {
            assert_eq!(names_open_file(call), is_it, "{call}");
        }
        assert!(!is_of_open_file(u32::MAX));
    }
}
