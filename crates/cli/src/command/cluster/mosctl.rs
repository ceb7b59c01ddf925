//! `mosctl`: controls a node with openMosix's commands.

use super::tune;
use crate::tool::Invocation;
use crate::{Failure, client, help, node_name, output, progress};
use clap::{Args, Command, Subcommand};
use tern_control::{
    ClusterReport, DecayRates, Evacuation, LinkRow, NodeFlags, NodeLoad, NodeSettings, NodeState,
    RefusalKind, Reply, Request, Switch,
};

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    verb: Verb,
}

/// The commands.
#[derive(Debug, Subcommand)]
enum Verb {
    /// Keep all processes from leaving this node automatically
    Stay,
    /// Processes may leave again
    Nostay,
    /// Keep processes whose home this is from leaving automatically; guests may still leave
    Lstay,
    /// Processes whose home this is may leave again
    Nolstay,
    /// Accept no guests
    Block,
    /// Accept guests again
    Noblock,
    /// Stop reporting this node's load to other nodes
    Quiet,
    /// Report this node's load to other nodes again
    Noquiet,
    /// Deny other nodes access to this node's files through /mfs, also to open files, until mfs
    Nomfs,
    /// Allow other nodes access to this node's files again
    Mfs,
    /// Send all guests away and accept no new ones; return when they are gone
    Expel(WaitLimit),
    /// Bring all processes of this node home and keep them; return when they are there
    Bring(WaitLimit),
    /// Expel and bring
    Isolate(WaitLimit),
    /// Expel and bring, and stop reporting this node to other nodes
    Shutdown(WaitLimit),
    /// Undo isolate and shutdown: clear stay, lstay, block and quiet
    Rejoin,
    /// Also write changes of the map, and nodes that come or die, to the kernel's log and its
    /// console
    Logmap,
    /// Undo logmap: write these changes to ternd's log only
    Nologmap,
    /// Show the switches and manual settings of this node, or the last report of another node
    #[command(visible_aliases = ["localstatus", "rstatus"])]
    Status {
        /// Number, host or alias [default: this node]
        node: Option<String>,
        /// Print the status as one line of JSON
        #[arg(long)]
        json: bool,
    },
    /// Set the speed of this node's CPUs for balancing
    Setspeed {
        /// 10000 for a standard CPU, or `measured` for the measured speed
        speed: String,
    },
    /// Set how fast usage profiles decay: after each interval, SLOW or FAST of 1000 parts remain
    Setdecay {
        /// The interval in seconds
        interval: u32,
        /// Thousandths of a slowly decaying profile that remain, 1 to 1000
        slow: u16,
        /// Thousandths of a fast decaying profile that remain, 1 to 1000
        fast: u16,
    },
    /// Show the interval, SLOW and FAST of setdecay
    Getdecay,
    /// Show the cost of communicating with other nodes, as measured by tune and as used now
    Gettune {
        /// Print the figures as a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Print the load of a node: 100 is one standard CPU kept busy
    Getload(NodeArg),
    /// Print the speed of a node's CPUs: 10000 is a standard CPU
    Getspeed(NodeArg),
    /// Print the bytes of memory available to a new process on a node, and the total
    Getmem(NodeArg),
    /// Print the bytes of unused memory on a node, not counting caches
    Getfree(NodeArg),
    /// Print the percentage of its time that a node can use: below 100 if it pages
    Getutil(NodeArg),
    /// Print whether a node is up, as seen by the cluster: yes or no
    Isup(NodeArg),
    /// Print a node's number and host; without a name, this node's number
    Whois {
        /// Number, host or alias
        name: Option<String>,
    },
}

/// The node that a query is about.
#[derive(Debug, Args)]
struct NodeArg {
    /// Number, host or alias [default: this node]
    node: Option<String>,
}

/// How long to wait.
#[derive(Debug, Args)]
struct WaitLimit {
    /// Wait at most this many seconds; migrations that have started continue
    #[arg(short, long, value_name = "SECONDS")]
    within: Option<u32>,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    let command = Options::augment_args(help::command("mosctl"))
        .about("Control this node: which processes may come and leave, and its speed for balancing")
        .long_about(
            "Control this node: which processes may come and leave, and its speed for balancing. Settings hold \
             until the machine reboots, also across restarts of ternd. migrate still moves processes on request, \
             to any node that accepts guests.\n\nThe same settings can be read and written as files below \
             /run/mosix/admin; the state of other nodes is below /run/mosix/nodes, that of processes below \
             /run/mosix/proc.",
        );
    command.after_help(help::after_help(
        "  mosctl block                accept no guests\n  \
           mosctl expel --within 60    send all guests away, and wait up to a minute\n  \
           mosctl shutdown             before the machine is switched off\n  \
           mosctl setspeed 5000        count as half as fast as a standard node",
        "",
    ))
}

/// `mosctl …`.
///
/// # Errors
/// If ternd refuses, or processes have not left in time (exit code 5).
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let switch = |switch, on| expect_done(client::request(&Request::Switch { switch, on })?);
    match options.verb {
        Verb::Stay => switch(Switch::Stay, true),
        Verb::Nostay => switch(Switch::Stay, false),
        Verb::Lstay => switch(Switch::LocalStay, true),
        Verb::Nolstay => switch(Switch::LocalStay, false),
        Verb::Block => switch(Switch::Block, true),
        Verb::Noblock => switch(Switch::Block, false),
        Verb::Quiet => switch(Switch::Quiet, true),
        Verb::Noquiet => switch(Switch::Quiet, false),
        Verb::Nomfs => switch(Switch::NoMfs, true),
        Verb::Mfs => switch(Switch::NoMfs, false),
        Verb::Expel(limit) => evacuate(Evacuation::Expel, &limit, "sending guests away"),
        Verb::Bring(limit) => evacuate(Evacuation::Bring, &limit, "bringing processes home"),
        Verb::Isolate(limit) => evacuate(Evacuation::Isolate, &limit, "emptying this node"),
        Verb::Shutdown(limit) => evacuate(Evacuation::Shutdown, &limit, "emptying this node"),
        Verb::Rejoin => expect_done(client::request(&Request::Rejoin)?),
        Verb::Logmap => switch(Switch::LogMap, true),
        Verb::Nologmap => switch(Switch::LogMap, false),
        Verb::Status { node: None, json: true } => output::print_json(&settings()?),
        Verb::Status { node: None, json: false } => output::print(&settings_text(&settings()?)),
        Verb::Status { node: name, json } => {
            let node = node(&NodeArg { node: name })?;
            if json { output::print_json(&node) } else { output::print(&node_status(&node)) }
        }
        Verb::Setspeed { speed } => {
            let measured = speed == "measured";
            let number = || {
                speed
                    .parse()
                    .map_err(|_e| Failure::usage(invocation.tool, format!("'{speed}' is not a speed")))
            };
            let speed = if measured { None } else { Some(number()?) };
            expect_done(client::request(&Request::SetSpeed { speed })?)
        }
        Verb::Setdecay { interval, slow, fast } => {
            expect_done(client::request(&Request::SetDecay(DecayRates { interval, slow, fast }))?)
        }
        Verb::Getload(arg) => print_value(&arg, |node| format!("{:.0}", node.load)),
        Verb::Getspeed(arg) => print_value(&arg, |node| node.speed.to_string()),
        Verb::Getmem(arg) => print_value(&arg, |node| format!("{} {}", node.mem_free, node.mem_total)),
        Verb::Getfree(arg) => print_value(&arg, |node| node.mem_raw_free.to_string()),
        Verb::Getutil(arg) => print_value(&arg, |node| node.utilisability.to_string()),
        Verb::Isup(arg) => {
            let up = node(&arg)?.state == NodeState::Alive;
            output::print(if up { "yes\n" } else { "no\n" })?;
            if up { Ok(()) } else { Err(Failure::silent(1)) }
        }
        Verb::Whois { name: None } => output::print(&format!("This is MOSIX #{}\n", cluster()?.me)),
        Verb::Whois { name } => {
            let node = node(&NodeArg { node: name })?;
            output::print(&format!("MOSIX #{} {}\n", node.node, output::sanitize(&node.host)))
        }
        Verb::Gettune { json } => {
            let rows = match client::request(&Request::Links)? {
                Reply::Links(rows) => rows,
                other => return Err(client::unexpected_reply(&other)),
            };
            if json { output::print_json(&rows) } else { print_costs(&rows) }
        }
        Verb::Getdecay => {
            let DecayRates { interval, slow, fast } = settings()?.decay;
            output::print(&format!("interval={interval} slow={slow} fast={fast}\n"))
        }
    }
}

