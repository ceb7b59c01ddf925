//! The cluster as known to one node from the others' reports: the data that `mon` draws, and its
//! `--json` format.

use crate::report::MigrationReport;
use serde::{Deserialize, Serialize};
use tern_ids::NodeId;

/// The nodes and recent migrations that this node knows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClusterReport {
    /// This node.
    pub me: NodeId,
    /// All nodes of the map in order of their numbers, this one included. Empty if this node has no
    /// map, which means that it is in no cluster.
    pub nodes: Vec<NodeLoad>,
    /// Recent migrations that were reported to this node, the newest first.
    pub migrations: Vec<RecentMigration>,
}

/// A node's state and load, `age_ms` old. Values that were never received are zero.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeLoad {
    /// Its number.
    pub node: NodeId,
    /// As in the map.
    pub host: String,
    /// Whether it is up.
    pub state: NodeState,
    /// How long ago the node reported the following; 0 for this node.
    pub age_ms: u64,
    /// Its load. 100 is one standard CPU kept busy.
    pub load: f32,
    /// The speed of one of its CPUs. 10,000 is a standard CPU.
    pub speed: u32,
    /// Number of CPUs; a fraction under a CPU quota.
    pub cpus: f32,
    /// Bytes of memory.
    pub mem_total: u64,
    /// Bytes available to a new process.
    pub mem_free: u64,
    /// Bytes not used at all, not even as a cache (`MemFree`).
    pub mem_raw_free: u64,
    /// Bytes of swap space.
    pub swap_total: u64,
    /// Bytes of free swap space.
    pub swap_free: u64,
    /// Percent of time that is spent on work rather than on waiting for paging.
    pub utilisability: u32,
    /// Processes of other nodes that run there.
    pub guests: u32,
    /// Its own processes that run elsewhere.
    pub away: u32,
    /// Its administrator's settings.
    pub flags: NodeFlags,
}

/// The membership state of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// It responds.
    Alive,
    /// It has not responded to one node; others are probing it.
    Suspect,
    /// It responds to no node.
    Dead,
    /// It is in the map, but nothing was ever received from it.
    #[serde(rename = "never_heard")]
    NeverSeen,
}

/// Switches of a node (`mosctl`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NodeFlags {
    /// No process leaves automatically.
    pub stay: bool,
    /// None of its own processes leaves automatically.
    pub lstay: bool,
    /// No guest is accepted.
    pub block: bool,
    /// It does not publish its load.
    pub quiet: bool,
    /// Other nodes cannot access its files through MFS.
    #[serde(default)]
    pub nomfs: bool,
}

/// A finished migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecentMigration {
    /// How long ago it ended.
    pub ago_ms: u64,
    /// The migration.
    #[serde(flatten)]
    pub report: MigrationReport,
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::{HomePid, MigrationId};

    #[test]
    fn recent_migration_is_one_flat_json_object() {
        let report = MigrationReport {
            pid: HomePid(31),
            command: "flac".into(),
            migration: MigrationId([7; 16]),
            from: NodeId(1),
            to: NodeId(2),
            bytes: 12_300_000,
            freeze_ms: 18.5,
            total_ms: 204.25,
        };
        let recent = RecentMigration { ago_ms: 1_200, report };
        let text = serde_json::to_string(&recent).unwrap();
        assert!(text.starts_with(r#"{"ago_ms":1200,"pid":31,"#), "{text}");
        assert_eq!(serde_json::from_str::<RecentMigration>(&text).unwrap(), recent);
    }
}
