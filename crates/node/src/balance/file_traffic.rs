//! Traffic of this node's processes on files of other nodes between two rounds of the balancer, as
//! the mounted MFS trees report it.
use crate::os::sync::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use tern_control::FileTraffic;
use tern_ids::NodeId;

/// Maximum number of reports that are added up between two rounds.
const MAX_REPORTS: usize = 65_536;

/// Number of round trips, and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct TrafficSum {
    pub(crate) calls: f64,
    pub(crate) bytes: f64,
}

/// The traffic of each process, by the node that has the files.
pub(crate) type TrafficByProcess = HashMap<i32, HashMap<NodeId, TrafficSum>>;

/// The number of reports since the last [`FileTrafficReports::take`], and their sums.
#[derive(Debug, Default)]
pub(crate) struct FileTrafficReports(Mutex<(usize, TrafficByProcess)>);

impl FileTrafficReports {
    /// Adds reports of a tree.
    pub(crate) fn add(&self, reports: &[FileTraffic]) {
        let (count, sums) = &mut *lock(&self.0);
        for one in reports.iter().take(MAX_REPORTS.saturating_sub(*count)) {
            let sum = sums.entry(one.pid.0).or_default().entry(one.node).or_default();
            sum.calls += one.calls as f64;
            sum.bytes += one.bytes as f64;
            *count += 1;
        }
    }

    /// Returns the sums and resets them.
    pub(crate) fn take(&self) -> TrafficByProcess {
        std::mem::take(&mut *lock(&self.0)).1
    }
}
