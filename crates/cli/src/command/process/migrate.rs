//! `migrate PID NODE`: moves a running process and prints a report.

use crate::tool::Invocation;
use crate::{Failure, client, help, job, node_name, output, progress};
use clap::{Args, Command};
use tern_control::{Destination, MigrationReport, ProcessRow, RefusalKind, Reply, Request, WhyReport};
use tern_ids::{HomePid, NodeId};

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The process, by its pid at home
    #[arg(value_name = "PID", required_unless_present = "job")]
    pid: Option<String>,
    /// Where to: a node's number, host or alias; home; balance, for the node that the balancer
    /// chooses; or out, freeze or continue
    #[arg(value_name = "NODE", required_unless_present_any = ["why", "job"])]
    to: Option<String>,
    /// With out: the guest's home, if guests of two homes have this pid
    #[arg(long, value_name = "NODE", conflicts_with_all = ["why", "job"])]
    from: Option<String>,
    /// Move all your processes of this job (mosrun -J) instead of one; for root, those of all users
    #[arg(short = 'J', long, visible_short_alias = 'j', conflicts_with = "why")]
    job: Option<u32>,
    /// Do not move it; show how the balancer rates the process and each node for it
    #[arg(long, conflicts_with_all = ["to", "quiet"])]
    why: bool,
    /// Print the report as one line of JSON: pid, from, to, bytes, freeze_ms, total_ms and more
    #[arg(long)]
    json: bool,
    /// Print nothing on success
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("migrate"))
        .about("Move a running process to another node or home")
        .long_about(
            "Move a running process to another node or home. The command returns when the process runs there, \
             and prints the bytes sent and how long the process was frozen.\n\nout sends a process away from \
             this node: a guest to the node that its home chooses (only root may do this), a process of this \
             node that is at home to the best other node.\n\nfreeze brings a process home and stops it until \
             continue: it uses no CPU, and its memory may be swapped out. Its parent does not notice. SIGKILL \
             works; other signals wait. A sleep or transfer in progress ends first.\n\nYou may move the \
             processes that you could trace with a debugger; root may move all.",
        )
        .override_usage("migrate PID NODE\n       migrate -J JOB NODE\n       migrate PID --why")
        .after_help(help::after_help(
            "  migrate 1234 2\n  migrate 1234 home\n  migrate 1234 --why\n  migrate $(pgrep flac) beta --json\n  migrate -J 7 home\n  \
               migrate 1234 freeze; sleep 3600; migrate 1234 continue",
            "If the migration fails, the process continues where it was.",
        ))
}

/// `migrate …`.
///
/// # Errors
/// The reason why the process was not moved.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let usage_error = |message: String| Failure::usage(invocation.tool, message);
    if options.why {
        return why(parse_pid(options.pid.as_deref()).map_err(usage_error)?, options.json);
    }
    let (target, word) = parse_target(&options).map_err(usage_error)?;
    let action = Action::parse(&word, options.from.as_deref())?;
    match target {
        Target::One(pid) => action.apply(pid, &word, &options),
        Target::Job(job) => {
            for_each_in_job(job, |row| action.apply(row.pid, &word, &options), invocation.tool)
        }
    }
}

/// The action on each process.
#[derive(Debug, Clone, Copy)]
enum Action {
    Move(Destination),
    Out(Option<NodeId>),
    Continue,
}

impl Action {
    fn parse(word: &str, from: Option<&str>) -> Result<Self, Failure> {
        Ok(match word {
            "out" => Self::Out(from.map(node_name::resolve).transpose()?),
            _ if from.is_some() => return Err(Failure::usage("migrate", "--from can only be used with out")),
            "home" => Self::Move(Destination::Home),
            "balance" => Self::Move(Destination::Balance),
            "freeze" => Self::Move(Destination::Frozen),
            "continue" => Self::Continue,
            word => Self::Move(Destination::Node(node_name::resolve(word)?)),
        })
    }

    fn apply(self, pid: HomePid, word: &str, options: &Options) -> Result<(), Failure> {
        let request = match self {
            Self::Move(to) => Request::Migrate { pid, to },
            Self::Out(from) => Request::LeaveNode { pid, from },
            Self::Continue => Request::Continue { pid },
        };
        let doing = match self {
            Self::Move(Destination::Frozen) => format!("{pid}: freezing"),
            _ => format!("{pid}: moving to {word}"),
        };
        let is_silent = options.quiet || options.json;
        let reply = if is_silent { client::request(&request)? } else { progress::request(request, &doing)? };
        match reply {
            Reply::Done => Ok(()),
            Reply::Migrated(report) if options.json => output::print_json(&report),
            Reply::Migrated(_) if options.quiet => Ok(()),
            Reply::Migrated(report) => output::print(&report_line(&report)),
            other => Err(client::unexpected_reply(&other)),
        }
    }
}

/// The process or job to move.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    One(HomePid),
    Job(u32),
}

