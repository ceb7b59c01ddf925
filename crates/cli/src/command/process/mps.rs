//! `mps`: lists this node's processes that are away, and guests of other nodes.

use crate::tool::Invocation;
use crate::{Failure, client, help, job, output};
use clap::{Args, Command};
use tern_control::{ConnectionRow, PlacedRow, ProcessRow, Reply, Request};

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Also show processes started with mosrun that have never moved, and their children
    #[arg(short, long)]
    all: bool,
    /// Show the processes of this job (mosrun -J), wherever they are
    #[arg(short = 'J', long, visible_short_alias = 'j')]
    job: Option<u32>,
    /// Show commands placed by mexec instead: those of this node, wherever they run, and those of other nodes that run here
    #[arg(short = 'x', long, conflicts_with_all = ["all", "job"])]
    placed: bool,
    /// Show network sockets instead: those of this node's processes that are away, with the node that has each and the
    /// reason why it stays at home, and the connections of guests that are here
    #[arg(short = 'n', long, conflicts_with_all = ["all", "job", "placed"])]
    network: bool,
    /// Print the rows as a JSON array
    #[arg(long)]
    json: bool,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("mps"))
        .about("List the processes that are away from this node or came to it")
        .long_about(
            "List the processes that are away from this node or came to it.\n\n  \
             PID      the pid at its home\n  \
             WHERE    for a process of this node: the node where it runs\n  \
             FROM     for a guest: its home\n  \
             STATE    running, migrating, suspended (its link is cut), frozen or home\n  \
             TIME     CPU time used, as known to this node\n  \
             MIGS     number of migrations\n  \
             REASON   why it cannot move, or why it came home\n\n\
             For a placed command, WHERE is placing while a node is chosen, queued while it waits for free capacity, \
             and TIME is how long it has run or waited.\n\n\
             With -n there is a row for each socket: WHERE is the node that has it, LOCAL and PEER are its ends, and \
             REASON says why it is at home while its process is not. Other users' sockets are listed only for root and the user who runs ternd.",
        )
        .after_help(help::after_help(
            "  mps\n  mps -J 7\n  mps -x                  what mexec and mpmake run\n  mps -n                  where the connections are\n  mps --json | jq '.[] | select(.where == 2) | .pid'",
            "",
        ))
}

/// `mps …`.
///
/// # Errors
/// If ternd does not answer.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    if options.placed {
        return match client::request(&Request::Placed)? {
            Reply::Placed(rows) if options.json => output::print_json(&rows),
            Reply::Placed(rows) => placed_table(&rows).print(),
            other => Err(client::unexpected_reply(&other)),
        };
    }
    if options.network {
        return match client::request(&Request::Connections)? {
            Reply::Connections(rows) if options.json => output::print_json(&rows),
            Reply::Connections(rows) => network_table(&rows).print(),
            other => Err(client::unexpected_reply(&other)),
        };
    }
    let mut rows = job::processes()?;
    match options.job {
        Some(job) => rows.retain(|row| job::contains(row, job)),
        None => rows.retain(|row| options.all || has_moved(row)),
    }
    rows.sort_by_key(|row| (row.from, row.pid));
    if options.json { output::print_json(&rows) } else { table(&rows).print() }
}

/// Whether a process has moved, is a guest, or has a reason why it does not move. A process of
/// mosrun without any of these is listed only with -a.
fn has_moved(row: &ProcessRow) -> bool {
    row.state != "home" || row.from.is_some() || row.migrations > 0 || !row.reason.is_empty()
}

/// A cell that may be empty.
fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

fn reason(text: &str) -> String {
    if text.is_empty() { "-".into() } else { output::sanitize(text) }
}

