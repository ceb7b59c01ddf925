//! Other users of the home node, and limits of home's shim, neither delay nor kill processes that
//! are away.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{GREEDY_STRANGER, await_stuck_thread, wait_until};
use tern_tests::cluster::jobs::program;
use tern_tests::cluster::limits::{PidsLimit, shims};
use tern_tests::cluster::stalling_files::{self, StallingFiles, Waiting};
use tern_tests::drivers::file_guest::FileGuest;
use tern_tests::drivers::siblings::Siblings;
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::{ANNOUNCE, Running};

/// Limit for a run.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// To learn whether another process has a file, home looks at all descriptors of the machine. That
/// takes seconds here, and delays no call.
#[test]
fn descriptors_of_another_user_delay_no_call() -> Result<()> {
    let program = named("siblings", Flavour::Static)?;
    let cluster = Cluster::without_quotas("many-descriptors", 2)?;
    let mut stranger = cluster.command(1, "python3");
    stranger.args(["-c", GREEDY_STRANGER, "0"]).stdout(Stdio::piped());
    let mut stranger = stranger.spawn()?;
    await_line(&mut stranger)?;
    cluster.run(1, &["sh", "-c", "head -c 4096 /dev/zero > /tmp/block"])?;
    let mut command = cluster.command(1, "sh");
    let with_file = format!("exec < /tmp/block; {ANNOUNCE}");
    command.args(["-c", &with_file, "sh", "mosrun", "-2"]).arg(program).arg("transfers");
    // Without the thread for the scan the slowest call took 4.5 s.
    command.env("TERN_SECONDS", "6").env("TERN_SLOWEST", "1.5");
    let outcome = Running::start(&mut command, false)?.finish(RUN_TIMEOUT)?;
    stranger.kill()?;
    stranger.wait()?;
    ensure!(outcome.status == 0 && outcome.out.ends_with(b"PASS\n"), "{outcome:?}");
    Ok(())
}

/// A process of another user executes a program, which closes a file, and the file system does not
/// answer. Meanwhile a comparison of that process's descriptors (kcmp(2)) waits, and on some kernels a
/// read of `/proc/PID/stat` too. No call of a program away waits, and `mps` does not either.
#[test]
fn execve_of_another_user_delays_no_call() -> Result<()> {
    let cluster = Cluster::without_quotas("stranger-executes", 2)?;
    let (files, mut stranger) = stalling_files::stall_an_execve(&cluster)?;
    cluster.run(1, &["sh", "-c", "head -c 4096 /dev/zero > /tmp/block"])?;
    let siblings = Siblings::start(&cluster, "-2", "0.3", &["transfers", "/tmp/block"])?;
    let waits = |shim: &i32| has_uninterruptible_thread(*shim, "timed");
    let compares = || shims(&cluster, 1).is_ok_and(|shims| shims.iter().any(waits));
    wait_until("home compares descriptors with the stranger's", Duration::from_secs(20), compares)?;
    let listed = cluster.run(1, &["timeout", "10", "mps", "--all"]);
    let end = siblings.finish(&cluster, RUN_TIMEOUT);
    files.release(&cluster)?;
    stranger.wait()?;
    listed?;
    end
}

/// A program that shares memory with its child.
const SHARES: &str = "
import mmap, os, sys, time
memory = mmap.mmap(-1, 4096)
child = os.fork()
if child == 0:
    while memory[0] == 0:
        time.sleep(0.01)
    memory[1] = 7
    os._exit(0)
print('shared', flush=True)
sys.stdin.read()
memory[0] = 1
os.waitpid(child, 0)
print('PASS' if memory[1] == 7 else 'FAIL')
";

/// When processes that share memory are to leave, home reads the mappings of all processes. Those
/// of a process in such an execve cannot be read, and share nothing.
#[test]
fn execve_of_another_user_delays_no_group() -> Result<()> {
    let cluster = Cluster::without_quotas("group-beside-execve", 2)?;
    let (files, mut stranger) = stalling_files::stall_an_execve(&cluster)?;
    let mut running = Running::python(&cluster, &["-L"], SHARES, "shared")?;
    for to in ["2", "home", "2"] {
        cluster.migrate(running.pid, to)?;
    }
    files.release(&cluster)?;
    stranger.wait()?;
    running.close_input();
    let outcome = running.finish(RUN_TIMEOUT)?;
    ensure!(outcome.status == 0 && outcome.out.ends_with(b"PASS\n"), "{outcome:?}");
    Ok(())
}

