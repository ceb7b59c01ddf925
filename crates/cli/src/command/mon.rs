//! `mon`, also `mosmon`: the nodes of the cluster as bars on a terminal.

use crate::tool::Call;
use crate::{Failure, client, help, output};
use clap::{Arg, ArgAction, Args, Command};
use std::sync::Arc;
use tern_control::{Reply, Request};
use tern_ids::NodeId;
use tern_top::{Ask, Display, Settings, Subject, Trouble, Width};

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// Begin with load: 1 is one standard CPU kept busy; a node with more or faster CPUs shows less
    #[arg(short = 'l', group = "display")]
    load: bool,
    /// Begin with load on a logarithmic scale
    #[arg(short = 'L', group = "display")]
    log: bool,
    /// Begin with the speed of a CPU (10000 is the standard), and the number of CPUs below
    #[arg(short = 's', group = "display")]
    speed: bool,
    /// Begin with memory: what is used, and what a newcomer could have (+)
    #[arg(short = 'm', group = "display")]
    memory: bool,
    /// Begin with raw memory: caches count as used
    #[arg(short = 'r', group = "display")]
    raw: bool,
    /// Begin with utilisability: percent of the time that is not spent waiting for paging
    #[arg(short = 'u', group = "display")]
    utilisability: bool,
    /// Wide columns: numbers side by side, and the value above each bar
    #[arg(short = 'w', group = "width")]
    wide: bool,
    /// Numbers written downwards
    #[arg(short = 'v', group = "width")]
    vertical: bool,
    /// The same, and no space between bars
    #[arg(short = 'V', group = "width")]
    tight: bool,
    /// The widest columns in which all nodes fit (the default)
    #[arg(short = 'a', group = "width")]
    auto: bool,
    /// Show also nodes that are dead, and those never heard of
    #[arg(short = 'd')]
    dead: bool,
    /// Show the cluster's totals
    #[arg(short = 't')]
    totals: bool,
    /// Ask this often; + and - change it
    #[arg(short = 'i', long, value_name = "SECONDS", value_parser = seconds)]
    interval: Option<std::time::Duration>,
    /// Print one picture, and end
    #[arg(long, conflicts_with = "json")]
    once: bool,
    /// Print what is known of all nodes as one line of JSON, and end
    #[arg(long)]
    json: bool,
    /// The first node shown
    #[arg(value_name = "+ID", value_parser = first_node)]
    first: Option<NodeId>,
}

/// The command line.
pub fn describe() -> Command {
    describe_as("mon")
}

/// The same under MOSIX' newer name, which the list of all tools need not repeat.
pub fn describe_mosmon() -> Command {
    describe_as("mosmon").hide(true)
}

fn describe_as(name: &'static str) -> Command {
    Options::augment_args(help::command(name))
        // -V has been mon's own for longer than it has been the version's.
        .disable_version_flag(true)
        .arg(Arg::new("version").long("version").action(ArgAction::Version).help("Print version"))
        .about("Watch the nodes of the cluster, a bar each")
        .long_about(
            "Watch the nodes of the cluster, a bar each, and the migrations between them. The letters of the \
             options are also keys; h explains all of them. Enter, or a node's number, shows that node's \
             processes, and m there moves one.\n\nMarks below a node: ? it is suspected to be dead; b block, \
             s stay, l lstay, q quiet, as its administrator has set. Colours are left out where NO_COLOR is set \
             or TERM names a terminal without them, and signs beyond ASCII where the locale is not UTF-8.",
        )
        .after_help(help::closing(
            "  mon\n  mon -m -t               memory, and totals\n  mon -V -d +200          all nodes from 200 on\n  \
             mon --json | jq '.nodes[] | {node, load}'",
            "",
        ))
}

/// `mon …`.
///
/// # Errors
/// If ternd does not answer and only one picture is wanted, or there is no terminal.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    if options.json {
        return match client::ask(&Request::Cluster)? {
            Reply::Cluster(report) => output::print_json(&report),
            other => Err(client::unexpected(&other)),
        };
    }
    let settings = options.settings();
    if options.once {
        return output::print(&tern_top::print_once(Subject::Cluster, settings, &ask()).map_err(failed)?);
    }
    tern_top::show(Subject::Cluster, settings, options.interval, &ask()).map_err(failed)
}

impl Options {
    fn settings(&self) -> Settings {
        let displays = [
            (self.log, Display::LogLoad),
            (self.speed, Display::Speed),
            (self.memory, Display::Memory),
            (self.raw, Display::RawMemory),
            (self.utilisability, Display::Utilisability),
        ];
        let widths = [(self.wide, Width::Wide), (self.vertical, Width::Vertical), (self.tight, Width::Tight)];
        Settings {
            display: displays.into_iter().find(|(set, _)| *set).map_or_else(Display::default, |(_, it)| it),
            width: widths.into_iter().find(|(set, _)| *set).map_or_else(Width::default, |(_, it)| it),
            dead: self.dead,
            totals: self.totals,
            first: self.first,
        }
    }
}

/// How `mon` and `mtop` ask the node's daemon.
pub(super) fn ask() -> Ask {
    Arc::new(|request| {
        client::ask(request).map_err(|failure| Trouble {
            message: failure.message,
            hint: failure.hint,
            code: failure.code,
        })
    })
}

/// What they fail with, as the other tools do.
pub(super) fn failed(trouble: Trouble) -> Failure {
    Failure { code: trouble.code, message: trouble.message, hint: trouble.hint }
}

/// `0.5`, `2`: not less than a tenth, not more than an hour.
pub(super) fn seconds(word: &str) -> Result<std::time::Duration, String> {
    let said = || "a number of seconds from 0.1 to 3600".to_owned();
    let number: f64 = word.parse().map_err(|_not_a_number| said())?;
    if (0.1..=3600.0).contains(&number) {
        Ok(std::time::Duration::from_secs_f64(number))
    } else {
        Err(said())
    }
}

fn first_node(word: &str) -> Result<NodeId, String> {
    let number = word.strip_prefix('+').and_then(|number| number.parse().ok()).filter(|number| *number > 0);
    number.map(NodeId).ok_or_else(|| "a node is named here as +12".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn parse(words: &[&str]) -> Result<Options, Failure> {
        let args: Vec<OsString> = words.iter().map(OsString::from).collect();
        help::parse(describe(), &Call { tool: "mon", args: &args }).map(Option::unwrap)
    }

    #[test]
    fn options_are_those_of_old() {
        let settings = parse(&["-V", "-m", "-dt", "+12"]).unwrap().settings();
        let expected = Settings {
            display: Display::Memory,
            width: Width::Tight,
            dead: true,
            totals: true,
            first: Some(NodeId(12)),
        };
        assert_eq!(settings, expected);
        assert_eq!(parse(&["-l", "-a"]).unwrap().settings(), Settings::default());
    }

    #[test]
    fn what_contradicts_itself_or_names_no_node_is_refused() {
        for words in [&["-l", "-m"][..], &["-w", "-V"], &["12"], &["+0"], &["-i", "0"], &["--once", "--json"]]
        {
            assert_eq!(parse(words).unwrap_err().code, 2, "{words:?}");
        }
    }
}
