//! `migrate PID NODE`: move a running process, and say how it went.

use crate::tool::Call;
use crate::{Failure, client, help, job, output, place, progress};
use clap::{Args, Command};
use tern_control::{Destination, MigrationReport, ProcessRow, RefusalKind, Reply, Request, WhyReport};
use tern_ids::{HomePid, NodeId};

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// The process, by its pid at home
    #[arg(value_name = "PID", required_unless_present = "job")]
    pid: Option<String>,
    /// Where to: a node's number, host or alias; home; or balance, to where the cluster would have it. Or out,
    /// freeze or continue
    #[arg(value_name = "NODE", required_unless_present_any = ["why", "job"])]
    to: Option<String>,
    /// With out: the guest's home, if guests of two homes have this pid
    #[arg(long, value_name = "NODE", conflicts_with_all = ["why", "job"])]
    from: Option<String>,
    /// All your processes of this job (mosrun -J) instead of one; root: everybody's
    #[arg(short = 'J', long, visible_short_alias = 'j', conflicts_with = "why")]
    job: Option<u32>,
    /// Move nothing: show what the balancer thinks of the process, and of each node for it
    #[arg(long, conflicts_with_all = ["to", "quiet"])]
    why: bool,
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
             prints what it took: the bytes sent and how long the process stood still.\n\nout sends it away from \
             here: a guest, which only root can, to wherever its home would have it; a process of this node that is \
             at home to the best other node.\n\nfreeze brings it home, \
             where it stands still until continue: it takes no CPU, and its memory may be swapped out. Of this its \
             parent sees nothing; SIGKILL works, other signals wait. A sleep or transfer that is under way ends \
             first.\n\nYou may move the \
             processes that you could trace with a debugger; root may move any.",
        )
        .override_usage("migrate PID NODE\n       migrate -J JOB NODE\n       migrate PID --why")
        .after_help(help::closing(
            "  migrate 1234 2\n  migrate 1234 home\n  migrate $(pgrep flac) beta --json\n  migrate -J 7 home\n  \
               migrate 1234 freeze; sleep 3600; migrate 1234 continue",
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
    let usage = |message: String| Failure::usage(call.tool, message);
    if options.why {
        return why(pid(options.pid.as_deref()).map_err(usage)?, options.json);
    }
    let (target, word) = target(&options).map_err(usage)?;
    let order = Order::of(&word, options.from.as_deref())?;
    match target {
        Target::One(pid) => order.give(pid, &word, &options),
        Target::Job(job) => all_of(job, |row| order.give(row.pid, &word, &options), call.tool),
    }
}

/// What is to be done to each process.
#[derive(Debug, Clone, Copy)]
enum Order {
    Move(Destination),
    Out(Option<NodeId>),
    Continue,
}

impl Order {
    fn of(word: &str, from: Option<&str>) -> Result<Self, Failure> {
        Ok(match word {
            "out" => Self::Out(from.map(place::node).transpose()?),
            _ if from.is_some() => return Err(Failure::usage("migrate", "--from is for out only")),
            "home" => Self::Move(Destination::Home),
            "balance" => Self::Move(Destination::Balance),
            "freeze" => Self::Move(Destination::Frozen),
            "continue" => Self::Continue,
            word => Self::Move(Destination::Node(place::node(word)?)),
        })
    }

    fn give(self, pid: HomePid, word: &str, options: &Options) -> Result<(), Failure> {
        let request = match self {
            Self::Move(to) => Request::Migrate { pid, to },
            Self::Out(from) => Request::Out { pid, from },
            Self::Continue => Request::Continue { pid },
        };
        let doing = match self {
            Self::Move(Destination::Frozen) => format!("{pid}: freezing"),
            _ => format!("{pid}: moving to {word}"),
        };
        let silent = options.quiet || options.json;
        let reply = if silent { client::ask(&request)? } else { progress::ask(request, &doing)? };
        match reply {
            Reply::Done => Ok(()),
            Reply::Migrated(report) if options.json => output::print_json(&report),
            Reply::Migrated(_) if options.quiet => Ok(()),
            Reply::Migrated(report) => output::print(&line(&report)),
            other => Err(client::unexpected(&other)),
        }
    }
}

/// What is to move.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    One(HomePid),
    Job(u32),
}

