//! `tern sim`: a simulated cluster of up to thousands of nodes. All of it is in `tern_sim`; here are its command
//! line and its tables.

use crate::output::{self, Table};
use crate::tool::Call;
use crate::{Failure, help};
use clap::{Args, Command};
use serde::Serialize;
use tern_sim::{Comparison, Information, MIXES, Mix, Objective, Outcome, Placing, Policy, Settings, compare};

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// How many nodes, 2 to 10,000; tutorial and login have their own number
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(2..=10_000))]
    nodes: u32,
    /// How many minutes of the cluster's time, 1 to 1,440
    #[arg(long, value_name = "M", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_440))]
    minutes: u32,
    /// What happens there; see the list below
    #[arg(long, value_name = "NAME", default_value = "mixed", value_parser = names())]
    mix: String,
    /// What the balancer makes small: the time that a mover needs, or the opportunity cost of all
    #[arg(long, value_name = "NAME", default_value = "greedy", value_parser = ["greedy", "opportunity"])]
    policy: String,
    /// Where nodes know of each other from; with ideal they know everything at once, to see what gossip costs
    #[arg(long, value_name = "NAME", default_value = "gossip", value_parser = ["gossip", "ideal"])]
    information: String,
    /// For everything that is by chance; the same seed gives the same report
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

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("sim"))
        .about("Simulate a cluster that balances itself, and measure how well")
        .long_about(format!(
            "Simulate a cluster of up to 10,000 nodes that balances itself. It runs the gossip and the balancer of \
             ternd in one process, needs no cluster and no rights, and compares what they achieve with static \
             placement and with an imaginary scheduler that knows everything and moves for nothing.\n\n\
             Mixes:\n{}",
            mixes()
        ))
        .after_help(help::closing(
            "  tern sim --mix tutorial\n  \
               tern sim --nodes 1000 --minutes 5 --mix churn --seed 7\n  \
               tern sim --mix heavy --policy opportunity --json | jq .balanced.mean_slowdown",
            "",
        ))
}

/// `tern sim …`.
///
/// # Errors
/// If the command line is wrong, or standard output does not take the report.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    let Some(mix) = Mix::named(&options.mix) else {
        return Err(Failure::usage(call.tool, format!("no mix is called {}", options.mix)));
    };
    let nodes = usize::try_from(options.nodes).unwrap_or(usize::MAX);
    let scenario = mix.scenario(nodes, u64::from(options.minutes), options.seed);
    let objective = if options.policy == "greedy" { Objective::Greedy } else { Objective::Opportunity };
    let information = if options.information == "gossip" { Information::Gossip } else { Information::Ideal };
    let settings = Settings {
        placing: Placing::Balanced,
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
    output::print(&text(&mix, scenario.nodes.len(), &comparison))
}

fn names() -> Vec<&'static str> {
    MIXES.iter().map(|mix| mix.name).collect()
}

fn mixes() -> String {
    let lines = MIXES.iter().map(|mix| format!("  {:12} {}", mix.name, mix.about));
    lines.collect::<Vec<_>>().join("\n")
}

fn text(mix: &Mix, nodes: usize, comparison: &Comparison) -> String {
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
        table.row(row(name, outcome));
    }
    let mut text = format!("{}: {nodes} nodes, {}\n\n{}\n", mix.name, mix.about, table.render(None));
    text.push_str(&format!(
        "With equal parts of all CPUs at no cost the mean slowdown would be {:.2}. No schedule ends before {:.1} s.\n",
        comparison.ideal_slowdown, comparison.earliest_end_s
    ));
    text.push_str(&movement(&comparison.balanced));
    text.push_str(
        "\nSlowdown: time from arrival to end, against the time alone on the fastest CPU. Wait: how many times as \
         long\nas with a fair share a job took in a window of ten seconds.\n",
    );
    text
}

fn row(name: &str, outcome: &Outcome) -> Vec<String> {
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

/// What the balancer did, and what it knew.
fn movement(outcome: &Outcome) -> String {
    let reasons: Vec<String> =
        outcome.reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    let mut text = format!(
        "Moves: {} ({:.2} a job, at most {}), of which back within 10 s: {}; refused {}, broken {}.\n",
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
            "Deaths of nodes were known after {:.1} s on average, everywhere after {:.1} s.\n",
            deaths.mean_s, deaths.most_s
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_of_the_tutorial_reads_well() {
        let mix = Mix::named("tutorial").unwrap();
        let settings = Settings {
            placing: Placing::Balanced,
            information: Information::Gossip,
            policy: Policy::default(),
            seed: 1,
        };
        let comparison = compare(&mix.scenario(2, 1, 1), &settings);
        let text = text(&mix, 2, &comparison);
        assert!(text.starts_with("tutorial: 2 nodes, 13 equal jobs"), "{text}");
        let row = text.lines().find(|line| line.starts_with("balanced")).unwrap();
        assert_eq!(row.split_whitespace().collect::<Vec<_>>()[1..4], ["13", "0", "0"], "{text}");
        assert!(text.contains("No schedule ends before 389.6 s."), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    }

    #[test]
    fn unknown_mixes_are_usage_errors() {
        let args = ["--mix".into(), "quiet".into()];
        let failure = run(&Call { tool: "tern sim", args: &args }).unwrap_err();
        assert_eq!(failure.code, 2);
    }
}
