//! `tune`: measures the cost of communicating with other nodes and of moving a process there.
//!
//! ternd measures the link. To measure the cost of calls and migrations, tune starts a child
//! process (this program under the name `PROBE_NAME`) and moves it to the other node and back,
//! first with little memory and then with more. On the other node, the child makes calls that go
//! home.

use crate::tool::Invocation;
use crate::{Failure, client, help, node_name, output, progress};
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

/// The name (argv\[0\]) under which this program runs as the process that is moved.
pub(crate) const PROBE_NAME: &str = "tern-tune-probe";

/// MiB by which the process grows before the large migration: enough that sending them takes longer
/// than the variation of the fixed cost.
const GROWTH_MIB: usize = 32;

/// Bytes of a page.
const PAGE: usize = 4096;

/// The number of system calls that are measured.
const CALL_COUNT: u32 = 1000;

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The nodes, by number, host or alias [default: all others that are up]
    #[arg(value_name = "NODE")]
    nodes: Vec<String>,
    /// Measure only the links; move no process
    #[arg(long)]
    links: bool,
    /// Print the measurements as a JSON array
    #[arg(long)]
    json: bool,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("tune"))
        .about("Measure the cost of communicating with other nodes and of moving a process there")
        .long_about(
            "Measure the cost of communicating with other nodes and of moving a process there: the round-trip \
             time, the throughput both ways, and, with a small process that is moved there, the cost of a system \
             call to home and of a migration. This takes a few seconds per node; measure while nodes and network \
             are idle.\n\nThe balancer of this node uses the figures from then on, also after a restart of ternd. \
             It also follows round trips and migrations by itself, so tune is optional: it helps before the first \
             large migration, and shows what a network achieves. mosctl gettune shows the figures again.",
        )
        .after_help(help::after_help("  tune\n  tune 2 beta --json\n  tune --links", ""))
}

/// `tune …`.
///
/// # Errors
/// If a node could not be measured; the figures of the others are printed.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let mut measured = Vec::new();
    let mut first_code = None;
    for node in nodes(&options.nodes)? {
        let with_node = |failure: Failure| {
            let message = format!("node {node}: {}", failure.message);
            Failure { message, ..failure }
        };
        match measure_link(node) {
            Ok(costs) => {
                measured.push(costs);
                if !options.links
                    && let Some(costs) = measured.last_mut()
                    && let Err(failure) = measure_process(costs)
                {
                    first_code.get_or_insert(failure.code);
                    with_node(failure).report(invocation.tool);
                }
            }
            Err(failure) => {
                first_code.get_or_insert(failure.code);
                with_node(failure).report(invocation.tool);
            }
        }
    }
    if options.json {
        output::print_json(&measured)?;
    } else {
        table(&measured).print()?;
    }
    first_code.map_or(Ok(()), |code| Err(Failure::silent(code)))
}

fn nodes(words: &[String]) -> Result<Vec<NodeId>, Failure> {
    if !words.is_empty() {
        return words.iter().map(|word| node_name::resolve(word)).collect();
    }
    let report: ClusterReport = match client::request(&Request::Cluster)? {
        Reply::Cluster(report) => report,
        other => return Err(client::unexpected_reply(&other)),
    };
    let me = report.me;
    let up = report.nodes.iter().filter(|row| row.node != me && row.state == NodeState::Alive);
    let up: Vec<NodeId> = up.map(|row| row.node).collect();
    if up.is_empty() {
        let text = "no other node of the cluster is up";
        return Err(Failure::new(RefusalKind::Unavailable, text).hint("tern status"));
    }
    Ok(up)
}

fn measure_link(node: NodeId) -> Result<Costs, Failure> {
    match progress::request(Request::Tune { node }, &format!("node {node}: measuring"))? {
        Reply::Tuned(costs) => Ok(costs),
        other => Err(client::unexpected_reply(&other)),
    }
}

/// Moves a process to `costs.node` and back to measure migrations and calls, and reports the costs
/// to ternd.
fn measure_process(costs: &mut Costs) -> Result<(), Failure> {
    let mut probe = Probe::start()?;
    let there = Destination::Node(costs.node);
    // The first migration also sends the program's text, so it is not measured.
    probe.migrate(there)?;
    probe.migrate(Destination::Home)?;
    let small = probe.migrate(there)?;
    let nanoseconds = probe.command("call")?;
    costs.call_ns = Some(nanoseconds / u64::from(CALL_COUNT));
    probe.migrate(Destination::Home)?;
    probe.command("grow")?;
    let large = probe.migrate(there)?;
    costs.migration = migration_costs(&small, &large);
    match client::request(&Request::KeepCosts(*costs))? {
        Reply::Done => Ok(()),
        other => Err(client::unexpected_reply(&other)),
    }
}

