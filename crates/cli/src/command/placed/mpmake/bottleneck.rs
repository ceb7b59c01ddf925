//! Names the bottleneck of a build: the first resource, of those that were sampled, that was used
//! up.
//!
//! Resources that cannot be sampled from this node, such as another node's disk, are not guessed:
//! the bottleneck is then reported as unknown.

use super::build::Build;
use super::event_log::LoadSample;
use super::statistics::Statistics;

/// The share from which a resource counts as used up.
const SATURATED: f64 = 0.85;

/// A condition that held for more than this share of the time counts as the bottleneck.
const DOMINANT: f64 = 0.5;

/// The minimum number of samples for a conclusion.
const MIN_SAMPLES: usize = 3;

/// The mean use of each resource during the build.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Utilisation {
    /// The share of this node's CPUs.
    pub(super) home: Option<f64>,
    /// The share of the CPUs of all other nodes.
    pub(super) others: Option<f64>,
    /// Bytes per second that this node received and sent.
    pub(super) net: Option<(f64, f64)>,
    /// The share of this node's fastest link, in its busier direction.
    pub(super) link: Option<f64>,
    /// The share of the time in which data waited to be sent.
    pub(super) waited: Option<f64>,
    /// CPUs used by this node's file server.
    pub(super) server: Option<f64>,
}

impl Utilisation {
    /// Computes the mean use from the samples of a build.
    pub(super) fn new(build: &Build) -> Self {
        let (Some(first), Some(last)) = (build.loads.first(), build.loads.last()) else {
            return Self::default();
        };
        let time = last.at.saturating_sub(first.at) as f64 / 1e6;
        if build.loads.len() < MIN_SAMPLES || time <= 0.0 {
            return Self::default();
        }
        let per_second = |of: &dyn Fn(&LoadSample) -> Option<u64>| {
            Some(of(last)?.saturating_sub(of(first)?) as f64 / time)
        };
        let received = per_second(&|load| Some(load.net?.0));
        let net = received.zip(per_second(&|load| Some(load.net?.1)));
        let me = build.start.me;
        Self {
            home: mean_use(build, &|node| node == me),
            others: mean_use(build, &|node| node != me),
            link: net.zip(last.link).map(|((in_, out), bits)| in_.max(out) * 8.0 / bits.max(1) as f64),
            net,
            waited: backlog_share(build),
            server: per_second(&|load| load.server).map(|micros| micros / 1e6),
        }
    }
}

