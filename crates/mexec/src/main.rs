//! tern-exec: both halves of mexec, and the gatekeeper. ternd starts it; it is of no use by hand.
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
use tern_control::door::Door;
use tern_ids::NodeId;
use tern_mexec::outside::Outside;
use tern_node::{Config, config};

#[derive(Debug, Parser)]
#[command(version, about)]
struct Words {
    /// The directory of ternd.toml.
    #[arg(long, value_name = "DIRECTORY")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Run commands of other nodes, and find nodes for those of this one.
    Serve,
    /// Take commands of machines outside of the cluster.
    Outside,
    /// Be the room of another node's commands, or of this node's own.
    Room {
        /// That node; 0 is this one.
        home: u16,
        /// Directories that this node has from the same server as that one.
        shared: Vec<PathBuf>,
    },
}

fn main() -> ExitCode {
    let words = Words::parse();
    let filter = std::env::var("TERN_LOG").unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    match run(words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("failed {error:#}"));
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: Words) -> Result<()> {
    let directory = words.config.map_or_else(config::config_dir, Ok)?;
    let config = Config::load(&directory)?;
    match words.what {
        What::Serve => {
            all_files();
            let (door, socket) = (config.exec_door(), config.run_dir.join(tern_mexec::SOCKET));
            for left_over in [&door, &socket] {
                let _gone = std::fs::remove_file(left_over);
            }
            let door = Door::at(door).context("cannot listen")?;
            let listener = UnixListener::bind(&socket).context("cannot listen")?;
            std::fs::set_permissions(&socket, Permissions::from_mode(0o666))?;
            say("ready");
            tern_mexec::serve(config, &door, listener)
        }
        What::Outside => {
            let limit = all_files();
            let none = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
            let gatekeeper = Outside::open(config, (none(limit.current), none(limit.maximum)))?;
            say("ready");
            gatekeeper.serve()
        }
        What::Room { home, shared } => tern_mexec::be_room(&config, NodeId(home), &shared),
    }
}

/// Each command has some descriptors: takes as many as there may be. The limit that was before.
fn all_files() -> Rlimit {
    let before = getrlimit(Resource::Nofile);
    let _as_it_was = setrlimit(Resource::Nofile, Rlimit { current: before.maximum, ..before });
    before
}

/// Answers whoever started us, who may be gone.
fn say(line: &str) {
    let _gone = writeln!(std::io::stdout(), "{line}");
}
