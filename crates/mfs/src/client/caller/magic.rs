//! `/mfs/magic`: files are created on the node where the calling process runs, and found on the
//! node where it last created one.
//!
//! FUSE_READLINK does not tell why a path is resolved. But the caller is blocked in its system
//! call, and `/proc/TID/syscall` shows its number and arguments. The next request of the same call
//! tells whether the file was created.

use crate::client::caller::{node_meant_by, report_choice};
use crate::lock;
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;
use tern_control::SymbolicNode;
use tern_ids::NodeId;

/// Creates in progress at a time. When there are more, all are dropped, and their nodes not
/// recorded.
const MAX_PENDING_CREATES: usize = 4096;

/// How many times to poll a call whose thread has not blocked yet, and the interval.
const MAX_POLLS: u32 = 100;
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Creates in progress through the `magic` link.
#[derive(Debug, Default)]
pub(crate) struct MagicLink {
    /// By thread: its system call, and the node on which the file would be created.
    pending: Mutex<HashMap<u32, (String, NodeId)>>,
}

impl MagicLink {
    /// The node that the link refers to for this thread.
    ///
    /// If this node's own files are not in the tree (`own_files_are_native`), no request tells
    /// whether a file was created here. So an attempt counts as a success.
    ///
    /// # Errors
    /// `EIO` if ternd does not respond.
    pub(crate) fn target(
        &self,
        run_dir: &Path,
        local: NodeId,
        tid: u32,
        own_files_are_native: bool,
    ) -> Result<NodeId, Errno> {
        let Some(call) = creating_call(tid) else {
            return node_meant_by(run_dir, local, tid, SymbolicNode::Magic);
        };
        let node = node_meant_by(run_dir, local, tid, SymbolicNode::Here)?;
        if node == local && own_files_are_native {
            report_choice(run_dir, tid, SymbolicNode::Magic, node);
            return Ok(node);
        }
        let mut pending = lock(&self.pending);
        if pending.len() >= MAX_PENDING_CREATES {
            pending.clear();
        }
        pending.insert(tid, (call, node));
        Ok(node)
    }

    /// A thread has created or opened a file on this node, and waits for the reply. ternd records
    /// the node before the reply is sent, so that the thread's next lookup through the link finds
    /// it.
    pub(crate) fn note_created(&self, run_dir: &Path, tid: u32, node: NodeId) {
        let Some((call, expected)) = lock(&self.pending).remove(&tid) else { return };
        if expected == node && creating_call(tid).is_some_and(|now| now == call) {
            report_choice(run_dir, tid, SymbolicNode::Magic, node);
        }
    }
}

/// The system call in which a thread is blocked, if that may create a file.
fn creating_call(tid: u32) -> Option<String> {
    let path = format!("/proc/{tid}/syscall");
    for _ in 0..MAX_POLLS {
        let call = fs::read_to_string(&path).ok()?;
        if call.trim() != "running" {
            return may_create(&call, |at| read_word(tid, at)).then_some(call);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    None
}

/// Whether a system call, as the kernel shows it, is creat(2), or an open with `O_CREAT`.
/// `read_word` reads the caller's memory.
fn may_create(call: &str, read_word: impl Fn(u64) -> Option<u64>) -> bool {
    let mut words = call.split_whitespace();
    let Some(number) = words.next().and_then(|number| number.parse::<i64>().ok()) else { return false };
    let arguments: Vec<u64> =
        words.map_while(|argument| u64::from_str_radix(argument.strip_prefix("0x")?, 16).ok()).collect();
    let flags = match number {
        libc::SYS_creat => return true,
        libc::SYS_open => arguments.get(1).copied(),
        libc::SYS_openat => arguments.get(2).copied(),
        // The flags are the first field of struct open_how.
        libc::SYS_openat2 => arguments.get(2).and_then(|how| read_word(*how)),
        _ => None,
    };
    flags.is_some_and(|flags| flags & u64::from(libc::O_CREAT.cast_unsigned()) != 0)
}

fn read_word(tid: u32, at: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    File::open(format!("/proc/{tid}/mem")).ok()?.read_exact_at(&mut bytes, at).ok()?;
    Some(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn creating_calls_are_recognised() {
        let call =
            |words: &str| may_create(&format!("{words} 0x7ffe0 0x7f00"), |at| (at == 0x10).then_some(0x41));
        assert!(call("85 0x7f01 0x1b6 0x0 0x0 0x0 0x0"), "creat");
        assert!(call("2 0x7f01 0x241 0x1b6 0x0 0x0 0x0"), "open");
        assert!(call("257 0xffffff9c 0x7f01 0x241 0x1b6 0x0 0x0"), "openat");
        assert!(call("437 0xffffff9c 0x7f01 0x10 0x18 0x0 0x0"), "openat2");
        assert!(!call("437 0xffffff9c 0x7f01 0x11 0x18 0x0 0x0"), "openat2 with words that cannot be read");
        assert!(!call("257 0xffffff9c 0x7f01 0x1 0x0 0x0 0x0"), "openat to write");
        assert!(!call("87 0x7f41 0x241 0x241 0x0 0x0 0x0"), "unlink");
        assert!(!may_create("-1 0x7ffe0 0x7f00", |_| None));
        assert!(
            !may_create("running", |_| None) && !may_create("", |_| None) && !may_create("257", |_| None)
        );
    }

    #[test]
    fn an_exited_thread_creates_nothing() {
        assert_eq!(creating_call(u32::MAX), None);
    }
}
