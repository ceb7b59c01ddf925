//! Who owns a node comes before its guests: they have a part of it at most (`guest_cpus`, `guest_memory`), and leave
//! when its own processes need it (`owner_share`).
//!
//! Seen once a second, with the balancer's look at the processes. Homes are asked to take their guests elsewhere, as by
//! `mosctl expel`; nobody new is let in until the owner's processes have been below the threshold for a while.

use crate::slots::lock;
use crate::state::Node;
use crate::{cluster, evacuation};
use std::sync::{Arc, Mutex};
use tern_control::ProcessRow;
use tern_load::Process;

/// For how long after the owner's processes have needed the node nobody comes back.
const REST_MS: u64 = 20_000;

/// How long homes have until they are asked again.
const ASK_AGAIN_MS: u64 = 2_000;

/// What was seen last.
#[derive(Debug, Default)]
pub(crate) struct Owner {
    seen: Mutex<Seen>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    /// Nobody comes until then.
    closed_until_ms: u64,
    asked_ms: Option<u64>,
    /// The part of the demand for CPUs that is guests', 0 to 1.
    guests_part: f64,
    /// Bytes that guests have in memory.
    guests_memory: u64,
}

/// Looks at who needs the node, and sends guests away if they are too many or too large.
pub(crate) fn look(node: &Arc<Node>, guests: &[Process], own: &[Process], rows: &[ProcessRow]) {
    let config = &node.config;
    let now_ms = cluster::now_ms();
    let (guests_demand, own_demand) = (demand(guests), demand(own));
    let mut here: Vec<&ProcessRow> = rows.iter().filter(|row| row.from.is_some()).collect();
    here.sort_by_key(|row| std::cmp::Reverse(row.usage.memory));
    let mut seen = lock(&node.owner.seen);
    seen.guests_part = guests_demand / (guests_demand + own_demand).max(1.0);
    seen.guests_memory = here.iter().map(|row| row.usage.memory).sum();
    let capacity = cluster::own(node).cpus * 100.0;
    let needs_it = config.owner_share.is_some_and(|share| own_demand > capacity * f64::from(share) / 100.0);
    if needs_it {
        if now_ms >= seen.closed_until_ms {
            tracing::info!(own_demand, guests = here.len(), "the owner's processes need this node");
        }
        seen.closed_until_ms = now_ms + REST_MS;
    }
    let leave = match config.guest_memory_bytes() {
        _ if needs_it => &here[..],
        Some(most) => &here[..too_many(&here, most)],
        None => &[],
    };
    if leave.is_empty() || seen.asked_ms.is_some_and(|asked| now_ms < asked + ASK_AGAIN_MS) {
        return;
    }
    seen.asked_ms = Some(now_ms);
    drop(seen);
    evacuation::ask_homes(node, leave);
}

/// Percent of a CPU that these would use; what ternd and its shims do is nobody's.
fn demand(processes: &[Process]) -> f64 {
    let of_others = processes.iter().filter(|one| !tern_load::demand::OURS.contains(&one.command.as_str()));
    of_others.filter_map(|one| one.rates).map(|rates| f64::from(rates.wanted)).sum()
}

/// How many of the largest must go, so that the others have no more than this together.
fn too_many(largest_first: &[&ProcessRow], most: u64) -> usize {
    let mut all: u64 = largest_first.iter().map(|row| row.usage.memory).sum();
    largest_first
        .iter()
        .take_while(|row| {
            let goes = all > most;
            all -= row.usage.memory;
            goes
        })
        .count()
}

/// Whether the owner's processes need the node now, or have a moment ago.
pub(crate) fn needs_it(node: &Node) -> bool {
    cluster::now_ms() < lock(&node.owner.seen).closed_until_ms
}

/// The node as guests have it.
pub(crate) fn for_guests(node: &Node, whole: tern_balancer::Node) -> tern_balancer::Node {
    let seen = *lock(&node.owner.seen);
    let mem_free = match node.config.guest_memory_bytes() {
        Some(most) => whole.mem_free.min(most.saturating_sub(seen.guests_memory)),
        None => whole.mem_free,
    };
    let Some(cpus) = node.config.guest_cpus.filter(|cpus| *cpus < whole.cpus) else {
        return tern_balancer::Node { mem_free, ..whole };
    };
    // The owner's processes are on the other CPUs first.
    let of_guests = whole.load * seen.guests_part;
    let in_the_way = (whole.load - of_guests - (whole.cpus - cpus) * 100.0).max(0.0);
    tern_balancer::Node { mem_free, cpus, load: of_guests + in_the_way, ..whole }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_control::Usage;
    use tern_ids::{HomePid, NodeId};

    fn guest(memory: u64) -> ProcessRow {
        ProcessRow {
            pid: HomePid(7),
            uid: 0,
            r#where: None,
            from: Some(NodeId(2)),
            state: "running".into(),
            cpu_seconds: 0.0,
            migrations: 1,
            reason: String::new(),
            command: "x".into(),
            usage: Usage { memory, ..Usage::default() },
            started: None,
        }
    }

    #[test]
    fn the_largest_go_until_the_others_have_room() {
        let rows = [guest(50), guest(30), guest(20)];
        let here: Vec<_> = rows.iter().collect();
        for (most, go) in [(100, 0), (99, 1), (50, 1), (49, 2), (20, 2), (19, 3), (0, 3)] {
            assert_eq!(too_many(&here, most), go, "{most}");
        }
        assert_eq!(too_many(&[], 0), 0);
    }
}
