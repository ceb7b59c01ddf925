//! Records of the node on which a program was executed, for processes that were away when they
//! called execve. `/mfs/lastexec` reads them.
//!
//! A home shim writes each record to a file, since the shim may exit before the record is read. A
//! process that is at home again can execute another program without a shim that observes it. So
//! the key of a record is not the pid but the addresses of the program, which execve randomises and
//! fork copies. A program without a record was executed at home.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use tern_ids::NodeId;

/// The maximum number of records; the newest are kept.
const MAX_RECORDS: usize = 4096;

/// Indices of fields in `/proc/PID/stat`, counted from the first after the name: the start and end
/// of code, the start of the stack, the start and end of data, and the start of the heap.
const ADDRESS_FIELDS: [usize; 6] = [23, 24, 25, 42, 43, 44];

fn records_dir(run_dir: &Path) -> PathBuf {
    run_dir.join("executed")
}

/// The key of a process' program: a hash of its addresses. `None` if the process is gone, or hides
/// its addresses.
fn program_key(pid: i32) -> Option<String> {
    program_key_in(&crate::procfs::read_text(format!("/proc/{pid}/stat")).ok()?)
}

fn program_key_in(stat: &str) -> Option<String> {
    // The name in parentheses may contain anything, parentheses too.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let mut hasher = DefaultHasher::new();
    let mut is_visible = false;
    for at in ADDRESS_FIELDS {
        let address: u64 = fields.get(at)?.parse().ok()?;
        // The kernel shows hidden addresses as 0 or 1.
        is_visible |= address > 1;
        address.hash(&mut hasher);
    }
    is_visible.then(|| format!("{:016x}", hasher.finish()))
}

/// Records that a process has just executed its program on `node`.
pub fn record(run_dir: &Path, pid: i32, node: NodeId) {
    let Some(key) = program_key(pid) else { return };
    let dir = records_dir(run_dir);
    let written = fs::create_dir_all(&dir).and_then(|()| fs::write(dir.join(key), node.to_string()));
    // Without a record the program counts as executed at home.
    if written.is_ok() {
        remove_oldest(&dir);
    }
}

/// The node where a process' program was executed, if recorded.
#[must_use]
pub fn node_of(run_dir: &Path, pid: i32) -> Option<NodeId> {
    let text = fs::read_to_string(records_dir(run_dir).join(program_key(pid)?)).ok()?;
    text.trim().parse().ok().filter(|node| *node > 0).map(NodeId)
}

/// Removes the older half of the records when there are too many.
fn remove_oldest(dir: &Path) {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = files.map(|file| file.path()).collect();
    if files.len() <= MAX_RECORDS {
        return;
    }
    files.sort_by_cached_key(|path| fs::metadata(path).and_then(|file| file.modified()).ok());
    for file in &files[..files.len() / 2] {
        let _gone_already = fs::remove_file(file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    struct Scratch(PathBuf);

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _gone = fs::remove_dir_all(&self.0);
        }
    }

    struct Sleeper(Child);

    impl Sleeper {
        fn new() -> Self {
            Self(Command::new("sleep").arg("100").spawn().unwrap())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ended = self.0.kill();
            let _status = self.0.wait();
        }
    }

    #[test]
    fn record_is_found_for_that_program_only() {
        let run_dir = Scratch(std::env::temp_dir().join(format!("tern-executed-{}", std::process::id())));
        let own = std::process::id() as i32;
        assert_eq!(node_of(&run_dir.0, own), None);
        record(&run_dir.0, own, NodeId(2));
        assert_eq!(node_of(&run_dir.0, own), Some(NodeId(2)));
        // The child had these addresses too at its fork, but has executed a program since.
        let child = Sleeper::new();
        assert_eq!(node_of(&run_dir.0, child.0.id() as i32), None);
        record(&run_dir.0, own, NodeId(3));
        assert_eq!(node_of(&run_dir.0, own), Some(NodeId(3)));
        assert_eq!(node_of(&run_dir.0, 0), None);
    }

    #[test]
    fn process_with_hidden_addresses_has_no_key() {
        let stat = |value: &str| format!("7 (a) b) {}", vec![value; 49].join(" "));
        assert!(program_key_in(&stat("4711")).is_some());
        assert_eq!(program_key_in(&stat("0")), None);
        assert_eq!(program_key_in(&stat("1")), None);
        assert_eq!(program_key_in("7 (a) 1 2"), None);
    }
}
