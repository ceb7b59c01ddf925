//! tern-admin: serves the administration tree. Started by ternd, not by hand.
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
struct Args {
    /// The directory of ternd.toml.
    #[arg(long, value_name = "DIRECTORY")]
    config: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = std::env::var("TERN_LOG").unwrap_or_else(|_| "info,fuser=error".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_line(&format!("failed {error:#}"));
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<()> {
    let directory = args.config.map_or_else(config::config_dir, Ok)?;
    let config = Config::load(&directory)?;
    let at = config.admin_tree.clone().context("admin_tree in ternd.toml is not set")?;
    let _lock_file = lock_instance(&config.admin_lock(), &at)?;
    let mounted = tern_admin::mount(&config.run_dir, &at)?;
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot wait for signals")?;
    let path = mounted.at().to_owned();
    let unmount_and_exit = move || {
        if signals.forever().next().is_some() {
            tern_admin::unmount(&path);
            let _busy = std::fs::remove_dir(&path);
            std::process::exit(0);
        }
    };
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(unmount_and_exit)
        .context("cannot start a thread")?;
    let path = mounted.at().to_owned();
    print_line("ready");
    let result = mounted.serve();
    let _busy_or_gone = std::fs::remove_dir(path);
    result
}

/// Takes the lock file, which contains this process' pid and the mount point. The kernel drops the
/// lock however the process ends.
fn lock_instance(path: &Path, at: &Path) -> Result<File> {
    let mut file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o644).open(path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)
        .with_context(|| format!("another tern-admin holds {}", path.display()))?;
    file.set_len(0)?;
    writeln!(file, "{}\n{}", std::process::id(), at.display())?;
    Ok(file)
}

/// Writes a line to the process that started this one, which may be gone.
fn print_line(line: &str) {
    let _gone = writeln!(std::io::stdout(), "{line}");
}
