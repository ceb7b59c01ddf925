//! The cluster as one node knows it, by what the others have told it: what `mon` draws, and its `--json` format.

use crate::report::MigrationReport;
use serde::{Deserialize, Serialize};
use tern_ids::NodeId;

/// What this node knows of all nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClusterReport {
    /// This node.
    pub me: NodeId,
    /// The nodes of the map by number, this one included; empty if this node has no map, that is, if it is in no
    /// cluster.
    pub nodes: Vec<NodeLoad>,
    /// The latest migrations that this node has heard of, the newest first.
    pub migrations: Vec<RecentMigration>,
}

/// A node's state and load, as old as `age_ms` says. What has never been heard is zero.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeLoad {
    /// Its number.
    pub node: NodeId,
    /// As in the map.
    pub host: String,
    /// Whether it is there.
    pub state: NodeState,
    /// How long ago the node itself said the following; 0 for this node.
    pub age_ms: u64,
    /// 100 is one standard CPU kept busy.
    pub load: f32,
    /// Of one of its CPUs; 10,000 is the standard.
    pub speed: u32,
    /// How many it has; a quota makes it a fraction.
    pub cpus: f32,
    /// Bytes.
    pub mem_total: u64,
    /// Bytes that a newcomer could have.
    pub mem_free: u64,
    /// Bytes in no use at all, not even as a cache (`MemFree`).
    pub mem_raw_free: u64,
    /// Bytes.
    pub swap_total: u64,
    /// Bytes.
    pub swap_free: u64,
    /// Of 100 units of time, those that go into work rather than into waiting for paging.
    pub utilisability: u32,
    /// Processes of other nodes that run there.
    pub guests: u32,
    /// Its own processes that run elsewhere.
    pub away: u32,
    /// What its administrator has set.
    pub flags: NodeFlags,
}

/// What is believed of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// It is heard of.
    Alive,
    /// It has not answered somebody; others are being asked.
    Suspect,
    /// It does not answer anybody.
    Dead,
    /// It is in the map, and nothing has been heard of it.
    NeverHeard,
}

/// What `mosctl` has set on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NodeFlags {
    /// No process leaves by itself.
    pub stay: bool,
    /// None of its own processes leaves by itself.
    pub lstay: bool,
    /// No guest is taken.
    pub block: bool,
    /// It does not tell its load.
    pub quiet: bool,
    /// Nobody reaches its files through MFS.
    #[serde(default)]
    pub nomfs: bool,
}

/// A migration that is over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecentMigration {
    /// How long ago it ended.
    pub ago_ms: u64,
    /// What it was.
    #[serde(flatten)]
    pub report: MigrationReport,
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::{HomePid, MigrationId};

    #[test]
    fn a_migration_and_its_age_are_one_object() {
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
