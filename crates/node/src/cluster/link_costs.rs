//! The costs of sending to other nodes, as measured by `tune`, stored in a file.

use crate::os::sync::lock;
use crate::os::text_file;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tern_control::{Costs, Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_load::LinkEstimate;

/// Maximum size of the file in bytes: enough for each of the 65,535 nodes that a map may have.
const MAX_FILE_LEN: usize = 16 << 20;

/// The stored costs, in memory and in a file.
#[derive(Debug)]
pub(crate) struct LinkCostStore {
    path: PathBuf,
    by_node: Mutex<BTreeMap<NodeId, Costs>>,
}

impl LinkCostStore {
    /// Loads the costs that an earlier ternd stored.
    pub(crate) fn open(cache_dir: &Path) -> Self {
        let path = cache_dir.join("costs.json");
        let text = text_file::read_bounded(&path, MAX_FILE_LEN).unwrap_or_default();
        let read: Vec<Costs> = serde_json::from_str(&text).unwrap_or_default();
        Self { path, by_node: Mutex::new(read.into_iter().map(|costs| (costs.node, costs)).collect()) }
    }

    /// All stored costs, by node.
    pub(crate) fn all(&self) -> BTreeMap<NodeId, Costs> {
        lock(&self.by_node).clone()
    }

    /// Stores the costs of one node.
    pub(crate) fn store(&self, costs: Costs) -> Result<(), Refusal> {
        let mut by_node = lock(&self.by_node);
        let mut updated = by_node.clone();
        updated.insert(costs.node, costs);
        let list: Vec<_> = updated.values().collect();
        let text = serde_json::to_string(&list).unwrap_or_default();
        text_file::replace(&self.path, &text, 0o644).map_err(|error| {
            let path = self.path.display();
            Refusal::new(RefusalKind::Internal, format!("cannot write {path}: {error}"))
        })?;
        *by_node = updated;
        Ok(())
    }
}

/// The costs that the balancer uses. The throughput is that of the link or that of migrations,
/// whichever is lower: the pages of a process may be read more slowly than the link could send
/// them.
pub(crate) fn to_link_cost(costs: &Costs) -> LinkEstimate {
    let migrations = costs.migration.map_or(u64::MAX, |cost| (1_000_000 << 20) / cost.us_per_mib.max(1));
    LinkEstimate { rtt_us: costs.rtt_us, bytes_per_s: costs.bytes_per_s.min(migrations) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::scratch::Scratch;
    use tern_control::MigrationCosts;

    fn costs(node: u16, us_per_mib: Option<u64>) -> Costs {
        Costs {
            node: NodeId(node),
            rtt_us: 150,
            bytes_per_s: 1 << 30,
            back_bytes_per_s: 1 << 30,
            call_ns: Some(90_000),
            migration: us_per_mib.map(|us_per_mib| MigrationCosts { fixed_us: 20_000, us_per_mib }),
            at: 1_800_000_000,
        }
    }

    #[test]
    fn costs_survive_a_restart() {
        let dir = Scratch::new("costs");
        let measured = LinkCostStore::open(&dir.0);
        assert!(measured.all().is_empty());
        for each in [costs(2, None), costs(3, Some(4_000)), costs(2, Some(2_000))] {
            measured.store(each).unwrap();
        }
        let again = LinkCostStore::open(&dir.0).all();
        assert_eq!(
            again.values().copied().collect::<Vec<_>>(),
            [costs(2, Some(2_000)), costs(3, Some(4_000))]
        );
        std::fs::write(dir.0.join("costs.json"), "[{}]").unwrap();
        assert!(LinkCostStore::open(&dir.0).all().is_empty());
    }

    #[test]
    fn throughput_is_limited_by_that_of_migrations() {
        assert_eq!(to_link_cost(&costs(2, None)), LinkEstimate { rtt_us: 150, bytes_per_s: 1 << 30 });
        assert_eq!(to_link_cost(&costs(2, Some(4_000))).bytes_per_s, 250 << 20);
        // No value from a file or a tool does harm.
        assert!(
            to_link_cost(&costs(2, Some(0))).bytes_per_s > 0
                && to_link_cost(&costs(2, Some(u64::MAX))).bytes_per_s == 0
        );
    }
}
