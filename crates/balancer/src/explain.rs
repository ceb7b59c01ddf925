//! `migrate --why`: one process on each node, and the last word about it.

use crate::decide::eligible;
use crate::ground::Ground;
use crate::policy::Policy;
use crate::process::Process;
use crate::prospect::{Mover, Prospect};
use crate::state::{State, Stay, Verdict};
use crate::view::Cluster;
use serde::{Deserialize, Serialize};
use tern_ids::{HomePid, NodeId};

/// All that is to be said about one process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Why {
    /// Which.
    pub pid: HomePid,
    /// Where it runs.
    pub at: NodeId,
    /// What keeps it from being considered at all now, if anything.
    pub stay: Option<Stay>,
    /// What it has to hope for on each node as of now, the fastest first.
    pub prospects: Vec<Prospect>,
    /// The last word, and how many milliseconds ago it was said.
    pub last: Option<(u64, Verdict)>,
}

impl Why {
    /// Where `migrate PID balance` would take it: the open prospect that gains most.
    #[must_use]
    pub fn best(&self) -> Option<&Prospect> {
        let open = self.prospects.iter().filter(|prospect| prospect.bar.is_none());
        open.max_by(|one, other| one.gain_s.total_cmp(&other.gain_s))
    }
}

/// What `decide` sees, for one process. It changes nothing.
#[must_use]
pub fn explain(cluster: &Cluster, process: &Process, state: &State, policy: &Policy, now_ms: u64) -> Why {
    let cluster = &*state.informed(cluster, now_ms);
    let ground = Ground::new(cluster, state, policy, now_ms);
    let mover = Mover::new(&ground, process);
    let mut prospects: Vec<Prospect> = mover
        .iter()
        .flat_map(|mover| {
            (0..cluster.nodes().len()).filter_map(|place| mover.prospect(&ground, state, place))
        })
        .collect();
    prospects.sort_by(|one, other| one.pace.total_cmp(&other.pace).then(one.node.cmp(&other.node)));
    let last = state.verdict(process.pid);
    Why {
        pid: process.pid,
        at: process.at,
        stay: eligible(&ground, state, process).err(),
        prospects,
        last: last.map(|(at, verdict)| (now_ms.saturating_sub(*at), verdict.clone())),
    }
}
