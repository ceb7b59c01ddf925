//! The program `siblings`, away: what one of its processes waits for may not delay its relative.

use crate::cluster::Cluster;
use crate::programs::{Flavour, named};
use crate::runs::running::{ANNOUNCE, Running};
use anyhow::{Result, ensure};
use std::time::Duration;

/// It runs until this file of node 1 exists.
const UNTIL: &str = "/tmp/until-siblings";

/// The longest time that a call of the relative may take, in seconds.
const MAX_CALL_SECONDS: &str = "0.3";

/// The program, with its first process and the relative on node 2.
#[derive(Debug)]
pub struct Siblings<'a> {
    cluster: &'a Cluster,
    /// The program.
    pub running: Running,
}

impl<'a> Siblings<'a> {
    /// Starts it in a mode in which it opens these files, and waits until it has.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(cluster: &'a Cluster, mode: &str, files: &[String]) -> Result<Self> {
        let mut command = cluster.command(1, "sh");
        command
            .args(["-c", ANNOUNCE, "sh", "mosrun", "-2"])
            .arg(named("siblings", Flavour::Static)?)
            .arg(mode)
            .args(files)
            .env("TERN_UNTIL", UNTIL)
            .env("TERN_SLOWEST", MAX_CALL_SECONDS);
        let running = Running::start(&mut command, false)?;
        running.await_output("opened")?;
        Ok(Self { cluster, running })
    }

    /// Ends it.
    ///
    /// # Errors
    /// If a call of the relative took too long.
    pub fn finish(mut self) -> Result<()> {
        self.cluster.touch(UNTIL)?;
        let outcome = self.running.finish(Duration::from_secs(60))?;
        ensure!(outcome.status == 0 && outcome.out.ends_with(b"PASS\n"), "{outcome:?}");
        Ok(())
    }
}
