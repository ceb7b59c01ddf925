//! `tern outside`: manages the keys of client machines outside the cluster, and lists their jobs.

use crate::tool::Invocation;
use crate::{Failure, client, help, output};
use clap::{Args, Command, Subcommand};
use serde::Serialize;
use std::io;
use std::path::PathBuf;
use tern_control::gatekeeper::call;
use tern_control::{GatekeeperJob, GatekeeperReply, GatekeeperRequest, RefusalKind};
use tern_mexec::gatekeeper::client_keys::{ClientKey, ClientKeys, KeyOptions, LastSeen, unix_time};
use tern_mexec::gatekeeper::{check_user, key_file};
use tern_node::{Config, config};

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The directory of ternd.toml
    #[arg(long, global = true, value_name = "DIR")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Create a key for a client; it is printed once and must be kept secret
    Add(Add),
    /// List the keys with their user, validity and last use
    List {
        /// Print the keys as a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Revoke a key and end the jobs that run with it
    Revoke {
        /// The client's name
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// List the running jobs of clients
    Jobs {
        /// Print the jobs as a JSON array
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
struct Add {
    /// The client's name: letters, digits, - and _
    #[arg(value_name = "NAME")]
    name: String,
    /// The user of this node under which the client's jobs run
    #[arg(long, value_name = "USER")]
    user: String,
    /// The maximum number of jobs of the client at a time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    jobs: Option<u32>,
    /// The number of days for which the key is valid
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: Option<u32>,
    /// ADDRESS:PORT at which the client reaches this node, if it differs from mexec_outside
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
    /// Allow the user to be root
    #[arg(long)]
    root: bool,
}

/// One key in the list.
#[derive(Debug, Serialize)]
struct KeyRow {
    client: String,
    user: String,
    state: &'static str,
    expires: Option<u64>,
    seen: Option<LastSeen>,
    jobs: usize,
    #[serde(rename = "most")]
    max_jobs: Option<u32>,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("outside"))
        .about("Let machines outside the cluster run commands on it, with keys")
        .long_about(
            "Let machines outside the cluster run commands on it, with keys. Each key belongs to one local user, \
             under which all its jobs run; a client cannot choose another. The node listens for clients only if \
             its ternd.toml sets mexec_outside. Clients run mexec.py, which needs only Python.",
        )
        .after_help(help::after_help(
            "  tern outside add laptop --user anna > key   then copy the key to the laptop's ~/.tern-key\n  \
               tern outside add ci --user build --jobs 4 --days 90\n  \
               tern outside list\n  \
               tern outside revoke laptop",
            "",
        ))
}

/// `tern outside …`.
///
/// # Errors
/// If the caller does not own the node, the key or user does not exist, or no gatekeeper runs.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let directory = options.config.map_or_else(config::config_dir, Ok).map_err(anyhow::Error::from)?;
    let config = Config::load(&directory).map_err(anyhow::Error::from)?;
    match options.action {
        Action::Add(add) => self::add(&config, &add),
        Action::List { json } => list(&config, json),
        Action::Revoke { name } => revoke(&config, &name),
        Action::Jobs { json } => jobs(json),
    }
}

fn add(config: &Config, add: &Add) -> Result<(), Failure> {
    let address = client_address(config, add)?;
    check_user(&add.user, add.root)?;
    let clients = ClientKeys::open(config)?;
    let wanted = KeyOptions { user: add.user.clone(), jobs: add.jobs, days: add.days, root: add.root };
    let secret = clients.add(&add.name, &wanted)?;
    output::print(&key_file(&clients, &add.name, &address, &secret)?)
}

/// The address at which the client reaches this node.
fn client_address(config: &Config, add: &Add) -> Result<String, Failure> {
    if let Some(address) = &add.address {
        let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        if port.is_none_or(|port| port == 0) || address.contains(char::is_whitespace) {
            return Err(Failure::usage("tern outside", format!("{address} is not ADDRESS:PORT")));
        }
        return Ok(address.clone());
    }
    let needs_address =
        |message: &str| Failure::new(RefusalKind::BadRequest, message).hint("--address ADDRESS:PORT");
    match config.file.mexec_outside {
        None => Err(needs_address(
            "mexec_outside is not set in ternd.toml, so clients cannot connect to this node",
        )),
        Some(address) if address.ip().is_unspecified() => {
            Err(needs_address("mexec_outside is set to all addresses, but the client needs one"))
        }
        Some(address) => Ok(address.to_string()),
    }
}

fn list(config: &Config, json: bool) -> Result<(), Failure> {
    let clients = ClientKeys::open(config)?;
    let running = match call(&client::run_dir(), &GatekeeperRequest::Jobs) {
        Ok(GatekeeperReply::Jobs(jobs)) => jobs,
        _ => Vec::new(),
    };
    let row = |(name, client): (String, ClientKey)| KeyRow {
        state: match client.invalid_reason() {
            Some(_) if client.revoked.is_some() => "revoked",
            Some(_) => "expired",
            None => "good",
        },
        jobs: running.iter().filter(|job| job.client == name).count(),
        seen: clients.last_seen(&name),
        user: client.user,
        expires: client.expires,
        max_jobs: client.jobs,
        client: name,
    };
    let rows: Vec<KeyRow> = clients.all()?.into_iter().map(row).collect();
    if json { output::print_json(&rows) } else { key_table(&rows, unix_time()).print() }
}

fn key_table(rows: &[KeyRow], now: u64) -> output::Table {
    let mut table = output::Table::new(&["CLIENT", "USER", "STATE", ">JOBS", "SEEN", "FROM"]);
    for row in rows {
        let days = |end: u64| format!("{} days", end.saturating_sub(now).div_ceil(86_400));
        table.push(vec![
            row.client.clone(),
            output::sanitize(&row.user),
            match (row.state, row.expires) {
                ("good", Some(end)) => days(end),
                (state, _) => state.into(),
            },
            row.max_jobs.map_or_else(|| row.jobs.to_string(), |max| format!("{}/{max}", row.jobs)),
            row.seen.as_ref().map_or_else(|| "never".into(), |seen| time_since(seen.at, now)),
            row.seen.as_ref().map_or_else(String::new, |seen| output::sanitize(&seen.from)),
        ]);
    }
    table
}

/// Formats the time since `then`.
fn time_since(then: u64, now: u64) -> String {
    match now.saturating_sub(then) {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..7_200 => format!("{} min", seconds / 60),
        seconds @ 7_200..172_800 => format!("{} h", seconds / 3_600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

fn revoke(config: &Config, name: &str) -> Result<(), Failure> {
    ClientKeys::open(config)?.revoke(name)?;
    match call(&client::run_dir(), &GatekeeperRequest::CheckKeys) {
        Ok(GatekeeperReply::Ended(0)) => Ok(()),
        Ok(GatekeeperReply::Ended(count)) => output::print(&format!("{count} jobs were ended\n")),
        // No gatekeeper runs, so no job of a client runs either.
        Err(error) if gatekeeper_is_absent(&error) => Ok(()),
        other => {
            let text = format!(
                "the key is revoked, but the gatekeeper did not confirm that its jobs have ended: {other:?}"
            );
            Err(Failure::new(RefusalKind::Internal, text)
                .hint("kill the process `tern-exec outside`, which ends the jobs of all clients"))
        }
    }
}

fn gatekeeper_is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn jobs(json: bool) -> Result<(), Failure> {
    let jobs = match call(&client::run_dir(), &GatekeeperRequest::Jobs) {
        Ok(GatekeeperReply::Jobs(jobs)) => jobs,
        Ok(other) => {
            return Err(Failure::new(
                RefusalKind::Internal,
                format!("the gatekeeper sent an unexpected reply: {other:?}"),
            ));
        }
        Err(error) if gatekeeper_is_absent(&error) => {
            let text = "no gatekeeper runs on this node";
            return Err(Failure::new(RefusalKind::Unavailable, text)
                .hint("set mexec_outside in ternd.toml; or see outside.log in ternd's run directory"));
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(Failure::new(
                RefusalKind::NotAllowed,
                "only the owner of the node may list its jobs",
            ));
        }
        Err(error) => return Err(error.into()),
    };
    if json { output::print_json(&jobs) } else { job_table(&jobs, unix_time()).print() }
}

fn job_table(jobs: &[GatekeeperJob], now: u64) -> output::Table {
    let mut table = output::Table::new(&[">JOB", "CLIENT", "USER", "FROM", "SINCE", "COMMAND"]);
    for job in jobs {
        table.push(vec![
            job.job.to_string(),
            job.client.clone(),
            output::sanitize(&job.user),
            job.from.clone(),
            time_since(job.since, now),
            output::sanitize(&job.command),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_table_shows_validity_and_use() {
        let row = |client: &str, state, expires, seen, max_jobs| KeyRow {
            client: client.into(),
            user: "anna".into(),
            state,
            expires,
            seen,
            jobs: 2,
            max_jobs,
        };
        let seen = LastSeen { at: 940, from: "10.0.0.9".into() };
        let rows = [
            row("ci", "good", Some(1_000 + 86_401), Some(seen), Some(4)),
            row("laptop", "revoked", Some(5_000), None, None),
        ];
        assert_eq!(
            key_table(&rows, 1_000).render(None),
            "CLIENT  USER  STATE    JOBS  SEEN   FROM\n\
             ci      anna  2 days    2/4  1 min  10.0.0.9\n\
             laptop  anna  revoked     2  never\n"
        );
    }

    #[test]
    fn job_table_replaces_control_characters() {
        let job = GatekeeperJob {
            job: 7,
            client: "ci".into(),
            user: "anna".into(),
            command: "a\u{1b}b".into(),
            since: 0,
            from: "::1".into(),
        };
        let text = job_table(&[job], 7_300).render(None);
        assert_eq!(text, "JOB  CLIENT  USER  FROM  SINCE  COMMAND\n  7  ci      anna  ::1   2 h    a?b\n");
    }
}
