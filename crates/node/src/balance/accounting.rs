//! Arrivals and departures that the sampled load does not show yet: offers that were accepted,
//! guests that have come or left, and own processes that have moved.

use crate::cluster::view;
use crate::node::Node;
use crate::os::clock::boot_ms;
use crate::os::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use tern_balancer::{MoveOffer, OfferReply, ProcessSnapshot, reply_to_offer};
use tern_control::ProcessRow;
use tern_ids::{HomePid, NodeId};

/// Answers the offer of a process by another home.
pub(crate) fn answer_offer(node: &Node, peer: NodeId, offer: MoveOffer) -> OfferReply {
    // A node can offer its own processes only.
    let offer = MoveOffer { home: peer, ..offer };
    let own = node.owner.guest_share(&node.config, view::local_node(node));
    let own = tern_balancer::NodeSnapshot { takes_guests: node.check_accepts_guests().is_ok(), ..own };
    let balancing = &node.balancing;
    let mut pending_changes = lock(&balancing.pending_changes);
    let now_ms = boot_ms();
    let answer = reply_to_offer(&own, &pending_changes, &offer, &balancing.policy, now_ms);
    if answer == OfferReply::Accept {
        pending_changes.record_accepted(&offer, now_ms);
    }
    answer
}

/// The outcome of an accepted offer: the process has arrived, will not arrive, or has left again.
pub(crate) fn receive_outcome(node: &Node, peer: NodeId, pid: HomePid, arrived: bool) {
    let was_here = !arrived && lock(&node.balancing.guests).remove(&(peer, pid));
    let mut pending_changes = lock(&node.balancing.pending_changes);
    match (arrived, was_here) {
        (true, _) => pending_changes.record_arrived(peer, pid, boot_ms()),
        (false, true) => pending_changes.record_departed(peer, pid, 1.0, boot_ms()),
        (false, false) => pending_changes.record_cancelled(peer, pid),
    }
}

/// Records an arrival, so that decisions before the next scan take it into account.
///
/// The load of this node is updated before the location of the process. A decision between the two
/// updates subtracts or adds the process twice, which at most prevents a move. In the reverse order
/// the loads of both nodes would include the process, and another process would leave.
pub(super) fn record_arrival(node: &Node, pid: HomePid, from: NodeId, to: NodeId) {
    let (balancing, now_ms) = (&node.balancing, boot_ms());
    lock(&balancing.arrivals).push((pid, to, now_ms));
    if from == node.me() {
        record_departure(node, pid);
    }
    let candidates = lock(&balancing.candidates);
    let threads = candidates.iter().find(|one| one.process.pid == pid).map(|one| one.process.demand / 100.0);
    drop(candidates);
    if let Some(threads) = threads.filter(|_| to == node.me()) {
        lock(&balancing.here).insert(pid, threads);
        lock(&balancing.pending_changes).record_returned(node.me(), pid, threads, now_ms);
    }
    let mut state = lock(&balancing.state);
    state.arrived(pid, now_ms);
    set_node(lock(&balancing.candidates).iter_mut().map(|one| &mut one.process), pid, to);
}

/// An own process has left this node; the sampled load still includes it.
pub(super) fn record_departure(node: &Node, pid: HomePid) {
    let Some(threads) = lock(&node.balancing.here).remove(&pid) else { return };
    let mut pending_changes = lock(&node.balancing.pending_changes);
    pending_changes.record_departed(node.me(), pid, threads, boot_ms());
    pending_changes.record_local_departed(threads);
}

/// Sets the node where a process runs, and resets its time there.
pub(super) fn set_node<'a>(
    mut processes: impl Iterator<Item = &'a mut ProcessSnapshot>,
    pid: HomePid,
    to: NodeId,
) {
    let found = processes.find(|process| process.pid == pid);
    if let Some(process) = found.filter(|process| process.at != to) {
        (process.at, process.resident_s) = (to, 0.0);
    }
}

/// Records which guests have arrived and left since the last scan.
pub(super) fn update_guests(node: &Node, rows: &[ProcessRow]) {
    let now: BTreeSet<_> = rows
        .iter()
        .filter(|row| row.state != "migrating")
        .filter_map(|row| Some((row.from?, row.pid)))
        .collect();
    // Computed before the locks below are taken, so that no other lock is taken under them.
    let own = view::local_node(node);
    let mut before = lock(&node.balancing.guests);
    let mut pending_changes = lock(&node.balancing.pending_changes);
    let now_ms = boot_ms();
    for (home, pid) in now.difference(&before) {
        pending_changes.record_arrived(*home, *pid, now_ms);
    }
    for (home, pid) in before.difference(&now) {
        tracing::debug!(%home, %pid, "a guest has left");
        // It is assumed to have kept about one CPU busy, as it would not have been here otherwise.
        pending_changes.record_departed(*home, *pid, 1.0, now_ms);
    }
    pending_changes.update(&own, &node.balancing.policy, now_ms);
    *before = now;
}

/// Records which own processes have come and left. The sampled load follows slowly: for a while it
/// still includes those that have left, and lacks those that have come home.
pub(super) fn update_own_processes(node: &Node, mut processes: Vec<ProcessSnapshot>, now_ms: u64) {
    let me = node.me();
    let mut before = lock(&node.balancing.here);
    // Arrivals since the scan are in `arrivals`. A concurrent arrival is already in `arrivals`, or
    // waits for the lock on `here`, which is taken above.
    for (pid, to, _) in lock(&node.balancing.arrivals).iter() {
        set_node(processes.iter_mut(), *pid, *to);
    }
    let threads = |process: &ProcessSnapshot| process.demand / 100.0;
    let now: BTreeMap<_, _> =
        processes.iter().filter(|process| process.at == me).map(|p| (p.pid, threads(p))).collect();
    let mut pending_changes = lock(&node.balancing.pending_changes);
    // With `guest_cpus` only the guests' share is advertised, and own processes are not part of it.
    let advertises_all = node.config.guest_cpus.is_none();
    pending_changes
        .set_local(processes.iter().filter(|one| one.at == me && advertises_all), &node.balancing.policy);
    for (pid, threads) in before.iter().filter(|(pid, _)| !now.contains_key(pid)) {
        pending_changes.record_departed(me, *pid, *threads, now_ms);
    }
    for process in
        processes.iter().filter(|p| p.at == me && !before.contains_key(&p.pid) && p.resident_s < 2.0)
    {
        pending_changes.record_cancelled(me, process.pid);
        if process.age_s > process.resident_s + 1.0 {
            pending_changes.record_returned(me, process.pid, threads(process), now_ms);
        }
    }
    *before = now;
}