/// The same happens to a process that ternd reads again and again, since it was started with mosrun.
/// Requests about it are refused, and those of others are served.
#[test]
fn execve_under_mosrun_delays_no_request() -> Result<()> {
    let cluster = Cluster::without_quotas("registered-executes", 2)?;
    let files = StallingFiles::mount(&cluster, 1, Waiting::Closes)?;
    files.stall(&cluster)?;
    let mut executing =
        program(&cluster, 1, "mosrun", &["python3", "-c", stalling_files::EXECUTES, stalling_files::FILE])?;
    let closes = || files.waited(&cluster).is_ok_and(|waited| waited > 0);
    wait_until("the program's execve waits", Duration::from_secs(20), closes)?;
    let other = program(&cluster, 1, "mosrun -L", &["sleep", "infinity"])?;
    for _ in 0..3 {
        cluster.migrate(other.pid, "2")?;
        let refusal = cluster.migrate(executing.pid, "2").err().context("it has moved")?;
        ensure!(refusal.message.contains("is executing a program"), "{refusal:?}");
        cluster.run(1, &["timeout", "10", "mps", "--all"])?;
        cluster.migrate(other.pid, "home")?;
    }
    files.release(&cluster)?;
    ensure!(executing.finish(RUN_TIMEOUT)?.status == 0);
    Ok(())
}

/// The same happens to a process of the same family. Home's shim serves the others, is asked about
/// all, and moves the others.
#[test]
fn execve_of_a_relative_delays_no_call() -> Result<()> {
    let cluster = Cluster::without_quotas("relative-executes", 2)?;
    let files = StallingFiles::mount(&cluster, 1, Waiting::Closes)?;
    files.stall(&cluster)?;
    let siblings = Siblings::start(&cluster, "-2", "0.5", &["executes", stalling_files::FILE])?;
    let closes = || files.waited(&cluster).is_ok_and(|waited| waited > 0);
    wait_until("the relative's execve waits", Duration::from_secs(20), closes)?;
    for _ in 0..3 {
        cluster.run(1, &["timeout", "10", "mps", "--all"])?;
        cluster.migrate(siblings.running.pid, "home")?;
        cluster.migrate(siblings.running.pid, "2")?;
    }
    files.release(&cluster)?;
    siblings.finish(&cluster, RUN_TIMEOUT)
}

/// Whether a process, in this machine's numbering, has a thread of this name in state D.
fn has_uninterruptible_thread(pid: i32, name: &str) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let read = |thread: &Path, file: &str| fs::read_to_string(thread.join(file)).unwrap_or_default();
    threads
        .map(|thread| thread.path())
        .any(|thread| read(&thread, "comm").trim() == name && read(&thread, "status").contains("\nState:\tD"))
}

/// At each call of a program, home checks whether the files that the program reads have changed. If
/// such a file is on a node that does not answer, no other program waits for the answer.
#[test]
fn unreachable_node_of_a_file_delays_no_other_program() -> Result<()> {
    let cluster = Cluster::without_quotas("cut-file", 3)?;
    cluster.mount(1, "timeout=30,dfsa=1")?;
    cluster.run(3, &["sh", "-c", "head -c 4096 /dev/zero > /tmp/block"])?;
    let siblings = Siblings::start(&cluster, "-2", "0.3", &["transfers", "/mfs/3/tmp/block"])?;
    let is_checked = "ls -l /proc/$(pgrep -x tern-shim)/fd | grep -q /tmp/block";
    let delegated = || cluster.run(1, &["sh", "-c", is_checked]).is_ok();
    wait_until("home checks the file", Duration::from_secs(20), delegated)?;
    cluster.lab().cut(Cable::Node(3))?;
    // Longer than home's cached attributes are valid.
    std::thread::sleep(Duration::from_secs(8));
    cluster.lab().heal(Cable::Node(3))?;
    siblings.finish(&cluster, RUN_TIMEOUT)
}

