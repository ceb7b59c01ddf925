//! `mosctl`: steer a node, with openMosix' words.

use super::tune;
use crate::tool::Call;
use crate::{Failure, client, help, output, place, progress};
use clap::{Args, Command, Subcommand};
use tern_control::{
    ClusterReport, Decay, Evacuation, LinkRow, NodeFlags, NodeLoad, NodeState, RefusalKind, Reply, Request,
    Settings, Switch,
};

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    #[command(subcommand)]
    verb: Verb,
}

/// What there is to say of a node.
#[derive(Debug, Subcommand)]
enum Verb {
    /// No process leaves this node by itself
    Stay,
    /// Processes may leave again
    Nostay,
    /// No process whose home this is leaves by itself; guests may still be sent on
    Lstay,
    /// Own processes may leave again
    Nolstay,
    /// Take no guests
    Block,
    /// Take guests again
    Noblock,
    /// Tell nobody of this node's load
    Quiet,
    /// Tell of it again
    Noquiet,
    /// Let nobody reach this node's files through /mfs; what others have open there fails too, until mfs
    Nomfs,
    /// Let others reach them again
    Mfs,
    /// Send all guests away, and take no new ones; returns when they are gone
    Expel(Limit),
    /// Bring all own processes home, and keep them; returns when they are there
    Bring(Limit),
    /// Both
    Isolate(Limit),
    /// Both, and tell nobody of this node any more
    Shutdown(Limit),
    /// Undo isolate and shutdown: stay, lstay, block and quiet
    Rejoin,
    /// Write each change of the map, and each node that comes or dies, to the kernel's log too, for its console
    Logmap,
    /// Write it to ternd's log only
    Nologmap,
    /// What is switched on, and set by hand; of another node: what it says of itself
    #[command(visible_aliases = ["localstatus", "rstatus"])]
    Status {
        /// Number, host or alias; this node if absent
        node: Option<String>,
        /// Print it as one line of JSON
        #[arg(long)]
        json: bool,
    },
    /// Set the speed of this node's CPUs for balancing
    Setspeed {
        /// 10000 for a standard CPU, or `measured`
        speed: String,
    },
    /// Set how fast habits of processes are forgotten: of each interval, SLOW or FAST of a thousand parts stay
    Setdecay {
        /// Seconds
        interval: u32,
        /// 1 to 1000
        slow: u16,
        /// 1 to 1000
        fast: u16,
    },
    /// Show it
    Getdecay,
    /// What it costs to talk to other nodes: as tune has measured it, and what the balancer reckons with now
    Gettune {
        /// Print it as a JSON array
        #[arg(long)]
        json: bool,
    },
    /// The load of a node: 100 is one standard CPU kept busy
    Getload(Whose),
    /// The speed of a node's CPUs: 10000 is a standard one
    Getspeed(Whose),
    /// Bytes of memory that a newcomer could have on a node, and all that it has
    Getmem(Whose),
    /// Bytes of memory that nothing uses on a node, not even as a cache
    Getfree(Whose),
    /// Percent of its time that a node can use: less than 100 if it pages
    Getutil(Whose),
    /// Whether a node is up, by what the others say: yes or no
    Isup(Whose),
    /// A node's number, host and names; without a name this node's number
    Whois {
        /// Number, host or alias
        name: Option<String>,
    },
}

/// Which node is asked for.
#[derive(Debug, Args)]
struct Whose {
    /// Number, host or alias; this node if absent
    node: Option<String>,
}

/// How long one will wait.
#[derive(Debug, Args)]
struct Limit {
    /// Give up after so many seconds; what was begun goes on
    #[arg(short, long, value_name = "SECONDS")]
    within: Option<u32>,
}

/// The command line.
pub fn describe() -> Command {
    let command = Options::augment_args(help::command("mosctl"))
        .about("Steer this node: who may come, who may leave, and at what speed it counts")
        .long_about(
            "Steer this node: who may come, who may leave, and at what speed it counts. What is set holds until \
             the machine starts anew; restarts of ternd do not matter. migrate still moves what it is told to, \
             wherever guests are taken.\n\nThe same can be read and written as files below \
             /run/mosix/admin, what is known of other nodes is below /run/mosix/nodes, and a process' below \
             /run/mosix/proc.",
        );
    command.after_help(help::closing(
        "  mosctl block                keep guests out\n  \
           mosctl expel --within 60    send them away, and wait for that\n  \
           mosctl shutdown             before the machine is switched off\n  \
           mosctl setspeed 5000        have this node take half as much as a standard one",
        "",
    ))
}

