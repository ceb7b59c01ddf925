//! tern-exec: both halves of mexec, and the gatekeeper. ternd starts it; users do not.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;
use tern_control::control_socket::ControlSocket;
use tern_ids::NodeId;
use tern_mexec::gatekeeper::Gatekeeper;
use tern_node::{Config, config};

#[derive(Debug, Parser)]
#[command(version, about)]
struct Options {
    /// The directory of ternd.toml.
    #[arg(long, value_name = "DIRECTORY")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run commands of other nodes, and place those of this node.
    Serve,
    /// Accept commands from machines outside of the cluster.
    #[command(name = "outside")]
    Gatekeeper,
    /// Run as the container of another node's commands, or of the gatekeeper's jobs.
    #[command(name = "room")]
    Container {
        /// The home node; 0 for the gatekeeper's jobs.
        home: u16,
        /// Directories that are mounted from this node, because this node and home have them from
        /// the same server.
        shared: Vec<PathBuf>,
    },
}

fn main() -> ExitCode {
    let options = Options::parse();
    let filter = std::env::var("TERN_LOG").unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&format!("failed {error:#}"));
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<()> {
    let directory = options.config.map_or_else(config::config_dir, Ok)?;
    let config = Config::load(&directory)?;
    match options.command {
        Command::Serve => {
            raise_open_files_limit();
            let (control, socket) = (config.exec_socket(), config.run_dir.join(tern_mexec::SOCKET));
            for left_over in [&control, &socket] {
                let _gone = std::fs::remove_file(left_over);
            }
            let control = ControlSocket::bind(control).context("cannot listen")?;
            let listener = UnixListener::bind(&socket).context("cannot listen")?;
            std::fs::set_permissions(&socket, Permissions::from_mode(0o666))?;
            report("ready");
            tern_mexec::serve(config, &control, listener)
        }
        Command::Gatekeeper => {
            let limit = raise_open_files_limit();
            let or_unlimited = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
            let gatekeeper =
                Gatekeeper::open(config, (or_unlimited(limit.current), or_unlimited(limit.maximum)))?;
            report("ready");
            gatekeeper.serve()
        }
        Command::Container { home, shared } => tern_mexec::run_container(&config, NodeId(home), &shared),
    }
}

/// Raises the soft limit of open files to the hard one, since each command needs several. Returns
/// the old limit.
fn raise_open_files_limit() -> Rlimit {
    let before = getrlimit(Resource::Nofile);
    let _as_it_was = setrlimit(Resource::Nofile, Rlimit { current: before.maximum, ..before });
    before
}

/// Reports to the parent process, which may be gone.
fn report(line: &str) {
    let _gone = writeln!(std::io::stdout(), "{line}");
}
