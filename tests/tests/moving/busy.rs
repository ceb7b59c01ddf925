//! Processes that do one thing all the time are sent from node to node all the time: what is under way of that thing, or of the
//! move, meets the other at every moment.

use anyhow::{Context, Result, ensure};
use std::thread;
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::programs::{Flavour, named};
use tern_tests::running::{ANNOUNCE, Running};

fn is_sent_about(cluster: &Cluster, name: &str, flavour: Flavour, places: &[&str]) -> Result<()> {
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
            let said = running.so_far();
            ensure!(why.contains("already"), "to {to}: {why}; it says {said}\n{}", cluster.scene(pid));
        }
    }
    cluster.touch(&until)?;
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.scene(pid))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}\n{}", cluster.scene(pid));
    Ok(())
}

fn are_sent_about(lab: &str, name: &str, places: &[&str]) -> Result<()> {
    let cluster = &Cluster::up(lab)?;
    thread::scope(|scope| {
        let flavours = [Flavour::Static, Flavour::Dynamic, Flavour::Musl];
        let sent = flavours.map(|flavour| scope.spawn(move || is_sent_about(cluster, name, flavour, places)));
        sent.into_iter().try_for_each(|one| one.join().map_err(|_panic| anyhow::anyhow!("a panic"))?)
    })
}

/// By a thread that is not its first. What its node had still sent of the old program ended one of three within some hundred
/// moves.
#[test]
fn a_process_that_executes_programs_is_sent_from_node_to_node() -> Result<()> {
    are_sent_about("executing", "threadexec", &["2", "3"].repeat(75))
}

/// At home too a thread executes a program while all of them are taken hold of: who had the process' number was taken to have ended,
/// and who has it now to be nobody, about once in a thousand moves. He stood for ever then at his next stop.
#[test]
fn a_process_that_executes_programs_is_sent_home_and_away() -> Result<()> {
    are_sent_about("executinghome", "threadexec", &["2", "home"].repeat(40))
}

/// The deputy makes a mapping that holds the file, of which home must know before it takes an address space.
#[test]
fn a_process_that_maps_files_is_sent_home_and_away() -> Result<()> {
    are_sent_about("mapping", "mapping", &["2", "home"].repeat(75))
}

/// What its own call has just raised waits when it is brought to a stand at home: the handler is to run before that call returns.
#[test]
fn a_process_that_sends_itself_signals_is_sent_home_and_away() -> Result<()> {
    are_sent_about("ownsignals", "ownsignals", &["2", "home"].repeat(75))
}

/// Every few milliseconds it makes a call for which it is fetched home: also while the node is prepared to which it was told to
/// go. It goes there from home.
#[test]
fn a_process_that_has_to_come_home_goes_on_from_there() -> Result<()> {
    are_sent_about("fetched", "written", &["2", "3"])
}

/// Signals that its threads send each other are there when they hear of them in another way, wherever they are by then.
#[test]
fn a_process_of_threads_that_signal_each_other_is_sent_from_node_to_node() -> Result<()> {
    are_sent_about("sigordered", "sigorder", &["2", "3"].repeat(75))
}