/// `mosctl …`.
///
/// # Errors
/// If ternd refuses, or what was to leave has not left in time (exit code 5).
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    let switch = |switch, on| done(client::ask(&Request::Switch { switch, on })?);
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
        Verb::Rejoin => done(client::ask(&Request::Rejoin)?),
        Verb::Logmap => switch(Switch::LogMap, true),
        Verb::Nologmap => switch(Switch::LogMap, false),
        Verb::Status { node: None, json: true } => output::print_json(&settings()?),
        Verb::Status { node: None, json: false } => output::print(&text(&settings()?)),
        Verb::Status { node: name, json } => {
            let node = node(&Whose { node: name })?;
            if json { output::print_json(&node) } else { output::print(&flags(&node)) }
        }
        Verb::Setspeed { speed } => {
            let measured = speed == "measured";
            let number =
                || speed.parse().map_err(|_e| Failure::usage(call.tool, format!("{speed} is no speed")));
            let speed = if measured { None } else { Some(number()?) };
            done(client::ask(&Request::SetSpeed { speed })?)
        }
        Verb::Setdecay { interval, slow, fast } => {
            done(client::ask(&Request::SetDecay(Decay { interval, slow, fast }))?)
        }
        Verb::Getload(whose) => say(&whose, |node| format!("{:.0}", node.load)),
        Verb::Getspeed(whose) => say(&whose, |node| node.speed.to_string()),
        Verb::Getmem(whose) => say(&whose, |node| format!("{} {}", node.mem_free, node.mem_total)),
        Verb::Getfree(whose) => say(&whose, |node| node.mem_raw_free.to_string()),
        Verb::Getutil(whose) => say(&whose, |node| node.utilisability.to_string()),
        Verb::Isup(whose) => {
            let up = node(&whose)?.state == NodeState::Alive;
            output::print(if up { "yes\n" } else { "no\n" })?;
            if up { Ok(()) } else { Err(Failure::silent(1)) }
        }
        Verb::Whois { name: None } => output::print(&format!("This is MOSIX #{}\n", cluster()?.me)),
        Verb::Whois { name } => {
            let node = node(&Whose { node: name })?;
            output::print(&format!("MOSIX #{} {}\n", node.node, output::plain(&node.host)))
        }
        Verb::Gettune { json } => {
            let rows = match client::ask(&Request::Links)? {
                Reply::Links(rows) => rows,
                other => return Err(client::unexpected(&other)),
            };
            if json { output::print_json(&rows) } else { tuned(&rows) }
        }
        Verb::Getdecay => {
            let Decay { interval, slow, fast } = settings()?.decay;
            output::print(&format!("interval={interval} slow={slow} fast={fast}\n"))
        }
    }
}

fn cluster() -> Result<ClusterReport, Failure> {
    match client::ask(&Request::Cluster)? {
        Reply::Cluster(report) => Ok(report),
        other => Err(client::unexpected(&other)),
    }
}

fn node(whose: &Whose) -> Result<NodeLoad, Failure> {
    let report = cluster()?;
    let wanted = whose.node.as_deref().map_or(Ok(report.me), place::node)?;
    report.nodes.into_iter().find(|node| node.node == wanted).ok_or_else(|| {
        Failure::new(RefusalKind::NotFound, format!("there is no node {wanted} in the map"))
            .hint("tern status")
    })
}

/// Prints something of a node, as old as it may be, if anything is known of it.
fn say(whose: &Whose, what: impl Fn(&NodeLoad) -> String) -> Result<(), Failure> {
    let node = node(whose)?;
    if node.speed == 0 {
        let said = format!("nothing has been heard of node {}", node.node);
        return Err(Failure::new(RefusalKind::Unavailable, said).hint("tern status"));
    }
    output::print(&(what(&node) + "\n"))
}

fn evacuate(what: Evacuation, limit: &Limit, doing: &str) -> Result<(), Failure> {
    done(progress::ask(Request::Evacuate { what, seconds: limit.within }, doing)?)
}

