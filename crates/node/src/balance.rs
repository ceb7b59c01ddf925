//! The balancer of this home: once a second it scans its processes, views the cluster, and moves
//! the processes that gain from a move.
//!
//! Between two rounds it decides again on three events. A move of its own has completed, so that
//! the next may start. A target has refused a process, and has sent its actual load. A process of
//! its own has ended, here or elsewhere ([`exit_watch`]). Such a decision uses the last scan,
//! updated with the processes that have moved or ended since. The next round comes early if a
//! process becomes old enough to be moved before that round is due.
//!
//! The decisions are made by `tern_balancer`, which is pure; this module supplies its input and
//! carries out its output. Before a move the target is asked. If it accepts, it includes the
//! process in its load from then on, so that several homes do not all send processes to the same
//! node.

pub(crate) mod accounting;
pub(crate) mod eligible;
pub(crate) mod exit_watch;
pub(crate) mod file_traffic;
pub(crate) mod owner;
pub(crate) mod owner_state;
pub(crate) mod profile;
pub(crate) mod query;
pub(crate) mod state;

use crate::cluster::view;
use crate::migrate;
use crate::node::Node;
use crate::os::clock::boot_ms;
use crate::os::sync::lock;
use crate::peer::client;
use crate::peer::message::{PeerReply, PeerRequest};
use crate::process::process_list;
use accounting::{record_arrival, record_departure, set_node, update_guests, update_own_processes};
use exit_watch::ExitWatch;
use profile::{BalancedProcess, HomeContext};
use std::collections::HashSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tern_balancer::{Candidate, Move, MoveOffer, OfferReply, decide};
use tern_control::{Destination, ProcessRow, Refusal, RefusalKind};
use tern_ids::{HomePid, NodeId};
use tern_load::ScanScope;

/// Interval between two rounds.
const ROUND_INTERVAL: Duration = Duration::from_secs(1);

/// Minimum interval between two rounds, used when a process becomes old enough before the next
/// round is due; and the maximum number of such early rounds between two regular ones.
const EARLY_ROUND_INTERVAL: Duration = Duration::from_millis(100);
const MAX_EARLY_ROUNDS: u32 = 2;

/// Pause after processes have ended, so that ends in quick succession cause one decision.
const EXIT_DECISION_DELAY: Duration = Duration::from_millis(50);

/// CPU seconds that a process must have used before its end is waited for. Most processes end
/// earlier, and a node that starts many short ones would decide all the time.
const MIN_WATCHED_CPU_S: f64 = 0.5;

/// Timeout of an offer and of the notices about it.
const OFFER_TIMEOUT: Duration = Duration::from_secs(2);

/// How many times the balancer decides again at once after a target has refused a process. The
/// refusal contains the target's actual load.
const MAX_RETRIES: u32 = 3;

/// Balances; never returns.
pub(crate) fn run(node: &Arc<Node>) -> ! {
    let mut watch = ExitWatch::default();
    let mut next = Instant::now() + ROUND_INTERVAL;
    // Number of early rounds since the last regular one.
    let mut early = 0;
    loop {
        let ended = watch.wait(next);
        if !ended.is_empty() {
            handle_exits(node, &ended);
            // Further processes that end meanwhile are handled in the next iteration.
            thread::sleep(EXIT_DECISION_DELAY);
        }
        if Instant::now() < next {
            continue;
        }
        let asked_ms = boot_ms();
        let rows = process_list::from_shims(node);
        update_guests(node, &rows);
        observe(node, &mut watch, &rows, asked_ms);
        start_moves(node, MAX_RETRIES);
        let eligible_in = lock(&node.balancing.state).eligible_in_s().filter(|_| early < MAX_EARLY_ROUNDS);
        let eligible_in = eligible_in.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        // Used CPU time is counted in ticks, and the CPU may be slower than before, so wait
        // somewhat longer.
        let eligible_in = eligible_in
            .map(|eligible_in| eligible_in + eligible_in / 8 + EARLY_ROUND_INTERVAL / 4)
            .filter(|eligible_in| *eligible_in < ROUND_INTERVAL);
        early = if eligible_in.is_some() { early + 1 } else { 0 };
        next = Instant::now()
            + eligible_in.map_or(ROUND_INTERVAL, |eligible_in| eligible_in.max(EARLY_ROUND_INTERVAL));
    }
}

