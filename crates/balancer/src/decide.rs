//! Once a second: which of this home's processes move, and where.

use crate::admit::Offer;
use crate::ground::Ground;
use crate::memory;
use crate::policy::{Objective, Policy};
use crate::process::{Hint, Process};
use crate::prospect::{Bar, Mover, Prospect};
use crate::seed::Chance;
use crate::state::{State, Stay, Verdict};
use crate::view::Cluster;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tern_ids::{HomePid, NodeId};

/// How many of the fastest nodes are looked at for each process. Eight moves at once cannot use them up.
const SHORTLIST: usize = 32;
/// Below so many threads, on average, a process has nothing to gain from any CPU.
const IDLE_THREADS: f64 = 0.005;

/// Why a process is to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It will be done earlier there.
    Faster,
    /// It calls home so much that it is faster there.
    Talks,
    /// Home has a CPU to spare, which is no slower.
    Home,
    /// Its node is about to run out of memory.
    Memory,
    /// Its node wants it gone.
    Evicted,
    /// It works so much on that node's files.
    Files,
}

impl Reason {
    /// Whether it overrides what is best for load.
    #[must_use]
    pub fn is_urgent(self) -> bool {
        matches!(self, Self::Memory | Self::Evicted)
    }
}

/// One move to make.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Move {
    /// Who.
    pub pid: HomePid,
    /// Where it runs.
    pub from: NodeId,
    /// Where to; this home's own number brings it home.
    pub to: NodeId,
    /// Why.
    pub reason: Reason,
    /// With what numbers.
    pub prospect: Prospect,
    /// What to say to the target.
    pub offer: Offer,
}

/// What moves now. The moves are charged to `state` as under way; tell it what becomes of each
/// ([`State::accepted`], [`State::arrived`], [`State::failed`]). Given the same view, processes, state, time and
/// seed, the answer is the same.
///
/// `now_ms` is any clock that does not go back; `processes` are all of this home's, wherever they run.
pub fn decide(
    cluster: &Cluster,
    processes: &[Process],
    state: &mut State,
    policy: &Policy,
    now_ms: u64,
    seed: u64,
) -> Vec<Move> {
    let processes: BTreeMap<HomePid, &Process> = processes.iter().map(|p| (p.pid, p)).collect();
    let cluster = &*state.informed(cluster, now_ms);
    state.observe(cluster, &processes, policy, now_ms);
    let ground = Ground::new(cluster, state, policy, now_ms);
    let mut round = Round { ground, state, chance: Chance::new(seed), moves: Vec::new() };
    round.evict(&processes);
    memory::usher(&mut round, &processes);
    round.balance(&processes);
    round.moves
}

/// One decision in the making.
#[derive(Debug)]
pub(crate) struct Round<'a> {
    pub(crate) ground: Ground<'a>,
    pub(crate) state: &'a mut State,
    pub(crate) chance: Chance,
    moves: Vec<Move>,
}

