//! `tern sim`: simulates a cluster of up to 10,000 nodes. `tern_sim` implements it; this file has
//! the command line and the tables.

use crate::output::{self, Table};
use crate::tool::Invocation;
use crate::{Failure, help};
use clap::{Args, Command};
use serde::Serialize;
use tern_sim::{
    Comparison, Information, MIXES, Mix, Objective, PlacementPolicy, Policy, RunResult, SimSettings, compare,
};

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The number of nodes, 2 to 10,000; tutorial and login have a fixed number
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(2..=10_000))]
    nodes: u32,
    /// The simulated time in minutes, 1 to 1,440
    #[arg(long, value_name = "M", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_440))]
    minutes: u32,
    /// The workload, one of the mixes
    #[arg(long, value_name = "NAME", default_value = "mixed", value_parser = mix_names())]
    mix: String,
    /// The objective to minimise: the time a moved process needs, or the total opportunity cost
    #[arg(long, value_name = "NAME", default_value = "greedy", value_parser = ["greedy", "opportunity"])]
    policy: String,
    /// How nodes learn about each other; ideal informs all at once, to show the cost of gossip
    #[arg(long, value_name = "NAME", default_value = "gossip", value_parser = ["gossip", "ideal"])]
    information: String,
    /// The seed of the random numbers; the same seed gives the same report
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    nodes: usize,
    minutes: u32,
    mix: &'a str,
    policy: &'a str,
    information: &'a str,
    seed: u64,
    #[serde(flatten)]
    comparison: &'a Comparison,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("sim"))
        .about("Simulate a cluster that balances itself, and measure the result")
        .long_about(format!(
            "Simulate a cluster of up to 10,000 nodes that balances itself. It runs the gossip and the balancer of \
             ternd in one process, needs no cluster and no privileges, and compares the result with static \
             placement and with an ideal scheduler that knows everything and moves at no cost.\n\n\
             Mixes:\n{}",
            mix_list()
        ))
        .after_help(help::after_help(
            "  tern sim --mix tutorial\n  \
               tern sim --nodes 1000 --minutes 5 --mix churn --seed 7\n  \
               tern sim --mix heavy --policy opportunity --json | jq .balanced.mean_slowdown",
            "",
        ))
}

/// `tern sim …`.
///
/// # Errors
/// If the command line is wrong, or standard output cannot be written.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let Some(mix) = Mix::named(&options.mix) else {
        return Err(Failure::usage(invocation.tool, format!("no mix is named {}", options.mix)));
    };
    let nodes = usize::try_from(options.nodes).unwrap_or(usize::MAX);
    let scenario = mix.scenario(nodes, u64::from(options.minutes), options.seed);
    let objective = if options.policy == "greedy" { Objective::Greedy } else { Objective::Opportunity };
    let information = if options.information == "gossip" { Information::Gossip } else { Information::Ideal };
    let settings = SimSettings {
        placing: PlacementPolicy::Balanced,
        information,
        policy: Policy { objective, ..Policy::default() },
        seed: options.seed,
    };
    let comparison = compare(&scenario, &settings);
    if options.json {
        return output::print_json(&Report {
            nodes: scenario.nodes.len(),
            minutes: options.minutes,
            mix: &options.mix,
            policy: &options.policy,
            information: &options.information,
            seed: options.seed,
            comparison: &comparison,
        });
    }
    output::print(&report_text(&mix, scenario.nodes.len(), &comparison))
}

fn mix_names() -> Vec<&'static str> {
    MIXES.iter().map(|mix| mix.name).collect()
}

fn mix_list() -> String {
    let lines = MIXES.iter().map(|mix| format!("  {:12} {}", mix.name, mix.about));
    lines.collect::<Vec<_>>().join("\n")
}

