//! `tern status`: shows this node and its view of the other nodes.

use crate::tool::Invocation;
use crate::{Failure, client, help, output};
use clap::{Args, Command};
use tern_control::{Reply, Request, StatusReport};

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print the report as one line of JSON
    #[arg(long)]
    json: bool,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("status"))
        .about("Show this node and the other nodes of its cluster")
        .long_about(
            "Show this node and the other nodes of its cluster, with the round-trip time to each, and why a node that \
             is down cannot be reached.",
        )
        .after_help(help::after_help(
            "  tern status\n  tern status --json | jq '.nodes[] | select(.up | not)'",
            "",
        ))
}

/// `tern status …`.
///
/// # Errors
/// If ternd does not answer.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    match client::request(&Request::Status)? {
        Reply::Status(report) if options.json => output::print_json(&report),
        Reply::Status(report) => {
            output::print(&heading(&report))?;
            table(&report).print()
        }
        other => Err(client::unexpected_reply(&other)),
    }
}

fn heading(report: &StatusReport) -> String {
    let cluster = output::sanitize(&report.cluster);
    let version = output::sanitize(&report.version);
    let (node, away, guests) = (report.node, report.away, report.guests);
    format!("node {node} of cluster {cluster}, ternd {version}; {away} away, {guests} guests\n")
}

fn table(report: &StatusReport) -> output::Table {
    let mut table = output::Table::new(&[">NODE", "HOST", "STATE", ">RTT", "NOTE"]);
    for row in &report.nodes {
        table.push(vec![
            row.node.to_string(),
            output::sanitize(&row.host),
            if row.up { "up" } else { "down" }.into(),
            row.rtt_ms.map_or_else(|| "-".into(), output::milliseconds),
            output::sanitize(&row.note),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_control::NodeRow;
    use tern_ids::NodeId;

    #[test]
    fn dead_node_has_a_note() {
        let row = |node, up, rtt_ms, note: &str| NodeRow {
            node: NodeId(node),
            host: format!("host{node}"),
            up,
            rtt_ms,
            note: note.into(),
        };
        let report = StatusReport {
            node: NodeId(1),
            version: "0.1.0".into(),
            cluster: "lab".into(),
            nodes: vec![row(1, true, Some(0.25), ""), row(2, false, None, "no route\nto host")],
            away: 3,
            guests: 0,
        };
        assert_eq!(heading(&report), "node 1 of cluster lab, ternd 0.1.0; 3 away, 0 guests\n");
        assert_eq!(
            table(&report).render(None),
            "NODE  HOST   STATE      RTT  NOTE\n   1  host1  up     0.25 ms\n   2  host2  down         -  no route?to host\n"
        );
    }
}
