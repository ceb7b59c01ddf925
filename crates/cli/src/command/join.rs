//! `tern join HOST TOKEN`: make this node a member of a cluster.

use crate::tool::Call;
use crate::{Failure, help, output};
use clap::{Args, Command};
use std::path::PathBuf;
use tern_ids::NodeId;
use tern_node::{JoinOptions, JoinReport};

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// The node that made the token
    #[arg(value_name = "HOST[:PORT]")]
    host: String,
    /// The token that tern init or tern token printed
    #[arg(value_name = "TOKEN")]
    token: String,
    /// The number that this node shall have; the lowest that is free, if none is given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    node: Option<u16>,
    /// The name under which this node is shown, if not its host name
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The address, or ADDRESS:PORT, under which other nodes reach this one
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
    /// Replace the identity that this node has already; it leaves its cluster
    #[arg(long)]
    force: bool,
    /// Where identity and configuration are kept, instead of /etc/tern or ~/.config/tern
    #[arg(long, value_name = "DIR")]
    config_dir: Option<PathBuf>,
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("join"))
        .about("Make this node a member of a cluster")
        .long_about(
            "Make this node a member of a cluster, with a token from one of its nodes (tern init, tern token). \
             The token proves each side to the other; nothing needs to be trusted on first use.",
        )
        .after_help(help::closing("  tern join 10.0.0.1 TOKEN\n  tern join alpha TOKEN --node 7", ""))
}

/// `tern join …`.
///
/// # Errors
/// If the token is refused, the other node is not reached, or this one is in a cluster already.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
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
    .map_err(super::init::setup)?;
    output::print(&said(&report))
}

fn said(report: &JoinReport) -> String {
    let mut text = format!(
        "this is node {} of cluster {}, which has {} nodes; start ternd\n",
        report.node,
        output::plain(&report.cluster),
        report.nodes.len()
    );
    for warning in &report.warnings {
        text.push_str(&format!("  warning: {}\n", output::plain(warning)));
    }
    text
}
