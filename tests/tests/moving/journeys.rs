//! Every tiny program × every journey: the same output and exit status as without migration.
//!
//! Each journey and flavour has a cluster. Programs that compute run one at a time, since the proof
//! that they run away is the CPU time of the node; the others run several at a time. Dynamically
//! linked programs make all journeys, static ones those with the most kinds of moves.

use anyhow::Result;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::configure;
use tern_tests::moves::journey::{Journey, run_journey, title};
use tern_tests::programs::catalogue::{Entry, Kind, migratable};
use tern_tests::programs::{Flavour, built, executable, wanted};
use tern_tests::runs::verdict::Verdict;

/// The programs with the most file operations.
const ON_FILES: [&str; 3] = ["file", "delegation", "fastpath"];
/// Number of calling programs that run at a time: they wait more than they compute.
const CONCURRENCY: usize = 3;

type Run = (String, (&'static Entry, Flavour));

fn runs(flavours: &[Flavour]) -> Result<(Vec<Run>, Vec<Run>)> {
    let mut all = Vec::new();
    for entry in migratable().filter(|e| wanted("TERN_PROGRAMS", e.name)) {
        for &flavour in flavours.iter().filter(|f| wanted("TERN_FLAVOURS", f.name())) {
            if executable(entry, flavour)?.is_some() {
                all.push((title(entry, flavour), (entry, flavour)));
            }
        }
    }
    Ok(all.into_iter().partition(|(_, (entry, _))| entry.kind == Kind::Computes))
}

fn go(journey: Journey, flavour: Flavour) -> Result<()> {
    built()?;
    let (computing, calling) = runs(&[flavour])?;
    // A program that stays at home needs no second node.
    let nodes = if journey == Journey::Home { 1 } else { 3 };
    let cluster = Cluster::without_quotas(&format!("{}-{}", journey.name(), flavour.name()), nodes)?;
    let mut verdict = Verdict::default();
    let run = |(entry, flavour)| run_journey(&cluster, entry, flavour, journey);
    verdict.each(computing, 1, run);
    verdict.each(calling, CONCURRENCY, run);
    verdict.conclude();
    Ok(())
}

macro_rules! journeys {
    ($($test:ident: $journey:ident, $flavour:ident;)*) => {$(
        #[test]
        fn $test() -> Result<()> {
            go(Journey::$journey, Flavour::$flavour)
        }
    )*};
}

journeys! {
    home_dynamic: Home, Dynamic;
    home_musl: Home, Musl;
    out_dynamic: Out, Dynamic;
    out_and_home_dynamic: OutAndHome, Dynamic;
    onward_dynamic: Onward, Dynamic;
    onward_static: Onward, Static;
    onward_musl: Onward, Musl;
    born_away_dynamic: StartedAway, Dynamic;
    born_away_static: StartedAway, Static;
    ping_pong_dynamic: PingPong, Dynamic;
}

/// The programs with file operations, with the fast path disabled.
#[test]
fn without_fast_path() -> Result<()> {
    built()?;
    let cluster = Cluster::without_quotas("no-fast-path", 3)?;
    [1, 2, 3].into_iter().try_for_each(|node| configure(&cluster, node, "fastpath = false"))?;
    let mut all = Vec::new();
    for (journey, flavours) in [
        (Journey::Home, &[Flavour::Dynamic, Flavour::Musl][..]),
        (Journey::Out, &[Flavour::Dynamic]),
        (Journey::OutAndHome, &[Flavour::Dynamic]),
        (Journey::Onward, &Flavour::ALL),
        (Journey::StartedAway, &[Flavour::Dynamic, Flavour::Static]),
    ] {
        let (_, calling) = runs(flavours)?;
        let calling = calling.into_iter().filter(|(_, (entry, _))| ON_FILES.contains(&entry.name));
        all.extend(calling.map(|(title, run)| (format!("{title} {}", journey.name()), (run, journey))));
    }
    let mut verdict = Verdict::default();
    verdict
        .each(all, CONCURRENCY, |((entry, flavour), journey)| run_journey(&cluster, entry, flavour, journey));
    verdict.conclude();
    Ok(())
}
