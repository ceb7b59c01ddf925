//! What held a build up, as far as that can be known: of what was looked at, what was used up first.
//!
//! What is not seen from here, a node's disk for example, is not guessed at: the report says then that it is not known.

use super::build::Build;
use super::figures::Figures;
use super::notes::Load;

/// From this share on something counts as used up.
const FULL: f64 = 0.85;

/// What was so for longer than this share of the time held a build up more than anything else.
const HALF: f64 = 0.5;

/// Looks at the nodes that are too few to conclude anything from.
const FEW: usize = 3;

/// How much of everything was in use while the build ran, on the average.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Use {
    /// Of this node's CPUs.
    pub(super) home: Option<f64>,
    /// Of the CPUs of all nodes but this one.
    pub(super) others: Option<f64>,
    /// Bytes a second that this node received and sent.
    pub(super) net: Option<(f64, f64)>,
    /// Of this node's fastest link, in the direction that was used more.
    pub(super) link: Option<f64>,
    /// In which share of the time data waited for the network.
    pub(super) waited: Option<f64>,
    /// CPUs that this node's server of files took.
    pub(super) server: Option<f64>,
}

impl Use {
    /// What the looks at a build show.
    pub(super) fn of(build: &Build) -> Self {
        let (Some(first), Some(last)) = (build.loads.first(), build.loads.last()) else {
            return Self::default();
        };
        let time = last.at.saturating_sub(first.at) as f64 / 1e6;
        if build.loads.len() < FEW || time <= 0.0 {
            return Self::default();
        }
        let a_second =
            |of: &dyn Fn(&Load) -> Option<u64>| Some(of(last)?.saturating_sub(of(first)?) as f64 / time);
        let received = a_second(&|load| Some(load.net?.0));
        let net = received.zip(a_second(&|load| Some(load.net?.1)));
        let me = build.begin.me;
        Self {
            home: mean(build, &|node| node == me),
            others: mean(build, &|node| node != me),
            link: net.zip(last.link).map(|((in_, out), bits)| in_.max(out) * 8.0 / bits.max(1) as f64),
            net,
            waited: waited(build),
            server: a_second(&|load| load.server).map(|micros| micros / 1e6),
        }
    }
}