/// Own processes have ended, here or elsewhere. Notifies the nodes where they ran, then decides
/// again.
fn handle_exits(node: &Arc<Node>, ended: &[i32]) {
    let mut away = Vec::new();
    let mut here = Vec::new();
    lock(&node.balancing.candidates).retain(|BalancedProcess { process, .. }| {
        let gone = ended.contains(&process.pid.0);
        if gone && process.at != node.me() {
            away.push((process.pid, process.at));
        } else if gone {
            here.push(process.pid);
        }
        !gone
    });
    here.into_iter().for_each(|pid| record_departure(node, pid));
    tracing::debug!(?ended, ?away, "processes have ended");
    let own = node.clone();
    let go = move || {
        for (pid, at) in away {
            notify_departure(&own, at, pid);
        }
        start_moves(&own, MAX_RETRIES);
    };
    if let Err(error) = thread::Builder::new().name("ended".into()).spawn(go) {
        tracing::warn!(%error, "cannot start a thread for the next decision");
    }
}

/// Scans all processes, and updates the data about those that can be moved. `rows` were requested
/// from the shims at `asked_ms`.
fn observe(node: &Arc<Node>, watch: &mut ExitWatch, rows: &[ProcessRow], asked_ms: u64) {
    let settings = node.settings.get();
    let now_ms = boot_ms();
    let closed = view::staying_nodes(node);
    let context = HomeContext {
        me: node.me(),
        stay: settings.stay || settings.local_stay,
        closed: &closed,
        decay: settings.decay,
        now_ms,
    };
    let balancing = &node.balancing;
    let all = lock(&balancing.processes).scan(ScanScope::All);
    let guests = owner::descendants_of("tern-shim", &all);
    let (guests, all): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| guests.contains(&one.pid));
    owner::observe(node, &guests, &all, rows);
    node.selected.record_inherited(&all);
    node.magic.record_inherited(&all);
    let mut eligible = node.registry.descendants(&all);
    let started: HashSet<i32> = eligible.iter().map(|one| one.pid).collect();
    let others = balancing.eligible.filter_eligible(&all, node.config.move_root);
    eligible.extend(others.into_iter().filter(|one| !started.contains(&one.pid)));
    let traffic = balancing.file_traffic.take();
    let mut candidates = lock(&balancing.profiles).update(&all, eligible, rows, &traffic, &context);
    let counts = candidates.iter().filter(|one| one.process.cpu_s >= MIN_WATCHED_CPU_S);
    watch.set(counts.map(|one| (one.process.pid.0, one.start)));
    {
        let mut now = lock(&balancing.candidates);
        // `rows` may be older than the last arrivals.
        let mut arrivals = lock(&balancing.arrivals);
        arrivals.retain(|(.., at_ms)| *at_ms >= asked_ms);
        for (pid, to, _) in arrivals.iter() {
            set_node(candidates.iter_mut().map(|one| &mut one.process), *pid, *to);
        }
        now.clone_from(&candidates);
    }
    update_own_processes(node, candidates.into_iter().map(|candidate| candidate.process).collect(), now_ms);
}

/// Decides on the data of the last scan, and starts the moves.
fn start_moves(node: &Arc<Node>, retries: u32) {
    if !node.config.balance {
        return;
    }
    for next in decide_moves(node) {
        let own = node.clone();
        let pid = next.pid;
        let go = move || carry_out(&own, &next, retries);
        if let Err(error) = thread::Builder::new().name("move".into()).spawn(go) {
            tracing::warn!(%error, "cannot start a thread for a move");
            lock(&node.balancing.state).failed(pid, boot_ms());
        }
    }
}

