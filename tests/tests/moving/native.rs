//! The tiny programs without migration: each passes, with the same output each time, also on a busy
//! machine. A failure here is not a fault of Tern.

use anyhow::Result;
use tern_tests::cluster::Cluster;
use tern_tests::moves::journey::{Journey, native, run_without_migration, title};
use tern_tests::programs::catalogue::{ENTRIES, Entry};
use tern_tests::programs::{Flavour, executable};
use tern_tests::runs::verdict::Verdict;

type Run = (String, (&'static Entry, Flavour));

fn runs() -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    for entry in ENTRIES {
        for flavour in Flavour::ALL {
            if executable(entry, flavour)?.is_some() {
                runs.push((title(entry, flavour), (entry, flavour)));
            }
        }
    }
    Ok(runs)
}

#[test]
fn programs_pass_with_the_same_output_each_time() -> Result<()> {
    let mut verdict = Verdict::default();
    // More at a time than there are CPUs, to keep the machine busy.
    verdict.each(runs()?, 6, |(entry, flavour)| {
        let run = || run_without_migration(None, entry, flavour, Journey::Out).map_err(|e| format!("{e:#}"));
        let first = native(entry, flavour, Journey::Out).map_err(|e| format!("{e:#}"))?;
        for _ in 0..2 {
            if let Some(difference) = run()?.difference(&first) {
                return Err(difference);
            }
        }
        Ok(vec![])
    });
    verdict.conclude();
    Ok(())
}

/// A difference here is caused by the lab, without any migration.
#[test]
fn programs_have_the_same_output_on_a_lab_node() -> Result<()> {
    let runs = runs()?;
    let cluster = Cluster::bare("native")?;
    let mut verdict = Verdict::default();
    verdict.each(runs, 4, |(entry, flavour)| {
        let there = run_without_migration(Some(&cluster), entry, flavour, Journey::Out)
            .map_err(|e| format!("{e:#}"))?;
        let here = native(entry, flavour, Journey::Out).map_err(|e| format!("{e:#}"))?;
        there.difference(&here).map_or(Ok(vec![]), Err)
    });
    verdict.conclude();
    Ok(())
}
