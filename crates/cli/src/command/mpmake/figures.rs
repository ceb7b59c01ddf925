//! What a build's commands add up to: pure arithmetic, for the summary and the report.

use super::build::{Build, Command};
use super::notes::Node;

/// So many of the longest commands are named.
const LONGEST: usize = 10;

/// What ran on one node.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct OnNode {
    /// Which.
    pub(super) node: Node,
    /// Commands that ran there.
    pub(super) commands: usize,
    /// Of them, those that failed.
    pub(super) failed: usize,
    /// Seconds of CPU time of those of which that is known.
    pub(super) cpu: f64,
    /// Seconds for which commands ran, added up.
    pub(super) ran: f64,
    /// Seconds for which they had waited, added up.
    pub(super) waited: f64,
    /// The most that ran at a time.
    pub(super) most: usize,
}

/// All of it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Figures {
    /// Seconds from the build's begin to its end.
    pub(super) elapsed: f64,
    /// By number.
    pub(super) nodes: Vec<OnNode>,
    /// Commands of which the CPU time is not known.
    pub(super) unknown: usize,
    /// Seconds in which no command ran, and in which exactly one did.
    pub(super) none: f64,
    /// See `none`.
    pub(super) alone: f64,
    /// The most that ran at a time.
    pub(super) most: usize,
    /// Seconds from the last moment at which at least half of the most ran to the end; what ran in it is below.
    pub(super) tail: f64,
    /// The commands that ended in the tail, the longest first.
    pub(super) in_tail: Vec<usize>,
    /// The commands that took longest, by their place in the build.
    pub(super) longest: Vec<usize>,
    /// Reasons for places, and how many commands had each; the most frequent first.
    pub(super) whys: Vec<(String, usize)>,
}

impl Figures {
    /// Adds a build up.
    pub(super) fn of(build: &Build) -> Self {
        let mut nodes: Vec<_> = build.nodes().into_iter().map(|node| on_node(build, node)).collect();
        let levels = levels(build);
        let running = |count: usize| -> u64 {
            levels.iter().filter(|level| level.1 == count).map(|level| level.2 - level.0).sum()
        };
        let most = levels.iter().map(|level| level.1).max().unwrap_or(0);
        let busy_until =
            levels.iter().rfind(|level| most > 1 && level.1 * 2 >= most).map_or(build.elapsed, |l| l.2);
        let mut longest: Vec<usize> =
            (0..build.commands.len()).filter(|at| build.commands[*at].ran() > 0).collect();
        longest.sort_by_key(|at| std::cmp::Reverse(build.commands[*at].ran()));
        let mut in_tail = longest.clone();
        in_tail.retain(|at| build.commands[*at].ended.is_some_and(|ended| ended > busy_until));
        in_tail.truncate(LONGEST);
        longest.truncate(LONGEST);
        for (node, most) in most_on(build) {
            if let Some(on) = nodes.iter_mut().find(|on| on.node.node == node) {
                on.most = most;
            }
        }
        Self {
            elapsed: seconds(build.elapsed),
            unknown: build.commands.iter().filter(|c| c.begun.is_some() && c.cpu.is_none()).count(),
            none: seconds(running(0)),
            alone: seconds(running(1)),
            most,
            tail: seconds(build.elapsed.saturating_sub(busy_until)),
            in_tail,
            longest,
            whys: whys(build),
            nodes,
        }
    }

    /// Commands that ran.
    pub(super) fn commands(&self) -> usize {
        self.nodes.iter().map(|on| on.commands).sum()
    }

    /// Seconds of CPU time.
    pub(super) fn cpu(&self) -> f64 {
        self.nodes.iter().map(|on| on.cpu).sum()
    }

    /// How many commands ran at a time, on the average.
    pub(super) fn at_a_time(&self) -> f64 {
        self.nodes.iter().map(|on| on.ran).sum::<f64>() / self.elapsed.max(1e-6)
    }

    /// Seconds of commands' waiting.
    pub(super) fn waited(&self) -> f64 {
        self.nodes.iter().map(|on| on.waited).sum()
    }

