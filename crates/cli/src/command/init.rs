//! `tern init`: found a cluster on this node.

use crate::tool::Call;
use crate::{Failure, help, output};
use clap::{Args, Command};
use std::path::PathBuf;
use tern_control::RefusalKind;
use tern_ids::NodeId;
use tern_node::{InitOptions, SetupError};

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// This node's number
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    node: Option<u16>,
    /// The cluster's name: letters, digits and hyphens
    #[arg(long, value_name = "CLUSTER")]
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
    Options::augment_args(help::command("init"))
        .about("Found a cluster on this node")
        .long_about(
            "Found a cluster on this node: make its certificate authority, this node's certificate and a map \
             with this one node. It prints the line by which the next node joins, good for one join within an \
             hour.",
        )
        .after_help(help::closing("  tern init\n  tern init --name lab --address 10.0.0.1", ""))
}

/// `tern init …`.
///
/// # Errors
/// If the node is in a cluster already, or a file cannot be written.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    let report = tern_node::init(&InitOptions {
        node: options.node.map(NodeId),
        name: options.name,
        address: options.address,
        force: options.force,
        config_dir: options.config_dir,
    })
    .map_err(setup)?;
    output::print(&format!(
        "this is node {} of cluster {}; start ternd, then on the next node:\n\ntern join {} {}\n",
        report.node, report.cluster, report.address, report.token
    ))
}

/// A cluster that was not founded or entered.
pub(super) fn setup(error: SetupError) -> Failure {
    let failure = Failure::new(RefusalKind::BadRequest, error.message);
    match error.hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}
