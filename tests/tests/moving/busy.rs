//! Processes that do one thing all the time are migrated all the time, so that each stage of the
//! operation coincides with each stage of a migration.

use anyhow::{Context, Result, ensure};
use std::thread;
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::{ANNOUNCE, Running};

fn move_around(cluster: &Cluster, name: &str, flavour: Flavour, places: &[&str]) -> Result<()> {
    let program = named(name, flavour)?;
    let until = format!("/tmp/until-{name}-{}", flavour.name());
    let mut command = cluster.command(1, "mosrun");
    command.args(["-L", "sh", "-c", ANNOUNCE, "sh"]).arg(&program).env("TERN_UNTIL", &until);
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let pid = running.pid;
    for to in places {
        if let Err(refused) = cluster.migrate(pid, to) {
            let why = &refused.message;
            let said = match running.has_ended() {
                true => format!("{:?}", running.finish(Duration::from_secs(5))),
                false => running.output_so_far(),
            };
            ensure!(why.contains("already"), "to {to}: {why}; it says {said}\n{}", cluster.diagnostics(pid));
        }
    }
    cluster.touch(&until)?;
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.diagnostics(pid))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}\n{}", cluster.diagnostics(pid));
    Ok(())
}

/// Moves each flavour of a program to these places again and again: `times` in long runs such as
/// `make test-storm`, and a third of that in `make test`, of which CI has the result within minutes.
fn move_all_flavours_around(lab: &str, name: &str, places: &[&str], times: usize) -> Result<()> {
    let is_long = std::env::var("NEXTEST_PROFILE").is_ok_and(|profile| profile != "default");
    let places = &places.repeat(if is_long { times } else { times.div_ceil(3) });
    let cluster = &Cluster::up(lab)?;
    thread::scope(|scope| {
        let flavours = [Flavour::Static, Flavour::Dynamic, Flavour::Musl];
        let sent = flavours.map(|flavour| scope.spawn(move || move_around(cluster, name, flavour, places)));
        sent.into_iter().try_for_each(|one| one.join().map_err(|_panic| anyhow::anyhow!("a panic"))?)
    })
}

/// The exec is made by a thread other than the first. A node's late messages about the old program
/// must not affect the new one.
#[test]
fn exec_survives_moves_between_nodes() -> Result<()> {
    move_all_flavours_around("executing", "threadexec", &["2", "3"], 75)
}

/// At home, too, a thread may execute a program while all threads are being attached. The thread
/// that had the process's pid is then gone, and the executing thread has this pid.
#[test]
fn exec_survives_moves_home_and_away() -> Result<()> {
    move_all_flavours_around("executinghome", "threadexec", &["2", "home"], 40)
}

/// The deputy also maps the file, which keeps the file referenced. Home's shim must have recorded
/// that mapping before it restores the address space of a guest that returns.
#[test]
fn file_mapping_survives_moves_home_and_away() -> Result<()> {
    move_all_flavours_around("mapping", "mapping", &["2", "home"], 75)
}

/// A signal raised by the process's own call is pending when the process is stopped at home: the
/// handler must run before that call returns. Also, if home has changed the signal mask, the mask
/// with which the process arrives on its next node does not undo this change.
#[test]
fn own_signals_survive_moves() -> Result<()> {
    let places = ["2", "home", "2", "home", "2", "home", "2", "home", "2", "home", "2", "home", "2", "3"];
    move_all_flavours_around("ownsignals", "ownsignals", &places, 12)
}

/// Every few milliseconds the process makes a call that can only be made at home, and is brought
/// home for it, also while a target node is being prepared for a requested migration. The migration
/// then continues from home.
#[test]
fn move_continues_from_home_when_a_call_needs_home() -> Result<()> {
    move_all_flavours_around("fetched", "written", &["2", "3"], 1)
}

/// Sending the program's memory takes longer than the time between two of its forks, and a fork
/// cancels a departure; the repeated departure holds further forks. The program runs until its
/// input ends.
const FORKS_ALL_THE_TIME: &str = "
import os, select, sys
memory = bytearray(64 << 20)
forks = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    forks += 1
    if forks == 20:
        print('forking', flush=True)
print('forked')
";

