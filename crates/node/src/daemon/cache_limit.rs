//! Limits the size of the node's cache: the content of files that guests map, which guest shims
//! store, and the hashes of files of this node, which home shims store.
//!
//! The least recently used files are removed. A guest that has a removed file open keeps it, and its
//! blocks are freed when the last such guest has closed it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The folders of the cache, and the space in bytes that each may take on disk.
const LIMITS: [(&str, u64); 2] = [("content", 2 << 30), ("hashes", 64 << 20)];

/// The interval between checks. Between two checks the cache may exceed its limit.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// The name of incomplete content begins with a dot. At this age it counts as left behind by a killed
/// shim.
const STALE_AGE: Duration = Duration::from_secs(3600);

/// Starts a thread that keeps the cache within its limits.
///
/// # Errors
/// If no thread can be started.
pub(super) fn start(cache_dir: &Path) -> std::io::Result<()> {
    let cache_dir = cache_dir.to_owned();
    let run = move || {
        loop {
            for (folder, max_bytes) in LIMITS {
                evict(&cache_dir.join(folder), max_bytes, SystemTime::now());
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
    };
    std::thread::Builder::new().name("cache".into()).spawn(run).map(drop)
}

/// Removes incomplete files that are old at this time, and then the files that were used least
/// recently, until the rest takes at most this much space.
fn evict(folder: &Path, max_bytes: u64, now: SystemTime) {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(meta) = entry.metadata() else { continue };
        let used = meta.modified().unwrap_or(now);
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            if now.duration_since(used).is_ok_and(|age| age > STALE_AGE) {
                remove(&entry.path());
            }
        } else {
            files.push((used, meta.blocks() * 512, entry.path()));
        }
    }
    let mut total: u64 = files.iter().map(|(_, size, _)| size).sum();
    files.sort_unstable();
    for (_, size, path) in files {
        if total <= max_bytes {
            return;
        }
        remove(&path);
        total -= size;
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::debug!(path = %path.display(), %error, "cannot remove a file from the cache");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::scratch::Scratch;

    #[test]
    fn least_recently_used_files_and_stale_parts_are_removed() {
        let dir = Scratch::new("cache");
        let now = SystemTime::now();
        let add = |name: &str, age: u64| {
            let path = dir.0.join(name);
            fs::write(&path, [1; 8192]).unwrap();
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.set_modified(now - Duration::from_secs(age)).unwrap();
        };
        for (name, age) in [("oldest", 300), ("older", 200), ("newest", 100), (".old", 7200), (".new", 10)] {
            add(name, age);
        }
        let left = || {
            let names = fs::read_dir(&dir.0).unwrap().map(|entry| entry.unwrap().file_name());
            let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
            names.sort();
            names
        };
        evict(&dir.0, u64::MAX, now);
        assert_eq!(left(), [".new", "newest", "older", "oldest"]);
        evict(&dir.0, 2 * 8192, now);
        assert_eq!(left(), [".new", "newest", "older"]);
        evict(&dir.0, 0, now);
        assert_eq!(left(), [".new"]);
        evict(&dir.0.join("none"), 0, now);
    }
}