/// Home reads a mapped file twice: to identify it, and to send it. For the second read, too, only
/// the program that maps the file waits.
#[test]
fn stalled_content_of_a_mapped_file_delays_no_other_program() -> Result<()> {
    let cluster = Cluster::without_quotas("stalled-content", 2)?;
    let files = StallingFiles::mount(&cluster, 1, Waiting::OpensOnceRead)?;
    let mut siblings = Siblings::start(&cluster, "-2", "0.3", &["maps", stalling_files::FILE])?;
    siblings.running.await_output("opened")?;
    siblings.running.send_input("go\n")?;
    await_stuck_thread(&cluster, 1, "content")?;
    ensure!(files.waited(&cluster)? > 0);
    files.release(&cluster)?;
    siblings.running.await_output("mapped")?;
    siblings.finish(&cluster, RUN_TIMEOUT)
}

/// If a file system does not answer within 10 s while home reads the content of a mapped file, the
/// mapping fails, and the program does not wait for ever.
#[test]
fn content_that_cannot_be_read_fails_the_mapping() -> Result<()> {
    let cluster = Cluster::without_quotas("no-content", 2)?;
    let files = StallingFiles::mount(&cluster, 1, Waiting::OpensOnceRead)?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run(&format!("map {}", stalling_files::FILE), &format!("map {}", libc::ENODEV))?;
    ensure!(files.waited(&cluster)? > 0);
    files.release(&cluster)?;
    guest.finish()
}

/// A control group, removed when this is dropped, after the lab has ended its processes.
struct ControlGroup(PathBuf);

impl ControlGroup {
    /// Creates it in the hierarchy of version 2, which may be mounted beside those of version 1.
    fn new() -> Result<Self> {
        let found = Command::new("findmnt").args(["-n", "-o", "TARGET", "-t", "cgroup2"]).output()?;
        let found = String::from_utf8_lossy(&found.stdout).into_owned();
        let root = found.lines().next().context("no control groups of version 2")?;
        let group = Path::new(root).join(format!("tern-frozen-{}", std::process::id()));
        fs::create_dir(&group)?;
        Ok(Self(group))
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let _is_reported_by_the_next_run = fs::remove_dir(&self.0);
    }
}

/// A deputy in a frozen control group does not stop for a signal. Only the program that sent the
/// signal waits for this stop.
#[test]
fn frozen_deputy_delays_no_other_program() -> Result<()> {
    let group = ControlGroup::new()?;
    let cluster = Cluster::without_quotas("frozen-deputy", 2)?;
    let mut siblings = Siblings::start(&cluster, "-2", "0.8", &["kills"])?;
    siblings.running.await_output("target")?;
    let group = &group.0;
    let enter = format!("pgrep -n siblings > {}/cgroup.procs", group.display());
    cluster.run(1, &["sh", "-c", &enter])?;
    fs::write(group.join("cgroup.freeze"), "1")?;
    let is_frozen =
        || fs::read_to_string(group.join("cgroup.events")).is_ok_and(|is| is.contains("frozen 1"));
    wait_until("the deputy is frozen", Duration::from_secs(20), is_frozen)?;
    // Three times as long as the sender of a signal waits.
    std::thread::sleep(Duration::from_secs(3));
    fs::write(group.join("cgroup.freeze"), "0")?;
    siblings.running.send_input("enough\n")?;
    siblings.finish(&cluster, RUN_TIMEOUT)
}

/// The deputy waits for a CPU and has not taken a timer's signal yet. Meanwhile the shim, which has
/// a CPU, answers the call that stops the timer. The signal must still come before that answer.
#[test]
fn timer_signals_precede_the_call_that_stops_the_timer() -> Result<()> {
    let program = named("cputimers", Flavour::Static)?;
    let cluster = Cluster::without_quotas("slow-deputy", 2)?;
    let others = "for i in 1 2 3; do (while :; do :; done) & done; echo; wait";
    let mut others =
        cluster.command(1, "taskset").args(["-c", "0", "sh", "-c", others]).stdout(Stdio::piped()).spawn()?;
    await_line(&mut others)?;
    let mut command = cluster.command(1, "taskset");
    command.args(["-c", "0", "nice", "-n", "19", "sh", "-c", ANNOUNCE, "sh", "mosrun", "-2"]).arg(program);
    command.env("TERN_SECONDS", "2");
    let outcome = Running::start(&mut command, false)?.finish(RUN_TIMEOUT)?;
    cluster.run(1, &["pkill", "-KILL", "-f", "while :"])?;
    others.wait()?;
    ensure!(outcome.status == 0 && outcome.out.ends_with(b"PASS\n"), "{outcome:?}");
    Ok(())
}

