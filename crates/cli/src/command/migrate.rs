//! `migrate PID NODE`: move a running process, and say how it went.

use crate::tool::Call;
use crate::{Failure, client, help, output, place, progress};
use clap::{Args, Command};
use tern_control::{Destination, MigrationReport, Reply, Request};
use tern_ids::HomePid;

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// The process, by its pid at home
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    /// Where to: a node's number, host or alias; home; or balance, to where the cluster would have it
    #[arg(value_name = "NODE")]
    to: String,
    /// Print the report as one line of JSON: pid, from, to, bytes, freeze_ms, total_ms and more
    #[arg(long)]
    json: bool,
    /// Print nothing, unless it fails
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("migrate"))
        .about("Move a running process to another node, or home")
        .long_about(
            "Move a running process to another node, or home. It returns when the process runs there, and \
             prints what it took: the bytes sent and how long the process stood still.\n\nYou may move the \
             processes that you could trace with a debugger; root may move any.",
        )
        .after_help(help::closing(
            "  migrate 1234 2\n  migrate 1234 home\n  migrate $(pgrep flac) beta --json",
            "When it fails, the process runs on where it was.",
        ))
}

/// `migrate …`.
///
/// # Errors
/// The reason why the process was not moved.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    let to = match &*options.to {
        "home" => Destination::Home,
        "balance" => Destination::Balance,
        word => Destination::Node(place::node(word)?),
    };
    let request = Request::Migrate { pid: HomePid(options.pid), to };
    let silent = options.quiet || options.json;
    let reply = if silent {
        client::ask(&request)?
    } else {
        progress::ask(request, &format!("{}: moving to {}", options.pid, options.to))?
    };
    match reply {
        Reply::Migrated(report) if options.json => output::print_json(&report),
        Reply::Migrated(_) if options.quiet => Ok(()),
        Reply::Migrated(report) => output::print(&line(&report)),
        other => Err(client::unexpected(&other)),
    }
}

/// `1234 flac: 1 → 2, 12.3 MB, frozen 18 ms`.
fn line(report: &MigrationReport) -> String {
    format!(
        "{} {}: {} → {}, {}, frozen {}\n",
        report.pid,
        output::plain(&report.command),
        report.from,
        report.to,
        output::bytes(report.bytes),
        output::milliseconds(report.freeze_ms),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::{MigrationId, NodeId};

    fn report() -> MigrationReport {
        MigrationReport {
            pid: HomePid(1234),
            command: "flac".into(),
            migration: MigrationId([1; 16]),
            from: NodeId(1),
            to: NodeId(2),
            bytes: 12_345_678,
            freeze_ms: 18.2,
            total_ms: 240.0,
        }
    }

    #[test]
    fn a_move_is_one_line() {
        assert_eq!(line(&report()), "1234 flac: 1 → 2, 12.3 MB, frozen 18 ms\n");
    }

    #[test]
    fn json_has_the_promised_keys() {
        let json = serde_json::to_value(report()).unwrap();
        for key in ["pid", "from", "to", "bytes", "freeze_ms", "total_ms"] {
            assert!(json[key].is_number(), "{key}");
        }
    }
}
