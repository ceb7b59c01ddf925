//! Every tiny program × every journey: the same output and exit status as without moving.
//!
//! One cluster for each journey. Programs that compute run one at a time, since the proof that they do it away is
//! the CPU time of the node; the others some at a time. Dynamically linked ones go on all journeys, the static
//! ones on those that cross the most borders.
#![forbid(unsafe_code)]

use anyhow::Result;
use tern_tests::catalogue::{Entry, Kind, movable};
use tern_tests::cluster::Cluster;
use tern_tests::journey::{Journey, title, travel};
use tern_tests::programs::{Flavour, built, executable, wanted};
use tern_tests::verdict::Verdict;

type Run = (String, (&'static Entry, Flavour));

fn runs(flavours: &[Flavour]) -> Result<(Vec<Run>, Vec<Run>)> {
    let mut all = Vec::new();
    for entry in movable().filter(|e| wanted("TERN_PROGRAMS", e.name)) {
        for &flavour in flavours.iter().filter(|f| wanted("TERN_FLAVOURS", f.name())) {
            if executable(entry, flavour)?.is_some() {
                all.push((title(entry, flavour), (entry, flavour)));
            }
        }
    }
    Ok(all.into_iter().partition(|(_, (entry, _))| entry.kind == Kind::Computes))
}

fn go(journey: Journey, name: &str, flavours: &[Flavour]) -> Result<()> {
    built()?;
    let (computing, calling) = runs(flavours)?;
    let cluster = Cluster::up(name)?;
    let mut verdict = Verdict::default();
    let run = |(entry, flavour)| travel(&cluster, entry, flavour, journey);
    verdict.each(computing, 1, run);
    // They wait more than they compute: with three at a time two processors were idle for three quarters of it.
    verdict.each(calling, 6, run);
    verdict.pronounce();
    Ok(())
}

#[test]
fn home() -> Result<()> {
    go(Journey::Home, "home", &[Flavour::Dynamic, Flavour::Musl])
}

#[test]
fn out() -> Result<()> {
    go(Journey::Out, "out", &[Flavour::Dynamic])
}

#[test]
fn out_and_home() -> Result<()> {
    go(Journey::OutAndHome, "out-and-home", &Flavour::ALL)
}

#[test]
fn onward() -> Result<()> {
    go(Journey::Onward, "onward", &Flavour::ALL)
}

#[test]
fn ping_pong() -> Result<()> {
    go(Journey::PingPong, "ping-pong", &[Flavour::Dynamic])
}

#[test]
fn born_away() -> Result<()> {
    go(Journey::BornAway, "born-away", &[Flavour::Dynamic, Flavour::Static])
}
