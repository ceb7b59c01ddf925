//! What this node knows of the cluster: its own load, sampled once a second, and what the others tell of theirs.
//!
//! Two threads: `load` samples, `gossip` tells one other node a period what is known here. What is known is read by
//! the balancer, `mon` and `mosctl`.

use crate::balancing::{self, Closed};
use crate::entry::Entry;
use crate::message::{PeerReply, PeerRequest};
use crate::procfs::process;
use crate::slots::lock;
use crate::speed::speed;
use crate::state::Node;
use crate::{costs, kernel_log, owner, peers, processes};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};
use tern_balancer as balancer;
use tern_control::{ClusterReport, Costs, MigrationReport, NodeFlags, NodeLoad, NodeState, RecentMigration};
use tern_gossip::{Event, Gossip, Status};
use tern_ids::{HomePid, NodeId};
use tern_load::{LinkCost, Sample, Sampler};

/// How often load is sampled.
const SAMPLE: Duration = Duration::from_secs(1);

/// How long a node that is told to be quiet goes on talking: a sample later, what it says has that in it, and that it is
/// empty if it was emptied; then a few others must hear of it. Else they show its last guests until they take it for dead.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(3);

/// How long a node may take to hear gossip.
const HEAR: Duration = Duration::from_secs(1);

/// Migrations that are remembered for `mon`.
const RECENT: usize = 64;

/// When so many processes are counted, those that have ended are forgotten.
const MOST_COUNTED: usize = 4096;

/// What is known.
#[derive(Debug)]
pub(crate) struct Known {
    gossip: Mutex<Gossip>,
    period: Duration,
    /// The last sample, and when it was taken.
    own: Mutex<Option<(Entry, u64)>>,
    links: Mutex<HashMap<NodeId, LinkCost>>,
    recent: Mutex<VecDeque<(Instant, MigrationReport)>>,
    /// How often each process, by number and start, has migrated.
    migrations: Mutex<HashMap<(HomePid, u64), u32>>,
}

impl Known {
    /// Nothing yet, but for what was measured earlier.
    pub(crate) fn new<'a>(me: NodeId, measured: impl Iterator<Item = &'a Costs>) -> Self {
        let config = tern_gossip::Config::default();
        // Later lives have higher numbers, as long as the clock is not set back over a restart; then the others say
        // that they know a later one, and this one takes a number beyond it.
        let incarnation = crate::state::clock() / 1_000_000;
        Self {
            gossip: Mutex::new(Gossip::new(me, incarnation, config, rand::random())),
            period: Duration::from_millis(config.period),
            own: Mutex::default(),
            links: Mutex::new(measured.map(|costs| (costs.node, costs::link(costs))).collect()),
            recent: Mutex::default(),
            migrations: Mutex::default(),
        }
    }

    /// A node has answered a short question at once.
    pub(crate) fn round_trip(&self, peer: NodeId, took: Duration) {
        lock(&self.links).entry(peer).or_default().round_trip(took);
    }

    /// A migration of this home is over.
    pub(crate) fn migrated(&self, report: &MigrationReport) {
        let mut recent = lock(&self.recent);
        recent.push_front((Instant::now(), report.clone()));
        recent.truncate(RECENT);
        drop(recent);
        if let Some(found) = process(report.pid.0) {
            let mut migrations = lock(&self.migrations);
            if migrations.len() >= MOST_COUNTED {
                migrations.retain(|(pid, start), _| process(pid.0).is_some_and(|now| now.start == *start));
            }
            *migrations.entry((report.pid, found.start)).or_default() += 1;
        }
        let took = Duration::try_from_secs_f64(report.total_ms / 1e3).unwrap_or_default();
        lock(&self.links).entry(report.to).or_default().transfer(report.bytes, took);
    }
}

impl Known {
    /// How often a process has migrated since this ternd began.
    pub(crate) fn migrations_of(&self, pid: HomePid, start: u64) -> u32 {
        lock(&self.migrations).get(&(pid, start)).copied().unwrap_or(0)
    }
}

/// Milliseconds since the machine started, also while it slept.
pub(crate) fn now_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000
}

/// Samples for ever.
pub(crate) fn sample(node: &Arc<Node>) -> ! {
    let measured = measure(node);
    let mut sampler = Sampler::new(tern_load::speed::STANDARD);
    loop {
        let standard = tern_load::speed::STANDARD;
        sampler.set_speed(node.settings.now().speed.unwrap_or(*measured.get().unwrap_or(&standard)));
        let sample = sampler.sample();
        let taken_ms = now_ms();
        *lock(&node.cluster.own) = Some((tell(node, &sample), taken_ms));
        thread::sleep(SAMPLE);
    }
}

