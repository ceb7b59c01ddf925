//! `tern remove`: removes a node from the cluster, for good.

use crate::tool::Invocation;
use crate::{Failure, client, help};
use clap::{Args, Command};
use tern_control::{Reply, Request};
use tern_ids::NodeId;

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The number of the node
    #[arg(value_name = "NODE", value_parser = crate::command::run::mosrun::options::parse_node)]
    node: NodeId,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("remove"))
        .about("Remove a node from the cluster")
        .long_about(
            "Remove a node from the cluster: all other nodes close their connections with it at once, and accept \
             none again, whatever number it had. Guests from it are killed, and so are processes that are there: \
             run mosctl shutdown on it first if it still works. Tokens that were not used become invalid. Only \
             the node that founded the cluster removes nodes.",
        )
        .after_help(help::after_help("  tern remove 3", ""))
}

/// `tern remove …`.
///
/// # Errors
/// If ternd does not answer, the node is not in the map, or this node did not found the cluster.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    match client::request(&Request::RemoveNode { node: options.node })? {
        Reply::Done => Ok(()),
        other => Err(client::unexpected_reply(&other)),
    }
}
