//! Memory ushering: before a node runs out of memory, a process leaves it (Barak and Braverman,
//! 1998).
//!
//! Ushering must begin early: while a process of S bytes leaves over a link of B bytes a second,
//! the node keeps filling, at up to B/2. So a node counts as full when its free memory will be
//! below its reserve by the time the process has left.

use crate::candidate::{Candidate, Mover};
use crate::decide::{MoveReason, Round};
use crate::process::{Hint, ProcessSnapshot};
use crate::rng::Rng;
use std::collections::{BTreeMap, BTreeSet};
use tern_ids::{HomePid, NodeId};

/// An upper bound of the seconds that a process takes to leave.
const MAX_LEAVE_S: f64 = 600.0;

/// A process with at least this many bytes is always worth moving.
const MIN_LEAVER_BYTES: f64 = 16.0 * (1 << 20) as f64;
/// Smaller processes are moved only if at most this many of them cover the need.
const MAX_SMALL_LEAVERS: f64 = 64.0;
/// How much longer a move takes if another process moves to the same node.
const SHARED_LINK_FACTOR: f64 = 2.0;
/// Paces within this factor of each other are equivalent where memory decides.
const EQUIVALENT_PACE_RATIO: f64 = 1.25;

/// Moves processes away from nodes that will be full, until that is averted.
pub(crate) fn usher(round: &mut Round<'_>, processes: &BTreeMap<HomePid, &ProcessSnapshot>) {
    let nodes: BTreeSet<NodeId> = processes.values().map(|process| process.at).collect();
    for node in nodes {
        let mut here: Vec<&ProcessSnapshot> = processes
            .values()
            .copied()
            .filter(|process| process.at == node && can_leave(round, process))
            .collect();
        loop {
            let (fills_up, leaver) = next_leaver(round, node, &here);
            if fills_up {
                round.view.filling_up.insert(node);
            }
            let Some((index, candidate)) = leaver else { break };
            let Some(mover) = Mover::new(&round.view, here.remove(index)) else { break };
            round.start_move(&mover, candidate, MoveReason::Memory);
        }
    }
}

/// Whether a process may be moved off a node that will be full, however little CPU time it has used
/// and however recently it has arrived.
fn can_leave(round: &Round<'_>, process: &ProcessSnapshot) -> bool {
    process.movable && !process.locked && process.rss > 0 && !round.state.is_moving(process.pid)
}

/// Whether the node will be full, and if so which process leaves next and where to, if any can.
///
/// Best fit is applied twice. The process is the smallest that is large enough, since it is gone
/// soonest (or the largest, if none is large enough). Its target is the node where least memory is
/// left over, in powers of two, so that large holes stay for large processes (see `choose_target`
/// for growing ones).
///
/// Processes leave one after the other: sent together they would share the link, and the first
/// would finish later.
fn next_leaver(
    round: &Round<'_>,
    id: NodeId,
    here: &[&ProcessSnapshot],
) -> (bool, Option<(usize, Candidate)>) {
    let view = &round.view;
    let policy = view.policy;
    let index = view.cluster.index_of(id);
    let known = index.and_then(|index| view.cluster.nodes().get(index).zip(view.nodes.get(index)));
    let Some((node, effective)) = known.filter(|(node, _)| node.mem_total > 0 && node.alive) else {
        return (false, None);
    };
    let fill_rate = effective.fill_rate.max(here.iter().map(|process| process.growth as f64).sum());
    let swapping = node.mem_pressure > policy.max_pressure && view.moves_from(id) == 0;
    // Far from full. The checks below cost more and matter only near the limit.
    if effective.free > effective.reserve + fill_rate * MAX_LEAVE_S && !swapping {
        return (false, None);
    }
    // `effective.free` includes the memory of processes that are charged as leaving, though they
    // are still there.
    let mut candidates: Vec<(usize, &ProcessSnapshot, Candidate)> = Vec::new();
    let mut shortfall = f64::NEG_INFINITY;
    let mut rng = round.rng;
    for (index, process) in here.iter().enumerate() {
        let Some(candidate) =
            Mover::new(view, process).and_then(|mover| choose_target(round, &mover, &mut rng))
        else {
            continue;
        };
        // The move may take so long that the memory is used up meanwhile: the slowest candidate
        // sets the deadline.
        let deadline_s = candidate.cost.duration_s * SHARED_LINK_FACTOR + policy.usher_ahead_s;
        shortfall = shortfall.max(effective.reserve + fill_rate * deadline_s - effective.free);
        candidates.push((index, *process, candidate));
    }
    if shortfall <= 0.0 && !swapping {
        return (false, None);
    }
    // Processes of other homes may be the cause; moving a tiny process does not help.
    candidates.retain(|(_, process, _)| {
        let bytes = process.rss as f64 + process.growth as f64 * policy.usher_ahead_s;
        bytes >= MIN_LEAVER_BYTES || bytes * MAX_SMALL_LEAVERS >= shortfall
    });
    let is_link_busy = candidates.iter().map(|(.., candidate)| candidate.cost.duration_s).fold(0.0, f64::max)
        > 1.0
        && view.leaving_bytes(id) > 0.0;
    if is_link_busy {
        return (true, None);
    }
    let wanted = shortfall + fill_rate * policy.usher_growth_s;
    let order = |process: &ProcessSnapshot| {
        let bytes = process.rss as f64;
        if bytes >= wanted { (0, bytes) } else { (1, -bytes) }
    };
    let first = candidates.into_iter().min_by(|(_, one, _), (_, other, _)| {
        let (one, other) = (order(one), order(other));
        one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
    });
    (true, first.map(|(index, _, candidate)| (index, candidate)))
}

/// Chooses a node with room for a process. Processes that do not grow are placed by best fit.
/// Growing processes go to the node with the most room, because otherwise they would have to leave
/// again soon. A node to which other processes of this home are moving comes last, because its link
/// is busy. Among equivalent nodes the choice is random, so that homes with the same need do not
/// all choose the same node.
fn choose_target(round: &Round<'_>, mover: &Mover<'_>, rng: &mut Rng) -> Option<Candidate> {
    let view = &round.view;
    let policy = view.policy;
    let mut open: Vec<((bool, u32, f64), Candidate)> = Vec::new();
    for to in 0..view.cluster.nodes().len() {
        if mover.hard_obstacle(view, round.state, to).is_some() {
            continue;
        }
        let Some(room) = mover.memory_left(view, to, policy.usher_growth_s).filter(|room| *room >= 0.0)
        else {
            continue;
        };
        let candidate = mover.candidate(view, round.state, to)?;
        if mover.process.hint == Hint::Io && candidate.node != view.cluster.me() {
            continue;
        }
        let ordinary_room = mover.memory_left(view, to, policy.ordinary_growth_s).filter(|room| *room >= 0.0);
        let size = room.max(1.0).log2().floor();
        let fit_key = if ordinary_room.is_some() && mover.process.growth == 0 { size } else { -size };
        let key = (ordinary_room.is_none(), view.moves_to(candidate.node), fit_key);
        open.push((key, Candidate { obstacle: None, ..candidate }));
    }
    let first =
        open.iter().map(|(key, _)| *key).reduce(|one, other| if other < one { other } else { one })?;
    open.retain(|(key, _)| *key == first);
    let fastest = open.iter().map(|(_, candidate)| candidate.pace).fold(f64::INFINITY, f64::min);
    open.retain(|(_, candidate)| candidate.pace <= fastest * EQUIVALENT_PACE_RATIO);
    let index = rng.below(open.len());
    open.into_iter().nth(index).map(|(_, candidate)| candidate)
}
