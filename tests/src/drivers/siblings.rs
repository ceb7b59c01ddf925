//! The program `siblings`: a call of one process may not delay its relative.

use crate::cluster::Cluster;
use crate::programs::{Flavour, named};
use crate::runs::running::{ANNOUNCE, Running};
use anyhow::{Result, ensure};
use std::time::Duration;

/// It runs until this file of node 1 exists.
const UNTIL: &str = "/tmp/until-siblings";

/// The program, started on node 1.
#[derive(Debug)]
pub struct Siblings {
    /// The program.
    pub running: Running,
}

impl Siblings {
    /// Starts it with this option of mosrun and these arguments. A call of the relative may take at
    /// most `slowest` seconds.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(cluster: &Cluster, option: &str, slowest: &str, words: &[&str]) -> Result<Self> {
        let mut command = cluster.command(1, "sh");
        command
            .args(["-c", ANNOUNCE, "sh", "mosrun", option])
            .arg(named("siblings", Flavour::Static)?)
            .args(words)
            .env("TERN_UNTIL", UNTIL)
            .env("TERN_SLOWEST", slowest);
        Ok(Self { running: Running::start(&mut command, false)? })
    }

    /// Makes the program end, within this time.
    ///
    /// # Errors
    /// If the program does not end, or if a call of the relative took too long.
    pub fn finish(mut self, cluster: &Cluster, within: Duration) -> Result<()> {
        cluster.touch(UNTIL)?;
        let outcome = self.running.finish(within)?;
        ensure!(outcome.status == 0 && outcome.out.ends_with(b"PASS\n"), "{outcome:?}");
        Ok(())
    }
}
