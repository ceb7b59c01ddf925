//! The map of the cluster, read once for each time that its file is changed: every look-up of a node asks for it.

use crate::lock;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tern_node::map::Map;

/// By what a file is known to be another one, or changed: device, number, size and time of change.
type Stamp = (u64, u64, u64, i64, i64);

/// The map as it was read last.
#[derive(Debug)]
pub(crate) struct KeptMap {
    path: PathBuf,
    kept: Mutex<Option<(Option<Stamp>, Arc<Map>)>>,
}

impl KeptMap {
    pub(crate) fn at(path: PathBuf) -> Self {
        Self { path, kept: Mutex::default() }
    }

    /// The map as it is now; empty if it cannot be read.
    pub(crate) fn now(&self) -> Arc<Map> {
        // Before it is read: what changes meanwhile is read again the next time.
        let is = std::fs::metadata(&self.path).ok();
        let stamp = is.map(|is| (is.dev(), is.ino(), is.size(), is.ctime(), is.ctime_nsec()));
        let mut kept = lock(&self.kept);
        if let Some((was, map)) = &*kept
            && *was == stamp
        {
            return map.clone();
        }
        let map = Arc::new(Map::read(&self.path).unwrap_or_default());
        *kept = Some((stamp, map.clone()));
        map
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::NodeId;

    #[test]
    fn a_map_is_read_when_its_file_is_another_one() {
        let path = std::env::temp_dir().join(format!("tern-mfs-map-{}", std::process::id()));
        let map = KeptMap::at(path.clone());
        assert!(map.now().nodes().is_empty());
        std::fs::write(&path, "1 10.0.0.1 2\n").unwrap();
        let first = map.now();
        assert!(first.contains(NodeId(2)));
        assert!(Arc::ptr_eq(&first, &map.now()));
        // As ternd writes it.
        std::fs::write(path.with_extension("new"), "1 10.0.0.1 3\n").unwrap();
        std::fs::rename(path.with_extension("new"), &path).unwrap();
        assert!(map.now().contains(NodeId(3)));
        std::fs::remove_file(&path).unwrap();
        assert!(map.now().nodes().is_empty());
    }
}