/// The share of the time in which data waited to be sent.
fn backlog_share(build: &Build) -> Option<f64> {
    let shares: Vec<f64> = build.loads.iter().filter_map(|load| load.waits).map(f64::from).collect();
    (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
}

/// The share of the CPUs of the selected nodes that was in use; a demand above all CPUs counts as
/// all.
fn mean_use(build: &Build, which: &dyn Fn(u16) -> bool) -> Option<f64> {
    let cpus = |node: u16| {
        build.start.nodes.iter().find(|one| one.node == node).map_or(1.0, |one| f64::from(one.cpus.max(0.1)))
    };
    let (mut used, mut all) = (0.0, 0.0);
    for (node, busy) in build.loads.iter().flat_map(|load| &load.busy).filter(|(node, _)| which(*node)) {
        used += f64::from(busy.clamp(0.0, 1.0)) * cpus(*node);
        all += cpus(*node);
    }
    (all > 0.0).then(|| used / all)
}

/// Names the bottleneck in one or two sentences.
pub(super) fn bottleneck(build: &Build, statistics: &Statistics) -> String {
    let used = Utilisation::new(build);
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    if let Some(link) = used.link.filter(|link| *link > SATURATED) {
        return format!(
            "The link of this node, which all files come from: {} of it was in use.",
            percent(link)
        );
    }
    // The backlog is known also where no link reports its speed. If the other nodes have no free
    // CPU, the backlog is not attributed to the link, because slow receivers cause one too.
    let others_are_busy = used.others.is_some_and(|others| others > SATURATED);
    if let (Some(share), false) = (used.waited.filter(|share| *share > DOMINANT), others_are_busy) {
        let (_, sent) = used.net.unwrap_or_default();
        return format!(
            "The link of this node, which all files come from: for {} of the time data waited to be sent, at {} a second.",
            percent(share),
            crate::output::bytes(sent as u64)
        );
    }
    if statistics.single_share() > DOMINANT {
        return format!(
            "The build itself: for {} of the time only one command ran. More nodes would not help; shortening the longest commands below might.",
            percent(statistics.single_share())
        );
    }
    let jobs = build.start.jobs.unwrap_or(0);
    let waits_are_long = statistics.wait_time() > 0.2 * statistics.elapsed * statistics.mean_running();
    match (used.home, used.others) {
        (Some(home), Some(others)) if home > SATURATED && others > SATURATED => {
            "The CPUs of all nodes, which were busy all the time: more nodes would make it faster.".into()
        }
        (Some(home), Some(others)) if home > SATURATED && others < SATURATED => {
            let server = used.server.filter(|cpus| *cpus > 0.1);
            let server = server.map(|cpus| format!(" Its file server used {cpus:.1} CPUs.")).unwrap_or_default();
            format!(
                "The CPUs of this node ({} in use, those of the others {}): it runs make and local commands, and serves files to the others.{server}",
                percent(home),
                percent(others)
            )
        }
        (_, Some(others)) if others > SATURATED => {
            "The CPUs of the other nodes, which were busy all the time: more nodes would make it faster.".into()
        }
        (Some(home), _) if jobs > 1 && statistics.mean_running() > SATURATED * f64::from(jobs) && home < SATURATED && !waits_are_long => {
            format!("The number of jobs: {jobs} ran nearly all the time, and CPUs were free. A larger -j would make it faster.")
        }
        (None, None) => "Unknown: the nodes were not sampled during the build, or the build was too short.".into(),
        _ => "Unknown: neither the CPUs nor this node's link were used up, and commands ran in parallel. Disks and memory are not sampled.".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::event_log::{BuildStart, NodeInfo};
    use super::*;

    fn build(home: f32, others: f32, megabytes: u64, jobs: u32) -> Build {
        let node = |node| NodeInfo { node, host: String::new(), cpus: 2.0, speed: 10_000 };
        let sample = |second: u64| LoadSample {
            at: second * 1_000_000,
            busy: vec![(1, home), (2, others)],
            net: Some((0, second * megabytes * 1_000_000)),
            link: Some(1_000_000_000),
            waits: Some(0.0),
            server: Some(second * 500_000),
        };
        let start =
            BuildStart { me: 1, nodes: vec![node(1), node(2)], jobs: Some(jobs), ..BuildStart::default() };
        Build { start, elapsed: 10_000_000, loads: (0..=10).map(sample).collect(), ..Build::default() }
    }

    fn statistics(run_time: f64, single: f64) -> Statistics {
        let mut statistics = Statistics::new(&Build::default());
        (statistics.elapsed, statistics.single) = (10.0, single);
        let node = NodeInfo { node: 2, ..NodeInfo::default() };
        statistics.nodes.push(super::super::statistics::NodeStatistics {
            node,
            commands: 9,
            failed: 0,
            cpu: run_time,
            run_time,
            wait_time: 0.0,
            max_running: 9,
        });
        statistics
    }

    #[test]
    fn saturated_resource_is_named() {
        let named = |build: &Build, statistics: &Statistics| bottleneck(build, statistics);
        let busy = statistics(60.0, 0.5);
        assert!(named(&build(0.5, 0.5, 120, 6), &busy).starts_with("The link"));
        assert!(
            named(&build(0.5, 0.5, 1, 9), &statistics(12.0, 7.0)).starts_with("The build itself: for 70 %")
        );
        assert!(named(&build(1.5, 0.95, 1, 9), &busy).starts_with("The CPUs of all nodes"));
        let home = named(&build(1.5, 0.4, 1, 9), &busy);
        assert!(home.starts_with("The CPUs of this node") && home.contains("0.5 CPUs"), "{home}");
        assert!(named(&build(0.2, 0.95, 1, 9), &busy).starts_with("The CPUs of the other"));
        assert!(named(&build(0.3, 0.5, 1, 6), &busy).starts_with("The number of jobs: 6"));
        assert!(named(&build(0.3, 0.5, 1, 60), &busy).starts_with("Unknown: neither"));
        let slow = |others| {
            let mut build = build(0.3, others, 1, 60);
            build.loads.iter_mut().skip(5).for_each(|load| (load.link, load.waits) = (None, Some(1.0)));
            named(&build, &busy)
        };
        let link = "The link of this node, which all files come from: for 55 % of the time";
        assert!(slow(0.5).starts_with(link), "{}", slow(0.5));
        assert!(slow(0.95).starts_with("The CPUs of the other"));
        assert!(named(&Build::default(), &busy).starts_with("Unknown: the nodes"));
    }
}
