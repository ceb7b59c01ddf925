//! The home's balancer: once a second it looks at its processes and at the cluster, and moves what gains by it.
//!
//! Between two looks it decides again when something has changed that it knows by itself: a process of its own has arrived,
//! so that the way is free for the next; one has ended, here or elsewhere ([`crate::watch`]); one that waits for its turn
//! here has become old enough. These decisions look at nothing anew but what has happened: who is not where he was, and
//! who is no more.
//!
//! What decides is `tern_balancer`, which is pure; here it is told what there is, and what it says is done. A node that
//! is to get a process is asked first, and counts it in from its yes on, so that not everybody sends to the same.

use crate::eligible::Eligible;
use crate::habits::{Candidate, Habits, House};
use crate::message::{PeerReply, PeerRequest};
use crate::slots::lock;
use crate::state::Node;
use crate::traffic::Traffic;
use crate::watch::Watch;
use crate::{cluster, moving, owner, peers, processes};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tern_balancer::{
    Answer, Bar, Move, Offer, Placement, Policy, Process, Prospect, Settling, State, Why, accepts, decide,
    explain, place,
};
use tern_control::{Advice, Destination, ProcessRow, Refusal, RefusalKind};
use tern_ids::{HomePid, NodeId};
use tern_load::{Processes, Which};

/// How often it decides.
const ROUND: Duration = Duration::from_secs(1);

/// After so long what a decision goes by may be looked at anew, if one that is too young will not be so any more; so many
/// times before a look that comes in its time.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
const MOST_EARLY: u32 = 2;

/// Between two decisions because of ends.
const APART: Duration = Duration::from_millis(50);

/// CPU seconds that a process must have used for its end to be waited for. Most processes end before that, and a node that
/// makes many of them would decide all the time.
const WATCHED_FROM_S: f64 = 0.5;

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
    /// As it was looked at last. Whoever needs both locks takes that of `state` first.
    candidates: Mutex<Vec<Candidate>>,
    /// Who has arrived where since then, and when.
    landed: Mutex<Vec<(HomePid, NodeId, u64)>>,
    settling: Mutex<Settling>,
    /// Guests of the last look.
    guests: Mutex<BTreeSet<(NodeId, HomePid)>>,
    /// Own processes that ran here then, and how many threads of each ran or waited.
    here: Mutex<BTreeMap<HomePid, f64>>,
}

/// Balances for ever.
pub(crate) fn run(node: &Arc<Node>) -> ! {
    let mut watch = Watch::default();
    let mut next = Instant::now() + ROUND;
    // Looks since the last that came in its time.
    let mut early = 0;
    loop {
        let ended = watch.wait(next);
        if !ended.is_empty() {
            over(node, &ended);
            // Those that end together are seen together the next time.
            thread::sleep(APART);
        }
        if Instant::now() < next {
            continue;
        }
        let asked_ms = cluster::now_ms();
        let rows = processes::of_shims(node);
        settle(node, &rows);
        look(node, &mut watch, &rows, asked_ms);
        set_off(node, AGAIN);
        let ripe = lock(&node.balancing.state).ripe_s().filter(|_| early < MOST_EARLY);
        let ripe = ripe.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        // What it has used is counted in ticks, and it may be slower than it was.
        let ripe = ripe.map(|ripe| ripe + ripe / 8 + LOOK_AGAIN / 4).filter(|ripe| *ripe < ROUND);
        early = if ripe.is_some() { early + 1 } else { 0 };
        next = Instant::now() + ripe.map_or(ROUND, |ripe| ripe.max(LOOK_AGAIN));
    }
}

/// These of the own have ended, wherever they ran; decides again when those nodes know it.
fn over(node: &Arc<Node>, ended: &[i32]) {
    let mut away = Vec::new();
    let mut here = Vec::new();
    lock(&node.balancing.candidates).retain(|Candidate { process, .. }| {
        let gone = ended.contains(&process.pid.0);
        if gone && process.at != node.me() {
            away.push((process.pid, process.at));
        } else if gone {
            here.push(process.pid);
        }
        !gone
    });
    here.into_iter().for_each(|pid| left(node, pid));
    tracing::debug!(?ended, ?away, "some have ended");
    let own = node.clone();
    let go = move || {
        for (pid, at) in away {
            tell_gone(&own, at, pid);
        }
        set_off(&own, AGAIN);
    };
    if let Err(error) = thread::Builder::new().name("ended".into()).spawn(go) {
        tracing::warn!(%error, "no thread to decide again");
    }
}

