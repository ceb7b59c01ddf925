//! Memory ushering: before a node runs out of memory, a process leaves it (Barak and Braverman, 1998; ALG-27).
//!
//! It must begin early: while a process of S bytes leaves over a link of B bytes a second, the node goes on
//! filling, at up to B/2. So a node counts as full when its free memory will be below its reserve at the time
//! when the process would be gone.

use crate::decide::{Reason, Round};
use crate::process::{Hint, Process};
use crate::prospect::{Mover, Prospect};
use crate::seed::Chance;
use std::collections::{BTreeMap, BTreeSet};
use tern_ids::{HomePid, NodeId};

/// Nobody needs so many seconds to leave.
const FAR_S: f64 = 600.0;

/// Whose memory is worth a move in any case, in bytes.
const LEAST: f64 = 16.0 * (1 << 20) as f64;
/// Of smaller ones at most so many may be needed.
const MOST_TO_HELP: f64 = 64.0;
/// The way takes so much longer if somebody else is on the way to the same node.
const SLOWER: f64 = 2.0;
/// Paces that are so near to each other are alike where memory decides.
const ALIKE: f64 = 1.25;

/// Takes processes from nodes that will be full, until they will not be.
pub(crate) fn usher(round: &mut Round<'_>, processes: &BTreeMap<HomePid, &Process>) {
    let nodes: BTreeSet<NodeId> = processes.values().map(|process| process.at).collect();
    for node in nodes {
        let mut here: Vec<&Process> = processes
            .values()
            .copied()
            .filter(|process| process.at == node && may_leave(round, process))
            .collect();
        loop {
            let (fills_up, leaves) = next(round, node, &here);
            if fills_up {
                round.ground.filling_up.insert(node);
            }
            let Some((index, prospect)) = leaves else { break };
            let Some(mover) = Mover::new(&round.ground, here.remove(index)) else { break };
            round.begin(&mover, prospect, Reason::Memory);
        }
    }
}

/// Neither age nor residence counts here.
fn may_leave(round: &Round<'_>, process: &Process) -> bool {
    process.movable && !process.locked && process.rss > 0 && !round.state.is_moving(process.pid)
}

/// Whether the node will be full, and if so the process that leaves next, and where to, if one can.
///
/// Best fit, twice: the smallest process that is enough, since it is away soonest (or the largest, if none is);
/// and for it the node where least is left over, in powers of two, so that large holes stay for large processes
/// (see `target` for those that grow).
///
/// One after the other: sent together they would share the link, and the first would be gone later.
fn next(round: &Round<'_>, id: NodeId, here: &[&Process]) -> (bool, Option<(usize, Prospect)>) {
    let ground = &round.ground;
    let policy = ground.policy;
    let place = ground.cluster.place_of(id);
    let known = place.and_then(|place| ground.cluster.nodes().get(place).zip(ground.stands.get(place)));
    let Some((node, stand)) = known.filter(|(node, _)| node.mem_total > 0 && node.alive) else {
        return (false, None);
    };
    let filling = stand.filling.max(here.iter().map(|process| process.growth as f64).sum());
    let swapping = node.mem_pressure > policy.full_pressure && ground.leaving(id) == 0;
    // Far from it; what is below is worth its price only near the edge.
    if stand.free > stand.reserve + filling * FAR_S && !swapping {
        return (false, None);
    }
    // What has been charged as left is counted as free, though it is still there.
    let mut candidates: Vec<(usize, &Process, Prospect)> = Vec::new();
    let mut lacks = f64::NEG_INFINITY;
    let mut chance = round.chance;
    for (index, process) in here.iter().enumerate() {
        let Some(prospect) = Mover::new(ground, process).and_then(|mover| target(round, &mover, &mut chance))
        else {
            continue;
        };
        // The way out may be so long that the room is gone meanwhile: the slowest candidate says when.
        let ahead = prospect.passage.duration_s * SLOWER + policy.usher_ahead_s;
        lacks = lacks.max(stand.reserve + filling * ahead - stand.free);
        candidates.push((index, *process, prospect));
    }
    if lacks <= 0.0 && !swapping {
        return (false, None);
    }
    // The need may be somebody else's, and what is next to nothing does not help.
    candidates.retain(|(_, process, _)| {
        let bytes = process.rss as f64 + process.growth as f64 * policy.usher_ahead_s;
        bytes >= LEAST || bytes * MOST_TO_HELP >= lacks
    });
    let busy = candidates.iter().map(|(.., prospect)| prospect.passage.duration_s).fold(0.0, f64::max) > 1.0
        && ground.leaving_bytes(id) > 0.0;
    if busy {
        return (true, None);
    }
    let wanted = lacks + filling * policy.usher_room_s;
    let order = |process: &Process| {
        let bytes = process.rss as f64;
        if bytes >= wanted { (0, bytes) } else { (1, -bytes) }
    };
    let first = candidates.into_iter().min_by(|(_, one, _), (_, other, _)| {
        let (one, other) = (order(one), order(other));
        one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
    });
    (true, first.map(|(index, _, prospect)| (index, prospect)))
}

/// Where a process has room. Best fit is for those that do not grow; for the others, the more room the better, or
/// they would have to leave again soon. A node that others of this home go to now comes last: its link is busy. Among nodes that are alike
/// chance decides, so that homes in the same need do not all choose the same.
fn target(round: &Round<'_>, mover: &Mover<'_>, chance: &mut Chance) -> Option<Prospect> {
    let ground = &round.ground;
    let policy = ground.policy;
    let mut open: Vec<((bool, u32, f64), Prospect)> = Vec::new();
    for to in 0..ground.cluster.nodes().len() {
        if mover.must_not(ground, round.state, to).is_some() {
            continue;
        }
        let Some(room) = mover.room_left(ground, to, policy.usher_room_s).filter(|room| *room >= 0.0) else {
            continue;
        };
        let prospect = mover.prospect(ground, round.state, to)?;
        if mover.process.hint == Hint::Io && prospect.node != ground.cluster.me() {
            continue;
        }
        let calm = mover.room_left(ground, to, policy.calm_room_s).filter(|room| *room >= 0.0);
        let size = room.max(1.0).log2().floor();
        let hole = if calm.is_some() && mover.process.growth == 0 { size } else { -size };
        let key = (calm.is_none(), ground.coming(prospect.node), hole);
        open.push((key, Prospect { bar: None, ..prospect }));
    }
    let first =
        open.iter().map(|(key, _)| *key).reduce(|one, other| if other < one { other } else { one })?;
    open.retain(|(key, _)| *key == first);
    let fastest = open.iter().map(|(_, prospect)| prospect.pace).fold(f64::INFINITY, f64::min);
    open.retain(|(_, prospect)| prospect.pace <= fastest * ALIKE);
    let index = chance.below(open.len());
    open.into_iter().nth(index).map(|(_, prospect)| prospect)
}