    /// The share of the time in which only one command ran: what more nodes cannot shorten.
    pub(super) fn serial(&self) -> f64 {
        self.alone / self.elapsed.max(1e-6)
    }
}

fn on_node(build: &Build, node: Node) -> OnNode {
    let here = || build.commands.iter().filter(|c| c.begun.is_some() && c.node == node.node);
    let sum = |of: &dyn Fn(&Command) -> u64| seconds(here().map(of).sum());
    OnNode {
        commands: here().count(),
        failed: here().filter(|c| c.exit != 0).count(),
        cpu: sum(&|c| c.cpu.unwrap_or(0)),
        ran: sum(&|c| c.ran()),
        waited: sum(&|c| c.begun.map_or(0, |begun| begun.saturating_sub(c.asked))),
        most: 0,
        node,
    }
}

/// From when to when how many commands ran: begin, count, end.
fn levels(build: &Build) -> Vec<(u64, usize, u64)> {
    let mut changes: Vec<(u64, i64)> = Vec::new();
    for command in &build.commands {
        if let Some((begun, ended)) = command.begun.zip(command.ended) {
            changes.extend([(begun, 1), (ended, -1)]);
        }
    }
    // At one moment, who ends makes room before who begins.
    changes.sort_unstable();
    let (mut levels, mut at, mut count) = (Vec::new(), 0, 0i64);
    for (when, change) in changes {
        let when = when.min(build.elapsed);
        if when > at {
            levels.push((at, usize::try_from(count).unwrap_or(0), when));
            at = when;
        }
        count += change;
    }
    if build.elapsed > at {
        levels.push((at, 0, build.elapsed));
    }
    levels
}

/// The most commands of each node at a time: so many lanes it has.
fn most_on(build: &Build) -> Vec<(u16, usize)> {
    let mut most: std::collections::BTreeMap<u16, usize> = std::collections::BTreeMap::new();
    for command in build.commands.iter().filter(|c| c.begun.is_some()) {
        let lanes = most.entry(command.node).or_default();
        *lanes = (*lanes).max(command.lane + 1);
    }
    most.into_iter().collect()
}

fn whys(build: &Build) -> Vec<(String, usize)> {
    let mut whys: std::collections::BTreeMap<&str, usize> = std::collections::BTreeMap::new();
    for command in build.commands.iter().filter(|c| c.begun.is_some()) {
        *whys.entry(&command.why).or_default() += 1;
    }
    let mut whys: Vec<_> = whys.into_iter().map(|(why, count)| (why.to_owned(), count)).collect();
    whys.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    whys
}

/// Microseconds as seconds.
pub(super) fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::super::build::tests::NOTES;
    use super::*;

    #[test]
    fn a_build_is_added_up() {
        let figures = Figures::of(&Build::read(NOTES.as_bytes()));
        assert_eq!((figures.elapsed, figures.cpu(), figures.most), (10.0, 10.0, 2));
        // One alone: 0–2, 2.5–3, 6–7, 7–10; none: 2–2.5.
        assert_eq!((figures.alone, figures.none, figures.waited()), (6.5, 0.5, 1.5));
        assert_eq!(figures.at_a_time(), 1.25);
        let of: Vec<_> =
            figures.nodes.iter().map(|n| (n.node.node, n.commands, n.cpu, n.failed, n.most)).collect();
        assert_eq!(of, [(1, 2, 3.5, 1, 1), (2, 2, 6.5, 0, 2)]);
        assert_eq!(figures.longest, [2, 1, 3, 0].map(|at| [0, 1, 2, 3][at]), "4, 3.5, 3 and 2 s");
        assert_eq!(figures.whys[0], ("this node had nothing to do".to_owned(), 2));
    }

    #[test]
    fn nothing_adds_up_to_nothing() {
        let figures = Figures::of(&Build::default());
        assert_eq!((figures.commands(), figures.most, figures.tail), (0, 0, 0.0));
        assert!(figures.serial() == 0.0 && figures.at_a_time() == 0.0);
    }
}