fn table(rows: &[ProcessRow]) -> output::Table {
    let mut table =
        output::Table::new(&[">PID", ">WHERE", ">FROM", "STATE", ">TIME", ">MIGS", "REASON", "COMMAND"]);
    for row in rows {
        table.push(vec![
            row.pid.to_string(),
            or_dash(row.r#where),
            or_dash(row.from),
            output::sanitize(&row.state),
            output::cpu_time(row.cpu_seconds),
            row.migrations.to_string(),
            reason(&row.reason),
            output::sanitize(&row.command),
        ]);
    }
    table
}

fn network_table(rows: &[ConnectionRow]) -> output::Table {
    let mut table =
        output::Table::new(&[">PID", ">WHERE", ">FROM", ">FD", "LOCAL", "PEER", "REASON", "COMMAND"]);
    for row in rows {
        table.push(vec![
            row.pid.to_string(),
            or_dash(row.r#where),
            or_dash(row.from),
            row.fd.to_string(),
            row.local.to_string(),
            or_dash(row.peer),
            reason(&row.reason),
            output::sanitize(&row.command),
        ]);
    }
    table
}

fn placed_table(rows: &[PlacedRow]) -> output::Table {
    let mut table = output::Table::new(&[">PID", ">USER", ">WHERE", ">FROM", ">TIME", "COMMAND"]);
    for row in rows {
        table.push(vec![
            row.pid.to_string(),
            row.uid.to_string(),
            match row.r#where {
                Some(node) => node.to_string(),
                None if row.is_queued => "queued".into(),
                None => "placing".into(),
            },
            or_dash(row.from),
            output::cpu_time(row.seconds),
            output::sanitize(&row.command),
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
    fn job_option_has_all_its_forms() {
        let parse = |words: &[&str]| describe().try_get_matches_from(words).unwrap();
        for words in [["mps", "-J7"], ["mps", "-j7"], ["mps", "--job=7"]] {
            assert_eq!(parse(&words).get_one::<u32>("job"), Some(&7), "{words:?}");
        }
    }

    #[test]
    fn table_has_the_documented_columns() {
        let rows = [row("running", Some(2), None), row("running", None, Some(3))];
        assert_eq!(
            table(&rows).render(None),
            " PID  WHERE  FROM  STATE    TIME  MIGS  REASON  COMMAND\n\
             1234      2     -  running  1:05     0  -       flac -8 a.wav\n\
             1234      -     3  running  1:05     0  -       flac -8 a.wav\n"
        );
    }

    #[test]
    fn network_table_has_a_row_for_each_socket() {
        let row = |peer: Option<&str>, node: u16, reason: &str| ConnectionRow {
            pid: HomePid(1234),
            uid: 1000,
            from: None,
            r#where: Some(NodeId(node)),
            fd: 4,
            local: "10.0.0.1:80".parse().unwrap(),
            peer: peer.map(|peer| peer.parse().unwrap()),
            reason: reason.into(),
            command: "httpd".into(),
        };
        assert_eq!(
            network_table(&[row(Some("10.0.0.3:5000"), 2, ""), row(None, 1, "listens")]).render(None),
            " PID  WHERE  FROM  FD  LOCAL        PEER           REASON   COMMAND\n\
             1234      2     -   4  10.0.0.1:80  10.0.0.3:5000  -        httpd\n\
             1234      1     -   4  10.0.0.1:80  -              listens  httpd\n"
        );
    }

    #[test]
    fn placed_table_has_its_own_columns() {
        let row = |r#where: Option<u16>, from: Option<u16>| PlacedRow {
            pid: HomePid(1234),
            uid: 1000,
            r#where: r#where.map(NodeId),
            is_queued: r#where.is_none(),
            from: from.map(NodeId),
            seconds: 65.0,
            command: "gcc -c a.c".into(),
        };
        let placing = PlacedRow { is_queued: false, ..row(None, None) };
        assert_eq!(
            placed_table(&[row(Some(2), None), row(None, None), row(Some(1), Some(3)), placing]).render(None),
            " PID  USER    WHERE  FROM  TIME  COMMAND\n\
             1234  1000        2     -  1:05  gcc -c a.c\n\
             1234  1000   queued     -  1:05  gcc -c a.c\n\
             1234  1000        1     3  1:05  gcc -c a.c\n\
             1234  1000  placing     -  1:05  gcc -c a.c\n"
        );
    }

    #[test]
    fn unmoved_processes_are_hidden_unless_they_have_a_reason() {
        let mut home = row("home", Some(1), None);
        assert!(!has_moved(&home));
        home.reason = "it maps a device".into();
        assert!(has_moved(&home));
        assert!(has_moved(&row("running", None, Some(2))));
    }
}
