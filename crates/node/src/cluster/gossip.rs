//! Sampling and gossip. Two threads feed the cluster state that the balancer, `mon` and `mosctl`
//! read: `load` samples the load of this node once a second, and `gossip` sends one message to one
//! other node each period. The messages of other nodes bring their load.

use crate::cluster::kernel_log;
use crate::cluster::load_entry::LoadEntry;
use crate::cluster::speed::cpu_speed;
use crate::cluster::view::to_balancer_node;
use crate::node::Node;
use crate::os::clock::boot_ms;
use crate::os::sync::lock;
use crate::peer::client;
use crate::peer::message::{PeerReply, PeerRequest};
use crate::process::process_list;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};
use tern_control::NodeFlags;
use tern_gossip::MembershipEvent;
use tern_ids::NodeId;
use tern_load::{LinkEstimate, Sample, Sampler};

/// Interval between two samples of the load.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// How long a node that was set to quiet continues to gossip. After one sample its entry carries
/// the flag, and shows no guests if the node was emptied. Then a few other nodes must receive this
/// entry. Without the delay, the other nodes would show its last guests until they declare it dead.
pub(crate) const QUIET_DELAY: Duration = Duration::from_secs(3);

/// Timeout of sending one gossip message.
const GOSSIP_TIMEOUT: Duration = Duration::from_secs(1);

/// Samples the load; never returns.
pub(crate) fn sample(node: &Arc<Node>) -> ! {
    let measured = start_speed_measurement(node);
    let mut sampler = Sampler::new(tern_load::speed::STANDARD_SPEED);
    loop {
        let standard = tern_load::speed::STANDARD_SPEED;
        sampler.set_speed(node.settings.get().speed.unwrap_or(*measured.get().unwrap_or(&standard)));
        let sample = sampler.sample();
        let taken_ms = boot_ms();
        *lock(&node.cluster.own) = Some((local_entry(node, &sample), taken_ms));
        thread::sleep(SAMPLE_INTERVAL);
    }
}

/// Starts to determine the speed of this machine's CPUs. A measurement takes a second, and longer
/// while other programs use the CPU.
fn start_speed_measurement(node: &Arc<Node>) -> Arc<OnceLock<u32>> {
    let (speed, file) = (Arc::new(OnceLock::new()), node.config.cache_dir.join("speed.json"));
    let own = speed.clone();
    let run = move || {
        let _only_set_here = own.set(cpu_speed(&file));
    };
    if let Err(error) = thread::Builder::new().name("speed".into()).spawn(run) {
        tracing::warn!(%error, "cannot measure the speed of the CPUs; assuming standard ones");
    }
    speed
}

/// The entry of a sample, with the fields that only ternd has.
fn local_entry(node: &Node, sample: &Sample) -> LoadEntry {
    let (away, guests) = process_list::counts(node);
    let settings = node.settings.get();
    let flags = NodeFlags {
        stay: settings.stay,
        lstay: settings.local_stay,
        block: settings.block,
        quiet: settings.quiet,
        nomfs: settings.no_mfs || !node.config.file.mfs.unwrap_or(true),
    };
    LoadEntry {
        guests,
        away,
        flags,
        accepts_guests: node.check_accepts_guests().is_ok(),
        ..LoadEntry::from_sample(sample)
    }
}

/// The entry as it will be after all accepted guests have arrived.
fn advertised_entry(node: &Node, entry: LoadEntry, taken_ms: u64) -> LoadEntry {
    let age_ms = boot_ms().saturating_sub(taken_ms);
    let own = node
        .owner
        .guest_share(&node.config, to_balancer_node(node.me(), &entry, age_ms, LinkEstimate::default()));
    let (load, mem_free) = node.balancing.advertised_load(&own);
    LoadEntry { load: load as f32, mem_free, cpus: own.cpus as f32, ..entry }
}

/// Gossips; never returns.
pub(crate) fn run(node: &Arc<Node>) -> ! {
    let mut version = None;
    let mut quiet_since: Option<Instant> = None;
    loop {
        thread::sleep(node.cluster.period);
        let map = node.map();
        // Computed anew for each message, so that guests accepted since the sample are counted.
        // Receivers take the entry to be as old as the message.
        let entry = *lock(&node.cluster.own);
        let own = entry.map(|(entry, taken_ms)| advertised_entry(node, entry, taken_ms).encode());
        let (next, events) = {
            let mut gossip = lock(&node.cluster.gossip);
            if let Some(Err(error)) = own.map(|own| gossip.set_payload(&own)) {
                tracing::error!(%error, "cannot gossip the load of this node");
            }
            if version.replace(map.version()) != Some(map.version()) {
                gossip.set_members(map.nodes());
            }
            if node.settings.get().quiet {
                quiet_since.get_or_insert_with(Instant::now);
            } else {
                quiet_since = None;
            }
            let is_gossiping = quiet_since.is_none_or(|since| since.elapsed() < QUIET_DELAY);
            let next = if is_gossiping { gossip.tick(boot_ms()) } else { None };
            (next, gossip.events().collect::<Vec<_>>())
        };
        // Outside of the lock: writing to a console may be slow.
        for event in events {
            let change = match event {
                MembershipEvent::Joined(peer) => format!("node {peer} is there"),
                MembershipEvent::Died(peer) => format!("node {peer} is dead"),
                MembershipEvent::Returned(peer) => format!("node {peer} is back"),
            };
            tracing::info!(change, "the cluster has changed");
            kernel_log::log_change(&node.settings, &change);
        }
        let Some((peer, bytes)) = next else { continue };
        // In a thread of its own, so that a node that does not answer does not delay the others.
        let own = node.clone();
        let send = move || match client::call_pooled(&own, peer, &PeerRequest::Gossip(bytes), GOSSIP_TIMEOUT)
        {
            Ok(PeerReply::Done) => lock(&own.cluster.gossip).mark_reachable(peer),
            outcome => {
                tracing::debug!(%peer, ?outcome, "a gossip message was not delivered");
                lock(&own.cluster.gossip).mark_unreachable(boot_ms(), peer);
            }
        };
        if let Err(error) =
            thread::Builder::new().name("gossip-send".into()).stack_size(256 << 10).spawn(send)
        {
            tracing::warn!(%error, "cannot start a thread to gossip");
        }
    }
}

/// Processes a gossip message from another node.
pub(crate) fn receive_gossip(
    node: &Node,
    peer: NodeId,
    bytes: &[u8],
) -> Result<(), tern_gossip::ReceiveError> {
    lock(&node.cluster.gossip).receive(boot_ms(), peer, bytes)
}
