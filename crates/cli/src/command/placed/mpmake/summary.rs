//! The summary on the terminal at the end of a build: how many commands ran where, and why.

use super::build::Build;
use super::statistics::Statistics;
use std::io::{self, Write};
use std::path::Path;

/// Prints the summary on standard error.
pub(super) fn print(build: &Build, report: Option<&Path>) {
    let mut text = summary(build);
    if let Some(report) = report {
        text += &format!("mpmake: the report is in {}\n", report.display());
    }
    let _gone = io::stderr().write_all(text.as_bytes());
}

fn summary(build: &Build) -> String {
    let statistics = Statistics::new(build);
    if statistics.commands() == 0 {
        return String::new();
    }
    let mut places: Vec<_> = statistics.nodes.iter().filter(|on| on.commands > 0).collect();
    places.sort_by_key(|on| on.node.node != build.start.me);
    let place = |on: &&super::statistics::NodeStatistics| {
        if on.node.node == build.start.me {
            format!("{} here", on.commands)
        } else {
            format!("{} on {}", on.commands, on.node.name())
        }
    };
    let places: Vec<_> = places.iter().map(place).collect();
    let reasons: Vec<_> = statistics.reasons.iter().map(|(why, count)| format!("{count} {why}")).collect();
    format!(
        "mpmake: {} commands in {:.1} s: {}; {:.1} s of CPU time, {:.1} at a time\nmpmake: reasons: {}\n",
        statistics.commands(),
        statistics.elapsed,
        places.join(", "),
        statistics.cpu(),
        statistics.mean_running(),
        crate::output::sanitize(&reasons.join(", "))
    )
}

#[cfg(test)]
mod tests {
    use super::super::build::tests::EVENTS;
    use super::*;

    #[test]
    fn summary_counts_nodes_and_reasons() {
        assert_eq!(
            summary(&Build::read(EVENTS.as_bytes())),
            "mpmake: 4 commands in 10.0 s: 2 here, 2 on away; 10.0 s of CPU time, 1.2 at a time\n\
             mpmake: reasons: 2 this node was idle, 1 first with free capacity, 1 least loaded\n"
        );
        assert_eq!(summary(&Build::default()), "");
    }
}
