//! The balancer's reasons as sentences.

use crate::balance::query;
use crate::node::Node;
use tern_balancer::{Candidate, Decision, MoveReason, Obstacle, StayReason, Traffic};
use tern_control::{CandidateRow, FilesRow, Refusal, Reply, WhyReport};
use tern_ids::{HomePid, NodeId};

/// The report of `migrate --why`.
pub(crate) fn report(node: &Node, pid: HomePid) -> Result<Reply, Refusal> {
    let (process, why) = query::why(node, pid)?;
    let (last_ms, last) = why.last.map_or((0, None), |(ago, decision)| (ago, Some(decision_text(&decision))));
    let refused = node.balancing.refusal(pid).filter(|_| !process.movable);
    Ok(Reply::Why(Box::new(WhyReport {
        pid,
        at: why.at,
        demand: process.demand,
        memory: process.rss,
        calls_per_s: process.calls_per_s,
        files: process.files.iter().map(files).collect(),
        stays: refused.or_else(|| why.ineligible.as_ref().map(stay_text)),
        nodes: why.candidates.iter().map(row).collect(),
        last,
        last_ms,
    })))
}

fn files((node, traffic): (&NodeId, &Traffic)) -> FilesRow {
    let Traffic { calls_per_s, bytes_per_s } = *traffic;
    FilesRow { node: *node, calls_per_s, bytes_per_s }
}

fn row(candidate: &Candidate) -> CandidateRow {
    CandidateRow {
        node: candidate.node,
        pace: candidate.pace,
        transfer_s: candidate.cost.duration_s,
        frozen_s: candidate.cost.frozen_s,
        gain_s: candidate.gain_s,
        against: candidate.obstacle.map(|obstacle| obstacle_text(obstacle).into()),
    }
}

fn decision_text(decision: &Decision) -> String {
    match decision {
        Decision::Moved(next) => {
            let why = match next.reason {
                MoveReason::Faster => "it will finish earlier there",
                MoveReason::HomeCalls => "it makes many calls to its home",
                MoveReason::Home => "its home has a free CPU",
                MoveReason::Memory => "its node is running out of memory",
                MoveReason::Evicted => "its node asked for it to be moved away",
                MoveReason::Files => "it makes heavy use of files of that node",
            };
            format!("from {} to {}: {why}", next.from, next.to)
        }
        Decision::Stayed(stay) => stay_text(stay),
    }
}

fn stay_text(stay: &StayReason) -> String {
    match stay {
        StayReason::NotMovable => "it cannot be moved, or must not be".into(),
        StayReason::Locked => "it is locked".into(),
        StayReason::Moving => "it is being moved".into(),
        StayReason::NodeUnknown => "its node cannot be reached".into(),
        StayReason::Idle => "it hardly uses the CPU".into(),
        StayReason::TooYoung { cpu_s, needed_s } => {
            format!(
                "it has used {cpu_s:.1} s of a standard CPU, and must have used {needed_s:.1} s before it is moved"
            )
        }
        StayReason::TooRecent { here_s, needed_s } => {
            format!(
                "it has been here for {here_s:.1} s, and must stay {needed_s:.1} s before it is moved again"
            )
        }
        StayReason::NoBetter(None) => "no node is better".into(),
        StayReason::NoBetter(Some(obstacle)) => {
            format!("no node is better; for the best of them: {}", obstacle_text(*obstacle))
        }
        StayReason::Queued => "other processes are moved first".into(),
    }
}

fn obstacle_text(obstacle: Obstacle) -> &'static str {
    match obstacle {
        Obstacle::AlreadyThere => "it runs there",
        Obstacle::Dead => "that node is dead or cannot be reached",
        Obstacle::Stale => "the load of that node is out of date",
        Obstacle::NoGuests => "that node takes no guests",
        Obstacle::Forbidden => "it may not run there",
        Obstacle::FilesAtHome => "its files are at home",
        Obstacle::Overloaded => "that node refused it, as its load is higher than was known",
        Obstacle::NoMemory => "too little memory is free there",
        Obstacle::JustLeft => "it left that node a moment ago",
        Obstacle::RetryDelay => "the last attempt failed, and the next one comes later",
        Obstacle::NotFaster => "it would not be faster there, or not by a safe margin",
        Obstacle::NotWorthwhile => "the move costs more than it gains",
        Obstacle::LinkBusy => "enough processes are being moved there",
    }
}
