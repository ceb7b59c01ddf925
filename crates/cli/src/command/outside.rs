//! `tern outside`: the keys of machines that are not in the cluster, and what runs for them.

use crate::tool::Call;
use crate::{Failure, client, help, output};
use clap::{Args, Command, Subcommand};
use serde::Serialize;
use std::io;
use std::path::PathBuf;
use tern_control::outside::ask;
use tern_control::{OutsideAsk, OutsideJob, OutsideReply, RefusalKind};
use tern_mexec::outside::clients::{Client, Clients, Seen, Wanted, now};
use tern_mexec::outside::{check_user, key_file};
use tern_node::{Config, config};

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// The directory of ternd.toml
    #[arg(long, global = true, value_name = "DIR")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Make a key for a client; it is printed once, and is to be kept secret
    Add(Add),
    /// Show the keys: as which user, how long, when they were used last
    List {
        /// Print them as a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Make a key useless, and end the jobs that run with it
    Revoke {
        /// The client
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Show what runs for clients now
    Jobs {
        /// Print the jobs as a JSON array
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
struct Add {
    /// The client: letters, digits, - and _
    #[arg(value_name = "NAME")]
    name: String,
    /// The user of this node as whom its jobs run
    #[arg(long, value_name = "USER")]
    user: String,
    /// How many jobs it may have at a time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    jobs: Option<u32>,
    /// For how many days the key is good
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: Option<u32>,
    /// ADDRESS:PORT by which the client reaches this node, if it is not that of mexec_outside
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
    /// The user may be root
    #[arg(long)]
    root: bool,
}

/// One key, as it is listed.
#[derive(Debug, Serialize)]
struct Row {
    client: String,
    user: String,
    state: &'static str,
    expires: Option<u64>,
    seen: Option<Seen>,
    jobs: usize,
    most: Option<u32>,
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("outside"))
        .about("Let machines that are not in the cluster run commands on it, by keys")
        .long_about(
            "Let machines that are not in the cluster run commands on it, by keys. Each key is for one local user, as \
             whom all its jobs run; a client cannot choose another. The node listens for clients where mexec_outside in \
             its ternd.toml says, and else not at all. Clients run mexec.py, which takes Python and nothing else.",
        )
        .after_help(help::closing(
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
/// If the caller is not the owner of the node, there is no such key or user, or no gatekeeper that could be asked.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    let directory = options.config.map_or_else(config::config_dir, Ok).map_err(anyhow::Error::from)?;
    let config = Config::load(&directory).map_err(anyhow::Error::from)?;
    match options.what {
        What::Add(add) => self::add(&config, &add),
        What::List { json } => list(&config, json),
        What::Revoke { name } => revoke(&config, &name),
        What::Jobs { json } => jobs(json),
    }
}

fn add(config: &Config, add: &Add) -> Result<(), Failure> {
    let address = address(config, add)?;
    check_user(&add.user, add.root)?;
    let clients = Clients::of(config)?;
    let wanted = Wanted { user: add.user.clone(), jobs: add.jobs, days: add.days, root: add.root };
    let secret = clients.add(&add.name, &wanted)?;
    output::print(&key_file(&clients, &add.name, &address, &secret)?)
}

/// By what the client will reach this node.
fn address(config: &Config, add: &Add) -> Result<String, Failure> {
    if let Some(address) = &add.address {
        let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        if port.is_none_or(|port| port == 0) || address.contains(char::is_whitespace) {
            return Err(Failure::usage("tern outside", format!("{address} is not ADDRESS:PORT")));
        }
        return Ok(address.clone());
    }
    let unclear =
        |message: &str| Failure::new(RefusalKind::BadRequest, message).hint("--address ADDRESS:PORT");
    match config.file.mexec_outside {
        None => Err(unclear("mexec_outside is not set in ternd.toml, so this node listens for nobody")),
        Some(address) if address.ip().is_unspecified() => {
            Err(unclear("mexec_outside is all addresses, and the client needs one"))
        }
        Some(address) => Ok(address.to_string()),
    }
}

fn list(config: &Config, json: bool) -> Result<(), Failure> {
    let clients = Clients::of(config)?;
    let running = match ask(&client::run_dir(), &OutsideAsk::Jobs) {
        Ok(OutsideReply::Jobs(jobs)) => jobs,
        _ => Vec::new(),
    };
    let row = |(name, client): (String, Client)| Row {
        state: match client.fault() {
            Some(_) if client.revoked.is_some() => "revoked",
            Some(_) => "expired",
            None => "good",
        },
        jobs: running.iter().filter(|job| job.client == name).count(),
        seen: clients.last_seen(&name),
        user: client.user,
        expires: client.expires,
        most: client.jobs,
        client: name,
    };
    let rows: Vec<Row> = clients.all()?.into_iter().map(row).collect();
    if json { output::print_json(&rows) } else { table(&rows, now()).print() }
}

fn table(rows: &[Row], now: u64) -> output::Table {
    let mut table = output::Table::new(&["CLIENT", "USER", "STATE", ">JOBS", "SEEN", "FROM"]);
    for row in rows {
        let days = |end: u64| format!("{} days", end.saturating_sub(now).div_ceil(86_400));
        table.row(vec![
            row.client.clone(),
            output::plain(&row.user),
            match (row.state, row.expires) {
                ("good", Some(end)) => days(end),
                (state, _) => state.into(),
            },
            row.most.map_or_else(|| row.jobs.to_string(), |most| format!("{}/{most}", row.jobs)),
            row.seen.as_ref().map_or_else(|| "never".into(), |seen| ago(seen.at, now)),
            row.seen.as_ref().map_or_else(String::new, |seen| output::plain(&seen.from)),
        ]);
    }
    table
}

/// How long ago.
fn ago(then: u64, now: u64) -> String {
    match now.saturating_sub(then) {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..7_200 => format!("{} min", seconds / 60),
        seconds @ 7_200..172_800 => format!("{} h", seconds / 3_600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

fn revoke(config: &Config, name: &str) -> Result<(), Failure> {
    Clients::of(config)?.revoke(name)?;
    match ask(&client::run_dir(), &OutsideAsk::Look) {
        Ok(OutsideReply::Ended(0)) => Ok(()),
        Ok(OutsideReply::Ended(count)) => output::print(&format!("{count} jobs were ended\n")),
        // Nobody listens, and nothing runs.
        Err(error) if is_none(&error) => Ok(()),
        other => {
            let said = format!(
                "the key is revoked, but the gatekeeper does not say that its jobs have ended: {other:?}"
            );
            Err(Failure::new(RefusalKind::Internal, said)
                .hint("kill tern-exec outside: all its jobs end with it"))
        }
    }
}

fn is_none(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn jobs(json: bool) -> Result<(), Failure> {
    let jobs = match ask(&client::run_dir(), &OutsideAsk::Jobs) {
        Ok(OutsideReply::Jobs(jobs)) => jobs,
        Ok(other) => {
            return Err(Failure::new(RefusalKind::Internal, format!("the gatekeeper answered {other:?}")));
        }
        Err(error) if is_none(&error) => {
            let said = "no gatekeeper runs on this node";
            return Err(Failure::new(RefusalKind::Unavailable, said)
                .hint("mexec_outside in ternd.toml; outside.log in ternd's run directory"));
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(Failure::new(RefusalKind::NotAllowed, "only the owner of the node sees its jobs"));
        }
        Err(error) => return Err(error.into()),
    };
    if json { output::print_json(&jobs) } else { jobs_table(&jobs, now()).print() }
}

fn jobs_table(jobs: &[OutsideJob], now: u64) -> output::Table {
    let mut table = output::Table::new(&[">JOB", "CLIENT", "USER", "FROM", "SINCE", "COMMAND"]);
    for job in jobs {
        table.row(vec![
            job.job.to_string(),
            job.client.clone(),
            output::plain(&job.user),
            job.from.clone(),
            ago(job.since, now),
            output::plain(&job.command),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_listed_with_what_they_are_good_for() {
        let row = |client: &str, state, expires, seen, most| Row {
            client: client.into(),
            user: "anna".into(),
            state,
            expires,
            seen,
            jobs: 2,
            most,
        };
        let seen = Seen { at: 940, from: "10.0.0.9".into() };
        let rows = [
            row("ci", "good", Some(1_000 + 86_401), Some(seen), Some(4)),
            row("laptop", "revoked", Some(5_000), None, None),
        ];
        assert_eq!(
            table(&rows, 1_000).render(None),
            "CLIENT  USER  STATE    JOBS  SEEN   FROM\n\
             ci      anna  2 days    2/4  1 min  10.0.0.9\n\
             laptop  anna  revoked     2  never\n"
        );
    }

    #[test]
    fn jobs_command_no_terminal() {
        let job = OutsideJob {
            job: 7,
            client: "ci".into(),
            user: "anna".into(),
            command: "a\u{1b}b".into(),
            since: 0,
            from: "::1".into(),
        };
        let text = jobs_table(&[job], 7_300).render(None);
        assert_eq!(text, "JOB  CLIENT  USER  FROM  SINCE  COMMAND\n  7  ci      anna  ::1   2 h    a?b\n");
    }
}