fn done(reply: Reply) -> Result<(), Failure> {
    match reply {
        Reply::Done => Ok(()),
        other => Err(client::unexpected(&other)),
    }
}

fn settings() -> Result<Settings, Failure> {
    match client::ask(&Request::Settings)? {
        Reply::Settings(settings) => Ok(settings),
        other => Err(client::unexpected(&other)),
    }
}

/// Two tables: that of tune, and that of now.
fn tuned(rows: &[LinkRow]) -> Result<(), Failure> {
    let measured: Vec<_> = rows.iter().filter_map(|row| row.tuned).collect();
    if measured.is_empty() {
        output::print("tune has measured nothing yet\n")?;
    } else {
        tune::table(&measured).print()?;
    }
    let mut table = output::Table::new(&[">NODE", ">RTT NOW", ">THERE NOW"]);
    let known = |known: bool, said: String| if known { said } else { "-".into() };
    for row in rows {
        table.row(vec![
            row.node.to_string(),
            known(row.rtt_us > 0, output::milliseconds(f64::from(row.rtt_us) / 1e3)),
            known(row.bytes_per_s > 0, format!("{}/s", output::bytes(row.bytes_per_s))),
        ]);
    }
    table.print()
}

fn switched(switches: &[(&str, bool)]) -> String {
    let on: Vec<_> = switches.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    if on.is_empty() { "nothing is switched on".into() } else { on.join(" ") }
}

/// Another node, as it has told of itself.
fn flags(node: &NodeLoad) -> String {
    let state = match node.state {
        NodeState::Alive => "up",
        NodeState::Suspect => "in doubt",
        NodeState::Dead => "down",
        NodeState::NeverHeard => return "nothing has been heard of it\n".into(),
    };
    let NodeFlags { stay, lstay, block, quiet, nomfs } = node.flags;
    let on =
        switched(&[("stay", stay), ("lstay", lstay), ("block", block), ("quiet", quiet), ("nomfs", nomfs)]);
    let seconds = node.age_ms as f64 / 1e3;
    format!("{state}, as told {seconds:.1} s ago\n{on}\nspeed {}\n", node.speed)
}

fn text(settings: &Settings) -> String {
    let Settings { stay, local_stay, block, quiet, no_mfs, log_map, speed, decay } = *settings;
    let on = switched(&[
        ("stay", stay),
        ("lstay", local_stay),
        ("block", block),
        ("quiet", quiet),
        ("nomfs", no_mfs),
        ("logmap", log_map),
    ]);
    let speed = speed.map_or_else(|| "as measured".into(), |speed| speed.to_string());
    let Decay { interval, slow, fast } = decay;
    format!("{on}\nspeed {speed}\ndecay each {interval} s: slow {slow}, fast {fast}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn read(words: &str) -> Result<Option<Options>, Failure> {
        let args: Vec<OsString> = words.split(' ').map(Into::into).collect();
        help::parse::<Options>(describe(), &Call { tool: "mosctl", args: &args })
    }

    #[test]
    fn openmosix_words_are_read() {
        for word in [
            "stay", "nostay", "lstay", "nolstay", "block", "noblock", "quiet", "noquiet", "bring", "mfs",
            "nomfs",
        ] {
            assert!(read(word).unwrap().is_some(), "{word}");
        }
        let Some(Options { verb: Verb::Expel(limit) }) = read("expel --within 9").unwrap() else { panic!() };
        assert_eq!(limit.within, Some(9));
        for word in ["logmap", "nologmap", "rstatus 2", "localstatus", "status --json", "gettune --json"] {
            assert!(read(word).unwrap().is_some(), "{word}");
        }
        assert_eq!(read("fly").unwrap_err().code, 2);
        assert_eq!(read("setdecay 1 2").unwrap_err().code, 2);
    }

    #[test]
    fn settings_are_three_lines() {
        let settings = Settings { block: true, speed: Some(5000), ..Settings::default() };
        assert_eq!(text(&settings), "block\nspeed 5000\ndecay each 1 s: slow 975, fast 926\n");
        assert!(text(&Settings { no_mfs: true, ..Settings::default() }).starts_with("nomfs\nspeed"));
        assert!(text(&Settings::default()).starts_with("nothing is switched on\nspeed as measured\n"));
    }
}