fn decide_moves(node: &Node) -> Vec<Move> {
    let balancing = &node.balancing;
    // Locked throughout. If a process could arrive in between, it would count as arrived and still
    // be seen on the node that it has left (see `record_arrival`).
    let mut state = lock(&balancing.state);
    let view = view::view(node);
    let candidates = lock(&balancing.candidates);
    let processes: Vec<_> = candidates.iter().map(|candidate| candidate.process.clone()).collect();
    drop(candidates);
    tracing::debug!(nodes = ?view.nodes().iter().map(|n| (n.id.0, n.load as u32, n.age_ms)).collect::<Vec<_>>(),
        processes = ?processes.iter().map(|p| (p.pid.0, p.at.0, p.demand as u32)).collect::<Vec<_>>(), "deciding");
    let now_ms = boot_ms();
    decide(&view, &processes, &mut state, &balancing.policy, now_ms, rand::random())
}

/// Carries out a decision. If the target refuses, decides again, at most `retries` times.
fn carry_out(node: &Arc<Node>, next: &Move, retries: u32) {
    let Move { pid, from, to, reason, .. } = *next;
    let failed = |why: &dyn std::fmt::Display| {
        tracing::info!(%pid, %from, %to, ?reason, %why, "not moved");
        lock(&node.balancing.state).failed(pid, boot_ms());
    };
    let Candidate { pace, pace_here, gain_s, .. } = next.candidate;
    let estimated_load = next.offer.estimated_load;
    tracing::info!(%pid, %from, %to, ?reason, pace_here, pace, gain_s, estimated_load, "starting a move");
    let Some(start) = node.balancing.start_time_of(pid) else { return failed(&"the process has ended") };
    if to != node.me() {
        match send_offer(node, to, &next.offer) {
            Ok(OfferReply::Accept) => lock(&node.balancing.state).accepted(pid, boot_ms()),
            Ok(OfferReply::Refuse(refusal)) => {
                tracing::debug!(%pid, %from, %to, ?refusal, "the target refused the offer");
                lock(&node.balancing.state).refused(pid, refusal, boot_ms());
                if let Some(retries) = retries.checked_sub(1) {
                    start_moves(node, retries);
                }
                return;
            }
            Err(error) => return failed(&error),
        }
    }
    let destination = if to == node.me() { Destination::Home } else { Destination::Node(to) };
    let moved = migrate::move_process(node, pid, start, destination);
    if to != node.me() {
        // Without this, the target would wait until a timeout for a process that ends or moves on
        // before the target's next scan.
        let settled = PeerRequest::OfferOutcome { pid, arrived: moved.is_ok() };
        let _counted_for_a_while = client::call_pooled(node, to, &settled, OFFER_TIMEOUT);
    }
    match moved {
        Ok(_moved) => {
            if from != node.me() {
                notify_departure(node, from, pid);
            }
            record_arrival(node, pid, from, to);
            // The next move may start now.
            start_moves(node, MAX_RETRIES);
        }
        Err(refusal) => failed(&refusal),
    }
}

/// Notifies a node that a process of this home has left it. Its own scan would find this within a
/// second.
fn notify_departure(node: &Node, from: NodeId, pid: HomePid) {
    let gone = PeerRequest::OfferOutcome { pid, arrived: false };
    let _seen_there_soon = client::call_pooled(node, from, &gone, OFFER_TIMEOUT);
}

fn send_offer(node: &Node, to: NodeId, offer: &MoveOffer) -> Result<OfferReply, Refusal> {
    match client::call_pooled(node, to, &PeerRequest::OfferProcess(offer.clone()), OFFER_TIMEOUT)? {
        PeerReply::OfferAnswer(answer) => Ok(answer),
        _ => Err(Refusal::new(RefusalKind::Internal, format!("node {to} sent an unexpected reply"))),
    }
}