fn parse_pid(word: Option<&str>) -> Result<HomePid, String> {
    let word = word.unwrap_or_default();
    let number = word.parse().ok().filter(|number| *number > 0);
    number.map(HomePid).ok_or_else(|| format!("'{word}' is not a process id"))
}

/// Distinguishes `PID NODE` from `-J JOB NODE`.
fn parse_target(options: &Options) -> Result<(Target, String), String> {
    match (options.job, &options.pid, &options.to) {
        (Some(job), Some(to), None) => Ok((Target::Job(job), to.clone())),
        (Some(_), None, _) => Err("no node was given".into()),
        (Some(_), Some(_), Some(_)) => Err("a process and a job cannot both be given".into()),
        (None, one, to) => Ok((Target::One(parse_pid(one.as_deref())?), to.clone().unwrap_or_default())),
    }
}

/// Applies `each` to every process of a job. Processes that are in the requested state already are
/// skipped. Every other failure is reported, and the remaining processes are still handled. Returns
/// the first such failure's exit code.
fn for_each_in_job(
    job: u32,
    each: impl Fn(&ProcessRow) -> Result<(), Failure>,
    tool: &str,
) -> Result<(), Failure> {
    let mut first_code = None;
    for row in job::current_members(job)? {
        match each(&row) {
            Err(failure) if failure.kind == Some(RefusalKind::AlreadyDone) => {}
            Err(failure) => {
                first_code.get_or_insert(failure.code);
                let message = format!("{}: {}", row.pid, failure.message);
                Failure { message, ..failure }.report(tool);
            }
            Ok(()) => {}
        }
    }
    first_code.map_or(Ok(()), |code| Err(Failure::silent(code)))
}

fn why(pid: HomePid, json: bool) -> Result<(), Failure> {
    let report = match client::request(&Request::Why { pid })? {
        Reply::Why(report) => *report,
        other => return Err(client::unexpected_reply(&other)),
    };
    if json {
        return output::print_json(&report);
    }
    let WhyReport { pid, at, demand, memory, calls_per_s, .. } = report;
    let mut text = format!(
        "process {pid} on node {at}: needs {demand:.0}% of a CPU, has {} of memory, makes {calls_per_s:.0} calls home per second\n",
        output::bytes(memory),
    );
    for files in &report.files {
        let (calls, bytes) = (files.calls_per_s, output::bytes(files.bytes_per_s as u64));
        text += &format!("files of node {}: {bytes} per second, in {calls:.0} calls\n", files.node);
    }
    if let Some(stays) = &report.stays {
        text += &format!("now: {stays}\n");
    }
    if let Some(last) = &report.last {
        text += &format!("{:.0} s ago: {last}\n", report.last_ms as f64 / 1e3);
    }
    output::print(&text)?;
    let mut table = output::Table::new(&[">NODE", ">SLOWDOWN", ">MOVE TIME", ">FROZEN", ">GAIN", "WHY NOT"]);
    for row in &report.nodes {
        table.push(vec![
            row.node.to_string(),
            format!("{:.2}", row.pace),
            output::milliseconds(row.transfer_s * 1e3),
            output::milliseconds(row.frozen_s * 1e3),
            format!("{:+.1} s", row.gain_s),
            row.against.as_deref().map_or_else(|| "-".into(), output::sanitize),
        ]);
    }
    table.print()
}

/// Formats a report: `1234 flac: 1 → 2, 12.3 MB, frozen 18 ms`.
fn report_line(report: &MigrationReport) -> String {
    format!(
        "{} {}: {} → {}, {}, frozen {}\n",
        report.pid,
        output::sanitize(&report.command),
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
    fn job_replaces_the_process_argument() {
        let parse = |line: &str| {
            let words: Vec<std::ffi::OsString> = line.split(' ').map(Into::into).collect();
            let invocation = Invocation { tool: "migrate", args: &words };
            let options =
                help::parse::<Options>(describe(), &invocation).map_err(|failure| failure.message)?;
            parse_target(&options.unwrap())
        };
        let to = |target, word: &str| Ok((target, word.to_owned()));
        assert_eq!(parse("31 home"), to(Target::One(HomePid(31)), "home"));
        assert_eq!(parse("-J 7 home"), to(Target::Job(7), "home"));
        assert_eq!(parse("-j7 2"), to(Target::Job(7), "2"), "as MOSIX writes it");
        assert_eq!(parse("2 -J7"), to(Target::Job(7), "2"));
        for wrong in ["x home", "0 home", "-J 7", "-J 7 31 home", "31", "-J x home", "31 --why -J 7"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn report_is_one_line() {
        assert_eq!(report_line(&report()), "1234 flac: 1 → 2, 12.3 MB, frozen 18 ms\n");
    }

    #[test]
    fn json_has_the_documented_keys() {
        let json = serde_json::to_value(report()).unwrap();
        for key in ["pid", "from", "to", "bytes", "freeze_ms", "total_ms"] {
            assert!(json[key].is_number(), "{key}");
        }
    }
}
