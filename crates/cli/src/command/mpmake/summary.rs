//! What a terminal shows when a build is over: how many commands ran where, and why there.

use super::build::Build;
use super::figures::Figures;
use std::io::{self, Write};
use std::path::Path;

/// Says it on standard error.
pub(super) fn say(build: &Build, report: Option<&Path>) {
    let mut text = summary(build);
    if let Some(report) = report {
        text += &format!("mpmake: the report is {}\n", report.display());
    }
    let _gone = io::stderr().write_all(text.as_bytes());
}

fn summary(build: &Build) -> String {
    let figures = Figures::of(build);
    if figures.commands() == 0 {
        return String::new();
    }
    let mut places: Vec<_> = figures.nodes.iter().filter(|on| on.commands > 0).collect();
    places.sort_by_key(|on| on.node.node != build.begin.me);
    let place = |on: &&super::figures::OnNode| {
        if on.node.node == build.begin.me {
            format!("{} here", on.commands)
        } else {
            format!("{} on {}", on.commands, on.node.name())
        }
    };
    let places: Vec<_> = places.iter().map(place).collect();
    let whys: Vec<_> = figures.whys.iter().map(|(why, count)| format!("{count} {why}")).collect();
    format!(
        "mpmake: {} commands in {:.1} s: {}; {:.1} s of CPU time, {:.1} at a time\nmpmake: why there: {}\n",
        figures.commands(),
        figures.elapsed,
        places.join(", "),
        figures.cpu(),
        figures.at_a_time(),
        crate::output::plain(&whys.join(", "))
    )
}

#[cfg(test)]
mod tests {
    use super::super::build::tests::NOTES;
    use super::*;

    #[test]
    fn it_says_how_many_ran_where_and_why() {
        assert_eq!(
            summary(&Build::read(NOTES.as_bytes())),
            "mpmake: 4 commands in 10.0 s: 2 here, 2 on away; 10.0 s of CPU time, 1.2 at a time\n\
             mpmake: why there: 2 this node had nothing to do, 1 first to have room, 1 least loaded\n"
        );
        assert_eq!(summary(&Build::default()), "");
    }
}
