//! Priority of a node's own processes over its guests. Guests have a limited share of the node
//! (`guest_cpus`, `guest_memory`), and are sent away when own processes need it (`owner_share`).
//! Commands that other nodes have placed here count with the guests; they cannot be sent away, but
//! no further ones are started.
//!
//! This is checked once a second with the balancer's scan. As with `mosctl expel`, homes are asked
//! to move their guests. No guest is accepted until own processes have been below the threshold for
//! a while.

use crate::cluster::view;
use crate::migrate::evacuation;
use crate::node::Node;
use crate::os::clock::boot_ms;
use crate::os::sync::lock;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tern_balancer::Policy;
use tern_control::{ProcessRow, Refusal, RefusalKind};
use tern_load::ProcessSample;

/// How long no guest is accepted after own processes have needed the node, in milliseconds.
const REOPEN_DELAY_MS: u64 = 20_000;

/// Interval between two requests to the homes, in milliseconds.
const REQUEST_INTERVAL_MS: u64 = 2_000;

/// The command name of the process from which all placed commands of one home descend.
const PLACED_ROOT: &str = "tern-container";

/// Command names of programs that work for all users, besides ternd and its shims.
const HELPERS: [&str; 4] = ["tern-exec", PLACED_ROOT, "tern-mfs", "tern-admin"];

/// The processes that descend from a process with this command name.
pub(crate) fn descendants_of(holder: &str, all: &[ProcessSample]) -> HashSet<i32> {
    let parents: HashMap<i32, (i32, bool)> =
        all.iter().map(|one| (one.pid, (one.parent, one.command == holder))).collect();
    let is_held = |one: &&ProcessSample| {
        let mut at = one.parent;
        // A parent that was read later than its child could make a cycle.
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

/// Measures who uses the node, and asks homes to move guests away if own processes need the node or
/// guests use too much memory.
pub(crate) fn observe(
    node: &Arc<Node>,
    guests: &[ProcessSample],
    others: &[ProcessSample],
    rows: &[ProcessRow],
) {
    let config = &node.config;
    let now_ms = boot_ms();
    let placed = descendants_of(PLACED_ROOT, others);
    let (placed, own): (Vec<_>, Vec<_>) =
        others.iter().filter(is_workload).partition(|one| placed.contains(&one.pid));
    let guests_demand = demand(guests.iter().filter(is_workload)) + demand(placed.iter().copied());
    let own_demand = demand(own.into_iter());
    let placed_memory: u64 = placed.iter().map(|one| one.resident).sum();
    let mut here: Vec<&ProcessRow> = rows.iter().filter(|row| row.from.is_some()).collect();
    here.sort_by_key(|row| std::cmp::Reverse(row.usage.memory));
    let mut usage = lock(&node.owner.usage);
    usage.guest_demand_share = guests_demand / (guests_demand + own_demand).max(1.0);
    usage.guests_memory = placed_memory + here.iter().map(|row| row.usage.memory).sum::<u64>();
    let capacity = view::local_node(node).cpus * 100.0;
    let needs_it = config.owner_share.is_some_and(|share| own_demand > capacity * f64::from(share) / 100.0);
    if needs_it {
        if now_ms >= usage.no_guests_until_ms {
            tracing::info!(own_demand, guests = here.len(), "the owner's processes need this node");
        }
        usage.no_guests_until_ms = now_ms + REOPEN_DELAY_MS;
    }
    let leave = match config.guest_memory_bytes() {
        _ if needs_it => &here[..],
        Some(limit) => &here[..count_to_evict(&here, limit.saturating_sub(placed_memory))],
        None => &[],
    };
    if leave.is_empty() || usage.requested_ms.is_some_and(|asked| now_ms < asked + REQUEST_INTERVAL_MS) {
        return;
    }
    usage.requested_ms = Some(now_ms);
    drop(usage);
    evacuation::request_moves(node, leave);
}

/// Whether the process is a workload and not a part of Tern.
fn is_workload(one: &&ProcessSample) -> bool {
    !tern_load::demand::TERN_PROGRAMS.iter().chain(&HELPERS).any(|ours| one.command == *ours)
}

/// The demand of these processes, in percent of a CPU.
fn demand<'a>(processes: impl Iterator<Item = &'a ProcessSample>) -> f64 {
    processes.filter_map(|one| one.rates).map(|rates| f64::from(rates.demand)).sum()
}

/// How many of the largest guests must leave so that the others use at most `limit` bytes together.
fn count_to_evict(largest_first: &[&ProcessRow], limit: u64) -> usize {
    let mut all: u64 = largest_first.iter().map(|row| row.usage.memory).sum();
    largest_first
        .iter()
        .take_while(|row| {
            let goes = all > limit;
            all -= row.usage.memory;
            goes
        })
        .count()
}

/// Checks that one more command of another node can run here; the refusal says why not.
pub(crate) fn check_can_take_command(node: &Node) -> Result<(), Refusal> {
    let usage = *lock(&node.owner.usage);
    let whole = view::local_node(node);
    let full = node.config.guest_memory_bytes().is_some_and(|limit| usage.guests_memory >= limit);
    let kept_free = tern_balancer::memory_to_keep_free(&whole, &Policy::default()) as u64;
    let (why, key) = if node.owner.needs_node() {
        ("its own processes need it", "owner_share in its ternd.toml is the threshold")
    } else if full {
        ("the memory limit of guests is reached", "guest_memory in its ternd.toml is the limit")
    } else if whole.mem_total > 0 && whole.mem_free < kept_free {
        ("too little of its memory is free", "free -m, on that node")
    } else {
        return Ok(());
    };
    let message = format!("node {} starts no commands of other nodes: {why}", node.me());
    Err(Refusal::new(RefusalKind::Unavailable, message).hint(key))
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
    fn largest_guests_leave_until_the_rest_fits() {
        let rows = [guest(50), guest(30), guest(20)];
        let here: Vec<_> = rows.iter().collect();
        for (limit, go) in [(100, 0), (99, 1), (50, 1), (49, 2), (20, 2), (19, 3), (0, 3)] {
            assert_eq!(count_to_evict(&here, limit), go, "{limit}");
        }
        assert_eq!(count_to_evict(&[], 0), 0);
    }
}
