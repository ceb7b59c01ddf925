//! Where programs were executed that run, or ran, away: what `/mfs/lastexec` goes by.
//!
//! A home shim notes it, and may end before anybody asks. A process that is at home again can execute a program without
//! anybody's seeing it; so what is noted is not the process but its program's addresses, which an exec draws anew and a fork
//! copies. A program whose addresses nobody has noted was executed at home.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use tern_ids::NodeId;

/// So many are kept, the newest.
const MOST: usize = 4096;

/// Fields of `/proc/PID/stat` behind the name: where code, data, heap and stack begin or end.
const ADDRESSES: [usize; 6] = [23, 24, 25, 42, 43, 44];

fn directory(run_dir: &Path) -> PathBuf {
    run_dir.join("executed")
}

/// The program of a process, as no other one has been executed; nothing if it is gone, or shows no addresses.
fn program(pid: i32) -> Option<String> {
    program_in(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn program_in(stat: &str) -> Option<String> {
    // The name in parentheses may hold anything, parentheses too.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let mut hasher = DefaultHasher::new();
    let mut shows = false;
    for at in ADDRESSES {
        let address: u64 = fields.get(at)?.parse().ok()?;
        // What may not be seen is 0 or 1.
        shows |= address > 1;
        address.hash(&mut hasher);
    }
    shows.then(|| format!("{:016x}", hasher.finish()))
}

/// Notes that the program which a process has just begun was executed there.
pub fn note(run_dir: &Path, pid: i32, node: NodeId) {
    let Some(program) = program(pid) else { return };
    let directory = directory(run_dir);
    let noted =
        fs::create_dir_all(&directory).and_then(|()| fs::write(directory.join(program), node.to_string()));
    // Without it the program is taken for one that was executed at home.
    if noted.is_ok() {
        tidy(&directory);
    }
}

/// Where the program that a process runs was executed, if that was noted.
#[must_use]
pub fn node_of(run_dir: &Path, pid: i32) -> Option<NodeId> {
    let noted = fs::read_to_string(directory(run_dir).join(program(pid)?)).ok()?;
    noted.trim().parse().ok().filter(|node| *node > 0).map(NodeId)
}

/// Removes the older half when there are too many.
fn tidy(directory: &Path) {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = files.map(|file| file.path()).collect();
    if files.len() <= MOST {
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
    fn a_program_is_known_and_another_one_is_not() {
        let run_dir = Scratch(std::env::temp_dir().join(format!("tern-executed-{}", std::process::id())));
        let own = std::process::id() as i32;
        assert_eq!(node_of(&run_dir.0, own), None);
        note(&run_dir.0, own, NodeId(2));
        assert_eq!(node_of(&run_dir.0, own), Some(NodeId(2)));
        // Executed since, by a child that has had these addresses as well.
        let child = Sleeper::new();
        assert_eq!(node_of(&run_dir.0, child.0.id() as i32), None);
        note(&run_dir.0, own, NodeId(3));
        assert_eq!(node_of(&run_dir.0, own), Some(NodeId(3)));
        assert_eq!(node_of(&run_dir.0, 0), None);
    }

    #[test]
    fn what_shows_nothing_is_no_program() {
        let stat = |value: &str| format!("7 (a) b) {}", vec![value; 49].join(" "));
        assert!(program_in(&stat("4711")).is_some());
        assert_eq!(program_in(&stat("0")), None);
        assert_eq!(program_in(&stat("1")), None);
        assert_eq!(program_in("7 (a) 1 2"), None);
    }
}