/// The cost of a migration as a linear function of the bytes sent. `None` if the large migration
/// did not send at least 1 MiB more, or was not slower: then something else dominated.
fn migration_costs(small: &MigrationReport, large: &MigrationReport) -> Option<MigrationCosts> {
    let mebibytes = |report: &MigrationReport| report.bytes as f64 / f64::from(1 << 20);
    let (more, longer) = (mebibytes(large) - mebibytes(small), (large.total_ms - small.total_ms) * 1e3);
    if more < 1.0 || longer < 1.0 {
        return None;
    }
    let per_mib = longer / more;
    let fixed = (small.total_ms * 1e3 - mebibytes(small) * per_mib).max(0.0);
    Some(MigrationCosts { fixed_us: fixed as u64, us_per_mib: (per_mib as u64).max(1) })
}

/// The process that is moved; killed on drop.
struct Probe {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Probe {
    fn start() -> Result<Self, Failure> {
        let mut child = std::process::Command::new(std::env::current_exe()?)
            .arg0(PROBE_NAME)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let no_pipes = || Failure::new(RefusalKind::Internal, "a child process has no pipes");
        let (stdin, stdout) = stdin.zip(stdout).ok_or_else(no_pipes)?;
        let mut probe = Self { child, stdin, stdout: BufReader::new(stdout) };
        // The reply proves that the child has executed this program.
        probe.command("nothing")?;
        Ok(probe)
    }

    /// Sends a command to the process and returns its reply.
    fn command(&mut self, what: &str) -> Result<u64, Failure> {
        writeln!(self.stdin, "{what}")?;
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        let lost = || Failure::new(RefusalKind::Internal, "the process that is measured has ended");
        line.trim().parse().map_err(|_e| lost())
    }

    fn migrate(&self, to: Destination) -> Result<MigrationReport, Failure> {
        let pid = HomePid(i32::try_from(self.child.id()).unwrap_or(0));
        match client::request(&Request::Migrate { pid, to })? {
            Reply::Migrated(report) => Ok(report),
            other => Err(client::unexpected_reply(&other)),
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// Runs as the process that is moved: executes the command on each line of standard input and
/// replies with a number.
pub(crate) fn run_probe() -> u8 {
    let mut memory: Vec<u8> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let number = match &*line {
            "call" => {
                let started = Instant::now();
                for _ in 0..CALL_COUNT {
                    // getppid is performed at home.
                    let _parent = rustix::process::getppid();
                }
                u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)
            }
            "grow" => {
                memory.extend(distinct_pages((GROWTH_MIB << 20) / PAGE));
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

/// The content of `count` pages. All are different, and none is all zeros.
fn distinct_pages(count: usize) -> impl Iterator<Item = u8> {
    (1..=count).flat_map(|page| std::iter::repeat_n(page.to_le_bytes(), PAGE / size_of::<usize>()).flatten())
}

/// The measurements, one node per line.
pub(super) fn table(measured: &[Costs]) -> output::Table {
    let headings = [">NODE", ">RTT", ">THERE", ">BACK", ">CALL", ">MIGRATION", ">PER MiB"];
    let mut table = output::Table::new(&headings);
    let time = |microseconds: Option<f64>| {
        microseconds.map_or_else(|| "-".into(), |time| output::milliseconds(time / 1e3))
    };
    let rate = |bytes: u64| format!("{}/s", output::bytes(bytes));
    for costs in measured {
        table.push(vec![
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
pub(crate) fn is_probe(program: &std::ffi::OsStr, args: &[OsString]) -> bool {
    program == PROBE_NAME && args.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::MigrationId;

    fn report(bytes: u64, total_ms: f64) -> MigrationReport {
        MigrationReport {
            pid: HomePid(31),
            command: PROBE_NAME.into(),
            migration: MigrationId([1; 16]),
            from: NodeId(1),
            to: NodeId(2),
            bytes,
            freeze_ms: 1.0,
            total_ms,
        }
    }

    #[test]
    fn migration_cost_is_linear_in_size() {
        let cost = migration_costs(&report(1 << 20, 30.0), &report(33 << 20, 110.0));
        assert_eq!(cost, Some(MigrationCosts { fixed_us: 27_500, us_per_mib: 2_500 }));
        assert_eq!(migration_costs(&report(1 << 20, 30.0), &report(33 << 20, 20.0)), None);
        assert_eq!(migration_costs(&report(1 << 20, 30.0), &report(1 << 20, 40.0)), None);
    }

    #[test]
    fn pages_of_the_large_migration_differ() {
        let memory: Vec<u8> = distinct_pages(8192).collect();
        let pages: std::collections::HashSet<&[u8]> = memory.chunks(PAGE).collect();
        assert_eq!((memory.len(), pages.len()), (8192 * PAGE, 8192));
        assert!(!pages.contains(&[0; PAGE][..]));
    }

    #[test]
    fn unknown_figures_are_dashes() {
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
