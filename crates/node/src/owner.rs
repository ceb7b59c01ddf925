//! Who owns a node comes before its guests: they have a part of it at most (`guest_cpus`, `guest_memory`), and leave
//! when its own processes need it (`owner_share`). Commands that other nodes have placed here count with them; they cannot
//! leave, but no more are begun.
//!
//! Seen once a second, with the balancer's look at the processes. Homes are asked to take their guests elsewhere, as by
//! `mosctl expel`; nobody new is let in until the owner's processes have been below the threshold for a while.

use crate::slots::lock;
use crate::state::Node;
use crate::{cluster, evacuation};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use tern_balancer::Policy;
use tern_control::{ProcessRow, Refusal, RefusalKind};
use tern_load::Process;

/// For how long after the owner's processes have needed the node nobody comes back.
const REST_MS: u64 = 20_000;

/// How long homes have until they are asked again.
const ASK_AGAIN_MS: u64 = 2_000;

/// The process of which all placed commands of one home descend.
const ROOM: &str = "tern-room";

/// Besides ternd and its shims, what works for all.
const BESIDE: [&str; 4] = ["tern-exec", ROOM, "tern-mfs", "tern-admin"];

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
    /// The part of the demand for CPUs that is guests' and placed commands', 0 to 1.
    guests_part: f64,
    /// Bytes that these have in memory.
    guests_memory: u64,
}

/// Which of these descend from a process of this name.
pub(crate) fn held_by(holder: &str, all: &[Process]) -> HashSet<i32> {
    let parents: HashMap<i32, (i32, bool)> =
        all.iter().map(|one| (one.pid, (one.parent, one.command == holder))).collect();
    let is_held = |one: &&Process| {
        let mut at = one.parent;
        // A parent that was read later than its child could make a circle.
        for _ in 0..1000 {
            match parents.get(&at) {
                Some((_, true)) => return true,
                Some((parent, false)) => at = *parent,
                None => break,
            }
        }
        false
    };
    all.iter().filter(is_held).map(|one| one.pid).collect()
}

/// Looks at who needs the node, and sends guests away if they are too many or too large.
pub(crate) fn look(node: &Arc<Node>, guests: &[Process], others: &[Process], rows: &[ProcessRow]) {
    let config = &node.config;
    let now_ms = cluster::now_ms();
    let placed = held_by(ROOM, others);
    let (placed, own): (Vec<_>, Vec<_>) =
        others.iter().filter(is_somebodys).partition(|one| placed.contains(&one.pid));
    let guests_demand = demand(guests.iter().filter(is_somebodys)) + demand(placed.iter().copied());
    let own_demand = demand(own.into_iter());
    let placed_memory: u64 = placed.iter().map(|one| one.resident).sum();
    let mut here: Vec<&ProcessRow> = rows.iter().filter(|row| row.from.is_some()).collect();
    here.sort_by_key(|row| std::cmp::Reverse(row.usage.memory));
    let mut seen = lock(&node.owner.seen);
    seen.guests_part = guests_demand / (guests_demand + own_demand).max(1.0);
    seen.guests_memory = placed_memory + here.iter().map(|row| row.usage.memory).sum::<u64>();
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
        Some(most) => &here[..too_many(&here, most.saturating_sub(placed_memory))],
        None => &[],
    };
    if leave.is_empty() || seen.asked_ms.is_some_and(|asked| now_ms < asked + ASK_AGAIN_MS) {
        return;
    }
    seen.asked_ms = Some(now_ms);
    drop(seen);
    evacuation::ask_homes(node, leave);
}

/// Whether this is no part of Tern, which works for nobody in particular.
fn is_somebodys(one: &&Process) -> bool {
    !tern_load::demand::OURS.iter().chain(&BESIDE).any(|ours| one.command == *ours)
}

/// Percent of a CPU that these would use.
fn demand<'a>(processes: impl Iterator<Item = &'a Process>) -> f64 {
    processes.filter_map(|one| one.rates).map(|rates| f64::from(rates.wanted)).sum()
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

/// Whether something is left for one more command of another node; else why not.
pub(crate) fn spares(node: &Node) -> Result<(), Refusal> {
    let seen = *lock(&node.owner.seen);
    let whole = cluster::own(node);
    let full = node.config.guest_memory_bytes().is_some_and(|most| seen.guests_memory >= most);
    let kept_free = tern_balancer::reserve(&whole, &Policy::default()) as u64;
    let (why, key) = if needs_it(node) {
        ("its own processes need it", "owner_share in its ternd.toml is the threshold")
    } else if full {
        ("what they may have of its memory is in use", "guest_memory in its ternd.toml is the limit")
    } else if whole.mem_total > 0 && whole.mem_free < kept_free {
        ("too little of its memory is free", "free -m, on that node")
    } else {
        return Ok(());
    };
    let said = format!("node {} begins no commands of other nodes: {why}", node.me());
    Err(Refusal::new(RefusalKind::Unavailable, said).hint(key))
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
