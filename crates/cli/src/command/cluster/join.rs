//! `tern join HOST TOKEN`: makes this node a member of a cluster.

use crate::tool::Invocation;
use crate::{Failure, help, output};
use clap::{Args, Command};
use std::path::PathBuf;
use tern_ids::NodeId;
use tern_node::{JoinOptions, JoinReport};

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The node of the cluster that made the token
    #[arg(value_name = "HOST[:PORT]")]
    host: String,
    /// The token printed by tern init or tern token
    #[arg(value_name = "TOKEN")]
    token: String,
    /// This node's number [default: the lowest free number]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    node: Option<u16>,
    /// The name shown for this node [default: its host name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The address, or ADDRESS:PORT, at which other nodes reach this one
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
    /// Replace this node's existing identity; it leaves its current cluster
    #[arg(long)]
    force: bool,
    /// The directory of identity and configuration, instead of /etc/tern or ~/.config/tern
    #[arg(long, value_name = "DIR")]
    config_dir: Option<PathBuf>,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("join"))
        .about("Make this node a member of a cluster")
        .long_about(
            "Make this node a member of a cluster, with a token from one of its nodes (tern init, tern token). \
             The token authenticates each side to the other, so neither side has to trust a key on first use.",
        )
        .after_help(help::after_help("  tern join 10.0.0.1 TOKEN\n  tern join alpha TOKEN --node 7", ""))
}

/// `tern join …`.
///
/// # Errors
/// If the token is refused, the other node is not reached, or this one is in a cluster already.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let report = tern_node::join(&JoinOptions {
        host: options.host,
        token: options.token,
        node: options.node.map(NodeId),
        name: options.name,
        address: options.address,
        force: options.force,
        config_dir: options.config_dir,
    })
    .map_err(super::init::setup_failure)?;
    output::print(&report_text(&report))
}

fn report_text(report: &JoinReport) -> String {
    let mut text = format!(
        "this is node {} of cluster {}, which has {} nodes; start ternd\n",
        report.node,
        output::sanitize(&report.cluster),
        report.nodes.len()
    );
    for warning in &report.warnings {
        text.push_str(&format!("  warning: {}\n", output::sanitize(warning)));
    }
    text
}
