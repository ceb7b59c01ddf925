//! The callers of FUSE requests: their groups, and the nodes that ternd associates with their
//! processes.

pub(crate) mod create_intent;
pub(crate) mod magic;

use crate::lock;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_control::procfs::read_text;
use tern_control::{Reply, Request, SymbolicNode, stream};
use tern_ids::{Credentials, HomePid, NodeId};

/// How long a process's groups are cached. Only privileged processes change them, and mostly
/// together with the user, which is part of the key.
const GROUPS_TTL: Duration = Duration::from_secs(1);

/// Number of callers cached.
const MAX_CACHED_CALLERS: usize = 1024;

/// Timeout for ternd.
const TERND_TIMEOUT: Duration = Duration::from_secs(2);

/// The caller as FUSE reports it: tid, user, group.
type CallerKey = (u32, u32, u32);

/// Cached groups of callers.
#[derive(Debug, Default)]
pub(crate) struct CallerCache {
    groups: Mutex<HashMap<CallerKey, (Instant, Vec<u32>)>>,
}

impl CallerCache {
    /// The caller with its supplementary groups, which FUSE does not report.
    pub(crate) fn caller(&self, pid: u32, uid: u32, gid: u32) -> Credentials {
        let mut all = lock(&self.groups);
        let key = (pid, uid, gid);
        if let Some((since, groups)) = all.get(&key)
            && since.elapsed() < GROUPS_TTL
        {
            return Credentials { uid, gid, groups: groups.clone() };
        }
        let groups = status_field(pid, "Groups:").unwrap_or_default();
        let groups: Vec<u32> = groups.split_whitespace().filter_map(|group| group.parse().ok()).collect();
        if all.len() >= MAX_CACHED_CALLERS {
            all.clear();
        }
        all.insert(key, (Instant::now(), groups.clone()));
        Credentials { uid, gid, groups }
    }
}

/// A field of /proc/PID/status.
fn status_field(pid: u32, field: &str) -> Option<String> {
    let status = read_text(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| Some(line.strip_prefix(field)?.trim().to_owned()))
}

/// The process of a thread; none if the thread has exited, or has no number in our pid namespace.
pub(crate) fn process_of(tid: u32) -> Option<HomePid> {
    status_field(tid, "Tgid:").and_then(|pid| pid.parse().ok()).map(HomePid)
}

pub(crate) fn ask_ternd(run_dir: &Path, request: &Request) -> std::io::Result<Reply> {
    let mut socket = UnixStream::connect(run_dir.join("control"))?;
    socket.set_read_timeout(Some(TERND_TIMEOUT))?;
    socket.set_write_timeout(Some(TERND_TIMEOUT))?;
    stream::write(&mut socket, request)?;
    stream::read(&mut socket)
}

/// The node that `of` (such as `selected`) means for the process of this thread, from ternd.
///
/// # Errors
/// `EIO` if ternd does not respond: another node must not be taken for the intended one. For
/// [`SymbolicNode::Here`] this node is assumed then.
pub(crate) fn node_meant_by(
    run_dir: &Path,
    local: NodeId,
    tid: u32,
    of: SymbolicNode,
) -> Result<NodeId, Errno> {
    let Some(pid) = process_of(tid) else { return Ok(local) };
    match ask_ternd(run_dir, &Request::ResolveNode { pid, name: of }) {
        Ok(Reply::ResolvedNode(node)) => Ok(node.unwrap_or(local)),
        _ if of == SymbolicNode::Here => Ok(local),
        _ => Err(Errno::IO),
    }
}

/// Reports to ternd that `of` means this node for the process of this thread from now on.
pub(crate) fn report_choice(run_dir: &Path, tid: u32, of: SymbolicNode, node: NodeId) {
    let Some(pid) = process_of(tid) else { return };
    match ask_ternd(run_dir, &Request::SetSymbolicNode { pid, name: of, node: Some(node) }) {
        Ok(Reply::Done) => {}
        outcome => tracing::warn!(%pid, %node, ?outcome, "ternd has not recorded where a file was created"),
    }
}

/// Whether a thread has the same root directory as this process. False if it cannot be determined.
pub(crate) fn has_same_root(tid: u32) -> bool {
    // AT_STATX_DONT_SYNC avoids a request to the root's file system, which may be this tree.
    let flags = AtFlags::from_bits_retain(libc::AT_STATX_DONT_SYNC.cast_unsigned());
    let root_of = |process: &str| {
        let root = statx(CWD, format!("/proc/{process}/root"), flags, StatxFlags::INO)?;
        Ok::<_, Errno>((root.stx_dev_major, root.stx_dev_minor, root.stx_ino))
    };
    root_of("self").is_ok_and(|own| root_of(&tid.to_string()) == Ok(own))
}

/// Whether this thread is requesting a lock of an open file description (`F_OFD_SETLK`) rather than
/// of its process. FUSE reports neither this nor the end of such a lock. False if it cannot be
/// determined.
pub(crate) fn is_ofd_lock(tid: u32) -> bool {
    let mut pause = Duration::from_micros(20);
    while pause <= GROUPS_TTL {
        let Ok(call) = fs::read_to_string(format!("/proc/{tid}/syscall")) else { return false };
        if !call.starts_with("running") {
            return is_ofd_command(&call);
        }
        // The thread has sent the request and is about to block.
        std::thread::sleep(pause);
        pause *= 2;
    }
    false
}

fn is_ofd_command(call: &str) -> bool {
    let command = call.split_whitespace().nth(2).map(|word| word.trim_start_matches("0x"));
    let command = command.and_then(|word| i32::from_str_radix(word, 16).ok());
    command
        .is_some_and(|command| [libc::F_OFD_SETLK, libc::F_OFD_SETLKW, libc::F_OFD_GETLK].contains(&command))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_has_the_groups_of_its_process() {
        let own: Vec<u32> =
            rustix::process::getgroups().unwrap().iter().map(|group| group.as_raw()).collect();
        let caller = CallerCache::default().caller(std::process::id(), 1, 2);
        assert_eq!((caller.uid, caller.gid, caller.groups), (1, 2, own));
    }

    #[test]
    fn thread_of_this_process_has_the_same_root() {
        assert!(has_same_root(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()));
        assert!(!has_same_root(0), "a thread that is not visible in this pid namespace");
        assert!(!has_same_root(u32::MAX));
    }

    #[test]
    fn ofd_lock_is_recognised_by_the_system_call() {
        for (call, is_ofd) in [
            ("72 0x3 0x6 0x7ffd 0x0 0x0 0x0 0x7ffd 0x7f01", false),
            ("72 0x3 0x25 0x7ffd 0x0 0x0 0x0 0x7ffd 0x7f01", true),
            ("221 0x3 0x26 0x7ffd 0x0 0x0 0x0 0x7ffd 0x7f01", true),
            ("-1 0x7ffd 0x7f01", false),
            ("", false),
        ] {
            assert_eq!(is_ofd_command(call), is_ofd, "{call}");
        }
        assert!(!is_ofd_lock(u32::MAX));
    }
}
