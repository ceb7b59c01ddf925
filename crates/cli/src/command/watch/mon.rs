//! `mon`, also `mosmon`: shows the nodes of the cluster as bars on a terminal.

use crate::tool::Invocation;
use crate::{Failure, client, help, output};
use clap::{Arg, ArgAction, Args, Command};
use std::sync::Arc;
use tern_control::{Reply, Request};
use tern_ids::NodeId;
use tern_top::{ColumnWidth, Display, InitialView, RequestFn, TopError, ViewSettings};

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Start with load: 1 is one standard CPU kept busy; a node with more or faster CPUs shows less
    #[arg(short = 'l', group = "display")]
    load: bool,
    /// Start with load on a logarithmic scale
    #[arg(short = 'L', group = "display")]
    log: bool,
    /// Start with the speed of a CPU (10000 is the standard); the number of CPUs is below
    #[arg(short = 's', group = "display")]
    speed: bool,
    /// Start with memory: used, and available to a new process (+)
    #[arg(short = 'm', group = "display")]
    memory: bool,
    /// Start with raw memory: caches count as used
    #[arg(short = 'r', group = "display")]
    raw: bool,
    /// Start with utilisability: percentage of the time not spent waiting for paging
    #[arg(short = 'u', group = "display")]
    utilisability: bool,
    /// Wide columns: horizontal numbers, and the value above each bar
    #[arg(short = 'w', group = "width")]
    wide: bool,
    /// Narrow columns: vertical numbers
    #[arg(short = 'v', group = "width")]
    vertical: bool,
    /// Vertical numbers, and no space between bars
    #[arg(short = 'V', group = "width")]
    tight: bool,
    /// The widest columns in which all nodes fit (the default)
    #[arg(short = 'a', group = "width")]
    auto: bool,
    /// Also show dead nodes, and nodes that have never been in contact
    #[arg(short = 'd')]
    dead: bool,
    /// Show the cluster's totals
    #[arg(short = 't')]
    totals: bool,
    /// Refresh at this interval; + and - change it
    #[arg(short = 'i', long, value_name = "SECONDS", value_parser = parse_interval)]
    interval: Option<std::time::Duration>,
    /// Print one picture and exit
    #[arg(long, conflicts_with = "json")]
    once: bool,
    /// Print the report on all nodes as one line of JSON and exit
    #[arg(long)]
    json: bool,
    /// The first node shown
    #[arg(value_name = "+ID", value_parser = parse_first_node)]
    first: Option<NodeId>,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    describe_as("mon")
}

/// The same tool under MOSIX's newer name; hidden, so that the list of tools has it once.
pub(crate) fn describe_mosmon() -> Command {
    describe_as("mosmon").hide(true)
}

fn describe_as(name: &'static str) -> Command {
    Options::augment_args(help::command(name))
        // -V is an option of MOSIX's mon, so it cannot print the version.
        .disable_version_flag(true)
        .arg(Arg::new("version").long("version").action(ArgAction::Version).help("Print version"))
        .about("Watch the nodes of the cluster, one bar per node")
        .long_about(
            "Watch the nodes of the cluster, one bar per node, and the migrations between them. The option \
             letters are also keys; h shows all keys. Enter or a node's number shows that node's processes, \
             and m there migrates one.\n\nMarks below a node: ? it is suspected to be dead; b block, s stay, \
             l lstay, q quiet, as set by its administrator. Colours are not used if NO_COLOR is set or TERM \
             names a terminal without colours, nor characters beyond ASCII if the locale is not UTF-8.",
        )
        .after_help(help::after_help(
            "  mon\n  mon -m -t               memory and totals\n  mon -V -d +200          all nodes from 200 on\n  \
             mon --json | jq '.nodes[] | {node, load}'",
            "",
        ))
}

/// `mon …`.
///
/// # Errors
/// If ternd does not answer and only one picture is asked for, or there is no terminal.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    if options.json {
        return match client::request(&Request::Cluster)? {
            Reply::Cluster(report) => output::print_json(&report),
            other => Err(client::unexpected_reply(&other)),
        };
    }
    let settings = options.settings();
    if options.once {
        return output::print(
            &tern_top::print_once(InitialView::Cluster, settings, &send_requests()).map_err(into_failure)?,
        );
    }
    tern_top::show(InitialView::Cluster, settings, options.interval, &send_requests()).map_err(into_failure)
}

impl Options {
    fn settings(&self) -> ViewSettings {
        let displays = [
            (self.log, Display::LogLoad),
            (self.speed, Display::Speed),
            (self.memory, Display::Memory),
            (self.raw, Display::RawMemory),
            (self.utilisability, Display::Utilisability),
        ];
        let widths = [
            (self.wide, ColumnWidth::Wide),
            (self.vertical, ColumnWidth::Vertical),
            (self.tight, ColumnWidth::Tight),
        ];
        ViewSettings {
            display: displays.into_iter().find(|(set, _)| *set).map_or_else(Display::default, |(_, it)| it),
            width: widths.into_iter().find(|(set, _)| *set).map_or_else(ColumnWidth::default, |(_, it)| it),
            dead: self.dead,
            totals: self.totals,
            first: self.first,
        }
    }
}

/// Sends requests of `mon` and `mtop` to the node's daemon.
pub(super) fn send_requests() -> RequestFn {
    Arc::new(|request| {
        client::request(request).map_err(|failure| TopError {
            message: failure.message,
            hint: failure.hint,
            code: failure.code,
        })
    })
}

/// An error of `mon` or `mtop` as a failure of a tool.
pub(super) fn into_failure(error: TopError) -> Failure {
    Failure { hint: error.hint, ..Failure::with_code(error.code, error.message) }
}

/// Parses a number of seconds from 0.1 to 3600, such as `0.5` or `2`.
pub(super) fn parse_interval(word: &str) -> Result<std::time::Duration, String> {
    let expected = || "expected a number of seconds from 0.1 to 3600".to_owned();
    let number: f64 = word.parse().map_err(|_not_a_number| expected())?;
    if (0.1..=3600.0).contains(&number) {
        Ok(std::time::Duration::from_secs_f64(number))
    } else {
        Err(expected())
    }
}

fn parse_first_node(word: &str) -> Result<NodeId, String> {
    let number = word.strip_prefix('+').and_then(|number| number.parse().ok()).filter(|number| *number > 0);
    number.map(NodeId).ok_or_else(|| "expected a node with a plus sign, such as +12".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn parse(words: &[&str]) -> Result<Options, Failure> {
        let args: Vec<OsString> = words.iter().map(OsString::from).collect();
        help::parse(describe(), &Invocation { tool: "mon", args: &args }).map(Option::unwrap)
    }

    #[test]
    fn mosix_options_are_parsed() {
        let settings = parse(&["-V", "-m", "-dt", "+12"]).unwrap().settings();
        let expected = ViewSettings {
            display: Display::Memory,
            width: ColumnWidth::Tight,
            dead: true,
            totals: true,
            first: Some(NodeId(12)),
        };
        assert_eq!(settings, expected);
        assert_eq!(parse(&["-l", "-a"]).unwrap().settings(), ViewSettings::default());
    }

    #[test]
    fn conflicting_or_invalid_options_are_refused() {
        for words in [&["-l", "-m"][..], &["-w", "-V"], &["12"], &["+0"], &["-i", "0"], &["--once", "--json"]]
        {
            assert_eq!(parse(words).unwrap_err().code, 2, "{words:?}");
        }
    }
}
