//! `ternd`: the daemon of one node.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use tern_node::{Config, config};
use tracing_subscriber::EnvFilter;

/// The daemon of a Tern node
#[derive(Debug, Parser)]
#[command(name = "ternd", version, about)]
struct Args {
    /// The configuration file; identity and certificates are in the same directory [default:
    /// /etc/tern/ternd.toml, or ~/.config/tern/ternd.toml for a plain user]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only measure the speed of this machine's CPUs and store it in this file, unless the file has
    /// it
    #[arg(long, value_name = "FILE")]
    measure_speed: Option<PathBuf>,
    /// Exit with 0 if this user may read this process
    #[arg(long, hide = true, num_args = 3, value_names = ["PID", "UID", "GID"])]
    check_access: Option<Vec<u32>>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = EnvFilter::try_from_env("TERN_LOG").unwrap_or_else(|_unset| EnvFilter::new("info"));
    // The journal adds the time.
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false);
    if journal {
        log.without_time().init();
    } else {
        log.init();
    }
    if let Some([pid, uid, gid]) = args.check_access.as_deref() {
        return i32::try_from(*pid).map_or(2, |pid| tern_node::check_access(pid, *uid, *gid)).into();
    }
    if let Some(file) = args.measure_speed {
        tern_node::cpu_speed(&file);
        return ExitCode::SUCCESS;
    }
    match run(args.config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ternd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(file: Option<PathBuf>) -> Result<()> {
    let config_dir = match file {
        Some(file) => {
            anyhow::ensure!(
                file.file_name().is_some_and(|name| name == config::FILE) && file.exists(),
                "{} is not a configuration; give an existing file named ternd.toml",
                file.display()
            );
            let whole = std::path::absolute(&file).with_context(|| format!("{}", file.display()))?;
            whole.parent().map(PathBuf::from).unwrap_or_default()
        }
        None => config::config_dir()?,
    };
    tern_node::run(Config::load(&config_dir)?)
}