fn cluster() -> Result<ClusterReport, Failure> {
    match client::request(&Request::Cluster)? {
        Reply::Cluster(report) => Ok(report),
        other => Err(client::unexpected_reply(&other)),
    }
}

fn node(arg: &NodeArg) -> Result<NodeLoad, Failure> {
    let report = cluster()?;
    let id = arg.node.as_deref().map_or(Ok(report.me), node_name::resolve)?;
    report.nodes.into_iter().find(|node| node.node == id).ok_or_else(|| {
        Failure::new(RefusalKind::NotFound, format!("no node {id} in the cluster's map"))
            .hint("tern status, to list the nodes")
    })
}

/// Prints a value of a node, however old, if the node has ever reported one.
fn print_value(arg: &NodeArg, what: impl Fn(&NodeLoad) -> String) -> Result<(), Failure> {
    let node = node(arg)?;
    if node.speed == 0 {
        let text = format!("node {} has not reported its load yet", node.node);
        return Err(Failure::new(RefusalKind::Unavailable, text).hint("tern status"));
    }
    output::print(&(what(&node) + "\n"))
}

fn evacuate(what: Evacuation, limit: &WaitLimit, doing: &str) -> Result<(), Failure> {
    expect_done(progress::request(Request::Evacuate { what, seconds: limit.within }, doing)?)
}

