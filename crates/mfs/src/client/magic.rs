//! `/mfs/magic`: files are made on the node where their maker runs, and found on the one where he has made the last.
//!
//! What a path is walked for, FUSE does not say when it asks where the name leads. But who asks waits for the answer inside his
//! system call, and that and its words the kernel shows (`/proc/TID/syscall`). Whether the file was made is known by the ask
//! that comes next of the same call.

use super::people::{chosen, means};
use crate::lock;
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;
use tern_control::Place;
use tern_ids::NodeId;

/// So many are under way at a time; of what is beyond that it is not noted where it was made.
const MOST: usize = 4096;

/// How often we look for a call whose thread is just about to wait, and how long it has between.
const LOOKS: u32 = 100;
const BETWEEN: Duration = Duration::from_micros(50);

/// Who makes something through the name just now.
#[derive(Debug, Default)]
pub(crate) struct Magic {
    /// By thread: its call, and the node where it would make the file.
    making: Mutex<HashMap<u32, (String, NodeId)>>,
}

impl Magic {
    /// Where the name leads for this thread.
    ///
    /// # Errors
    /// `EIO` if ternd does not say.
    pub(crate) fn target(&self, run_dir: &Path, me: NodeId, tid: u32) -> Result<NodeId, Errno> {
        let Some(call) = creating(tid) else { return means(run_dir, me, tid, Place::Magic) };
        let node = means(run_dir, me, tid, Place::Here)?;
        let mut making = lock(&self.making);
        if making.len() >= MOST {
            making.clear();
        }
        making.insert(tid, (call, node));
        Ok(node)
    }

    /// A thread has made or opened a file on this node; it still waits to be told so. What comes through the name later must
    /// find it, so ternd knows before the thread does.
    pub(crate) fn made(&self, run_dir: &Path, tid: u32, node: NodeId) {
        let Some((call, there)) = lock(&self.making).remove(&tid) else { return };
        if there == node && creating(tid).is_some_and(|now| now == call) {
            chosen(run_dir, tid, Place::Magic, node);
        }
    }
}

/// The call in which a thread waits, if that makes the file if need be.
fn creating(tid: u32) -> Option<String> {
    let path = format!("/proc/{tid}/syscall");
    for _ in 0..LOOKS {
        let call = fs::read_to_string(&path).ok()?;
        if call.trim() != "running" {
            return makes(&call, |at| word(tid, at)).then_some(call);
        }
        std::thread::sleep(BETWEEN);
    }
    None
}

/// Whether a call, as the kernel shows it, is creat, or an open with `O_CREAT`. `word` reads the caller's memory.
fn makes(call: &str, word: impl Fn(u64) -> Option<u64>) -> bool {
    let mut words = call.split_whitespace();
    let Some(number) = words.next().and_then(|number| number.parse::<i64>().ok()) else { return false };
    let arguments: Vec<u64> =
        words.map_while(|argument| u64::from_str_radix(argument.strip_prefix("0x")?, 16).ok()).collect();
    let flags = match number {
        libc::SYS_creat => return true,
        libc::SYS_open => arguments.get(1).copied(),
        libc::SYS_openat => arguments.get(2).copied(),
        // They are the first of what is there.
        libc::SYS_openat2 => arguments.get(2).and_then(|how| word(*how)),
        _ => None,
    };
    flags.is_some_and(|flags| flags & u64::from(libc::O_CREAT.cast_unsigned()) != 0)
}

fn word(tid: u32, at: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    File::open(format!("/proc/{tid}/mem")).ok()?.read_exact_at(&mut bytes, at).ok()?;
    Some(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_files_is_told_from_what_does_not() {
        let call = |words: &str| makes(&format!("{words} 0x7ffe0 0x7f00"), |at| (at == 0x10).then_some(0x41));
        assert!(call("85 0x7f01 0x1b6 0x0 0x0 0x0 0x0"), "creat");
        assert!(call("2 0x7f01 0x241 0x1b6 0x0 0x0 0x0"), "open");
        assert!(call("257 0xffffff9c 0x7f01 0x241 0x1b6 0x0 0x0"), "openat");
        assert!(call("437 0xffffff9c 0x7f01 0x10 0x18 0x0 0x0"), "openat2");
        assert!(!call("437 0xffffff9c 0x7f01 0x11 0x18 0x0 0x0"), "openat2 with words that cannot be read");
        assert!(!call("257 0xffffff9c 0x7f01 0x1 0x0 0x0 0x0"), "openat to write");
        assert!(!call("87 0x7f41 0x241 0x241 0x0 0x0 0x0"), "unlink");
        assert!(!makes("-1 0x7ffe0 0x7f00", |_| None));
        assert!(!makes("running", |_| None) && !makes("", |_| None) && !makes("257", |_| None));
    }

    #[test]
    fn who_is_gone_makes_nothing() {
        assert_eq!(creating(u32::MAX), None);
    }
}
