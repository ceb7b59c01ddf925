//! The balancer's reasons in words.

use crate::balancing;
use crate::state::Node;
use tern_balancer::{Bar, Prospect, Reason, Stay, Traffic, Verdict};
use tern_control::{FilesRow, ProspectRow, Refusal, Reply, WhyReport};
use tern_ids::{HomePid, NodeId};

/// `migrate --why`.
pub(crate) fn report(node: &Node, pid: HomePid) -> Result<Reply, Refusal> {
    let (process, why) = balancing::why(node, pid)?;
    let (last_ms, last) = why.last.map_or((0, None), |(ago, verdict)| (ago, Some(said(&verdict))));
    let refused = balancing::refusal(node, pid).filter(|_| !process.movable);
    Ok(Reply::Why(Box::new(WhyReport {
        pid,
        at: why.at,
        demand: process.demand,
        memory: process.rss,
        calls_per_s: process.calls_per_s,
        files: process.files.iter().map(files).collect(),
        stays: refused.or_else(|| why.stay.as_ref().map(stays)),
        nodes: why.prospects.iter().map(row).collect(),
        last,
        last_ms,
    })))
}

fn files((node, traffic): (&NodeId, &Traffic)) -> FilesRow {
    let Traffic { calls_per_s, bytes_per_s } = *traffic;
    FilesRow { node: *node, calls_per_s, bytes_per_s }
}

fn row(prospect: &Prospect) -> ProspectRow {
    ProspectRow {
        node: prospect.node,
        pace: prospect.pace,
        way_s: prospect.passage.duration_s,
        frozen_s: prospect.passage.frozen_s,
        gain_s: prospect.gain_s,
        against: prospect.bar.map(|bar| against(bar).into()),
    }
}

fn said(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Moved(next) => {
            let why = match next.reason {
                Reason::Faster => "it will be done earlier there",
                Reason::Talks => "it calls home so much",
                Reason::Home => "home has a CPU to spare",
                Reason::Memory => "its node is running out of memory",
                Reason::Evicted => "its node wants it gone",
                Reason::Files => "it works so much on files of that node",
            };
            format!("from {} to {}: {why}", next.from, next.to)
        }
        Verdict::Stayed(stay) => stays(stay),
    }
}

fn stays(stay: &Stay) -> String {
    match stay {
        Stay::NotMovable => "it cannot be moved, or shall not".into(),
        Stay::Locked => "it is locked".into(),
        Stay::UnderWay => "it is on its way".into(),
        Stay::OutOfSight => "its node is out of sight".into(),
        Stay::Idle => "it hardly uses a CPU".into(),
        Stay::Young { cpu_s, needed_s } => {
            format!("it has used {cpu_s:.1} s of a standard CPU, and is looked at from {needed_s:.1} s on")
        }
        Stay::Resident { here_s, needed_s } => {
            format!("it has been here for {here_s:.1} s, and is looked at from {needed_s:.1} s on")
        }
        Stay::NoBetter(None) => "no node is better".into(),
        Stay::NoBetter(Some(bar)) => format!("no node is better: of the best of them, {}", against(*bar)),
        Stay::InTurn => "others move now; its turn comes".into(),
    }
}

fn against(bar: Bar) -> &'static str {
    match bar {
        Bar::Here => "it is there",
        Bar::Dead => "that node is dead, or out of reach",
        Bar::OldNews => "what is known of that node is too old",
        Bar::NoGuests => "that node takes no guests",
        Bar::Forbidden => "it may not run there",
        Bar::FilesAtHome => "its files are at home",
        Bar::Crowded => "that node has more to do than was thought, and has refused it",
        Bar::NoMemory => "too little memory is free there",
        Bar::JustLeft => "it left that node just now",
        Bar::FailedBefore => "the last try failed, and the next one waits",
        Bar::NotFaster => "it would not be faster there, or not by enough to be sure",
        Bar::NotWorth => "the way costs more than is gained",
        Bar::WayBusy => "enough processes are on their way there",
    }
}