fn expect_done(reply: Reply) -> Result<(), Failure> {
    match reply {
        Reply::Done => Ok(()),
        other => Err(client::unexpected_reply(&other)),
    }
}

fn settings() -> Result<NodeSettings, Failure> {
    match client::request(&Request::Settings)? {
        Reply::Settings(settings) => Ok(settings),
        other => Err(client::unexpected_reply(&other)),
    }
}

/// Prints two tables: what tune measured, and the current values.
fn print_costs(rows: &[LinkRow]) -> Result<(), Failure> {
    let measured: Vec<_> = rows.iter().filter_map(|row| row.tuned).collect();
    if measured.is_empty() {
        output::print("tune has not measured anything yet\n")?;
    } else {
        tune::table(&measured).print()?;
    }
    let mut table = output::Table::new(&[">NODE", ">RTT NOW", ">THERE NOW"]);
    let or_dash = |is_known: bool, text: String| if is_known { text } else { "-".into() };
    for row in rows {
        table.push(vec![
            row.node.to_string(),
            or_dash(row.rtt_us > 0, output::milliseconds(f64::from(row.rtt_us) / 1e3)),
            or_dash(row.bytes_per_s > 0, format!("{}/s", output::bytes(row.bytes_per_s))),
        ]);
    }
    table.print()
}

fn switch_names(switches: &[(&str, bool)]) -> String {
    let on: Vec<_> = switches.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    if on.is_empty() { "nothing is switched on".into() } else { on.join(" ") }
}

/// The status of another node, as it last reported it.
fn node_status(node: &NodeLoad) -> String {
    let state = match node.state {
        NodeState::Alive => "up",
        NodeState::Suspect => "suspected",
        NodeState::Dead => "down",
        NodeState::NeverSeen => return "no report received yet\n".into(),
    };
    let NodeFlags { stay, lstay, block, quiet, nomfs } = node.flags;
    let on = switch_names(&[
        ("stay", stay),
        ("lstay", lstay),
        ("block", block),
        ("quiet", quiet),
        ("nomfs", nomfs),
    ]);
    let seconds = node.age_ms as f64 / 1e3;
    format!("{state}, reported {seconds:.1} s ago\n{on}\nspeed {}\n", node.speed)
}

fn settings_text(settings: &NodeSettings) -> String {
    let NodeSettings { stay, local_stay, block, quiet, no_mfs, log_map, speed, decay } = *settings;
    let on = switch_names(&[
        ("stay", stay),
        ("lstay", local_stay),
        ("block", block),
        ("quiet", quiet),
        ("nomfs", no_mfs),
        ("logmap", log_map),
    ]);
    let speed = speed.map_or_else(|| "as measured".into(), |speed| speed.to_string());
    let DecayRates { interval, slow, fast } = decay;
    format!("{on}\nspeed {speed}\ndecay each {interval} s: slow {slow}, fast {fast}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn parse(words: &str) -> Result<Option<Options>, Failure> {
        let args: Vec<OsString> = words.split(' ').map(Into::into).collect();
        help::parse::<Options>(describe(), &Invocation { tool: "mosctl", args: &args })
    }

    #[test]
    fn openmosix_commands_are_parsed() {
        for word in [
            "stay", "nostay", "lstay", "nolstay", "block", "noblock", "quiet", "noquiet", "bring", "mfs",
            "nomfs",
        ] {
            assert!(parse(word).unwrap().is_some(), "{word}");
        }
        let Some(Options { verb: Verb::Expel(limit) }) = parse("expel --within 9").unwrap() else { panic!() };
        assert_eq!(limit.within, Some(9));
        for word in ["logmap", "nologmap", "rstatus 2", "localstatus", "status --json", "gettune --json"] {
            assert!(parse(word).unwrap().is_some(), "{word}");
        }
        assert_eq!(parse("fly").unwrap_err().code, 2);
        assert_eq!(parse("setdecay 1 2").unwrap_err().code, 2);
    }

    #[test]
    fn settings_are_three_lines() {
        let settings = NodeSettings { block: true, speed: Some(5000), ..NodeSettings::default() };
        assert_eq!(settings_text(&settings), "block\nspeed 5000\ndecay each 1 s: slow 975, fast 926\n");
        assert!(
            settings_text(&NodeSettings { no_mfs: true, ..NodeSettings::default() })
                .starts_with("nomfs\nspeed")
        );
        assert!(
            settings_text(&NodeSettings::default())
                .starts_with("nothing is switched on\nspeed as measured\n")
        );
    }
}
