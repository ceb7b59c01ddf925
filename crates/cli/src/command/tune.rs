//! `tune`: what it costs to talk to other nodes, and to move a process there.
//!
//! ternd measures the link. What calls and moves cost is measured with a process that is there for that only: this very
//! program in another role, which is moved there and back, small and large, and makes calls there.

use crate::tool::Call;
use crate::{Failure, client, help, output, place, progress};
use clap::{Args, Command};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Instant;
use tern_control::{
    ClusterReport, Costs, Destination, MigrationCosts, MigrationReport, NodeState, RefusalKind, Reply,
    Request,
};
use tern_ids::{HomePid, NodeId};

/// The name under which this program is the process that is moved.
pub const SUBJECT: &str = "tern-tune-subject";

/// How much the process has more when it is moved large: enough to be more than the scatter of its fixed cost.
const MEBIBYTES: usize = 32;

/// How many calls it makes.
const CALLS: u32 = 1000;

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// The nodes, by number, host or alias [default: all others that are up]
    #[arg(value_name = "NODE")]
    nodes: Vec<String>,
    /// Measure only the links: move no process
    #[arg(long)]
    links: bool,
    /// Print what was measured as a JSON array
    #[arg(long)]
    json: bool,
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("tune"))
        .about("Measure what it costs to talk to other nodes, and to move a process there")
        .long_about(
            "Measure what it costs to talk to other nodes, and to move a process there: the round trip, the \
             throughput both ways, and with a small process of its own that it sends there what a system call to home \
             and a migration cost. A few seconds for each node, best while nodes and network are idle.\n\nThe balancer \
             of this node reckons with the figures from then on, also after a restart of ternd. It follows round \
             trips and migrations by itself as well, so tune is of use before the first large migration and to see \
             what a network does; no node needs it to work. mosctl gettune shows the figures again.",
        )
        .after_help(help::closing("  tune\n  tune 2 beta --json\n  tune --links", ""))
}

/// `tune …`.
///
/// # Errors
/// If one of the nodes could not be measured; the others are shown.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    let mut measured = Vec::new();
    let mut worst = None;
    for node in nodes(&options.nodes)? {
        let failed = |failure: Failure| {
            let message = format!("node {node}: {}", failure.message);
            Failure { message, ..failure }
        };
        match links(node) {
            Ok(costs) => {
                measured.push(costs);
                if !options.links
                    && let Some(costs) = measured.last_mut()
                    && let Err(failure) = journeys(costs)
                {
                    worst.get_or_insert(failure.code);
                    failed(failure).report(call.tool);
                }
            }
            Err(failure) => {
                worst.get_or_insert(failure.code);
                failed(failure).report(call.tool);
            }
        }
    }
    if options.json {
        output::print_json(&measured)?;
    } else {
        table(&measured).print()?;
    }
    worst.map_or(Ok(()), |code| Err(Failure::silent(code)))
}

fn nodes(words: &[String]) -> Result<Vec<NodeId>, Failure> {
    if !words.is_empty() {
        return words.iter().map(|word| place::node(word)).collect();
    }
    let report: ClusterReport = match client::ask(&Request::Cluster)? {
        Reply::Cluster(report) => report,
        other => return Err(client::unexpected(&other)),
    };
    let me = report.me;
    let up = report.nodes.iter().filter(|row| row.node != me && row.state == NodeState::Alive);
    let up: Vec<NodeId> = up.map(|row| row.node).collect();
    if up.is_empty() {
        let said = "no other node of the cluster is up";
        return Err(Failure::new(RefusalKind::Unavailable, said).hint("tern status"));
    }
    Ok(up)
}

fn links(node: NodeId) -> Result<Costs, Failure> {
    match progress::ask(Request::Tune { node }, &format!("node {node}: measuring"))? {
        Reply::Tuned(costs) => Ok(costs),
        other => Err(client::unexpected(&other)),
    }
}

/// Moves a process there and back until it is known what that costs, and tells ternd.
fn journeys(costs: &mut Costs) -> Result<(), Failure> {
    let mut subject = Subject::start()?;
    let there = Destination::Node(costs.node);
    // The first time its program travels as well.
    subject.moved(there)?;
    subject.moved(Destination::Home)?;
    let small = subject.moved(there)?;
    let nanoseconds = subject.does("call")?;
    costs.call_ns = Some(nanoseconds / u64::from(CALLS));
    subject.moved(Destination::Home)?;
    subject.does("grow")?;
    let large = subject.moved(there)?;
    costs.migration = migration(&small, &large);
    match client::ask(&Request::KeepCosts(*costs))? {
        Reply::Done => Ok(()),
        other => Err(client::unexpected(&other)),
    }
}

/// The line through two migrations. `None` if the larger one was not slower: something else was.
fn migration(small: &MigrationReport, large: &MigrationReport) -> Option<MigrationCosts> {
    let mebibytes = |report: &MigrationReport| report.bytes as f64 / f64::from(1 << 20);
    let (more, longer) = (mebibytes(large) - mebibytes(small), (large.total_ms - small.total_ms) * 1e3);
    if more < 1.0 || longer < 1.0 {
        return None;
    }
    let each = longer / more;
    let fixed = (small.total_ms * 1e3 - mebibytes(small) * each).max(0.0);
    Some(MigrationCosts { fixed_us: fixed as u64, us_per_mib: (each as u64).max(1) })
}