fn pid(word: Option<&str>) -> Result<HomePid, String> {
    let word = word.unwrap_or_default();
    let number = word.parse().ok().filter(|number| *number > 0);
    number.map(HomePid).ok_or_else(|| format!("'{word}' is not a process's number"))
}

/// Tells `PID NODE` from `-J JOB NODE`.
fn target(options: &Options) -> Result<(Target, String), String> {
    match (options.job, &options.pid, &options.to) {
        (Some(job), Some(to), None) => Ok((Target::Job(job), to.clone())),
        (Some(_), None, _) => Err("no node was given".into()),
        (Some(_), Some(_), Some(_)) => Err("give a process or a job, not both".into()),
        (None, one, to) => Ok((Target::One(pid(one.as_deref())?), to.clone().unwrap_or_default())),
    }
}

/// Does the same to each process of a job. What is there already is as it should be; of the others each failure is
/// said, and none keeps the next from its turn.
fn all_of(wanted: u32, each: impl Fn(&ProcessRow) -> Result<(), Failure>, tool: &str) -> Result<(), Failure> {
    let mut worst = None;
    for row in job::now(wanted)? {
        match each(&row) {
            Err(failure) if failure.code == RefusalKind::BadRequest.exit_code() => {}
            Err(failure) => {
                worst.get_or_insert(failure.code);
                let message = format!("{}: {}", row.pid, failure.message);
                Failure { message, ..failure }.report(tool);
            }
            Ok(()) => {}
        }
    }
    worst.map_or(Ok(()), |code| Err(Failure::silent(code)))
}

fn why(pid: HomePid, json: bool) -> Result<(), Failure> {
    let report = match client::ask(&Request::Why { pid })? {
        Reply::Why(report) => *report,
        other => return Err(client::unexpected(&other)),
    };
    if json {
        return output::print_json(&report);
    }
    let WhyReport { pid, at, demand, memory, calls_per_s, .. } = report;
    let mut text = format!(
        "{pid} is on node {at}: it wants {demand:.0}% of a CPU, has {}, and calls home {calls_per_s:.0} times a second\n",
        output::bytes(memory),
    );
    for files in &report.files {
        let (calls, bytes) = (files.calls_per_s, output::bytes(files.bytes_per_s as u64));
        text += &format!("on files of node {}: {bytes} a second, in {calls:.0} calls\n", files.node);
    }
    if let Some(stays) = &report.stays {
        text += &format!("now: {stays}\n");
    }
    if let Some(last) = &report.last {
        text += &format!("{:.0} s ago: {last}\n", report.last_ms as f64 / 1e3);
    }
    output::print(&text)?;
    let mut table = output::Table::new(&[">NODE", ">PACE", ">WAY", ">FROZEN", ">GAIN", "AGAINST IT"]);
    for row in &report.nodes {
        table.row(vec![
            row.node.to_string(),
            format!("{:.2}", row.pace),
            output::milliseconds(row.way_s * 1e3),
            output::milliseconds(row.frozen_s * 1e3),
            format!("{:+.1} s", row.gain_s),
            row.against.as_deref().map_or_else(|| "-".into(), output::plain),
        ]);
    }
    table.print()
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
    use tern_ids::MigrationId;

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
    fn a_job_takes_the_place_of_a_process() {
        let read = |line: &str| {
            let words: Vec<std::ffi::OsString> = line.split(' ').map(Into::into).collect();
            let call = Call { tool: "migrate", args: &words };
            let options = help::parse::<Options>(describe(), &call).map_err(|failure| failure.message)?;
            target(&options.unwrap())
        };
        let to = |target, word: &str| Ok((target, word.to_owned()));
        assert_eq!(read("31 home"), to(Target::One(HomePid(31)), "home"));
        assert_eq!(read("-J 7 home"), to(Target::Job(7), "home"));
        assert_eq!(read("-j7 2"), to(Target::Job(7), "2"), "as MOSIX writes it");
        assert_eq!(read("2 -J7"), to(Target::Job(7), "2"));
        for wrong in ["x home", "0 home", "-J 7", "-J 7 31 home", "31", "-J x home", "31 --why -J 7"] {
            assert!(read(wrong).is_err(), "{wrong}");
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