impl Round<'_> {
    /// Makes a move of a prospect, and charges it.
    pub(crate) fn begin(&mut self, mover: &Mover<'_>, prospect: Prospect, reason: Reason) {
        let (process, to) = (mover.process, prospect.node);
        let place = self.ground.cluster.place_of(to);
        let seen = place.and_then(|place| {
            let stand = self.ground.stands.get(place)?;
            Some(self.ground.cluster.nodes().get(place)?.load_of(stand.runnable))
        });
        let limit_load =
            if reason.is_urgent() { f64::MAX } else { mover.limit_load(&self.ground, &prospect) };
        let offer = Offer {
            home: self.ground.cluster.me(),
            pid: process.pid,
            threads: mover.threads,
            memory: process.memory(),
            seen_load: seen.unwrap_or(0.0),
            limit_load,
            reason,
        };
        self.ground.charge(process, to);
        self.state.began(process, to, self.ground.policy, self.ground.now_ms);
        let next = Move { pid: process.pid, from: process.at, to, reason, prospect, offer };
        self.state.say(process.pid, self.ground.now_ms, Verdict::Moved(Box::new(next.clone())));
        self.moves.push(next);
    }

    /// Guests that are not wanted any more go to the next best node, or home if there is none: at once, all,
    /// whatever they have used.
    fn evict(&mut self, processes: &BTreeMap<HomePid, &Process>) {
        let home = self.ground.cluster.me();
        for process in processes.values().filter(|process| process.evicted && process.at != home) {
            if self.state.is_moving(process.pid) {
                continue;
            }
            let Some(mover) = Mover::new(&self.ground, process) else { continue };
            let places = 0..self.ground.cluster.nodes().len();
            let all = places.filter_map(|place| {
                let prospect = mover.prospect(&self.ground, self.state, place)?;
                let refused = mover.must_not(&self.ground, self.state, place).is_some();
                let last_resort = prospect.node == home;
                let tight = prospect.bar == Some(Bar::NoMemory)
                    || (process.locked || process.hint == Hint::Io) && !last_resort;
                (last_resort || !refused && !tight).then_some((tight || refused, prospect))
            });
            let best = all.min_by(|(tight, one), (tight_too, other)| {
                tight.cmp(tight_too).then(one.pace.total_cmp(&other.pace))
            });
            if let Some((_, prospect)) = best {
                self.begin(&mover, prospect, Reason::Evicted);
            }
        }
    }

    /// CPU and communication: the move that gains most, again and again, until none gains enough.
    fn balance(&mut self, processes: &BTreeMap<HomePid, &Process>) {
        let mut left: Vec<&Process> = Vec::new();
        self.state.ripe_s = None;
        for process in processes.values() {
            match self.eligible(process) {
                Ok(()) => left.push(process),
                Err(stay) => {
                    self.ripens(process, stay);
                    self.stays(process.pid, stay);
                }
            }
        }
        let shortlist = self.shortlist();
        while !left.is_empty() {
            let bound = self.best_share(&shortlist);
            let mut best: Option<(usize, Mover<'_>, Prospect)> = None;
            for (index, process) in left.iter().enumerate() {
                let Some(mover) = Mover::new(&self.ground, process) else { continue };
                let found = self.best_prospect(&mover, &shortlist, bound);
                let prospect = match found {
                    Ok(prospect) => prospect,
                    Err(stay) => {
                        self.stays(process.pid, stay);
                        continue;
                    }
                };
                self.stays(process.pid, Stay::InTurn);
                if best.as_ref().is_none_or(|(_, _, best)| self.score(&prospect) > self.score(best)) {
                    best = Some((index, mover, prospect));
                }
            }
            let Some((index, mover, prospect)) = best else { return };
            if self.ground.under_way >= self.ground.policy.moves_at_once {
                return;
            }
            let reason = self.reason(&mover, &prospect);
            self.begin(&mover, prospect, reason);
            left.remove(index);
        }
    }

    /// Whether a process is to be considered at all.
    fn eligible(&self, process: &Process) -> Result<(), Stay> {
        eligible(&self.ground, self.state, process)
    }

    /// Notes when one that is too young will not be so any more, where it waits for its turn most of the time.
    fn ripens(&mut self, process: &Process, stay: Stay) {
        let Stay::Young { cpu_s, needed_s } = stay else { return };
        let Some(mover) = Mover::new(&self.ground, process).filter(Mover::is_crowded) else { return };
        let ripe_s = (needed_s - cpu_s).max(0.0) * mover.stretch / mover.threads.min(1.0);
        self.state.ripe_s = Some(self.state.ripe_s.map_or(ripe_s, |first| first.min(ripe_s)));
    }

    fn stays(&mut self, pid: HomePid, stay: Stay) {
        self.state.say(pid, self.ground.now_ms, Verdict::Stayed(stay));
    }

    fn score(&self, prospect: &Prospect) -> f64 {
        match self.ground.policy.objective {
            Objective::Greedy => prospect.gain_s,
            Objective::Opportunity => prospect.relief,
        }
    }

    /// The nodes that have most to give to one thread more, home among them.
    fn shortlist(&self) -> Vec<usize> {
        let nodes = self.ground.cluster.nodes();
        let mut open: Vec<(f64, usize)> = nodes
            .iter()
            .zip(&self.ground.stands)
            .enumerate()
            .filter(|(_, (_, stand))| stand.bar.is_none())
            .map(|(place, (node, stand))| (node.share(stand.runnable + 1.0), place))
            .collect();
        let by_share = |one: &(f64, usize), other: &(f64, usize)| other.0.total_cmp(&one.0);
        if open.len() > SHORTLIST {
            open.select_nth_unstable_by(SHORTLIST, |one, other| {
                by_share(one, other).then(one.1.cmp(&other.1))
            });
            open.truncate(SHORTLIST);
        }
        let mut places: Vec<usize> = open.into_iter().map(|(_, place)| place).collect();
        places.extend(self.ground.cluster.place_of(self.ground.cluster.me()));
        places.sort_unstable();
        places.dedup();
        places
    }

    /// No newcomer gets more than this.
    fn best_share(&self, shortlist: &[usize]) -> f64 {
        let share = |place: &usize| {
            let (node, stand) = (self.ground.cluster.nodes().get(*place)?, self.ground.stands.get(*place)?);
            Some(node.share(stand.runnable))
        };
        shortlist.iter().filter_map(share).fold(f64::MIN_POSITIVE, f64::max)
    }

    /// The best that a process has to hope for, or what speaks against the node where it would be fastest.
    fn best_prospect(
        &mut self,
        mover: &Mover<'_>,
        shortlist: &[usize],
        bound: f64,
    ) -> Result<Prospect, Stay> {
        let home = self.ground.cluster.me();
        let policy = self.ground.policy;
        let hopeless = mover.pace < mover.pace_of_share(bound) * (1.0 + policy.margin);
        if hopeless && mover.process.at == home && policy.objective == Objective::Greedy {
            return Err(Stay::NoBetter(Some(Bar::NotFaster)));
        }
        let files = mover.talks.files_on().filter_map(|node| self.ground.cluster.place_of(node));
        let mut places: Vec<usize> = shortlist.iter().copied().chain(files).collect();
        places.sort_unstable();
        places.dedup();
        let mut prospects: Vec<Prospect> =
            places.iter().filter_map(|&to| mover.prospect(&self.ground, self.state, to)).collect();
        // The shortlist was made for everybody; what this one may not or cannot use is no reason to give up.
        let particular = |bar: Option<Bar>| !matches!(bar, None | Some(Bar::NotFaster | Bar::NotWorth));
        if prospects.iter().all(|p| particular(p.bar)) && shortlist.len() < self.ground.cluster.nodes().len()
        {
            let all = 0..self.ground.cluster.nodes().len();
            prospects = all.filter_map(|to| mover.prospect(&self.ground, self.state, to)).collect();
        }
        let open: Vec<&Prospect> = prospects.iter().filter(|prospect| prospect.bar.is_none()).collect();
        let best = open.iter().map(|prospect| self.score(prospect)).fold(f64::NEG_INFINITY, f64::max);
        let alike: Vec<&Prospect> = open
            .into_iter()
            .filter(|prospect| self.score(prospect) >= best - policy.like_best * best.abs())
            .collect();
        if let Some(at_home) = alike.iter().find(|prospect| prospect.node == home) {
            return Ok((*at_home).clone());
        }
        if let Some(one) = alike.get(self.chance.below(alike.len())) {
            return Ok((*one).clone());
        }
        let others = prospects.iter().filter(|prospect| prospect.bar != Some(Bar::Here));
        Err(Stay::NoBetter(others.min_by(|one, other| one.pace.total_cmp(&other.pace)).and_then(|p| p.bar)))
    }

    fn reason(&self, mover: &Mover<'_>, prospect: &Prospect) -> Reason {
        let faster = mover.pace - prospect.pace;
        if prospect.node != self.ground.cluster.me() {
            let saved = mover.talk - prospect.talk;
            let near = mover.talks.has_files_on(prospect.node) && saved > 0.0 && saved >= faster / 2.0;
            if near { Reason::Files } else { Reason::Faster }
        } else if mover.process.hint == Hint::Io || (mover.talk > 0.0 && mover.talk >= faster / 2.0) {
            Reason::Talks
        } else if mover.pace >= prospect.pace * (1.0 + self.ground.policy.margin) {
            Reason::Faster
        } else {
            Reason::Home
        }
    }
}

/// Whether a process is to be considered at all; if not, why.
pub(crate) fn eligible(ground: &Ground<'_>, state: &State, process: &Process) -> Result<(), Stay> {
    if !process.movable {
        return Err(Stay::NotMovable);
    }
    if process.locked {
        return Err(Stay::Locked);
    }
    if state.is_moving(process.pid) {
        return Err(Stay::UnderWay);
    }
    let in_sight = ground.cluster.node(process.at).is_some_and(|node| node.alive);
    let Some(mover) = Mover::new(ground, process).filter(|_| in_sight) else {
        return Err(Stay::OutOfSight);
    };
    if process.threads() < IDLE_THREADS {
        return Err(Stay::Idle);
    }
    let needed_s = mover.needed_s(ground.policy);
    // One that belongs home goes there young, too.
    let files_at_home = process.hint == Hint::Io && process.at != ground.cluster.me();
    if process.cpu_s < needed_s && !files_at_home {
        return Err(Stay::Young { cpu_s: process.cpu_s, needed_s });
    }
    let needed_s = state.residence_s(process.pid, ground.policy, ground.now_ms);
    if process.resident_s < needed_s {
        return Err(Stay::Resident { here_s: process.resident_s, needed_s });
    }
    Ok(())
}
