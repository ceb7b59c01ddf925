//! tern-net: moves connections between this node and others. ternd starts it; users do not.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use tern_control::control_socket::ControlSocket;
use tern_control::shim::net_socket;
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
    /// Move the connections of this node's processes, and of its guests.
    Serve,
}

/// Nice value of this process (getpriority(2)).
const NICE: i32 = -10;

/// Drops all capabilities except those for rules, packet sockets, repair mode, namespaces, and ports
/// below 1,024.
fn confine() -> Result<()> {
    let kept = CapabilitySet::NET_ADMIN
        | CapabilitySet::NET_RAW
        | CapabilitySet::NET_BIND_SERVICE
        | CapabilitySet::SYS_ADMIN;
    let kept = capabilities(None)?.permitted & kept;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)?;
    Ok(set_no_new_privs(true)?)
}

fn main() -> ExitCode {
    let options = Options::parse();
    let filter = std::env::var("TERN_LOG").unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    // Clients' packets are held while this process works. Only root may lower the nice value; if that
    // fails, this process is only slower.
    let _refused = rustix::process::setpriority_process(None, NICE);
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
    let Command::Serve = options.command;
    confine().context("cannot drop capabilities")?;
    let socket = net_socket(&config.run_dir);
    let _stale = std::fs::remove_file(&socket);
    let control = ControlSocket::bind(socket).context("cannot listen")?;
    tern_net::serve::run(&config, &control, || report("ready"))
}

/// Reports to the parent process, which may be gone.
fn report(line: &str) {
    let _gone = writeln!(std::io::stdout(), "{line}");
}
