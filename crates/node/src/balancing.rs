//! The home's balancer: once a second it looks at its processes and at the cluster, and moves what gains by it.
//!
//! What decides is `tern_balancer`, which is pure; here it is told what there is, and what it says is done. A node that
//! is to get a process is asked first, and counts it in from its yes on, so that not everybody sends to the same.

use crate::eligible::Eligible;
use crate::habits::{Candidate, Habits, House};
use crate::message::{PeerReply, PeerRequest};
use crate::slots::lock;
use crate::state::Node;
use crate::traffic::Traffic;
use crate::{cluster, moving, owner, peers, processes};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use tern_balancer::{
    Answer, Bar, Move, Offer, Placement, Policy, Process, Prospect, Settling, State, Why, accepts, decide,
    explain, place,
};
use tern_control::{Advice, Destination, ProcessRow, Refusal, RefusalKind};
use tern_ids::{HomePid, NodeId};
use tern_load::{Processes, Which};

/// How often it decides.
const ROUND: Duration = Duration::from_secs(1);

/// How long a node may take to say whether a process may come.
const ANSWER: Duration = Duration::from_secs(2);

/// How often it decides again at once after a refusal, which has said what the node is really like.
const AGAIN: u32 = 3;

/// What the balancer of this node remembers.
#[derive(Debug, Default)]
pub(crate) struct Balancing {
    policy: Policy,
    state: Mutex<State>,
    processes: Mutex<Processes>,
    habits: Mutex<Habits>,
    pub(crate) traffic: Traffic,
    pub(crate) eligible: Eligible,
    /// As it was looked at last.
    candidates: Mutex<Vec<Candidate>>,
    settling: Mutex<Settling>,
    /// Guests of the last look.
    guests: Mutex<BTreeSet<(NodeId, HomePid)>>,
    /// Own processes that ran here then, and how many threads of each ran or waited.
    here: Mutex<BTreeMap<HomePid, f64>>,
}

/// Balances for ever.
pub(crate) fn run(node: &Arc<Node>) -> ! {
    loop {
        thread::sleep(ROUND);
        let rows = processes::of_shims(node);
        settle(node, &rows);
        look(node, &rows);
        set_off(node, AGAIN);
    }
}

/// Looks at what there is to move.
fn look(node: &Arc<Node>, rows: &[ProcessRow]) {
    let settings = node.settings.now();
    let now_ms = cluster::now_ms();
    let closed = cluster::closed(node);
    let house = House {
        me: node.me(),
        stay: settings.stay || settings.local_stay,
        closed: &closed,
        decay: settings.decay,
        now_ms,
    };
    let balancing = &node.balancing;
    let all = lock(&balancing.processes).scan(Which::All);
    let (guests, all) = apart(all);
    owner::look(node, &guests, &all, rows);
    node.selected.look(&all);
    node.magic.look(&all);
    let mut eligible = node.registry.descendants(&all);
    let started: HashSet<i32> = eligible.iter().map(|one| one.pid).collect();
    let others = balancing.eligible.among(&all, node.config.move_root);
    eligible.extend(others.into_iter().filter(|one| !started.contains(&one.pid)));
    let traffic = balancing.traffic.take();
    let candidates = lock(&balancing.habits).look(&all, eligible, rows, &traffic, &house);
    let processes: Vec<_> = candidates.iter().map(|candidate| candidate.process.clone()).collect();
    *lock(&balancing.candidates) = candidates;
    settle_own(node, &processes, now_ms);
}

