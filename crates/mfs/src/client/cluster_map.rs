//! Caches the cluster map, which each lookup of a node needs, and reads it again when its file
//! changes.

use crate::lock;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tern_node::map::Map;

/// Detects a replaced or changed file: device, inode number, size and ctime.
type FileStamp = (u64, u64, u64, i64, i64);

/// The map as last read.
#[derive(Debug)]
pub(crate) struct CachedMap {
    path: PathBuf,
    cached: Mutex<Option<(Option<FileStamp>, Arc<Map>)>>,
}

impl CachedMap {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, cached: Mutex::default() }
    }

    /// The current map; empty if it cannot be read.
    pub(crate) fn current(&self) -> Arc<Map> {
        // Taken before the file is read, so that a change in between is detected the next time.
        let metadata = std::fs::metadata(&self.path).ok();
        let stamp = metadata.map(|metadata| {
            (metadata.dev(), metadata.ino(), metadata.size(), metadata.ctime(), metadata.ctime_nsec())
        });
        let mut cached = lock(&self.cached);
        if let Some((was, map)) = &*cached
            && *was == stamp
        {
            return map.clone();
        }
        let map = Arc::new(Map::read(&self.path).unwrap_or_default());
        *cached = Some((stamp, map.clone()));
        map
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::NodeId;

    #[test]
    fn map_is_read_again_when_its_file_is_replaced() {
        let path = std::env::temp_dir().join(format!("tern-mfs-map-{}", std::process::id()));
        let map = CachedMap::new(path.clone());
        assert!(map.current().nodes().is_empty());
        std::fs::write(&path, "1 10.0.0.1 2\n").unwrap();
        let first = map.current();
        assert!(first.contains(NodeId(2)));
        assert!(Arc::ptr_eq(&first, &map.current()));
        // ternd replaces the file in this way.
        std::fs::write(path.with_extension("new"), "1 10.0.0.1 3\n").unwrap();
        std::fs::rename(path.with_extension("new"), &path).unwrap();
        assert!(map.current().contains(NodeId(3)));
        std::fs::remove_file(&path).unwrap();
        assert!(map.current().nodes().is_empty());
    }
}
