//! `mosps`: this node's movable processes and its guests, in the columns of MOSIX's mosps.

use crate::tool::Invocation;
use crate::{Failure, help, job, output};
use clap::{Args, Command};
use tern_control::ProcessRow;
use tern_ids::NodeId;

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Only processes of this node that are away
    #[arg(long, conflicts_with_all = ["here", "guests"])]
    away: bool,
    /// Only processes of this node that are at home
    #[arg(long, conflicts_with = "guests")]
    here: bool,
    /// Only guests: processes of other nodes that run here
    #[arg(long, conflicts_with = "job")]
    guests: bool,
    /// Only processes of this job (mosrun -J)
    #[arg(short = 'J', long, visible_short_alias = 'j')]
    job: Option<u32>,
    /// Print the rows as a JSON array, as mps does
    #[arg(long)]
    json: bool,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("mosps"))
        .about("List this node's movable processes and its guests, in the columns of MOSIX")
        .long_about(
            "List this node's movable processes and its guests, in the columns of MOSIX: processes started with \
             mosrun, their children, processes moved by hand, and processes from other nodes.\n\n  \
             PID      the pid at its home\n  \
             WHERE    the node where it runs, or here\n  \
             FROM     its home, or here\n  \
             FRZ      M if it was frozen by hand (migrate PID freeze)\n  \
             NMIGS    number of migrations\n  \
             JOB      its job (mosrun -J), if known to this node\n\n\
             There is no ORIGPID, because a process has the same pid on all nodes, and no CLASS or DUE, because Tern \
             has neither.",
        )
        .after_help(help::after_help("  mosps\n  mosps --away\n  mosps -J 7", ""))
}

/// `mosps …`.
///
/// # Errors
/// If ternd does not answer.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let mut rows = job::processes()?;
    rows.retain(|row| is_listed(&options, row));
    if options.json { output::print_json(&rows) } else { table(&rows).print() }
}

fn is_listed(options: &Options, row: &ProcessRow) -> bool {
    let (guest, at_home) = (row.from.is_some(), is_at_home(row));
    let matches_place = match options {
        Options { away: true, .. } => !guest && !at_home,
        Options { here: true, .. } => at_home,
        Options { guests: true, .. } => guest,
        _ => true,
    };
    matches_place && options.job.is_none_or(|job| job::contains(row, job))
}

/// Whether the process is at home, by its state; a process that is migrating is not.
fn is_at_home(row: &ProcessRow) -> bool {
    row.from.is_none() && matches!(&*row.state, "home" | "frozen")
}

fn table(rows: &[ProcessRow]) -> output::Table {
    let mut table =
        output::Table::new(&[">PID", ">WHERE", ">FROM", "FRZ", ">NMIGS", ">JOB", ">TIME", "COMMAND"]);
    let or = |number: Option<u32>| number.map_or_else(|| "-".into(), |number| number.to_string());
    let node = |node: Option<NodeId>| node.map_or_else(|| "here".into(), |node| node.to_string());
    for row in rows {
        table.push(vec![
            row.pid.to_string(),
            node(row.r#where.filter(|_| !is_at_home(row))),
            node(row.from),
            if row.state == "frozen" { "M".into() } else { "-".into() },
            row.migrations.to_string(),
            or(row.started.and_then(|started| started.job)),
            output::cpu_time(row.cpu_seconds),
            output::sanitize(&row.command),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_control::{StartedAs, Usage};
    use tern_ids::HomePid;

    fn row(pid: i32, state: &str, place: Option<u16>, from: Option<u16>) -> ProcessRow {
        ProcessRow {
            pid: HomePid(pid),
            uid: 1000,
            r#where: place.map(NodeId),
            from: from.map(NodeId),
            state: state.into(),
            cpu_seconds: 65.0,
            migrations: 1,
            reason: String::new(),
            command: "flac".into(),
            usage: Usage::default(),
            started: None,
        }
    }

    #[test]
    fn table_has_mosix_columns_and_filters() {
        let of_a_job = Some(StartedAs { job: Some(7), ..StartedAs::default() });
        let rows = [
            row(31, "home", Some(1), None),
            ProcessRow { started: of_a_job, ..row(32, "running", Some(2), None) },
            row(33, "frozen", Some(1), None),
            row(34, "running", None, Some(3)),
        ];
        assert_eq!(
            table(&rows).render(None),
            "PID  WHERE  FROM  FRZ  NMIGS  JOB  TIME  COMMAND\n \
             31   here  here  -        1    -  1:05  flac\n \
             32      2  here  -        1    7  1:05  flac\n \
             33   here  here  M        1    -  1:05  flac\n \
             34   here     3  -        1    -  1:05  flac\n"
        );
        let listed = |words: &[&str]| {
            let args: Vec<std::ffi::OsString> = words.iter().map(Into::into).collect();
            let options = help::parse::<Options>(describe(), &Invocation { tool: "mosps", args: &args });
            let options = options.unwrap().unwrap();
            rows.iter().filter(|row| is_listed(&options, row)).map(|row| row.pid.0).collect::<Vec<_>>()
        };
        assert_eq!(listed(&[]), [31, 32, 33, 34]);
        assert_eq!(listed(&["--away"]), [32]);
        assert_eq!(listed(&["--here"]), [31, 33]);
        assert_eq!(listed(&["--guests"]), [34]);
        assert_eq!(listed(&["-j7"]), [32]);
    }
}
