//! `mtop`: the processes that are away or came from elsewhere, and how much CPU each uses, kept up to date.

use super::mon::{ask, failed, seconds};
use crate::tool::Call;
use crate::{Failure, client, help, output};
use clap::{Args, Command, ValueEnum};
use tern_control::{Reply, Request};
use tern_top::{Order, Settings, Subject};

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// What it is sorted by at first; P, T and N change it
    #[arg(short, long, value_name = "WHAT", default_value = "cpu")]
    sort: Sort,
    /// Ask this often; + and - change it
    #[arg(short = 'd', long, value_name = "SECONDS", value_parser = seconds)]
    interval: Option<std::time::Duration>,
    /// Print the list once, and end; it takes a second to see who uses CPU
    #[arg(short = 'b', long, conflicts_with = "json")]
    once: bool,
    /// Print the rows as a JSON array, as mps does, and end
    #[arg(long)]
    json: bool,
}

/// What a list can be sorted by.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Sort {
    /// The use of CPU now
    Cpu,
    /// The CPU time used
    Time,
    /// The number
    Pid,
}

impl From<Sort> for Order {
    fn from(sort: Sort) -> Self {
        match sort {
            Sort::Cpu => Self::Cpu,
            Sort::Time => Self::Time,
            Sort::Pid => Self::Pid,
        }
    }
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("mtop"))
        .about("Watch the processes that are away from this node, or came to it")
        .long_about(
            "Watch the processes that are away from this node, came to it, or were started with mosrun.\n\n  \
             PID      the process at its home\n  \
             WHERE    for a process of this node: the node where it runs\n  \
             FROM     for a guest: its home\n  \
             %CPU     of one CPU, since the list was last brought up to date\n  \
             TIME     CPU time used, as far as this node knows\n  \
             MIGS     migrations so far\n\n\
             Keys: m moves a process of this node, k sends it a signal; P, T and N sort; h explains all.",
        )
        .after_help(help::closing("  mtop\n  mtop --sort time\n  mtop -d 5", ""))
}

/// `mtop …`.
///
/// # Errors
/// If ternd does not answer and the list is wanted only once, or there is no terminal.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    if options.json {
        return match client::ask(&Request::Processes)? {
            Reply::Processes(rows) => output::print_json(&rows),
            other => Err(client::unexpected(&other)),
        };
    }
    let subject = Subject::Processes(options.sort.into());
    if options.once {
        return output::print(&tern_top::print_once(subject, Settings::default(), &ask()).map_err(failed)?);
    }
    tern_top::show(subject, Settings::default(), options.interval, &ask()).map_err(failed)
}
