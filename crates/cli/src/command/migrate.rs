//! `migrate PID NODE`: move a running process, and say how it went.

use crate::tool::Call;
use crate::{Failure, client, help, output, place, progress};
use clap::{Args, Command};
use tern_control::{Destination, MigrationReport, Reply, Request, WhyReport};
use tern_ids::HomePid;

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// The process, by its pid at home
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    /// Where to: a node's number, host or alias; home; or balance, to where the cluster would have it
    #[arg(value_name = "NODE", required_unless_present = "why")]
    to: Option<String>,
    /// Move nothing: show what the balancer thinks of the process, and of each node for it
    #[arg(long, conflicts_with_all = ["to", "quiet"])]
    why: bool,
    /// Print the report as one line of JSON: pid, from, to, bytes, freeze_ms, total_ms and more
    #[arg(long)]
    json: bool,
    /// Print nothing, unless it fails
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("migrate"))
        .about("Move a running process to another node, or home")
        .long_about(
            "Move a running process to another node, or home. It returns when the process runs there, and \
             prints what it took: the bytes sent and how long the process stood still.\n\nYou may move the \
             processes that you could trace with a debugger; root may move any.",
        )
        .after_help(help::closing(
            "  migrate 1234 2\n  migrate 1234 home\n  migrate $(pgrep flac) beta --json",
            "When it fails, the process runs on where it was.",
        ))
}

/// `migrate …`.
///
/// # Errors
/// The reason why the process was not moved.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    if options.why {
        return why(HomePid(options.pid), options.json);
    }
    let word = options.to.unwrap_or_default();
    let to = match &*word {
        "home" => Destination::Home,
        "balance" => Destination::Balance,
        word => Destination::Node(place::node(word)?),
    };
    let request = Request::Migrate { pid: HomePid(options.pid), to };
    let silent = options.quiet || options.json;
    let reply = if silent {
        client::ask(&request)?
    } else {
        progress::ask(request, &format!("{}: moving to {}", options.pid, word))?
    };
    match reply {
        Reply::Migrated(report) if options.json => output::print_json(&report),
        Reply::Migrated(_) if options.quiet => Ok(()),
        Reply::Migrated(report) => output::print(&line(&report)),
        other => Err(client::unexpected(&other)),
    }
}

fn why(pid: HomePid, json: bool) -> Result<(), Failure> {
    let report = match client::ask(&Request::Why { pid })? {
        Reply::Why(report) => report,
        other => return Err(client::unexpected(&other)),
    };
    if json {
        return output::print_json(&report);
    }
    let WhyReport { pid, at, demand, memory, calls_per_s, .. } = report;
    let mut text = format!(
        "{pid} is on node {at}: it wants {demand:.0}% of a CPU, has {}, and calls home {calls_per_s:.0} times a second\n",
        output::bytes(memory),
    );
    if let Some(stays) = &report.stays {
        text += &format!("now: {stays}\n");
    }
    if let Some(last) = &report.last {
        text += &format!("{:.0} s ago: {last}\n", report.last_ms as f64 / 1e3);
    }
    output::print(&text)?;
    let mut table = output::Table::new(&[">NODE", ">PACE", ">WAY", ">FROZEN", ">GAIN", "AGAINST IT"]);
    for row in &report.nodes {
        table.row(vec![
            row.node.to_string(),
            format!("{:.2}", row.pace),
            output::milliseconds(row.way_s * 1e3),
            output::milliseconds(row.frozen_s * 1e3),
            format!("{:+.1} s", row.gain_s),
            row.against.as_deref().map_or_else(|| "-".into(), output::plain),
        ]);
    }
    table.print()
}

/// `1234 flac: 1 → 2, 12.3 MB, frozen 18 ms`.
fn line(report: &MigrationReport) -> String {
    format!(
        "{} {}: {} → {}, {}, frozen {}\n",
        report.pid,
        output::plain(&report.command),
        report.from,
        report.to,
        output::bytes(report.bytes),
        output::milliseconds(report.freeze_ms),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::{MigrationId, NodeId};

    fn report() -> MigrationReport {
        MigrationReport {
            pid: HomePid(1234),
            command: "flac".into(),
            migration: MigrationId([1; 16]),
            from: NodeId(1),
            to: NodeId(2),
            bytes: 12_345_678,
            freeze_ms: 18.2,
            total_ms: 240.0,
        }
    }

    #[test]
    fn a_move_is_one_line() {
        assert_eq!(line(&report()), "1234 flac: 1 → 2, 12.3 MB, frozen 18 ms\n");
    }

    #[test]
    fn json_has_the_promised_keys() {
        let json = serde_json::to_value(report()).unwrap();
        for key in ["pid", "from", "to", "bytes", "freeze_ms", "total_ms"] {
            assert!(json[key].is_number(), "{key}");
        }
    }
}
