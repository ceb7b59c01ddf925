//! `bestnode`: prints the node that `mosrun -b` would choose.

use super::mosrun::options;
use crate::tool::Invocation;
use crate::{Failure, client, help, output};
use clap::{Args, Command};
use serde::Serialize;
use std::thread;
use std::time::Duration;
use tern_control::{Advice, RefusalKind, Reply, Request};
use tern_ids::NodeId;

/// How often -w repeats the request.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Only nodes with this much free memory
    #[arg(short, value_name = "MB")]
    memory: Option<u32>,
    /// Only these nodes, as in 1-3,5
    #[arg(long, value_name = "LIST", value_parser = options::parse_nodes)]
    only: Option<NodeList>,
    /// Exclude these nodes
    #[arg(long, value_name = "LIST", value_parser = options::parse_nodes)]
    not: Option<NodeList>,
    /// Wait until a node is suitable
    #[arg(short)]
    wait: bool,
    /// Print its host instead of its number
    #[arg(long)]
    host: bool,
    /// Print node and host as one line of JSON
    #[arg(long, conflicts_with = "host")]
    json: bool,
}

/// A list of nodes; for a plain `Vec` clap would expect one node per option.
type NodeList = std::vec::Vec<NodeId>;

/// The JSON output.
#[derive(Debug, Serialize)]
struct BestNode {
    node: NodeId,
    host: String,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("bestnode"))
        .about("Print the node that is best for a program that starts now")
        .long_about(
            "Print the node that is best for a program that starts now: the one that mosrun -b would choose. For \
             a moment the balancer counts one more program there, so the next call prints another equally good node.",
        )
        .after_help(help::after_help(
            "  bestnode\n  bestnode -m 2000 --host\n  rsync data $(bestnode --host):/tmp",
            "  5 also if no node is suitable",
        ))
}

/// `bestnode …`.
///
/// # Errors
/// If no node is suitable, or ternd does not answer.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let advice = Advice {
        memory: options.memory.map(|megabytes| u64::from(megabytes) << 20),
        only: options.only,
        not: options.not.unwrap_or_default(),
        ..Advice::default()
    };
    let node = loop {
        match client::request(&Request::Best { advice: advice.clone() }) {
            Ok(Reply::Best(node)) => break node,
            Ok(other) => return Err(client::unexpected_reply(&other)),
            // No node is suitable, or ternd does not run: it may be restarting.
            Err(failure) if options.wait && failure.code == RefusalKind::Unavailable.exit_code() => {
                thread::sleep(RETRY_INTERVAL);
            }
            Err(failure) => return Err(failure),
        }
    };
    if !options.host && !options.json {
        return output::print(&format!("{node}\n"));
    }
    let host = host_of(node)?;
    if options.json { output::print_json(&BestNode { node, host }) } else { output::print(&(host + "\n")) }
}

fn host_of(node: NodeId) -> Result<String, Failure> {
    match client::request(&Request::Cluster)? {
        Reply::Cluster(report) => {
            let found = report.nodes.into_iter().find(|row| row.node == node);
            Ok(found.map(|row| output::sanitize(&row.host)).unwrap_or_default())
        }
        other => Err(client::unexpected_reply(&other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    #[test]
    fn node_list_is_one_value() {
        let parse = |line: &str| {
            let args: Vec<OsString> = line.split(' ').map(Into::into).collect();
            help::parse::<Options>(describe(), &Invocation { tool: "bestnode", args: &args })
        };
        let options = parse("-m 2000 --only 1-2,5 --not 2 -w").unwrap().unwrap();
        assert_eq!(options.memory, Some(2000));
        assert_eq!(options.only, Some(vec![NodeId(1), NodeId(2), NodeId(5)]));
        assert_eq!(options.not, Some(vec![NodeId(2)]));
        assert!(options.wait && !options.host);
        assert_eq!(parse("--only 2-1").unwrap_err().code, 2);
    }
}