/// The process that is moved; gone with this.
struct Subject {
    child: Child,
    words: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Subject {
    fn start() -> Result<Self, Failure> {
        let mut child = std::process::Command::new(std::env::current_exe()?)
            .arg0(SUBJECT)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (words, answers) = (child.stdin.take(), child.stdout.take());
        let no_pipes = || Failure::new(RefusalKind::Internal, "a child process has no pipes");
        let (words, answers) = words.zip(answers).ok_or_else(no_pipes)?;
        let mut subject = Self { child, words, answers: BufReader::new(answers) };
        // It has executed its program when it answers.
        subject.does("nothing")?;
        Ok(subject)
    }

    /// Has it do something; what it says of that.
    fn does(&mut self, what: &str) -> Result<u64, Failure> {
        writeln!(self.words, "{what}")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let lost = || Failure::new(RefusalKind::Internal, "the process that was to be measured has ended");
        line.trim().parse().map_err(|_e| lost())
    }

    fn moved(&self, to: Destination) -> Result<MigrationReport, Failure> {
        let pid = HomePid(i32::try_from(self.child.id()).unwrap_or(0));
        match client::ask(&Request::Migrate { pid, to })? {
            Reply::Migrated(report) => Ok(report),
            other => Err(client::unexpected(&other)),
        }
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// The process that is moved: does what each line says, and answers with a number.
pub fn subject() -> u8 {
    let mut memory: Vec<u8> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let number = match &*line {
            "call" => {
                let begun = Instant::now();
                for _ in 0..CALLS {
                    // The parent is known at home only.
                    let _parent = rustix::process::getppid();
                }
                u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
            }
            "grow" => {
                // Each page with something else in it.
                memory.extend((0..MEBIBYTES << 20).map(|at| (at >> 12) as u8 | 1));
                memory.len() as u64
            }
            _ => 0,
        };
        let mut out = std::io::stdout().lock();
        if writeln!(out, "{number}").and_then(|()| out.flush()).is_err() {
            break;
        }
    }
    0
}

/// What was measured, a node a line.
pub(super) fn table(measured: &[Costs]) -> output::Table {
    let headings = [">NODE", ">RTT", ">THERE", ">BACK", ">CALL", ">MIGRATION", ">PER MiB"];
    let mut table = output::Table::new(&headings);
    let time = |microseconds: Option<f64>| {
        microseconds.map_or_else(|| "-".into(), |time| output::milliseconds(time / 1e3))
    };
    let rate = |bytes: u64| format!("{}/s", output::bytes(bytes));
    for costs in measured {
        table.row(vec![
            costs.node.to_string(),
            time(Some(costs.rtt_us.into())),
            rate(costs.bytes_per_s),
            rate(costs.back_bytes_per_s),
            time(costs.call_ns.map(|nanoseconds| nanoseconds as f64 / 1e3)),
            time(costs.migration.map(|cost| cost.fixed_us as f64)),
            time(costs.migration.map(|cost| cost.us_per_mib as f64)),
        ]);
    }
    table
}

/// Whether this process is the one that is moved.
#[must_use]
pub fn is_subject(program: &std::ffi::OsStr, args: &[OsString]) -> bool {
    program == SUBJECT && args.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::MigrationId;

    fn report(bytes: u64, total_ms: f64) -> MigrationReport {
        MigrationReport {
            pid: HomePid(31),
            command: SUBJECT.into(),
            migration: MigrationId([1; 16]),
            from: NodeId(1),
            to: NodeId(2),
            bytes,
            freeze_ms: 1.0,
            total_ms,
        }
    }

    #[test]
    fn a_migration_has_a_fixed_cost_and_one_by_size() {
        let cost = migration(&report(1 << 20, 30.0), &report(33 << 20, 110.0));
        assert_eq!(cost, Some(MigrationCosts { fixed_us: 27_500, us_per_mib: 2_500 }));
        assert_eq!(migration(&report(1 << 20, 30.0), &report(33 << 20, 20.0)), None);
        assert_eq!(migration(&report(1 << 20, 30.0), &report(1 << 20, 40.0)), None);
    }

    #[test]
    fn what_is_not_known_is_a_dash() {
        let costs = Costs {
            node: NodeId(2),
            rtt_us: 250,
            bytes_per_s: 117_000_000,
            back_bytes_per_s: 110_000_000,
            call_ns: Some(90_500),
            migration: None,
            at: 0,
        };
        assert_eq!(
            table(&[costs]).render(None),
            "NODE      RTT       THERE        BACK     CALL  MIGRATION  PER MiB\n   \
             2  0.25 ms  117.0 MB/s  110.0 MB/s  0.09 ms          -        -\n"
        );
    }
}