/// The speed of this machine's CPUs, as soon as it is known: to measure it takes a second, and more where others want
/// the CPU as well.
fn measure(node: &Arc<Node>) -> Arc<OnceLock<u32>> {
    let (known, file) = (Arc::new(OnceLock::new()), node.config.cache_dir.join("speed.json"));
    let own = known.clone();
    let run = move || {
        let _only_set_here = own.set(speed(&file));
    };
    if let Err(error) = thread::Builder::new().name("speed".into()).spawn(run) {
        tracing::warn!(%error, "the speed of this machine is taken for standard");
    }
    known
}

/// A sample, with what only ternd knows.
fn tell(node: &Node, sample: &Sample) -> Entry {
    let (away, guests) = processes::counts(node);
    let settings = node.settings.now();
    let flags = NodeFlags {
        stay: settings.stay,
        lstay: settings.local_stay,
        block: settings.block,
        quiet: settings.quiet,
        nomfs: settings.no_mfs || !node.config.file.mfs.unwrap_or(true),
    };
    Entry { guests, away, flags, open: node.takes_guests().is_ok(), ..Entry::of(sample) }
}

/// As it will be when those who are on their way have come.
fn expected(node: &Node, entry: Entry, taken_ms: u64) -> Entry {
    let age_ms = now_ms().saturating_sub(taken_ms);
    let own = owner::for_guests(node, described(node.me(), &entry, age_ms, LinkCost::default()));
    let (load, mem_free) = balancing::offered(node, &own);
    Entry { load: load as f32, mem_free, cpus: own.cpus as f32, ..entry }
}

/// Gossips for ever.
pub(crate) fn gossip(node: &Arc<Node>) -> ! {
    let mut version = None;
    let mut quiet_since: Option<Instant> = None;
    loop {
        thread::sleep(node.cluster.period);
        let map = node.map();
        // What was agreed to a moment ago is in it: others take what they hear for as old as the message.
        let entry = *lock(&node.cluster.own);
        let own = entry.map(|(entry, taken_ms)| expected(node, entry, taken_ms).encode());
        let (next, events) = {
            let mut gossip = lock(&node.cluster.gossip);
            if let Some(Err(error)) = own.map(|own| gossip.set_own(&own)) {
                tracing::error!(%error, "nobody hears of this node's load");
            }
            if version.replace(map.version()) != Some(map.version()) {
                gossip.set_members(map.nodes());
            }
            if node.settings.now().quiet {
                quiet_since.get_or_insert_with(Instant::now);
            } else {
                quiet_since = None;
            }
            let talks = quiet_since.is_none_or(|since| since.elapsed() < LAST_WORDS);
            let next = if talks { gossip.tick(now_ms()) } else { None };
            (next, gossip.events().collect::<Vec<_>>())
        };
        // Not under the lock: a console may be slow.
        for event in events {
            let change = match event {
                Event::Joined(peer) => format!("node {peer} is there"),
                Event::Died(peer) => format!("node {peer} is dead"),
                Event::Returned(peer) => format!("node {peer} is back"),
            };
            tracing::info!(change, "the cluster has changed");
            kernel_log::note(node, &change);
        }
        let Some((peer, bytes)) = next else { continue };
        // One that does not answer must not keep the others waiting.
        let own = node.clone();
        let send = move || match peers::ask_again(&own, peer, &PeerRequest::Gossip(bytes), HEAR) {
            Ok(PeerReply::Done) => lock(&own.cluster.gossip).reached(peer),
            outcome => {
                tracing::debug!(%peer, ?outcome, "it has not heard");
                lock(&own.cluster.gossip).unreachable(now_ms(), peer);
            }
        };
        if let Err(error) = thread::Builder::new().name("tell".into()).stack_size(256 << 10).spawn(send) {
            tracing::warn!(%error, "no thread to gossip");
        }
    }
}

/// What is known of the links to other nodes.
pub(crate) fn links(node: &Node) -> HashMap<NodeId, LinkCost> {
    lock(&node.cluster.links).clone()
}

/// Takes this for what is known of one; what is measured from now on corrects it.
pub(crate) fn set_link(node: &Node, peer: NodeId, link: LinkCost) {
    lock(&node.cluster.links).insert(peer, link);
}

/// Another node has told something.
pub(crate) fn heard(node: &Node, peer: NodeId, bytes: &[u8]) -> Result<(), tern_gossip::Refused> {
    lock(&node.cluster.gossip).receive(now_ms(), peer, bytes)
}