/// Guests, and the node's own processes.
fn apart(all: Vec<tern_load::Process>) -> (Vec<tern_load::Process>, Vec<tern_load::Process>) {
    let parents: HashMap<i32, (i32, bool)> =
        all.iter().map(|one| (one.pid, (one.parent, one.command == "tern-shim"))).collect();
    let is_guest = |one: &tern_load::Process| {
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
    all.into_iter().partition(is_guest)
}

/// Decides about what was looked at last, and has it done.
fn set_off(node: &Arc<Node>, again: u32) {
    if !node.config.balance {
        return;
    }
    for next in decision(node) {
        let own = node.clone();
        let pid = next.pid;
        let go = move || carry_out(&own, &next, again);
        if let Err(error) = thread::Builder::new().name("move".into()).spawn(go) {
            tracing::warn!(%error, "no thread for a move");
            lock(&node.balancing.state).failed(pid, cluster::now_ms());
        }
    }
}

fn decision(node: &Node) -> Vec<Move> {
    let balancing = &node.balancing;
    let candidates = lock(&balancing.candidates);
    let processes: Vec<_> = candidates.iter().map(|candidate| candidate.process.clone()).collect();
    drop(candidates);
    let view = cluster::view(node);
    tracing::debug!(nodes = ?view.nodes().iter().map(|n| (n.id.0, n.load as u32, n.age_ms)).collect::<Vec<_>>(),
        processes = ?processes.iter().map(|p| (p.pid.0, p.at.0, p.demand as u32)).collect::<Vec<_>>(), "a look");
    let now_ms = cluster::now_ms();
    decide(&view, &processes, &mut lock(&balancing.state), &balancing.policy, now_ms, rand::random())
}

/// Does what was decided; decides `again` so many times at most if the target would rather not.
fn carry_out(node: &Arc<Node>, next: &Move, again: u32) {
    let Move { pid, from, to, reason, .. } = *next;
    let failed = |why: &dyn std::fmt::Display| {
        tracing::info!(%pid, %from, %to, ?reason, %why, "it was not moved");
        lock(&node.balancing.state).failed(pid, cluster::now_ms());
    };
    let Prospect { pace, pace_here, gain_s, .. } = next.prospect;
    let seen_load = next.offer.seen_load;
    tracing::info!(%pid, %from, %to, ?reason, pace_here, pace, gain_s, seen_load, "it is to move");
    let Some(start) = start_of(node, pid) else { return failed(&"it is gone") };
    if to != node.me() {
        match may_come(node, to, &next.offer) {
            Ok(Answer::Yes) => lock(&node.balancing.state).accepted(pid, cluster::now_ms()),
            Ok(Answer::No(refusal)) => {
                tracing::debug!(%pid, %from, %to, ?refusal, "it may not come");
                lock(&node.balancing.state).refused(pid, refusal, cluster::now_ms());
                if let Some(again) = again.checked_sub(1) {
                    set_off(node, again);
                }
                return;
            }
            Err(error) => return failed(&error),
        }
    }
    let destination = if to == node.me() { Destination::Home } else { Destination::Node(to) };
    let moved = moving::order(node, pid, start, destination);
    if to != node.me() {
        // One that ends or goes on at once is not seen there by anybody's look, and would be awaited.
        let settled = PeerRequest::Settled { pid, came: moved.is_ok() };
        let _counted_for_a_while = peers::ask_again(node, to, &settled, ANSWER);
    }
    match moved {
        Ok(_moved) => lock(&node.balancing.state).arrived(pid, cluster::now_ms()),
        Err(refusal) => failed(&refusal),
    }
}

/// A process was not moved, whoever wanted it: if it cannot be, that is shown, and it is left alone for a while.
pub(crate) fn heard(node: &Node, pid: HomePid, refusal: &Refusal) {
    if refusal.kind == RefusalKind::CannotMove {
        lock(&node.balancing.habits).refused(pid, refusal.message.clone(), cluster::now_ms());
    }
}

fn start_of(node: &Node, pid: HomePid) -> Option<u64> {
    let candidates = lock(&node.balancing.candidates);
    candidates.iter().find(|candidate| candidate.process.pid == pid).map(|candidate| candidate.start)
}

fn may_come(node: &Node, to: NodeId, offer: &Offer) -> Result<Answer, Refusal> {
    match peers::ask_again(node, to, &PeerRequest::MayCome(offer.clone()), ANSWER)? {
        PeerReply::Answer(answer) => Ok(answer),
        _ => {
            Err(Refusal::new(RefusalKind::Internal, format!("node {to} gave an answer to another question")))
        }
    }
}

/// Another home wants to send a process here.
pub(crate) fn asked(node: &Node, peer: NodeId, offer: Offer) -> Answer {
    // It speaks for its own processes only.
    let offer = Offer { home: peer, ..offer };
    let own = owner::for_guests(node, cluster::own(node));
    let own = tern_balancer::Node { takes_guests: node.takes_guests().is_ok(), ..own };
    let balancing = &node.balancing;
    let mut settling = lock(&balancing.settling);
    let now_ms = cluster::now_ms();
    let answer = accepts(&own, &settling, &offer, &balancing.policy, now_ms);
    if answer == Answer::Yes {
        settling.coming(&offer, now_ms);
    }
    answer
}

/// A process that was to come is here, or does not come.
pub(crate) fn settled(node: &Node, peer: NodeId, pid: HomePid, came: bool) {
    let mut settling = lock(&node.balancing.settling);
    if came { settling.came(peer, pid, cluster::now_ms()) } else { settling.cancelled(peer, pid) }
}

/// This node as it will be: what its own decisions go by.
pub(crate) fn expected(node: &Node, own: tern_balancer::Node) -> tern_balancer::Node {
    let settling = lock(&node.balancing.settling);
    let load = settling.expected_load(&own, &node.balancing.policy, cluster::now_ms());
    tern_balancer::Node { load, mem_free: settling.expected_free(&own), age_ms: 0, ..own }
}

/// Load and free memory that it tells others.
pub(crate) fn offered(node: &Node, own: &tern_balancer::Node) -> (f64, u64) {
    let (settling, policy) = (lock(&node.balancing.settling), &node.balancing.policy);
    (settling.expected_load(own, policy, cluster::now_ms()), settling.offered_free(own, policy))
}

/// Sees which guests have come and gone since the last look.
fn settle(node: &Node, rows: &[ProcessRow]) {
    let now: BTreeSet<_> = rows
        .iter()
        .filter(|row| row.state != "migrating")
        .filter_map(|row| Some((row.from?, row.pid)))
        .collect();
    // Before any lock is taken: there, others take the locks the other way round.
    let own = cluster::own(node);
    let mut before = lock(&node.balancing.guests);
    let mut settling = lock(&node.balancing.settling);
    let now_ms = cluster::now_ms();
    for (home, pid) in now.difference(&before) {
        settling.came(*home, *pid, now_ms);
    }
    for (home, pid) in before.difference(&now) {
        // It had kept about one CPU busy, or it would not have been here.
        settling.left(*home, *pid, 1.0, now_ms);
    }
    settling.sampled(&own, &node.balancing.policy, now_ms);
    *before = now;
}

/// The same of own processes: the sampled load follows slowly, and for a while still has those that have left, and lacks
/// those that have come home.
fn settle_own(node: &Node, processes: &[Process], now_ms: u64) {
    let me = node.me();
    let threads = |process: &Process| process.demand / 100.0;
    let now: BTreeMap<_, _> =
        processes.iter().filter(|process| process.at == me).map(|p| (p.pid, threads(p))).collect();
    let mut before = lock(&node.balancing.here);
    let mut settling = lock(&node.balancing.settling);
    for (pid, threads) in before.iter().filter(|(pid, _)| !now.contains_key(pid)) {
        settling.left(me, *pid, *threads, now_ms);
    }
    for process in
        processes.iter().filter(|p| p.at == me && !before.contains_key(&p.pid) && p.resident_s < 2.0)
    {
        settling.cancelled(me, process.pid);
        if process.age_s > process.resident_s + 1.0 {
            settling.came_home(me, process.pid, threads(process), now_ms);
        }
    }
    *before = now;
}

/// Why a process is where it is, and what it has to hope for elsewhere.
pub(crate) fn why(node: &Node, pid: HomePid) -> Result<(Process, Why), Refusal> {
    let candidates = lock(&node.balancing.candidates);
    let Some(candidate) = candidates.iter().find(|candidate| candidate.process.pid == pid) else {
        let said =
            format!("process {pid} is not balanced: mosrun has not started it, nor what it descends from");
        return Err(Refusal::new(RefusalKind::NotFound, said)
            .hint("mosrun starts those that are; balance_users in ternd.toml names others"));
    };
    let process = candidate.process.clone();
    drop(candidates);
    let view = cluster::view(node);
    let state = lock(&node.balancing.state);
    let why = explain(&view, &process, &state, &node.balancing.policy, cluster::now_ms());
    Ok((process, why))
}

/// Why it could not be moved when that was tried last, if it was.
pub(crate) fn refusal(node: &Node, pid: HomePid) -> Option<String> {
    lock(&node.balancing.habits).reason(pid).map(str::to_owned)
}

/// Whether it is one that this node's balancer looks after.
pub(crate) fn balances(node: &Node, pid: HomePid) -> bool {
    lock(&node.balancing.candidates).iter().any(|candidate| candidate.process.pid == pid)
}

/// Where a process should be rather than where it is; `None` if nowhere.
///
/// # Errors
/// If it is none that is balanced.
pub(crate) fn better(node: &Node, pid: HomePid) -> Result<Option<NodeId>, Refusal> {
    let (_, why) = why(node, pid)?;
    Ok(why.best().map(|prospect| prospect.node).filter(|to| *to != why.at))
}

/// The best node but its own for a process that shall go, though it may not gain by it; `None` if none may take it.
///
/// # Errors
/// If it is none that is balanced.
pub(crate) fn elsewhere(node: &Node, pid: HomePid) -> Result<Option<NodeId>, Refusal> {
    let (_, why) = why(node, pid)?;
    let may = |bar| matches!(bar, None | Some(Bar::NotFaster | Bar::NotWorth | Bar::JustLeft));
    // The fastest is the first.
    let there = why.prospects.iter().filter(|prospect| prospect.node != why.at && may(prospect.bar));
    Ok(there.map(|prospect| prospect.node).next())
}

/// The best node for a program that starts, and charges it with it.
pub(crate) fn best(node: &Node, advice: &Advice) -> Option<NodeId> {
    let placement = Placement {
        claim: advice.memory.unwrap_or(0),
        allowed: advice.only.as_ref().map(|only| only.iter().copied().collect()),
        forbidden: advice.not.iter().copied().collect(),
        ..Placement::default()
    };
    let view = cluster::view(node);
    let balancing = &node.balancing;
    let mut state = lock(&balancing.state);
    place(&view, &placement, &mut state, &balancing.policy, cluster::now_ms(), rand::random())
}

/// Nodes whose administrator lets no process leave.
pub(crate) type Closed = HashSet<NodeId>;
