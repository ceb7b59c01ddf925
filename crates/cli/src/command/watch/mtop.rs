//! `mtop`: the processes that are away from this node or came to it, and their CPU use, refreshed.

use super::mon::{into_failure, parse_interval, send_requests};
use crate::tool::Invocation;
use crate::{Failure, client, help, output};
use clap::{Args, Command, ValueEnum};
use tern_control::{Reply, Request};
use tern_top::{InitialView, SortOrder, ViewSettings};

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The initial sort order; the keys P, T and N change it
    #[arg(short, long, value_name = "WHAT", default_value = "cpu")]
    sort: Sort,
    /// Refresh at this interval; + and - change it
    #[arg(short = 'd', long, value_name = "SECONDS", value_parser = parse_interval)]
    interval: Option<std::time::Duration>,
    /// Print the list once and exit; this takes a second, to measure the CPU use
    #[arg(short = 'b', long, conflicts_with = "json")]
    once: bool,
    /// Print the rows as a JSON array, as mps does, and exit
    #[arg(long)]
    json: bool,
}

/// The sort orders.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Sort {
    /// Current CPU use
    Cpu,
    /// CPU time used
    Time,
    /// Process id
    Pid,
}

impl From<Sort> for SortOrder {
    fn from(sort: Sort) -> Self {
        match sort {
            Sort::Cpu => Self::Cpu,
            Sort::Time => Self::Time,
            Sort::Pid => Self::Pid,
        }
    }
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("mtop"))
        .about("Watch the processes that are away from this node, or came to it")
        .long_about(
            "Watch the processes that are away from this node, came to it, or were started with mosrun.\n\n  \
             PID      the pid at its home\n  \
             WHERE    for a process of this node: the node where it runs\n  \
             FROM     for a guest: its home\n  \
             %CPU     percentage of one CPU since the last refresh\n  \
             TIME     CPU time used, as known to this node\n  \
             MIGS     number of migrations\n\n\
             Keys: m migrates a process of this node, k sends it a signal; P, T and N sort; h shows all keys.",
        )
        .after_help(help::after_help("  mtop\n  mtop --sort time\n  mtop -d 5", ""))
}

/// `mtop …`.
///
/// # Errors
/// If ternd does not answer and the list is wanted only once, or there is no terminal.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    if options.json {
        return match client::request(&Request::Processes)? {
            Reply::Processes(rows) => output::print_json(&rows),
            other => Err(client::unexpected_reply(&other)),
        };
    }
    let view = InitialView::Processes(options.sort.into());
    if options.once {
        return output::print(
            &tern_top::print_once(view, ViewSettings::default(), &send_requests()).map_err(into_failure)?,
        );
    }
    tern_top::show(view, ViewSettings::default(), options.interval, &send_requests()).map_err(into_failure)
}
