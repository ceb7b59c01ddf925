//! tern-mfs: the client and the server of MFS. `mount.mfs` and ternd start it; do not run it by
//! hand.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tern_control::control_socket::ControlSocket;
use tern_ids::NodeId;
use tern_mfs::client::{self, MountOptions};
use tern_mfs::message::Purpose;
use tern_mfs::{guest_tree, serve};
use tern_node::{Config, config};

#[derive(Debug, Parser)]
#[command(version, about)]
struct Args {
    /// Directory of ternd.toml.
    #[arg(long, value_name = "DIRECTORY")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve this node's files to other nodes; ternd passes connections on.
    Serve,
    /// Serve a home's files, read only, to its guests on this node, which map them. ternd starts
    /// this when a shim requests it.
    Homes {
        /// The home node.
        home: u16,
    },
    /// Mount the tree of all nodes' files.
    Mount {
        /// Mount point.
        at: PathBuf,
        /// Source that mount and df show.
        #[arg(long, default_value = "mymfs")]
        source: String,
        /// Mount read only.
        #[arg(long)]
        read_only: bool,
        /// Whether a guest opens a file of its own node directly if its home has the file open
        /// through this tree (0 or 1).
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
        dfsa: u8,
        /// Seconds that a call waits for a node that does not respond.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
        timeout: u64,
        /// Cache under renewable leases, until they are recalled. fsync of the root makes all
        /// earlier changes visible.
        #[arg(long)]
        renewable: bool,
    },
}

/// Nice value of this process (getpriority(2)).
const NICE: i32 = -10;

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = std::env::var("TERN_LOG").unwrap_or_else(|_| "info,fuser=error".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    // Programs wait for this process, as they do for shims. Only root may lower the nice value; if
    // that fails, this process is only slower.
    let _refused = rustix::process::setpriority_process(None, NICE);
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&format!("failed {error:#}"));
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<()> {
    let directory = args.config.map_or_else(config::config_dir, Ok)?;
    let config = Config::load(&directory)?;
    match args.command {
        Command::Serve => {
            let socket = config.mfs_socket();
            // A stale socket means that an earlier server has granted leases, which must be
            // honoured.
            let is_first = std::fs::remove_file(&socket).is_err();
            let socket = ControlSocket::bind(socket).context("cannot listen")?;
            report("ready");
            serve::run(config, &socket, is_first)
        }
        Command::Homes { home } => guest_tree::run(&config, NodeId(home), || report("ready")),
        Command::Mount { at, source, read_only, dfsa, timeout, renewable } => {
            let timeout = Duration::from_secs(timeout);
            let purpose = if renewable { Purpose::Container } else { Purpose::All };
            let options = MountOptions { source, read_only, dfsa: dfsa == 1, timeout, purpose };
            let session = client::mount(&config, &at, &options)?;
            report("ready");
            session.serve()
        }
    }
}

/// Writes a status line to the process that started this one. An error is ignored, since that
/// process may be gone.
fn report(line: &str) {
    let _gone = writeln!(std::io::stdout(), "{line}");
}
