//! tern-mfs: both halves of MFS. `mount.mfs` and ternd start it; it is of no use by hand.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tern_control::door::Door;
use tern_ids::NodeId;
use tern_mfs::client::{self, Options};
use tern_mfs::message::Purpose;
use tern_mfs::{homes, serve};
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
    /// Serve this node's files to the others; ternd passes connections on.
    Serve,
    /// Show a node's files to its guests on this one, who map them; asked by shims.
    Homes {
        /// Whose.
        home: u16,
    },
    /// Mount the tree of all nodes' files, and serve it to this kernel.
    Mount {
        /// Where.
        at: PathBuf,
        /// What mount shows as its source.
        #[arg(long, default_value = "mymfs")]
        source: String,
        /// Nothing can be changed through it.
        #[arg(long)]
        read_only: bool,
        /// Whether guests have files of their own node open themselves, if they are in this tree.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
        dfsa: u8,
        /// Seconds that a call waits for a node that does not answer.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
        timeout: u64,
        /// What is believed is believed until it is asked back; fsync of the root has all seen that was done before.
        #[arg(long)]
        lasting: bool,
    },
}

/// As getpriority(2).
const NICE: i32 = -10;

fn main() -> ExitCode {
    let words = Words::parse();
    let filter = std::env::var("TERN_LOG").unwrap_or_else(|_| "info,fuser=error".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    // Programs stand still while their files are asked for: as shims. Only root may; what cannot be is no harm.
    let _refused = rustix::process::setpriority_process(None, NICE);
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
            let door = config.mfs_door();
            // What one before us has promised is to be held.
            let is_first = std::fs::remove_file(&door).is_err();
            let door = Door::at(door).context("cannot listen")?;
            say("ready");
            serve::run(config, &door, is_first)
        }
        What::Homes { home } => homes::run(&config, NodeId(home), || say("ready")),
        What::Mount { at, source, read_only, dfsa, timeout, lasting } => {
            let patience = Duration::from_secs(timeout);
            let purpose = if lasting { Purpose::Room } else { Purpose::All };
            let options = Options { source, read_only, dfsa: dfsa == 1, patience, purpose };
            let session = client::mount(&config, &at, &options)?;
            say("ready");
            session.serve()
        }
    }
}

/// Answers whoever started us, who may be gone.
fn say(line: &str) {
    let _gone = writeln!(std::io::stdout(), "{line}");
}