#[test]
fn process_that_forks_all_the_time_moves() -> Result<()> {
    let cluster = &Cluster::with_nodes("forking", 3)?;
    let mut running = Running::python(cluster, &["-L", "-2"], FORKS_ALL_THE_TIME, "forking")?;
    for to in ["3", "2", "home"] {
        let moved = cluster.migrate(running.pid, to);
        moved.with_context(|| format!("to {to}\n{}", cluster.diagnostics(running.pid)))?;
    }
    running.close_input();
    let end = running.finish(Duration::from_secs(60))?;
    ensure!(end.status == 0 && end.out == b"forking\nforked\n", "{end:?}");
    Ok(())
}

/// A signal that one thread sends to another is delivered before the receiver can see any later
/// effect of the sender, wherever the process runs.
#[test]
fn signal_order_between_threads_survives_moves() -> Result<()> {
    move_all_flavours_around("sigordered", "sigorder", &["2", "3"], 75)
}

/// A process that comes home in a call with a time limit can leave again at once, and the call
/// lasts as long as it should. The test has two processes: one with a single thread, which waits,
/// and one with a thread in each kind of call.
#[test]
fn process_that_waits_leaves_home_again() -> Result<()> {
    let cluster = &Cluster::with_nodes("waiting", 3)?;
    let program = &named("waiting", Flavour::Static)?;
    let wait = |words: &'static [&str]| -> Result<()> {
        let mut command = cluster.command(1, "mosrun");
        command.args(["-L", "-2", "sh", "-c", ANNOUNCE, "sh"]).arg(program).args(words);
        let mut running = Running::start(&mut command, false)?;
        running.await_output("waiting")?;
        for to in ["home", "2", "home", "3", "2", "home", "2"] {
            let moved = cluster.migrate(running.pid, to);
            moved.with_context(|| format!("to {to}\n{}", cluster.diagnostics(running.pid)))?;
        }
        let end =
            running.finish(Duration::from_secs(60)).with_context(|| cluster.diagnostics(running.pid))?;
        ensure!(end.status == 0 && end.out == b"waiting\nPASS\n", "{end:?}");
        Ok(())
    };
    thread::scope(|scope| {
        let modes: [&[&str]; 2] = [&["15", "one"], &["15"]];
        let waiting = modes.map(|words| scope.spawn(move || wait(words)));
        waiting.into_iter().try_for_each(|one| one.join().map_err(|_panic| anyhow::anyhow!("a panic"))?)
    })
}

/// A program that shares memory with its child. Its second thread waits in a call with a time limit,
/// until the program's input ends.
const SHARES_AND_WAITS: &str = "
import mmap, os, select, sys, threading, time
shared = mmap.mmap(-1, 4096)
if os.fork() == 0:
    while not shared[0]:
        time.sleep(0.01)
    shared[1] = 42
    os._exit(0)
end, begin = os.pipe()
poll = select.poll()
poll.register(end)
waiting = threading.Thread(target=poll.poll, args=(600000,))
waiting.start()
print('waiting', flush=True)
sys.stdin.read()
os.write(begin, b'x')
waiting.join()
shared[0] = 1
os.wait()
print('PASS' if shared[1] == 42 else 'FAIL')
";

/// The shim that brought the processes home still traces the thread that waits. Another shim, which
/// is asked to move the child, must not move the parent without that thread.
#[test]
fn sharer_of_a_process_that_waits_leaves_home_again() -> Result<()> {
    let cluster = &Cluster::with_nodes("sharingwaits", 3)?;
    let mut running = Running::python(cluster, &["-L", "-2"], SHARES_AND_WAITS, "waiting")?;
    let children = cluster.run(1, &["pgrep", "-P", &running.pid.to_string()])?;
    let child: i32 = String::from_utf8_lossy(&children).trim().parse()?;
    for (pid, to) in [(running.pid, "home"), (child, "2"), (child, "home"), (child, "3"), (running.pid, "2")]
    {
        let moved = cluster.migrate(pid, to);
        moved.with_context(|| format!("{pid} to {to}\n{}", cluster.diagnostics(running.pid)))?;
        let place = if to == "home" { 1 } else { to.parse()? };
        let here = cluster.location(running.pid)?.map(|(node, _)| node);
        ensure!(here == Some(place), "{pid} is at {to}, its parent at {here:?}");
    }
    running.close_input();
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.diagnostics(running.pid))?;
    ensure!(end.status == 0 && end.out == b"waiting\nPASS\n", "{end:?}");
    Ok(())
}