/// In which share of the time more than a little waited to be sent.
fn waited(build: &Build) -> Option<f64> {
    let shares: Vec<f64> = build.loads.iter().filter_map(|load| load.waits).map(f64::from).collect();
    (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
}

/// The share of the CPUs of these nodes that was in use; more than all is all.
fn mean(build: &Build, which: &dyn Fn(u16) -> bool) -> Option<f64> {
    let cpus = |node: u16| {
        build.begin.nodes.iter().find(|one| one.node == node).map_or(1.0, |one| f64::from(one.cpus.max(0.1)))
    };
    let (mut used, mut all) = (0.0, 0.0);
    for (node, busy) in build.loads.iter().flat_map(|load| &load.busy).filter(|(node, _)| which(*node)) {
        used += f64::from(busy.clamp(0.0, 1.0)) * cpus(*node);
        all += cpus(*node);
    }
    (all > 0.0).then(|| used / all)
}

/// One sentence or two.
pub(super) fn verdict(build: &Build, figures: &Figures) -> String {
    let used = Use::of(build);
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    if let Some(link) = used.link.filter(|link| *link > FULL) {
        return format!(
            "The link of this node, which all files come from: {} of it was in use.",
            percent(link)
        );
    }
    // Also where no link knows its speed. What waits because the other side has no CPU left to take it is no fault of the link.
    let others_are_busy = used.others.is_some_and(|others| others > FULL);
    if let (Some(share), false) = (used.waited.filter(|share| *share > HALF), others_are_busy) {
        let (_, sent) = used.net.unwrap_or_default();
        return format!(
            "The link of this node, which all files come from: for {} of the time data waited to be sent, at {} a second.",
            percent(share),
            crate::output::bytes(sent as u64)
        );
    }
    if figures.serial() > HALF {
        return format!(
            "The build itself: for {} of the time only one command ran. More nodes would not change that; the longest commands below might.",
            percent(figures.serial())
        );
    }
    let jobs = build.begin.jobs.unwrap_or(0);
    let waited_long = figures.waited() > 0.2 * figures.elapsed * figures.at_a_time();
    match (used.home, used.others) {
        (Some(home), Some(others)) if home > FULL && others > FULL => {
            "The CPUs of all nodes, which were busy all the time: more nodes would make it faster.".into()
        }
        (Some(home), Some(others)) if home > FULL && others < FULL => {
            let server = used.server.filter(|cpus| *cpus > 0.1);
            let server = server.map(|cpus| format!(" Its server of files took {cpus:.1} CPUs.")).unwrap_or_default();
            format!(
                "The CPUs of this node ({} in use, those of the others {}): make, the commands that run here, and the files of those that do not.{server}",
                percent(home),
                percent(others)
            )
        }
        (_, Some(others)) if others > FULL => {
            "The CPUs of the other nodes, which were busy all the time: more nodes would make it faster.".into()
        }
        (Some(home), _) if jobs > 1 && figures.at_a_time() > FULL * f64::from(jobs) && home < FULL && !waited_long => {
            format!("The number of jobs: {jobs} at a time ran nearly all the time, and CPUs were free. A larger -j would make it faster.")
        }
        (None, None) => "Not known: nobody looked at the nodes while it ran, or it was too short for that.".into(),
        _ => "Not known: neither CPUs nor this node's link were used up, nor was there only one command at a time. Disks and memory were not looked at.".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::notes::{Begin, Node};
    use super::*;

    fn build(home: f32, others: f32, megabytes: u64, jobs: u32) -> Build {
        let node = |node| Node { node, host: String::new(), cpus: 2.0, speed: 10_000 };
        let look = |second: u64| Load {
            at: second * 1_000_000,
            busy: vec![(1, home), (2, others)],
            net: Some((0, second * megabytes * 1_000_000)),
            link: Some(1_000_000_000),
            waits: Some(0.0),
            server: Some(second * 500_000),
        };
        let begin = Begin { me: 1, nodes: vec![node(1), node(2)], jobs: Some(jobs), ..Begin::default() };
        Build { begin, elapsed: 10_000_000, loads: (0..=10).map(look).collect(), ..Build::default() }
    }

    fn figures(ran: f64, alone: f64) -> Figures {
        let mut figures = Figures::of(&Build::default());
        (figures.elapsed, figures.alone) = (10.0, alone);
        let node = Node { node: 2, ..Node::default() };
        figures.nodes.push(super::super::figures::OnNode {
            node,
            commands: 9,
            failed: 0,
            cpu: ran,
            ran,
            waited: 0.0,
            most: 9,
        });
        figures
    }

    #[test]
    fn what_was_used_up_is_named() {
        let said = |build: &Build, figures: &Figures| verdict(build, figures);
        let busy = figures(60.0, 0.5);
        assert!(said(&build(0.5, 0.5, 120, 6), &busy).starts_with("The link"));
        assert!(said(&build(0.5, 0.5, 1, 9), &figures(12.0, 7.0)).starts_with("The build itself: for 70 %"));
        assert!(said(&build(1.5, 0.95, 1, 9), &busy).starts_with("The CPUs of all nodes"));
        let home = said(&build(1.5, 0.4, 1, 9), &busy);
        assert!(home.starts_with("The CPUs of this node") && home.contains("0.5 CPUs"), "{home}");
        assert!(said(&build(0.2, 0.95, 1, 9), &busy).starts_with("The CPUs of the other"));
        assert!(said(&build(0.3, 0.5, 1, 6), &busy).starts_with("The number of jobs: 6"));
        assert!(said(&build(0.3, 0.5, 1, 60), &busy).starts_with("Not known: neither"));
        let slow = |others| {
            let mut build = build(0.3, others, 1, 60);
            build.loads.iter_mut().skip(5).for_each(|load| (load.link, load.waits) = (None, Some(1.0)));
            said(&build, &busy)
        };
        let link = "The link of this node, which all files come from: for 55 % of the time";
        assert!(slow(0.5).starts_with(link), "{}", slow(0.5));
        assert!(slow(0.95).starts_with("The CPUs of the other"));
        assert!(said(&Build::default(), &busy).starts_with("Not known: nobody"));
    }
}
