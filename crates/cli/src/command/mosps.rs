//! `mosps`: the processes that this node has to do with, in the columns of MOSIX' mosps.

use crate::tool::Call;
use crate::{Failure, help, job, output};
use clap::{Args, Command};
use tern_control::ProcessRow;
use tern_ids::NodeId;

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// Only processes of this node that are away
    #[arg(long, conflicts_with_all = ["here", "guests"])]
    away: bool,
    /// Only processes of this node that are at home
    #[arg(long, conflicts_with = "guests")]
    here: bool,
    /// Only those of other nodes that are here
    #[arg(long, conflicts_with = "job")]
    guests: bool,
    /// Only those of this job (mosrun -J)
    #[arg(short = 'J', long, visible_short_alias = 'j')]
    job: Option<u32>,
    /// Print the rows as a JSON array, as mps does
    #[arg(long)]
    json: bool,
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("mosps"))
        .about("List this node's processes that may move, and guests, in the columns of MOSIX")
        .long_about(
            "List this node's processes that may move, and guests, in the columns of MOSIX: what was started with \
             mosrun, its children, what was moved by hand, and what came from other nodes.\n\n  \
             PID      the process; of a guest: at its home\n  \
             WHERE    the node where it runs, or here\n  \
             FROM     its home, or here\n  \
             FRZ      M if it was frozen by hand (migrate PID freeze)\n  \
             NMIGS    migrations so far\n  \
             JOB      its job (mosrun -J), as far as this node knows\n\n\
             There is no ORIGPID: a process has the same pid everywhere. Nor CLASS and DUE: Tern has neither.",
        )
        .after_help(help::closing("  mosps\n  mosps --away\n  mosps -J 7", ""))
}

/// `mosps …`.
///
/// # Errors
/// If ternd does not answer.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    let mut rows = job::rows()?;
    rows.retain(|row| shows(&options, row));
    if options.json { output::print_json(&rows) } else { table(&rows).print() }
}

fn shows(options: &Options, row: &ProcessRow) -> bool {
    let (guest, at_home) = (row.from.is_some(), is_at_home(row));
    let place = match options {
        Options { away: true, .. } => !guest && !at_home,
        Options { here: true, .. } => at_home,
        Options { guests: true, .. } => guest,
        _ => true,
    };
    place && options.job.is_none_or(|wanted| job::is_of(row, wanted))
}

/// By its state: a process on its way is neither.
fn is_at_home(row: &ProcessRow) -> bool {
    row.from.is_none() && matches!(&*row.state, "home" | "frozen")
}

fn table(rows: &[ProcessRow]) -> output::Table {
    let mut table =
        output::Table::new(&[">PID", ">WHERE", ">FROM", "FRZ", ">NMIGS", ">JOB", ">TIME", "COMMAND"]);
    let or = |number: Option<u32>| number.map_or_else(|| "-".into(), |number| number.to_string());
    let node = |node: Option<NodeId>| node.map_or_else(|| "here".into(), |node| node.to_string());
    for row in rows {
        table.row(vec![
            row.pid.to_string(),
            node(row.r#where.filter(|_| !is_at_home(row))),
            node(row.from),
            if row.state == "frozen" { "M".into() } else { "-".into() },
            row.migrations.to_string(),
            or(row.started.and_then(|started| started.job)),
            output::cpu_time(row.cpu_seconds),
            output::plain(&row.command),
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
    fn mosix_columns_and_choices() {
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
        let chosen = |words: &[&str]| {
            let args: Vec<std::ffi::OsString> = words.iter().map(Into::into).collect();
            let options = help::parse::<Options>(describe(), &Call { tool: "mosps", args: &args });
            let options = options.unwrap().unwrap();
            rows.iter().filter(|row| shows(&options, row)).map(|row| row.pid.0).collect::<Vec<_>>()
        };
        assert_eq!(chosen(&[]), [31, 32, 33, 34]);
        assert_eq!(chosen(&["--away"]), [32]);
        assert_eq!(chosen(&["--here"]), [31, 33]);
        assert_eq!(chosen(&["--guests"]), [34]);
        assert_eq!(chosen(&["-j7"]), [32]);
    }
}
