//! Memory ushering: before a node runs out of memory, a process leaves it (Barak and Braverman, 1998; ALG-27).
//!
//! It must begin early: while a process of S bytes leaves over a link of B bytes a second, the node goes on
//! filling, at up to B/2. So a node counts as full when its free memory will be below its reserve at the time
//! when the process would be gone.

use crate::decide::{Reason, Round};
use crate::process::Process;
use crate::prospect::{Mover, Passage, Prospect};
use std::collections::{BTreeMap, BTreeSet};
use tern_ids::{HomePid, NodeId};

/// Takes processes from nodes that will be full, until they will not be.
pub(crate) fn usher(round: &mut Round<'_>, processes: &BTreeMap<HomePid, &Process>) {
    let nodes: BTreeSet<NodeId> = processes.values().map(|process| process.at).collect();
    for node in nodes {
        let mut here: Vec<&Process> = processes
            .values()
            .copied()
            .filter(|process| process.at == node && may_leave(round, process))
            .collect();
        while let Some((index, prospect)) = next(round, node, &here) {
            let Some(mover) = Mover::new(&round.ground, here.remove(index)) else { break };
            round.begin(&mover, prospect, Reason::Memory);
        }
    }
}

/// Neither age nor residence counts here.
fn may_leave(round: &Round<'_>, process: &Process) -> bool {
    process.movable && !process.locked && process.rss > 0 && !round.state.is_moving(process.pid)
}

/// The process that leaves next, and where to; `None` if the node will not be full, or nobody can go.
///
/// Best fit, twice: the smallest process that is enough, since it is away soonest (or the largest, if none is);
/// and for it the node where least is left over, in powers of two, so that large holes stay for large processes.
fn next(round: &Round<'_>, id: NodeId, here: &[&Process]) -> Option<(usize, Prospect)> {
    let ground = &round.ground;
    let policy = ground.policy;
    let place = ground.cluster.place_of(id)?;
    let (node, stand) = (ground.cluster.nodes().get(place)?, ground.stands.get(place)?);
    if node.mem_total == 0 || !node.alive {
        return None;
    }
    let own_growth: f64 = here.iter().map(|process| process.growth as f64).sum();
    let filling = round.state.filling(id).max(own_growth);
    let swapping = node.mem_pressure > policy.full_pressure && ground.leaving(id) == 0;
    // What has been charged as left is counted as free, though it is still there.
    let mut candidates: Vec<(f64, usize, Mover<'_>, Passage)> = Vec::new();
    for (index, process) in here.iter().enumerate() {
        let Some(mover) = Mover::new(ground, process) else { continue };
        let passage = mover.passage(ground, node, node);
        let ahead = passage.duration_s + policy.usher_ahead_s;
        // The way out may be so long that the room is gone meanwhile: the slowest candidate says when.
        let lacks = stand.reserve + filling * ahead - stand.free;
        candidates.push((lacks, index, mover, passage));
    }
    let lacks = candidates.iter().map(|(lacks, ..)| *lacks).fold(f64::NEG_INFINITY, f64::max);
    if lacks <= 0.0 && !swapping {
        return None;
    }
    let wanted = lacks + filling * policy.usher_room_s;
    candidates.sort_by(|(.., one, _), (.., other, _)| {
        let key = |mover: &Mover<'_>| {
            let bytes = mover.process.rss as f64;
            if bytes >= wanted { (0, bytes) } else { (1, -bytes) }
        };
        let (one, other) = (key(one), key(other));
        one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
    });
    candidates.iter().find_map(|(_, index, mover, _)| Some((*index, target(round, mover)?)))
}

fn target(round: &Round<'_>, mover: &Mover<'_>) -> Option<Prospect> {
    let ground = &round.ground;
    let home = ground.cluster.me();
    let mut best: Option<(u32, f64, usize)> = None;
    for to in 0..ground.cluster.nodes().len() {
        if mover.must_not(ground, round.state, to).is_some() {
            continue;
        }
        let Some(room) = mover.room_left(ground, to).filter(|room| *room >= 0.0) else { continue };
        let Some(node) = ground.cluster.nodes().get(to) else { continue };
        if mover.process.hint == crate::Hint::Io && node.id != home {
            continue;
        }
        let pace = mover.prospect(ground, round.state, to)?.pace;
        let hole = room.max(1.0).log2() as u32;
        if best.is_none_or(|(least, fastest, _)| (hole, pace) < (least, fastest)) {
            best = Some((hole, pace, to));
        }
    }
    let mut prospect = mover.prospect(ground, round.state, best?.2)?;
    prospect.bar = None;
    Some(prospect)
}
