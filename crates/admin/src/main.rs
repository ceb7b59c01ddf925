//! tern-admin: the administration's tree. ternd starts it; it is of no use by hand.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::Parser;
use rustix::fs::{FlockOperation, flock};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tern_node::{Config, config};

#[derive(Debug, Parser)]
#[command(version, about)]
struct Words {
    /// The directory of ternd.toml.
    #[arg(long, value_name = "DIRECTORY")]
    config: Option<PathBuf>,
}

fn main() -> ExitCode {
    let words = Words::parse();
    let filter = std::env::var("TERN_LOG").unwrap_or_else(|_| "info,fuser=error".into());
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
    let at = config.admin_tree.clone().context("admin_tree in ternd.toml names no place")?;
    let _only_one = only_one(&config.admin_lock(), &at)?;
    let mounted = tern_admin::mount(&config.run_dir, &at)?;
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot wait for signals")?;
    let place = mounted.at().to_owned();
    let leave = move || {
        if signals.forever().next().is_some() {
            tern_admin::unmount(&place);
            let _busy = std::fs::remove_dir(&place);
            std::process::exit(0);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(leave).context("cannot start a thread")?;
    let place = mounted.at().to_owned();
    say("ready");
    let served = mounted.serve();
    let _busy_or_gone = std::fs::remove_dir(place);
    served
}

/// Holds the lock, in which our number and the tree's place stand; the kernel lets go of it however this process ends.
fn only_one(path: &Path, at: &Path) -> Result<File> {
    let mut file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o644).open(path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)
        .with_context(|| format!("another one holds {}", path.display()))?;
    file.set_len(0)?;
    writeln!(file, "{}\n{}", std::process::id(), at.display())?;
    Ok(file)
}

/// Answers whoever started us, who may be gone.
fn say(line: &str) {
    let _gone = writeln!(std::io::stdout(), "{line}");
}