/// Looks at what there is to move; the rows were asked for then.
fn look(node: &Arc<Node>, watch: &mut Watch, rows: &[ProcessRow], asked_ms: u64) {
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
    let guests = owner::held_by("tern-shim", &all);
    let (guests, all): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| guests.contains(&one.pid));
    owner::look(node, &guests, &all, rows);
    node.selected.look(&all);
    node.magic.look(&all);
    let mut eligible = node.registry.descendants(&all);
    let started: HashSet<i32> = eligible.iter().map(|one| one.pid).collect();
    let others = balancing.eligible.among(&all, node.config.move_root);
    eligible.extend(others.into_iter().filter(|one| !started.contains(&one.pid)));
    let traffic = balancing.traffic.take();
    let mut candidates = lock(&balancing.habits).look(&all, eligible, rows, &traffic, &house);
    let counts = candidates.iter().filter(|one| one.process.cpu_s >= WATCHED_FROM_S);
    watch.follow(counts.map(|one| (one.process.pid.0, one.start)));
    {
        let mut now = lock(&balancing.candidates);
        // What the shims have said may be older than the last arrivals.
        let mut landed = lock(&balancing.landed);
        landed.retain(|(.., at_ms)| *at_ms >= asked_ms);
        for (pid, to, _) in landed.iter() {
            is_at(candidates.iter_mut().map(|one| &mut one.process), *pid, *to);
        }
        now.clone_from(&candidates);
    }
    settle_own(node, candidates.into_iter().map(|candidate| candidate.process).collect(), now_ms);
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
    // All as of one time, or an arrival meanwhile would be a process that is where it has left (see `landed`).
    let mut state = lock(&balancing.state);
    let view = cluster::view(node);
    let candidates = lock(&balancing.candidates);
    let processes: Vec<_> = candidates.iter().map(|candidate| candidate.process.clone()).collect();
    drop(candidates);
    tracing::debug!(nodes = ?view.nodes().iter().map(|n| (n.id.0, n.load as u32, n.age_ms)).collect::<Vec<_>>(),
        processes = ?processes.iter().map(|p| (p.pid.0, p.at.0, p.demand as u32)).collect::<Vec<_>>(), "a look");
    let now_ms = cluster::now_ms();
    decide(&view, &processes, &mut state, &balancing.policy, now_ms, rand::random())
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
        Ok(_moved) => {
            if from != node.me() {
                tell_gone(node, from, pid);
            }
            landed(node, pid, from, to);
            // The way is free for the next one.
            set_off(node, AGAIN);
        }
        Err(refusal) => failed(&refusal),
    }
}

/// Tells a node that a process of this home does not run there any more. It would see that by itself within a second.
fn tell_gone(node: &Node, from: NodeId, pid: HomePid) {
    let gone = PeerRequest::Settled { pid, came: false };
    let _seen_there_soon = peers::ask_again(node, from, &gone, ANSWER);
}

/// A process has arrived: what is decided before the next look goes by it.
///
/// This node's own load first, and then where the process is: whoever decides between the two counts it out, or in, twice,
/// which at most keeps somebody where he is. The other way round it would be in both loads, and another one would leave.
fn landed(node: &Node, pid: HomePid, from: NodeId, to: NodeId) {
    let (balancing, now_ms) = (&node.balancing, cluster::now_ms());
    lock(&balancing.landed).push((pid, to, now_ms));
    if from == node.me() {
        left(node, pid);
    }
    let candidates = lock(&balancing.candidates);
    let threads = candidates.iter().find(|one| one.process.pid == pid).map(|one| one.process.demand / 100.0);
    drop(candidates);
    if let Some(threads) = threads.filter(|_| to == node.me()) {
        lock(&balancing.here).insert(pid, threads);
        lock(&balancing.settling).came_home(node.me(), pid, threads, now_ms);
    }
    let mut state = lock(&balancing.state);
    state.arrived(pid, now_ms);
    is_at(lock(&balancing.candidates).iter_mut().map(|one| &mut one.process), pid, to);
}

fn is_at<'a>(mut processes: impl Iterator<Item = &'a mut Process>, pid: HomePid, to: NodeId) {
    let found = processes.find(|process| process.pid == pid);
    if let Some(process) = found.filter(|process| process.at != to) {
        (process.at, process.resident_s) = (to, 0.0);
    }
}

/// An own process does not run here any more: the sampled load has it still.
fn left(node: &Node, pid: HomePid) {
    let Some(threads) = lock(&node.balancing.here).remove(&pid) else { return };
    let mut settling = lock(&node.balancing.settling);
    settling.left(node.me(), pid, threads, cluster::now_ms());
    settling.own_left(threads);
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

/// A process that was to come is here, or does not come, or was here and is no more.
pub(crate) fn settled(node: &Node, peer: NodeId, pid: HomePid, came: bool) {
    let was_here = !came && lock(&node.balancing.guests).remove(&(peer, pid));
    let mut settling = lock(&node.balancing.settling);
    match (came, was_here) {
        (true, _) => settling.came(peer, pid, cluster::now_ms()),
        (false, true) => settling.left(peer, pid, 1.0, cluster::now_ms()),
        (false, false) => settling.cancelled(peer, pid),
    }
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
        tracing::debug!(%home, %pid, "a guest is gone");
        // It had kept about one CPU busy, or it would not have been here.
        settling.left(*home, *pid, 1.0, now_ms);
    }
    settling.sampled(&own, &node.balancing.policy, now_ms);
    *before = now;
}

/// The same of own processes: the sampled load follows slowly, and for a while still has those that have left, and lacks
/// those that have come home.
fn settle_own(node: &Node, mut processes: Vec<Process>, now_ms: u64) {
    let me = node.me();
    let mut before = lock(&node.balancing.here);
    // Who has arrived since these were looked at is noted, and waits for that lock or has had it.
    for (pid, to, _) in lock(&node.balancing.landed).iter() {
        is_at(processes.iter_mut(), *pid, *to);
    }
    let threads = |process: &Process| process.demand / 100.0;
    let now: BTreeMap<_, _> =
        processes.iter().filter(|process| process.at == me).map(|p| (p.pid, threads(p))).collect();
    let mut settling = lock(&node.balancing.settling);
    // A node that gives its guests a part tells of that part, where its own processes are not.
    let tells_all = node.config.guest_cpus.is_none();
    settling.own(processes.iter().filter(|one| one.at == me && tells_all), &node.balancing.policy);
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