/// Natively the kernel refuses a real-time signal when RLIMIT_SIGPENDING of them are pending. While
/// the guest cannot be reached, further signals stay in home's kernel, so that this limit still
/// holds, and no accepted signal is lost.
#[test]
fn flood_of_signals_stays_in_the_kernel_while_the_link_is_cut() -> Result<()> {
    let program = named("sigflood", Flavour::Static)?.display().to_string();
    let cluster = Cluster::without_quotas("signal-flood", 2)?;
    let mut command = cluster.command(1, "sh");
    // The nodes of a lab share one kernel, which counts the pending signals of both: the guest
    // needs a part of the limit too.
    let limited = ["prlimit", "--sigpending=20000"];
    command.args(["-c", ANNOUNCE, "sh"]).args(limited).args(["mosrun", "-2", &program, "count"]);
    let mut running = Running::start(&mut command, false)?;
    running.await_output("ready")?;
    let pid = running.pid.to_string();
    let number = |text: &[u8]| String::from_utf8_lossy(text).trim().parse::<u64>();
    let shim_kib = || -> Result<u64> {
        Ok(number(&cluster.run(1, &["sh", "-c", "ps -o rss= -p $(pgrep -x tern-shim)"])?)?)
    };
    let before = shim_kib()?;
    cluster.lab().cut(Cable::Node(2))?;
    let accepted = number(&cluster.run(1, &[&program, "send", &pid, "1000000"])?)?;
    let after = shim_kib()?;
    ensure!(accepted < 1_000_000, "none was refused");
    ensure!(after < before + 8192, "home's shim grew from {before} to {after} KiB");
    cluster.lab().heal(Cable::Node(2))?;
    cluster
        .run(1, &["timeout", "60", &program, "end", &pid])
        .with_context(|| cluster.diagnostics(running.pid))?;
    let outcome = running.finish(Duration::from_secs(120))?;
    let expected = format!("ready\n{accepted}\nPASS\n");
    ensure!(
        outcome.status == 0 && outcome.out == expected.as_bytes(),
        "{accepted} sent; {outcome:?}\n{}",
        cluster.diagnostics(running.pid)
    );
    Ok(())
}

fn await_line(child: &mut Child) -> Result<()> {
    use std::io::{BufRead, BufReader};
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
    ensure!(!line.is_empty(), "it ended at once");
    Ok(())
}

/// If the home shim may start no thread, calls that wait are still made, a move is refused with a
/// reason, and no process is lost.
#[test]
fn shim_at_its_limit_of_processes_loses_nothing() -> Result<()> {
    if !PidsLimit::is_supported() {
        eprintln!("not tested: the pids controller of version 1 is not mounted");
        return Ok(());
    }
    let program = named("forktree", Flavour::Static)?;
    let cluster = Cluster::without_quotas("pids-limit", 3)?;
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh", "mosrun", "-2"]).arg(program).env("TERN_UNTIL", "/tmp/until");
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let pid = running.pid;
    let is_away = || matches!(cluster.location(pid), Ok(Some((2, _))));
    wait_until("it is away", RUN_TIMEOUT, is_away)?;
    // Fewer tasks than the shims have: no thread can be added, even when some have ended.
    let limit = PidsLimit::set(&cluster, &shims(&cluster, 1)?, Some(1))?.context("node 1 has no shim")?;
    let refused = cluster.migrate(pid, "3").err().context("it moved without a thread")?;
    ensure!(refused.message.contains("limit on processes"), "{refused:?}");
    // Some of its children's calls wait now.
    let used = cluster.cpu_seconds(2)?;
    cluster.await_cpu(2, used, 0.5)?;
    ensure!(is_away(), "it is lost\n{}", cluster.diagnostics(pid));
    drop(limit);
    cluster.touch("/tmp/until")?;
    let outcome = running.finish(RUN_TIMEOUT).with_context(|| cluster.diagnostics(pid))?;
    ensure!(outcome.status == 0 && outcome.out.ends_with(b"PASS\n"), "{outcome:?}");
    Ok(())
}
