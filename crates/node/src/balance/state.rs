//! The state of the balancer of this node.

use crate::balance::eligible::EligibleUsers;
use crate::balance::file_traffic::FileTrafficReports;
use crate::balance::profile::{BalancedProcess, Profiles};
use crate::os::clock::boot_ms;
use crate::os::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use tern_balancer::{DecisionState, PendingChanges, Policy};
use tern_control::{Refusal, RefusalKind};
use tern_ids::{HomePid, NodeId};
use tern_load::ProcessScanner;

/// The state of the balancer of this node.
#[derive(Debug, Default)]
pub(crate) struct BalancerState {
    pub(super) policy: Policy,
    pub(super) state: Mutex<DecisionState>,
    pub(super) processes: Mutex<ProcessScanner>,
    pub(super) profiles: Mutex<Profiles>,
    pub(crate) file_traffic: FileTrafficReports,
    pub(crate) eligible: EligibleUsers,
    /// The processes of the last scan. A thread that also needs `state` locks `state` first.
    pub(super) candidates: Mutex<Vec<BalancedProcess>>,
    /// Arrivals since the last scan: process, node, and time in milliseconds.
    pub(super) arrivals: Mutex<Vec<(HomePid, NodeId, u64)>>,
    pub(super) pending_changes: Mutex<PendingChanges>,
    /// The guests of the last scan.
    pub(super) guests: Mutex<BTreeSet<(NodeId, HomePid)>>,
    /// Own processes that ran here at the last scan, with their numbers of runnable threads.
    pub(super) here: Mutex<BTreeMap<HomePid, f64>>,
}

impl BalancerState {
    /// Records why a process cannot be moved. The reason is shown, and the balancer leaves the
    /// process alone for a while.
    pub(crate) fn record_refusal(&self, pid: HomePid, refusal: &Refusal) {
        if refusal.kind == RefusalKind::CannotMove {
            lock(&self.profiles).record_refusal(pid, refusal.message.clone(), boot_ms());
        }
    }

    /// Why the last move of the process failed, if it cannot be moved.
    pub(crate) fn refusal(&self, pid: HomePid) -> Option<String> {
        lock(&self.profiles).refusal(pid).map(str::to_owned)
    }

    /// Whether the balancer of this node handles the process.
    pub(crate) fn is_balanced(&self, pid: HomePid) -> bool {
        lock(&self.candidates).iter().any(|candidate| candidate.process.pid == pid)
    }

    /// The start time of a process of the last scan.
    pub(super) fn start_time_of(&self, pid: HomePid) -> Option<u64> {
        let candidates = lock(&self.candidates);
        candidates.iter().find(|candidate| candidate.process.pid == pid).map(|candidate| candidate.start)
    }

    /// This node after all pending arrivals and departures, for its own decisions.
    pub(crate) fn expected_node(&self, own: tern_balancer::NodeSnapshot) -> tern_balancer::NodeSnapshot {
        let pending_changes = lock(&self.pending_changes);
        let load = pending_changes.expected_load(&own, &self.policy, boot_ms());
        tern_balancer::NodeSnapshot { load, mem_free: pending_changes.expected_free(&own), age_ms: 0, ..own }
    }

    /// The load and free memory that are advertised to other nodes.
    pub(crate) fn advertised_load(&self, own: &tern_balancer::NodeSnapshot) -> (f64, u64) {
        let (pending_changes, policy) = (lock(&self.pending_changes), &self.policy);
        (pending_changes.expected_load(own, policy, boot_ms()), pending_changes.advertised_free(own, policy))
    }
}