fn report_text(mix: &Mix, nodes: usize, comparison: &Comparison) -> String {
    let mut table = Table::new(&[
        "",
        ">DONE",
        ">LEFT",
        ">LOST",
        ">NO MEMORY",
        ">MAKESPAN",
        ">SLOWDOWN",
        ">95%",
        ">WAIT 99%",
        ">WORST",
        ">SWAP",
    ]);
    let rows = [
        ("balanced", Some(&comparison.balanced)),
        ("round robin", Some(&comparison.round_robin)),
        ("random", Some(&comparison.random)),
        ("as they arrive", comparison.home.as_ref()),
    ];
    for (name, outcome) in rows.into_iter().filter_map(|(name, outcome)| Some((name, outcome?))) {
        table.push(outcome_row(name, outcome));
    }
    let mut text = format!("{}: {nodes} nodes, {}\n\n{}\n", mix.name, mix.about, table.render(None));
    text.push_str(&format!(
        "With equal shares of all CPUs at no cost, the mean slowdown would be {:.2}. No schedule ends before {:.1} s.\n",
        comparison.ideal_slowdown, comparison.earliest_end_s
    ));
    text.push_str(&moves_text(&comparison.balanced));
    text.push_str(
        "\nSlowdown: time from arrival to end, relative to the time alone on the fastest CPU. Wait: time of a job in a\n\
         window of ten seconds, relative to a fair share.\n",
    );
    text
}

fn outcome_row(name: &str, outcome: &RunResult) -> Vec<String> {
    vec![
        name.to_owned(),
        outcome.finished.to_string(),
        outcome.unfinished.to_string(),
        outcome.lost.to_string(),
        outcome.out_of_memory.to_string(),
        outcome.makespan_s.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.1} s")),
        format!("{:.2}", outcome.mean_slowdown),
        format!("{:.2}", outcome.p95_slowdown),
        format!("{:.2}", outcome.fairness.p99),
        format!("{:.2}", outcome.fairness.worst),
        output::bytes(outcome.most_swap as u64),
    ]
}

/// Describes the balancer's moves and the age of its information.
fn moves_text(outcome: &RunResult) -> String {
    let reasons: Vec<String> =
        outcome.reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    let mut text = format!(
        "Moves: {} ({:.2} per job, at most {}), of which back within 10 s: {}; refused {}, failed {}.\n",
        outcome.moves,
        outcome.moves_per_job(),
        outcome.most_moves,
        outcome.back_within_10s,
        outcome.refused,
        outcome.broken
    );
    if !reasons.is_empty() {
        text.push_str(&format!("Decided: {}.\n", reasons.join(", ")));
    }
    if let Some(ages) = outcome.ages {
        text.push_str(&format!(
            "Information: {:.1} s old on average, the oldest {:.1} s, about {:.0} nodes.\n",
            ages.average_ms / 1000.0,
            ages.worst_ms / 1000.0,
            ages.known
        ));
    }
    if let Some(deaths) = outcome.deaths_known {
        text.push_str(&format!(
            "Dead nodes were detected after {:.1} s on average, by all nodes after {:.1} s.\n",
            deaths.mean_s, deaths.most_s
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tutorial_report_is_readable() {
        let mix = Mix::named("tutorial").unwrap();
        let settings = SimSettings {
            placing: PlacementPolicy::Balanced,
            information: Information::Gossip,
            policy: Policy::default(),
            seed: 1,
        };
        let comparison = compare(&mix.scenario(2, 1, 1), &settings);
        let text = report_text(&mix, 2, &comparison);
        assert!(text.starts_with("tutorial: 2 nodes, 13 equal jobs"), "{text}");
        let row = text.lines().find(|line| line.starts_with("balanced")).unwrap();
        assert_eq!(row.split_whitespace().collect::<Vec<_>>()[1..4], ["13", "0", "0"], "{text}");
        assert!(text.contains("No schedule ends before 389.6 s."), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    }

    #[test]
    fn unknown_mixes_are_usage_errors() {
        let args = ["--mix".into(), "quiet".into()];
        let failure = run(&Invocation { tool: "tern sim", args: &args }).unwrap_err();
        assert_eq!(failure.code, 2);
    }
}