fn described(id: NodeId, entry: &Entry, age_ms: u64, link: LinkCost) -> balancer::Node {
    let unknown = balancer::LinkCost::default();
    let known = |measured: u64, default: u64| if measured == 0 { default } else { measured };
    balancer::Node {
        id,
        speed: entry.speed,
        cpus: entry.cpus.into(),
        load: entry.load.into(),
        mem_free: entry.mem_free,
        mem_total: entry.mem_total,
        swap_free: entry.swap_free,
        swap_total: entry.swap_total,
        mem_pressure: entry.mem_pressure.into(),
        takes_guests: entry.open,
        age_ms,
        alive: true,
        link: balancer::LinkCost {
            rtt_us: known(link.rtt_us.into(), unknown.rtt_us.into()) as u32,
            bytes_per_s: known(link.bytes_per_s, unknown.bytes_per_s),
        },
    }
}

/// This node as it was sampled last, as the balancer takes it; its age is that of the sample.
pub(crate) fn own(node: &Node) -> balancer::Node {
    let now = now_ms();
    let (entry, taken_ms) = (*lock(&node.cluster.own)).unwrap_or((NOTHING, now));
    let age_ms = now.saturating_sub(taken_ms);
    balancer::Node { takes_guests: true, ..described(node.me(), &entry, age_ms, LinkCost::default()) }
}

/// A node of which nothing is known, and which gets nothing.
const NOTHING: Entry = Entry {
    load: 0.0,
    speed: 1,
    cpus: 1.0,
    mem_total: 0,
    mem_free: 0,
    mem_raw_free: 0,
    swap_total: 0,
    swap_free: 0,
    mem_pressure: 0.0,
    utilisability: 0,
    guests: 0,
    away: 0,
    flags: NodeFlags { stay: false, lstay: false, block: false, quiet: false, nomfs: false },
    open: false,
};

/// The nodes that no process may leave by itself.
pub(crate) fn closed(node: &Node) -> Closed {
    let gossip = lock(&node.cluster.gossip);
    let closed = |payload| Entry::decode(payload).is_some_and(|entry| entry.flags.stay);
    gossip.view(now_ms()).filter(|seen| closed(seen.payload)).map(|seen| seen.node).collect()
}

/// The cluster as this home's balancer takes it.
pub(crate) fn view(node: &Node) -> balancer::Cluster {
    let mut nodes = vec![balancing::expected(node, own(node))];
    let links = links(node);
    for seen in lock(&node.cluster.gossip).view(now_ms()) {
        let Some((entry, age)) = Entry::decode(seen.payload).zip(seen.age) else { continue };
        if seen.node == node.me() {
            continue;
        }
        let link = links.get(&seen.node).copied().unwrap_or_default();
        nodes.push(balancer::Node {
            alive: seen.status == Status::Alive && seen.reachable,
            takes_guests: entry.open && node.config.trusts(seen.node),
            ..described(seen.node, &entry, age, link)
        });
    }
    balancer::Cluster::new(node.me(), nodes)
}

/// The same for people.
pub(crate) fn report(node: &Node) -> ClusterReport {
    let map = node.map();
    let own = lock(&node.cluster.own).map(|(entry, _)| entry);
    let gossip = lock(&node.cluster.gossip);
    let now = now_ms();
    let row = |id: NodeId| {
        let (state, age_ms, entry) = if id == node.me() {
            (NodeState::Alive, 0, own)
        } else {
            match gossip.seen(now, id) {
                Some(seen) => (state(seen.status), seen.age.unwrap_or(0), Entry::decode(seen.payload)),
                None => (NodeState::NeverHeard, 0, None),
            }
        };
        let entry = entry.unwrap_or(Entry { speed: 0, cpus: 0.0, ..NOTHING });
        NodeLoad {
            node: id,
            host: map.host(id).unwrap_or_default(),
            state,
            age_ms,
            load: entry.load,
            speed: entry.speed,
            cpus: entry.cpus,
            mem_total: entry.mem_total,
            mem_free: entry.mem_free,
            mem_raw_free: entry.mem_raw_free,
            swap_total: entry.swap_total,
            swap_free: entry.swap_free,
            utilisability: entry.utilisability.into(),
            guests: entry.guests,
            away: entry.away,
            flags: entry.flags,
        }
    };
    let nodes = map.nodes().into_iter().map(row).collect();
    drop(gossip);
    let recent = lock(&node.cluster.recent);
    let migrations = recent.iter().map(|(at, report)| RecentMigration {
        ago_ms: u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX),
        report: report.clone(),
    });
    ClusterReport { me: node.me(), nodes, migrations: migrations.collect() }
}

fn state(status: Status) -> NodeState {
    match status {
        Status::Unheard => NodeState::NeverHeard,
        Status::Alive => NodeState::Alive,
        Status::Suspect => NodeState::Suspect,
        Status::Dead => NodeState::Dead,
    }
}
