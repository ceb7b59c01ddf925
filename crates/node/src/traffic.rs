//! What processes of this node read and write of other nodes' files, as the mounted trees tell, between two looks.

use crate::slots::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use tern_control::FileTraffic;
use tern_ids::NodeId;

/// So many processes and nodes are counted between two looks.
const MOST: usize = 65_536;

/// Round trips, and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Sum {
    pub(crate) calls: f64,
    pub(crate) bytes: f64,
}

/// Of each process, on each node's files.
pub(crate) type ByProcess = HashMap<i32, HashMap<NodeId, Sum>>;

/// What was told and not looked at yet.
#[derive(Debug, Default)]
pub(crate) struct Traffic(Mutex<(usize, ByProcess)>);

impl Traffic {
    /// More of it.
    pub(crate) fn hear(&self, told: &[FileTraffic]) {
        let (count, sums) = &mut *lock(&self.0);
        for one in told.iter().take(MOST.saturating_sub(*count)) {
            let sum = sums.entry(one.pid.0).or_default().entry(one.node).or_default();
            sum.calls += one.calls as f64;
            sum.bytes += one.bytes as f64;
            *count += 1;
        }
    }

    /// All of it, once.
    pub(crate) fn take(&self) -> ByProcess {
        std::mem::take(&mut *lock(&self.0)).1
    }
}
