//! `mps`: the processes of this node that are away, and those of others that are here.

use crate::tool::Call;
use crate::{Failure, client, help, job, output};
use clap::{Args, Command};
use tern_control::{PlacedRow, ProcessRow, Reply, Request};

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// Show also what was started with mosrun, is at home, and has never moved; and its children
    #[arg(short, long)]
    all: bool,
    /// Show the processes of this job (mosrun -J), wherever they are
    #[arg(short = 'J', long, visible_short_alias = 'j')]
    job: Option<u32>,
    /// Show the commands that mexec has placed instead: this node's, wherever they run, and those of others here
    #[arg(short = 'x', long, conflicts_with_all = ["all", "job"])]
    placed: bool,
    /// Print the rows as a JSON array
    #[arg(long)]
    json: bool,
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("mps"))
        .about("List the processes that are away from this node, or came to it")
        .long_about(
            "List the processes that are away from this node, or came to it.\n\n  \
             PID      the process at its home\n  \
             WHERE    for a process of this node: the node where it runs\n  \
             FROM     for a guest: its home\n  \
             STATE    running, migrating, suspended (its link is cut), frozen or home\n  \
             TIME     CPU time used, as far as this node knows\n  \
             MIGS     migrations so far\n  \
             REASON   why it cannot move, or why it came home\n\n\
             Of a placed command, WHERE is queued while it waits for room, and TIME is how long it has run or waited.",
        )
        .after_help(help::closing(
            "  mps\n  mps -J 7\n  mps -x                  what mexec and mpmake run\n  mps --json | jq '.[] | select(.where == 2) | .pid'",
            "",
        ))
}

/// `mps …`.
///
/// # Errors
/// If ternd does not answer.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    if options.placed {
        return match client::ask(&Request::Placed)? {
            Reply::Placed(rows) if options.json => output::print_json(&rows),
            Reply::Placed(rows) => placed(&rows).print(),
            other => Err(client::unexpected(&other)),
        };
    }
    let mut rows = job::rows()?;
    match options.job {
        Some(wanted) => rows.retain(|row| job::is_of(row, wanted)),
        None => rows.retain(|row| options.all || has_moved(row)),
    }
    rows.sort_by_key(|row| (row.from, row.pid));
    if options.json { output::print_json(&rows) } else { table(&rows).print() }
}

/// Whether there is more to tell of a process than that it was started with mosrun.
fn has_moved(row: &ProcessRow) -> bool {
    row.state != "home" || row.from.is_some() || row.migrations > 0 || !row.reason.is_empty()
}

fn table(rows: &[ProcessRow]) -> output::Table {
    let mut table =
        output::Table::new(&[">PID", ">WHERE", ">FROM", "STATE", ">TIME", ">MIGS", "REASON", "COMMAND"]);
    let node = |node: Option<tern_ids::NodeId>| node.map_or_else(|| "-".into(), |node| node.to_string());
    for row in rows {
        table.row(vec![
            row.pid.to_string(),
            node(row.r#where),
            node(row.from),
            output::plain(&row.state),
            output::cpu_time(row.cpu_seconds),
            row.migrations.to_string(),
            if row.reason.is_empty() { "-".into() } else { output::plain(&row.reason) },
            output::plain(&row.command),
        ]);
    }
    table
}

fn placed(rows: &[PlacedRow]) -> output::Table {
    let mut table = output::Table::new(&[">PID", ">USER", ">WHERE", ">FROM", ">TIME", "COMMAND"]);
    for row in rows {
        table.row(vec![
            row.pid.to_string(),
            row.uid.to_string(),
            row.r#where.map_or_else(|| "queued".into(), |node| node.to_string()),
            row.from.map_or_else(|| "-".into(), |node| node.to_string()),
            output::cpu_time(row.seconds),
            output::plain(&row.command),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::{HomePid, NodeId};

    fn row(state: &str, r#where: Option<u16>, from: Option<u16>) -> ProcessRow {
        ProcessRow {
            pid: HomePid(1234),
            uid: 1000,
            r#where: r#where.map(NodeId),
            from: from.map(NodeId),
            state: state.into(),
            cpu_seconds: 65.0,
            migrations: 0,
            reason: String::new(),
            command: "flac -8 a.wav".into(),
            usage: tern_control::Usage::default(),
            started: None,
        }
    }

    #[test]
    fn a_job_is_one_option() {
        let read = |words: &[&str]| describe().try_get_matches_from(words).unwrap();
        for words in [["mps", "-J7"], ["mps", "-j7"], ["mps", "--job=7"]] {
            assert_eq!(read(&words).get_one::<u32>("job"), Some(&7), "{words:?}");
        }
    }

    #[test]
    fn the_table_has_the_promised_columns() {
        let rows = [row("running", Some(2), None), row("running", None, Some(3))];
        assert_eq!(
            table(&rows).render(None),
            " PID  WHERE  FROM  STATE    TIME  MIGS  REASON  COMMAND\n\
             1234      2     -  running  1:05     0  -       flac -8 a.wav\n\
             1234      -     3  running  1:05     0  -       flac -8 a.wav\n"
        );
    }

    #[test]
    fn placed_commands_have_columns_of_their_own() {
        let row = |r#where: Option<u16>, from: Option<u16>| PlacedRow {
            pid: HomePid(1234),
            uid: 1000,
            r#where: r#where.map(NodeId),
            from: from.map(NodeId),
            seconds: 65.0,
            command: "gcc -c a.c".into(),
        };
        assert_eq!(
            placed(&[row(Some(2), None), row(None, None), row(Some(1), Some(3))]).render(None),
            " PID  USER   WHERE  FROM  TIME  COMMAND\n\
             1234  1000       2     -  1:05  gcc -c a.c\n\
             1234  1000  queued     -  1:05  gcc -c a.c\n\
             1234  1000       1     3  1:05  gcc -c a.c\n"
        );
    }

    #[test]
    fn what_never_moved_is_left_out_unless_it_has_a_reason() {
        let mut home = row("home", Some(1), None);
        assert!(!has_moved(&home));
        home.reason = "it maps a device".into();
        assert!(has_moved(&home));
        assert!(has_moved(&row("running", None, Some(2))));
    }
}
