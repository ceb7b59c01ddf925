//! `tern init`: founds a cluster on this node.

use crate::tool::Invocation;
use crate::{Failure, help, output};
use clap::{Args, Command};
use std::path::PathBuf;
use tern_control::RefusalKind;
use tern_ids::NodeId;
use tern_node::{InitOptions, SetupError};

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// This node's number
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    node: Option<u16>,
    /// The cluster's name: letters, digits and hyphens
    #[arg(long, value_name = "CLUSTER")]
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
    Options::augment_args(help::command("init"))
        .about("Found a cluster on this node")
        .long_about(
            "Found a cluster on this node: create its certificate authority, this node's certificate, and a \
             map with this node. Prints the command with which the next node joins; its token is valid for \
             one join within an hour.",
        )
        .after_help(help::after_help("  tern init\n  tern init --name lab --address 10.0.0.1", ""))
}

/// `tern init …`.
///
/// # Errors
/// If the node is in a cluster already, or a file cannot be written.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let report = tern_node::init(&InitOptions {
        node: options.node.map(NodeId),
        name: options.name,
        address: options.address,
        force: options.force,
        config_dir: options.config_dir,
    })
    .map_err(setup_failure)?;
    output::print(&format!(
        "this is node {} of cluster {}; start ternd, then on the next node:\n\ntern join {} {}\n",
        report.node, report.cluster, report.address, report.token
    ))
}

/// The failure to found or join a cluster.
pub(super) fn setup_failure(error: SetupError) -> Failure {
    let failure = Failure::new(RefusalKind::BadRequest, error.message);
    match error.hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}
