//! `migrate --why`: each node as a candidate for one process, and the last decision about the
//! process.

use crate::candidate::{Candidate, Mover};
use crate::decide::eligible;
use crate::effective_view::EffectiveView;
use crate::policy::Policy;
use crate::process::ProcessSnapshot;
use crate::state::{Decision, DecisionState, StayReason};
use crate::view::Cluster;
use serde::{Deserialize, Serialize};
use tern_ids::{HomePid, NodeId};

/// Everything known about the placement of one process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The process.
    pub pid: HomePid,
    /// Where it runs.
    pub at: NodeId,
    /// Why it is not considered for a move now; `None` if it is.
    pub ineligible: Option<StayReason>,
    /// Each node as a candidate now, the fastest first.
    pub candidates: Vec<Candidate>,
    /// The last decision, and how many milliseconds ago it was made.
    pub last: Option<(u64, Decision)>,
}

impl Explanation {
    /// The node where `migrate PID balance` would move it: the candidate without obstacle that
    /// gains most.
    #[must_use]
    pub fn best(&self) -> Option<&Candidate> {
        let possible = self.candidates.iter().filter(|candidate| candidate.obstacle.is_none());
        possible.max_by(|one, other| one.gain_s.total_cmp(&other.gain_s))
    }
}

/// Explains one process from the same input as `decide`. Changes nothing.
#[must_use]
pub fn explain(
    cluster: &Cluster,
    process: &ProcessSnapshot,
    state: &DecisionState,
    policy: &Policy,
    now_ms: u64,
) -> Explanation {
    let cluster = &*state.with_refusals(cluster, now_ms);
    let view = EffectiveView::new(cluster, state, policy, now_ms);
    let mover = Mover::new(&view, process);
    let mut candidates: Vec<Candidate> = mover
        .iter()
        .flat_map(|mover| (0..cluster.nodes().len()).filter_map(|index| mover.candidate(&view, state, index)))
        .collect();
    candidates.sort_by(|one, other| one.pace.total_cmp(&other.pace).then(one.node.cmp(&other.node)));
    let last = state.decision(process.pid);
    Explanation {
        pid: process.pid,
        at: process.at,
        ineligible: eligible(&view, state, process).err(),
        candidates,
        last: last.map(|(at, decision)| (now_ms.saturating_sub(*at), decision.clone())),
    }
}
