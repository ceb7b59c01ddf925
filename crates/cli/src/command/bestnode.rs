//! `bestnode`: the node that `mosrun -b` would choose.

use super::mosrun::options;
use crate::tool::Call;
use crate::{Failure, client, help, output};
use clap::{Args, Command};
use serde::Serialize;
use std::thread;
use std::time::Duration;
use tern_control::{Advice, RefusalKind, Reply, Request};
use tern_ids::NodeId;

/// How often -w asks.
const AGAIN: Duration = Duration::from_secs(1);

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// Only nodes that have so much memory free
    #[arg(short, value_name = "MB")]
    memory: Option<u32>,
    /// Only these nodes, as in 1-3,5
    #[arg(long, value_name = "LIST", value_parser = options::nodes)]
    only: Option<Nodes>,
    /// None of these
    #[arg(long, value_name = "LIST", value_parser = options::nodes)]
    not: Option<Nodes>,
    /// Wait until there is one
    #[arg(short)]
    wait: bool,
    /// Print its host rather than its number
    #[arg(long)]
    host: bool,
    /// Print both as one line of JSON: node, host
    #[arg(long, conflicts_with = "host")]
    json: bool,
}

/// A list; clap would take a plain `Vec` for an option that is given several times.
type Nodes = std::vec::Vec<NodeId>;

/// What it prints.
#[derive(Debug, Serialize)]
struct Best {
    node: NodeId,
    host: String,
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("bestnode"))
        .about("Print the node that is best for a program that starts now")
        .long_about(
            "Print the node that is best for a program that starts now: the one that mosrun -b would choose. It is \
             counted as given one program for a moment, so that who asks again gets another if that is as good.",
        )
        .after_help(help::closing(
            "  bestnode\n  bestnode -m 2000 --host\n  rsync data $(bestnode --host):/tmp",
            "With no such node: 5.",
        ))
}

/// `bestnode …`.
///
/// # Errors
/// If no node will do, or ternd does not answer.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    let advice = Advice {
        memory: options.memory.map(|megabytes| u64::from(megabytes) << 20),
        only: options.only,
        not: options.not.unwrap_or_default(),
        ..Advice::default()
    };
    let node = loop {
        match client::ask(&Request::Best { advice: advice.clone() }) {
            Ok(Reply::Best(node)) => break node,
            Ok(other) => return Err(client::unexpected(&other)),
            // Also while ternd is being restarted.
            Err(failure) if options.wait && failure.code == RefusalKind::Unavailable.exit_code() => {
                thread::sleep(AGAIN);
            }
            Err(failure) => return Err(failure),
        }
    };
    if !options.host && !options.json {
        return output::print(&format!("{node}\n"));
    }
    let host = host(node)?;
    if options.json { output::print_json(&Best { node, host }) } else { output::print(&(host + "\n")) }
}

fn host(node: NodeId) -> Result<String, Failure> {
    match client::ask(&Request::Cluster)? {
        Reply::Cluster(report) => {
            let found = report.nodes.into_iter().find(|row| row.node == node);
            Ok(found.map(|row| output::plain(&row.host)).unwrap_or_default())
        }
        other => Err(client::unexpected(&other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    #[test]
    fn lists_are_read_as_one() {
        let read = |line: &str| {
            let args: Vec<OsString> = line.split(' ').map(Into::into).collect();
            help::parse::<Options>(describe(), &Call { tool: "bestnode", args: &args })
        };
        let options = read("-m 2000 --only 1-2,5 --not 2 -w").unwrap().unwrap();
        assert_eq!(options.memory, Some(2000));
        assert_eq!(options.only, Some(vec![NodeId(1), NodeId(2), NodeId(5)]));
        assert_eq!(options.not, Some(vec![NodeId(2)]));
        assert!(options.wait && !options.host);
        assert_eq!(read("--only 2-1").unwrap_err().code, 2);
    }
}
